"""Quantise activations, one scale a row, to int8 or FP8: what W8A8 does before every product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK: Final = 2048
INT8_MAX: Final = 127.0
E4M3_MAX: Final = 448.0


@jit
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x, out, scales, columns, top, block: tl.constexpr, integer: tl.constexpr
):
    """Grid [rows]; the row is read twice, the second time from cache.

    x fp16/bf16 [rows, columns]; out int8 or fp8 e4m3 [rows, columns]; scales fp32 [rows]; all contiguous.
    """
    row = tl.program_id(0)
    first = row.to(tl.int64) * columns
    highest = tl.zeros([block], tl.float32)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(x + first + at, mask=at < columns, other=0.0).to(tl.float32)
        highest = tl.maximum(highest, tl.abs(value))
    scale = tl.max(highest, 0) / top
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, columns, block):
        at = start + tl.arange(0, block)
        value = tl.load(x + first + at, mask=at < columns, other=0.0).to(tl.float32) / scale
        value = tl.clamp(value, -top, top)
        if integer:
            value = tl.floor(value + 0.5)
        tl.store(out + first + at, value.to(out.dtype.element_ty), mask=at < columns)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """scales[i] = max|x[i]| / top (1 for a row of zeros), out[i, c] = round(x[i, c] / scales[i]).

    top is 127 for int8 and 448 for fp8 e4m3; x fp16/bf16/fp32 [rows, columns] → out `dtype`
    [rows, columns], scales fp32 [rows]. Raises ValueError for other dtypes or shapes.
    """
    import torch

    if x.ndim != 2 or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x: expected fp16, bf16 or fp32 [rows, columns], got {x.dtype} {list(x.shape)}")
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"dtype: expected int8 or fp8 e4m3, got {dtype}")
    native = dtype == torch.int8 or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9))
    if x.device.type == "cpu" or not native:
        return quantize_rows_reference(x, dtype)
    return launch_quantize_rows(x, dtype)


def launch_quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The Triton route, also for CPU tensors under the interpreter; rounds halves up, not to even."""
    import torch

    needs_triton("quantize_rows")
    if not x.is_contiguous():
        raise ValueError("x: must be contiguous")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    integer = dtype == torch.int8
    top = INT8_MAX if integer else E4M3_MAX
    quantize_rows_kernel[(x.shape[0],)](x, out, scales, x.shape[1], top, block=BLOCK, integer=integer)
    return out, scales


def quantize_rows_reference(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The formula of quantize_rows in torch, and its CPU route."""
    import torch

    integer = dtype == torch.int8
    top = INT8_MAX if integer else E4M3_MAX
    scales = x.float().abs().amax(1) / top
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (x.float() / scales[:, None]).clamp_(-top, top)
    return (values.round_() if integer else values).to(dtype), scales
