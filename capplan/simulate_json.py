"""The answer of `capplan simulate` as JSON (schema capplan.simulate/1): times in seconds, money in USD."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from capplan import simulate_apart
from capplan.sim.replica import Limits
from capplan.sim.summary import METRICS, STATISTICS, Spread, Summary

if TYPE_CHECKING:
    from capplan.simulate_answer import Simulation

LIMITS = (
    *("max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size", "max_model_len"),
    *("prefix_caching", "max_new_tokens"),
)


def to_dict(made: "Simulation") -> dict[str, Any]:
    """Everything the answer holds; what is undefined or not asked is null."""
    question, summary, load = made.question, made.summary, made.load
    steady = made.steady
    found = {
        "schema": "capplan.simulate/1",
        "partial": made.partial,
        "model": {"name": made.model.name, "parameters": made.model.parameters},
        "gpu": {"id": made.gpu.id, "name": made.gpu.name, "count": question.gpus},
        "parallel": {"tp": question.tp, "pp": question.pp, "dp": question.dp, "ep": question.ep},
        "engine": None if made.plan is None else {"name": made.plan.engine, "version": made.plan.version},
        "scheduler": {
            "name": made.policy.name,
            "options": dict(made.policy.given),
            "verified": made.policy.verified,
        },
        "precision": made.precision.id if made.precision else "auto",
        "kv_dtype": made.kv_format.id,
        "limits": limits_of(made.limits),
        "workload": _workload(made),
        "load": {
            "offered_request_per_s": load.offered_request_per_s,
            "stable_request_per_s": load.stable_request_per_s,
            "utilization": load.utilization,
            "knee_distance": made.knee_distance,
            "steady": steady,
            "closed_form": {
                "ttft_s": load.served.ttft_s if steady else None,
                "tpot_s": load.served.tpot_s,
                "e2e_s": load.served.e2e_s if steady else None,
                "output_token_per_s": load.served.output_token_per_s,
            }
            if made.link is None
            else None,
        },
        "disaggregated": None
        if made.link is None or summary.apart is None
        else simulate_apart.to_dict(made.link, summary.apart, load.parts),
        "confidence": _confidence(made),
        "provenance": made.provenance,
        "bands": {name: {"low": band.low, "high": band.high} for name, band in made.bands.items()},
        "slo": None if made.slo is None else {**made.slo.to_dict(), "met": summary.met},
        **figures(summary),
        "price": None if made.price is None else made.price.to_dict(),
        "usd_per_hour": made.usd_per_hour,
        "fleet_usd": made.fleet_usd,
        "usd_per_million_output_token": made.usd_per_million_output_token,
        "notes": list(made.notes),
    }
    made_json: dict[str, Any] = rounded(found)
    return made_json


def rounded(value: Any) -> Any:
    """Numbers to nine digits: the last bits of a machine's log() are no figures."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def figures(summary: Summary) -> dict[str, Any]:
    """What was seen, whatever was asked."""
    return {
        "window": asdict(summary.window) | {"requests": summary.measured},
        "metrics": {name: _spread(summary.spreads[name]) for name in METRICS},
        "requests": {
            "finished": summary.requests,
            "rejected": summary.rejected,
            "truncated": summary.truncated,
            "unfinished": summary.unfinished,
        },
        "request_per_s": summary.request_per_s,
        "output_token_per_s": summary.output_token_per_s,
        "prompt_token_per_s": summary.prompt_token_per_s,
        "goodput_request_per_s": summary.goodput_request_per_s,
        "kv_usage": summary.kv_usage.to_dict(),
        "kv_waste": {"unfilled_blocks": summary.unfilled},
        "preemptions": summary.preemptions,
        "recomputed_tokens": summary.recomputed_tokens,
        "prefix_hit_rate": summary.prefix_hit_rate,
        "batch": summary.batch,
        "busy": summary.busy,
        "bubble_fraction": summary.idle_slots,
        "queue": {"first": summary.queue[0], "last": summary.queue[1]},
        "tokens": {
            "prompt": summary.prompt_tokens,
            "cached": summary.cached_tokens,
            "output": summary.output_tokens,
        },
        "steps": summary.steps,
        "duration_s": summary.end_s,
        "series": summary.series.to_dict(),
    }


def limits_of(limits: Limits) -> dict[str, Any]:
    """What the engine allows, in JSON."""
    return {name: getattr(limits, name) for name in LIMITS}


def _spread(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else {name: getattr(spread, name) for name in STATISTICS}


def _workload(made: "Simulation") -> dict[str, Any]:
    """The workload as asked, and in words."""
    spec = made.question.workload
    rate = spec.request_per_s
    return {
        "text": made.workload,
        "isl": spec.isl,
        "osl": spec.osl,
        "request_per_s": None if rate == float("inf") else rate,
        "arrivals": "at-once" if rate == float("inf") else spec.arrivals,
        "concurrency": spec.users,
        "requests": spec.requests,
        "duration_s": spec.duration_s,
        "trace": None if spec.trace is None else spec.trace.name,
        "seed": spec.seed,
    }


def _confidence(made: "Simulation") -> dict[str, Any]:
    """Half widths of the 95 % intervals; null where the run is too short to tell."""
    several = len(made.runs) > 1
    statistics = STATISTICS if several else ("mean",)
    return {
        "level": 0.95,
        "method": "replications" if several else "batch means",
        "runs": len(made.runs),
        "half_width": {
            name: {statistic: made.half_width(name, statistic) for statistic in statistics}
            for name in METRICS
        },
    }
