"""What a simulation runs on: the replica's limits and step times as latency has them, and its scheduler."""

from dataclasses import replace
from functools import cached_property
from typing import Final

from capplan import latency_question, lone_step, simulate_apart
from capplan.engines import llama_cpp
from capplan.engines.plan import engine_id
from capplan.errors import DoesNotFitError, InputError
from capplan.latency_question import LatencyQuestion
from capplan.latency_setup import Setup, Table
from capplan.sim.around import Around, around
from capplan.sim.flow import StepTimes
from capplan.sim.looks import Looking
from capplan.sim.replica import Limits, Replica
from capplan.sim.request import Request, Workload
from capplan.sim.reserving import ReservingReplica
from capplan.sim.schedulers import Policy, scheduler_of
from capplan.sim.speculative import SpeculativeReplica
from capplan.sim.step_times import SingleSteps, TableTimes
from capplan.sim.workload import BuiltWorkload, build
from capplan.simulate_question import SimulateQuestion, check, check_size
from capplan.step import StepTable

LONGEST: Final = 1 << 26
"""Tokens of a request, where neither workload nor model has a limit."""
BLOCK_FLAGS: Final = ("block_size", "page_size", "tokens_per_block")
"""What engines call the tokens of a KV block."""


class Subject:
    """A question's replica, ready to run.

    Errors: InputError for a question that cannot be answered, DoesNotFitError where the engine would not
    start.
    """

    def __init__(self, question: SimulateQuestion) -> None:
        check(question)
        self.question = question
        self.workload = build(question.workload)
        self.load = self.workload.load()
        asked = self._speed_question()
        latency_question.check(asked)
        self.setup = Setup(asked)
        self.policy = self._policy()
        self.limits = self._limits()
        self.link = simulate_apart.link_of(self)
        self._check_size()

    def _check_size(self) -> None:
        """Refuse sizes beyond reason that only the trace, or the users' speed, tells."""
        spec = self.question.workload
        check_size(float(self.workload.count or 0), "--trace, --trace-repeat, --trace-limit")
        if spec.users is None or spec.requests is not None or spec.duration_s is None:
            return
        served = self.setup.serve(self.table, self.setup.scheduling, spec.users)
        pause = pause_s(self.workload)
        rate = min(served.request_per_s, spec.users / pause) if pause else served.request_per_s
        check_size(rate * spec.duration_s, "--concurrency, --duration")

    def _speed_question(self) -> LatencyQuestion:
        """The same replica as `capplan latency` is asked about, with the workload's mean request."""
        question, longest = self.question, self.question.max_model_len or self._longest()
        self.slots = self._slots()
        # The mean request must be one that the engine takes; longer ones are cut or rejected one by one.
        isl = min(max(1, round(self.load.mean_prompt_tokens)), longest - 1)
        return LatencyQuestion(
            model=question.model,
            gpu=question.gpu,
            precision=question.precision,
            kv_dtype=question.kv_dtype,
            isl=max(1, isl),
            osl=max(1, min(round(self.load.mean_output_tokens), longest - isl)),
            concurrency=question.workload.users,
            tp=question.tp,
            pp=question.pp,
            dp=question.dp,
            ep=question.ep,
            engine=question.engine,
            engine_version=question.engine_version,
            max_num_seqs=self.slots,
            max_num_batched_tokens=question.max_num_batched_tokens,
            gpu_memory_utilization=question.gpu_memory_utilization,
            max_model_len=longest,
            block_size=question.block_size,
            speculative_tokens=question.speculative_tokens,
            acceptance_rate=question.acceptance_rate,
            draft_model=question.draft_model,
            network_s=question.network_s,
            slo=question.slo,
            profile=question.profile,
            bounds=question.bounds,
            online=question.online,
        )

    def _longest(self) -> int:
        """The longest request of the workload, all that it may ask included, up to what the model takes."""
        from capplan import model_source

        model = model_source.load(self.question.model, online=self.question.online)
        asked = (self.load.max_context_tokens or LONGEST) + (self.question.max_new_tokens or 0)
        return min(asked, LONGEST, model.max_context or LONGEST)

    def _slots(self) -> int | None:
        """Sequences a step as asked; under llama.cpp, whose slots cut its cache, one a user or its own."""
        question, engine = self.question, engine_id(self.question.engine)
        if question.max_num_seqs is not None or engine not in lone_step.ENGINES:
            return question.max_num_seqs
        return question.workload.users or llama_cpp.default_slots(question.engine_version)

    def _policy(self) -> Policy:
        """How steps are filled: as the engine does, or as asked."""
        asked, engine = self.question.scheduler, self.setup.engine
        policy = scheduler_of(asked or engine)
        if policy.engine not in (None, engine):
            raise InputError(
                f"the scheduler {policy.name} is {policy.engine}'s",
                where=f"--scheduler {asked}, --engine {self.question.engine}",
                hint=f"--engine {policy.engine}",
            )
        if self.question.speculative_tokens and policy.replica not in (Replica, ReservingReplica):
            raise InputError(
                f"drafts are not modelled with {policy.name}",
                where="--speculative-tokens, --scheduler",
                hint="leave one of them out",
            )
        if policy.asks_batch and self.question.max_num_seqs is None:
            raise InputError(
                f"{policy.name} takes requests in batches of a size that nobody gave",
                where=f"--scheduler {policy.name}",
                hint="--max-num-seqs 16, the batch size",
            )
        if self.question.max_new_tokens is not None and not policy.reserves_max_new_tokens:
            raise InputError(
                f"{policy.name} does not go by what clients ask at most",
                where="--max-new-tokens, --engine, --scheduler",
                hint="leave it out: answers have the length of --osl",
            )
        return policy

    def _limits(self) -> Limits:
        """What the engine allows, as its plan resolves it; all data-parallel ranks together."""
        setup, question = self.setup, self.question
        plan = setup.plan
        refused = setup.memory.fits is False if plan is None or plan.starts is None else not plan.starts
        if refused or setup.on_host:
            raise self._does_not_start()
        block_size = self._block_size()
        blocks, kv = question.kv_blocks, None if plan is None else plan.kv
        if blocks is None:
            if setup.pool_tokens is None:
                raise InputError(
                    f"the KV pool of {setup.model.name} is not known",
                    where="--model",
                    hint="give --kv-blocks N",
                )
            blocks = int(setup.pool_tokens) // block_size
            if kv is not None and block_size == kv.block_size:
                blocks = kv.num_blocks * question.dp
        return Limits(
            max_num_seqs=setup.scheduling.max_num_seqs,
            max_num_batched_tokens=setup.scheduling.max_num_batched_tokens,
            # vLLM never gives out its block 0, each rank its own.
            kv_blocks=max(1, blocks - (question.dp if setup.engine == "vllm" else 0)),
            block_size=block_size,
            kv_groups=1 if kv is None else kv.token_groups,
            limited_groups=() if kv is None else kv.limited_groups,
            max_model_len=setup.question.max_model_len,
            prefix_caching=question.prefix_caching and self.policy.shares_prefixes,
            whole_prompts=self.policy.whole_prompts,
            max_new_tokens=question.max_new_tokens,
        )

    def _block_size(self) -> int:
        """Tokens of a KV block, as asked or by the engine's plan; 1 where it counts tokens."""
        plan = self.setup.plan
        if self.question.block_size is not None:
            return self.question.block_size
        if plan is None:
            return 1
        if plan.kv is not None:
            return plan.kv.block_size
        return next((int(flag.value) for flag in plan.flags if flag.name in BLOCK_FLAGS), 1)

    def _does_not_start(self) -> DoesNotFitError:
        setup, plan = self.setup, self.setup.plan
        gpus = f"{setup.question.parallel.gpus} × {setup.gpu.name}"
        if plan is None or plan.reason is None:
            return DoesNotFitError(
                f"{setup.model.name} does not fit {gpus}",
                where="--model, --gpu, --tp",
                hint="`capplan vram` with the same options shows what to change",
            )
        hint = "`capplan vram` with the same options shows what to change"
        if plan.longest_model_len:
            hint = f"--max-model-len {plan.longest_model_len} starts; {hint}"
        return DoesNotFitError(
            f"{plan.engine} would not start {setup.model.name} on {gpus}: {plan.reason}",
            where=f"--gpu, --max-model-len {setup.question.max_model_len}",
            hint=hint,
        )

    @property
    def pool_tokens(self) -> float:
        """Tokens that the KV pool holds, of a model with windows as the engine counts them."""
        known, limits = self.setup.pool_tokens, self.limits
        if self.question.kv_blocks is None and known is not None and self.question.block_size is None:
            return known
        return float(limits.kv_blocks * limits.block_size / max(1, limits.kv_groups))

    @property
    def places(self) -> int:
        """Requests that run at once: max_num_seqs; of an engine without it, mean ones in the KV pool."""
        plan = self.setup.plan
        if self.question.max_num_seqs is not None or plan is None or plan.step_sequences is not None:
            return self.limits.max_num_seqs
        mean = max(1.0, self.load.mean_prompt_tokens + self.load.mean_output_tokens)
        return max(1, min(self.limits.max_num_seqs, int(self.pool_tokens / mean)))

    @property
    def around_s(self) -> float:
        """Network, HTTP, tokenisation and detokenisation of a request, outside of the engine."""
        if self.question.bounds:
            return self.question.network_s
        fitted = self._around
        around_s = self.setup.scheduling.first_token_s if fitted is None else fitted.first_token_s
        return around_s + self.question.network_s

    @property
    def looking(self) -> Looking | None:
        """How the engine looks for new requests; None: at every step, as it begins."""
        return None if self._around is None else self._around.looking()

    @cached_property
    def _around(self) -> Around | None:
        """What lies around the engine's steps; None for physics, a profile, a policy of no engine."""
        setup = self.setup
        if self.question.bounds or setup.local is not None or self.policy.engine is None:
            return None
        return around(setup.engine, experts=bool(setup.work.experts))

    @property
    def table(self) -> Table:
        """Step times: as estimated, or by physics alone."""
        return self.setup.physics if self.question.bounds else self.setup.table

    @cached_property
    def times(self) -> StepTimes:
        """The table as the simulator reads it."""
        table = self.table
        return TableTimes(table) if isinstance(table, StepTable) else SingleSteps(table.step_s)

    def slope_s(self, decoding: int, kv_tokens: int) -> float:
        """Seconds that one more token in all contexts adds to a decode-only step."""
        return self.table.decode_piece(decoding, kv_tokens)[1] if isinstance(self.table, StepTable) else 0.0

    def requests(self, seed: int) -> Workload:
        """The workload of a seed; users see an answer when it has come back to them."""
        spec = self.question.workload
        built = self.workload if seed == spec.seed else build(replace(spec, seed=seed))
        return Client(built, self.around_s) if self.around_s else built

    def replica(self, seed: int) -> Replica:
        """An empty replica; which drafts it accepts is drawn by the seed."""
        drafted, rate = self.question.speculative_tokens, self.question.acceptance_rate
        if drafted is not None and rate is not None:
            return SpeculativeReplica(self.limits, drafted=drafted, acceptance_rate=rate, seed=seed)
        return self.policy.replica(self.limits)


class Client:
    """A workload whose clients sit `around_s` away from the engine: what follows an answer comes later."""

    def __init__(self, workload: Workload, around_s: float) -> None:
        self.workload, self.around_s = workload, around_s
        self.shares, self.count = workload.shares, workload.count
        self.arrivals = workload.arrivals

    def after(self, request: Request, now_s: float) -> Request | None:
        """What follows an answer that leaves the engine now."""
        return self.workload.after(request, now_s + self.around_s)


def pause_s(workload: BuiltWorkload) -> float:
    """The mean think time of a workload's users, in s."""
    think = getattr(workload, "think_time", None)
    return 0.0 if think is None else float(think.mean_s)
