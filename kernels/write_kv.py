"""Store one token a sequence in a paged cache, in Triton: no host read, so it can be captured.

The checked form, and the reference, is `paged_attention.write_token`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capplan.kernels.device_code import jit, needs_triton, power_of_two, tl
from capplan.kernels.paged_attention import E4M3_MAX

if TYPE_CHECKING:
    from torch import Tensor


@jit
def write_kv_kernel(  # type: ignore[no-untyped-def]
    key,
    value,
    key_cache,
    value_cache,
    block_table,
    positions,
    key_scale,
    value_scale,
    key_stride_b,
    key_stride_h,
    value_stride_b,
    value_stride_h,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    table_stride,
    head_dim,
    top,
    block_size: tl.constexpr,
    columns: tl.constexpr,
    fp8: tl.constexpr,
):
    """Grid [batch, kv_heads]; tensors as in `write_kv`, columns is head_dim rounded up to a power of two."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    column = tl.arange(0, columns)
    mask = column < head_dim
    position = tl.load(positions + sequence)
    block = tl.load(block_table + sequence * table_stride + position // block_size).to(tl.int64)
    slot = position % block_size
    k = tl.load(key + sequence * key_stride_b + head * key_stride_h + column, mask=mask, other=0.0)
    v = tl.load(value + sequence * value_stride_b + head * value_stride_h + column, mask=mask, other=0.0)
    if fp8:
        k = tl.clamp(k.to(tl.float32) / key_scale, -top, top)
        v = tl.clamp(v.to(tl.float32) / value_scale, -top, top)
    key_at = block * key_stride_block + slot * key_stride_slot + head * key_stride_head
    value_at = block * value_stride_block + slot * value_stride_slot + head * value_stride_head
    tl.store(key_cache + key_at + column, k.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + value_at + column, v.to(value_cache.dtype.element_ty), mask=mask)


def write_kv(
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
    """Tensors, formula and FP8 scales as in write_token; shapes checked, positions and block ids not.

    FP8 caches take Triton's conversion, which sm_89 and later have; other GPUs take torch's.
    """
    import torch

    if tuple(key.shape) != (positions.shape[0], *key_cache.shape[2:]) or value.shape != key.shape:
        raise ValueError(
            f"key, value: expected {[positions.shape[0], *key_cache.shape[2:]]}, "
            f"got {list(key.shape)}, {list(value.shape)}"
        )
    fp8 = key_cache.dtype == torch.float8_e4m3fn
    if key_cache.is_cuda and (not fp8 or torch.cuda.get_device_capability(key_cache.device) >= (8, 9)):
        launch_write_kv(
            key, value, key_cache, value_cache, block_table, positions, k_scale=k_scale, v_scale=v_scale
        )
        return
    block_size = key_cache.shape[1]
    columns = (positions // block_size).long()
    blocks = block_table[torch.arange(len(positions), device=positions.device), columns].long()
    slots = (positions % block_size).long()
    for token, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        stored = (token.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX) if fp8 else token
        cache[blocks, slots] = stored.to(cache.dtype)


def launch_write_kv(
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
    """The Triton route, also for CPU tensors under the interpreter; arguments as write_kv."""
    import torch

    needs_triton("write_kv")
    if any(tensor.stride(-1) != 1 for tensor in (key, value, key_cache, value_cache)):
        raise ValueError("key, value, key_cache, value_cache: head_dim must be contiguous")
    batch, kv_heads, head_dim = key.shape
    write_kv_kernel[(batch, kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        positions,
        k_scale,
        v_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        head_dim,
        E4M3_MAX,
        block_size=key_cache.shape[1],
        columns=power_of_two(head_dim),
        fp8=key_cache.dtype == torch.float8_e4m3fn,
        num_warps=1,
    )
