"""A measured run → what capplan would have said: the run's layout, the engine's defaults, the step model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Generic, TypeVar

from capplan import engine_speed
from capplan.engine_speed import Behaviour
from capplan.engines import plan as engines
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.errors import InputError
from capplan.formulas import serving
from capplan.formulas.serving import Served, Traffic
from capplan.kv import kv_layout
from capplan.results.measured import MeasuredRun
from capplan.results.subject import Subject
from capplan.specs import Format, Gpu, Model, Parallelism
from capplan.split import Rank
from capplan.step import StepTable, compile
from capplan.weights import weight_budget

T = TypeVar("T")

# Whose scheduler and kernels stand for an engine that capplan does not know.
STAND_IN: Final = "vllm"
# Beside weights and KV cache where an engine's own rules refuse: activations, graphs, context.
_BESIDE_BYTES: Final = 4e9
# Where weights alone fill the default share of the memory, operators raise it.
_RAISED: Final = 0.95
_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted for one run. `served` is of one replica; throughputs are of all."""

    served: Served
    parallel: Parallelism
    replicas: int
    behaviour: Behaviour

    @property
    def output_token_per_s(self) -> float:
        """Tokens out per second of the whole deployment."""
        return self.served.output_token_per_s * self.replicas

    @property
    def total_token_per_s(self) -> float:
        """Tokens in and out per second of the whole deployment."""
        return self.served.total_token_per_s * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """Why a run has no prediction."""

    reason: str


def layout_of(run: MeasuredRun, subject: Subject) -> tuple[Parallelism, int] | Unanswered:
    """How the run's replica was spread over its GPUs, and how many replicas there were."""
    if run.tp is None:
        if run.n_gpu is None:
            return Unanswered(reason="no GPU count")
        tp = _least_tp(subject, run.n_gpu)
        return Parallelism(tp=tp), max(1, run.n_gpu // tp)
    notes, pp, tp, dp = run.notes, run.pp or 1, run.tp, 1
    gpus = run.n_gpu or tp * pp
    if notes.attention_dp:
        dp = notes.attention_dp_ranks or max(1, gpus // pp)
        # A server's --tp-size counts the ranks of all attention groups.
        if tp * dp * pp > gpus:
            tp = max(1, gpus // (dp * pp))
    ep = notes.moe_ep or (dp if notes.attention_dp and notes.moe_tp is None else 1)
    if (tp * dp) % ep:
        return Unanswered(reason="expert groups do not divide the GPUs")
    parallel = Parallelism(tp=tp, pp=pp, dp=dp, ep=ep)
    return parallel, max(1, gpus // parallel.gpus)


def _least_tp(subject: Subject, gpus: int) -> int:
    """The fewest GPUs that hold the weights in 70 % of their memory: how submissions lay out replicas."""
    tp = 1
    while tp < gpus:
        held = _weights_bytes(subject.model, subject.weights, Parallelism(tp=tp))
        if held is not None and held < 0.7 * subject.gpu.usable_bytes:
            break
        tp *= 2
    return min(tp, gpus)


def predict(
    run: MeasuredRun,
    subject: Subject,
    *,
    speed: Mapping[str, Any] | None = None,
) -> Prediction | Unanswered:
    """What the step model says of a run; Unanswered where the row leaves open what was run.

    `speed` stands in for profiles/calibrations/serving.yaml.
    """
    if run.mode == "disagg_closed_loop":
        return Unanswered(reason="separate prefill and decode workers")
    if run.isl is None or run.osl is None:
        return Unanswered(reason="no token counts")
    layout = layout_of(run, subject)
    if isinstance(layout, Unanswered):
        return layout
    parallel, replicas = layout
    engine = run.engine if run.engine in engines.ENGINES else STAND_IN
    own = engine_speed.behaviour(engine, subject.gpu, version=run.engine_version, data=speed)
    kv_bits = kv_bits_of(subject, engine)
    try:
        table = _table(subject, parallel, engine, kv_bits)
        plan = _plan(run, subject, parallel, engine, kv_bits)
    except InputError as error:
        return Unanswered(reason=error.message)
    notes = run.notes
    scheduling = replace(
        own.scheduling,
        max_num_seqs=(notes.max_num_seqs or plan.max_num_seqs) * parallel.dp,
        max_num_batched_tokens=(notes.max_num_batched_tokens or plan.max_num_batched_tokens) * parallel.dp,
    )
    table.host = own.host
    served = _answer(
        run,
        table,
        scheduling,
        replicas=replicas,
        kv_pool_tokens=_pool_tokens(subject, parallel, kv_bits, plan, run.isl + run.osl / 2),
    )
    if isinstance(served, Unanswered):
        return served
    return Prediction(served=served, parallel=parallel, replicas=replicas, behaviour=own)


def _answer(
    run: MeasuredRun,
    table: StepTable,
    scheduling: serving.Scheduling,
    *,
    replicas: int,
    kv_pool_tokens: float,
) -> Served | Unanswered:
    """The run's kind of load on one replica."""
    assert run.isl is not None
    assert run.osl is not None
    traffic = Traffic(isl=run.isl, osl=run.osl)
    users = None if run.concurrency is None else max(1.0, run.concurrency / replicas)
    if run.mode == "static_batch":
        if users is None:
            return Unanswered(reason="no batch")
        return serving.static_batch(step_s=table.step_s, traffic=traffic, scheduling=scheduling, batch=users)
    rate = run.request_per_s
    if rate is not None and not math.isinf(rate):
        served = serving.open_loop(
            step_s=table.step_s,
            traffic=traffic,
            scheduling=scheduling,
            request_per_s=rate / replicas,
            kv_pool_tokens=kv_pool_tokens,
        )
        counted = run.notes.requests
        if served.steady or counted is None:
            return served
        # A run of so many requests above the stable rate ends all the same: they pile up as in a burst.
        return serving.burst(
            step_s=table.step_s,
            traffic=traffic,
            scheduling=scheduling,
            requests=counted / replicas,
            kv_pool_tokens=kv_pool_tokens,
        )
    requests = None if run.notes.requests is None else run.notes.requests / replicas
    if users is None:
        return serving.burst(
            step_s=table.step_s,
            traffic=traffic,
            scheduling=scheduling,
            requests=requests or math.inf,
            kv_pool_tokens=kv_pool_tokens,
        )
    if requests is not None:
        users = min(users, requests)
        traffic = replace(traffic, requests_per_user=max(1.0, requests / users))
    return serving.closed_loop(
        step_s=table.step_s,
        traffic=traffic,
        scheduling=scheduling,
        users=users,
        kv_pool_tokens=kv_pool_tokens,
    )


def kv_bits_of(subject: Subject, engine: str) -> float:
    """Bits of a KV element: as the run says, as the checkpoint carries, else 16.

    TensorRT-LLM's checkpoints of 8 and 4 bit arithmetic (ModelOpt) carry an FP8 cache.
    """
    if subject.kv is not None:
        return subject.kv.effective_bits
    if engine == "tensorrt-llm" and _arithmetic(subject) in ("fp8", "fp4"):
        return 8
    own = subject.model.quantization
    if subject.weights is None and own is not None and own.kv_format is not None:
        return 8
    return 16


def _arithmetic(subject: Subject) -> str:
    """What most of the weights are multiplied in."""
    own = subject.model.quantization
    stored = subject.weights or (own.rules[-1][1] if own is not None and own.rules else None)
    return "16-bit" if stored is None else stored.arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What the engine's own rules give it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    pool_bytes: float


_PLAIN_LIMITS: Final = _Limits(max_num_seqs=256, max_num_batched_tokens=8192, pool_bytes=0.0)


def _plan(run: MeasuredRun, subject: Subject, parallel: Parallelism, engine: str, kv_bits: float) -> _Limits:
    return _planned(
        _Key(subject.model),
        _Key(subject.gpu),
        _Key(subject.weights),
        parallel,
        engine,
        run.engine_version,
        kv_bits,
    )


class _Key(Generic[T]):
    """An object as a cache key, by identity."""

    def __init__(self, of: T) -> None:
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.of is other.of


@cache
def _planned(
    model: _Key[Model],
    gpu: _Key[Gpu],
    weights: _Key[Format | None],
    parallel: Parallelism,
    engine: str,
    version: str | None,
    kv_bits: float,
) -> _Limits:
    held = _weights_bytes(model.of, weights.of, parallel)
    if held is None:
        raise InputError("the model does not split so", where="tp, ep", hint="another layout")
    total = gpu.of.usable_bytes

    def asked(share: float | None, release: str | None) -> EnginePlan:
        return engines.plan(
            engine,
            model.of,
            weights_bytes=round(held),
            total_bytes=total,
            gpu=gpu.of,
            flags=EngineFlags(
                version=release,
                tp=parallel.tp,
                kv_bits=kv_bits,
                max_model_len=min(model.of.max_context or 16384, 16384),
                gpu_memory_utilization=share,
            ),
        )

    plan: EnginePlan | None = None
    for share in (None, _RAISED):
        for release in dict.fromkeys((version, None)):
            try:
                plan = asked(share, release)
                break
            except InputError:
                continue
        if plan is not None and plan.kv_pool.value > 0.02 * total:
            break
    pool = float(plan.kv_pool.value) if plan is not None else 0.0
    if pool <= 0.02 * total:
        pool = max(0.02 * total, _RAISED * total - held - _BESIDE_BYTES)
    return _Limits(
        max_num_seqs=(plan.step_sequences if plan is not None else None) or 256,
        max_num_batched_tokens=(plan.step_tokens if plan is not None else None) or 8192,
        pool_bytes=pool,
    )


def _weights_bytes(model: Model, weights: Format | None, parallel: Parallelism) -> float | None:
    """Weights of one rank; None for a split the model does not allow."""
    rank = Rank(tp=parallel.tp, ep=parallel.ep, expert_tp=parallel.moe_tp)
    try:
        return weight_budget(model, weights, rank=rank).bytes / parallel.pp
    except InputError:
        return None


def _pool_tokens(
    subject: Subject, parallel: Parallelism, kv_bits: float, limits: _Limits, context: float
) -> float:
    """Tokens that all attention groups' pools hold, at sequences of `context` tokens."""
    layout = kv_layout(subject.model, kv_bits=kv_bits, tp=parallel.tp)
    each = layout.sequence_bytes(max(1, round(context))) / parallel.pp
    return limits.pool_bytes / each * context * parallel.dp if each else math.inf


_tables: dict[tuple[int, str, int, Parallelism, str, float], StepTable] = {}


def _table(subject: Subject, parallel: Parallelism, engine: str, kv_bits: float) -> StepTable:
    key = (id(subject.model), subject.gpu.id, id(subject.weights), parallel, engine, kv_bits)
    if key not in _tables:
        _tables[key] = compile(
            subject.model,
            subject.gpu,
            precision=subject.weights,
            kv_bits=kv_bits,
            parallel=parallel,
            engine=engine,
        )
    return _tables[key]
