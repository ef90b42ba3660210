"""llama.cpp's server: a fixed number of slots, each with its own part of the context."""

from capplan.sim.replica import Replica, Step
from capplan.sim.reserving import ReservingReplica


def llama_cpp(replica: Replica, cont_batching: bool = True) -> Step:
    """The next llama_decode: a token of each slot that generates, then prompts up to --batch-size tokens.

    --parallel slots (max_num_seqs) of --ctx-size / --parallel tokens each (max_model_len); a request takes
    the first that is idle and keeps it to its end. Prompts go in pieces of what --batch-size
    (max_num_batched_tokens) leaves. Without --cont-batching prompts wait until no slot generates. With
    --kv-unified slots share the cache: here a request is let in only where all of it has room, while
    llama.cpp lets it in and fails it when the cache is full.

    Source: llama.cpp, tools/server/server-context.cpp, update_slots(), b6900 and later. Unverified: no log of
    it was compared. The slots' prompt caches are not modelled.
    """
    assert isinstance(replica, ReservingReplica)
    step, limits, waiting = Step(), replica.limits, replica.waiting
    replica.decode_all(step)
    budget = limits.max_num_batched_tokens - step.decoding * limits.queries
    if cont_batching or not step.decoding:
        for request in replica.prefilling:
            tokens = min(budget, request.prompt_tokens - request.computed_tokens)
            if tokens > 0:
                replica.chunk(step, request, tokens)
                budget -= tokens
        while waiting and budget > 0 and replica.sequences + waiting[0].samples <= limits.max_num_seqs:
            if not replica.has_room(waiting[0]):
                break
            taken = replica.admit(step, waiting[0], budget)
            if not taken:
                break
            waiting.popleft()
            budget -= taken
    step.steady = not step.chunks and not replica.prefilling
    step.open = not waiting and replica.sequences < limits.max_num_seqs
    return step
