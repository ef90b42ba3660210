"""Rotary position embedding in Triton: query and key heads of every token in one launch, in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capplan.kernels.device_code import jit, needs_triton, power_of_two, tl

if TYPE_CHECKING:
    from torch import Tensor


def rope_table(*, positions: int, rotary_dim: int, theta: float, like: Tensor) -> Tensor:
    """cos and sin of position · theta^(-2i / rotary_dim): fp32 [positions, rotary_dim] on `like`'s device.

    Columns 0 to rotary_dim/2 - 1 are the cosines, the others the sines, for i from 0.
    Source: arXiv 2104.09864.
    """
    import torch

    half = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * theta**-half
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(like.device, torch.float32)


@jit
def rope_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    positions,
    table,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    heads,
    half,
    block: tl.constexpr,
):
    """Grid [tokens, heads + kv_heads]; query and key as in `rope`, half = rotary_dim / 2."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, block)
    mask = at < half
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(table + position * 2 * half + at, mask=mask, other=0.0)
    sin = tl.load(table + position * 2 * half + half + at, mask=mask, other=0.0)
    if head < heads:
        first = query + token.to(tl.int64) * query_stride_t + head * query_stride_h
    else:
        first = key + token.to(tl.int64) * key_stride_t + (head - heads) * key_stride_h
    low = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(first + half + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(first + at, (low * cos - high * sin).to(query.dtype.element_ty), mask=mask)
    tl.store(first + half + at, (high * cos + low * sin).to(query.dtype.element_ty), mask=mask)


def rope(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    """Rotate the first rotary_dim of every head by its position, in place; halves pair, as in Llama.

        x[i] ← x[i] · cos - x[i + r/2] · sin,   x[i + r/2] ← x[i + r/2] · cos + x[i] · sin,   i < r/2

    | tensor    | dtype                   | shape                                          |
    |-----------|-------------------------|------------------------------------------------|
    | query     | fp16/bf16 (fp32 on CPU) | [tokens, heads, head_dim], the last stride 1   |
    | key       | as query                | [tokens, kv_heads, head_dim], the last stride 1 |
    | positions | int32                   | [tokens], each below the table's rows          |
    | table     | fp32                    | [positions, rotary_dim], from rope_table       |

    Raises ValueError, naming the tensor, for a wrong shape or dtype; positions are not checked.
    """
    import torch

    for name, tensor in (("query", query), ("key", key)):
        if tensor.ndim != 3 or tensor.shape[0] != positions.shape[0] or tensor.shape[2] < table.shape[1]:
            raise ValueError(
                f"{name}: expected [{positions.shape[0]}, heads, {table.shape[1]} or more], "
                f"got {list(tensor.shape)}"
            )
        if tensor.stride(2) != 1:
            raise ValueError(f"{name}: head_dim must be contiguous")
    if key.dtype != query.dtype:
        raise ValueError(f"key: expected {query.dtype}, got {key.dtype}")
    if positions.ndim != 1 or positions.dtype != torch.int32:
        raise ValueError(f"positions: expected int32 [tokens], got {positions.dtype} {list(positions.shape)}")
    if table.ndim != 2 or table.shape[1] % 2 or table.dtype != torch.float32:
        raise ValueError(f"table: expected fp32 [positions, even], got {table.dtype} {list(table.shape)}")
    if query.device.type != "cpu":
        launch_rope(query, key, positions, table)
        return
    for tensor in (query, key):
        tensor[..., : table.shape[1]] = rope_reference(tensor.float(), positions, table).to(tensor.dtype)[
            ..., : table.shape[1]
        ]


def launch_rope(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> None:
    """The Triton route, also for CPU tensors under the interpreter; arguments as rope."""
    needs_triton("rope")
    half = table.shape[1] // 2
    rope_kernel[(query.shape[0], query.shape[1] + key.shape[1])](
        query,
        key,
        positions,
        table,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        query.shape[1],
        half,
        block=power_of_two(half),
        num_warps=1,
    )


def rope_reference(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The formula of rope for one of query and key, in x's dtype (fp32 or fp64), as a new tensor."""
    import torch

    half = table.shape[1] // 2
    cos, sin = (part[:, None].to(x.dtype) for part in table[positions.long()].chunk(2, -1))
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]), dim=-1)
