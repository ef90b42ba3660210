"""SGLang: prompts first, let in by a guess of what those inside will still make; retracted if it fails."""

from typing import Final, Literal

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request

CLIP_MAX_NEW_TOKENS: Final = 4096
RETRACT_DECODE_STEPS: Final = 20
MIN_NEW_TOKEN_RATIO_FACTOR: Final = 0.14
INIT_NEW_TOKEN_RATIO: Final = 0.7
NEW_TOKEN_RATIO_DECAY_STEPS: Final = 600
LPM_QUEUE_LIMIT: Final = 128
"""SGLang's own settings of these names (environment variables SGLANG_…), at their defaults."""


class Sglang:
    """SGLang's scheduler.

    As long as a waiting request has room a step is made of prompts alone, chunked_prefill_size
    (max_num_batched_tokens) tokens at most, and decoding waits; with --enable-mixed-chunk both share a step.
    Room: free tokens − new_token_ratio · Σ what those running may still make ≥ prompt + max_new_tokens. The
    ratio starts at 0.7 · schedule_conservativeness and sinks with every decode step. Where decoding runs out
    of memory, the requests with the fewest tokens made, of these the longest prompt first, are retracted to
    the queue's end, and the ratio is set by how far those left have come. --schedule-policy fcfs or lpm, the
    longest cached prefix first while 128 wait at most. --max-running-requests is max_num_seqs.

    Source: SGLang 0.5, srt/managers/{scheduler,schedule_policy,schedule_batch}.py. Unverified: no log of it
    was compared. The radix tree is that of kv_blocks.py, so that prefixes match in whole pages of block_size.
    """

    def __init__(
        self,
        *,
        schedule_policy: Literal["fcfs", "lpm"] = "fcfs",
        schedule_conservativeness: float = 1.0,
        enable_mixed_chunk: bool = False,
    ) -> None:
        self.schedule_policy = schedule_policy
        self.enable_mixed_chunk = enable_mixed_chunk
        self.init_ratio = min(1.0, INIT_NEW_TOKEN_RATIO * schedule_conservativeness)
        self.min_ratio = self.init_ratio * MIN_NEW_TOKEN_RATIO_FACTOR
        self._decay = (self.init_ratio - self.min_ratio) / NEW_TOKEN_RATIO_DECAY_STEPS
        self._ratio = self.init_ratio
        self._ratio_tick = 0
        self._full_with = 0

    def new_token_ratio(self, replica: Replica) -> float:
        """The share of what running requests may still make that is kept free for them."""
        decayed = self._ratio - self._decay * (replica.tick - self._ratio_tick)
        return max(self.min_ratio, decayed)

    def __call__(self, replica: Replica) -> Step:
        """The next step."""
        step = Step()
        if not replica.running:
            self._set_ratio(replica, self.init_ratio)
        if len(replica.running) != self._full_with:
            self._full_with = 0  # someone left: look again
        mixed = self.enable_mixed_chunk and replica.blocks_to_decode() <= replica.blocks.free
        if mixed:
            replica.decode_all(step)
        if not self._full_with or replica.prefilling:
            self._prompts(replica, step)
        if step.chunks:
            step.stalled = not mixed
            return step
        if not mixed:
            if replica.blocks_to_decode() > replica.blocks.free:
                self._retract(replica, step)
            replica.decode_all(step)
        step.steady = not step.preempted
        step.open = not replica.waiting and replica.sequences < replica.limits.max_num_seqs
        return step

    def _prompts(self, replica: Replica, step: Step) -> None:
        """The prompt that was cut goes on; then those waiting, while there is room for them."""
        limits, waiting = replica.limits, replica.waiting
        if not replica.prefilling and (not waiting or self._no_place(replica, waiting[0])):
            return
        budget = limits.max_num_batched_tokens - step.decoding * limits.queries
        ratio = self.new_token_ratio(replica)
        room = replica.blocks.free * limits.block_size
        room -= int(ratio * sum(self._still_to_make(replica, request) for request in replica.running))
        for request in replica.prefilling:
            tokens = min(budget, request.prompt_tokens + request.made_tokens - request.computed_tokens)
            if tokens > 0 and replica.chunk(step, request, tokens):
                budget -= tokens
                room -= tokens
        if waiting and self.schedule_policy == "lpm" and len(waiting) <= LPM_QUEUE_LIMIT:
            self._longest_prefix_first(replica)
        while waiting and budget > 0 and room > 0:
            request = waiting[0]
            if self._no_place(replica, request):
                break
            tokens = request.prompt_tokens + request.made_tokens
            new = min(limits.new_tokens(request) - request.made_tokens, CLIP_MAX_NEW_TOKENS)
            needed = tokens - replica.blocks.cached_tokens(request) + request.samples * new
            if needed + limits.block_size > room and replica.running:
                break
            taken = replica.admit(step, request, budget)
            if not taken:
                break
            waiting.popleft()
            budget -= taken
            room -= needed
        if waiting and not step.chunks:
            self._full_with = len(replica.running)

    def _no_place(self, replica: Replica, request: Request) -> bool:
        return replica.sequences + request.samples > replica.limits.max_num_seqs

    def _still_to_make(self, replica: Replica, request: Request) -> int:
        made = request.made_tokens
        if request not in replica.prefilling:
            made += replica.tick - request.since_tick
        left = replica.limits.new_tokens(request) - made
        return request.samples * min(left, CLIP_MAX_NEW_TOKENS)

    def _longest_prefix_first(self, replica: Replica) -> None:
        found = sorted(replica.waiting, key=replica.blocks.cached_tokens, reverse=True)
        replica.waiting.clear()
        replica.waiting.extend(found)

    def _retract(self, replica: Replica, step: Step) -> None:
        """Throw requests out until the others have room for their next token."""
        made = {
            request: request.made_tokens + replica.tick - request.since_tick
            for request in replica.running
            if request not in replica.prefilling
        }
        order = sorted(made, key=lambda request: (made[request], -request.prompt_tokens), reverse=True)
        while len(order) > 1 and replica.blocks_to_decode() > replica.blocks.free:
            self._throw_out(replica, step, order.pop())
        for request in list(replica.prefilling):
            if replica.blocks_to_decode() > replica.blocks.free:
                self._throw_out(replica, step, request)
        most = sum(replica.limits.new_tokens(request) for request in order)
        ratio = (sum(made[request] for request in order) + RETRACT_DECODE_STEPS * len(order)) / (most + 1)
        self._set_ratio(replica, min(1.0, ratio))

    def _throw_out(self, replica: Replica, step: Step, request: Request) -> None:
        """To the queue's end."""
        replica.preempt(step, request)
        replica.waiting.remove(request)
        replica.waiting.append(request)

    def _set_ratio(self, replica: Replica, ratio: float) -> None:
        self._ratio, self._ratio_tick = ratio, replica.tick
