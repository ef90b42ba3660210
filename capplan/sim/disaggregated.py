"""Disaggregated serving: one replica computes prompts, another decodes, the KV cache moves over a link.

    transfer = latency + prompt · kv_bytes_per_token / rate, one after another over the link

A request's memory on the prefill replica is free when its KV has left; on the decode replica it is taken when
the scheduler there lets the request in. KV that arrives where there is no room waits outside, as in the host
memory of a transfer buffer; the engines' own handshakes are not modelled. Thrown out while it decodes, a
request is computed again where it is.
"""

import heapq
import math
from dataclasses import dataclass

from capplan.sim.flow import Arrivals, Recorder, Scheduler, StepTimes
from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between the two replicas: rate in bytes/s, latency in s, and the KV bytes of a token."""

    bytes_per_s: float
    latency_s: float
    kv_bytes_per_token: float

    def moving_s(self, tokens: int) -> float:
        """Time that so many tokens' KV keeps the link busy."""
        return tokens * self.kv_bytes_per_token / self.bytes_per_s


class Transfers:
    """What moved over the link: who, and how long from the prompt's end until its KV was there.

    `busy_s` is the link's time; `moved` has (arrival of the request, seconds) of each, `under_way` yet.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.under_way = 0
        self.moved: list[tuple[float, float]] = []


class Stage:
    """A replica with what drives it; `end_s` is when the step under way ends, inf while idle.

    Requests that `come` meanwhile are seen after it.
    """

    def __init__(self, replica: Replica, scheduler: Scheduler, times: StepTimes, recorder: Recorder) -> None:
        self.replica, self.scheduler, self.times, self.recorder = replica, scheduler, times, recorder
        self.come: list[Request] = []
        self.end_s = math.inf
        self._start_s = 0.0
        self._count = 1
        self._step = Step()

    @property
    def under_way(self) -> int:
        """Requests that wait or run here."""
        return len(self.come) + len(self.replica.waiting) + len(self.replica.running)

    def begin(self, now_s: float, until_s: float) -> None:
        """The next step, if there is one; steps alike until a newcomer could be let in at `until_s`."""
        for request in self.come:
            self.replica.enqueue(request)
        self.come.clear()
        step = self.scheduler(self.replica)
        if not step.decoding and not step.chunks:
            return
        count, load = 1, step.padded()
        if step.steady and self.replica.leaps:
            until = until_s - now_s if step.open else math.inf
            most = self.replica.steady_steps()
            count, took = self.times.steps_s(load.decoding, load.kv_tokens, most, until)
        else:
            took = self.times.step_s(load)
        self._step, self._count, self._start_s, self.end_s = step, count, now_s, now_s + took

    def finish(self) -> list[Request]:
        """The step under way is through; those that leave the replica."""
        end_s, self.end_s = self.end_s, math.inf
        done = self.replica.finish(self._step, self._count, end_s, self._start_s)
        over = [request for request in done if request.made_tokens == request.output_tokens]
        self.recorder.steps(self.replica, self._step, self._count, self._start_s, end_s, over)
        return done


def run(
    *, workload: Workload, prefill: Stage, decode: Stage, link: Link, transfers: Transfers | None = None
) -> float:
    """Serve the whole workload; when the last step ended. Refused is what either replica could never hold."""
    transfers = transfers or Transfers()
    prefill.replica.prompts_only = True
    arrivals = Arrivals(workload)
    moving: list[tuple[float, int, Request]] = []
    now_s = link_free_s = ended_s = 0.0
    while True:
        while arrivals.next_s <= now_s:
            request = arrivals.pop()
            if prefill.replica.fits(request) and decode.replica.fits(request):
                prefill.come.append(request)
            else:
                prefill.recorder.rejected(request, now_s)
                arrivals.answered(request, now_s)
        while moving and moving[0][0] <= now_s:
            request = heapq.heappop(moving)[2]
            transfers.under_way -= 1
            prefill.replica.let_go(request)
            decode.come.append(request)
        if prefill.end_s == math.inf:
            prefill.begin(now_s, arrivals.next_s)
        soonest_s = moving[0][0] if moving else math.inf
        if decode.end_s == math.inf:
            # No KV can come before the prompts under way, or those still to come, are computed.
            decode.begin(now_s, min(soonest_s, prefill.end_s, arrivals.next_s))
        now_s = min(arrivals.next_s, soonest_s, prefill.end_s, decode.end_s)
        if now_s == math.inf:
            return ended_s
        if prefill.end_s == now_s:
            ended_s = now_s
            for request in prefill.finish():
                if request.made_tokens == request.output_tokens:
                    prefill.replica.let_go(request)
                    arrivals.answered(request, now_s)
                    continue
                moving_s = link.moving_s(request.prompt_tokens)
                link_free_s = max(now_s, link_free_s) + moving_s
                there_s = link_free_s + link.latency_s
                transfers.busy_s += moving_s
                transfers.under_way += 1
                transfers.moved.append((request.arrival_s, there_s - now_s))
                heapq.heappush(moving, (there_s, request.index, request))
        if decode.end_s == now_s:
            ended_s = now_s
            for request in decode.finish():
                arrivals.answered(request, now_s)
