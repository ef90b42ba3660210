"""The engines' schedulers: one function each, which fills the next step from a replica's queues."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.sim.contiguous import ContiguousReplica
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.reserving import ReservingReplica
from capplan.sim.schedulers.batches import BatchReplica
from capplan.sim.schedulers.hf_generate import hf_generate
from capplan.sim.schedulers.llama_cpp import llama_cpp
from capplan.sim.schedulers.orca import orca
from capplan.sim.schedulers.sglang import Sglang
from capplan.sim.schedulers.static import static
from capplan.sim.schedulers.tgi import Tgi
from capplan.sim.schedulers.trtllm import guaranteed_no_evict, max_utilization
from capplan.sim.schedulers.vllm_v1 import vllm_v1

Scheduler = Callable[[Replica], Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduler by name.

    `scheduler` makes one (some keep state between steps: one a run), `replica` the replica it works on.
    `engine` is whose it is, None: no engine of today. `verified` says against what it was compared, None:
    nothing but its source. `whole_prompts` goes into its limits; `reserves_max_model_len`: each request holds
    memory for as much.
    """

    name: str
    says: str
    engine: str | None
    scheduler: Callable[[], Scheduler]
    replica: Callable[[Limits], Replica] = Replica
    verified: str | None = None
    whole_prompts: bool = False
    reserves_max_model_len: bool = False


SCHEDULERS: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            name="vllm_v1",
            says="running first, chunked prompts, blocks on demand, the last one in is thrown out",
            engine="vllm",
            scheduler=lambda: vllm_v1,
            verified="vLLM 0.32's own steps, 5 runs of 9,209 steps: all equal",
        ),
        Policy(
            name="sglang",
            says="prompts first, admitted by new_token_ratio; the least advanced are retracted",
            engine="sglang",
            scheduler=Sglang,
        ),
        Policy(
            name="trtllm",
            says="GUARANTEED_NO_EVICT: started only if all of it has room",
            engine="tensorrt-llm",
            scheduler=lambda: guaranteed_no_evict,
            replica=ReservingReplica,
            whole_prompts=True,
        ),
        Policy(
            name="trtllm_max_utilization",
            says="MAX_UTILIZATION: started while it fits, the last one is paused",
            engine="tensorrt-llm",
            scheduler=lambda: max_utilization,
            whole_prompts=True,
        ),
        Policy(
            name="tgi",
            says="prompts stall decoding once enough wait; max_new_tokens taken from a token budget",
            engine="tgi",
            scheduler=Tgi,
            replica=ReservingReplica,
            whole_prompts=True,
        ),
        Policy(
            name="llama_cpp",
            says="slots, prompts in pieces of --batch-size",
            engine="llama.cpp",
            scheduler=lambda: llama_cpp,
            replica=ReservingReplica,
        ),
        Policy(
            name="static",
            says="one full batch after another, padded to the longest",
            engine=None,
            scheduler=lambda: static,
            replica=BatchReplica,
        ),
        Policy(
            name="orca",
            says="iteration-level batching, memory for max_model_len a request",
            engine=None,
            scheduler=lambda: orca,
            replica=ContiguousReplica,
            reserves_max_model_len=True,
        ),
        Policy(
            name="hf_generate",
            says="transformers' generate(): a batch at a time, answers together",
            engine=None,
            scheduler=lambda: hf_generate,
            replica=partial(BatchReplica, together=True),
        ),
    )
}


def scheduler_of(name: str) -> Policy:
    """The policy of that name, or an engine's own; InputError for an unknown one."""
    found = SCHEDULERS.get(name.lower().replace("-", "_").replace(".", "_"))
    if found is None:
        found = next((policy for policy in SCHEDULERS.values() if policy.engine == name), None)
    if found is None:
        raise InputError(
            f"no scheduler {shown(name)}",
            where="--scheduler",
            hint=did_you_mean(name, SCHEDULERS, f"one of {', '.join(SCHEDULERS)}"),
        )
    return found


__all__ = ["SCHEDULERS", "Policy", "Scheduler", "scheduler_of"]
