"""The simulation: arrivals, steps of one replica, and what they leave behind.

Time passes from one step's end to the next. Where nothing but decoding goes on, many steps alike are taken
at once, up to the next arrival that would be let in, the next request that ends, or the last free block.
"""

import math
from typing import Final

from capplan.errors import DoesNotFitError
from capplan.sim.coasting import Coasting, can_coast
from capplan.sim.flow import Arrivals, Recorder, Scheduler, StepTimes, steps_until_seen
from capplan.sim.looks import Looking, Looks
from capplan.sim.replica import Replica
from capplan.sim.request import Request, Workload
from capplan.sim.schedulers.vllm_v1 import vllm_v1

MOST_PREEMPTIONS: Final = 10_000
"""Of one request: by priority and without reservation two prompts can throw each other out for ever."""


def run(
    *,
    workload: Workload,
    replica: Replica,
    scheduler: Scheduler,
    times: StepTimes,
    recorder: Recorder,
    looking: Looking | None = None,
    coast: bool = True,
) -> float:
    """Serve the whole workload; the time at which the last step ended.

    Requests that could never fit are rejected when they arrive. `coast`: where nothing need be decided, do
    not ask the scheduler, if it is one whose steps are then known. `looking` None: a step has every request
    that came before it.
    """
    arrivals = Arrivals(workload)
    looks = None if looking is None else Looks(looking)
    waiting = replica.waiting
    now: float = 0
    ahead = looking.steps_ahead if looking is not None and looking.poll_steps == 1 else 0
    coast = coast and scheduler is vllm_v1 and type(replica) is Replica
    while True:
        seen_s = now if looks is None else looks.seen_s
        while arrivals.next_s <= seen_s:
            arrivals.enter(replica, arrivals.pop(), recorder, now)
        if coast and can_coast(replica, looking):
            now = Coasting(replica, arrivals, times, recorder, now, looks).run()
        step = scheduler(replica)
        if step.preempted and step.preempted[0].preemptions > MOST_PREEMPTIONS:
            raise _without_end(replica, step.preempted[0])
        if not (step.decoding or step.chunks):
            if step.preempted:
                # Who found no memory threw itself out: the others have not had their turn yet.
                step.kv_blocks = replica.blocks.used
                recorder.steps(replica, step, 1, now, now, [])
            elif arrivals.next_s < math.inf:
                now = max(now, arrivals.next_s)
                if looks is not None:
                    looks.idle(now)
            elif waiting and not replica.last_call:
                replica.last_call = True
            else:
                return now
            continue
        count, load = 1, step if step.padding is None else step.padded()
        if step.steady and replica.leaps:
            most, until = replica.steady_steps(), arrivals.next_s - now if step.open else math.inf
            if looks is not None:
                most, until = looks.leap(most, until)
            count, took = steps_until_seen(times, load.decoding, load.kv_tokens, most, until, ahead)
        else:
            took = times.step_s(load)
        start, now = now, now + took
        if looks is not None:
            looks.passed(step, count, start, now)
        done = replica.finish(step, count, now, start)
        recorder.steps(replica, step, count, start, now, done)
        for request in done:
            arrivals.answered(request, now)


def _without_end(replica: Replica, request: Request) -> DoesNotFitError:
    """Nobody gets on: what a user must know."""
    return DoesNotFitError(
        f"request {request.index} was thrown out {MOST_PREEMPTIONS:,} times: requests throw each other out",
        where=f"{replica.limits.kv_blocks:,} KV blocks, policy {replica.limits.policy}",
        hint="more KV blocks, or let prompts in only where all of them has room (reserve_full)",
    )
