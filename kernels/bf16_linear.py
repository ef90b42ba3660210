"""The unquantised product, torch's own: what every quantised one is compared with.

Published measurements put cuBLAS at 0.80 of a GPU's peak and above; a kernel here would not get there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    return torch.nn.functional.linear(x, weight)


def bf16_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The formula of bf16_linear in float64: [m, n]."""
    return x.double() @ weight.double().T
