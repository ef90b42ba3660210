"""Waiting and batching: slots that idle, steps that are needed, requests under way.

Every function is keyword-only; a step makes one token for each sequence in the batch.
"""

import heapq
from collections.abc import Sequence


def static_batch_steps(*, output_tokens: Sequence[int], slots: int) -> int:
    """Decode steps of requests served in static batches, in order.

        Σ over batches of max(output tokens)

    Holds for: equal prompts, prefill not counted. Source: serving lesson, "Static Batching".
    Example: 20 and 600 tokens in 2 slots: 600 steps.
    """
    batches = (output_tokens[at : at + slots] for at in range(0, len(output_tokens), slots))
    return sum(max(batch) for batch in batches)


def continuous_batch_steps(*, output_tokens: Sequence[int], slots: int) -> int:
    """Decode steps when a finished request's slot takes the next one at once, in order.

        the last slot to end, each request going to the slot that is free first

    Holds for: equal prompts, prefill not counted. Source: serving lesson, "Iteration-Level Scheduling".
    Example: 20, 600, 20, 600 tokens in 2 slots: 640 steps (static: 1,200).
    """
    ends = [0] * slots
    for tokens in output_tokens:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)


def static_bubble_fraction(*, output_tokens: Sequence[int]) -> float:
    """Share of a static batch's slot-steps that make nothing.

        1 − Σ tokens / (B · max tokens)

    Holds for: one batch, decode only. Source: serving lesson, "The Straggler Effect in Static Batching".
    Example: 20 and 600 tokens: 1 − 620 / 1,200 = 48.3 %.
    """
    return 1 - sum(output_tokens) / (len(output_tokens) * max(output_tokens))


def requests_in_system(*, request_per_s: float, time_in_system_s: float) -> float:
    """Requests under way at once, on average (Little's law).

        L = λ · W

    Holds for: any stable system. Source: Little 1961; serving lesson, "Pending Queue Length".
    Example: 20 requests/s of 10 s each: 200.
    """
    return request_per_s * time_in_system_s
