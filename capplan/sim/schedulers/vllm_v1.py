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
    step, limits, waiting = Step(), replica.limits, replica.waiting
    budget = limits.max_num_batched_tokens
    # A lone request has nobody to hold up: its prompt is not cut.
    alone = len(replica.running) + len(waiting) == 1
    longest = budget if alone else limits.long_prefill_token_threshold or budget
    if _everyone_fits(replica, budget, longest) and replica.decode_all(step):
        budget -= step.decoding * limits.queries
        for request in replica.prefilling:
            tokens = _chunk(request, budget, longest)
            replica.chunk(step, request, tokens)
            budget -= tokens
    else:
        budget = _one_by_one(replica, step, budget, longest)
    if not step.preempted:
        while waiting and budget > 0 and replica.sequences + waiting[0].samples <= limits.max_num_seqs:
            tokens = replica.admit(step, waiting[0], min(budget, longest))
            if not tokens:
                break
            waiting.popleft()
            budget -= tokens
    step.steady = not (step.chunks or step.preempted or step.held_back)
    step.open = not waiting and budget > 0 and replica.sequences < limits.max_num_seqs
    return step


def _chunk(request: Request, budget: int, longest: int) -> int:
    """Tokens of a running prompt's next chunk."""
    return min(request.prompt_tokens + request.made_tokens - request.computed_tokens, longest, budget)


def _everyone_fits(replica: Replica, budget: int, longest: int) -> bool:
    """Whether all running requests get all they want: then their order does not matter."""
    tokens = replica.decoding * replica.limits.queries
    if not replica.prefilling:
        return tokens <= budget
    blocks = replica.blocks_to_decode()
    for request in replica.prefilling:
        chunk = _chunk(request, budget, longest)
        tokens += chunk
        blocks += replica.blocks_to_chunk(request, chunk)
    return tokens <= budget and blocks <= replica.blocks.free


def _one_by_one(replica: Replica, step: Step, budget: int, longest: int) -> int:
    """Running requests in order of admission, while the budget lasts; what is left of it."""
    given: dict[Request, tuple[int, int]] = {}
    stuck = False
    for request in list(replica.running):
        if request not in replica.running:
            continue
        prompt = request in replica.prefilling
        if stuck or budget < (1 if prompt else request.samples):
            if not prompt:
                step.held_back = [*step.held_back, request]
            continue
        own = replica.limits.queries * request.samples
        tokens = _chunk(request, budget, longest) if prompt else min(budget, own)
        past = replica.context(request)
        while not (replica.chunk(step, request, tokens) if prompt else replica.decode_one(step, request)):
            victim = replica.victim()
            taken, before = given.pop(victim, (0, 0))
            if taken:
                step.withdraw(victim, taken, before)
                budget += taken
            replica.preempt(step, victim, taken)
            stuck = victim is request
            if stuck:
                break
        else:
            given[request] = tokens, past
            budget -= tokens
    return budget
