"""A question about speed → its answer: TTFT, TPOT and throughput, as bound by physics and as estimated.

`latency(...)` is what `capplan latency` prints and what scripts call. Step times are step.py's, the way from
steps to users is formulas/serving.py's, what the engine adds is engine_speed.py's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capplan import (
    bottleneck,
    catalog,
    engine_speed,
    estimate,
    latency_profile,
    lone_step,
    model_source,
    slo,
    step,
)
from capplan.engines.plan import EngineFlags, engine_id
from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas import queueing, serving
from capplan.latency_answer import Change, Figure, LatencyEstimate, Least, SweepPoint
from capplan.latency_question import LatencyQuestion, check, check_subject
from capplan.local_costs import LocalCosts
from capplan.op_costs import Bounds, Calibration, OpCosts, load_calibration, shipped
from capplan.specs import Gpu
from capplan.work import work_of

if TYPE_CHECKING:
    pass

SWEEP: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Users of the batch sweep."""


def latency(model: str, *, gpu: str = "", figures_alone: bool = False, **fields: Any) -> LatencyEstimate:
    """TTFT, TPOT and throughput of a model on a GPU under a load; the fields are LatencyQuestion's.

    Without `gpu`, `profile` is a file and brings its device.
    `figures_alone`: without the sweep over users and what other choices would change.
    Raises InputError for a question that cannot be answered.
    Example: latency("8b", gpu="h100", concurrency=16).tpot.estimate
    """
    question = LatencyQuestion(model=model, gpu=gpu, **fields)
    return figures(question) if figures_alone else answer(question)


def answer(question: LatencyQuestion) -> LatencyEstimate:
    """The answer, with the sweep over users and what other choices would change."""
    check(question)
    setup = _Setup(question)
    made = setup.estimate()
    if made.fits is False or question.bounds:
        return made
    return replace(made, sweep=setup.sweep(), changes=tuple(_changes(question, made)))


def figures(question: LatencyQuestion) -> LatencyEstimate:
    """The answer without sweep and changes, for callers that read its figures alone."""
    check(question)
    return _Setup(question).estimate()


class _Setup:
    """The subject of a question: its memory under the engine, its step tables, its scheduling."""

    def __init__(self, question: LatencyQuestion) -> None:
        self.question = question
        self.model = model_source.load(question.model, online=question.online)
        self.gpu, self.local = latency_profile.device(question)
        check_subject(question, self.model, self.gpu)
        named = question.precision != "auto"
        self.precision = catalog.weight_format(question.precision) if named else None
        self.engine = engine_id(question.engine)
        self.slo = None if question.slo is None else slo.parse_slo(question.slo)
        self.memory = _memory(question, self.engine, self.gpu)
        self.plan = self.memory.engine
        work = work_of(
            self.model,
            self.precision,
            kv_bits=self.memory.kv_format.effective_bits,
            parallel=question.parallel,
        )
        self.behaviour = engine_speed.behaviour(
            self.engine,
            self.gpu,
            version=self.plan.version if self.plan is not None else None,
            experts=bool(work.experts),
        )
        self.physics = step.StepTable(work, Bounds(self.gpu))
        self.costs: OpCosts
        if self.local is not None:
            self.costs = latency_profile.costs(self.local, self.engine, work)
            self.behaviour = latency_profile.behaviour(
                self.local, self.costs, self.behaviour, self.model.layers
            )
        else:
            self.costs = OpCosts(self.gpu, self.engine, calibrations(question.profile, self.gpu))
        self.table: step.StepTable | lone_step.LoneTable
        self.table = step.StepTable(work, self.costs, self.behaviour.host)
        if self.engine in lone_step.ENGINES and self.local is None:
            self._by_fractions()
        self.traffic = serving.Traffic(
            isl=question.isl,
            osl=question.osl,
            cached=question.prefix_shared,
            network_s=question.network_s,
        )
        self.scheduling = self._limited(self.behaviour.scheduling)

    def _by_fractions(self) -> None:
        """llama.cpp's steps: by fractions of the card's rates, its GPUs one after the other."""
        self.table = lone_step.LoneTable(
            self.model,
            self.gpu,
            precision=self.precision,
            kv_bits=self.memory.kv_format.effective_bits,
            gpus=self.question.parallel.gpus,
            engine=self.engine,
        )
        self.behaviour = replace(
            self.behaviour,
            measured=not self.table.borrowed,
            host=step.Host(),
            scheduling=serving.Scheduling(prefill_first=True, wait_steps=0.0, bursts=0.0),
            bands=self.table.bands(),
        )

    def _limited(self, scheduling: serving.Scheduling) -> serving.Scheduling:
        """The engine's limits on a step, as the plan resolves them; each data-parallel rank has its own."""
        plan, ranks = self.plan, self.question.dp
        if plan is not None and plan.step_sequences is not None:
            scheduling = replace(scheduling, max_num_seqs=plan.step_sequences * ranks)
        if plan is not None and plan.step_tokens is not None:
            scheduling = replace(scheduling, max_num_batched_tokens=plan.step_tokens * ranks)
        return scheduling

    @property
    def pool_tokens(self) -> float | None:
        """KV tokens of all data-parallel ranks; None where the engine's plan does not say."""
        if self.plan is None or self.plan.kv_tokens is None:
            return None
        return float(self.plan.kv_tokens * self.question.dp)

    def serve(
        self,
        table: "step.StepTable | lone_step.LoneTable",
        scheduling: serving.Scheduling,
        users: int | None = None,
    ) -> serving.Served:
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

    def estimate(self) -> LatencyEstimate:
        """The figures without sweep and changes."""
        question, plan = self.question, self.plan
        ideal = serving.Scheduling(
            max_num_seqs=self.scheduling.max_num_seqs,
            max_num_batched_tokens=self.scheduling.max_num_batched_tokens,
            wait_steps=0.0,
            bursts=0.0,
        )
        bound = self.serve(self.physics, ideal)
        fits = None if plan is None else plan.starts
        if (fits is None and self.memory.fits is False) or self._on_host():
            fits = False
        served = None if question.bounds or fits is False else self.serve(self.table, self.scheduling)
        least = self._least(bound, bound.batch if served is None else min(bound.batch, served.batch))
        shown, table = (bound, self.physics) if served is None else (served, self.table)
        decode = table.ops(_decode_load(self.traffic, shown))
        prefill = table.ops(_prefill_load(self.traffic, self.scheduling))
        limits = bottleneck.shares(decode, self.costs.rates)
        return LatencyEstimate(
            question=question,
            model=self.model,
            gpu=self.gpu,
            precision=self.precision,
            kv_format=self.memory.kv_format,
            fits=fits,
            plan=plan,
            ttft=self._figure("ttft", least.ttft_s, served.ttft_s if served else None),
            tpot=self._figure("tpot", least.tpot_s, served.tpot_s if served else None),
            e2e=self._figure("e2e", least.e2e_s, served.e2e_s if served else None),
            throughput=self._figure(
                "throughput", least.output_token_per_s, served.output_token_per_s if served else None
            ),
            bound=bound,
            served=served,
            decode_ops=decode,
            prefill_ops=prefill,
            regime={
                "prefill": bottleneck.regime(prefill, self.costs.rates),
                "decode": bottleneck.regime(decode, self.costs.rates),
            },
            limits=limits,
            bottleneck=_bottleneck(served, limits),
            slo=self.slo,
            meets=None if served is None else self.meets(served),
            notes=tuple(self._notes(served)),
        )

    def _on_host(self) -> int:
        """Layers that llama.cpp leaves on the host, whose speed nobody measured here."""
        if self.plan is None or "gpus" not in self.plan.more:
            return 0
        return self.model.layers - sum(int(gpu["layers"]) for gpu in self.plan.more["gpus"])

    def _least(self, bound: serving.Served, batch: float) -> Least:
        """What no schedule can beat with as many requests under way, `batch` of them decoding.

        TTFT ≥ network + one prompt alone; TPOT ≥ a step that only decodes; tokens/s ≤ n · N / E2E
        """
        question, running, batch = self.question, max(1.0, bound.running), max(1.0, batch)
        new, cached = self.traffic.new_tokens, self.traffic.cached
        pairs = queueing.prompt_pairs(new_tokens=new, past_tokens=cached)
        first = question.network_s + self.physics.step_s(
            decode_sequences=0, kv_tokens=0, prompt_tokens=new, prompt_pairs=pairs
        )
        held = batch * self.traffic.held_tokens
        tpot = self.physics.step_s(decode_sequences=batch, kv_tokens=held) if question.osl > 1 else None
        whole = first + (question.osl - 1) * (tpot or 0.0)
        rate = question.request_per_s if question.request_per_s is not None else running / whole
        return Least(ttft_s=first, tpot_s=tpot, e2e_s=whole, output_token_per_s=rate * question.osl)

    def _figure(self, name: str, bound: float | None, value: float | None) -> Figure:
        """A figure with the band of runs held out, wider in doubt, and never beyond what physics allows."""
        if bound is not None and not math.isfinite(bound):
            bound = None
        if value is None or not math.isfinite(value):
            return Figure(bound=bound)
        band = self.behaviour.band(name, self.doubt)
        low, high = value * band.low, value * band.high
        if bound is not None and name == "throughput":
            high = max(value, min(high, bound))
        elif bound is not None:
            low = min(value, max(low, bound))
        return Figure(
            bound=bound,
            estimate=value,
            low=low,
            high=high,
            provenance=self.costs.provenance,
        )

    @property
    def doubt(self) -> bool:
        """Whether the band must widen: a GPU whose kernels were not measured, an engine without runs."""
        return not self.behaviour.measured or bool(self._lenders())

    def _lenders(self) -> tuple[str, ...]:
        """GPUs whose kernels stand for this one's; llama.cpp's fractions are of no GPU in particular."""
        return () if isinstance(self.table, lone_step.LoneTable) else self.costs.borrowed()

    def meets(self, served: serving.Served) -> bool | None:
        """Whether the estimate is within the limits; None without limits."""
        if self.slo is None:
            return None
        pairs = ((self.slo.ttft_s, served.ttft_s), (self.slo.tpot_s, served.tpot_s))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)

    def sweep(self) -> tuple[SweepPoint, ...]:
        """Closed loops of more and more users, up to twice what runs at once."""
        most, _ = serving.running_limit(
            traffic=self.traffic, scheduling=self.scheduling, kv_pool_tokens=self.pool_tokens
        )
        made: list[SweepPoint] = []
        for users in SWEEP:
            if made and users > 2 * most:
                break
            served = self.serve(self.table, self.scheduling, users)
            made.append(
                SweepPoint(
                    users=users,
                    ttft_s=served.ttft_s,
                    tpot_s=served.tpot_s,
                    output_token_per_s=served.output_token_per_s,
                    meets=self.meets(served),
                )
            )
        return tuple(made)

    def _notes(self, served: serving.Served | None) -> Iterator[str]:
        if isinstance(self.costs, LocalCosts) and self.local is not None:
            yield from latency_profile.notes(self.local, self.costs)
        if self.plan is not None and self.plan.starts is False:
            yield f"{self.plan.engine} refuses to start: {self.plan.reason}"
        if self._on_host():
            yield f"{self._on_host()} layers stay on the host, whose speed was not measured: bounds only"
        for shape in self.physics.work.gemms if self.local is None else ():
            runs = self.costs.rates.runs(shape.dtype)
            if runs != shape.dtype:
                yield (
                    f"{self.gpu.name} multiplies no {shape.dtype}: its weights are widened to 16 bits in the "
                    f"kernel ({runs}), which costs time in prefill"
                )
                break
        borrowed = self._lenders()
        if borrowed and served is not None:
            yield f"kernels as measured on {', '.join(borrowed)}, at this GPU's rates: a wider band"
        if served is not None and not self.behaviour.measured:
            yield f"no public runs of {self.engine} on {self.gpu.architecture} were fitted: a wider band"
        if isinstance(self.table, lone_step.LoneTable) and served is not None and served.batch > 1.5:
            yield f"{self.engine} was measured with one sequence at a time: this is beyond it"
        if served is not None and not served.steady:
            yield (
                f"{self.question.request_per_s:g} requests/s is above the stable "
                f"{served.stable_request_per_s:.3g}: no steady state, the queue grows without end"
            )
        if served is not None and served.limit == "kv":
            yield f"the KV pool holds {served.running:,.0f} of these requests at once: the others wait"
        elif served is not None and served.limit == "max_num_seqs":
            yield f"max_num_seqs {self.scheduling.max_num_seqs}: the others wait"


def calibrations(profile: str, gpu: Gpu) -> tuple[Calibration, ...]:
    """The calibrations to use: those shipped ("auto", or one's id), or a file's before them.

    Errors: InputError for a file of another GPU, or an unknown name.
    """
    known = shipped()
    if profile == "auto":
        return known
    found = next((entry for entry in known if profile in (entry.id, entry.gpu_id)), None)
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


def _memory(question: LatencyQuestion, engine: str, gpu: Gpu) -> "estimate.VramEstimate":
    """Whether one request fits, and the engine's KV pool and limits.

    llama.cpp allocates its cache at start, for as many slots as it is told: as many as users.
    """
    longest, slots = question.isl + question.osl, question.max_num_seqs
    if engine in lone_step.ENGINES:
        slots = slots or question.concurrency or question.batch or 1
        longest *= slots
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
        online=question.online,
        engine=engine,
        engine_flags=EngineFlags(
            version=question.engine_version,
            max_num_seqs=slots,
            max_num_batched_tokens=question.max_num_batched_tokens,
            gpu_memory_utilization=question.gpu_memory_utilization,
            max_model_len=longest,
        ),
    )


def _decode_load(traffic: serving.Traffic, served: serving.Served) -> step.Load:
    """The mean step without prompts."""
    batch = max(1.0, served.batch)
    return step.Load(decode_sequences=batch, kv_tokens=batch * traffic.held_tokens)


def _prefill_load(traffic: serving.Traffic, scheduling: serving.Scheduling) -> step.Load:
    """One prompt's first chunk."""
    tokens = min(traffic.new_tokens, float(scheduling.max_num_batched_tokens))
    pairs = queueing.prompt_pairs(new_tokens=tokens, past_tokens=traffic.cached)
    return step.Load(prompt_sequences=1, prompt_tokens=tokens, prompt_pairs=pairs)


def _bottleneck(served: serving.Served | None, limits: Mapping[str, float]) -> str | None:
    """What to change first: memory where requests wait for it, else what the mean step waits for."""
    if served is not None and served.limit == "kv" and served.queue_s > 0:
        return bottleneck.KV
    return max(limits, key=lambda name: limits[name]) if any(limits.values()) else None


def _changes(question: LatencyQuestion, made: LatencyEstimate) -> Iterator[Change]:
    """Other choices, one at a time; those that cannot be are left out."""
    tries: list[tuple[str, str, dict[str, Any]]] = []
    held = 16.0 if made.precision is None else made.precision.element_bits
    if made.precision is None and made.model.quantization is not None:
        held = made.model.quantization.rules[-1][1].element_bits
    if held > 8:
        tries.append(("weights in FP8", "--precision fp8", {"precision": "fp8"}))
    if held > 4:
        tries.append(("weights in 4 bits", "--precision int4", {"precision": "int4"}))
    if made.kv_format.effective_bits > 8:
        tries.append(("KV cache in FP8", "--kv-dtype fp8", {"kv_dtype": "fp8"}))
    tries.append((f"{question.tp * 2} GPUs a layer", f"--tp {question.tp * 2}", {"tp": question.tp * 2}))
    users = question.concurrency or 0
    if users > 1:
        half = users // 2
        tries.append(("half the users", f"--concurrency {half}", {"concurrency": half}))
    for change, flag, fields in tries:
        try:
            after = _Setup(replace(question, **fields)).estimate()
        except InputError:
            continue  # this model, GPU or engine does not take the change
        if after.served is None or not after.served.steady:
            continue
        yield Change(
            change=change,
            flag=flag,
            ttft_s=after.served.ttft_s,
            tpot_s=after.served.tpot_s,
            output_token_per_s=after.served.output_token_per_s,
        )


__all__ = ["LatencyEstimate", "answer", "figures", "latency"]
