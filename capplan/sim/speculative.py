"""Speculative decoding in a simulation: how many drafted tokens each sequence keeps, step by step."""

import math
from dataclasses import replace

from capplan.sim.replica import Limits, Step
from capplan.sim.request import Request
from capplan.sim.reserving import ReservingReplica
from capplan.sim.workload import stream


class SpeculativeReplica(ReservingReplica):
    """A replica whose decoding sequences make 1 + accepted tokens a step.

    Each of `drafted` tokens is accepted with the chance `acceptance_rate`, given those before it, by draws of
    a seeded stream: (1 − p^(N + 1)) / (1 − p) tokens a step on average. A step takes 1 + N tokens of the
    budget and memory for as many a sequence, of which none past its end; what drafts were refused stays its
    own. All answers of one prompt keep the same number. Steps are taken one by one.
    """

    leaps = False

    def __init__(self, limits: Limits, *, drafted: int, acceptance_rate: float, seed: int = 0) -> None:
        super().__init__(replace(limits, queries=1 + drafted))
        self.drafted, self.acceptance_rate = drafted, acceptance_rate
        self._draws = stream(seed, "acceptance")
        self._held: dict[Request, int] = {}

    def blocks_to_decode(self) -> int:
        """Blocks that the decoding requests need for their next token and the drafts after it."""
        return sum(request.samples * self._missing(request) for request in self._held)

    def decode_all(self, step: Step) -> bool:
        """All decoding requests make tokens in this step; False where blocks are missing."""
        needed = self.blocks_to_decode()
        if needed > self.blocks.free:
            return False
        self.blocks.take(needed)
        for request in self._held:
            self._held[request] += self._missing(request)
        step.decoding += self.decoding
        step.kv_tokens += self.kv_tokens
        return True

    def decode_one(self, step: Step, request: Request) -> bool:
        """One decoding request makes tokens in this step; False where blocks are missing."""
        missing = self._missing(request)
        if request.samples * missing > self.blocks.free:
            return False
        self.blocks.take(request.samples * missing)
        self._held[request] += missing
        step.decoding += request.samples
        step.kv_tokens += request.samples * self.context(request)
        return True

    def finish(self, step: Step, steps: int, now_s: float, start_s: float) -> list[Request]:
        """A step is through: every sequence in it keeps the drafts that were accepted."""
        accepted = 0
        if step.decoding and not step.stalled:
            for request in self._held:
                if request not in step.held_back:
                    extra = min(self._accepted(), request.end_tick - self.tick - 1)
                    self._shift(request, extra)
                    accepted += request.samples * extra
        done = super().finish(step, steps, now_s, start_s)
        step.made_tokens += accepted
        return done

    def preempt(self, step: Step, request: Request, given: int = 0) -> None:
        """Throw out a running request."""
        if request in self._held:
            self._give_back(request, self.context(request))
            given = 0
        super().preempt(step, request, given)

    def let_go(self, request: Request) -> None:
        """Free the memory of a request that is through."""
        if request in self._held:
            self._give_back(request, request.computed_tokens)
        super().let_go(request)

    def _start(self, request: Request) -> None:
        super()._start(request)
        self._held[request] = self.blocks.blocks_for(request.computed_tokens)

    def _missing(self, request: Request) -> int:
        """Blocks that one answer of a decoding request lacks for its next step."""
        last = request.prompt_tokens + request.output_tokens - 1
        upto = min(self.context(request) + 1 + self.drafted, last)
        return max(0, self.blocks.blocks_for(upto) - self._held[request])

    def _give_back(self, request: Request, computed: int) -> None:
        """What a request holds beyond its tokens."""
        surplus = self._held.pop(request) - self.blocks.blocks_for(computed)
        self.blocks.give_back(request.samples * surplus)

    def _accepted(self) -> int:
        """Drafts accepted in a row: geometric, cut at `drafted`."""
        if not 0 < self.acceptance_rate < 1:
            return self.drafted if self.acceptance_rate else 0
        return min(self.drafted, int(math.log(1 - self._draws.random()) / math.log(self.acceptance_rate)))
