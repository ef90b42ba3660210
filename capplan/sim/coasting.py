"""Stretches of a simulation in which nothing need be decided: steps taken without asking the scheduler.

While nobody waits and no prompt is cut, every step is known beforehand: all decode, and whoever has come is
let in with the whole prompt. Most of a run at moderate load is like that. The steps are those that vLLM's
scheduler would make (tests/sim/test_coasting.py), in a third of the time.
"""

import heapq
import math

from capplan.sim.flow import Arrivals, Recorder, StepTimes, steps_until_seen
from capplan.sim.kv_blocks import KvBlocks
from capplan.sim.looks import Looking, Looks
from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request


def can_coast(replica: Replica, looking: Looking | None = None) -> bool:
    """Whether nothing need be decided as long as only plain requests come and blocks suffice."""
    if looking is not None and (looking.steps_ahead > 1 or looking.poll_steps > 1):
        return False
    blocks, limits = replica.blocks, replica.limits
    return (
        replica.leaps
        and not replica.waiting
        and not replica.prefilling
        and replica.decoding == replica.sequences == len(replica.running)
        and isinstance(blocks, KvBlocks)
        and not blocks.remembers
        and limits.kv_groups == limits.queries == 1
        and not limits.limited_groups
        and not limits.long_prefill_token_threshold
    )


class Coasting:
    """One replica's state in local hands, until something must be decided."""

    def __init__(
        self,
        replica: Replica,
        arrivals: Arrivals,
        times: StepTimes,
        recorder: Recorder,
        now: float,
        looks: Looks | None = None,
    ) -> None:
        self.replica, self.arrivals, self.times, self.recorder = replica, arrivals, times, recorder
        self.now, self.looks = now, looks
        # Requests that came until then are known when the next step is decided.
        self.seen = now if looks is None else looks.seen_s
        self.ahead = 0 if looks is None else looks.looking.steps_ahead
        self.free = replica.blocks.free

    def run(self) -> float:
        """Take steps as long as nothing need be decided; the time at which the last of them ended."""
        arrivals = self.arrivals
        before = self.free
        try:
            while True:
                if arrivals.next_s <= self.seen:
                    if not self._prompts():
                        break
                elif self.replica.decoding:
                    if not self._decode():
                        break
                elif arrivals.next_s < math.inf:
                    self.now = self.seen = max(self.now, arrivals.next_s)
                else:
                    break
        finally:
            # While coasting only the count is kept; what is taken and given back is blank either way.
            blocks, taken = self.replica.blocks, before - self.free
            blocks.free = before
            if taken > 0:
                blocks.take(taken)
            elif taken:
                blocks.give_back(-taken)
            if self.looks is not None:
                self.looks.resume(self.seen)
        return self.now

    def _decode(self) -> bool:
        """Steps of decoding alone, to the next arrival or end; False where blocks may run short."""
        replica, limits = self.replica, self.replica.limits
        decoding, tick = replica.decoding, replica.tick
        ends = replica.ends
        while ends[0][2].end_tick != ends[0][0]:
            heapq.heappop(ends)
        most = ends[0][0] - tick
        if -(-most // limits.block_size) * decoding > self.free or decoding > limits.max_num_batched_tokens:
            return False
        closed = decoding >= limits.max_num_seqs or decoding >= limits.max_num_batched_tokens
        until = math.inf if closed else self.arrivals.next_s - self.now
        if until <= 0:
            # Somebody has come and is not seen yet: one step more.
            most, until = 1, math.inf
        step = Step()
        step.decoding, step.kv_tokens = decoding, replica.kv_tokens
        step.steady = True
        count, took = steps_until_seen(self.times, decoding, replica.kv_tokens, most, until, self.ahead)
        self.free -= _blocks(replica.phases, tick, count, limits.block_size, decoding)
        self._passed(step, count, took)
        return True

    def _prompts(self) -> bool:
        """A step with the prompts of those who have come; False, and they wait, where one is not plain."""
        replica, arrivals, limits = self.replica, self.arrivals, self.replica.limits
        came: list[Request] = []
        tokens = decoding = replica.decoding
        blocks = replica.phases[replica.tick % limits.block_size]
        plain = True
        while arrivals.next_s <= self.seen:
            request = arrivals.pop()
            came.append(request)
            tokens += request.prompt_tokens
            blocks += replica.blocks.blocks_for(request.prompt_tokens)
            plain = plain and (
                request.prompt_tokens + request.output_tokens <= replica.surely_fit
                and request.samples == 1
                and not request.segments
                and not request.computed_tokens
            )
        if (
            not plain
            or tokens > limits.max_num_batched_tokens
            or decoding + len(came) > limits.max_num_seqs
            or blocks + limits.spare_blocks > self.free
        ):
            for request in came:
                arrivals.enter(replica, request, self.recorder, self.now)
            return False
        step = Step()
        step.decoding, step.kv_tokens = decoding, replica.kv_tokens
        for request in came:
            step.add(request, request.prompt_tokens, 0)
            replica.running[request] = None
        replica.sequences += len(came)
        self.free -= blocks
        self._passed(step, 1, self.times.step_s(step))
        return True

    def _passed(self, step: Step, count: int, took: float) -> None:
        """A step, or `count` alike, is through: tokens are made, some requests are done."""
        replica, start = self.replica, self.now
        now = self.now = start + took
        self.seen = now - (now - start) / count if self.ahead else now
        size = replica.limits.block_size
        step.kv_blocks = replica.blocks.total - self.free
        step.made_tokens = step.decoding * count + len(step.chunks)
        tick = replica.tick = replica.tick + count
        replica.kv_tokens += step.decoding * count
        done: list[Request] = []
        ends = replica.ends
        while ends and ends[0][0] <= tick:
            ended, _, request = heapq.heappop(ends)
            if request.end_tick == ended:
                done.append(request)
                made = tick - request.since_tick
                replica.phases[(request.since_tick - request.computed_tokens) % size] -= 1
                request.computed_tokens += made
                request.made_tokens += made
                request.end_tick = 0
                replica.decoding -= 1
                replica.kv_tokens -= request.computed_tokens
        for request, prompt_tokens, _ in step.chunks:
            request.first_scheduled_s, request.first_token_s = start, now
            request.computed_tokens = prompt_tokens
            request.made_tokens = 1
            if request.output_tokens == 1:
                done.append(request)
                continue
            replica.decoding += 1
            replica.kv_tokens += prompt_tokens
            request.since_tick = tick
            replica.phases[(tick - prompt_tokens) % size] += 1
            request.end_tick = tick + request.output_tokens - 1
            replica.order += 1
            heapq.heappush(ends, (request.end_tick, replica.order, request))
        for request in done:
            request.done_s = now
            del replica.running[request]
            self.free += -(-request.computed_tokens // size)
        replica.sequences -= len(done)
        replica.blocks.free = self.free
        self.recorder.steps(replica, step, count, start, now, done)
        for request in done:
            self.arrivals.answered(request, now)


def _blocks(phases: list[int], tick: int, count: int, size: int, decoding: int) -> int:
    """Blocks that `count` steps from `tick` on take."""
    rounds, rest = divmod(count, size)
    first = tick % size
    over = first + rest - size
    taken = rounds * decoding + sum(phases[first : first + rest])
    return taken + sum(phases[:over]) if over > 0 else taken
