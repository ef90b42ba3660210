"""Group-quantized GEMM, W4A16: 16-bit activations times 4-bit weights with a scale a group.

The reference in plain torch: quantise, pack, unpack, dequantise, and the product tile by tile
along the input dimension, as a kernel walks it. It is written to be compared with, not to be
fast. Torch is imported inside the functions: importing this module needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NIBBLES_PER_WORD: Final = 8
NIBBLE_MAX: Final = 15
SYMMETRIC_MAX: Final = 7  # q runs from -7 to 7, so that zero and the sign are exact
SYMMETRIC_OFFSET: Final = 8  # stored nibble = q + 8: one decode, (nibble - offset) * scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Weight:
    """A weight matrix [n, k] (n outputs, k inputs) in 4 bits, quantised in groups along k.

    w[i, j] ≈ (nibble[i, j] - zeros[i, g]) · scales[i, g],   g = j // group_size

    | tensor | dtype          | shape                                                       |
    |--------|----------------|-------------------------------------------------------------|
    | packed | int32          | [n, k / 8]; bits 4c to 4c+3 of packed[i, j] are input 8j + c |
    | scales | fp16/bf16/fp32 | [n, k / group_size]                                         |
    | zeros  | uint8, 0 to 15 | as scales; None: symmetric, 8 throughout                    |

    Raises ValueError, naming the tensor, where they do not fit together.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __post_init__(self) -> None:
        import torch

        if self.packed.ndim != 2 or 0 in self.packed.shape:
            raise ValueError(f"packed: expected [n, k / 8], none of them 0, got {_shape(self.packed)}")
        if self.packed.dtype != torch.int32:
            raise ValueError(f"packed: expected int32, got {self.packed.dtype}")
        _check_float("scales", self.scales)
        if self.scales.ndim != 2 or self.scales.shape[0] != self.out_features:
            raise ValueError(
                f"scales: expected [{self.out_features}, k / group_size], got {_shape(self.scales)}"
            )
        groups = self.scales.shape[1]
        if groups < 1 or self.packed.shape[1] % groups:
            raise ValueError(
                f"scales: {groups} groups do not split {self.in_features} inputs in equal groups "
                f"of a multiple of {NIBBLES_PER_WORD}"
            )
        _check_device("scales", self.scales, self.packed)
        if not torch.isfinite(self.scales.float() * NIBBLE_MAX).all():
            raise ValueError(f"scales: {NIBBLE_MAX} times a scale must be finite in fp32")
        if self.zeros is None:
            return
        if self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"zeros: expected the shape of scales, {_shape(self.scales)}, got {_shape(self.zeros)}"
            )
        if self.zeros.dtype != torch.uint8 or int(self.zeros.max()) > NIBBLE_MAX:
            raise ValueError(
                f"zeros: expected uint8 from 0 to {NIBBLE_MAX}, got "
                f"{self.zeros.dtype} up to {self.zeros.max()}"
            )
        _check_device("zeros", self.zeros, self.packed)

    @property
    def out_features(self) -> int:
        """n, the rows."""
        return int(self.packed.shape[0])

    @property
    def in_features(self) -> int:
        """k, the columns before packing."""
        return int(self.packed.shape[1]) * NIBBLES_PER_WORD

    @property
    def group_size(self) -> int:
        """Inputs that share one scale."""
        return self.in_features // int(self.scales.shape[1])


def pack_int4(nibbles: Tensor) -> Tensor:
    """Pack eight 4-bit values a word along the last dimension, the first in the lowest bits.

    | tensor  | dtype                  | shape      |
    |---------|------------------------|------------|
    | nibbles | any integer, 0 to 15   | [..., k]   |
    | returns | int32                  | [..., k/8] |

    Raises ValueError where k is no multiple of 8, or a value is no nibble.
    Example: 1, 2, 3, 4, 5, 6, 7, 8 → 0x87654321, as int32 -2,023,406,815.
    """
    import torch

    if nibbles.is_floating_point() or nibbles.is_complex() or nibbles.dtype == torch.bool:
        raise ValueError(f"nibbles: expected an integer dtype, got {nibbles.dtype}")
    if nibbles.ndim < 1 or nibbles.shape[-1] % NIBBLES_PER_WORD:
        raise ValueError(
            f"nibbles: expected [..., k] with k a multiple of {NIBBLES_PER_WORD}, got {_shape(nibbles)}"
        )
    if nibbles.numel() and (int(nibbles.min()) < 0 or int(nibbles.max()) > NIBBLE_MAX):
        raise ValueError(
            f"nibbles: expected values from 0 to {NIBBLE_MAX}, got {nibbles.min()} to {nibbles.max()}"
        )
    words_shape = (*nibbles.shape[:-1], nibbles.shape[-1] // NIBBLES_PER_WORD)
    lanes = nibbles.to(torch.int32).reshape(*words_shape, NIBBLES_PER_WORD)
    words = lanes.new_zeros(words_shape)
    for lane in range(NIBBLES_PER_WORD):
        words |= lanes[..., lane] << (4 * lane)
    return words


def unpack_int4(packed: Tensor) -> Tensor:
    """Undo `pack_int4`: int32 [..., k/8] → int32 [..., k], each from 0 to 15.

    Raises ValueError for another dtype or a scalar.
    """
    import torch

    if packed.dtype != torch.int32 or packed.ndim < 1:
        raise ValueError(
            f"packed: expected int32 [..., k / {NIBBLES_PER_WORD}], got {packed.dtype} {_shape(packed)}"
        )
    shifts = torch.arange(0, 4 * NIBBLES_PER_WORD, 4, dtype=torch.int32, device=packed.device)
    # The shift of a negative word brings in ones; the mask drops them.
    return ((packed.unsqueeze(-1) >> shifts) & NIBBLE_MAX).flatten(-2)


def quantize_int4(
    weight: Tensor,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> Int4Weight:
    """Round a weight matrix to 4 bits, group by group along its inputs, to nearest.

        affine     s = (r_max - r_min) / (2⁴ - 1),  z = round(-r_min / s),  q = round(w / s) + z
        symmetric  s = max|w| / 7,                  z = 0,                  q = round(w / s)

    | tensor  | dtype              | shape                                       |
    |---------|--------------------|---------------------------------------------|
    | weight  | fp16/bf16/fp32     | [n, k], k a multiple of group_size          |
    | returns | scales: scale_dtype, else as weight | an Int4Weight of that n and k |

    group_size is a multiple of 8; k itself gives one scale a row. r_min ≤ 0 ≤ r_max: an affine
    range is widened to hold zero, so that z is a nibble and zero stays exact. z and q follow the
    scale as stored. A group of zeros, or too small for scale_dtype, has scale 1 and reads as zeros.
    |w - dequantised| ≤ s / 2 wherever w is within the range that the stored s and z span. A bf16
    scale that was rounded down leaves the ends of the group outside it, by up to 15 · 2⁻⁸ steps;
    a subnormal fp16 one, by more.

    Raises ValueError, naming the argument, for a wrong shape or dtype, a value that is not
    finite, or one too large for its scale to be stored.
    Example: w from -1 to 2, affine: s = 0.2, z = 5; w = 0.6 is nibble 8.
    """
    import torch

    _check_float("weight", weight)
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight: expected [n, k], none of them 0, got {_shape(weight)}")
    if group_size < 1 or group_size % NIBBLES_PER_WORD:
        raise ValueError(f"group_size: expected a positive multiple of {NIBBLES_PER_WORD}, got {group_size}")
    if weight.shape[1] % group_size:
        raise ValueError(f"weight: {weight.shape[1]} inputs are not a multiple of group_size {group_size}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight: holds a value that is not finite")

    # In fp64 only storing the scale rounds, so the half-step bound is the stored scale's.
    groups = weight.double().reshape(weight.shape[0], -1, group_size)
    low = groups.amin(-1).clamp(max=0)
    high = groups.amax(-1).clamp(min=0)
    spread = torch.maximum(-low, high) / SYMMETRIC_MAX if symmetric else (high - low) / NIBBLE_MAX
    scales = spread.to(weight.dtype if scale_dtype is None else scale_dtype)
    _check_float("scale_dtype", scales)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if not torch.isfinite(scales.float() * NIBBLE_MAX).all():
        raise ValueError(f"weight: too large for scales in {scales.dtype}")
    steps = scales.double()
    zeros = torch.full_like(steps, SYMMETRIC_OFFSET) if symmetric else (-low / steps).round()
    zeros = zeros.clamp(0, NIBBLE_MAX)  # a subnormal fp16 scale can be far off, and z beyond 15
    nibbles = (groups / steps.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    smallest = SYMMETRIC_OFFSET - SYMMETRIC_MAX if symmetric else 0
    return Int4Weight(
        packed=pack_int4(nibbles.clamp(smallest, NIBBLE_MAX).to(torch.uint8).flatten(1)),
        scales=scales,
        zeros=None if symmetric else zeros.to(torch.uint8),
    )


def dequantize_int4(weight: Int4Weight) -> Tensor:
    """The weight matrix that the product uses: fp32 [n, k], (nibble - zero) · scale."""
    return _dequantize_columns(weight, 0, weight.in_features)


def quantized_gemm_reference(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, block_k: int | None = None
) -> Tensor:
    """y = x · dequantised(weight)ᵀ + bias, block_k inputs at a time.

    | tensor  | dtype          | shape                                  |
    |---------|----------------|----------------------------------------|
    | x       | fp16/bf16/fp32 | [m, k]                                 |
    | weight  | Int4Weight     | of n outputs and k inputs              |
    | bias    | fp16/bf16/fp32 | [n], or None                           |
    | returns | as x           | [m, n]                                 |

    block_k is a multiple of 8, one group unless given; it need divide neither k nor the group.
    Products and sums are fp32, rounded once to x's dtype. Needs all tensors on one device.

    Raises ValueError, naming the argument, for a wrong shape, dtype or device.
    """
    check_quantized_gemm(x, weight, bias)
    step = weight.group_size if block_k is None else block_k
    if step < 1 or step % NIBBLES_PER_WORD:
        raise ValueError(f"block_k: expected a positive multiple of {NIBBLES_PER_WORD}, got {step}")

    activations = x.float()
    accumulator = activations.new_zeros(x.shape[0], weight.out_features)
    for start in range(0, weight.in_features, step):
        stop = min(start + step, weight.in_features)
        accumulator += activations[:, start:stop] @ _dequantize_columns(weight, start, stop).T
    if bias is not None:
        accumulator += bias.float()
    return accumulator.to(x.dtype)


def check_quantized_gemm(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> None:
    """Raise ValueError unless these are the tensors `quantized_gemm_reference` describes."""
    _check_float("x", x)
    if x.ndim != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x: expected shape [m, {weight.in_features}], got {_shape(x)}")
    _check_device("x", x, weight.packed)
    if bias is None:
        return
    _check_float("bias", bias)
    if tuple(bias.shape) != (weight.out_features,):
        raise ValueError(f"bias: expected shape [{weight.out_features}], got {_shape(bias)}")
    _check_device("bias", bias, weight.packed)


def _dequantize_columns(weight: Int4Weight, start: int, stop: int) -> Tensor:
    """Inputs start to stop - 1 (both multiples of 8) of every row: fp32 [n, stop - start]."""
    import torch

    words = weight.packed[:, start // NIBBLES_PER_WORD : stop // NIBBLES_PER_WORD]
    group = torch.arange(start, stop, device=words.device) // weight.group_size
    nibbles = unpack_int4(words)
    zeros = SYMMETRIC_OFFSET if weight.zeros is None else weight.zeros[:, group]
    return (nibbles - zeros).float() * weight.scales[:, group].float()


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_float(name: str, tensor: Tensor) -> None:
    import torch

    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"{name}: expected fp16, bf16 or fp32, got {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, packed: Tensor) -> None:
    if tensor.device != packed.device:
        raise ValueError(f"{name}: on {tensor.device}, but the packed weight is on {packed.device}")
