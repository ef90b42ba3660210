"""Paged-attention decode: one new query token a sequence, its keys and values in cache blocks.

The reference in plain torch. It walks the block table with an online softmax, block by block, as
a kernel does, so that it reads the same slots and sums in the same order; it is written to be
compared with, not to be fast. Torch is imported inside the functions: importing this module
needs no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E4M3_MAX: Final = 448.0  # the largest finite fp8 e4m3fn


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention of one query token a sequence over its own cached tokens.

        out[b, h] = Σ_t softmax_t(softmax_scale · k_scale · query[b, h] · K[t]) · v_scale · V[t]
        t from max(0, context_lens[b] - window) to context_lens[b] - 1
        token t is in block block_table[b, t // block_size], slot t % block_size
        query head h reads KV head h // (heads / kv_heads)

    | tensor       | dtype          | shape                                          |
    |--------------|----------------|------------------------------------------------|
    | query        | fp16/bf16/fp32 | [batch, heads, head_dim]                       |
    | key_cache    | as query, or fp8 e4m3 | [num_blocks, block_size, kv_heads, head_dim] |
    | value_cache  | as key_cache   | as key_cache                                   |
    | block_table  | int32          | [batch, max_blocks]                            |
    | context_lens | int32          | [batch], each ≥ 1, the query's own token counted |
    | returns      | as query       | [batch, heads, head_dim]                       |

    softmax_scale is 1/√head_dim unless given; window counts tokens, the query's own included
    (Mistral's and Gemma's `sliding_window`). Scores, softmax and sums are fp32. Only the slots
    of t above are read: entries of block_table outside them may hold anything (padding, a freed
    block), and so may the cache. Sequences may share physical blocks. Needs all on one device.

    Raises ValueError, naming the tensor, for a wrong shape, dtype, device, length or block id.
    Source: PagedAttention, arXiv 2309.06180; online softmax, arXiv 1805.02867.
    """
    import torch

    check_paged_attention(
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        softmax_scale=softmax_scale,
        window=window,
    )
    batch, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    scale = (head_dim**-0.5 if softmax_scale is None else softmax_scale) * k_scale
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads, head_dim)
    blocks, lengths = block_table.tolist(), context_lens.tolist()
    output = torch.empty_like(query)

    for sequence, length in enumerate(lengths):
        first = first_visible(length, window)
        accumulator = torch.zeros_like(grouped[sequence])  # [kv_heads, group, head_dim]
        denominator = accumulator.new_zeros((*accumulator.shape[:2], 1))
        running_max = torch.full_like(denominator, -math.inf)
        for column in range(first // block_size, -(-length // block_size)):
            start = column * block_size
            # Sliced, not masked: a stale NaN beyond the context times a zero weight is a NaN.
            slots = slice(max(first - start, 0), min(length - start, block_size))
            keys = key_cache[blocks[sequence][column], slots].float()
            values = value_cache[blocks[sequence][column], slots].float()
            scores = torch.einsum("kgd,tkd->kgt", grouped[sequence], keys) * scale
            block_max = torch.maximum(running_max, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - block_max)
            rescale = torch.exp(running_max - block_max)
            denominator = denominator * rescale + weights.sum(-1, keepdim=True)
            accumulator = accumulator * rescale + torch.einsum("kgt,tkd->kgd", weights, values)
            running_max = block_max
        output[sequence] = (accumulator / denominator * v_scale).reshape(heads, head_dim)
    return output


def write_token(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store one token a sequence in the cache, in place, where its block table says.

        key_cache[block_table[b, p // block_size], p % block_size] = key[b],   p = positions[b]
        an fp8 cache stores clamp(key[b] / k_scale, -448, 448), rounded to e4m3

    | tensor      | dtype          | shape                                             |
    |-------------|----------------|---------------------------------------------------|
    | key, value  | as the caches, fp16/bf16/fp32 for fp8 | [batch, kv_heads, head_dim] |
    | key_cache   | fp16/bf16/fp32/fp8 e4m3 | [num_blocks, block_size, kv_heads, head_dim]      |
    | value_cache | as key_cache   | as key_cache                                      |
    | block_table | int32          | [batch, max_blocks]                               |
    | positions   | int32          | [batch], from 0: the context length before the token |

    Nothing is written unless everything is valid. Whoever appends to a block that another
    sequence still reads copies it first; that two sequences write one slot is an error.

    Raises ValueError, naming the tensor, for a wrong shape, dtype, device, position or block id.
    """
    import torch

    _check_cache(key_cache, value_cache)
    _check_index("block_table", block_table, dims=2, device=key_cache)
    _check_index("positions", positions, dims=1, device=key_cache)
    batch = positions.shape[0]
    _check_batch("block_table", block_table, batch)
    num_blocks, block_size, kv_heads, head_dim = key_cache.shape
    for name, tensor in (("key", key), ("value", value)):
        _check_like(name, tensor, key_cache, (batch, kv_heads, head_dim))

    capacity = block_table.shape[1] * block_size
    for sequence, position in enumerate(positions.tolist()):
        if not 0 <= position < capacity:
            raise ValueError(
                f"positions[{sequence}] is {position}; block_table has room for positions 0 to {capacity - 1}"
            )
        _check_blocks(block_table, sequence, position // block_size, 1, num_blocks)
    columns = (positions // block_size).long()
    blocks = block_table[torch.arange(batch, device=block_table.device), columns].long()
    slots = (positions % block_size).long()
    if torch.unique(blocks * block_size + slots).numel() != batch:
        raise ValueError("block_table: two sequences would write the same slot of a shared block")
    for token, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = token
        if cache.dtype == torch.float8_e4m3fn:
            stored = (token.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype)
        cache[blocks, slots] = stored


def check_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> None:
    """Raise ValueError unless these are the arguments `paged_attention_reference` describes.

    Reads block_table and context_lens on the host, so on a GPU it waits for the device.
    """
    check_shapes(query, key_cache, value_cache, block_table, context_lens)
    num_blocks, block_size = key_cache.shape[:2]
    if softmax_scale is not None and not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise ValueError(f"softmax_scale: expected a finite number above 0, got {softmax_scale}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 token, got {window}")

    capacity = block_table.shape[1] * block_size
    for sequence, length in enumerate(context_lens.tolist()):
        if not 1 <= length <= capacity:
            raise ValueError(
                f"context_lens[{sequence}] is {length}; block_table has room for 1 to {capacity}"
            )
        column = first_visible(length, window) // block_size
        _check_blocks(block_table, sequence, column, -(-length // block_size) - column, num_blocks)


def check_shapes(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor
) -> None:
    """The part of `check_paged_attention` that needs no value from the device."""
    _check_cache(key_cache, value_cache)
    kv_heads, head_dim = key_cache.shape[2:]
    if query.ndim != 3:
        raise ValueError(f"query: expected [batch, heads, head_dim], got {_shape(query)}")
    batch, heads = query.shape[:2]
    _check_like("query", query, key_cache, (batch, heads, head_dim))
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"query: {heads} heads are not a multiple of {kv_heads} KV heads")
    _check_index("block_table", block_table, dims=2, device=key_cache)
    _check_batch("block_table", block_table, batch)
    _check_index("context_lens", context_lens, dims=1, device=key_cache)
    _check_batch("context_lens", context_lens, batch)


def first_visible(length: int, window: int | None) -> int:
    """Position of the oldest token that the query at position length - 1 attends to."""
    return 0 if window is None else max(0, length - window)


def _wide_floats() -> tuple[torch.dtype, ...]:
    import torch

    return (torch.float16, torch.bfloat16, torch.float32)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_cache(key_cache: Tensor, value_cache: Tensor) -> None:
    import torch

    if key_cache.ndim != 4 or 0 in key_cache.shape:
        raise ValueError(
            "key_cache: expected [num_blocks, block_size, kv_heads, head_dim], none of them 0, "
            f"got {_shape(key_cache)}"
        )
    if key_cache.dtype not in (*_wide_floats(), torch.float8_e4m3fn):
        raise ValueError(f"key_cache: expected fp16, bf16 or fp32, or fp8 e4m3, got {key_cache.dtype}")
    _check_like("value_cache", value_cache, key_cache, tuple(key_cache.shape))


def _check_like(name: str, tensor: Tensor, cache: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {_shape(tensor)}")
    import torch

    if cache.dtype == torch.float8_e4m3fn and name != "value_cache":
        if tensor.dtype not in _wide_floats():
            raise ValueError(f"{name}: expected fp16, bf16 or fp32 beside an fp8 cache, got {tensor.dtype}")
    elif tensor.dtype != cache.dtype:
        raise ValueError(f"{name}: expected the dtype of key_cache, {cache.dtype}, got {tensor.dtype}")
    _check_device(name, tensor, cache)


def _check_index(name: str, tensor: Tensor, *, dims: int, device: Tensor) -> None:
    import torch

    if tensor.ndim != dims:
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {_shape(tensor)}")
    if tensor.dtype != torch.int32:
        raise ValueError(f"{name}: expected int32, got {tensor.dtype}")
    _check_device(name, tensor, device)


def _check_device(name: str, tensor: Tensor, cache: Tensor) -> None:
    if tensor.device != cache.device:
        raise ValueError(f"{name}: on {tensor.device}, but key_cache is on {cache.device}")


def _check_batch(name: str, tensor: Tensor, batch: int) -> None:
    if tensor.shape[0] != batch:
        raise ValueError(f"{name}: expected {batch} sequences, got shape {_shape(tensor)}")


def _check_blocks(block_table: Tensor, sequence: int, column: int, count: int, num_blocks: int) -> None:
    for offset, block in enumerate(block_table[sequence, column : column + count].tolist()):
        if not 0 <= block < num_blocks:
            raise ValueError(
                f"block_table[{sequence}, {column + offset}] is {block}; "
                f"key_cache has blocks 0 to {num_blocks - 1}"
            )
