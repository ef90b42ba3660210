"""What a profile's file may hold: numbers that are numbers, tables that rise, words that are harmless.

Nothing in a file is taken on trust: it may be cut short, edited by hand, or come from a stranger.
"""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from capplan.errors import InputError, shown

LOCAL: Final = "local"
HINT: Final = "profile again, or give another file"
CLOCKS: Final = {"cpu": ("wall", "thread-cpu"), "gpu": ("cuda-graph-events",)}
"""Kind of device → the clocks that time it."""
RUN: Final = (
    "started", "seconds", "model", "formats", "clock", "threads", "seed", "canary_spread", "cpu_share",
    "assumed",
)  # fmt: skip
RUN_NUMBERS: Final = ("seconds", "threads", "seed", "canary_spread", "cpu_share")
MOST: Final = 1e15
"""No fitted number is larger: a time, a rate or a factor beyond it is a slip, and products of it overflow."""
MOST_RATE: Final = 1e21
# Ids become file names; words are printed.
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}", re.ASCII)
_LONGEST: Final = 120


def identity(found: Any, name: str, where: str) -> str:
    """An id that is safe as a file's name. Raises InputError."""
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise InputError(f"{name} is {shown(found)}, no id", where=where, hint=HINT)
    return found


def word(found: Any, name: str, where: str) -> str:
    """Text of one short printable line. Raises InputError."""
    if not isinstance(found, str) or not found.isprintable() or not 1 <= len(found) <= _LONGEST:
        raise InputError(f"{name} is {shown(found)}, no plain text", where=where, hint=HINT)
    return found


def run(found: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse a run whose parts are of another kind, or that was timed by another kind of device's clock."""
    unknown = sorted(set(map(str, found)) - set(RUN))
    if unknown:
        raise InputError(f"unknown key run.{shown(unknown[0])}", where=where, hint=f"one of {', '.join(RUN)}")
    for name in ("started", "model", "clock"):
        if name in found:
            word(found[name], f"run.{name}", where)
    if {"/", "\\"} & set(found.get("model", "")):
        raise InputError(f"run.model is {shown(found['model'])}, a path", where=where, hint=HINT)
    try:
        datetime.fromisoformat(str(found.get("started", "2026-01-01")))
    except ValueError:
        raise InputError(f"run.started is {shown(found['started'])}", where=where, hint=HINT) from None
    formats = found.get("formats", {})
    if not isinstance(formats, Mapping):
        raise InputError("run.formats is no mapping", where=where, hint=HINT)
    for name, dtype in formats.items():
        word(name, "a name in run.formats", where)
        word(dtype, f"run.formats.{name}", where)
    clock = found.get("clock", CLOCKS[kind][0])
    if clock not in CLOCKS[kind]:
        raise InputError(
            f"run.clock is {shown(clock)}, which times no {kind.upper()}", where=where, hint=HINT
        )
    numbers({name: found[name] for name in RUN_NUMBERS if name in found}, "run", where)
    told(found.get("assumed"), "run.assumed", where)


def told(found: Any, name: str, where: str) -> None:
    """Refuse what is not said in short words, numbers, and lists or mappings of them."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            told(value, f"{name}.{word(key, f'a name in {name}', where)}", where)
    elif isinstance(found, list):
        for value in found:
            told(value, name, where)
    elif isinstance(found, str):
        word(found, name, where)
    elif found is not None and not isinstance(found, bool):
        numbers(found, name, where)


def state(found: Mapping[str, Any], where: str) -> None:
    """Refuse a state whose figures are not three numbers each, or whose words are no words."""
    told(found, "state", where)
    for name, value in found.items():
        of_three = isinstance(value, list) and len(value) == 3 and all(_is_number(one) for one in value)
        fits = {
            "slowed_by": isinstance(value, list) and all(isinstance(one, str) for one in value),
            "power_capped": _is_number(value),
            "processes": _is_number(value),
            "idle": isinstance(value, Mapping) and all(_is_number(one) for one in value.values()),
            "ecc": isinstance(value, bool),
        }
        if not fits.get(name, of_three):
            raise InputError(f"state.{name} is {shown(value)}", where=where, hint=HINT)


def ranges(found: Mapping[str, Any], where: str) -> None:
    """Refuse a validity that is not least and most of every name."""
    numbers(found, "validity", where)
    for name, value in found.items():
        if not isinstance(value, list) or len(value) != 2 or value[0] > value[1]:
            raise InputError(f"validity.{name} is {shown(value)}", where=where, hint=HINT)


def _is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)


def numbers(found: Any, name: str, where: str, most: float = MOST) -> None:
    """Refuse anything in a tree of mappings and lists that is no finite number from 0 to `most`."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            numbers(value, f"{name}.{key}", where, most)
    elif isinstance(found, list):
        for value in found:
            numbers(value, name, where, most)
    elif not _is_number(found):
        raise InputError(f"{name} is {shown(found)}", where=where, hint=HINT)
    elif not (math.isfinite(found) and 0 <= found <= most):
        raise InputError(f"{name} is {found}", where=where, hint=HINT)


_SMALL_FORM: Final = ("t0_us", "memory", "p", "cache_reach", "cache_speed")
_DECODE_FORM: Final = (*_SMALL_FORM, "chain_us", "serial_ns", "tile_us", "compute")
_LINK: Final = ("t0_us", "memory", "p", "link_bytes_per_s")
# Operation → the parts of one dtype's numbers, and what each must hold.
_PARTS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "gemm": {"shapes": (), "affine": ("m", "fixed_us", "weight_ns")},
    "decode_attention": {
        "shape": ("heads", "kv_heads", "k_width", "v_width"),
        "table": ("batch", "fixed_us", "token_ns"),
        "general": _DECODE_FORM,
    },
    "prefill_attention": {"": ("width", "fixed_us", "token_ns", "pair_ns")},
    "elementwise": {"named": (), "general": _SMALL_FORM},
    "anchors": {"": ("gemm", "attention", "layer_us", "step_us")},
    "all_reduce": {"": _LINK},
    "all_gather": {"": _LINK},
    "send": {"": _LINK},
}
_POSITIVE: Final = ("memory", "compute", "p", "width", "link_bytes_per_s", "cache_speed", "heads", "kv_heads")
"""Numbers that a time is divided by."""


def complete(operation: str, found: Any, where: str) -> None:
    """Refuse an operation without the numbers that its prediction reads."""
    if operation not in _PARTS or not isinstance(found, Mapping):
        raise InputError(f"fit.{operation} is not known", where=where, hint=HINT)
    entries: list[tuple[str, Any]] = []
    for key, value in found.items():
        by_local = value if operation == "anchors" or key == LOCAL else _under(value, LOCAL)
        one_by_rank = key == LOCAL and isinstance(by_local, Mapping)
        entries += list(by_local.items()) if one_by_rank else [(str(key), by_local)]
    for key, entry in entries:
        for part, names in _PARTS[operation].items():
            place = f"fit.{operation}.{key}" + (f".{part}" if part else "")
            held = _under(entry, part) if part else entry
            if not isinstance(held, Mapping):
                raise InputError(f"no {place}", where=where, hint=HINT)
            for name in names:
                if name not in held or (name in _POSITIVE and not held[name]):
                    raise InputError(f"no {place}.{name}", where=where, hint=HINT)
            if not names:
                axis = "m" if operation == "gemm" else "bytes"
                for row, table in held.items():
                    if not isinstance(_under(table, axis), list) or not isinstance(_under(table, "us"), list):
                        raise InputError(f"no table {place}.{row}", where=where, hint=HINT)


def _under(found: Any, name: str) -> Any:
    """What a mapping has under a name; None where there is none, or no mapping."""
    return found.get(name) if isinstance(found, Mapping) else None


def errors(found: Mapping[str, Any], where: str) -> None:
    """Refuse errors without the quantiles that a band is made of."""
    for kind in ("step", "prompt"):
        by_dtype = found.get(kind, {})
        if not isinstance(by_dtype, Mapping):
            raise InputError(f"error.{kind} is no mapping", where=where, hint=HINT)
        for dtype, error in by_dtype.items():
            for name in ("p10", "p50", "p90", "rows", "median_pct"):
                value = _under(error, name)
                if not _is_number(value) or not 0 <= value < 1e6:
                    raise InputError(f"error.{kind}.{dtype}.{name} is {shown(value)}", where=where, hint=HINT)
            if not (error["p10"] and error["p90"] and error["rows"]):
                raise InputError(f"error.{kind}.{dtype} has a 0", where=where, hint=HINT)


# The axis of a table, by the name that its lists stand under.
_AXES: Final = ("m", "bytes", "batch")


def tables(found: Any, name: str, where: str) -> None:
    """Refuse tables whose axis does not rise, whose lists differ in length, or that fall."""
    if not isinstance(found, Mapping):
        return
    axis = next((one for one in _AXES if isinstance(found.get(one), list)), None)
    if axis is None:
        for key, value in found.items():
            tables(value, f"{name}.{key}", where)
        return
    steps: Sequence[float] = found[axis]
    if not steps or any(b <= a for a, b in pairwise(steps)):
        raise InputError(f"{name}.{axis} does not rise", where=where, hint=HINT)
    for key, values in found.items():
        if not isinstance(values, list) or len(values) != len(steps):
            raise InputError(f"{name}.{key} has not as many values as {axis}", where=where, hint=HINT)
        if any(b < a for a, b in pairwise(values)):
            raise InputError(f"{name}.{key} falls", where=where, hint=HINT)
