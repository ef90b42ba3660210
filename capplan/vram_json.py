"""The JSON of `capplan vram`: the contract `capplan.vram/1`, documented key by key in docs/vram.md.

Top-level sizes are of the whole deployment (all `tp` GPUs together), `per_gpu` of one of them.
"""

from typing import TYPE_CHECKING, Any

from capplan.formulas import memory

if TYPE_CHECKING:
    from capplan.capacity import Verdict
    from capplan.estimate import VramEstimate


def vram_dict(estimate: "VramEstimate") -> dict[str, Any]:
    """The answer as a JSON mapping; unknown values are None."""
    question, need = estimate.question, estimate.need
    told = estimate.told
    verdicts = [verdict.to_dict() for verdict in estimate.verdicts]
    return {
        "schema": "capplan.vram/1",
        "question": {
            "users": question.users,
            "context": question.context,
            "tp": question.tp,
            "block_size": question.block_size,
            "prefix_shared": question.prefix_shared,
        },
        "model": {
            "asked": question.model,
            "name": estimate.name,
            "parameters": estimate.parameters,
            "architecture": estimate.model.architecture if estimate.model else None,
            "max_context": estimate.kv_model.max_context if estimate.kv_model else None,
            "kv_from": estimate.kv_model.name if estimate.kv_model else None,
            "source": estimate.model.source if estimate.model else "asked: --params",
        },
        "weights": _weights(estimate),
        "kv_cache": _kv_cache(estimate),
        "draft_kv_cache": _draft(estimate),
        "overhead": _overhead(estimate, question.tp),
        "extra": [{"name": name, "bytes": size * question.tp} for name, size in estimate.extra.items()],
        "total": _total(estimate),
        "gpu": None if told is None else told.to_dict(),
        "fits": estimate.fits,
        "headroom_bytes": told.headroom_bytes if told else None,
        "max_users": told.max_users if told else None,
        "max_context": told.max_context if told else None,
        "per_gpu": {
            "weights": {"bytes": need.weights_bytes},
            **_pool(estimate, told),
            "overhead": _overhead(estimate, 1),
            "extra": [{"name": name, "bytes": size} for name, size in estimate.extra.items()],
            "total": {"bytes": need.total_bytes, "low_bytes": need.low_bytes},
        },
        "gpus": verdicts if estimate.named else [],
        "fit_table": [] if estimate.named else verdicts,
        "paging": estimate.paging.to_dict() if estimate.paging else None,
        "remedies": [remedy.to_dict() for remedy in estimate.remedies],
        "lesson": estimate.lesson,
        **({"engine": estimate.engine.to_dict()} if estimate.engine else {}),
        "notes": list(estimate.notes),
    }


def _weights(estimate: "VramEstimate") -> dict[str, Any]:
    held = estimate.model.stored if estimate.model and not estimate.precision else None
    roles = estimate.weights.roles if estimate.weights else ()
    return {
        "bytes": estimate.weights_bytes,
        "precision": estimate.precision.id if estimate.precision else "auto",
        "formats": list(estimate.weights.formats) if estimate.weights else [],
        "bits_per_parameter": round(estimate.bits_per_parameter, 6),
        "stored": None
        if held is None
        else {"format": held.format, "files": held.files, "bytes_by_type": dict(held.by_dtype)},
        "headline_bytes": round(
            memory.weight_bytes(parameters=estimate.parameters, bits=estimate.nominal_bits)
        ),
        "roles": [{"role": part.role, "parameters": part.parameters, "bytes": part.bytes} for part in roles],
    }


def _kv_cache(estimate: "VramEstimate") -> dict[str, Any] | None:
    layout = estimate.whole_layout
    if layout is None:
        return None
    return {
        "bytes": estimate.kv_bytes,
        "tail_bytes": estimate.tail_bytes,
        "bytes_per_token": _whole(layout.bytes_per_token),
        "bytes_by_kind": {kind: _whole(size) for kind, size in layout.by_kind().items()},
        "state_bytes_per_sequence": layout.state_bytes,
        "dtype": estimate.kv_format.id,
        "dtype_reason": estimate.kv_reason,
    }


def _draft(estimate: "VramEstimate") -> dict[str, Any] | None:
    layout = estimate.draft_layout
    if layout is None:
        return None
    return {
        "bytes": estimate.draft_kv_bytes,
        "bytes_per_token": _whole(layout.bytes_per_token),
    }


def _overhead(estimate: "VramEstimate", gpus: int) -> dict[str, Any]:
    overhead = estimate.need.overhead
    return {
        "bytes": overhead.high_bytes * gpus,
        "low_bytes": overhead.low_bytes * gpus,
        "high_bytes": overhead.high_bytes * gpus,
        "rule": overhead.rule,
        "parts": [part | {"bytes": part["bytes"] * gpus} for part in overhead.parts()],
    }


def _total(estimate: "VramEstimate") -> dict[str, int]:
    """All GPUs together. What tensor parallelism holds on several of them is told apart."""
    gpus = estimate.question.tp
    total = estimate.need.total_bytes * gpus
    once = (
        estimate.weights_bytes
        + (estimate.kv_bytes or 0)
        + estimate.tail_bytes
        + estimate.draft_kv_bytes
        + (sum(estimate.extra.values()) + estimate.need.overhead.high_bytes) * gpus
    )
    return {
        "bytes": total,
        "low_bytes": estimate.need.low_bytes * gpus,
        "replicated_bytes": total - once,
    }


def _pool(estimate: "VramEstimate", told: "Verdict | None") -> dict[str, Any]:
    """KV cache and pool of one GPU: what is left on the one told, else the demand itself."""
    need, question = estimate.need, estimate.question
    both = need.kv_bytes
    pool = None if both is None else both + need.tail_bytes
    tokens = None if pool is None else question.users * question.context
    concurrency = None if pool is None else float(question.users)
    if told is not None:
        pool, tokens, concurrency = told.pool_bytes, told.pool_tokens, told.max_concurrency
    return {
        "kv_cache": {"bytes": None if both is None else both - estimate.draft_rank_kv_bytes},
        "kv_pool": {"bytes": pool, "tokens": tokens},
        "max_concurrency": concurrency,
    }


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
