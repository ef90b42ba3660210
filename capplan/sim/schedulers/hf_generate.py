"""transformers' model.generate(): one batch, padded on both sides, its answers returned together."""

from capplan.sim.replica import Replica, Step
from capplan.sim.schedulers.batches import BatchReplica


def hf_generate(replica: Replica) -> Step:
    """The next step, on a BatchReplica that delivers together.

    Whoever waits forms the next batch, max_num_seqs at most (a script's batch size), prompts padded on the
    left to the longest; rows that ended are fed pad tokens until the last row ends, then generate() returns.

    Source: transformers, generation/utils.py. Unverified: no log of it was compared; its eager kernels, which
    start later than an engine's graphs, are not in the step times.
    """
    assert isinstance(replica, BatchReplica)
    step = Step()
    if replica.running:
        replica.go_on(step)
    elif replica.waiting:
        replica.begin(step)
    return step
