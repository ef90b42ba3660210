"""What to profile: the question, the clock it is timed with, the kernels that its formats run as."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import PurePath

from capplan.calibrate.clock import LEAST_SHARE, CpuClock, cpu_share
from capplan.errors import InputError
from capplan.specs import Format
from capplan.work import kernel_dtype

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileQuestion:
    """What to profile, and for how long. `launched`: by torchrun, whose processes share the collectives."""

    model: str
    formats: tuple[str, ...]
    kv_dtypes: tuple[str, ...] = ("bf16",)
    budget_s: float = 180.0
    quick: bool = False
    general: bool = False
    device: str | None = None
    ranks: int = 1
    threads: int | None = None
    clock: str = "auto"
    seed: int = 0
    launched: bool = False

    @property
    def model_label(self) -> str:
        """The model as a file names it: a catalog's name, or the last part of a path, never the path."""
        return PurePath(self.model).name if os.sep in self.model else self.model


def cpu_clock(question: ProfileQuestion, available: int, say: Say) -> tuple[CpuClock, float]:
    """Wall clock on all threads; one thread's own time where others use this CPU and no clock was named.

    Errors: InputError for an unknown clock, or own time of several threads.
    """
    import torch

    if question.clock not in ("auto", "wall", "thread-cpu"):
        raise InputError(f"no clock {question.clock!r}", where="--clock", hint="auto, wall or thread-cpu")
    if question.threads is not None and not 1 <= question.threads <= available:
        raise InputError(f"{question.threads} threads", where="--threads", hint=f"1 to {available}")
    # Of all threads at once: one alone would not see a neighbour on the other CPUs.
    tried = question.threads or available
    torch.set_num_threads(tried)
    a = torch.ones(1024, 1024)
    share = cpu_share(lambda i: a @ a, threads=tried)
    own = question.clock == "thread-cpu" or (question.clock == "auto" and share < LEAST_SHARE)
    if own and (question.threads or 1) > 1:
        raise InputError(
            "thread-CPU time is one thread's", where="--clock, --threads", hint="--threads 1, or --clock wall"
        )
    threads = question.threads or (1 if own else available)
    if own and question.clock == "auto":
        say(
            f"others use this CPU (its threads get {share:.0%} of it): one thread, timed by its own CPU "
            "time; --clock wall on an idle machine"
        )
    torch.set_num_threads(threads)
    return CpuClock(threads=threads, own_time=own), share


def runs_as(stored: Format, arithmetic: Collection[str]) -> str:
    """The kernel dtype that a weight format runs as on a device with this arithmetic.

    Errors: InputError for a format without a kernel here.
    """
    dtype = kernel_dtype(stored)
    if dtype == "int8" and "int8" not in arithmetic:
        return "w8a16"  # without 8-bit products the weights are widened instead
    if dtype == "fp8" and "fp8" not in arithmetic:
        raise InputError(
            f"this device multiplies no FP8 ({stored.id})", where="--formats", hint="leave fp8 out"
        )
    if dtype not in ("bf16", "int8", "w8a16", "w4a16", "fp8"):
        raise InputError(
            f"no bundled kernel multiplies {stored.id}", where="--formats", hint="bf16, int8, int4, fp8"
        )
    return dtype
