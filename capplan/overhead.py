"""Memory beside weights and KV cache where no engine is asked for: given, measured, or a rule of thumb."""

from pathlib import Path
from typing import Final

from capplan.capacity import Overhead
from capplan.errors import InputError
from capplan.formulas import memory

OVERHEAD_LOW: Final = 0.15
OVERHEAD_HIGH: Final = 0.20


def overhead_of(
    weights: int,
    *,
    overhead_bytes: int | None = None,
    overhead_fraction: float | None = None,
    calibration: str | Path | None = None,
) -> Overhead:
    """The overhead of one rank that holds `weights` bytes: the first that is given, else the rule of thumb.

    Errors: InputError for a size and a calibration, and for a file that is none.
    """
    if calibration is not None:
        if overhead_bytes is not None or overhead_fraction is not None:
            raise InputError(
                "an overhead is given twice", where="--overhead, --calibration", hint="give one of them"
            )
        from capplan import memory_calibration  # only where a file is given

        found = memory_calibration.read(calibration)
        size = found.overhead_bytes
        return Overhead(
            low_bytes=size, high_bytes=size, rule=f"measured: {found.label}", named=dict(found.terms)
        )
    if overhead_bytes is not None:
        return Overhead(low_bytes=overhead_bytes, high_bytes=overhead_bytes, rule="given")
    low, high, rule = OVERHEAD_LOW, OVERHEAD_HIGH, "rule of thumb, 15–20 % of weights"
    if overhead_fraction is not None:
        low = high = overhead_fraction
        rule = f"given, {low:.3g} × weights"
    return Overhead(
        low_bytes=round(memory.overhead_bytes(weight_bytes=weights, fraction=low)),
        high_bytes=round(memory.overhead_bytes(weight_bytes=weights, fraction=high)),
        rule=rule,
    )
