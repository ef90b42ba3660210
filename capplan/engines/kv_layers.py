"""What each layer asks of vLLM's block pool on one rank, and how pages are made equal.

A page is what one block of one layer takes. A layer of attention fills it with `block_size` tokens, a
recurrent layer with the whole state of one sequence. Facts from vLLM's sources (see vllm_kv); no code.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final, Literal

from capplan.blocks.mamba import Mamba2
from capplan.blocks.mla import Mla
from capplan.blocks.reused import Reused
from capplan.errors import InputError
from capplan.specs import Block, Cache, Model

LayerKind = Literal["full", "mla", "indexer", "sliding", "chunked", "cross", "state"]

WHOLE: Final = frozenset(("full", "mla", "indexer"))
"""Kinds that keep every token: they always need the same number of blocks."""

KERNEL_BLOCK: Final = 16
"""Tokens that a block is a multiple of, for attention other than MLA (FlashAttention)."""

# The packed fp8 row of FlashMLA's sparse kernel: a 4-byte scale per 128 latents, the rotary part in 16 bits.
_SPARSE_SCALE_GROUP: Final = 128
_SPARSE_SCALE_BYTES: Final = 4
_SPARSE_ROPE_BYTES: Final = 2

# Width that versions without latents pad the keys and values of a head to.
_EXPANDED_WIDTH: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One cache of one layer on one rank. Equal records may share a group, others may not.

    `entry_bytes` is what a token takes (0 for a state), `state_bytes` what a sequence takes (0 for
    attention), `state_blocks` how many blocks a sequence holds for it. `shape` is (heads, k width, v width)
    or the parts of a state in bytes. `padded_bytes` is the page where it is larger than its content.
    """

    kind: LayerKind
    block_size: int
    shape: tuple[int, ...]
    entry_bytes: Fraction = Fraction(0)
    window: int | None = None
    state_bytes: int = 0
    state_blocks: int = 0
    padded_bytes: int | None = None

    @property
    def content_bytes(self) -> int:
        """What a block holds, before padding."""
        return self.state_bytes if self.kind == "state" else math.ceil(self.block_size * self.entry_bytes)

    @property
    def page_bytes(self) -> int:
        """What a block takes."""
        return self.content_bytes if self.padded_bytes is None else self.padded_bytes

    def blocks(self, tokens: int, *, in_flight: int, encoder_tokens: int = 0) -> int:
        """Most blocks a request of `tokens` tokens holds at once.

            all tokens kept:  ceil(tokens / block)
            sliding:          ceil(min(window − 1 + in flight, tokens) / block) + 1
            chunked:          ceil(min(chunk + in flight, tokens) / block)
            state:            1, or more where prefix caching keeps checkpoints
            cross:            ceil(encoder tokens / block)

        Blocks behind the window are freed only when a step is settled, so the tokens in flight
        (`max_num_batched_tokens` of every batch scheduled at once) count too; a window that does not start
        at a block's edge reaches into one block more.
        Example: window 4096, 4096 in flight, 32,768 tokens in blocks of 16: ceil(8191 / 16) + 1 = 513.
        """
        if self.kind == "state":
            return self.state_blocks
        if self.kind == "cross":
            return -(-encoder_tokens // self.block_size)
        if self.window is None:
            return -(-tokens // self.block_size)
        if self.kind == "sliding":
            return -(-min(self.window - 1 + in_flight, tokens) // self.block_size) + 1
        return -(-min(self.window + in_flight, tokens) // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A layer's cache and the layer's position in the stack."""

    layer: int
    cache: LayerCache


def placed_caches(
    model: Model,
    *,
    kv_bits: float,
    tp: int,
    block_size: int,
    state_blocks: int,
    checkpoints: frozenset[str],
    latents: bool = True,
) -> tuple[Placed, ...]:
    """The caches of every layer on one of `tp` ranks, in the order of the stack.

    Heads are divided, or replicated once there are fewer than ranks; latents and indexer keys are whole on
    every rank. States of the block kinds in `checkpoints` hold one block more than `state_blocks`. Without
    `latents` latent attention keeps keys and values of every head.
    Errors: InputError where heads or a state do not divide, or a cache's layout is not modelled.
    """
    sparse = any(cache.kind == "indexer" for group in model.groups for cache in group.layer.caches())
    placed: list[Placed] = []
    for group in model.groups:
        made: list[LayerCache] = []
        for block in group.layer.blocks:
            for cache in block.caches():
                if cache.kind == "state":
                    made.append(_state(block, cache, tp, state_blocks, checkpoints))
                else:
                    kept = cache if latents else _expanded(block, cache)
                    made.append(_attention(block, kept, kv_bits, tp, block_size, sparse))
        placed += [Placed(layer=index, cache=cache) for index in group.indices for cache in made]
    return tuple(sorted(placed, key=lambda entry: entry.layer))


def _inner(block: Block) -> Block:
    while isinstance(block, Reused):
        block = block.inner
    return block


def _expanded(block: Block, cache: Cache) -> Cache:
    inner = _inner(block)
    if cache.kind != "mla" or not isinstance(inner, Mla):
        return cache
    return Cache(kind="full", heads=inner.heads, k_width=_EXPANDED_WIDTH, v_width=_EXPANDED_WIDTH)


def _attention(
    block: Block, cache: Cache, kv_bits: float, tp: int, block_size: int, sparse: bool
) -> LayerCache:
    if cache.kind == "compressed" or cache.kind == "state" or cache.stride != 1:
        raise InputError(
            f"vLLM's packed pages of {cache.kind} entries every {cache.stride} tokens are not modelled",
            where="--engine vllm",
            hint="without --engine the cache's own size is printed",
        )
    heads = _split(cache.heads, tp, "KV heads") if cache.splits else cache.heads
    bits = kv_bits if cache.element_bits is None else cache.element_bits
    entry = heads * (cache.k_width + cache.v_width) * Fraction(bits) / 8 + cache.entry_extra_bytes
    inner = _inner(block)
    if sparse and cache.kind == "mla" and bits == 8 and isinstance(inner, Mla):
        scales = inner.kv_rank // _SPARSE_SCALE_GROUP * _SPARSE_SCALE_BYTES
        entry = Fraction(inner.kv_rank + scales + inner.rope_width * _SPARSE_ROPE_BYTES)
    return LayerCache(
        kind=cache.kind,
        block_size=block_size,
        shape=(heads, cache.k_width, cache.v_width),
        entry_bytes=entry,
        window=cache.window if cache.kind in ("sliding", "chunked") else None,
    )


def _split(heads: int, tp: int, what: str) -> int:
    if heads % tp and tp % heads:
        raise InputError(
            f"{heads} {what} cannot be split or replicated over {tp} ranks",
            where="--tp",
            hint="a divisor or a multiple of the heads",
        )
    return max(1, heads // tp)


def _state(block: Block, cache: Cache, tp: int, state_blocks: int, checkpoints: frozenset[str]) -> LayerCache:
    inner = _inner(block)
    parts: list[int] = []
    for number, (elements, bits) in enumerate(cache.state_elements):
        if number and isinstance(inner, Mamba2) and inner.n_groups % tp:
            # B and C groups that do not divide are replicated until every rank has one.
            elements += 2 * (tp - inner.n_groups) * inner.state * (inner.kernel - 1)
        if elements % tp:
            raise InputError(
                f"a state of {elements:,} elements does not divide over {tp} ranks",
                where="--tp",
                hint=f"the layer has {cache.heads} heads",
            )
        parts.append(elements // tp * bits // 8)
    return LayerCache(
        kind="state",
        block_size=0,
        shape=tuple(parts),
        state_bytes=sum(parts),
        state_blocks=state_blocks + (inner.kind in checkpoints),
    )


def with_state_pages(
    placed: Sequence[Placed], *, block_size: int, mla_alignment: int
) -> tuple[tuple[Placed, ...], int]:
    """Attention blocks raised until a page holds a state, states padded to that page; and the block size.

        block = a · ceil(state / (a · bytes per token)),  a = max(kernel block, block_size)

    Holds for: models with both attention and recurrent layers; others come back as they are.
    Example: Qwen3-Next, state 1,097,728 B, 2,048 B a token: 16 · ceil(33.5) = 544 tokens, padded to
    1,114,112 B.
    """
    states = [entry.cache.state_bytes for entry in placed if entry.cache.kind == "state"]
    entries = [entry.cache for entry in placed if entry.cache.kind in ("full", "mla")] or [
        entry.cache for entry in placed if entry.cache.kind in ("sliding", "chunked")
    ]
    if not states or not entries:
        return tuple(placed), block_size
    first = entries[0]
    alignment = max(block_size, mla_alignment if first.kind == "mla" else KERNEL_BLOCK)
    block = max(block_size, alignment * -(-max(states) // math.ceil(alignment * first.entry_bytes)))
    page = math.ceil(block * first.entry_bytes)
    made = [
        replace(entry.cache, padded_bytes=page if page > entry.cache.state_bytes else None)
        if entry.cache.kind == "state"
        else replace(entry.cache, block_size=block)
        for entry in placed
    ]
    return tuple(replace(entry, cache=cache) for entry, cache in zip(placed, made, strict=True)), block


def with_equal_pages(placed: Sequence[Placed], *, stretch: bool, pad: bool) -> tuple[Placed, ...]:
    """Every layer's page made as large as the largest: more tokens a block where that divides, else padding.

    Example: pages of 40,960 and 81,920 B: the smaller layers get blocks of 32 tokens instead of 16.
    Errors: InputError where this version of vLLM, or the cache's kind, allows neither.
    """
    largest = max(entry.cache.page_bytes for entry in placed)
    return tuple(replace(entry, cache=_page_of(entry.cache, largest, stretch, pad)) for entry in placed)


def _page_of(cache: LayerCache, page: int, stretch: bool, pad: bool) -> LayerCache:
    if cache.page_bytes == page:
        return cache
    if cache.kind == "state" and pad:
        return replace(cache, padded_bytes=page)
    if cache.kind != "state" and stretch and page % cache.page_bytes == 0:
        return replace(cache, block_size=cache.block_size * (page // cache.page_bytes))
    if cache.kind in ("full", "sliding", "chunked", "cross") and pad:
        return replace(cache, padded_bytes=page)
    raise InputError(
        f"vLLM cannot make pages of {cache.page_bytes:,} and {page:,} bytes equal",
        where="--engine-version" if cache.kind in ("full", "sliding", "chunked") else "--engine vllm",
        hint="newer versions stretch (0.12) or pad (0.24) attention pages",
    )


def as_full(
    placed: Sequence[Placed], kinds: Sequence[LayerKind] = ("sliding", "chunked")
) -> tuple[Placed, ...]:
    """Layers of `kinds` counted as if they kept every token: no groups per kind of cache.

    Only where full attention is there too; a model of windows alone keeps them.
    Errors: InputError for windows (or chunks) of several sizes, which vLLM cannot put into one group.
    """
    if not any(entry.cache.kind in WHOLE for entry in placed):
        return tuple(placed)
    for kind in kinds:
        sizes = sorted({entry.cache.window or 0 for entry in placed if entry.cache.kind == kind})
        if len(sizes) > 1:
            raise InputError(
                f"without the hybrid KV cache manager vLLM cannot hold windows of {sizes} tokens together",
                where="--disable-hybrid-kv-cache-manager",
                hint="leave the manager on",
            )
    return tuple(
        replace(entry, cache=replace(entry.cache, kind="full", window=None))
        if entry.cache.kind in kinds
        else entry
        for entry in placed
    )
