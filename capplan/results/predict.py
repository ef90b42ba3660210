"""A measured run → what capplan would have said: the run's layout, the engine's defaults, the step model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Generic, TypeVar

from capplan import engine_speed
from capplan.engine_speed import Behaviour
from capplan.engines import plan as engines
from capplan.engines.kv_dtype import AUTO, kv_dtype
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.errors import InputError
from capplan.formulas import serving
from capplan.formulas.serving import Served
from capplan.kv import kv_layout
from capplan.results.measured import MeasuredRun
from capplan.results.subject import Subject
from capplan.results.workload import attention_dp, fp8_cache, poll_steps, requests_of, traffic_of
from capplan.specs import Format, Gpu, Model, Parallelism
from capplan.split import Rank
from capplan.step import Host, StepTable, compile
from capplan.weights import weight_budget

T = TypeVar("T")

# Whose scheduler and kernels stand for an engine that capplan does not know.
STAND_IN: Final = "vllm"
# Where weights alone fill the default share of the memory, operators raise it.
_RAISED: Final = 0.95


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
    ranked = notes.attention_dp or (attention_dp(run) and _has_experts(subject.model))
    if ranked:
        dp = notes.attention_dp_ranks or max(1, gpus // pp)
        # A server's --tp-size counts the ranks of all attention groups.
        if tp * dp * pp > gpus:
            tp = max(1, gpus // (dp * pp))
    ep = notes.moe_ep or (dp if ranked and notes.moe_tp is None else 1)
    if (tp * dp) % ep:
        return Unanswered(reason="expert groups do not divide the GPUs")
    parallel = Parallelism(tp=tp, pp=pp, dp=dp, ep=ep)
    return parallel, max(1, gpus // parallel.gpus)


@cache
def _has_experts_of(model: "_Key[Model]") -> bool:
    return any(tensor.role == "experts" for group in model.of.groups for tensor in group.layer.tensors())


def _has_experts(model: Model) -> bool:
    return _has_experts_of(_Key(model))


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
        # Published tables of such runs leave out how many workers of each kind shared the load.
        return Unanswered(reason="separate prefill and decode workers of unknown number")
    if run.isl is None or run.osl is None:
        return Unanswered(reason="no token counts")
    layout = layout_of(run, subject)
    if isinstance(layout, Unanswered):
        return layout
    parallel, replicas = layout
    engine = run.engine if run.engine in engines.ENGINES else STAND_IN
    own = engine_speed.behaviour(
        engine,
        subject.gpu,
        version=run.engine_version,
        experts=_has_experts(subject.model),
        attention_ranks=parallel.dp,
        data=speed,
    )
    kv_bits = 8.0 if subject.kv is None and fp8_cache(run, subject) else kv_bits_of(subject, engine)
    try:
        table = _table(subject, parallel, engine, kv_bits, own.host)
        plan = _plan(run, subject, parallel, engine, kv_bits)
    except InputError as error:
        return Unanswered(reason=error.message)
    if plan.pool_bytes <= 0 and run.mode != "static_batch":
        return Unanswered(reason="the weights leave no room for a KV cache")
    notes = run.notes
    scheduling = replace(
        own.scheduling,
        max_num_seqs=_sequences(notes.max_num_seqs, plan.max_num_seqs, engine, parallel.dp),
        max_num_batched_tokens=(notes.max_num_batched_tokens or plan.max_num_batched_tokens) * parallel.dp,
        poll_steps=float(poll_steps(run, subject)),
    )
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


def _sequences(stated: int | None, default: int, engine: str, ranks: int) -> int:
    """Sequences of all attention ranks; SGLang's --max-running-requests is over all of them."""
    if stated is not None and engine == "sglang":
        return stated
    return (stated or default) * ranks


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
    traffic = traffic_of(run, run.isl, run.osl)
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
    stated = requests_of(run)
    requests = None if stated is None else stated / replicas
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
    served = serving.closed_loop(
        step_s=table.step_s,
        traffic=traffic,
        scheduling=scheduling,
        users=users,
        kv_pool_tokens=kv_pool_tokens,
    )
    if requests is None:
        return served
    # Over the whole run: at its end ever fewer users have a request under way.
    slots = min(scheduling.max_num_seqs, max(1, round(users)))
    whole = serving.burst(
        step_s=table.step_s,
        traffic=traffic,
        scheduling=replace(scheduling, max_num_seqs=slots),
        requests=requests,
        kv_pool_tokens=kv_pool_tokens,
    )
    return replace(
        served,
        request_per_s=whole.request_per_s,
        output_token_per_s=whole.output_token_per_s,
        total_token_per_s=whole.total_token_per_s,
    )


def kv_bits_of(subject: Subject, engine: str) -> float:
    """Bits of a KV element: as the run says, else the engine's choice for these weights."""
    if subject.kv is not None:
        return subject.kv.effective_bits
    return kv_dtype(AUTO, subject.model, subject.weights, engine=engine)[0].effective_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """What the engine's own rules give it."""

    max_num_seqs: int
    max_num_batched_tokens: int
    pool_bytes: float


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

    def asked(share: float | None, release: str | None) -> EnginePlan:
        return engines.plan(
            engine,
            model.of,
            weights_bytes=round(held),
            total_bytes=gpu.of.usable_bytes,
            gpu=gpu.of,
            flags=EngineFlags(
                version=release,
                tp=parallel.tp,
                kv_bits=kv_bits,
                max_model_len=min(model.of.max_context or 16384, 16384),
                gpu_memory_utilization=share,
            ),
        )

    def known(share: float | None) -> EnginePlan:
        """By the version's own rules; one that has none ("nightly-dev") counts as the newest."""
        try:
            return asked(share, version)
        except InputError:
            if version is None:
                raise
            return asked(share, None)

    plan = known(None)
    if plan.starts is False or plan.kv_pool.value <= 0:
        plan = known(_RAISED)
    if plan.step_sequences is None or plan.step_tokens is None:
        raise InputError(f"the limits of a step of {engine} are not known", where="engine", hint="vllm")
    return _Limits(
        max_num_seqs=plan.step_sequences,
        max_num_batched_tokens=plan.step_tokens,
        pool_bytes=float(plan.kv_pool.value),
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


_tables: dict[tuple[object, ...], StepTable] = {}


def _table(subject: Subject, parallel: Parallelism, engine: str, kv_bits: float, host: Host) -> StepTable:
    """The step times; what they keep holds for all hosts that fuse alike."""
    key = (id(subject.model), subject.gpu.id, id(subject.weights), parallel, engine, kv_bits, host.fused)
    if key not in _tables:
        _tables[key] = compile(
            subject.model,
            subject.gpu,
            precision=subject.weights,
            kv_bits=kv_bits,
            parallel=parallel,
            engine=engine,
        )
    _tables[key].host = host
    return _tables[key]
