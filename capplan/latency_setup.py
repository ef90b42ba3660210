"""The subject of a question about speed: its memory under the engine, its step times, its scheduling."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from capplan import catalog, engine_speed, estimate, latency_profile, lone_step, model_source, slo, step
from capplan.engines.plan import EngineFlags, engine_id
from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas import serving
from capplan.latency_question import LatencyQuestion, check_subject
from capplan.local_costs import LocalCosts
from capplan.op_costs import Bounds, Calibration, OpCosts, load_calibration, shipped
from capplan.specs import Format, Gpu, Model
from capplan.speculative import SpeculativeTable, draft_work
from capplan.work import StepWork, verifying, work_of

Table = step.StepTable | SpeculativeTable | lone_step.LoneTable


class Setup:
    """Everything about a question that does not depend on its load.

    `physics` and `table` are step times as bound and as estimated, `behaviour` what the engine adds.
    """

    def __init__(self, question: LatencyQuestion) -> None:
        self.question = question
        self.model = model_source.load(question.model, online=question.online)
        self.gpu, self.local = latency_profile.device(question)
        check_subject(question, self.model, self.gpu)
        named = question.precision != "auto"
        self.precision = catalog.weight_format(question.precision) if named else None
        self.engine = engine_id(question.engine)
        self.slo = None if question.slo is None else slo.parse_slo(question.slo)
        self.lone = self.engine in lone_step.ENGINES and self.local is None
        self._check_engine()
        self.memory = _memory(question, self.engine, self.gpu)
        self.plan = self.memory.engine
        self.work = self._work()
        self.draft = self._draft()
        self.costs = self._costs()
        self.behaviour = self._behaviour()
        self.physics = self._steps(Bounds(self.gpu, question.expert_skew), step.Host())
        self.table: Table
        if self.lone:
            self.table = lone = self._by_fractions()
            self.behaviour = _by_fractions(self.behaviour, lone)
        else:
            self.table = self._steps(self.costs, self.behaviour.host)
        self.traffic = serving.Traffic(
            isl=question.isl,
            osl=question.osl,
            cached=question.prefix_shared,
            equal=question.lengths == "equal",
            network_s=question.network_s,
        )
        self.scheduling = self._limited(self.behaviour.scheduling)

    def _check_engine(self) -> None:
        """Refuse what is not modelled of engines that go by fractions of a card's rates."""
        question = self.question
        asked = {
            "--speculative-tokens": question.speculative_tokens,
            "--expert-skew": question.expert_skew,
        }
        for name, value in asked.items():
            if self.lone and value:
                raise InputError(
                    f"not modelled for {self.engine}, whose steps go by fractions of the card's rates",
                    where=f"{name}, --engine {question.engine}",
                    hint="--engine vllm, or without it",
                )

    def _work(self) -> StepWork:
        """One step of the model, with as many tokens a sequence as are verified."""
        question = self.question
        work = work_of(
            self.model,
            self.precision,
            kv_bits=self.memory.kv_format.effective_bits,
            parallel=question.parallel,
        )
        if question.expert_skew and not work.experts:
            raise InputError(
                f"{self.model.name} has no routed experts", where="--expert-skew", hint="leave it out"
            )
        return verifying(work, 1 + (question.speculative_tokens or 0))

    def _draft(self) -> StepWork | None:
        """One pass of the draft model; None without one."""
        question = self.question
        if question.draft_model is None:
            return None
        return draft_work(
            question.draft_model,
            self.model,
            self.precision,
            kv_bits=self.memory.kv_format.effective_bits,
            parallel=question.parallel,
            online=question.online,
        )

    def _costs(self) -> OpCosts:
        """Times of operations: calibrated for the GPU, or by a profile of the device itself."""
        question = self.question
        if self.local is None:
            known = calibrations(question.profile, self.gpu)
            return OpCosts(self.gpu, self.engine, known, skew=question.expert_skew)
        costs = latency_profile.costs(self.local, self.engine, self.work)
        costs.skew = question.expert_skew
        return costs

    def _behaviour(self) -> engine_speed.Behaviour:
        """What the engine adds; a profile of the device itself brings what lies around its operations."""
        found = engine_speed.behaviour(
            self.engine,
            self.gpu,
            version=self.plan.version if self.plan is not None else None,
            experts=bool(self.work.experts),
            attention_ranks=self.question.dp,
        )
        if self.local is None or not isinstance(self.costs, LocalCosts):
            return found
        return latency_profile.behaviour(self.local, self.costs, found, self.model.layers)

    def _steps(self, costs: Bounds, host: step.Host) -> step.StepTable | SpeculativeTable:
        """Step times by these costs; the engine's own time is added once a step, not to a draft's passes."""
        target = step.StepTable(self.work, costs, host)
        drafted = self.question.speculative_tokens
        if drafted is None:
            return target
        alone = replace(host, step_s=0.0, sequence_s=0.0)
        draft = None if self.draft is None else step.StepTable(self.draft, costs, alone)
        return SpeculativeTable(target, draft, drafted)

    def plain_table(self, stored: Format | None) -> step.StepTable:
        """Step times of the same model with its weights stored so, without drafts."""
        work = work_of(
            self.model,
            stored,
            kv_bits=self.memory.kv_format.effective_bits,
            parallel=self.question.parallel,
        )
        # Costs of their own: what these choose is not what the answer was made of.
        return step.StepTable(work, self._costs(), self.behaviour.host)

    def _by_fractions(self) -> lone_step.LoneTable:
        """llama.cpp's steps: by fractions of the card's rates, its GPUs one after the other."""
        return lone_step.LoneTable(
            self.model,
            self.gpu,
            precision=self.precision,
            kv_bits=self.memory.kv_format.effective_bits,
            gpus=self.question.parallel.gpus,
            engine=self.engine,
        )

    def _limited(self, scheduling: serving.Scheduling) -> serving.Scheduling:
        """The engine's limits on a step, as the plan resolves them; each data-parallel rank has its own.

        SGLang's --max-running-requests, where it is given, is over all of them.
        """
        plan, ranks = self.plan, self.question.dp
        shared = self.engine == "sglang" and self.question.max_num_seqs is not None
        changes: dict[str, Any] = {"tokens_per_step": self.question.tokens_per_step}
        if plan is not None and plan.step_sequences is not None:
            changes["max_num_seqs"] = plan.step_sequences * (1 if shared else ranks)
        elif self.pool_tokens is not None:
            # TGI has no such limit by itself: its token budget is one.
            changes["max_num_seqs"] = self.question.max_num_seqs or max(1, int(self.pool_tokens))
        if plan is not None and plan.step_tokens is not None:
            changes["max_num_batched_tokens"] = plan.step_tokens * ranks
        return replace(scheduling, **changes)

    @property
    def pool_tokens(self) -> float | None:
        """KV tokens of all data-parallel ranks; None where the engine's plan does not say."""
        if self.plan is None or self.plan.kv_tokens is None:
            return None
        return float(self.plan.kv_tokens * self.question.dp)

    @property
    def largest_batch(self) -> int | None:
        """Requests whose whole contexts the KV pool holds at once; None where the pool is not known."""
        pool = self.pool_tokens
        return None if pool is None else int(pool // (self.question.isl + self.question.osl))

    @property
    def batch_fits(self) -> bool:
        """Whether one static batch, if that is asked, is held from start to end."""
        batch, largest = self.question.batch, self.largest_batch
        return batch is None or largest is None or batch <= largest

    @property
    def on_host(self) -> int:
        """Layers that llama.cpp leaves on the host, whose speed nobody measured here."""
        if self.plan is None or "gpus" not in self.plan.more:
            return 0
        return self.model.layers - sum(int(gpu["layers"]) for gpu in self.plan.more["gpus"])

    @property
    def lenders(self) -> tuple[str, ...]:
        """GPUs whose kernels stand for this one's; llama.cpp's fractions are of no GPU in particular."""
        return () if self.lone else self.costs.borrowed()

    @property
    def doubt(self) -> bool:
        """Whether the band must widen: kernels of another GPU, or a way to run that no fitted run had."""
        return (
            not self.behaviour.measured
            or not self.behaviour.covered
            or bool(self.lenders)
            or self.question.speculative_tokens is not None
        )

    def serve(self, table: Table, scheduling: serving.Scheduling, users: int | None = None) -> serving.Served:
        """What users see under the question's load, or in a closed loop of `users`."""
        question = self.question
        common: dict[str, Any] = {
            "step_s": table.step_s,
            "traffic": self.traffic,
            "scheduling": scheduling,
        }
        if users is None and question.batch is not None:
            return serving.static_batch(**common, batch=question.batch)
        common["kv_pool_tokens"] = self.pool_tokens
        if users is None and question.request_per_s is not None:
            return serving.open_loop(**common, request_per_s=question.request_per_s)
        if users is None and question.requests is not None:
            return serving.burst(**common, requests=question.requests)
        return serving.closed_loop(**common, users=users or question.concurrency or 1)


def calibrations(profile: str, gpu: Gpu) -> tuple[Calibration, ...]:
    """The calibrations to use: those shipped ("auto", or one's id), or a file's before them.

    Errors: InputError for a file of another GPU, or an unknown name.
    """
    known = shipped()
    if profile == "auto":
        return known
    named = catalog.index("gpus").get(catalog.normalised(profile), profile)
    found = next((entry for entry in known if named in (entry.id, entry.gpu_id)), None)
    if found is None:
        path = Path(profile)
        if not path.is_file():
            names = [entry.id for entry in known]
            raise InputError(
                f"no calibration {shown(profile)}",
                where="--profile",
                hint=did_you_mean(profile, names, f"auto, a file, or one of {', '.join(names)}"),
            )
        found = load_calibration(path)
    if found.gpu_id != gpu.id:
        raise InputError(
            f"the calibration is of {found.gpu_id}, the question of {gpu.id}",
            where="--profile, --gpu",
            hint=f"--gpu {found.gpu_id}, or --profile auto",
        )
    return (found, *(entry for entry in known if entry.id != found.id))


def _by_fractions(engine: engine_speed.Behaviour, table: lone_step.LoneTable) -> engine_speed.Behaviour:
    """An engine whose steps hold all that it adds, with the errors of cards held out."""
    return replace(
        engine,
        family=f"{table.backend.platform}, {table.family} weights",
        measured=not table.borrowed,
        host=step.Host(),
        scheduling=serving.Scheduling(prefill_first=True, wait_steps=0.0, bursts=0.0),
        bands=table.bands(),
    )


def _memory(question: LatencyQuestion, engine: str, gpu: Gpu) -> estimate.VramEstimate:
    """Whether one request fits, and the engine's KV pool and limits.

    llama.cpp allocates its cache at start, for as many slots as it is told: as many as users.
    """
    longest, slots = question.max_model_len or question.isl + question.osl, question.max_num_seqs
    if engine in lone_step.ENGINES:
        slots = slots or question.concurrency or question.batch or 1
    # A profiled device that no catalog knows counts by its memory alone.
    known = gpu.id in catalog.ids("gpus")
    return estimate.vram(
        question.model,
        precision=question.precision,
        kv_dtype=question.kv_dtype,
        users=question.dp,
        context=question.isl + question.osl,
        gpus=(question.gpu or gpu.id,) if known else (),
        gpu_memory_bytes=None if known else gpu.usable_bytes,
        tp=question.tp,
        pp=question.pp,
        dp=question.dp,
        ep=question.ep,
        draft_model=question.draft_model,
        online=question.online,
        engine=engine,
        engine_flags=EngineFlags(
            version=question.engine_version,
            max_num_seqs=slots,
            max_num_batched_tokens=question.max_num_batched_tokens,
            gpu_memory_utilization=question.gpu_memory_utilization,
            max_model_len=longest,
            block_size=question.block_size,
        ),
    )


def weight_bits(model: Model, precision: Format | None) -> float:
    """Bits of most of the weights: as asked, as the checkpoint's own, else 16."""
    if precision is not None:
        return precision.element_bits
    own = model.quantization
    return own.rules[-1][1].element_bits if own is not None and own.rules else 16.0
