"""The answer of `capplan latency` as JSON (schema capplan.latency/1): times in seconds, rates per second."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capplan.latency_answer import LatencyEstimate
    from capplan.step import OpTime


def to_dict(made: "LatencyEstimate") -> dict[str, Any]:
    """Everything the answer holds; what is undefined or not asked is null."""
    question = made.question
    return {
        "schema": "capplan.latency/1",
        "model": {"name": made.model.name, "parameters": made.model.parameters},
        "gpu": {"id": made.gpu.id, "name": made.gpu.name, "count": question.parallel.gpus},
        "parallel": {"tp": question.tp, "pp": question.pp, "dp": question.dp, "ep": question.ep},
        "engine": None if made.plan is None else {"name": made.plan.engine, "version": made.plan.version},
        "precision": made.precision.id if made.precision else "auto",
        "kv_dtype": made.kv_format.id,
        "kv_dtype_reason": made.kv_reason,
        "expert_skew": question.expert_skew,
        "speculation": _speculation(made),
        "workload": {
            "isl": question.isl,
            "osl": question.osl,
            "lengths": question.lengths,
            "concurrency": question.concurrency,
            "request_per_s": question.request_per_s,
            "requests": question.requests,
            "batch": question.batch,
            "prefix_shared": question.prefix_shared,
            "network_s": question.network_s,
        },
        "fits": made.fits,
        "ttft_s": made.ttft.to_dict(),
        "tpot_s": None if question.osl == 1 else made.tpot.to_dict(),
        "e2e_s": made.e2e.to_dict(),
        "output_token_per_s": made.throughput.to_dict(),
        "served": None if made.served is None else _served(made),
        "engine_fit": None if made.served is None else _engine_fit(made),
        "regime": dict(made.regime),
        "bottleneck": made.bottleneck,
        "limits": dict(made.limits),
        "slo": None if made.slo is None else {**made.slo.to_dict(), "meets": made.meets},
        "ops": _ops("decode", made.decode_ops) + _ops("prefill", made.prefill_ops),
        "sweep": [point.to_dict() for point in made.sweep],
        "changes": [change.to_dict() for change in made.changes],
        "notes": list(made.notes),
    }


def _speculation(made: "LatencyEstimate") -> dict[str, Any] | None:
    """Drafting as asked, and the tokens that a step adds; None without it."""
    question = made.question
    if question.speculative_tokens is None:
        return None
    return {
        "tokens": question.speculative_tokens,
        "acceptance_rate": question.acceptance_rate,
        "draft_model": question.draft_model,
        "tokens_per_step": question.tokens_per_step,
    }


def _engine_fit(made: "LatencyEstimate") -> dict[str, Any]:
    """What was fitted of the engine on the GPU's family, and the runs held out behind each band."""
    fit = made.behaviour
    return {
        "engine": fit.engine,
        "family": fit.family,
        "measured": fit.measured,
        "host": asdict(fit.host),
        "scheduling": asdict(made.scheduling),
        "fractions": None if made.fractions is None else asdict(made.fractions),
        "runs_held_out": {name: band.runs for name, band in fit.bands.items()},
    }


def _served(made: "LatencyEstimate") -> dict[str, Any]:
    """The terms of TTFT, and the load on the replica; None where there is no steady state."""
    served = made.load
    steady = served.steady
    return {
        "ttft_terms_s": {
            "around_the_engine": served.around_s,
            "queue": served.queue_s if steady else None,
            "start_burst": served.start_s,
            "wait_for_step": served.wait_s,
            "prefill": served.prefill_s,
        },
        "batch": served.batch,
        "running": served.running,
        "limit": served.limit,
        "decode_step_s": served.decode_step_s,
        "prompt_s": served.prompt_s,
        "prefill_share": served.prefill_share,
        "request_per_s": served.request_per_s,
        "total_token_per_s": served.total_token_per_s,
        "goodput_request_per_s": made.goodput_request_per_s,
        "utilization": served.utilization,
        "knee_distance": made.knee_distance,
        "stable_request_per_s": served.stable_request_per_s,
        "steady": steady,
    }


def _ops(phase: str, ops: Sequence["OpTime"]) -> list[dict[str, Any]]:
    """Operations of one mean step, the longest first."""
    total = sum(op.time_s for op in ops) or 1.0
    return [
        {
            "phase": phase,
            "kind": op.kind,
            "name": op.name,
            "dtype": op.dtype,
            "count": op.count,
            "flop": op.flop,
            "bytes": op.bytes,
            "bound_s": op.bound_s,
            "time_s": op.time_s,
            "share": op.time_s / total,
            "speed_of_light": min(1.0, op.bound_s / op.time_s) if op.time_s else None,
            "outside": op.outside or None,
        }
        for op in sorted(ops, key=lambda op: -op.time_s)
    ]
