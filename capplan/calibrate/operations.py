"""The operations of a step, timed: inside of it on a CPU, one by one over rotated data on a GPU.

A CUDA graph holds no timer, and launching kernels one by one measures the launches. Inside of a step an
operation's data is as cold as it is in a model. One by one, weights and KV caches are rotated over several
times the processor's cache; what the small kernels read, the operation before has just written.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from capplan.calibrate.clock import Clock, CpuClock, Timing
from capplan.calibrate.loop import DecodeLoop
from capplan.calibrate.weights import Matrix, rotated

if TYPE_CHECKING:
    from torch import Tensor

    from capplan.kernels.split_k import SplitKWorkspace

MOST_PASSES = 4


class Stopwatch:
    """Times the operations of a step by name: a loop's `watch`."""

    def __init__(self, clock: CpuClock) -> None:
        self.own_time = clock.own_time
        self.samples: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run it, and keep its wall and thread-CPU time."""
        wall, own = time.perf_counter(), time.thread_time()
        made = run(*arguments)
        own = time.thread_time() - own
        self.samples.setdefault(name, []).append((time.perf_counter() - wall, own))
        return made

    def timings(self) -> Iterator[tuple[str, Timing]]:
        """One timing a name."""
        for name, pairs in self.samples.items():
            wall, own = zip(*pairs, strict=True)
            yield name, Timing(samples=own if self.own_time else wall, cpu=own)


def timed(
    loop: DecodeLoop, clock: Clock, *, step_s: float, op_s: float, cold_bytes: int = 0
) -> dict[str, Timing]:
    """Every operation of the loop's step, or of its prompt without the head, by name.

    `step_s`: how long steps are watched; `op_s`: how long an operation by itself is timed, over weights of
    `cold_bytes` and the loop's caches.
    """
    if isinstance(clock, CpuClock):
        return _inside(loop, clock, step_s)
    return dict(_alone(loop, clock, op_s, cold_bytes))


def product(
    matrices: list[Matrix],
    rows: int,
    clock: Clock,
    *,
    seconds: float,
    least: int = 2,
    workspace: "SplitKWorkspace | None" = None,
) -> Timing:
    """A product of so many rows of random values, with one of the matrices after another."""
    import torch

    device = matrices[0].tensors()[0].device
    x = torch.randn(rows, matrices[0].k, device=device).to(torch.bfloat16)
    call = partial(_product, matrices, x, workspace)
    return clock.time(call, seconds=seconds, least=least, rotation=len(matrices))


def _inside(loop: DecodeLoop, clock: CpuClock, seconds: float) -> dict[str, Timing]:
    watch = Stopwatch(clock)
    loop.watch = watch
    try:
        begun = time.perf_counter()
        for _ in range(1 if loop.prompt else MOST_PASSES):
            loop.hidden_state() if loop.prompt else loop.step()
            if time.perf_counter() - begun > seconds:
                break
    finally:
        loop.watch = DecodeLoop.unwatched
    return dict(watch.timings())


def _alone(loop: DecodeLoop, clock: Clock, seconds: float, cold_bytes: int) -> Iterator[tuple[str, Timing]]:
    import torch

    from capplan.kernels.greedy_sampling import greedy_sampling
    from capplan.kernels.silu_mul import silu_mul

    rows, shape = len(loop.tokens), loop.shape
    for name, matrices in loop.products():
        if name == "lm_head" and loop.prompt:
            continue
        sets = rotated(matrices, cold_bytes)
        yield name, product(sets, rows, clock, seconds=seconds, workspace=loop.workspace)
    x = torch.randn(rows, shape.hidden, device=loop.device).to(torch.bfloat16)
    nothing = torch.zeros_like(x)
    qkv, gate_up = loop.layers[0]["qkv"](x), loop.layers[0]["gate_up"](x)
    query = loop.rotated(qkv, 0)
    caches = 1 if loop.prompt else len(loop.caches)
    yield "attention", clock.time(lambda i: loop.attention(query, i), seconds=seconds, rotation=caches)
    calls: dict[str, Callable[[int], object]] = {
        "rope and cache": lambda i: loop.rotated(qkv, i),
        "norm": lambda i: loop.normed(nothing, x),
        "activation": lambda i: silu_mul(gate_up),
        "embedding": lambda i: loop.embedded(),
    }
    if not loop.prompt:
        logits = loop.head(x)
        calls["sampling"] = lambda i: greedy_sampling(logits)
    for name, call in calls.items():
        yield name, clock.time(call, seconds=seconds)


def _product(matrices: list[Matrix], x: "Tensor", workspace: "SplitKWorkspace | None", number: int) -> object:
    """A product with the next of some matrices."""
    return matrices[number % len(matrices)](x, workspace)
