"""How many tokens a fleet makes: measured by the user, or estimated for a model under a load."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from capplan.cost_question import CostQuestion
from capplan.errors import DoesNotFitError
from capplan.units import format_seconds

if TYPE_CHECKING:
    from capplan.latency_estimate import LatencyEstimate

FULL: Final = 0.95
"""A replica counts as full at this part of the most it makes under any number of users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Output tokens per second of the busy fleet, with the band of the estimate.

    `prefill_share` is the part of the GPUs' time that prompts take; `busy` the part of the capacity that
    the load takes; `users` how many are served at once. None: not known.
    """

    output_token_per_s: float
    provenance: str
    load: str
    low: float | None = None
    high: float | None = None
    prefill_share: float | None = None
    busy: float = 1.0
    users: int | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON of the speed."""
        return {
            "output_token_per_s": self.output_token_per_s,
            "low": self.low,
            "high": self.high,
            "provenance": self.provenance,
            "load": self.load,
            "prefill_share": self.prefill_share,
            "busy": self.busy,
            "users_at_once": self.users,
        }


def speed_of(question: CostQuestion) -> Speed | None:
    """The fleet's speed; None where the question has neither a model nor a measured speed.

    Raises DoesNotFitError where the model does not fit, or the load or the limits cannot be met.
    """
    if question.output_token_per_s is not None:
        return Speed(output_token_per_s=question.output_token_per_s, provenance="given", load="as measured")
    if question.model is None:
        return None
    if question.request_per_s is not None:
        return _at_rate(question, question.request_per_s)
    if question.concurrency is not None:
        return _with_users(question, question.concurrency)
    return _full(question)


def _ask(question: CostQuestion, *, sweep: bool = False, **load: Any) -> "LatencyEstimate":
    """One replica under a load. The only place where a model's speed is taken from."""
    from capplan import latency_estimate as latency  # a tenth of a second; a measured speed does without

    lengths = question.lengths or (1, 1)
    made = latency.latency(
        question.model or "",
        gpu=question.gpu,
        precision=question.precision,
        kv_dtype=question.kv_dtype,
        isl=lengths[0],
        osl=lengths[1],
        tp=question.tp,
        pp=question.pp,
        dp=question.dp,
        ep=question.ep,
        engine=question.engine,
        engine_version=question.engine_version,
        max_num_seqs=question.max_num_seqs,
        max_num_batched_tokens=question.max_num_batched_tokens,
        gpu_memory_utilization=question.gpu_memory_utilization,
        prefix_shared=question.prefix_shared,
        network_s=question.network_s,
        profile=question.profile,
        online=question.online,
        slo=question.slo,
        figures_alone=not sweep,
        **load,
    )
    if made.fits is False:
        raise DoesNotFitError(
            f"{made.model.name} does not fit {question.parallel.gpus} × {made.gpu.name}",
            where="--model, --gpu, --tp",
            hint="`capplan vram` with the same options shows what to change",
        )
    return made


def _speed(made: "LatencyEstimate", factor: float, load: str, **more: Any) -> Speed:
    """A replica's figures times the replicas."""
    figure = made.throughput
    value = figure.estimate if figure.estimate is not None else 0.0
    return Speed(
        output_token_per_s=value * factor,
        low=None if figure.low is None else figure.low * factor,
        high=None if figure.high is None else figure.high * factor,
        provenance=figure.provenance,
        load=load,
        prefill_share=None if made.served is None else min(1.0, max(0.0, made.served.prefill_share)),
        model=made.model.name,
        notes=made.notes,
        **more,
    )


def _at_rate(question: CostQuestion, rate: float) -> Speed:
    """A fleet that gets so many requests a second."""
    made = _ask(question, request_per_s=rate / question.replicas)
    served = made.served
    if served is None or not served.steady:
        stable = 0.0 if served is None else served.stable_request_per_s * question.replicas
        raise DoesNotFitError(
            f"{rate:g} requests/s, and {question.fleet_gpus} GPUs serve at most {stable:.3g}",
            where="--request-rate, --gpus",
            hint="more GPUs, or a lower rate",
        )
    osl = (question.lengths or (1, 1))[1]
    tokens = rate * osl
    # The rate is given, not estimated: no band. How busy that makes the fleet is the estimate.
    return Speed(
        output_token_per_s=tokens,
        provenance="given",
        load=f"{rate:g} requests/s",
        prefill_share=min(1.0, max(0.0, served.prefill_share)),
        busy=min(1.0, served.utilization),
        model=made.model.name,
        notes=made.notes,
    )


def _with_users(question: CostQuestion, users: int) -> Speed:
    """A fleet whose users each send their next request when the last is answered."""
    each = math.ceil(users / question.replicas)
    made = _ask(question, concurrency=each)
    factor = users / each
    return _speed(made, factor, f"{users:,} users at once", users=users)


def _full(question: CostQuestion) -> Speed:
    """Every replica as full as pays: the fewest users near its most tokens per second, within the limits."""
    first = _ask(question, sweep=True, concurrency=1)
    points = [point for point in first.sweep if question.slo is None or point.meets]
    if not points:
        raise DoesNotFitError(
            f"no number of users meets {question.slo}",
            where="--slo, --gpu",
            hint="`capplan latency` with the same options shows what each user sees",
        )
    most = max(point.output_token_per_s for point in points)
    # Past the knee more users only wait longer: the fewest that reach it are a full replica.
    best = min(
        (point for point in points if point.output_token_per_s >= FULL * most), key=lambda point: point.users
    )
    made = first if best.users == 1 else _ask(question, concurrency=best.users)
    users = best.users * question.replicas
    tpot = "" if best.tpot_s is None else f", TPOT {format_seconds(best.tpot_s)}"
    limits = f" within {question.slo}" if question.slo else ""
    return _speed(
        made,
        question.replicas,
        f"as full as pays{limits}: {users:,} users at once{tpot}",
        users=users,
    )
