"""One run of an experiment: a scheduler, a workload and a batch size on a model and GPU; what it gave."""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from capplan.errors import DoesNotFitError
from capplan.formulas import latency
from capplan.latency_question import LatencyQuestion
from capplan.latency_setup import Setup
from capplan.sim import simulator
from capplan.sim.contiguous import ContiguousKv, ContiguousReplica, Fit, Reserve
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers import scheduler_of
from capplan.sim.step_times import TableTimes
from capplan.sim.workload import WorkloadSpec, build
from capplan.step import StepTable

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is run: requests of lengths as `--isl` and `--osl` spell them, all at once or Poisson.

    `max_num_seqs` None: as many as memory holds. `kv_share` of the GPU's KV memory is there.
    """

    scheduler: str
    isl: str
    osl: str
    requests: int
    request_per_s: float = math.inf
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    reserve: Reserve = "max"
    fit: Fit = "first"
    kv_share: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a trial.

    Shares of memory are means over the time in which requests waited for it, of all KV memory: `held` by
    tokens; `reserved` for tokens still to come; `internal`, reserved and never used; `tail`, what blocks have
    beyond the tokens in them; `external`, free but not where or not as much as the next request needs.
    `bubble` is the share of computed rows whose request had ended, `padding` that of prompt tokens.
    """

    request_per_s: float
    output_token_per_s: float
    tpot_mean_s: float | None
    tpot_p95_s: float | None
    e2e_mean_s: float
    steps: int
    batch: float
    bubble: float
    padding: float
    preemptions: int
    held: float | None
    reserved: float | None
    internal: float | None
    tail: float | None
    external: float | None

    @property
    def wasted(self) -> float | None:
        """The share of memory that holds nothing while requests wait for it."""
        return None if self.held is None else 1 - self.held


class Totals:
    """The Recorder of a trial: sums over its steps, and its finished requests."""

    def __init__(self, memory_bound: bool) -> None:
        self.memory_bound = memory_bound
        self.finished: list[Request] = []
        self.made_tokens = self.decoded = self.padding = self.rows = 0
        self.prompt_tokens = self.prompt_padding = 0
        self.step_count = self.preemptions = 0
        self.end_s = 0.0
        self.waited_s = 0.0
        self.memory = dict.fromkeys(("held", "reserved", "internal", "tail", "external"), 0.0)

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """`count` steps alike have passed."""
        self.end_s = end_s
        self.step_count += count
        self.made_tokens += step.made_tokens
        self.decoded += step.decoding * count
        self.preemptions += len(step.preempted)
        self.prompt_tokens += step.prompt_tokens
        if step.padding is not None:
            self.padding += step.padding.decoding * count
            self.prompt_padding += step.padding.prompt_tokens
        self.finished += done
        budget = replica.limits.max_num_batched_tokens - step.decoding
        # A step full of prompts kept nobody out for want of memory.
        if replica.waiting and self.memory_bound and step.prompt_tokens < budget:
            self._weigh(replica, step, count, end_s - start_s, done)

    def _weigh(self, replica: Replica, step: Step, count: int, passed_s: float, done: list[Request]) -> None:
        """Where the memory's tokens are in the middle of these steps."""
        kv = replica.blocks
        held = step.kv_tokens + step.decoding * (count + 1) / 2
        held += sum(past + tokens for request, tokens, past in step.chunks if past < request.prompt_tokens)
        taken = step.kv_blocks * kv.block_size
        if isinstance(kv, ContiguousKv):
            gone = sum(request.prompt_tokens + request.output_tokens - 1 for request in done)
            promised = kv.promised_tokens + gone
            split = {"reserved": promised - held, "internal": taken - promised, "tail": 0.0}
        else:
            # Blocks are taken as the tokens come: what is in use at the end was not yet in the middle.
            to_come = step.decoding * (count - 1) / 2
            split = {"reserved": 0.0, "internal": 0.0, "tail": max(0.0, taken - to_come - held)}
        external = (kv.total - step.kv_blocks) * kv.block_size
        for name, tokens in {"held": held, "external": external, **split}.items():
            self.memory[name] += tokens * passed_s / (kv.total * kv.block_size)
        self.waited_s += passed_s

    def rejected(self, request: Request, now_s: float) -> None:
        """A request that could never be served: a trial's workload has none."""
        raise DoesNotFitError(
            f"a request of {request.prompt_tokens:,} + {request.output_tokens:,} tokens never fits",
            where="--experiment",
            hint="a GPU with more memory, or a smaller model",
        )

    def outcome(self) -> Outcome:
        """What came of it."""
        times = (
            latency.tpot_s(
                first_token_at_s=request.first_token_s,
                last_token_at_s=request.done_s,
                output_tokens=request.output_tokens,
            )
            for request in self.finished
        )
        tpot = [time for time in times if time is not None]
        shares: dict[str, float | None] = dict.fromkeys(self.memory)
        if self.waited_s:
            shares = {name: total / self.waited_s for name, total in self.memory.items()}
        rows = self.decoded + self.padding
        prompts = self.prompt_tokens + self.prompt_padding
        return Outcome(
            request_per_s=len(self.finished) / self.end_s,
            output_token_per_s=self.made_tokens / self.end_s,
            tpot_mean_s=sum(tpot) / len(tpot) if tpot else None,
            tpot_p95_s=latency.percentile(values=tpot, percent=95) if tpot else None,
            e2e_mean_s=sum(request.done_s - request.arrival_s for request in self.finished)
            / len(self.finished),
            steps=self.step_count,
            batch=rows / self.step_count,
            bubble=self.padding / rows if rows else 0.0,
            padding=self.prompt_padding / prompts if prompts else 0.0,
            preemptions=self.preemptions,
            **shares,
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on a GPU under vLLM: its step times and KV memory."""

    table: StepTable
    kv_tokens: int
    max_num_batched_tokens: int
    model: str
    gpu: str


@cache
def subject(model: str, gpu: str) -> Subject:
    """The subject of a question; DoesNotFitError where the engine would not start."""
    setup = Setup(LatencyQuestion(model=model, gpu=gpu))
    assert isinstance(setup.table, StepTable)
    if setup.pool_tokens is None or (setup.plan is not None and setup.plan.starts is False):
        reason = setup.plan.reason if setup.plan is not None else None
        raise DoesNotFitError(
            f"{setup.model.name} does not start on {setup.gpu.id}" + (f": {reason}" if reason else ""),
            where=f"--model {model}, --gpu {gpu}",
            hint="a GPU with more memory, or a smaller model",
        )
    return Subject(
        table=setup.table,
        kv_tokens=int(setup.pool_tokens),
        max_num_batched_tokens=setup.scheduling.max_num_batched_tokens,
        model=setup.model.name,
        gpu=setup.gpu.id,
    )


@cache
def run_trial(trial: Trial, on: Subject) -> Outcome:
    """Serve the trial's workload to its end; the same trial again is not run again."""
    policy = scheduler_of(trial.scheduler)
    limits = Limits(
        max_num_seqs=trial.max_num_seqs or on.kv_tokens,
        max_num_batched_tokens=on.max_num_batched_tokens,
        kv_blocks=int(on.kv_tokens * trial.kv_share) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=trial.max_model_len,
        whole_prompts=policy.whole_prompts,
    )
    replica: Any = policy.replica(limits)
    if isinstance(replica, ContiguousReplica) and policy.reserves_max_model_len:
        replica = ContiguousReplica(limits, reserve=trial.reserve, fit=trial.fit)
    spec = WorkloadSpec(
        isl=trial.isl,
        osl=trial.osl,
        request_per_s=trial.request_per_s,
        requests=trial.requests,
        seed=trial.seed,
    )
    totals = Totals(memory_bound=trial.max_num_seqs is None)
    simulator.run(
        workload=build(spec),
        replica=replica,
        scheduler=policy.scheduler(),
        times=TableTimes(on.table),
        recorder=totals,
    )
    return totals.outcome()


def against(trial: Trial, **changes: Any) -> Trial:
    """The same trial but for these fields."""
    return replace(trial, **changes)
