"""What a simulation is put together from: arrivals, schedulers, step times and records."""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request, Workload

Scheduler = Callable[[Replica], Step]


class StepTimes(Protocol):
    """How long steps take."""

    def step_s(self, step: Step) -> float:
        """One step."""
        ...

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        """Decode-only steps in a row, `most` at most, until `until_s` have passed: (steps, seconds).

        The contexts grow by a token a sequence and step. At least one step.
        """
        ...


def steps_until_seen(
    times: StepTimes, decoding: int, kv_tokens: int, most: int, until_s: float, ahead: int
) -> tuple[int, float]:
    """Steps in a row until a request that comes after `until_s` is seen, `most` at most: (steps, seconds).

    It is seen after the step under way when it comes; where steps are decided one ahead, after the next one.
    """
    count, took = times.steps_s(decoding, kv_tokens, most, until_s)
    if ahead == 1 and count < most:
        one, more = times.steps_s(decoding, kv_tokens + count * decoding, 1, math.inf)
        return count + one, took + more
    return count, took


class Recorder(Protocol):
    """What is kept of a simulation."""

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """`count` steps alike have passed; called after the finished requests left the replica."""
        ...

    def rejected(self, request: Request, now_s: float) -> None:
        """A request that could never be served."""
        ...


class Arrivals:
    """A workload's requests in order of arrival, those that answers bring about among them."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._stream: Iterator[Request] = workload.arrivals()
        self._later: list[tuple[float, int, Request]] = []
        self._next = next(self._stream, None)
        self.next_s = self._when()

    def _when(self) -> float:
        streamed = math.inf if self._next is None else self._next.arrival_s
        return min(streamed, self._later[0][0]) if self._later else streamed

    def pop(self) -> Request:
        """The next request."""
        found = self._next
        if found is None or (self._later and self._later[0][0] < found.arrival_s):
            found = heapq.heappop(self._later)[2]
        else:
            self._next = next(self._stream, None)
        self.next_s = self._when()
        return found

    def enter(self, replica: Replica, request: Request, recorder: Recorder, now_s: float) -> None:
        """A request waits at the replica, or is rejected where it could never fit."""
        replica.last_call = False
        if replica.fits(request):
            replica.enqueue(request)
        else:
            recorder.rejected(request, now_s)
            self.answered(request, now_s)

    def answered(self, request: Request, now_s: float) -> None:
        """A request is through: what it brings about will arrive."""
        following = self.workload.after(request, now_s)
        if following is not None:
            heapq.heappush(self._later, (following.arrival_s, following.index, following))
            self.next_s = self._when()
