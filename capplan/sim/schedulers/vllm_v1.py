"""vLLM's V1 scheduler: running requests first, then waiting ones, under one budget of tokens a step."""

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request


def vllm_v1(replica: Replica) -> Step:
    """The next step.

    Every running request gets its next tokens: one where it decodes, a chunk of its prompt else. Where blocks
    run out the request admitted last is thrown out, to the front of the queue, and computed again. Waiting
    requests follow in order of arrival, unless this step threw one out.

    Source: vllm/v1/core/sched/scheduler.py, 0.32; equal step by step to its logs (tests/sim).
    """
    step, limits = Step(), replica.limits
    budget = limits.max_num_batched_tokens
    if _everyone_fits(replica, budget):
        replica.decode_all(step)
        budget -= step.decoding
        for request in replica.prefilling:
            tokens = _chunk(replica, request, budget)
            replica.chunk(step, request, tokens)
            budget -= tokens
    else:
        budget = _one_by_one(replica, step, budget)
    waiting = replica.waiting
    if not step.preempted:
        while waiting and budget > 0 and len(replica.running) < limits.max_num_seqs:
            alone = not replica.running and len(waiting) == 1
            most = budget if alone else min(budget, limits.long_prefill_token_threshold or budget)
            tokens = replica.admit(step, waiting[0], most)
            if not tokens:
                break
            waiting.popleft()
            budget -= tokens
    step.steady = not (step.chunks or step.preempted or step.held_back)
    step.open = not waiting and budget > 0 and len(replica.running) < limits.max_num_seqs
    return step


def _chunk(replica: Replica, request: Request, budget: int) -> int:
    """Tokens of a running prompt's next chunk."""
    left = request.prompt_tokens + request.made_tokens - request.computed_tokens
    return min(left, replica.limits.long_prefill_token_threshold or left, budget)


def _everyone_fits(replica: Replica, budget: int) -> bool:
    """Whether all running requests get all they want: then their order does not matter."""
    tokens, blocks = replica.decoding, replica.blocks_to_decode()
    for request in replica.prefilling:
        chunk = _chunk(replica, request, budget)
        computed = request.computed_tokens
        tokens += chunk
        blocks += replica.blocks.blocks_for(computed + chunk) - replica.blocks.blocks_for(computed)
    return tokens <= budget and blocks <= replica.blocks.free


def _one_by_one(replica: Replica, step: Step, budget: int) -> int:
    """Running requests in order of admission, while the budget lasts; what is left of it."""
    for request in list(replica.running):
        if request not in replica.running:
            break
        prompt = request in replica.prefilling
        if not budget:
            if not prompt:
                step.held_back.append(request)
            continue
        tokens = _chunk(replica, request, budget) if prompt else 1
        while not (replica.chunk(step, request, tokens) if prompt else replica.decode_one(step, request)):
            last = next(reversed(replica.running))
            replica.preempt(step, last)
            if last is request:
                return budget
        budget -= tokens
    return budget
