"""What bounds a step: its operations' times by what they wait for."""

from collections.abc import Sequence
from typing import Final

from capplan.op_costs import Rates
from capplan.step import OpTime

HBM: Final = "HBM bandwidth"
COMPUTE: Final = "compute"
LINK: Final = "interconnect"
LAUNCH: Final = "launch and CPU"
KV: Final = "KV capacity"


def shares(ops: Sequence[OpTime], rates: Rates) -> dict[str, float]:
    """Part of the step's time that each limit accounts for; the parts sum to 1.

    An operation's time goes to what bounds it, up to four times its bound: a kernel slower than that is too
    small to fill the GPU, and waits for launches like the engine itself.
    """
    found = dict.fromkeys((HBM, COMPUTE, LINK, LAUNCH), 0.0)
    for op in ops:
        if op.kind == "collective":
            found[LINK] += op.time_s
        elif op.kind == "host" or not op.bound_s:
            found[LAUNCH] += op.time_s
        else:
            limit = HBM if op.bytes / rates.bytes_per_s >= op.flop / rates.flop_per_s(op.dtype) else COMPUTE
            full = min(op.time_s, 4 * op.bound_s)
            found[limit] += full
            found[LAUNCH] += op.time_s - full
    total = sum(found.values())
    return {name: time / total for name, time in found.items()} if total else found


def regime(ops: Sequence[OpTime], rates: Rates) -> str:
    """ "memory-bound" or "compute-bound": which limit's bounds add up to more."""
    memory = sum(op.bytes / rates.bytes_per_s for op in ops if op.kind != "collective")
    compute = sum(op.flop / rates.flop_per_s(op.dtype) for op in ops)
    return "memory-bound" if memory >= compute else "compute-bound"
