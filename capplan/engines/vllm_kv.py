"""The KV cache as vLLM lays it out: groups, blocks, the tokens and concurrency it prints, its refusals.

    bytes per block = max over groups of Σ pages of the group's layers on this rank
    blocks          = floor(KV memory / bytes per block)
    concurrency     = blocks / Σ over groups of the blocks one request of max_model_len holds
    tokens          = int(concurrency · max_model_len)

It refuses to start where one such request does not fit into all blocks but one: block 0 is never given out.

Sources: vLLM's own `v1/core/kv_cache_utils.py`, `v1/kv_cache_interface.py`, `platforms/interface.py`,
`models/config.py` and `distributed/utils.py`, read release by release from 0.8.5 to 0.32.0 on 2026-11-29.
What changed when, and what was run, is in kv_rules.
Not modelled: DeepSeek-V4's packed pages, decode context parallelism, draft models and speculative tokens
(more state blocks and wider states), per-layer KV dtypes; with pp > 1 before 0.17, layers of unequal pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from capplan.engines.kv_groups import Group, group_layers, only_group, stage_layers
from capplan.engines.kv_layers import Placed, as_full, placed_caches, with_state_pages
from capplan.engines.kv_rules import NEWEST, CacheMode, KvRules
from capplan.errors import InputError
from capplan.specs import Model

LONGEST: Final = 2**40
"""Lengths are not searched beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """What vLLM makes of a KV memory on each rank; sizes in bytes.

    `page_bytes` is what one block takes in all layers of the widest rank, `block_size` the tokens a block of
    attention holds (raised in hybrids with states, where `state_blocks` is what a running sequence holds for
    them). `tokens` and `max_concurrency` are as printed, worth nothing where it refuses (`starts` False).
    `need_bytes` is what one request of max_model_len needs by vLLM's count; `longest_model_len` the longest
    max_model_len that starts: None where even one token does not fit, LONGEST where length does not matter.
    `layers` says what the layers hold.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """A model's caches in vLLM's groups, before any memory size is known.

    `bytes_per_block` is what one block takes on the rank where it takes most: its pages in the widest group.
    That rank limits the blocks of all. `stages` are the layers of the pipeline stages.
    """

    groups: tuple[Group, ...]
    stages: tuple[range, ...]
    placed: tuple[Placed, ...]
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
                entry.cache.page_bytes
                * entry.cache.blocks(tokens, in_flight=self.in_flight, encoder_tokens=self.encoder_tokens)
                for entry in self.placed
                if entry.layer in stage
            )
            for stage in self.stages
        )

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


def kv_pool(
    model: Model,
    *,
    kv_bits: float = 16,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    steps_in_flight: int | None = None,
    mamba_cache_mode: CacheMode | None = None,
    encoder_tokens: int = 0,
    hybrid: bool = True,
    rules: KvRules = NEWEST,
) -> KvPool:
    """The groups of a model's caches; see `plan_kv`."""
    _check_positive(
        tp=tp,
        pp=pp,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_bits=kv_bits,
        steps_in_flight=steps_in_flight,
    )
    if pp > model.layers:
        raise InputError(
            f"{model.layers} layers cannot be cut into {pp} stages", where="--pp", hint="fewer stages"
        )
    caches = [cache for group in model.groups for cache in group.layer.caches()]
    if not caches:
        raise InputError(
            f"{model.name} keeps nothing per sequence: there is no KV cache to lay out",
            where="--model",
            hint="only its weights and activations take memory",
        )
    if encoder_tokens < 1 and any(cache.kind == "cross" for cache in caches):
        raise InputError(
            f"{model.name} keeps the encoder's tokens: their number a request is not given",
            where="encoder_tokens",
            hint="1500 for Whisper",
        )
    if all(cache.kind == "state" for cache in caches):
        mamba_cache_mode = "none"  # Without attention there is no prefix caching.
    mode = rules.mamba_cache_mode if mamba_cache_mode is None else mamba_cache_mode
    placed = placed_caches(
        model,
        kv_bits=kv_bits,
        tp=tp,
        block_size=block_size,
        state_blocks=2 if mode == "align" else 1,
        checkpoints=rules.checkpoints if mode == "align" else frozenset(),
    )
    placed, block_size = with_state_pages(placed, block_size=block_size, mla_alignment=rules.mla_alignment)
    if not rules.chunks_known:
        placed = as_full(placed, kinds=("chunked",))
    chunked = any(cache.kind == "chunked" for cache in caches)
    if hybrid and rules.groups and (rules.chunked_groups or not chunked):
        groups = group_layers(
            placed,
            mixed_pages=rules.mixed_pages,
            near_equal=rules.near_equal,
            stretch=rules.stretch,
            pad=rules.pad,
        )
    else:
        groups = only_group(as_full(placed), mixed_pages=rules.mixed_pages)
    batches = steps_in_flight or (_batches_in_flight(pp) if rules.all_batches else 1)
    stages = stage_layers(model.layers, pp)
    return KvPool(
        groups=groups,
        stages=stages,
        placed=placed,
        bytes_per_block=max(group.page_bytes(stage) for group in groups for stage in stages),
        block_size=block_size,
        in_flight=batches * max_num_batched_tokens,
        encoder_tokens=encoder_tokens,
        rules=rules,
    )


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < LONGEST:
            raise InputError(
                f"{value} is no positive number", where=f"--{name.replace('_', '-')}", hint="1 or more"
            )


def _batches_in_flight(pp: int) -> int:
    """Steps scheduled before the oldest is settled: one a stage, and one more with async scheduling.

    Holds for: async scheduling, the default since 0.14. Not for: 0.26–0.28 with pp > 1 on the older model
    runner, which has pp.
    """
    return pp + 1


def plan_kv(
    model: Model,
    *,
    kv_bytes: int,
    max_model_len: int,
    kv_bits: float = 16,
    tp: int = 1,
    pp: int = 1,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    steps_in_flight: int | None = None,
    mamba_cache_mode: CacheMode | None = None,
    encoder_tokens: int = 0,
    hybrid: bool = True,
    num_gpu_blocks_override: int | None = None,
    rules: KvRules = NEWEST,
) -> KvPlan:
    """What vLLM makes of `kv_bytes` of KV memory on each rank.

    `kv_bits` is the width of a stored element (8 for fp8), `block_size` the attention backend's (16; 64 for
    MLA in fp8 and sparse MLA on FlashMLA, whose fp8 rows carry scales). `hybrid` False is
    --disable-hybrid-kv-cache-manager, which a KV connector without support for it forces too.
    `steps_in_flight` None: as async scheduling, the default, has them. `mamba_cache_mode` None: the version's
    default; "none" with --no-enable-prefix-caching. `encoder_tokens` is what cross attention keeps a request.
    With `pp` every rank has `kv_bytes` and the widest is reported; vLLM's message names the first that fails.
    Errors: InputError for values that cannot be used and models vLLM cannot hold.
    Example: Llama-3.1-8B, 10 GiB, blocks of 16 tokens of 131,072 B: 5,120 blocks, 81,920 tokens.
    """
    _check_positive(max_model_len=max_model_len, num_gpu_blocks_override=num_gpu_blocks_override)
    pool = kv_pool(
        model,
        kv_bits=kv_bits,
        tp=tp,
        pp=pp,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        steps_in_flight=steps_in_flight,
        mamba_cache_mode=mamba_cache_mode,
        encoder_tokens=encoder_tokens,
        hybrid=hybrid,
        rules=rules,
    )
    page = pool.bytes_per_block
    if num_gpu_blocks_override is not None:
        kv_bytes = num_gpu_blocks_override * page
    blocks = max(0, kv_bytes) // page
    free = kv_bytes - (page if rules.spare_block else 0)
    request = pool.blocks_of_request(max_model_len)
    concurrency = blocks / request
    if not rules.whole_blocks:
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
        longest_model_len=_longest(lambda tokens: free > 0 and pool.need_bytes(tokens) <= free),
        layers=_described(pool.placed),
        state_blocks=pool.state_blocks,
        request_blocks=request,
    )


def _longest(fits: Callable[[int], bool]) -> int | None:
    """The largest length up to LONGEST that fits, where a longer one never fits if a shorter one does not."""
    if not fits(1):
        return None
    low, high = 1, LONGEST + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


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
