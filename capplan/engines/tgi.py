"""Text Generation Inference's memory: warm up with the largest prefill, then take 95 % of what is free.

    free   = total − weights − peak of the warm-up prefill − (1 − fraction) · total
    blocks = ⌊ 0.95 · (free − the warm-up's blocks) / block bytes ⌋ + the warm-up's blocks
    max_batch_total_tokens = blocks · block size

CUDA graphs are captured after the pool is taken, in the 5 % left. Facts are profiles/engines/tgi.yaml; the
peak is estimated from one prefill. No measured row was at hand: the figures are the source's arithmetic.
Not modelled: models that TGI runs without paged attention (Mamba, encoder-decoder), ROCm and Gaudi.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from capplan import catalog
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.tensorrt_llm import step_bytes
from capplan.engines.token_pool import dated_default, known_version, token_rate
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError
from capplan.specs import Gpu, Model
from capplan.units import GIB, MIB


@cache
def _profile() -> Mapping[str, Any]:
    return catalog.read_yaml(catalog.PROFILES / "engines" / "tgi.yaml")


def default(name: str, version: str) -> int:
    """A dated default of the version."""
    return dated_default(_profile(), name, version, engine="TGI", example="3.3.7")


def pool_blocks(free: float, *, block_bytes: float, warm_blocks: int, wiggle: float = 0.95) -> int:
    """Blocks of the pool, of `free` bytes beside the warm-up's blocks; those alone where nothing is free.

    Example: 10 GiB free, blocks of 2 MiB, 259 warm: ⌊0.95 · 5120⌋ + 259 = 5123.
    """
    return max(0, int(free * wiggle // block_bytes)) + warm_blocks


def plan(
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
) -> EnginePlan:
    """What TGI makes of a GPU of `total_bytes` (as the driver reports them), on the widest rank.

    `gpu_memory_utilization` is --cuda-memory-fraction, `max_num_batched_tokens` --max-batch-prefill-tokens,
    `max_model_len` --max-total-tokens.
    Errors: InputError for versions that are none or too old, pipeline stages, draft models, models without a
    KV cache.
    """
    version = known_version(flags.version, str(_profile()["newest"]))
    if flags.pp > 1:
        raise InputError("TGI has no pipeline stages", where="--pp", hint="--tp shards the model")
    if flags.draft is not None:
        raise InputError(
            "TGI runs no draft model",
            where="--draft-model",
            hint="it speculates with Medusa heads or n-grams",
        )
    fraction = flags.gpu_memory_utilization or float(_profile()["cuda_memory_fraction"])
    prefill = flags.max_num_batched_tokens or default("max_batch_prefill_tokens", version)
    block = flags.block_size or default("block_tokens", version)
    rate = token_rate(model, kv_bits=flags.kv_bits, tp=flags.tp)
    if not rate.total:
        raise InputError(
            f"{model.name} keeps nothing per token: TGI has no pool to size",
            where="--model",
            hint="another engine",
        )
    visible = visible_bytes(total_bytes)
    step = step_bytes(model, tokens=prefill, sequences=1, tp=flags.tp)
    block_bytes = rate.total * block
    warm = -(-prefill // block)
    loaded = weights_bytes + extra_bytes + step
    held = loaded + round(warm * block_bytes)

    def free(context_mib: int) -> float:
        return visible * fraction - held - context_mib * MIB

    context = _profile()["context"]
    usual = context["ranks_mib" if flags.tp > 1 else "one_mib"]
    pools = {
        mib: 0
        if free(mib) < 0
        else pool_blocks(
            free(mib), block_bytes=block_bytes, warm_blocks=warm, wiggle=float(_profile()["wiggle"])
        )
        for mib in (0, usual, context["high_mib"])
    }
    blocks, tokens = pools[usual], pools[usual] * block
    length = flags.max_model_len or min(model.max_context or tokens, tokens) or 1
    starts: bool | None = blocks > 0 and tokens >= length
    need = flags.max_model_len or 1
    if (pools[0] * block >= need) != (pools[context["high_mib"]] * block >= need):
        starts = None
    pool = round(blocks * block_bytes)
    return EnginePlan(
        engine="tgi",
        version=version,
        flags=(
            _flag("cuda_memory_fraction", fraction, flags.gpu_memory_utilization),
            _flag("max_batch_prefill_tokens", prefill, flags.max_num_batched_tokens),
            _flag("max_total_tokens", length, flags.max_model_len),
            Flag(name="max_batch_total_tokens", value=tokens, source="from the pool"),
            _flag("block_size", block, flags.block_size),
        ),
        terms={
            "total": visible,
            "budget": int(visible * fraction),
            "weights": weights_bytes,
            "extra": extra_bytes,
            "activation": step,
            "context": usual * MIB,
            "left_free_outside": max(0, int(visible * fraction) - loaded - usual * MIB - pool),
        },
        kv_pool=Band(
            value=pool,
            low=round(pools[context["high_mib"]] * block_bytes),
            high=round(pools[0] * block_bytes),
        ),
        kv_tokens=tokens,
        max_concurrency=tokens / length,
        starts=starts,
        reason=_reason(blocks, prefill, length, tokens) if starts is False else None,
        longest_model_len=min(tokens, model.max_context or tokens) or None,
        safe_max_num_seqs=tokens // length or None,
        advice=_advice(blocks, length, tokens, weights_bytes + extra_bytes, visible),
        rules=tuple(Rule(**entry) for entry in _profile()["rules"]),
        notes=(
            "max_batch_total_tokens is shared by all running requests: prompts and what they may still make",
            "no start-up log was at hand: the pool is the source's arithmetic on an estimated prefill peak",
        ),
    )


def _flag(name: str, value: float, asked: object) -> Flag:
    return Flag(name=name, value=value, source="default" if asked is None else "asked")


def _reason(blocks: int, prefill: int, length: int, tokens: int) -> str:
    if not blocks:
        return f"not enough memory to handle {prefill:,} prefill tokens"
    return f"max_batch_total_tokens {tokens:,} is below max_total_tokens {length:,}"


def _advice(blocks: int, length: int, tokens: int, loaded: int, visible: int) -> tuple[Advice, ...]:
    if loaded >= visible:
        return (
            Advice(
                change=f"{loaded / GIB:.2f} GiB of weights do not fit: more ranks or fewer bits",
                flag="--num-shard",
            ),
        )
    if not blocks:
        return (
            Advice(change="a smaller prefill has a smaller peak", flag="--max-batch-prefill-tokens 2048"),
        )
    if tokens < length:
        return (Advice(change=f"{tokens:,} tokens fit for one request", flag=f"--max-total-tokens {tokens}"),)
    return ()
