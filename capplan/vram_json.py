"""The JSON of `capplan vram`: the contract `capplan.vram/1`, documented key by key in docs/vram.md.

Top-level sizes are of the whole deployment (all tp · pp · dp GPUs), `per_gpu` of the fullest of them.
"""

from typing import TYPE_CHECKING, Any

from capplan.formulas import memory

if TYPE_CHECKING:
    from capplan.capacity import Overhead, Verdict
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
            "pp": question.pp,
            "ep": question.ep,
            "dp": question.dp,
            "gpus": estimate.gpus,
            "samples": question.n,
            "prompt": question.isl,
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
        "overhead": _overhead(estimate, [rank.need.overhead for rank in estimate.ranks], _copies(estimate)),
        "extra": [{"name": name, "bytes": size} for name, size in _extra(estimate).items()],
        "total": _total(estimate),
        "gpu": None if told is None else told.to_dict(),
        "fits": estimate.fits,
        "headroom_bytes": told.headroom_bytes if told else None,
        "max_users": told.max_users if told else None,
        "max_context": told.max_context if told else None,
        "per_gpu": {
            "weights": {"bytes": need.weights_bytes},
            **_pool(estimate, told),
            "overhead": _overhead(estimate, [need.overhead], 1),
            "extra": [{"name": name, "bytes": size} for name, size in estimate.extra.items()],
            "total": {"bytes": need.total_bytes, "low_bytes": need.low_bytes},
        },
        **_stages(estimate),
        "gpus": verdicts if estimate.named else [],
        "fit_table": [] if estimate.named else verdicts,
        "paging": estimate.paging.to_dict() if estimate.paging else None,
        "remedies": [remedy.to_dict() for remedy in estimate.remedies],
        "lesson": estimate.lesson,
        **({"engine": estimate.engine.to_dict()} if estimate.engine else {}),
        **({"engines": [row.to_dict() for row in estimate.rows]} if estimate.rows else {}),
        **({"services": [service.to_dict() for service in estimate.services]} if estimate.services else {}),
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


def _copies(estimate: "VramEstimate") -> int:
    """How many GPUs hold what each entry of `ranks` does."""
    return estimate.gpus // len(estimate.ranks)


def _overhead(estimate: "VramEstimate", overheads: "list[Overhead]", copies: int) -> dict[str, Any]:
    """The overhead of some ranks, each on so many GPUs, part by part."""
    parts: dict[str, int] = {}
    for overhead in overheads:
        for part in overhead.parts():
            parts[part["name"]] = parts.get(part["name"], 0) + part["bytes"] * copies
    high = sum(overhead.high_bytes for overhead in overheads) * copies
    return {
        "bytes": high,
        "low_bytes": sum(overhead.low_bytes for overhead in overheads) * copies,
        "high_bytes": high,
        "rule": estimate.need.overhead.rule,
        "parts": [{"name": name, "bytes": size} for name, size in parts.items()],
    }


def _extra(estimate: "VramEstimate") -> dict[str, int]:
    """The parts beside the decoder on all GPUs together."""
    made: dict[str, int] = {}
    for rank in estimate.ranks:
        for name, size in rank.extra.items():
            made[name] = made.get(name, 0) + size * _copies(estimate)
    return made


def _stages(estimate: "VramEstimate") -> dict[str, Any]:
    """Every pipeline stage; nothing without a pipeline."""
    if len(estimate.ranks) == 1:
        return {}
    return {
        "stages": [
            rank.to_dict(decides=rank.need is estimate.need, named=estimate.named) for rank in estimate.ranks
        ],
    }


def _total(estimate: "VramEstimate") -> dict[str, int]:
    """All GPUs together. What parallelism holds on several of them is told apart."""
    copies = _copies(estimate)
    needs = [rank.need for rank in estimate.ranks]
    overhead = sum(need.overhead.high_bytes for need in needs) * copies
    once = (
        estimate.weights_bytes
        + (estimate.kv_bytes or 0)
        + estimate.tail_bytes
        + estimate.draft_kv_bytes
        + sum(_extra(estimate).values())
        + overhead
    )
    total = sum(need.total_bytes for need in needs) * copies
    low = sum(need.low_bytes for need in needs) * copies
    if estimate.offloads:
        # Layers are on one GPU or on the host: nothing is held twice.
        total = low = once
    return {"bytes": total, "low_bytes": low, "replicated_bytes": total - once}


def _pool(estimate: "VramEstimate", told: "Verdict | None") -> dict[str, Any]:
    """KV cache and pool of one GPU: what is left on the one told, else the demand itself."""
    need, question = estimate.need, estimate.question
    both = need.kv_bytes
    pool = None if both is None else both + need.tail_bytes
    tokens = None if pool is None else question.users_per_replica * question.context
    concurrency = None if pool is None else float(question.users_per_replica)
    if told is not None:
        pool, tokens, concurrency = told.pool_bytes, told.pool_tokens, told.max_concurrency
    return {
        "kv_cache": {"bytes": None if both is None else both - estimate.draft_rank_kv_bytes},
        "kv_pool": {"bytes": pool, "tokens": tokens},
        "max_concurrency": concurrency,
    }


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value
