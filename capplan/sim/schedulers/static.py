"""Static batching: a batch is filled, padded to its longest, and runs until its last request ends."""

from capplan.sim.replica import Replica, Step
from capplan.sim.schedulers.batches import BatchReplica


def static(replica: Replica) -> Step:
    """The next step, on a BatchReplica.

    A batch begins when max_num_seqs requests wait, or when nobody else is known to come; all prompts in one
    step. Every row is computed to the end: a request that ends early leaves a bubble. Its answer is out with
    its last token; its row and memory are free with the batch's last.

    Source: the serving lesson, "The Straggler Effect in Static Batching"; as FasterTransformer under Triton.
    Unverified: no log of it was compared.
    """
    assert isinstance(replica, BatchReplica)
    step = Step()
    if replica.running:
        replica.go_on(step)
    elif replica.last_call or sum(request.samples for request in replica.waiting) >= _places(replica):
        replica.begin(step)
    return step


def _places(replica: Replica) -> int:
    """Answers that must wait for a batch to begin: with several a request the last may not fit."""
    most = max((request.samples for request in replica.waiting), default=1)
    return replica.limits.max_num_seqs - most + 1
