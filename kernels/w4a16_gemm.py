"""W4A16 product in Triton: 16-bit activations times 4-bit weights with a scale a group of inputs.

The group's scale multiplies its partial sum, after the product; nibbles turn into floats by one OR. A row
alone takes the GEMV path, without tensor cores. On CPU tensors torch's own int4 kernel is used.
Weights are prepared once, from the storage of `quantized_gemm.Int4Weight`; checkpoints in AWQ or GPTQ
packing go through `int4_packing`. The reference is `quantized_gemm.quantized_gemm_reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, nibbles_to, tl, widen
from capplan.kernels.quantized_gemm import SYMMETRIC_OFFSET, Int4Weight, dequantize_int4, unpack_int4
from capplan.kernels.split_k import GemmTile, SplitKWorkspace, finish_split_k, spread

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZES: Final = (32, 64, 128)
GEMV_BLOCK_N: Final = 64
CPU_ROWS: Final = 16  # torch's CPU kernel takes outputs in multiples of this


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInt4:
    """An Int4Weight of n outputs and k inputs, laid out for one kind of device.

    | tensor | on     | dtype     | shape                                                |
    |--------|--------|-----------|------------------------------------------------------|
    | packed | a GPU  | uint8     | [k / 2, n]                                           |
    | scales | a GPU  | fp16/bf16 | [k / group_size, n]                                  |
    | zeros  | a GPU  | uint8     | [k / group_size, n]; None: 8 throughout              |
    | packed | a CPU  | uint8     | [n rounded up to 16, k / 2], in torch's own order    |
    | scales | a CPU  | as x      | [k / group_size, n rounded up to 16, 2]: s, (8 - zero) · s |
    | zeros  | a CPU  | –         | None                                                 |

    On a GPU, byte row i of a group holds its input i in the low half, i + group_size / 2 in the high half.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    out_features: int
    in_features: int
    group_size: int


def prepare_int4(weight: Int4Weight, like: Tensor) -> PreparedInt4:
    """Lay `weight` out for products with activations like `like` (its device and dtype).

    Raises ValueError for a group size other than 32, 64 or 128.
    """
    if weight.group_size not in GROUP_SIZES:
        raise ValueError(f"weight: expected groups of 32, 64 or 128 inputs, got {weight.group_size}")
    prepare = _prepare_cpu if like.device.type == "cpu" else prepare_int4_gpu
    return prepare(weight, like)


def prepare_int4_gpu(weight: Int4Weight, like: Tensor) -> PreparedInt4:
    """The GPU's layout, on `like`'s device."""
    import torch

    n, k, group = weight.out_features, weight.in_features, weight.group_size
    nibbles = unpack_int4(weight.packed).to(torch.uint8).T.reshape(k // group, group, n)
    half = group // 2
    return PreparedInt4(
        packed=(nibbles[:, :half] | (nibbles[:, half:] << 4)).reshape(k // 2, n).to(like.device).contiguous(),
        scales=weight.scales.T.contiguous().to(like.device, like.dtype),
        zeros=None if weight.zeros is None else weight.zeros.T.contiguous().to(like.device),
        out_features=n,
        in_features=k,
        group_size=group,
    )


def _prepare_cpu(weight: Int4Weight, like: Tensor) -> PreparedInt4:
    import torch

    n, padding = weight.out_features, -weight.out_features % CPU_ROWS
    nibbles = torch.nn.functional.pad(unpack_int4(weight.packed), (0, 0, 0, padding))
    scales = weight.scales.float().T
    zeros = torch.full_like(scales, SYMMETRIC_OFFSET) if weight.zeros is None else weight.zeros.T.float()
    both = torch.stack((scales, (SYMMETRIC_OFFSET - zeros) * scales), dim=-1)
    return PreparedInt4(
        packed=torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1),
        scales=torch.nn.functional.pad(both, (0, 0, 0, padding)).to(like.dtype).contiguous(),
        zeros=None,
        out_features=n,
        in_features=weight.in_features,
        group_size=weight.group_size,
    )


def choose_int4_tile(*, m: int, group: int) -> GemmTile:
    """A tile without register spills, found by compiling alone; block_k is the group.

    Unswapped 64 × 128 tiles spill on sm_80 and sm_89, so the weights are always the left operand; 64 × 64
    on 4 warps spill on sm_89.
    """
    if m <= 32:
        return GemmTile(
            block_m=16 if m <= 16 else 32, block_n=64, block_k=group, warps=4, stages=4, swapped=True
        )
    return GemmTile(block_m=64, block_n=128, block_k=group, warps=8, stages=3, swapped=True)


@jit
def w4a16_kernel(  # type: ignore[no-untyped-def]
    x,
    packed,
    scales,
    zeros,
    out,
    partial,
    arrived,
    m,
    n,
    k,
    splits,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    group: tl.constexpr,
    symmetric: tl.constexpr,
    swapped: tl.constexpr,
    single: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [ceil(n / block_n), ceil(m / block_m), splits].

    | argument              | dtype     | shape                                  |
    |-----------------------|-----------|----------------------------------------|
    | x                     | fp16/bf16 | [m, k], contiguous                     |
    | packed, scales, zeros | as in PreparedInt4, for a GPU; zeros unused if symmetric |
    | out                   | as x      | [m, n], contiguous                     |
    | partial, arrived      | as in SplitKWorkspace                              |
    """
    half: tl.constexpr = group // 2
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    inner = tl.arange(0, half)
    row_mask = (row < m)[:, None]
    column_mask = column < n
    groups = k // group
    per_split = tl.cdiv(groups, splits)
    low = split * per_split
    high = tl.minimum(low + per_split, groups)
    if swapped:
        accumulator = tl.zeros([block_n, block_m], tl.float32)
    else:
        accumulator = tl.zeros([block_m, block_n], tl.float32)
    for g in tl.range(low, high, num_stages=stages):
        byte_at = (g * half + inner)[:, None].to(tl.int64) * n + column[None, :]
        w = tl.load(packed + byte_at, mask=column_mask[None, :], other=0)
        s = tl.load(scales + g * n + column, mask=column_mask, other=0.0).to(tl.float32)
        x_at = row[:, None].to(tl.int64) * k + (g * group + inner)[None, :]
        x_low = tl.load(x + x_at, mask=row_mask, other=0.0)
        x_high = tl.load(x + x_at + half, mask=row_mask, other=0.0)
        if symmetric:
            z = nibbles_to(tl.full([block_n], 8, tl.uint8), x.dtype.element_ty)
        else:
            z = nibbles_to(tl.load(zeros + g * n + column, mask=column_mask, other=0), x.dtype.element_ty)
        w_low = nibbles_to(w & 0xF, x.dtype.element_ty) - z[None, :]
        w_high = nibbles_to(w >> 4, x.dtype.element_ty) - z[None, :]
        if swapped:
            part = tl.dot(tl.trans(w_low), tl.trans(widen(x_low)))
            part = tl.dot(tl.trans(w_high), tl.trans(widen(x_high)), part)
            accumulator += part * s[:, None]
        else:
            part = tl.dot(widen(x_low), w_low)
            part = tl.dot(widen(x_high), w_high, part)
            accumulator += part * s[None, :]
    if swapped:
        accumulator = tl.trans(accumulator)
    finish_split_k(
        out,
        accumulator,
        tl.full([block_m], 1.0, tl.float32),
        tl.full([block_n], 1.0, tl.float32),
        partial,
        arrived,
        row,
        column,
        m,
        n,
        tl.program_id(1) * tl.num_programs(0) + tl.program_id(0),
        split,
        splits,
        single,
    )


@jit
def w4a16_gemv_kernel(  # type: ignore[no-untyped-def]
    x,
    packed,
    scales,
    zeros,
    out,
    partial,
    arrived,
    m,
    n,
    k,
    splits,
    block_n: tl.constexpr,
    group: tl.constexpr,
    symmetric: tl.constexpr,
    single: tl.constexpr,
    stages: tl.constexpr,
):
    """m = 1, grid [ceil(n / block_n), splits]; tensors as in w4a16_kernel. Products and sums in fp32."""
    half: tl.constexpr = group // 2
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(1)
    inner = tl.arange(0, half)
    column_mask = column < n
    groups = k // group
    per_split = tl.cdiv(groups, splits)
    low = split * per_split
    high = tl.minimum(low + per_split, groups)
    # Summed over the group's rows once, at the end: a reduction crosses threads.
    sums = tl.zeros([half, block_n], tl.float32)
    for g in tl.range(low, high, num_stages=stages):
        byte_at = (g * half + inner)[:, None].to(tl.int64) * n + column[None, :]
        w = tl.load(packed + byte_at, mask=column_mask[None, :], other=0)
        s = tl.load(scales + g * n + column, mask=column_mask, other=0.0).to(tl.float32)
        x_low = tl.load(x + g * group + inner).to(tl.float32)
        x_high = tl.load(x + g * group + half + inner).to(tl.float32)
        z = tl.full([block_n], 8.0, tl.float32)
        if not symmetric:
            z = tl.load(zeros + g * n + column, mask=column_mask, other=0).to(tl.float32)
        w_low = (w & 0xF).to(tl.float32) - z[None, :]
        w_high = (w >> 4).to(tl.float32) - z[None, :]
        sums += (w_low * x_low[:, None] + w_high * x_high[:, None]) * s[None, :]
    finish_split_k(
        out,
        tl.sum(sums, 0)[None, :],
        tl.full([1], 1.0, tl.float32),
        tl.full([block_n], 1.0, tl.float32),
        partial,
        arrived,
        tl.arange(0, 1),
        column,
        m,
        n,
        tl.program_id(0),
        split,
        splits,
        single,
    )


def w4a16_gemm(
    x: Tensor,
    weight: PreparedInt4,
    *,
    splits: int | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = x · dequantised(weight)ᵀ.

    | tensor       | dtype                   | shape                                       |
    |--------------|-------------------------|---------------------------------------------|
    | x            | fp16/bf16 (fp32 on CPU) | [m, k], contiguous, of what weight was prepared for |
    | weight       | PreparedInt4            | of n outputs and k inputs                   |
    | out, returns | as x                    | [m, n], contiguous                          |

    Sums are fp32, rounded once. With `workspace` and `out` given nothing is allocated.
    Raises ValueError, naming the tensor, for a wrong shape, dtype or device.
    """
    import torch

    if x.ndim != 2 or x.shape[1] != weight.in_features or x.shape[0] < 1:
        raise ValueError(f"x: expected [m, {weight.in_features}], got {list(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or x.dtype != weight.scales.dtype:
        raise ValueError(f"x: got {x.dtype}, the weight was prepared for {weight.scales.dtype}")
    if x.device != weight.packed.device:
        raise ValueError(f"x: on {x.device}, but the packed weight is on {weight.packed.device}")
    if x.device.type == "cpu":
        answer = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), weight.packed, weight.group_size, weight.scales
        )[:, : weight.out_features]
        return answer if out is None else out.copy_(answer)
    return launch_w4a16(x, weight, splits=splits, workspace=workspace, out=out)


def launch_w4a16(
    x: Tensor,
    weight: PreparedInt4,
    *,
    splits: int | None = None,
    tile: GemmTile | None = None,
    gemv: bool | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; gemv: by default where m is 1."""
    import torch

    needs_triton("w4a16_gemm")
    (m, k), n, group = x.shape, weight.out_features, weight.group_size
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x: the kernel takes fp16 and bf16, got {x.dtype}")
    if not x.is_contiguous():
        raise ValueError("x: must be contiguous")
    gemv = m == 1 if gemv is None else gemv
    if tile is None:
        tile = choose_int4_tile(m=m, group=group)
    block_n = GEMV_BLOCK_N if gemv else tile.block_n
    launch = spread(
        m=m, n=n, steps=k // group, block_m=tile.block_m, block_n=block_n, dtype=x.dtype, device=x,
        splits=splits, workspace=workspace, out=out,
    )  # fmt: skip
    # Unused where there are no zeros, but a launch takes tensors.
    zeros = weight.packed if weight.zeros is None else weight.zeros
    scratch = (launch.partial, launch.arrived)
    arguments = (x, weight.packed, weight.scales, zeros, launch.out, *scratch, m, n, k, launch.splits)
    shared = {
        "block_n": block_n,
        "group": group,
        "symmetric": weight.zeros is None,
        "single": launch.splits == 1,
        "stages": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if gemv:
        w4a16_gemv_kernel[(launch.grid[0], launch.splits)](*arguments, **shared)
    else:
        w4a16_kernel[launch.grid](*arguments, block_m=tile.block_m, swapped=tile.swapped, **shared)
    return launch.out


def w4a16_reference(x: Tensor, weight: Int4Weight) -> Tensor:
    """x · dequantised(weight)ᵀ in float64: x [m, k] → [m, n]."""
    return x.double() @ dequantize_int4(weight).double().T
