"""Text Generation Inference: prompts stall decoding, when enough of them wait or they have waited enough."""

import math

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request
from capplan.sim.reserving import ReservingReplica


class Tgi:
    """TGI's router: a prefill of new requests, concatenated to the running batch, then decodes.

    A request takes input + max_new_tokens of max_batch_total_tokens (here kv_blocks) when it enters, so that
    nothing is thrown out. A prefill has max_batch_prefill_tokens (max_num_batched_tokens) at most, whole
    prompts alone; the batch max_batch_size (max_num_seqs). New requests enter a running batch when at least
    floor(waiting_served_ratio · batch) of them can, or max_waiting_tokens steps have passed since the last
    ones entered; a decode follows each such prefill.

    Source: text-generation-inference 3.x, backends/v3/src/{backend,queue}.rs. Unverified: no log of it was
    compared. Blocks count as they fill, though TGI takes them all at once; prefill chunking is not modelled.
    """

    def __init__(self, *, waiting_served_ratio: float = 0.3, max_waiting_tokens: int = 20) -> None:
        self.waiting_served_ratio = waiting_served_ratio
        self.max_waiting_tokens = max_waiting_tokens
        self._entered_tick = 0
        self._decode_next = False

    def __call__(self, replica: Replica) -> Step:
        """The next step."""
        step = Step()
        entering = [] if self._decode_next else self._entering(replica)
        for request in entering:
            if not replica.admit(step, request, request.prompt_tokens):
                break
            replica.waiting.popleft()
        if step.chunks:
            self._decode_next = replica.decoding > 0
            self._entered_tick = replica.tick
            step.stalled = True
            return step
        self._decode_next = False
        replica.decode_all(step)
        room = replica.sequences < replica.limits.max_num_seqs
        # With someone waiting for the ratio or the steps, each step asks again.
        step.steady = not (room and replica.waiting)
        step.open = room
        return step

    def _entering(self, replica: Replica) -> list[Request]:
        """Who enters now, in order."""
        assert isinstance(replica, ReservingReplica)
        limits, found = replica.limits, list[Request]()
        if not replica.waiting:
            return found
        prompts, sequences = limits.max_num_batched_tokens, replica.sequences
        blocks = limits.kv_blocks - replica.promised_blocks
        for request in replica.waiting:
            prompts -= request.prompt_tokens
            blocks -= replica.blocks_to_end(request)
            sequences += request.samples
            if prompts < 0 or blocks < 0 or sequences > limits.max_num_seqs:
                break
            found.append(request)
        waited = replica.tick - self._entered_tick + 1
        if replica.running and waited < self.max_waiting_tokens:
            fewest = math.floor(len(replica.running) * self.waiting_served_ratio)
            return found if len(found) >= fewest else []
        return found
