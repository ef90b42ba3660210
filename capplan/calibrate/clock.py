"""How long an operation takes: wall or thread-CPU time on a CPU, replayed graphs on a GPU.

Every timing is a median with P10 and P90 over repeats, the first call discarded. A canary, a fixed
operation timed before and after every point, says whether the machine itself moved meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from capplan.formulas.latency import percentile

Call = Callable[[int], object]
"""The operation, told how often it has run, so that it can rotate its buffers."""

CANARY_LIMIT: Final = 0.10
"""A point is void where the canary moved further."""
LEAST_SHARE: Final = 0.90
"""Share of the CPU below which others are using it."""
LEAST_REPEATS: Final = 2
CANARY_REPEATS: Final = 7
MOST_REPEATS: Final = 25
GRAPH_S: Final = 1e-3
"""A graph holds as many calls as take this long, so that an event's own jitter disappears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call, every sample. `cpu`: the thread's own time, None where a GPU did the work.

    `share`: CPU time that the process had of what its threads could have had meanwhile.
    """

    samples: tuple[float, ...]
    cpu: tuple[float, ...] | None = None
    share: float = 1.0

    @property
    def p10_s(self) -> float:
        """The 10th percentile."""
        return quantile(self.samples, 0.1)

    @property
    def p50_s(self) -> float:
        """The median."""
        return quantile(self.samples, 0.5)

    @property
    def p90_s(self) -> float:
        """The 90th percentile."""
        return quantile(self.samples, 0.9)

    @property
    def cpu_s(self) -> float | None:
        """Median of the thread's own time."""
        return None if self.cpu is None else quantile(self.cpu, 0.5)


class Clock(Protocol):
    """What a point is timed with."""

    @property
    def name(self) -> str:
        """As the calibration file names it."""
        ...

    def time(
        self,
        call: Call,
        *,
        seconds: float,
        least: int = LEAST_REPEATS,
        warm: bool = False,
        rotation: int = 1,
    ) -> Timing:
        """Time a call for about `seconds`, at least `least` times; `warm`: the same ran just before.

        `rotation`: buffers that the call goes through by its number, one a call.
        """
        ...


def quantile(values: Sequence[float], share: float) -> float:
    """A quantile, on the line between neighbours."""
    return percentile(values=values, percent=100 * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """Wall clock, or the calling thread's own CPU time: that of one thread on a machine others use too."""

    threads: int
    own_time: bool = False

    @property
    def name(self) -> str:
        """ "wall" or "thread-cpu"."""
        return "thread-cpu" if self.own_time else "wall"

    def time(
        self,
        call: Call,
        *,
        seconds: float,
        least: int = LEAST_REPEATS,
        warm: bool = False,
        rotation: int = 1,
    ) -> Timing:
        """Repeat until `seconds` have passed; unless warm, the first call does not count."""
        if not warm:
            call(0)
        wall: list[float] = []
        cpu: list[float] = []
        whole = time.process_time()
        end = time.perf_counter() + seconds
        while len(wall) < least or (time.perf_counter() < end and len(wall) < MOST_REPEATS):
            before, own = time.perf_counter(), time.thread_time()
            call(len(wall) + 1)
            cpu.append(time.thread_time() - own)
            wall.append(time.perf_counter() - before)
        share = (time.process_time() - whole) / (sum(wall) * self.threads) if sum(wall) else 1.0
        return Timing(samples=tuple(cpu if self.own_time else wall), cpu=tuple(cpu), share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A captured CUDA graph: `replay` queues `calls` calls."""

    replay: Callable[[], object]
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClock:
    """Events around the replay of a CUDA graph that holds the call some times over."""

    device: Any
    name: str = "cuda-graph-events"

    def time(
        self,
        call: Call,
        *,
        seconds: float,
        least: int = LEAST_REPEATS,
        warm: bool = False,
        rotation: int = 1,
    ) -> Timing:
        """Capture, replay until `seconds` have passed; the first replay only warms up."""
        graph = self.capture(call, rotation)
        graph.replay()
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while len(samples) < least or (time.perf_counter() < end and len(samples) < MOST_REPEATS):
            samples.append(self._elapsed(graph.replay) / graph.calls)
        return Timing(samples=tuple(samples))

    def capture(self, call: Call, rotation: int = 1) -> Graph:
        """A graph of as many calls as take GRAPH_S, a whole number of rotations: each starts at 0."""
        import torch

        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call,unused-ignore]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for number in range(3):  # Triton compiles here, and cuBLAS allocates
                call(number)
            once = self._elapsed(lambda: call(0))
        torch.cuda.current_stream(self.device).wait_stream(stream)
        calls = rotation * max(1, round(GRAPH_S / max(once, 1e-6) / rotation))
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(calls):
                call(number)
        return Graph(replay=graph.replay, calls=calls)

    def replayed(self, graph: Graph, seconds: float) -> int:
        """Replay for some seconds, each to its end; → the calls that this made."""
        made, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._elapsed(graph.replay)
            made += graph.calls
        return made

    def _elapsed(self, call: Callable[[], object]) -> float:
        """Seconds between two events around a call."""
        import torch

        events: Any = torch.cuda.Event
        first, last = (events(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class Canary:
    """A fixed operation timed again and again: how far does the machine move while others are measured?"""

    def __init__(self, clock: Clock, call: Call) -> None:
        self.clock, self.call = clock, call
        # The very first timings are slow whatever is timed: they are not among the readings.
        for _ in range(2):
            clock.time(call, seconds=0.02)
        self.readings: list[float] = []
        for _ in range(5):
            self.moved()

    def moved(self) -> float:
        """Time it once more: how far it is from the median of all readings, as a share.

        Its threads are never idle: on the wall clock, CPU time that others had counts as movement too.
        """
        made = self.clock.time(self.call, seconds=0.01, least=CANARY_REPEATS)
        self.readings.append(made.p50_s)
        off = abs(made.p50_s / self.reference_s - 1)
        return max(off, 1 - made.share) if self.clock.name == "wall" else off

    @property
    def reference_s(self) -> float:
        """Median of all readings."""
        return quantile(self.readings, 0.5)

    @property
    def spread(self) -> float:
        """P90 − P10 of the readings over their median."""
        return (quantile(self.readings, 0.9) - quantile(self.readings, 0.1)) / self.reference_s


def cpu_share(call: Call, *, threads: int, seconds: float = 1.0) -> float:
    """Share of the CPU that `threads` of this process get, in a call that keeps all of them busy.

    1 on an idle machine; half where others run as many threads on the same CPUs.
    """
    wall, cpu, number = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < wall + seconds:
        call(number)
        number += 1
    return (time.process_time() - cpu) / ((time.perf_counter() - wall) * threads)
