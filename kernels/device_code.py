"""What the Triton kernels share: a guarded import, and number formats in device code.

A machine without triton can import every module here: `jit` then leaves functions as they are, and
only launching one fails, in `needs_triton`. TRITON_INTERPRET=1 must be set before the first import.

Triton's interpreter keeps bf16 as raw 16-bit integers, and arithmetic or `tl.dot` on it is silently
wrong. Every kernel therefore widens what it loaded with `widen`, which is free on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    import triton
    import triton.language as tl
    from torch import Tensor
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # only the kernels need it
        triton = tl = None

__all__ = [
    "HAVE_TRITON",
    "INTERPRETED",
    "capability_of",
    "e4m3_to",
    "int8_to",
    "jit",
    "multiprocessors",
    "needs_triton",
    "nibbles_to",
    "power_of_two",
    "tl",
    "widen",
    "widened",
]

HAVE_TRITON: Final[bool] = triton is not None
HOPPER: Final = (9, 0)  # assumed where no GPU is asked: interpreting, or compiling without one
HOPPER_MULTIPROCESSORS: Final = 132


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function unchanged where triton is not installed."""
    return triton.jit(function) if HAVE_TRITON else function


def needs_triton(kernel: str) -> None:
    """Raise ExtraMissingError unless triton is installed."""
    if not HAVE_TRITON:
        from capplan.errors import ExtraMissingError

        raise ExtraMissingError(
            "triton is not installed", where=kernel, hint="run: pip install 'capplan[profile]'"
        )


def capability_of(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's GPU; Hopper's while interpreting on the CPU."""
    import torch

    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else HOPPER


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's GPU; an H100's while interpreting on the CPU."""
    import torch

    if not tensor.is_cuda:
        return HOPPER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def power_of_two(value: int) -> int:
    """The smallest power of two ≥ value: Triton's tiles are powers of two on every side."""
    return 1 << max(0, value - 1).bit_length()


@jit
def _probe():  # type: ignore[no-untyped-def]
    pass


# What `jit` made of a function tells which mode it is in, in every version of Triton.
INTERPRETED: Any = tl.constexpr(not isinstance(_probe, triton.runtime.JITFunction)) if HAVE_TRITON else None


@jit
def widen(x):  # type: ignore[no-untyped-def]
    """x, as fp32 while interpreting; fp32 represents every 8- and 16-bit float exactly."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x


@jit
def e4m3_to(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 holding fp8 e4m3fn → bf16 or fp16, exact, by integer operations that every GPU has.

    The 4 exponent and 3 mantissa bits move to where the wider format has them; the exponents' biases
    differ by 127 - 7 = 120 (bf16) or 15 - 7 = 8 (fp16), one exact multiplication. Subnormals are exact
    as well. e4m3's NaN reads as 480: a cache never holds one that is attended to.
    """
    word = bits.to(tl.uint16)
    sign = (word & 0x80) << 8
    if dtype == tl.bfloat16:
        value = (sign | ((word & 0x7F) << 4)).to(tl.bfloat16, bitcast=True)
        return (value.to(tl.float32) * 1.329227995784916e36).to(tl.bfloat16)
    else:
        value = (sign | ((word & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (value.to(tl.float32) * 256.0).to(tl.float16)


@jit
def int8_to(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8 → bf16 or fp16, exact (both hold every integer to 256); fp32 while interpreting, see above."""
    if INTERPRETED:
        return x.to(tl.float32)
    else:
        return x.to(dtype)


@jit
def nibbles_to(nibble, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """An integer from 0 to 15 → bf16 128 + v, or fp16 1024 + v, exact, with one OR.

    bf16 0x4300 is 128 with a last place of 1, fp16 0x6400 is 1024 with a last place of 1: the nibble is
    the mantissa's end. The difference of two such values is the difference of the nibbles, exactly.
    """
    word = nibble.to(tl.uint16)
    if dtype == tl.bfloat16:
        return widen((word | 0x4300).to(tl.bfloat16, bitcast=True))
    else:
        return widen((word | 0x6400).to(tl.float16, bitcast=True))


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values in a wider float dtype; fp8 through a table of its 256 codes, 4 times faster than `to`."""
    import torch

    if values.dtype != torch.float8_e4m3fn:
        return values.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    codes = values.view(torch.uint8).flatten().int()
    return table.index_select(0, codes).view(values.shape)
