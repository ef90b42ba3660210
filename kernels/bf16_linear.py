"""The unquantised product, torch's own: what every quantised one is compared with.

Published measurements put cuBLAS at 0.80 of a GPU's peak and above; a kernel here would not get there. On an
x86 CPU without bf16 instructions many rows are multiplied in fp32, the weights widened a part at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

WIDENED_ROWS: Final = 32
"""Rows of x from which widening is faster (AVX2: 1.9 times at 32 rows, 3.3 at 128; slower below 16)."""
WIDENED_BYTES: Final = 4 << 20
"""A part of the weights in fp32: it stays in the cache between widening and product."""

if TYPE_CHECKING:
    from torch import Tensor


def bf16_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y = x · weightᵀ: x fp16/bf16/fp32 [m, k], weight as x [n, k] → as x, [m, n].

    Raises ValueError, naming the tensor, for a wrong shape or dtype.
    """
    import torch

    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"weight: expected [n, k] for x of [m, k], got {list(weight.shape)}, {list(x.shape)}"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(f"weight: expected the float dtype of x, {x.dtype}, got {weight.dtype}")
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        if widens(rows=x.shape[0]):
            return bf16_linear_widened(x, weight)
        if x.shape[0] == 1 and torch.cpu._is_avx512_bf16_supported():
            # oneDNN's product of two rows is 1.1 to 1.3 times as fast as its product of one.
            return torch.nn.functional.linear(torch.cat((x, x)), weight)[:1]
    return torch.nn.functional.linear(x, weight)


def widens(*, rows: int) -> bool:
    """Whether this CPU multiplies so many rows faster in fp32: an x86 without bf16 instructions."""
    import torch

    x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return rows >= WIDENED_ROWS and x86 and not torch.cpu._is_avx512_bf16_supported()


def bf16_linear_widened(x: Tensor, weight: Tensor) -> Tensor:
    """The same in fp32, rounded at the end; tensors as bf16_linear."""
    import torch

    wide, (n, k) = x.float(), weight.shape
    out = torch.empty(x.shape[0], n, dtype=x.dtype)
    part = max(1, WIDENED_BYTES // (4 * k))
    for first in range(0, n, part):
        out[:, first : first + part] = wide @ weight[first : first + part].float().T
    return out


def bf16_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The formula of bf16_linear in float64: [m, n]."""
    return x.double() @ weight.double().T
