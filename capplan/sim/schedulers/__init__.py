"""The engines' schedulers: one function each, which fills the next step from a replica's queues."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.sim.contiguous import ContiguousReplica
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.reserving import ReservingReplica
from capplan.sim.schedulers.batches import BatchReplica
from capplan.sim.schedulers.hf_generate import hf_generate
from capplan.sim.schedulers.llama_cpp import llama_cpp
from capplan.sim.schedulers.options import Option, factor, on_off, one_of, read, steps
from capplan.sim.schedulers.orca import orca
from capplan.sim.schedulers.sglang import Sglang
from capplan.sim.schedulers.static import static
from capplan.sim.schedulers.tgi import Tgi
from capplan.sim.schedulers.trtllm import guaranteed_no_evict, max_utilization
from capplan.sim.schedulers.vllm_v1 import vllm_v1

Scheduler = Callable[[Replica], Step]


def _stateless(function: Callable[..., Step]) -> Callable[..., Scheduler]:
    """A scheduler that keeps nothing between steps: the function itself, its options filled in."""
    return lambda **given: partial(function, **given) if given else function


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A scheduler by name.

    `scheduler` makes one (some keep state between steps: one a run) with the `given` of its `options`,
    `replica` the replica it works on. `engine` is whose it is, None: no engine of today. `verified` says
    against what it was compared, None: nothing but its source. `whole_prompts` goes into its limits.
    `reserves_max_model_len`: each request holds memory for as much; `reserves_max_new_tokens`: it is let in
    by what its client asks at most. `asks_batch`: max_num_seqs is the batch size of a script, without a
    default. `shares_prefixes`: whether a request finds another's prompt in the cache. `disaggregates`:
    whether it runs on a replica of prompts and on one that decodes (sim/disaggregated.py).
    """

    name: str
    engine: str | None
    scheduler: Callable[..., Scheduler]
    replica: Callable[[Limits], Replica] = Replica
    verified: str | None = None
    whole_prompts: bool = False
    reserves_max_model_len: bool = False
    reserves_max_new_tokens: bool = False
    asks_batch: bool = False
    shares_prefixes: bool = True
    disaggregates: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its name with the options given."""
        return " ".join([self.name, *(f"{name}={str(value).lower()}" for name, value in self.given.items())])

    def make(self) -> Scheduler:
        """A scheduler for one run."""
        return self.scheduler(**self.given)


SCHEDULERS: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            name="vllm_v1",
            engine="vllm",
            scheduler=_stateless(vllm_v1),
            disaggregates=True,
            verified="vLLM 0.32's own steps, 5 runs of 9,209 steps: all equal",
        ),
        Policy(
            name="sglang",
            engine="sglang",
            scheduler=Sglang,
            reserves_max_new_tokens=True,
            options={
                "schedule_policy": one_of("fcfs", "lpm"),
                "schedule_conservativeness": factor,
                "enable_mixed_chunk": on_off,
            },
        ),
        Policy(
            name="trtllm",
            engine="tensorrt-llm",
            scheduler=_stateless(guaranteed_no_evict),
            replica=ReservingReplica,
            whole_prompts=True,
            reserves_max_new_tokens=True,
            options={"chunked_context": on_off},
        ),
        Policy(
            name="trtllm_max_utilization",
            engine="tensorrt-llm",
            scheduler=_stateless(max_utilization),
            whole_prompts=True,
            options={"chunked_context": on_off},
        ),
        Policy(
            name="tgi",
            engine="tgi",
            scheduler=Tgi,
            replica=ReservingReplica,
            whole_prompts=True,
            reserves_max_new_tokens=True,
            options={"waiting_served_ratio": factor, "max_waiting_tokens": steps},
        ),
        Policy(
            name="llama_cpp",
            engine="llama.cpp",
            scheduler=_stateless(llama_cpp),
            replica=ReservingReplica,
            reserves_max_new_tokens=True,
            shares_prefixes=False,
            options={"cont_batching": on_off},
        ),
        Policy(
            name="static",
            engine=None,
            scheduler=_stateless(static),
            replica=BatchReplica,
            reserves_max_new_tokens=True,
            asks_batch=True,
        ),
        Policy(
            name="orca",
            engine=None,
            scheduler=_stateless(orca),
            replica=ContiguousReplica,
            reserves_max_model_len=True,
        ),
        Policy(
            name="hf_generate",
            engine=None,
            scheduler=_stateless(hf_generate),
            replica=partial(BatchReplica, together=True),
            reserves_max_new_tokens=True,
            asks_batch=True,
        ),
    )
}


def scheduler_of(text: str) -> Policy:
    """The policy of a name, an engine's name for its own, or `name:option=value,…`.

    Errors: InputError for an unknown name, option or value.
    """
    name, _, rest = text.strip().partition(":")
    found = SCHEDULERS.get(name.lower().replace("-", "_").replace(".", "_"))
    if found is None:
        found = next((policy for policy in SCHEDULERS.values() if policy.engine == name), None)
    if found is None:
        raise InputError(
            f"no scheduler {shown(name)}",
            where="--scheduler",
            hint=did_you_mean(name, SCHEDULERS, f"one of {', '.join(SCHEDULERS)}"),
        )
    given = read(rest, found.options, found.name)
    # A prompt in chunks may be longer than a step.
    whole = found.whole_prompts and not given.get("chunked_context")
    return replace(found, given=given, whole_prompts=whole)


__all__ = ["SCHEDULERS", "Policy", "Scheduler", "scheduler_of"]
