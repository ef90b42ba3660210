"""RMSNorm in Triton, with the residual's addition fused in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, power_of_two, tl

if TYPE_CHECKING:
    from torch import Tensor

WIDEST: Final = 32_768  # a row is held in registers


@jit
def rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x, weight, residual, out, columns, eps, block: tl.constexpr, adds: tl.constexpr
):
    """Grid [rows]; x, residual, out fp16/bf16 [rows, columns] contiguous, weight as x [columns]."""
    first = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, block)
    mask = at < columns
    value = tl.load(x + first + at, mask=mask, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + first + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual + first + at, value.to(residual.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    gain = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + first + at, (value * scale * gain).to(out.dtype.element_ty), mask=mask)


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """y = r / √(mean(r²) + eps) · weight,   r = x, or x + residual, which is written back to residual.

    | tensor   | dtype                   | shape              |
    |----------|-------------------------|--------------------|
    | x        | fp16/bf16 (fp32 on CPU) | [rows, columns], contiguous |
    | weight   | as x                    | [columns]          |
    | residual | as x                    | as x, changed in place |
    | returns  | as x                    | as x               |

    Raises ValueError, naming the tensor, for a wrong shape or dtype.
    """
    import torch

    if x.ndim != 2:
        raise ValueError(f"x: expected [rows, columns], got {list(x.shape)}")
    if tuple(weight.shape) != (x.shape[1],) or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [{x.shape[1]}], got {weight.dtype} {list(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual: expected {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}"
        )
    if x.device.type != "cpu":
        return launch_rmsnorm(x, weight, eps=eps, residual=residual)
    if residual is not None:
        x = residual.add_(x)
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, eps)


def launch_rmsnorm(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as rmsnorm."""
    import torch

    needs_triton("rmsnorm")
    rows, columns = x.shape
    if columns > WIDEST:
        raise ValueError(f"x: expected at most {WIDEST} columns, got {columns}")
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        raise ValueError("x, residual: must be contiguous")
    out = torch.empty_like(x)
    block = power_of_two(columns)
    rmsnorm_kernel[(rows,)](
        x,
        weight,
        x if residual is None else residual,
        out,
        columns,
        eps,
        block=block,
        adds=residual is not None,
        num_warps=warps_for(block),
    )
    return out


def warps_for(block: int) -> int:
    """Warps that hold a row without register spills, found by compiling alone: 4, 8 or 16."""
    return 4 if block <= 2048 else 8 if block <= 4096 else 16


def rmsnorm_reference(
    x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The formula of rmsnorm in float64: y and r, both [rows, columns]; changes nothing."""
    import torch

    r = x.double() if residual is None else x.double() + residual.double()
    return r * torch.rsqrt(r.square().mean(1, keepdim=True) + eps) * weight.double(), r
