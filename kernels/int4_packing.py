"""4-bit checkpoints as AWQ and GPTQ pack them, to and from the storage used here, in torch.

Both keep a matrix of k inputs and n outputs, its scales and zero points a group of inputs:

| tensor  | dtype | GPTQ                                  | AWQ                                     |
|---------|-------|---------------------------------------|-----------------------------------------|
| qweight | int32 | [k / 8, n]: input 8i + c              | [k, n / 8]: output 8j + AWQ_ORDER[c]    |
| qzeros  | int32 | [k / g, n / 8]: output 8j + c, less 1 | [k / g, n / 8]: output 8j + AWQ_ORDER[c] |
| scales  | fp16  | [k / g, n]                            | [k / g, n]                              |

Value c of a word is in its bits 4c to 4c + 3. GPTQ's first format stores zero - 1; "gptq_v2" stores the
zero itself. Activation order (`g_idx` other than i // g) permutes the inputs of x, which a caller does; it
is not part of the storage.
Sources: AutoGPTQ and GPTQModel `pack_block`, AutoAWQ `gemm_pack` (order 0, 2, 4, 6, 1, 3, 5, 7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.quantized_gemm import (
    NIBBLE_MAX,
    NIBBLES_PER_WORD,
    SYMMETRIC_OFFSET,
    Int4Weight,
    pack_int4,
    unpack_int4,
)

if TYPE_CHECKING:
    from torch import Tensor

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


def from_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, zero_offset: int = 1) -> Int4Weight:
    """GPTQ's tensors → Int4Weight; zero_offset is 1, or 0 for "gptq_v2".

    Raises ValueError where the shapes do not fit together.
    """
    import torch

    _check_shapes(qweight.shape[1], qzeros, scales)
    zeros = (unpack_int4(qzeros) + zero_offset) & NIBBLE_MAX
    nibbles = unpack_int4(qweight.T.contiguous())  # eight inputs a word: rows of words are outputs
    return Int4Weight(
        packed=pack_int4(nibbles), scales=scales.T.contiguous(), zeros=zeros.T.contiguous().to(torch.uint8)
    )


def to_gptq(weight: Int4Weight, *, zero_offset: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Int4Weight → qweight, qzeros, scales, the inverse of from_gptq; n must be a multiple of 8."""
    zeros = (_zeros(weight).T - zero_offset) & NIBBLE_MAX
    return weight.packed.T.contiguous(), pack_int4(zeros), weight.scales.T.contiguous()


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """AWQ's tensors → Int4Weight.

    Raises ValueError where the shapes do not fit together.
    """
    import torch

    _check_shapes(qweight.shape[1] * NIBBLES_PER_WORD, qzeros, scales)
    nibbles, zeros = (_reordered(unpack_int4(each), back=True) for each in (qweight, qzeros))
    return Int4Weight(
        packed=pack_int4(nibbles.T.contiguous()),
        scales=scales.T.contiguous(),
        zeros=zeros.T.contiguous().to(torch.uint8),
    )


def to_awq(weight: Int4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """Int4Weight → qweight, qzeros, scales, the inverse of from_awq; n must be a multiple of 8."""
    nibbles = unpack_int4(weight.packed).T
    qweight, qzeros = (pack_int4(_reordered(each, back=False)) for each in (nibbles, _zeros(weight).T))
    return qweight, qzeros, weight.scales.T.contiguous()


def _zeros(weight: Int4Weight) -> Tensor:
    import torch

    if weight.zeros is not None:
        return weight.zeros.to(torch.int32)
    return torch.full(weight.scales.shape, SYMMETRIC_OFFSET, dtype=torch.int32)


def _reordered(values: Tensor, *, back: bool) -> Tensor:
    """Permute each eight values of the last dimension from output order to AWQ's, or back."""
    eights = values.reshape(values.shape[0], -1, NIBBLES_PER_WORD)
    order = [AWQ_ORDER.index(place) for place in range(NIBBLES_PER_WORD)] if back else list(AWQ_ORDER)
    return eights[:, :, order].flatten(1)


def _check_shapes(n: int, qzeros: Tensor, scales: Tensor) -> None:
    if scales.ndim != 2 or scales.shape[1] != n:
        raise ValueError(f"scales: expected [groups, {n}], got {list(scales.shape)}")
    if tuple(qzeros.shape) != (scales.shape[0], n // NIBBLES_PER_WORD):
        raise ValueError(
            f"qzeros: expected {[scales.shape[0], n // NIBBLES_PER_WORD]}, got {list(qzeros.shape)}"
        )
