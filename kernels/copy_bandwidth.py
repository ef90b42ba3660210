"""Copy a buffer, in Triton: the bandwidth that every memory-bound kernel is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 4096


def copy_bytes(source: Tensor) -> int:
    """Bytes that a copy moves: each is read once and written once, 2 · elements · element size."""
    return 2 * source.numel() * source.element_size()


@jit
def copy_kernel(source, target, elements, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [ceil(elements / block)]; source and target of one dtype, [elements], contiguous."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < elements), mask=at < elements)


def copy_bandwidth(source: Tensor, target: Tensor) -> None:
    """target ← source, once; both any dtype and shape, equal, contiguous. The caller holds the clock.

    Raises ValueError where they differ in dtype, shape or device.
    """
    if source.shape != target.shape or source.dtype != target.dtype or source.device != target.device:
        raise ValueError(
            f"target: expected {source.dtype} {list(source.shape)} on {source.device}, "
            f"got {target.dtype} {list(target.shape)} on {target.device}"
        )
    if source.device.type == "cpu":
        copy_bandwidth_reference(source, target)
    else:
        launch_copy(source, target)


def launch_copy(source: Tensor, target: Tensor) -> None:
    """The Triton route, also for CPU tensors under the interpreter; arguments as copy_bandwidth."""
    needs_triton("copy_bandwidth")
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("source, target: must be contiguous")
    copy_kernel[(-(-source.numel() // BLOCK),)](source, target, source.numel(), block=BLOCK, num_warps=8)


def copy_bandwidth_reference(source: Tensor, target: Tensor) -> None:
    """The same by torch, and the CPU route."""
    target.copy_(source)
