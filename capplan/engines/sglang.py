"""SGLang's memory: a static fraction of what is free at start, weights inside, and a pool counted in tokens.

    pool   = free after loading − (1 − f) · free before loading = f · free before − weights − beside
    tokens = pool / (full layers' rate + 0.8 · sliding layers' rate), in whole pages

Activations and CUDA graphs live in the other 1 − f. Facts by version are profiles/engines/sglang.yaml.
Not modelled: DeepSeek-V4's pools, sizing after graph capture (off by default), DP attention, the unified
pool.
"""

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from capplan import catalog
from capplan.engines.plan import Advice, Band, EngineFlags, EnginePlan, Flag, Rule
from capplan.engines.token_pool import (
    TokenRate,
    Version,
    draft_rate,
    known_version,
    token_rate,
    tokens_in,
    version_numbers,
)
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError
from capplan.specs import Gpu, Model
from capplan.units import GIB, MIB


@cache
def _profile() -> Mapping[str, Any]:
    return catalog.read_yaml(catalog.PROFILES / "engines" / "sglang.yaml")


def _version(flags: EngineFlags) -> Version:
    text = known_version(flags.version, str(_profile()["newest"]))
    version = version_numbers(text, "SGLang", "0.5.3")
    if version < version_numbers(_profile()["oldest"], "SGLang", "0.5.3"):
        raise InputError(
            f"SGLang {text} is older than the rules known here",
            where="--engine-version",
            hint=f"{_profile()['oldest']} or newer",
        )
    return version


def _entry(version: Version, total_bytes: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The defaults of a version, and its memory class."""
    entries = [
        entry
        for entry in _profile()["defaults"]
        if version_numbers(entry["since"], "SGLang", "0.5.3") <= version
    ]
    classes = entries[-1]["classes"]
    inside = (size for size in classes if not size["below_gib"] or total_bytes < size["below_gib"] * GIB)
    return entries[-1], next(inside)


def prefill_graph_sizes(largest: int) -> int:
    """How many prefill sizes are captured up to `largest` tokens.

    Example: 8192: 8 + 14 + 8 + 8 + 12 + 8 = 58.
    """
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
    sizes = [size for start, stop, step in steps for size in range(start, stop, step)]
    return sum(size <= largest for size in [*sizes, *range(4608, largest + 1, 512)])


def default_fraction(
    model: Model, *, version: Version, total_bytes: int, tp: int, pp: int, chunk: int, graph_batch: int
) -> float:
    """mem_fraction_static where it is left out, of a GPU whose driver reports `total_bytes`.

    Example: 0.5.3, 80 GiB, one rank, chunk 8192, graphs to 256: reserved max(512 + 12,288 + 512 + 128,
    10,240) = 13,440 MiB, fraction 0.836.
    """
    entry, size = _entry(version, total_bytes)
    ranks, total = tp * pp, total_bytes / MIB
    how = entry["fraction"]
    fraction: float
    if how in ("by_ranks", "by_ranks_and_memory"):
        steps = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))
        fraction = next(value for least, value in steps if ranks >= least)
        if how == "by_ranks":
            return fraction
        fraction = fraction if total <= 81920 else 0.88
        if total > 96 * 1024:
            fraction = min(fraction + 48 * 1024 * (1 - fraction) / total, (total - 18 * 1024) / total)
        return fraction
    if how == "by_class":
        reserved = (size["reserved_gib"] + ranks * size["each_rank_gib"]) * 1024
    else:
        reserved = 512 + 1.5 * max(chunk, 2048) + 2 * graph_batch + ranks / 8 * 1024
        if entry["prefill_graphs"]:
            latent = any(cache.kind == "mla" for group in model.groups for cache in group.layer.caches())
            reserved += 1.5 * 1024 if latent else 8 * prefill_graph_sizes(chunk)
        if total > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
    return max(0.0, round(float(total - reserved) / total, 3))


def pool_bytes(*, free_before: int, free_after: int, fraction: float) -> int:
    """The pool: what is free after loading less what stays outside the fraction; may be negative.

    Example: 80 GiB free before, 20 after: 8 GiB at 0.85, −4 GiB at 0.70.
    """
    return round(free_after - (1 - fraction) * free_before)


def plan(
    model: Model,
    *,
    weights_bytes: int,
    extra_bytes: int = 0,
    total_bytes: int,
    gpu: Gpu | None = None,
    flags: EngineFlags,
) -> EnginePlan:
    """What SGLang makes of a GPU of `total_bytes` (as the driver reports them), on the widest rank.

    `extra_bytes` (a draft's weights, towers, LoRA) is charged to the pool, and so is the cache of a draft
    for as many tokens as the model's own; before 0.5.16 that cache comes on top, outside the fraction.
    `max_num_batched_tokens` is --chunked-prefill-size, `gpu_memory_utilization` --mem-fraction-static,
    `block_size` --page-size.
    Errors: InputError for versions that are none or too old, and impossible splits.
    """
    version = _version(flags)
    _, size = _entry(version, total_bytes)
    chunk = flags.max_num_batched_tokens or size["chunk"]
    batch = 0 if flags.enforce_eager else size["graph_batch_tp4" if flags.tp >= 4 else "graph_batch"]
    if flags.max_num_seqs is not None:
        batch = min(batch, flags.max_num_seqs)
    default = default_fraction(
        model,
        version=version,
        total_bytes=total_bytes,
        tp=flags.tp,
        pp=flags.pp,
        chunk=chunk,
        graph_batch=batch,
    )
    fraction = default if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization
    start, ranks = _profile()["start"], "ranks_" if flags.tp * flags.pp > 1 else ""
    visible = visible_bytes(total_bytes)
    free = max(0, visible - start[f"{ranks}context_mib"] * MIB)
    loaded = weights_bytes + extra_bytes
    pool = pool_bytes(free_before=free, free_after=free - loaded, fraction=fraction)
    least = max(0, visible - start[f"{ranks}context_high_mib"] * MIB)
    low = pool_bytes(free_before=least, free_after=least - loaded, fraction=fraction)
    high = pool_bytes(free_before=visible, free_after=visible - loaded, fraction=fraction)
    rate = token_rate(model, kv_bits=flags.kv_bits, tp=flags.tp, pp=flags.pp, stage=flags.stage)
    page = flags.block_size or 1
    beside = draft_rate(flags.draft, kv_bits=flags.kv_bits, tp=flags.tp)
    inside = version >= version_numbers(_profile()["draft_pool"]["since"], "SGLang", "0.5.3")
    tokens, states = pool_tokens(
        pool, rate, version=version, page=page, draft_bytes=beside if inside else 0.0
    )
    length = flags.max_model_len or model.max_context or tokens
    running = _running(tokens, states, length, flags)
    starts = tokens > 0 if (low > 0) == (high > 0) else None
    return EnginePlan(
        engine="sglang",
        version=flags.version or _profile()["newest"],
        flags=(
            _flag("mem_fraction_static", fraction, flags.gpu_memory_utilization, "default for this GPU"),
            _flag("chunked_prefill_size", chunk, flags.max_num_batched_tokens, "default for this GPU"),
            _flag("cuda_graph_max_bs", batch, None, "default for this GPU"),
            _flag("max_running_requests", running, flags.max_num_seqs, "from the pool"),
            _flag("context_length", length, flags.max_model_len, "the model's own longest"),
            _flag("page_size", page, flags.block_size, "default"),
        ),
        terms={
            "total": visible,
            "budget": int(fraction * free),
            "weights": weights_bytes,
            "extra": extra_bytes,
            "context_outside": visible - free,
            "activation_and_graphs_outside": free - int(fraction * free),
            **({} if inside or not beside else {"draft_kv_cache_outside": round(tokens * beside)}),
        },
        kv_pool=Band(value=max(0, pool), low=max(0, min(low, pool)), high=max(0, high)),
        kv_tokens=tokens,
        max_concurrency=tokens / length if length else None,
        starts=starts,
        reason=_reason(loaded, free, fraction) if starts is False else None,
        longest_model_len=min(tokens, model.max_context or tokens) or None,
        safe_max_num_seqs=(min(running, tokens // length) if rate.total and length else running) or None,
        advice=_advice(loaded, free, fraction, tokens, length),
        rules=tuple(Rule(**entry) for entry in _profile()["rules"]),
        notes=(*_notes(rate, tokens, length, flags, version), *_above(fraction, default)),
        more={
            "state_bytes": states * rate.state,
            "states": states,
            # Below, the weights leave no pool; above, activations and graphs have less than SGLang keeps.
            "mem_fraction_static_from": math.ceil(1000 * loaded / free) / 1000 if loaded < free else None,
            "mem_fraction_static_to": default,
        },
    )


def _flag(name: str, value: float, asked: object, source: str) -> Flag:
    return Flag(name=name, value=value, source=source if asked is None else "asked")


def pool_tokens(
    pool: float, rate: TokenRate, *, version: Version, page: int = 1, draft_bytes: float = 0.0
) -> tuple[int, int]:
    """max_total_num_tokens of a pool, and how many recurrent states it keeps beside.

        tokens = (pool − states) / (rate + draft's rate)            one count for both pools

    states take ratio / (1 + ratio) of the pool first; sliding layers get 0.8 times the full layers' tokens.
    """
    states = 0
    profile = _profile()
    if rate.state:
        share = profile["state_pool"]["ratio"] / (1 + profile["state_pool"]["ratio"])
        # A model of states alone has no other use for the memory.
        states = max(0, int(pool * (share if rate.total else 1) // rate.state))
        pool -= states * rate.state
    per_token = rate.total
    window = profile["window_pool"]
    if rate.full and rate.sliding and version >= version_numbers(window["since"], "SGLang", "0.5.3"):
        per_token = rate.full + window["ratio"] * rate.sliding
    return tokens_in(pool, per_token + draft_bytes if per_token else 0.0, page), states


def _running(tokens: int, states: int, length: int, flags: EngineFlags) -> int:
    """max_running_requests: from the pool and the context, at most a third of the states kept."""
    facts = _profile()["running"]
    made = max(facts["least"], min(facts["most"], int(tokens / max(1, length) * facts["factor"])))
    made = flags.max_num_seqs or min(made, tokens // 2)
    return min(made, states // int(_profile()["state_pool"]["kept"])) if states else made


def _reason(loaded: int, free: int, fraction: float) -> str:
    return (
        f"not enough memory: {loaded / GIB:.2f} GiB are loaded and --mem-fraction-static {fraction:g} leaves "
        f"{fraction * free / GIB:.2f} GiB for weights and pool; increase it"
    )


def _advice(loaded: int, free: int, fraction: float, tokens: int, length: int) -> tuple[Advice, ...]:
    if tokens >= length:
        return ()
    least = loaded / free if free else 1.0
    if least >= 1:
        return (Advice(change="the weights do not fit: more ranks or fewer bits", flag="--tp"),)
    if tokens:
        return (
            Advice(
                change=f"one request holds at most {tokens:,} of {length:,} tokens",
                flag=f"--context-length {tokens}",
            ),
        )
    return (
        Advice(
            change=f"the weights fit above {least:.3f}; the rest up to 1 is for activations and graphs",
            flag=f"--mem-fraction-static {min(0.99, round(least + 0.05, 3)):g}",
        ),
    )


def _above(fraction: float, default: float) -> tuple[str, ...]:
    """A fraction too small fails at start, one too large while serving."""
    if fraction <= default:
        return ()
    text = f"{fraction:g} is above {default:g}, what SGLang would take: running out of memory while serving"
    return (f"{text} (activations, CUDA graphs) means lower it",)


def _notes(
    rate: TokenRate, tokens: int, length: int, flags: EngineFlags, version: Version
) -> tuple[str, ...]:
    notes = ["memory before loading is estimated: CUDA's total less up to 1.5 GiB, 2.5 with several ranks"]
    if rate.window and rate.full:
        notes.append("kv_tokens are the full layers'; sliding layers hold 0.8 times as many")
    if tokens < length:
        notes.append(f"SGLang starts, but refuses requests longer than its pool of {tokens:,} tokens")
    if flags.block_size is None:
        notes.append("some attention backends raise the page to 64 or 128 tokens: less than one page is lost")
    if version[:2] > version_numbers(_profile()["newest"], "SGLang", "0.5.3")[:2]:
        notes.append(f"newer than the rules, which were read up to {_profile()['newest']}")
    return tuple(notes)
