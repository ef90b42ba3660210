"""Memory formulas: weights, KV cache, paging, overhead. Pure functions of numbers.

Every function is keyword-only; sizes are bytes, widths are elements. Each docstring holds the formula
(indented), what it holds for, its source and one worked number, which its test repeats;
`capplan explain` reads them from here.
"""

import math
from collections.abc import Sequence


def weight_bytes(*, parameters: float, bits: float) -> float:
    """Weights by the headline formula, in bytes.

        M_weights = P · B / 8

    Holds for: the raw parameters. Not for: scales, zero points, what stays unquantized.
    Source: serving lesson, "Estimating Model Weight VRAM".
    Example: 70e9 parameters at 4 bits: 35e9 B = 35.0 GB.
    """
    return parameters * bits / 8


def group_scales_bytes(*, groups: int, scale_bits: float, zero_bits: float = 0) -> float:
    """Scales and zero points of `groups` quantization groups, in bytes.

        groups · (scale_bits + zero_bits) / 8

    Holds for: AWQ, GPTQ, compressed-tensors, FP8 blocks. Not for: GGUF blocks (their scales are inside).
    Source: the checkpoint layouts of AutoAWQ and GPTQ (qweight, qzeros, scales).
    Example: a 4096 × 4096 AWQ matrix, g128: 131,072 groups · 20 bits = 327,680 B.
    """
    return groups * (scale_bits + zero_bits) / 8


def effective_bits(*, element_bits: float, group: int, scale_bits: float, zero_bits: float = 0) -> float:
    """Bits one quantized weight really takes.

        element_bits + (scale_bits + zero_bits) / group

    Holds for: full groups.
    Source: the checkpoint layouts of AutoAWQ and GPTQ (qweight, qzeros, scales).
    Example: AWQ int4 g128, fp16 scale, 4-bit zero: 4 + 20/128 = 4.15625.
    """
    return element_bits + (scale_bits + zero_bits) / group


def kv_bytes_per_token(
    *, layers: int, kv_heads: int, head_dim: int, kv_dtype_bytes: float, tp: int = 1
) -> float:
    """KV cache of one token on one GPU, in bytes.

        2 · layers · ceil(kv_heads / tp) · head_dim · kv_dtype_bytes        (2 = K and V)

    Heads are replicated, not split, once tp > kv_heads, hence the ceil.

    Holds for: MHA, GQA, MQA. Not for: MLA, sliding window, shared layers (see blocks/).
    Source: serving lesson, "Exact KV Cache Memory Formula", per token and rank.
    Example: Llama-3.1-8B, 32 layers, 8 KV heads of 128, bf16: 131,072 B = 128 KiB.
    """
    return 2 * layers * -(-kv_heads // tp) * head_dim * kv_dtype_bytes


def kv_entry_bytes(
    *, heads: int, k_width: int, v_width: int, element_bits: float, extra_bytes: int = 0
) -> float:
    """One entry of one layer's cache, in bytes, whatever the attention kind.

        heads · (k_width + v_width) · element_bits / 8 + extra_bytes

    Holds for: every per-token cache; MLA is one head of latent + rope width, an indexer has no V.
    Source: the layer of kv_bytes_per_token, with K and V apart.
    Example: DeepSeek-V3, one head of 512 + 64 at 16 bits: 1,152 B a layer.
    """
    return heads * (k_width + v_width) * element_bits / 8 + extra_bytes


def kv_cache_bytes(
    *, layers: int, batch: int, context: int, kv_heads: int, head_dim: int, kv_dtype_bytes: float
) -> float:
    """KV cache of a batch at full context, in bytes.

        M_KV = 2 · L · B · S · H_KV · D · b

    Holds for: MHA, GQA, MQA without windows. Source: serving lesson, "Exact KV Cache Memory Formula".
    Example: Llama-3-8B (32, 8, 128, bf16), 64 users at 8192: 68,719,476,736 B = 64 GiB.
    """
    per_token = kv_bytes_per_token(
        layers=layers, kv_heads=kv_heads, head_dim=head_dim, kv_dtype_bytes=kv_dtype_bytes
    )
    return per_token * batch * context


def mha_kv_cache_bytes(*, layers: int, batch: int, context: int, hidden: int, kv_dtype_bytes: float) -> float:
    """KV cache of a model without grouped heads, in bytes.

        2 · B · S · L · d_model · p

    Holds for: MHA, the case H_KV · D = d_model of kv_cache_bytes.
    Source: flashcard lesson, "Formula for KV cache size in bytes".
    Example: Llama-2-13B (40 layers, 5120), one user at 4096, fp16: 3,355,443,200 B.
    """
    return 2 * batch * context * layers * hidden * kv_dtype_bytes


def mla_kv_bytes_per_token(*, layers: int, latent: int, rope_width: int, kv_dtype_bytes: float) -> float:
    """KV cache of one token under multi-head latent attention, in bytes, the same on every TP rank.

        layers · (latent + rope_width) · kv_dtype_bytes

    Holds for: DeepSeek-V2, V3, Kimi K2. Not for: the sparse indexers of V3.2 (their keys come on top).
    Source: DeepSeek-V2 paper, arXiv 2405.04434, table 1.
    Example: DeepSeek-V3, 61 layers, 512 + 64, bf16: 70,272 B.
    """
    return layers * (latent + rope_width) * kv_dtype_bytes


def kept_tokens(*, context: int, window: int | None = None, stride: int = 1) -> int:
    """Cache entries a layer holds for a sequence of `context` tokens.

        min(context, window) / stride, rounded down     (window and stride optional)

    Holds for: full (no window), sliding and chunked layers (window), compressed ones (stride).
    An engine may hold more (vLLM: window + tokens scheduled per step).
    Source: the models' own config keys (sliding_window, attention_chunk_size).
    Example: 8192 tokens under a window of 1024: 1024 entries.
    """
    return (context if window is None else min(context, window)) // stride


def recurrent_state_bytes(*, elements: int, element_bits: int) -> int:
    """State of one sequence in one recurrent layer, in bytes, whatever its length.

        elements · element_bits / 8

    Holds for: Mamba, linear attention, RWKV. Not for: the attention layers of a hybrid.
    Source: the state shapes of vLLM's Mamba layers.
    Example: Nemotron-3-Nano Mamba-2, 64 heads · 64 · 128 in fp32: 2,097,152 B.
    """
    return elements * element_bits // 8


def kv_blocks(*, tokens: int, block_size: int) -> int:
    """Blocks a sequence holds in a paged cache.

        ceil(tokens / block_size)

    Holds for: one block size. Not for: hybrids whose groups are padded to one page size.
    Source: PagedAttention paper, arXiv 2309.06180; serving lesson, "On-Demand Allocation".
    Example: 100 tokens in blocks of 16: 7 blocks.
    """
    return -(-tokens // block_size)


def kv_slot(*, block_table: Sequence[int], position: int, block_size: int) -> int:
    """Physical slot of a token: the page table look-up that PagedAttention borrows.

        block_table[position // block_size] · block_size + position mod block_size

    Holds for: paged caches. Source: flashcard lesson, "What OS concept does PagedAttention borrow?".
    Example: position 99, blocks of 16, its seventh block is physical block 2: slot 35.
    """
    return block_table[position // block_size] * block_size + position % block_size


def pool_blocks(*, pool_bytes: float, block_size: int, kv_bytes_per_token: float) -> int:
    """Blocks a KV pool has.

        floor(pool / (block_size · bytes per token))

    Holds for: one kind of attention layer. Source: vLLM's num_gpu_blocks.
    Example: 8 GiB in blocks of 16 tokens of 131,072 B: 4,096 blocks.
    """
    return math.floor(pool_bytes / (block_size * kv_bytes_per_token))


def kv_usage_fraction(*, used_blocks: int, total_blocks: int) -> float:
    """Share of the KV pool's blocks in use: the gauge on a serving dashboard.

        used blocks / all blocks

    Holds for: paged caches; past 0.9 preemption or refusal is near.
    Source: serving lesson, "KV Cache Usage %".
    Example: 3,687 of 4,096 blocks: 0.9001.
    """
    return used_blocks / total_blocks


def tail_waste_tokens(*, tokens: int, block_size: int) -> int:
    """Reserved but empty slots in a sequence's last block; at most block_size − 1.

        ceil(tokens / block_size) · block_size − tokens

    Holds for: paged caches. Source: flashcard lesson, "Max per-request waste under PagedAttention".
    Example: 100 tokens in blocks of 16: 12 slots.
    """
    return kv_blocks(tokens=tokens, block_size=block_size) * block_size - tokens


def paged_waste_fraction(*, tokens: int, block_size: int) -> float:
    """Share of a sequence's reserved slots that hold nothing under paging.

        tail waste / (blocks · block_size)

    Holds for: one sequence; below 4 % for certain from 25 blocks on, whatever their size.
    Source: serving lesson, "Near-Zero Fragmentation".
    Example: 1000 tokens in blocks of 16: 8 / 1008 = 0.79 %.
    """
    reserved = kv_blocks(tokens=tokens, block_size=block_size) * block_size
    return tail_waste_tokens(tokens=tokens, block_size=block_size) / reserved if reserved else 0.0


def contiguous_unused_bytes(
    *, sequences: int, reserved_tokens: int, used_tokens: int, kv_bytes_per_token: float
) -> float:
    """Reserved and never used when each sequence pre-allocates its maximum length, in bytes.

        sequences · (reserved − used) · bytes per token         (internal fragmentation)

    Holds for: contiguous allocation. Source: flashcard lesson, "Two types of memory waste".
    Example: 16 sequences reserve 8192 and use 1024 of 131,072 B: 15,032,385,536 B = 14 GiB.
    """
    return sequences * (reserved_tokens - used_tokens) * kv_bytes_per_token


def contiguous_waste_fraction(*, reserved_tokens: int, used_tokens: int) -> float:
    """Share of a contiguous reservation that is never used.

        1 − used / reserved

    Holds for: layers that grow with the context. Source: serving lesson, "60% to 80% … is wasted".
    Example: 1,024 tokens used of 4,096 reserved: 0.75.
    """
    return 1 - used_tokens / reserved_tokens


def external_fragmentation_bytes(*, pool_bytes: float, reservation_bytes: float) -> float:
    """Free memory too small for one more contiguous reservation, in bytes.

        pool mod reservation

    Holds for: equal reservations; the least there is, gaps between live ones add to it.
    Source: flashcard lesson, "Two types of memory waste".
    Example: a pool of 10 GiB in reservations of 4 GiB: 2 GiB left over.
    """
    return math.fmod(pool_bytes, reservation_bytes) if reservation_bytes > 0 else pool_bytes


def shared_prefix_saved_tokens(*, users: int, prefix_tokens: int, block_size: int) -> int:
    """Tokens not stored twice when `users` sequences share a prompt prefix.

        (users − 1) · floor(prefix / block_size) · block_size         (only full blocks are shared)

    Holds for: prefix caching and parallel sampling, every user alive at once.
    Source: serving lesson, "Memory Sharing".
    Example: 64 users, 1000 shared tokens, blocks of 16: 63 · 992 = 62,496 tokens.
    """
    return max(0, users - 1) * (prefix_tokens // block_size) * block_size


def overhead_bytes(*, weight_bytes: float, fraction: float) -> float:
    """Run-time overhead by the rule of thumb, in bytes.

        fraction · raw weights           (0.15 to 0.20)

    Holds for: CUDA context, driver and PyTorch allocations, activation workspace; a rule of thumb,
    measured engines differ by a factor of four for one model.
    Source: serving lesson, "Runtime Overhead Rule".
    Example: 14 GB of weights at 20 %: 2.8 GB.
    """
    return weight_bytes * fraction


def total_bytes(*, weights: float, kv_cache: float, overhead: float) -> float:
    """Memory demand, in bytes.

        weights + KV cache + overhead

    Holds for: one GPU, or each rank. Source: serving lesson, studio "Total VRAM Demand".
    Example: 4.0e9 + 8,589,934,592 + 1.5e9 = 14,089,934,592 B.
    """
    return weights + kv_cache + overhead


def headroom_bytes(*, usable: float, total: float) -> float:
    """What is left of the GPU's memory, in bytes; negative when the demand does not fit.

        usable − demand

    Holds for: the memory a process can ask for. Source: serving lesson, studio "VRAM Headroom".
    Example: 24e9 − 14,089,934,592 = 9,910,065,408 B.
    """
    return usable - total


def training_bytes(*, parameters: float, bytes_per_parameter: float = 16) -> float:
    """Memory of training with Adam in mixed precision, in bytes: what inference does not need.

        P · 16      (2 weights + 2 gradients + 4 master weights + 8 Adam moments)

    Holds for: Adam with fp32 moments; activations come on top. Not for: LoRA, 8-bit optimizers.
    Source: serving lesson, "How Does It Differ from Training?" (Adam states 8–16 bytes a parameter).
    Example: 7e9 parameters: 112 GB against 14 GB of fp16 weights.
    """
    return parameters * bytes_per_parameter


def stage_layers(*, layers: int, stages: int) -> int:
    """Layers of the largest pipeline stage.

        ceil(layers / stages)

    Holds for: pipeline parallelism; embedding and lm_head come on top of the first and last stage.
    Source: serving lesson, "Pipeline Parallelism (PP)".
    Example: 61 layers over 4 stages: 16.
    """
    return -(-layers // stages)
