"""The gated FFN's activation in Triton: silu(gate) · up, both halves of one product's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 1024


@jit
def silu_mul_kernel(gate_up, out, columns, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [rows, ceil(columns / block)]; gate_up [rows, 2 · columns], out [rows, columns], contiguous."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < columns
    gate = tl.load(gate_up + row * 2 * columns + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * columns + columns + at, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * columns + at, value.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """y[i, c] = g / (1 + e^-g) · gate_up[i, columns + c],   g = gate_up[i, c].

    gate_up fp16/bf16 (fp32 on CPU) [rows, 2 · columns], contiguous → as gate_up, [rows, columns].
    Raises ValueError for another shape.
    """
    import torch

    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up: expected [rows, 2 · columns], got {list(gate_up.shape)}")
    if gate_up.device.type != "cpu":
        return launch_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate).mul_(up)


def launch_silu_mul(gate_up: Tensor) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as silu_mul."""
    import torch

    needs_triton("silu_mul")
    if not gate_up.is_contiguous():
        raise ValueError("gate_up: must be contiguous")
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    silu_mul_kernel[(rows, -(-columns // BLOCK))](gate_up, out, columns, block=BLOCK)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula of silu_mul in float64: [rows, columns]."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up
