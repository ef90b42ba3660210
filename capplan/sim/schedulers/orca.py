"""Orca: requests join and leave at every iteration, each with memory for its whole length."""

from capplan.sim.replica import Replica, Step


def orca(replica: Replica) -> Step:
    """The next iteration.

    All running requests make a token; those waiting follow in order of arrival, their prompts whole, while
    the batch has a place (max_bs; here max_num_seqs) and memory a span of max_tokens (here max_model_len).
    Nothing is ever thrown out. On a replica that reserves (sim/contiguous.py).

    Source: Yu et al. 2022, "Orca", algorithm 1. Unverified: no log of it was compared; its own system was
    never published.
    """
    step, limits, waiting = Step(), replica.limits, replica.waiting
    replica.decode_all(step)
    while waiting and replica.sequences + waiting[0].samples <= limits.max_num_seqs:
        if not replica.admit(step, waiting[0], waiting[0].prompt_tokens):
            break
        waiting.popleft()
    step.steady = not step.chunks
    step.open = not waiting and replica.sequences < limits.max_num_seqs
    return step
