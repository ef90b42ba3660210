"""The answer of `capplan simulate` as a record: what was asked, one run or several, and what follows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from capplan.engine_speed import Band
from capplan.formulas import confidence, cost
from capplan.price_choice import Quote
from capplan.sim.disaggregated import Link
from capplan.sim.replica import Limits
from capplan.sim.schedulers import Policy
from capplan.sim.summary import Apart, Spread, Summary, Usage
from capplan.simulate_load import ClosedForm
from capplan.simulate_question import SimulateQuestion
from capplan.slo import Slo
from capplan.specs import Format, Gpu, Model
from capplan.units import HOUR_S

if TYPE_CHECKING:
    from capplan.engines.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Simulation:
    """The answer of `capplan simulate`; times in seconds, rates of the whole replica (all its GPUs).

    `summary` is the one run's, or what `runs` have in common: means of their figures, sums of their counts,
    the series of the first. `partial`: it was interrupted.
    """

    question: SimulateQuestion
    model: Model
    gpu: Gpu
    precision: Format | None
    kv_format: Format
    plan: "EnginePlan | None"
    limits: Limits
    policy: Policy
    workload: str
    load: ClosedForm
    summary: Summary
    runs: tuple[Summary, ...]
    slo: Slo | None
    provenance: str
    bands: Mapping[str, Band]
    price: Quote | None
    link: Link | None = None
    partial: bool = False
    notes: tuple[str, ...] = ()

    @property
    def steady(self) -> bool:
        """False where more requests come by themselves than can be served: the queue grows without end."""
        return self.load.steady

    @property
    def knee_distance(self) -> float:
        """The stable rate over the load's: 1 at the knee, below 1 where there is no steady state."""
        return 1 / self.load.utilization

    @property
    def usd_per_hour(self) -> float | None:
        """Of all GPUs; None without a price: unpriced, not free."""
        return None if self.price is None else self.price.usd_per_gpu_hour * self.question.gpus

    @property
    def fleet_usd(self) -> float | None:
        """What the run cost, from its first to its last moment (of several, the mean one)."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly * self.summary.end_s / HOUR_S

    @property
    def usd_per_million_output_token(self) -> float | None:
        """The whole bill over the output tokens made at the measured rate."""
        hourly, rate = self.usd_per_hour, self.summary.output_token_per_s
        if hourly is None or rate <= 0:
            return None
        return cost.usd_per_million_token(usd_per_hour=hourly, token_per_s=rate)

    def half_width(self, name: str, statistic: str = "mean") -> float | None:
        """Half of a figure's 95 % interval: over runs, else by one run's batch means (of means alone)."""
        if len(self.runs) > 1:
            values = [getattr(run.spreads[name], statistic, None) for run in self.runs]
            return (
                None
                if None in values
                else confidence.half_width(means=[float(value or 0) for value in values])
            )
        spread = self.summary.spreads[name]
        return spread.confidence if spread is not None and statistic == "mean" else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `capplan simulate` (schema capplan.simulate/1)."""
        from capplan.simulate_json import to_dict

        return to_dict(self)

    def _repr_html_(self) -> str:
        """Notebook view: percentiles of the latencies as a small table."""
        cells = "".join(
            f"<tr><td>{name}</td>"
            + "".join(f"<td>{value * 1e3:,.1f} ms</td>" for value in (spread.p50, spread.p95, spread.p99))
            + "</tr>"
            for name, spread in self.summary.spreads.items()
            if spread is not None
        )
        return f"<table><tr><th></th><th>P50</th><th>P95</th><th>P99</th></tr>{cells}</table>"


_SUMMED = (
    *("requests", "measured", "rejected", "truncated", "unfinished", "preemptions", "recomputed_tokens"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "steps"),
)
_AVERAGED = (
    *("end_s", "offered_request_per_s", "request_per_s", "output_token_per_s", "prompt_token_per_s"),
    *(
        "goodput_request_per_s",
        "met",
        "unfilled",
        "answer_tokens",
        "prefix_hit_rate",
        "batch",
        "busy",
        "idle_slots",
    ),
)


def pooled(runs: Sequence[Summary]) -> Summary:
    """Several runs as one: their figures' means, their counts' sums; window and series are the first's."""
    if len(runs) == 1:
        return runs[0]
    made: dict[str, Any] = {name: sum(getattr(run, name) for run in runs) for name in _SUMMED}
    made |= {name: _mean([getattr(run, name) for run in runs]) for name in _AVERAGED}
    return replace(
        runs[0],
        spreads={name: _mean_spread([run.spreads[name] for run in runs]) for name in runs[0].spreads},
        kv_usage=_mean_usage([run.kv_usage for run in runs]),
        queue=(_mean([run.queue[0] for run in runs]) or 0.0, _mean([run.queue[1] for run in runs]) or 0.0),
        apart=_mean_apart([run.apart for run in runs if run.apart is not None]),
        **made,
    )


def _mean_usage(usages: Sequence[Usage]) -> Usage:
    return Usage(
        mean=_mean([usage.mean for usage in usages]) or 0.0,
        p95=_mean([usage.p95 for usage in usages]) or 0.0,
        max=max(usage.max for usage in usages),
        full=_mean([usage.full for usage in usages]) or 0.0,
    )


def _mean_apart(seen: Sequence[Apart]) -> Apart | None:
    if not seen:
        return None
    return Apart(
        transfer_s=_mean_spread([apart.transfer_s for apart in seen]),
        transfer_share=_mean([apart.transfer_share for apart in seen]) or 0.0,
        link_busy=_mean([apart.link_busy for apart in seen]) or 0.0,
        prefill_busy=_mean([apart.prefill_busy for apart in seen]) or 0.0,
        prefill_kv_usage=_mean_usage([apart.prefill_kv_usage for apart in seen]),
        prefill_preemptions=sum(apart.prefill_preemptions for apart in seen),
    )


def _mean_spread(spreads: Sequence[Spread | None]) -> Spread | None:
    if any(spread is None for spread in spreads):
        return None
    names = [field.name for field in fields(Spread) if field.name != "confidence"]
    means = {name: _mean([getattr(spread, name) for spread in spreads]) or 0.0 for name in names}
    half = confidence.half_width(means=[spread.mean for spread in spreads if spread is not None])
    return Spread(**means, confidence=half)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None
