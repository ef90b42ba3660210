"""TensorRT-LLM's in-flight batching: who has memory (capacity_scheduler_policy), then who is in the step."""

from collections.abc import Callable

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request
from capplan.sim.reserving import ReservingReplica


def guaranteed_no_evict(replica: Replica, chunked_context: bool = False) -> Step:
    """The next iteration under GUARANTEED_NO_EVICT, the default.

    A request starts only if there are blocks for all that it and every started request may become, prompt
    and max_tokens, so that none is ever paused; the first that does not fit ends the search. max_batch_size
    is max_num_seqs, max_num_tokens is max_num_batched_tokens.

    Source: TensorRT-LLM 1.x, cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp. Unverified: no log of it
    was compared. Blocks that requests share are counted for each of them.
    """
    assert isinstance(replica, ReservingReplica)
    step = Step()
    replica.decode_all(step)
    _contexts(replica, step, chunked_context, replica.has_room)
    return step


def max_utilization(replica: Replica, chunked_context: bool = False) -> Step:
    """The next iteration under MAX_UTILIZATION: a request starts where its next iteration has blocks.

    Where a started request's next token has none, the one started last is paused: its blocks are freed and
    its tokens computed again, from the queue's front. Nothing starts in an iteration that paused.

    Source and state as `guaranteed_no_evict`.
    """
    step = Step()
    if replica.blocks_to_decode() <= replica.blocks.free:
        replica.decode_all(step)
    else:
        for request in list(replica.running):
            if request not in replica.running:
                break
            if request in replica.prefilling:
                continue
            while not replica.decode_one(step, request):
                last = next(reversed(replica.running))
                replica.preempt(step, last)
                if last is request:
                    break
    _contexts(replica, step, chunked_context, lambda request: not step.preempted)
    return step


def _contexts(
    replica: Replica, step: Step, chunked_context: bool, has_room: Callable[[Request], bool]
) -> None:
    """Prompts in order while max_num_tokens last: whole, or with chunked context in chunks of whole blocks.

    A paused request's prompt, which its own tokens made longer than max_num_tokens, runs alone. Where a
    started prompt's next chunk has no blocks, the prompt started last is paused.
    """
    limits, waiting = replica.limits, replica.waiting
    budget = limits.max_num_batched_tokens - step.decoding * limits.queries
    for request in list(replica.prefilling):
        left = request.prompt_tokens + request.made_tokens - request.computed_tokens
        tokens = _chunk(replica, left, budget)
        while tokens and request in replica.prefilling:
            if replica.chunk(step, request, tokens):
                budget -= tokens
                break
            replica.preempt(step, next(reversed(replica.prefilling)))
    while waiting and replica.sequences + waiting[0].samples <= limits.max_num_seqs:
        request = waiting[0]
        tokens = request.prompt_tokens + request.made_tokens
        alone = not step.decoding and not step.chunks
        most = _chunk(replica, tokens, budget) if chunked_context else tokens
        if not most or (not chunked_context and tokens > budget and not alone) or not has_room(request):
            break
        taken = replica.admit(step, request, most)
        if not taken:
            break
        waiting.popleft()
        budget -= taken
    step.steady = not (step.chunks or step.preempted or replica.prefilling)
    step.open = not waiting and replica.sequences < limits.max_num_seqs


def _chunk(replica: Replica, left: int, budget: int) -> int:
    """A prompt's next chunk: all that is left, else as many whole blocks as the budget has."""
    if left <= budget:
        return left
    return max(0, budget) // replica.limits.block_size * replica.limits.block_size
