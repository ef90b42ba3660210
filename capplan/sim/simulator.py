"""The simulation: arrivals, steps of one replica, and what they leave behind.

Time passes from one step's end to the next. Where nothing but decoding goes on, many steps alike are taken
at once, up to the next arrival that would be let in, the next request that ends, or the last free block.
"""

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

    def answered(self, request: Request, now_s: float) -> None:
        """A request is through: what it brings about will arrive."""
        following = self.workload.after(request, now_s)
        if following is not None:
            heapq.heappush(self._later, (following.arrival_s, following.index, following))
            self.next_s = self._when()


def run(
    *, workload: Workload, replica: Replica, scheduler: Scheduler, times: StepTimes, recorder: Recorder
) -> float:
    """Serve the whole workload; the time at which the last step ended.

    Requests that could never fit are rejected when they arrive.
    """
    arrivals = Arrivals(workload)
    waiting = replica.waiting
    now: float = 0
    while True:
        while arrivals.next_s <= now:
            request = arrivals.pop()
            replica.last_call = False
            if replica.fits(request):
                replica.enqueue(request)
            else:
                recorder.rejected(request, now)
                arrivals.answered(request, now)
        step = scheduler(replica)
        if not (step.decoding or step.chunks):
            if arrivals.next_s < math.inf:
                now = max(now, arrivals.next_s)
            elif waiting and not replica.last_call:
                replica.last_call = True
            else:
                return now
            continue
        count, load = 1, step if step.padding is None else step.padded()
        if step.steady and replica.leaps:
            until = arrivals.next_s - now if step.open else math.inf
            count, took = times.steps_s(load.decoding, load.kv_tokens, replica.steady_steps(), until)
        else:
            took = times.step_s(load)
        start, now = now, now + took
        done = replica.finish(step, count, now, start)
        recorder.steps(replica, step, count, start, now, done)
        for request in done:
            arrivals.answered(request, now)
