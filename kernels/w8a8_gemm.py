"""W8A8 product: int8 in Triton, FP8 through torch._scaled_mm where the GPU has FP8, Triton elsewhere.

Both operands carry fp32 scales, one a row of x and one an output. On CPU tensors int8 goes through
`torch._int_mm` where the CPU multiplies int8 itself, everything else through a product in fp32.
Activations are quantised by `quantize_rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import capability_of, e4m3_to, jit, needs_triton, tl, widen, widened
from capplan.kernels.split_k import GemmTile, SplitKWorkspace, finish_split_k, spread

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FP8_CAPABILITY: Final = (8, 9)  # Ada and later
SCALED_MM_ALIGNMENT: Final = 16  # torch._scaled_mm asks it of n and k


def choose_w8a8_tile(*, m: int) -> GemmTile:
    """A tile without register spills, found by compiling alone."""
    if m <= 64:
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        return GemmTile(block_m=block_m, block_n=64, block_k=128, warps=4, stages=3)
    return GemmTile(block_m=128, block_n=128, block_k=128, warps=8, stages=3)


@jit
def w8a8_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    x_scales,
    weight_scales,
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
    kind: tl.constexpr,
    single: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [ceil(n / block_n), ceil(m / block_m), splits].

    | argument         | dtype                                    | shape              |
    |------------------|------------------------------------------|--------------------|
    | x, weight        | int8; fp8 e4m3; uint8 bits of fp8 e4m3   | [m, k], [n, k], contiguous |
    | x_scales         | fp32                                     | [m]                |
    | weight_scales    | fp32                                     | [n]                |
    | out              | fp16/bf16                                | [m, n], contiguous |
    | partial, arrived | as in SplitKWorkspace                    |                    |

    kind: "int8" (sums in int32), "fp8" (k a multiple of block_k) or "fp8_bits" (products in bf16).
    """
    row = tl.program_id(1) * block_m + tl.arange(0, block_m)
    column = tl.program_id(0) * block_n + tl.arange(0, block_n)
    split = tl.program_id(2)
    inner = tl.arange(0, block_k)
    # Rows past the end are clamped, not masked: a masked fp8 load does not compile.
    x_row = tl.where(row < m, row, 0)[:, None].to(tl.int64) * k
    weight_row = tl.where(column < n, column, 0)[None, :].to(tl.int64) * k
    steps = tl.cdiv(k, block_k)
    per_split = tl.cdiv(steps, splits)
    low = split * per_split
    high = tl.minimum(low + per_split, steps)
    accumulator = tl.zeros([block_m, block_n], tl.int32 if kind == "int8" else tl.float32)
    for step in tl.range(low, high, num_stages=stages):
        at = step * block_k + inner
        if kind == "fp8":
            xs = tl.load(x + x_row + at[None, :])
            w = tl.load(weight + weight_row + at[:, None])
            accumulator = tl.dot(widen(xs), widen(w), accumulator)
        else:
            xs = tl.load(x + x_row + at[None, :], mask=(at < k)[None, :], other=0)
            w = tl.load(weight + weight_row + at[:, None], mask=(at < k)[:, None], other=0)
            if kind == "int8":
                # Older versions of Triton need the type named.
                accumulator = tl.dot(xs, w, accumulator, out_dtype=tl.int32)
            else:
                xs = widen(e4m3_to(xs, tl.bfloat16))
                accumulator = tl.dot(xs, widen(e4m3_to(w, tl.bfloat16)), accumulator)
    finish_split_k(
        out,
        accumulator.to(tl.float32),
        tl.load(x_scales + row, mask=row < m, other=0.0),
        tl.load(weight_scales + column, mask=column < n, other=0.0),
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


def w8a8_gemm(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    weight_scales: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    splits: int | None = None,
    workspace: SplitKWorkspace | None = None,
) -> Tensor:
    """y[i, j] = x_scales[i] · weight_scales[j] · Σ x[i, c] · weight[j, c].

    | tensor        | dtype                      | shape              |
    |---------------|----------------------------|--------------------|
    | x             | int8 or fp8 e4m3           | [m, k], contiguous |
    | weight        | as x                       | [n, k], contiguous |
    | x_scales      | fp32                       | [m]                |
    | weight_scales | fp32                       | [n]                |
    | returns       | out_dtype, bf16 by default | [m, n]             |

    Raises ValueError, naming the tensor, for a wrong shape, dtype or device.
    """
    import torch

    _check(x, weight, x_scales, weight_scales)
    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if x.device.type == "cpu":
        return w8a8_gemm_cpu(x, weight, x_scales, weight_scales, out_dtype=out_dtype)
    aligned = x.shape[1] % SCALED_MM_ALIGNMENT == 0 and weight.shape[0] % SCALED_MM_ALIGNMENT == 0
    if x.dtype == torch.float8_e4m3fn and capability_of(x) >= FP8_CAPABILITY and aligned:
        # Row-wise scales come with bf16 out; the product is cuBLASLt's or CUTLASS's.
        answer: Tensor = torch._scaled_mm(
            x, weight.T, scale_a=x_scales[:, None], scale_b=weight_scales[None, :], out_dtype=torch.bfloat16
        )
        return answer.to(out_dtype)
    return launch_w8a8(
        x, weight, x_scales, weight_scales, out_dtype=out_dtype, splits=splits, workspace=workspace
    )


def w8a8_gemm_cpu(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """The CPU route, tensors as w8a8_gemm.

    Without int8 instructions `_int_mm` is 2 to 10 times slower than widening to fp32, whose sums are then
    rounded to 24 bits. torch's FP8 product on a CPU is 25 times slower still, so FP8 always widens.
    """
    import torch

    if x.dtype == torch.int8 and torch.cpu._is_vnni_supported():
        product = torch._int_mm(x, weight.T).float()
    else:
        product = widened(x, torch.float32) @ widened(weight, torch.float32).T
    return product.mul_(x_scales[:, None]).mul_(weight_scales).to(out_dtype)


def launch_w8a8(
    x: Tensor,
    weight: Tensor,
    x_scales: Tensor,
    weight_scales: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    splits: int | None = None,
    tile: GemmTile | None = None,
    unpack_fp8: bool | None = None,
    workspace: SplitKWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as w8a8_gemm.

    unpack_fp8: multiply FP8 as bf16; by default where the GPU has no FP8, or k does not fill its tiles.
    """
    import torch

    needs_triton("w8a8_gemm")
    (m, k), n = x.shape, weight.shape[0]
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x, weight: must be contiguous")
    tile = choose_w8a8_tile(m=m) if tile is None else tile
    kind = "int8"
    if x.dtype == torch.float8_e4m3fn:
        native = capability_of(x) >= FP8_CAPABILITY and k % tile.block_k == 0
        kind = "fp8" if native and not unpack_fp8 else "fp8_bits"
    launch = spread(
        m=m, n=n, steps=-(-k // tile.block_k), block_m=tile.block_m, block_n=tile.block_n,
        dtype=out_dtype or torch.bfloat16, device=x, splits=splits, workspace=workspace, out=out,
    )  # fmt: skip
    bits = kind == "fp8_bits"
    w8a8_kernel[launch.grid](
        x.view(torch.uint8) if bits else x,
        weight.view(torch.uint8) if bits else weight,
        x_scales,
        weight_scales,
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
        kind=kind,
        single=launch.splits == 1,
        stages=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return launch.out


def w8a8_reference(x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor) -> Tensor:
    """The formula of w8a8_gemm in float64: [m, n]."""
    _check(x, weight, x_scales, weight_scales)
    return x.double() @ weight.double().T * x_scales.double()[:, None] * weight_scales.double()


def _check(x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor) -> None:
    import torch

    if x.ndim != 2 or x.shape[0] < 1 or x.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"x: expected int8 or fp8 e4m3 [m, k], got {x.dtype} {list(x.shape)}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [n, {x.shape[1]}], got {weight.dtype} {list(weight.shape)}"
        )
    for name, tensor, size in (
        ("x_scales", x_scales, x.shape[0]),
        ("weight_scales", weight_scales, weight.shape[0]),
    ):
        if tuple(tensor.shape) != (size,) or tensor.dtype != torch.float32:
            raise ValueError(f"{name}: expected fp32 [{size}], got {tensor.dtype} {list(tensor.shape)}")
    for name, tensor in (("weight", weight), ("x_scales", x_scales), ("weight_scales", weight_scales)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, but x is on {x.device}")
