"""W8A16 product in Triton: 16-bit activations times 8-bit weights, int8 or FP8, with a scale an output.

Weights widen to the activations' dtype in registers, so any GPU from sm_80 runs FP8 weights too. On CPU
tensors torch's own int8 kernel is used where it is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import e4m3_to, int8_to, jit, needs_triton, tl, widen, widened
from capplan.kernels.split_k import GemmTile, SplitKWorkspace, finish_split_k, spread

if TYPE_CHECKING:
    from torch import Tensor

CPU_INPUTS: Final = 16  # torch 2.13's CPU kernel is wrong, or crashes, for other than multiples


def choose_w8a16_tile(*, m: int) -> GemmTile:
    """A tile without register spills, found by compiling alone; 32 rows on 4 warps spill on sm_100."""
    if m <= 64:
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        warps = 4 if m <= 16 else 8
        return GemmTile(block_m=block_m, block_n=64, block_k=128, warps=warps, stages=3, swapped=True)
    return GemmTile(block_m=64, block_n=128, block_k=64, warps=8, stages=3, swapped=True)


@jit
def w8a16_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    out,
    partial,
    arrived,
    m,
    n,
    k,
    splits,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    fp8: tl.constexpr,
    single: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [ceil(n / block_n), ceil(m / block_m), splits]; the weights are the left operand.

    | argument         | dtype                          | shape              |
    |------------------|--------------------------------|--------------------|
    | x                | fp16/bf16                      | [m, k], contiguous |
    | weight           | int8, or uint8 bits of e4m3    | [n, k], contiguous |
    | scales           | fp32                           | [n]                |
    | out              | as x                           | [m, n], contiguous |
    | partial, arrived | as in SplitKWorkspace          |                    |
    """
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    inner = tl.arange(0, block_k)
    steps = tl.cdiv(k, block_k)
    per_split = tl.cdiv(steps, splits)
    low = split * per_split
    high = tl.minimum(low + per_split, steps)
    accumulator = tl.zeros([block_n, block_m], tl.float32)
    for step in tl.range(low, high, num_stages=stages):
        at = step * block_k + inner
        w = tl.load(
            weight + column[:, None].to(tl.int64) * k + at[None, :],
            mask=(column < n)[:, None] & (at < k)[None, :],
            other=0,
        )
        xs = tl.load(
            x + row[:, None].to(tl.int64) * k + at[None, :],
            mask=(row < m)[:, None] & (at < k)[None, :],
            other=0.0,
        )
        w = e4m3_to(w, xs.dtype) if fp8 else int8_to(w, xs.dtype)
        accumulator = tl.dot(widen(w), tl.trans(widen(xs)), accumulator)
    finish_split_k(
        out,
        tl.trans(accumulator),
        tl.full([block_m], 1.0, tl.float32),
        tl.load(scales + column, mask=column < n, other=0.0),
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


def w8a16_gemm(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    splits: int | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y[i, j] = scales[j] · Σ x[i, c] · weight[j, c].

    | tensor       | dtype                   | shape              |
    |--------------|-------------------------|--------------------|
    | x            | fp16/bf16 (fp32 on CPU) | [m, k], contiguous |
    | weight       | int8 or fp8 e4m3        | [n, k], contiguous |
    | scales       | fp32                    | [n]                |
    | out, returns | as x                    | [m, n], contiguous |

    Raises ValueError, naming the tensor, for a wrong shape, dtype or device.
    """
    import torch

    _check(x, weight, scales)
    if x.device.type != "cpu":
        return launch_w8a16(x, weight, scales, splits=splits, workspace=workspace, out=out)
    if weight.dtype == torch.int8 and x.dtype != torch.float32 and x.shape[1] % CPU_INPUTS == 0:
        answer = torch.ops.aten._weight_int8pack_mm(x.contiguous(), weight, scales.to(x.dtype))
    else:
        answer = torch.nn.functional.linear(x, widened(weight, x.dtype)).mul_(scales)
    return answer if out is None else out.copy_(answer)


def launch_w8a16(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    splits: int | None = None,
    tile: GemmTile | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as w8a16_gemm."""
    import torch

    needs_triton("w8a16_gemm")
    (m, k), n = x.shape, weight.shape[0]
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x: the kernel takes fp16 and bf16, got {x.dtype}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x, weight: must be contiguous")
    tile = choose_w8a16_tile(m=m) if tile is None else tile
    launch = spread(
        m=m, n=n, steps=-(-k // tile.block_k), block_m=tile.block_m, block_n=tile.block_n, dtype=x.dtype,
        device=x, splits=splits, workspace=workspace, out=out,
    )  # fmt: skip
    fp8 = weight.dtype == torch.float8_e4m3fn
    w8a16_kernel[launch.grid](
        x,
        weight.view(torch.uint8) if fp8 else weight,
        scales,
        launch.out,
        launch.partial,
        launch.arrived,
        m,
        n,
        k,
        launch.splits,
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=tile.block_k,
        fp8=fp8,
        single=launch.splits == 1,
        stages=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return launch.out


def w8a16_reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The formula of w8a16_gemm in float64: [m, n]."""
    _check(x, weight, scales)
    return x.double() @ weight.double().T * scales.double()


def _check(x: Tensor, weight: Tensor, scales: Tensor) -> None:
    import torch

    if weight.ndim != 2 or weight.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"weight: expected int8 or fp8 e4m3 [n, k], got {weight.dtype} {list(weight.shape)}")
    if x.ndim != 2 or x.shape[1] != weight.shape[1] or x.shape[0] < 1:
        raise ValueError(f"x: expected [m, {weight.shape[1]}], got {list(x.shape)}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x: expected fp16, bf16 or fp32, got {x.dtype}")
    if tuple(scales.shape) != (weight.shape[0],) or scales.dtype != torch.float32:
        raise ValueError(
            f"scales: expected fp32 [{weight.shape[0]}], got {scales.dtype} {list(scales.shape)}"
        )
    for name, tensor in (("weight", weight), ("scales", scales)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, but x is on {x.device}")
