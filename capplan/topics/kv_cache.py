"""Topics on the KV cache: its size, its kinds, paging and waste."""

from typing import Any, Final

from capplan.formulas import latency, memory
from capplan.topics.topic import Line, Topic, topic
from capplan.units import GB

LLAMA_3_8B: Final[dict[str, Any]] = {
    "layers": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "kv_dtype_bytes": 2,
}
LLAMA_2_13B: Final[dict[str, Any]] = {"layers": 40, "hidden": 5120, "kv_dtype_bytes": 2}
_PER_TOKEN: Final = memory.kv_bytes_per_token(**LLAMA_3_8B)


def _kv_per_token() -> tuple[Line, ...]:
    return (
        Line(
            "Llama-3-8B, one layer",
            memory.kv_entry_bytes(heads=8, k_width=128, v_width=128, element_bits=16),
            "B",
        ),
        Line("Llama-3-8B, 32 layers", memory.kv_bytes_per_token(**LLAMA_3_8B), "B"),
        Line("the same on one of 4 GPUs", memory.kv_bytes_per_token(**LLAMA_3_8B, tp=4), "B"),
        Line(
            "the same on one of 16: heads are replicated",
            memory.kv_bytes_per_token(**LLAMA_3_8B, tp=16),
            "B",
        ),
    )


def _kv_cache() -> tuple[Line, ...]:
    explosion = memory.kv_cache_bytes(**LLAMA_3_8B, batch=64, context=8192)
    return (
        Line(
            "Llama-3-8B, 1 user at 4,096",
            memory.kv_cache_bytes(**LLAMA_3_8B, batch=1, context=4096),
            "B",
        ),
        Line("16 users at 4,096", memory.kv_cache_bytes(**LLAMA_3_8B, batch=16, context=4096), "B"),
        Line("64 users at 8,192", explosion, "B"),
        Line(
            "left of an A100 40GB by the cache alone",
            memory.headroom_bytes(usable=40 * GB, total=explosion),
            "B",
        ),
    )


def _kv_cache_mha() -> tuple[Line, ...]:
    def at(batch: int) -> float:
        return memory.mha_kv_cache_bytes(**LLAMA_2_13B, batch=batch, context=4096)

    weights = memory.weight_bytes(parameters=13e9, bits=16)
    return (
        Line("Llama-2-13B, 1 user at 4,096", at(1), "B"),
        Line("20 users", at(20), "B"),
        Line(
            "20 users with 13B in fp16, before overhead",
            memory.total_bytes(weights=weights, kv_cache=at(20), overhead=0),
            "B",
        ),
    )


def _max_tokens() -> tuple[Line, ...]:
    return (
        Line(
            "64 users stopped at 512 tokens",
            memory.kv_cache_bytes(**LLAMA_3_8B, batch=64, context=512),
            "B",
        ),
        Line("64 that run to 8,192", memory.kv_cache_bytes(**LLAMA_3_8B, batch=64, context=8192), "B"),
        Line(
            "seconds such a request holds its slot at 25 ms a token",
            latency.e2e_s(ttft_s=0.5, tpot_s=0.025, output_tokens=8192),
            "s",
        ),
    )


def _paging() -> tuple[Line, ...]:
    return (
        Line("blocks of 16 for 100 tokens", memory.kv_blocks(tokens=100, block_size=16), "block"),
        Line("blocks for 112 tokens", memory.kv_blocks(tokens=112, block_size=16), "block"),
        Line(
            "blocks for 113: a new one only when the last is full",
            memory.kv_blocks(tokens=113, block_size=16),
            "block",
        ),
        Line(
            "slot of token 99 when its seventh block is physical block 2",
            memory.kv_slot(block_table=(9, 4, 31, 7, 0, 12, 2), position=99, block_size=16),
            "slot",
        ),
    )


def _tail() -> tuple[Line, ...]:
    worst = max(memory.tail_waste_tokens(tokens=n, block_size=16) for n in range(1, 4097))
    return (
        Line(
            "100 tokens in blocks of 16",
            memory.tail_waste_tokens(tokens=100, block_size=16),
            "token",
        ),
        Line("the worst of 1 to 4,096 tokens", worst, "token"),
        Line("share at 1,000 tokens", memory.paged_waste_fraction(tokens=1000, block_size=16), "1"),
        Line(
            "share at 385 tokens, the worst case of 25 blocks",
            memory.paged_waste_fraction(tokens=385, block_size=16),
            "1",
        ),
    )


def _fragmentation() -> tuple[Line, ...]:
    return (
        Line(
            "internal: 16 sequences reserve 8,192 and use 1,024",
            memory.contiguous_unused_bytes(
                sequences=16,
                reserved_tokens=8192,
                used_tokens=1024,
                kv_bytes_per_token=_PER_TOKEN,
            ),
            "B",
        ),
        Line(
            "share, 4,096 reserved and 1,638 used",
            memory.contiguous_waste_fraction(reserved_tokens=4096, used_tokens=1638),
            "1",
        ),
        Line(
            "share, 4,096 reserved and 819 used",
            memory.contiguous_waste_fraction(reserved_tokens=4096, used_tokens=819),
            "1",
        ),
        Line(
            "external: 10 GiB in reservations of 4 GiB",
            memory.external_fragmentation_bytes(pool_bytes=10 << 30, reservation_bytes=4 << 30),
            "B",
        ),
    )


def _prefix() -> tuple[Line, ...]:
    saved = memory.shared_prefix_saved_tokens(users=64, prefix_tokens=1000, block_size=16)
    return (
        Line("64 users share 1,000 tokens, blocks of 16", saved, "token"),
        Line("on Llama-3-8B", saved * _PER_TOKEN, "B"),
    )


def _kv_usage() -> tuple[Line, ...]:
    total = memory.pool_blocks(pool_bytes=8 << 30, block_size=16, kv_bytes_per_token=_PER_TOKEN)
    return (
        Line("blocks of a pool of 8 GiB, Llama-3-8B", total, "block"),
        Line(
            "usage with 3,687 of them taken",
            memory.kv_usage_fraction(used_blocks=3687, total_blocks=total),
            "1",
        ),
    )


KV_CACHE: Final[tuple[Topic, ...]] = (
    topic(
        "kv-per-token",
        "KV cache of one token",
        (memory.kv_bytes_per_token, memory.kv_entry_bytes),
        _kv_per_token,
        aliases=("kv-bytes-per-token", "bytes-per-token", "kv-entry"),
        command="vram",
    ),
    topic(
        "kv-cache",
        "KV cache of a batch",
        (memory.kv_cache_bytes,),
        _kv_cache,
        aliases=("kv", "m-kv", "kv-memory", "kv-cache-budget"),
        command="vram --users --context",
    ),
    topic(
        "kv-cache-mha",
        "KV cache without grouped heads",
        (memory.mha_kv_cache_bytes,),
        _kv_cache_mha,
        aliases=("mha", "kv-flashcard"),
        command="vram",
    ),
    topic(
        "kv-latent",
        "KV cache of multi-head latent attention",
        (memory.mla_kv_bytes_per_token,),
        lambda: (
            Line(
                "DeepSeek-V3, 61 layers of 512 + 64",
                memory.mla_kv_bytes_per_token(layers=61, latent=512, rope_width=64, kv_dtype_bytes=2),
                "B",
            ),
        ),
        aliases=("mla", "latent-attention"),
        command="vram",
    ),
    topic(
        "sliding-window",
        "Entries a layer keeps",
        (memory.kept_tokens,),
        lambda: (
            Line(
                "8,192 tokens under a window of 1,024",
                memory.kept_tokens(context=8192, window=1024),
                "entry",
            ),
            Line(
                "8,192 tokens, one entry every 4",
                memory.kept_tokens(context=8192, stride=4),
                "entry",
            ),
        ),
        aliases=("window", "swa", "kept-tokens"),
        command="vram",
    ),
    topic(
        "recurrent-state",
        "State of a recurrent layer",
        (memory.recurrent_state_bytes,),
        lambda: (
            Line(
                "Nemotron-3-Nano Mamba-2 layer, 64 · 64 · 128 in fp32",
                memory.recurrent_state_bytes(elements=64 * 64 * 128, element_bits=32),
                "B",
            ),
        ),
        aliases=("mamba", "state", "ssm"),
        command="vram",
    ),
    topic(
        "max-tokens",
        "What unbounded output costs",
        (memory.kv_cache_bytes, latency.e2e_s),
        _max_tokens,
        aliases=("unbounded-output", "max-model-len"),
        command="vram --context",
    ),
    topic(
        "paged-attention",
        "Paging the KV cache: blocks and the block table",
        (memory.kv_blocks, memory.kv_slot),
        _paging,
        aliases=("paging", "block-table", "virtual-memory", "kv-blocks"),
        command="vram --block-size",
    ),
    topic(
        "tail-waste",
        "Waste of paging: the last block's tail",
        (memory.tail_waste_tokens, memory.paged_waste_fraction),
        _tail,
        aliases=("block-tail", "paged-waste", "max-waste"),
        command="vram --block-size",
    ),
    topic(
        "fragmentation",
        "Waste of contiguous allocation: internal and external",
        (
            memory.contiguous_unused_bytes,
            memory.contiguous_waste_fraction,
            memory.external_fragmentation_bytes,
        ),
        _fragmentation,
        aliases=("internal-fragmentation", "external-fragmentation", "memory-waste"),
        command="vram",
    ),
    topic(
        "prefix-sharing",
        "A prompt prefix kept once",
        (memory.shared_prefix_saved_tokens,),
        _prefix,
        aliases=("prefix-caching", "memory-sharing", "parallel-sampling", "shared-prefix"),
        command="vram --prefix-shared",
    ),
    topic(
        "kv-usage",
        "KV cache usage %",
        (memory.pool_blocks, memory.kv_usage_fraction),
        _kv_usage,
        aliases=("kv-cache-usage", "kv-pool", "num-gpu-blocks"),
        command="vram --gpu",
    ),
)
