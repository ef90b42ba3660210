"""A weight matrix in one of the formats that can be profiled, with the kernel that multiplies it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from capplan.kernels.split_k import SplitKWorkspace

GROUP: Final = 128
POOL: Final = 1 << 22
"""Random values are drawn this many at a time and repeated: no timing depends on more."""
DTYPES: Final = ("bf16", "w8a16", "int8", "w4a16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """[n, k] under a kernel dtype: `parts` are the tensors that its kernel takes."""

    dtype: str
    n: int
    k: int
    parts: tuple[Any, ...]

    def __call__(self, x: "Tensor", workspace: "SplitKWorkspace | None" = None) -> "Tensor":
        """x bf16 [m, k] → bf16 [m, n]; 8-bit kernels quantise x first, as they do in a model.

        `workspace`: a GPU's scratch, without which a split product zeroes some of its own every time.
        """
        import torch

        made: Tensor
        if self.dtype == "bf16":
            from capplan.kernels.bf16_linear import bf16_linear

            made = bf16_linear(x, self.parts[0])
        elif self.dtype == "w4a16":
            from capplan.kernels.w4a16_gemm import w4a16_gemm

            made = w4a16_gemm(x, self.parts[0], workspace=workspace)
        elif self.dtype == "w8a16":
            from capplan.kernels.w8a16_gemm import w8a16_gemm

            made = w8a16_gemm(x, *self.parts, workspace=workspace)
        else:
            from capplan.kernels.quantize_rows import quantize_rows
            from capplan.kernels.w8a8_gemm import w8a8_gemm

            values, scales = quantize_rows(x, torch.int8 if self.dtype == "int8" else torch.float8_e4m3fn)
            made = w8a8_gemm(values, self.parts[0], scales, self.parts[1], workspace=workspace)
        return made

    @property
    def bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def tensors(self) -> "list[Tensor]":
        """What a product reads of it."""
        if self.dtype == "w4a16":
            held = self.parts[0]
            return [each for each in (held.packed, held.scales, held.zeros) if each is not None]
        return list(self.parts)

    def copy(self) -> "Matrix":
        """The same values in memory of their own."""
        if self.dtype == "w4a16":
            held = self.parts[0]
            zeros = None if held.zeros is None else held.zeros.clone()
            made = replace(held, packed=held.packed.clone(), scales=held.scales.clone(), zeros=zeros)
            return replace(self, parts=(made,))
        return replace(self, parts=tuple(part.clone() for part in self.parts))

    def dense(self) -> "Tensor":
        """The values that the product uses, fp32 [n, k]: of a product with the identity."""
        import torch

        if self.dtype == "bf16":
            made: Tensor = self.parts[0].float()
        elif self.dtype == "w4a16":
            identity = torch.eye(self.k, dtype=torch.bfloat16, device=self.parts[0].packed.device)
            made = self(identity).float().T
        else:
            made = self.parts[0].float() * self.parts[1][:, None]
        return made


def rotated(matrices: Sequence[Matrix], least_bytes: int) -> list[Matrix]:
    """Like matrices, with copies until they have `least_bytes` in all: no cache then finds one again."""
    missing = least_bytes - sum(each.bytes for each in matrices)
    copies = max(0, -(-missing // matrices[0].bytes))
    return [*matrices, *(matrices[0].copy() for _ in range(copies))]


def matrix(*, n: int, k: int, dtype: str, device: "torch.device", generator: "torch.Generator") -> Matrix:
    """A random matrix of normal values over √k.

    Raises InputError for a dtype without a kernel.
    """
    import torch

    if dtype not in DTYPES:
        raise InputError(f"no kernel for {dtype}", where="--formats", hint=f"one of {', '.join(DTYPES)}")
    if dtype == "w4a16":
        return Matrix(dtype=dtype, n=n, k=k, parts=(_int4(n, k, device, generator),))
    if dtype == "bf16":
        stored = _normal(n * k, generator, k**-0.5, torch.bfloat16).view(n, k)
        return Matrix(dtype=dtype, n=n, k=k, parts=(stored.to(device),))
    values = _normal(n * k, generator, k**-0.5).view(n, k)
    narrow = torch.float8_e4m3fn if dtype == "fp8" else torch.int8
    scales = values.abs().amax(1) / (448.0 if dtype == "fp8" else 127.0)
    codes = values / scales[:, None]
    codes = codes if dtype == "fp8" else codes.round_()
    return Matrix(dtype=dtype, n=n, k=k, parts=(codes.to(device, narrow), scales.to(device)))


def _normal(
    count: int, generator: "torch.Generator", scale: float, dtype: "torch.dtype | None" = None
) -> "Tensor":
    """`count` normal values of deviation `scale`: a pool of them, repeated; fp32 unless said."""
    import torch

    pool = (torch.randn(min(count, POOL), generator=generator) * scale).to(dtype or torch.float32)
    if count <= len(pool):
        return pool
    return pool.repeat(-(-count // len(pool)))[:count]


def _int4(n: int, k: int, device: "torch.device", generator: "torch.Generator") -> Any:
    """A prepared 4-bit matrix; some rows are quantised, and repeated."""
    import torch

    from capplan.kernels.quantized_gemm import Int4Weight, quantize_int4
    from capplan.kernels.w4a16_gemm import prepare_int4

    if k % GROUP:
        raise InputError(
            f"{k} inputs are no multiple of {GROUP}", where="--formats int4", hint="leave int4 out"
        )
    rows = min(n, 256)
    few = quantize_int4(_normal(rows * k, generator, k**-0.5).view(rows, k), group_size=GROUP)
    times = -(-n // rows)
    zeros = None if few.zeros is None else few.zeros.repeat(times, 1)[:n]
    whole = Int4Weight(
        packed=few.packed.repeat(times, 1)[:n], scales=few.scales.repeat(times, 1)[:n], zeros=zeros
    )
    return prepare_int4(whole, torch.empty(0, dtype=torch.bfloat16, device=device))
