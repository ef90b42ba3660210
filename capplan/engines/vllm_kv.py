"""The KV cache as vLLM lays it out: groups, blocks, the tokens and concurrency it prints, its refusals.

    bytes per block = max over groups of Σ pages of the group's layers on this rank
    blocks          = floor(KV memory / bytes per block)
    concurrency     = blocks / Σ over groups of the blocks one request of max_model_len holds
    tokens          = int(concurrency · max_model_len)

It refuses to start where one such request does not fit into all blocks but one: block 0 is never given out.

Sources: vLLM's own `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`, `platforms/interface.py`,
`models/config.py` and `distributed/utils.py`, read release by release from 0.8.5 to 0.32.0 on 2026-11-29.
What changed when, and what was run, is in kv_rules.
Not modelled: DeepSeek-V4's packed pages, decode context parallelism, what speculative tokens add to states
(more blocks, wider states), per-layer KV dtypes; with pp > 1 before 0.17, layers of unequal pages.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from capplan.engines.kv_groups import Group, group_layers, only_group
from capplan.engines.kv_layers import LayerCache, Placed, as_full, placed_caches, with_state_pages
from capplan.engines.kv_question import LONGEST, KvQuestion, check_positive
from capplan.engines.kv_rules import KvRules
from capplan.errors import InputError
from capplan.formulas.search import largest
from capplan.specs import Cache, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """What vLLM makes of a KV memory on each rank; sizes in bytes.

    `page_bytes` is what one block takes in all layers of the widest rank, `block_size` the tokens a block of
    attention holds (raised in hybrids with states, where `state_blocks` is what a running sequence holds for
    them). `tokens` and `max_concurrency` are as printed, worth nothing where it refuses (`starts` False).
    `need_bytes` is what one request of max_model_len needs by vLLM's count; `longest_model_len` the longest
    max_model_len that starts: None where even one token does not fit, LONGEST where length does not matter.
    `layers` says what the layers hold. `token_groups` keep every token, a block each; the `limited_groups`,
    (tokens a block, blocks at most), those of a window or a state while a request decodes.
    """

    groups: int
    block_size: int
    page_bytes: int
    num_blocks: int
    tokens: int
    max_concurrency: float
    starts: bool
    need_bytes: int
    longest_model_len: int | None
    layers: tuple[str, ...]
    state_blocks: int = 0
    request_blocks: int = 0
    token_groups: int = 1
    limited_groups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """A model's caches in vLLM's groups, before any memory size is known.

    `bytes_per_block` is what one block takes on the rank where it takes most: its pages in the widest group.
    That rank limits the blocks of all. `stages` are the layers of the pipeline stages, `held` the different
    caches of each, with the bytes of their pages in all layers that have them.
    """

    groups: tuple[Group, ...]
    stages: tuple[range, ...]
    placed: tuple[Placed, ...]
    held: tuple[tuple[tuple[LayerCache, int], ...], ...]
    bytes_per_block: int
    block_size: int
    in_flight: int
    encoder_tokens: int
    rules: KvRules

    def blocks_of_request(self, tokens: int) -> int:
        """Blocks that one request of `tokens` tokens holds at most, all groups together."""
        return sum(self._group_blocks(group, tokens) for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        """What one request of `tokens` tokens holds at most, on the widest rank."""
        return self.blocks_of_request(tokens) * self.bytes_per_block

    def need_bytes(self, tokens: int) -> int:
        """What the start-up check compares with the KV memory: `request_bytes`, but see `KvRules.need`."""
        if self.rules.need == "groups":
            return self.request_bytes(tokens)
        if self.rules.need == "first group":
            return self._group_blocks(self.groups[0], tokens) * self.bytes_per_block
        return max(
            sum(
                page_bytes
                * cache.blocks(tokens, in_flight=self.in_flight, encoder_tokens=self.encoder_tokens)
                for cache, page_bytes in held
            )
            for held in self.held
        )

    def longest(self, free_bytes: int, *, near: int) -> int | None:
        """The longest request that `free_bytes` hold, up to LONGEST; None where not even one token fits.

        Lengths matter in whole blocks only, of which the search tries numbers. `near` is where it looks
        first: the length that would fit if needs grew in proportion from there.
        """
        sizes = [entry.cache.block_size for entry in self.placed]
        sizes += [cache.block_size for group in self.groups for cache in group.caches]
        unit = math.gcd(*sizes) or 1
        found = largest(
            lambda blocks: self.need_bytes(blocks * unit) <= free_bytes,
            limit=LONGEST // unit,
            guess=near * max(0, free_bytes) // self.need_bytes(near) // unit,
        )
        if found == LONGEST // unit and self.need_bytes(LONGEST) <= free_bytes:
            return LONGEST
        return found * unit or None

    def limits(self) -> Iterator[tuple[int, int | None]]:
        """Tokens a block and the most blocks of a decoding request, by group; None: as long as it is."""
        for group in self.groups:
            most = group.blocks(LONGEST, in_flight=1, encoder_tokens=self.encoder_tokens)
            size = group.block_size or 1
            yield size, None if most * size >= LONGEST else most

    def _group_blocks(self, group: Group, tokens: int) -> int:
        return group.blocks(tokens, in_flight=self.in_flight, encoder_tokens=self.encoder_tokens)

    @property
    def state_blocks(self) -> int:
        """Blocks a running sequence holds for its states."""
        return sum(group.state_blocks for group in self.groups)

    def printed_tokens(self, blocks: int, concurrency: float, max_model_len: int) -> int:
        """The capacity in the start-up log."""
        if self.rules.prints == "concurrency":
            return int(concurrency * max_model_len)
        sizes = [group.block_size for group in self.groups]
        return blocks // len(self.groups) * min(size or max_model_len for size in sizes)


def kv_pool(model: Model, question: KvQuestion) -> KvPool:
    """The groups of a model's caches; see `plan_kv`."""
    question.check(model.layers)
    rules = question.rules
    parts = (model,) if question.draft is None else (model, question.draft)
    caches = [cache for part in parts for group in part.groups for cache in group.layer.caches()]
    if not caches:
        raise InputError(
            f"{model.name} keeps nothing per sequence: there is no KV cache to lay out",
            where="--model",
            hint="only its weights and activations take memory",
        )
    if question.encoder_tokens < 1 and any(cache.kind == "cross" for cache in caches):
        raise InputError(
            f"{model.name} keeps the encoder's tokens: their number a request is not given",
            where="encoder_tokens",
            hint="1500 for Whisper",
        )
    placed, block_size = _placed(parts, question, caches)
    if not rules.chunks_known:
        placed = as_full(placed, kinds=("chunked",))
    chunked = any(cache.kind == "chunked" for cache in caches)
    if question.hybrid and rules.groups and (rules.chunked_groups or not chunked):
        groups = group_layers(
            placed,
            mixed_pages=rules.mixed_pages,
            near_equal=rules.near_equal,
            stretch=rules.stretch,
            pad=rules.pad,
        )
    else:
        # Before groups a draft had a cache of its own, of as many blocks.
        own = question.draft is not None and not rules.groups
        groups = only_group(as_full(placed), mixed_pages=rules.mixed_pages or own)
    stages = question.stages(model.layers)
    return KvPool(
        groups=groups,
        stages=stages,
        placed=placed,
        held=tuple(_held(placed, stage) for stage in stages),
        bytes_per_block=max(group.page_bytes(stage) for group in groups for stage in stages),
        block_size=block_size,
        in_flight=question.in_flight,
        encoder_tokens=question.encoder_tokens,
        rules=rules,
    )


def _placed(
    parts: tuple[Model, ...], question: KvQuestion, caches: list[Cache]
) -> tuple[tuple[Placed, ...], int]:
    """The caches of every layer, a draft's after the model's, and the tokens a block holds."""
    rules, mode = question.rules, question.mamba_cache_mode
    if all(cache.kind == "state" for cache in caches):
        mode = "none"  # Without attention there is no prefix caching.
    mode = rules.mamba_cache_mode if mode is None else mode
    placed: list[Placed] = []
    first = 0
    for part in parts:
        made = placed_caches(
            part,
            kv_bits=question.kv_bits,
            tp=question.tp if part is parts[0] else question.draft_tp or question.tp,
            block_size=question.block_size,
            state_blocks=2 if mode == "align" else 1,
            checkpoints=rules.checkpoints if mode == "align" else frozenset(),
            latents=rules.latents,
        )
        placed += [replace(entry, layer=entry.layer + first) for entry in made]
        first += part.layers
    return with_state_pages(placed, block_size=question.block_size, mla_alignment=rules.mla_alignment)


def _held(placed: tuple[Placed, ...], stage: range) -> tuple[tuple[LayerCache, int], ...]:
    layers = Counter(entry.cache for entry in placed if entry.layer in stage)
    return tuple((cache, cache.page_bytes * count) for cache, count in layers.items())


def plan_kv(
    model: Model,
    question: KvQuestion,
    *,
    kv_bytes: int,
    max_model_len: int,
    num_gpu_blocks_override: int | None = None,
) -> KvPlan:
    """What vLLM makes of `kv_bytes` of KV memory on each rank.

    Errors: InputError for values that cannot be used and models vLLM cannot hold.
    Example: Llama-3.1-8B, 10 GiB, blocks of 16 tokens of 131,072 B: 5,120 blocks, 81,920 tokens.
    """
    check_positive(max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override)
    return plan_pool(
        kv_pool(model, question),
        kv_bytes=kv_bytes,
        max_model_len=max_model_len,
        num_gpu_blocks_override=num_gpu_blocks_override,
    )


def plan_pool(
    pool: KvPool, *, kv_bytes: int, max_model_len: int, num_gpu_blocks_override: int | None = None
) -> KvPlan:
    """The same for a layout that is worked out already."""
    page = pool.bytes_per_block
    if not page:
        raise InputError(
            "a rank's layers keep no cache of their own: they read that of layers elsewhere",
            where="--pp",
            hint="fewer pipeline stages",
        )
    if num_gpu_blocks_override is not None:
        kv_bytes = num_gpu_blocks_override * page
    blocks = max(0, kv_bytes) // page
    free = kv_bytes - (page if pool.rules.spare_block else 0)
    request = pool.blocks_of_request(max_model_len)
    concurrency = blocks / request
    if not pool.rules.whole_blocks:
        concurrency = blocks * pool.block_size / max_model_len
    need = pool.need_bytes(max_model_len)
    return KvPlan(
        groups=len(pool.groups),
        block_size=pool.block_size,
        page_bytes=page,
        num_blocks=blocks,
        tokens=pool.printed_tokens(blocks, concurrency, max_model_len),
        max_concurrency=concurrency,
        starts=free > 0 and need <= free,
        need_bytes=need,
        longest_model_len=pool.longest(free, near=max_model_len) if free > 0 else None,
        layers=_described(pool.placed),
        state_blocks=pool.state_blocks,
        request_blocks=request,
        token_groups=sum(most is None for _, most in pool.limits()),
        limited_groups=tuple((size, most) for size, most in pool.limits() if most is not None),
    )


def state_limited_sequences(plan: KvPlan) -> int | None:
    """The largest --max-num-seqs with which a model with states starts; None where it has none.

        max_num_seqs ≤ blocks          (each captured decode sequence needs a block for its state)

    Holds for: 0.20 and newer with full CUDA graphs, the default; 0.18 and 0.19 capture fewer graphs instead.
    Sequences that really run at once: (blocks − 1) / `state_blocks` at most, less what attention holds.
    """
    return plan.num_blocks if plan.state_blocks else None


def _described(placed: tuple[Placed, ...]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for entry in placed:
        cache = entry.cache
        if cache.kind == "state":
            text = f"state of {cache.state_bytes:,} B"
            if cache.page_bytes > cache.state_bytes:
                text += f" padded to {cache.page_bytes:,} B"
        else:
            limit = f" {cache.window:,}" if cache.window else ""
            text = f"{cache.kind}{limit}, blocks of {cache.block_size} tokens in {cache.page_bytes:,} B"
        counts[text] = counts.get(text, 0) + 1
    return tuple(f"{count} × {text}" for text, count in counts.items())
