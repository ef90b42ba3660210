"""Time of attention kernels, in seconds: decode and prefill, over keys and values or over one latent.

Arguments and `fit` as in op_cost. Widths are elements a head; `kv_tokens` are summed over the batch, windows
already applied; `pairs` are query-key pairs after the mask, summed over the sequences.
"""

from collections.abc import Mapping
from typing import Final

from capplan.formulas.blend import (
    MICROSECOND,
    NANOSECOND,
    Number,
    divisor,
    read_bytes,
    rounded_up,
    soft_maximum,
)

QUERY_ROWS: Final = 128
"""Queries of one head that a prefill kernel takes at once."""
GROUPED: Final = (2, 32)
"""Query heads a KV head that a kernel for grouped queries takes; others go to one that shares nothing."""
_SERIAL_SHARPNESS: Final = 4.0


def decode_attention_s(
    *,
    batch: Number,
    kv_tokens: Number,
    heads: Number,
    kv_heads: Number,
    k_width: Number,
    v_width: Number,
    kv_bits: float,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
    queries: Number = 1,
    cache_bytes: Number = 0.0,
) -> Number:
    """Time of attention of one query token a sequence (or a few) over its cache, in seconds.

        t = t0 + chain · (context / 1024)^¼ + soft(tiles, memory, work, serial · context)
        tiles  = batch · kv_heads · tile · (1 + group · heads/kv_heads) / SMs
        memory = (keys and values + queries and outputs) / (memory · bw)
        work   = 2 · heads · (k + v) · kv_tokens / (compute · peak)

    context = kv_tokens / batch. `serial` is the time a token of a kernel that does not split a sequence.
    `queries` tokens a sequence (verified drafts) read the cache once, like so many times the heads.
    With `own_` numbers, groups outside 2 … 32 run a kernel that reads the cache once a query head.
    `cache_bytes`: cache that may hold keys and values from the call before; 0 in a model.
    Holds for: sequences of like length. Source: fits of measured kernels.
    """
    width = k_width + v_width
    own_group = heads / kv_heads  # by which an engine chooses the kernel
    heads = heads * queries
    group = heads / kv_heads
    context = kv_tokens / divisor(batch)
    stored = kv_heads * width * kv_tokens * kv_bits / 8
    read = read_bytes(
        moved=stored, cache_bytes=cache_bytes, reach=fit["cache_reach"], speed=fit["cache_speed"]
    )
    start = fit["chain_us"] * MICROSECOND * (context / 1024) ** 0.25
    memory = (read + batch * heads * width * 2) / (fit["memory"] * bytes_per_s)
    tiles = batch * kv_heads * fit["tile_us"] * MICROSECOND / sms
    if "group" in fit:
        tiles = tiles * (1 + fit["group"] * group) * (1 - fit["single"] / group**3)
        tiles = tiles * ((k_width + v_width) / 256) ** fit["width"]
    work = 2 * heads * width * kv_tokens / (fit["compute"] * flop_per_s)
    serial = fit["serial_ns"] * NANOSECOND * context
    longest = soft_maximum(first=work, second=serial, p=_SERIAL_SHARPNESS)
    body = soft_maximum(first=tiles, second=memory, p=fit["p"])
    time = fit["t0_us"] * MICROSECOND + start + soft_maximum(first=body, second=longest, p=fit["p"])
    if "own_t0_us" not in fit:
        return time
    alone = (own_group < GROUPED[0]) | (own_group > GROUPED[1])
    own_tiles = batch * heads * fit["own_tile_us"] * MICROSECOND / sms
    own_memory = read * group / (fit["own_memory"] * bytes_per_s)
    own = fit["own_t0_us"] * MICROSECOND + start
    own = own + soft_maximum(first=own_tiles, second=own_memory, p=fit["p"])
    return alone * own + (1 - alone) * time


def prefill_attention_s(
    *,
    sequences: Number,
    tokens: Number,
    pairs: Number,
    heads: Number,
    kv_heads: Number,
    k_width: Number,
    v_width: Number,
    kv_bits: float,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
    cache_bytes: Number = 0.0,
) -> Number:
    """Time of causal attention of `tokens` new tokens of `sequences` sequences, in seconds.

        t = t0 + memory + soft(soft(work, tiles), chain)
        work   = 2 · heads · (k + v) · pairs / (compute · peak)
        tiles  = sequences · heads · ⌈length / 128⌉ · tile / SMs   (packed: a group's queries together)
        chain  = 2 · 128 · (k + v) · longest / (chain · peak / SMs)    (the last tile sees the whole context)
        memory = (queries, outputs, kv_passes · new keys and values, context once) / (memory · bw)

    length = tokens / sequences, longest = pairs / tokens + length / 2. `cache_bytes`: the last-level cache,
    which holds what the kernels before have written. Holds for: sequences of like length; writing the new
    keys and values is inside. Source: fits of measured kernels.
    """
    width = k_width + v_width
    length = tokens / divisor(sequences)
    longest = pairs / divisor(tokens) + length / 2
    new = tokens * width * (heads + fit["kv_passes"] * kv_heads) * 2
    moved = new + sequences * longest * kv_heads * width * kv_bits / 8
    moved = read_bytes(
        moved=moved, cache_bytes=cache_bytes, reach=fit["cache_reach"], speed=fit["cache_speed"]
    )
    memory = moved / (fit["memory"] * bytes_per_s)
    work = 2 * heads * width * pairs / (fit["compute"] * flop_per_s)
    packed = kv_heads * rounded_up(length * heads / kv_heads, QUERY_ROWS)
    apart = heads * rounded_up(length, QUERY_ROWS)
    count = sequences * (fit["packed"] * packed + (1 - fit["packed"]) * apart) / QUERY_ROWS
    tiles = count * fit["tile_us"] * MICROSECOND / sms
    chain = 2 * QUERY_ROWS * width * longest / (fit["chain"] * flop_per_s / sms)
    body = soft_maximum(first=work, second=tiles, p=fit["p"])
    return fit["t0_us"] * MICROSECOND + memory + soft_maximum(first=body, second=chain, p=fit["p_chain"])


def mla_decode_s(
    *,
    batch: Number,
    kv_tokens: Number,
    heads: Number,
    latent_width: Number,
    v_width: Number,
    kv_bits: float,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
) -> Number:
    """Time of absorbed latent attention of one query token a sequence, in seconds.

        t = t0 + chain · (context / 1024)^¼ + soft(tiles, memory, work, ⌈batch / SMs⌉ · serial · context)

    as decode attention with one KV head, kept once: `latent_width` is what is kept a token (latent and
    rotary part), `v_width` its latent part. With 128 heads the work, not the memory, is the bound.
    Holds for: the attention core alone, not its projections. Source: fits of measured kernels.
    """
    context = kv_tokens / divisor(batch)
    moved = latent_width * kv_tokens * kv_bits / 8 + batch * heads * (latent_width + v_width) * 2
    memory = moved / (fit["memory"] * bytes_per_s)
    tiles = batch * fit["tile_us"] * MICROSECOND / sms * (1 + fit["group"] * heads)
    work = 2 * heads * (latent_width + v_width) * kv_tokens / (fit["compute"] * flop_per_s)
    serial = fit["serial_ns"] * NANOSECOND * context * rounded_up(batch / sms, 1)
    start = fit["chain_us"] * MICROSECOND * (context / 1024) ** 0.25
    body = soft_maximum(first=tiles, second=memory, p=fit["p"])
    body = soft_maximum(first=body, second=work, p=fit["p"])
    body = soft_maximum(first=body, second=serial, p=fit["p_serial"])
    return fit["t0_us"] * MICROSECOND + start + body


def mla_prefill_s(
    *,
    sequences: Number,
    tokens: Number,
    pairs: Number,
    heads: Number,
    k_width: Number,
    v_width: Number,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
    cache_bytes: Number = 0.0,
) -> Number:
    """Time of latent attention of a prompt, in seconds: keys and values expanded to every head.

    Prefill attention with as many KV heads as heads, `k_width` and `v_width` a head (192 and 128 in
    DeepSeek's), in 16 bits whatever the cache holds. Holds for: the attention core alone, not its
    projections. Source: fits of measured kernels.
    """
    return prefill_attention_s(
        sequences=sequences,
        tokens=tokens,
        pairs=pairs,
        heads=heads,
        kv_heads=heads,
        k_width=k_width,
        v_width=v_width,
        kv_bits=16,
        flop_per_s=flop_per_s,
        bytes_per_s=bytes_per_s,
        sms=sms,
        fit={"packed": 0.0, **fit},
        cache_bytes=cache_bytes,
    )
