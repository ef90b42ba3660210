"""TensorRT-LLM's memory: the KV pool is a fraction of what is free after the model is loaded.

    pool   = f · (free after weights − peak of one full step)         f = 0.9
    tokens = ⌊ pool / (block · bytes per token) ⌋ · block        a draft's bytes per token count too

Unlike vLLM's, the fraction is not of the total, and it holds KV alone: the pool takes what is left, needed
or not.
Facts are profiles/engines/tensorrt-llm.yaml. The peak is estimated from one step of max_num_tokens; logs
differ widely with the batch the engine was built for, so the pool has a wide band.
Not modelled: max_attention_window, recurrent states' own pool, host and disk tiers, beams.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from capplan import catalog
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.token_pool import dated_default, draft_rate, known_version, token_rate, tokens_in
from capplan.engines.vllm_terms import layer_width, visible_bytes
from capplan.specs import Gpu, Model
from capplan.units import GIB, MIB


@cache
def _profile() -> Mapping[str, Any]:
    return catalog.read_yaml(catalog.PROFILES / "engines" / "tensorrt-llm.yaml")


def default(name: str, version: str) -> int:
    """A dated default of the version."""
    return dated_default(_profile(), name, version, engine="TensorRT-LLM", example="1.0")


def pool_bytes(free_bytes: float, fraction: float) -> int:
    """The pool of what is free after loading. Example: 0.9 of 17.83 GiB: 16.05 GiB."""
    return max(0, int(free_bytes * fraction))


def step_bytes(model: Model, *, tokens: int, sequences: int, tp: int) -> int:
    """Peak of one full step, estimated: 16-bit tensors of `tokens` tokens, 32-bit logits of `sequences`.

    tokens · 2 B · (3 · hidden + layer width) + sequences · vocab · 4 B
    """
    dense, experts = layer_width(model, tp)
    return tokens * 2 * (3 * model.hidden + max(dense, experts)) + sequences * model.vocab * 4


def plan(
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
    free_bytes: int | None = None,
) -> EnginePlan:
    """What TensorRT-LLM makes of a GPU of `total_bytes` (as the driver reports them), on the widest rank.

    `gpu_memory_utilization` is free_gpu_memory_fraction, `max_num_batched_tokens` max_num_tokens,
    `block_size` tokens_per_block. `free_bytes` replaces the estimate of what is free after loading, where
    a log gives it.
    Errors: InputError for versions that are none or too old, and impossible splits.
    """
    version = known_version(flags.version, str(_profile()["newest"]))
    fraction = flags.gpu_memory_utilization or float(_profile()["fraction"])
    tokens = flags.max_num_batched_tokens or int(_profile()["max_num_tokens"])
    batch = flags.max_num_seqs or default("max_batch_size", version)
    block = flags.block_size or default("tokens_per_block", version)
    visible = visible_bytes(total_bytes)
    step = step_bytes(model, tokens=tokens, sequences=min(batch, tokens), tp=flags.tp)
    beside = _profile()["beside"]
    held = weights_bytes + extra_bytes
    free = visible - held - step - beside["context_mib"] * MIB if free_bytes is None else free_bytes
    pool = pool_bytes(free, fraction)
    low = high = pool
    if free_bytes is None:
        low = min(pool, pool_bytes(visible - held - beside["high_mib"] * MIB, fraction))
        high = max(pool, pool_bytes(visible - held - beside["low_mib"] * MIB, fraction))
    rate = token_rate(model, kv_bits=flags.kv_bits, tp=flags.tp, pp=flags.pp, stage=flags.stage)
    length = flags.max_model_len or model.max_context or tokens
    # States of the sequences that run together come before the blocks.
    states = 0 if not rate.state else min(batch, max(0, int(pool // (2 * rate.state)))) * rate.state
    beside_rate = draft_rate(flags.draft, kv_bits=flags.kv_bits, tp=flags.tp)
    kv_tokens = tokens_in(pool - states, rate.total + beside_rate if rate.total else 0, block)
    starts: bool | None = kv_tokens > 0
    if (low > 0) != (high > 0):
        starts = None
    need = length * (rate.total + beside_rate) + rate.state
    return EnginePlan(
        engine="tensorrt-llm",
        version=version,
        flags=(
            _flag("free_gpu_memory_fraction", fraction, flags.gpu_memory_utilization),
            _flag("max_num_tokens", tokens, flags.max_num_batched_tokens),
            _flag("max_batch_size", batch, flags.max_num_seqs),
            _flag("tokens_per_block", block, flags.block_size),
            _flag("max_seq_len", length, flags.max_model_len),
            Flag(name="enable_block_reuse", value=True, source="default"),
        ),
        terms={
            "total": visible,
            "budget": visible,
            "weights": weights_bytes,
            "extra": extra_bytes,
            "activation": step,
            "context": beside["context_mib"] * MIB,
            "left_free_outside": max(0, free - pool),
        },
        kv_pool=Band(value=pool, low=low, high=high),
        kv_tokens=kv_tokens,
        max_concurrency=kv_tokens / length if rate.total else None,
        starts=starts,
        reason=_reason(held, visible) if starts is False else None,
        longest_model_len=min(kv_tokens, model.max_context or kv_tokens) or None,
        safe_max_num_seqs=min(batch, int(kv_tokens // length)) or None if rate.total else batch,
        advice=_advice(kv_tokens, length, need, pool, held, visible),
        rules=tuple(Rule(**entry) for entry in _profile()["rules"]),
        notes=_notes(kv_tokens, length, pool, need),
        more={"state_bytes": states},
    )


def _flag(name: str, value: float, asked: object) -> Flag:
    return Flag(name=name, value=value, source="default" if asked is None else "asked")


def _reason(held: int, visible: int) -> str:
    return f"no memory is left for one block: {held / GIB:.2f} of {visible / GIB:.2f} GiB are loaded"


def _advice(tokens: int, length: int, need: float, pool: int, held: int, visible: int) -> tuple[Advice, ...]:
    if held >= visible:
        return (Advice(change="the weights do not fit: more ranks or fewer bits", flag="--tp_size"),)
    if tokens >= length:
        return ()
    return (
        Advice(
            change=f"{length:,} tokens need {need / GIB:.2f} GiB, the pool is {pool / GIB:.2f}",
            flag=f"--max_seq_len {tokens}" if tokens else "--kv_cache_free_gpu_memory_fraction 0.95",
        ),
    )


def _notes(tokens: int, length: int, pool: int, need: float) -> tuple[str, ...]:
    notes = ["what is held beside the weights goes by the batch the engine is built for: 0.5 to 9 GiB seen"]
    if pool > need:
        notes.append(
            f"the pool takes {pool / GIB:.2f} GiB whether needed or not: {length:,} tokens need "
            f"{need / GIB:.2f}; cap it with kv_cache_config.max_tokens"
        )
    if tokens < length:
        notes.append("the PyTorch backend lowers max_seq_len to the pool, a built engine refuses the request")
    return tuple(notes)
