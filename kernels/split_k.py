"""Split-K: several programs share one tile of a product's output, each with a range of the inputs.

Each leaves its fp32 sums in scratch memory; the last to arrive adds them, in the splits' order, so that
the answer does not depend on who was last. Used by the GEMMs of small m, whose output has too few tiles
to fill a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, multiprocessors, tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST_SPLITS: Final = 16
PROGRAMS_PER_MULTIPROCESSOR: Final = 4
LARGEST_TILE: Final = 128 * 128
"""Outputs of the largest tile that a kernel here has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """Rows (of x), outputs and inputs of a program's tile; warps a program; loads in flight.

    swapped: the weights are the product's left operand, whose side of 64 is what Hopper's and Blackwell's
    warp-group instructions need; with 16 rows of x on the left they are not emitted.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    swapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKWorkspace:
    """Scratch memory of a split product; may be reused by later launches that need no more.

    | tensor  | dtype | shape                                      |
    |---------|-------|--------------------------------------------|
    | partial | fp32  | [splits · m · n] or more                   |
    | arrived | int32 | [tiles] or more, zero before and after     |
    """

    partial: Tensor
    arrived: Tensor


def new_split_k_workspace(*, splits: int, m: int, n: int, tiles: int, device: Tensor) -> SplitKWorkspace:
    """Scratch memory on `device`'s device: 4 · (splits · m · n + tiles) bytes."""
    import torch

    return SplitKWorkspace(
        partial=torch.empty(splits * m * n, dtype=torch.float32, device=device.device),
        arrived=torch.zeros(tiles, dtype=torch.int32, device=device.device),
    )


def largest_workspace(device: Tensor) -> SplitKWorkspace:
    """Scratch for every product whose splits `choose_split_k` chose, one after another: zeroed only once.

    A product is split where its tiles are fewer than the programs wanted, into less than twice as many.
    """
    import torch

    programs = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device)
    return SplitKWorkspace(
        partial=torch.empty(2 * programs * LARGEST_TILE, dtype=torch.float32, device=device.device),
        arrived=torch.zeros(programs, dtype=torch.int32, device=device.device),
    )


def choose_split_k(*, tiles: int, steps: int, device: Tensor) -> int:
    """Enough programs to fill the GPU, at least two steps a split, at most 16 splits."""
    return max(
        1, min(-(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // tiles), steps // 2, MOST_SPLITS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKLaunch:
    """How a product is spread over programs: `grid` is [columns of tiles, rows of tiles, splits].

    `out` is contiguous [m, n]; `partial` and `arrived` as in SplitKWorkspace, unused for one split.
    """

    grid: tuple[int, int, int]
    out: Tensor
    partial: Tensor
    arrived: Tensor

    @property
    def splits(self) -> int:
        """Programs that share one tile."""
        return self.grid[2]


def spread(
    *,
    m: int,
    n: int,
    steps: int,
    block_m: int,
    block_n: int,
    dtype: torch.dtype,
    device: Tensor,
    splits: int | None,
    workspace: SplitKWorkspace | None,
    out: Tensor | None,
) -> SplitKLaunch:
    """Tiles of an [m, n] output, inputs walked in `steps`; splits, scratch and output where not given.

    Raises ValueError for an `out` of another shape or dtype.
    """
    import torch

    columns, rows = -(-n // block_n), -(-m // block_m)
    splits = splits or choose_split_k(tiles=rows * columns, steps=steps, device=device)
    if out is None:
        out = torch.empty(m, n, dtype=dtype, device=device.device)
    if out.shape != (m, n) or out.dtype != dtype or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous {dtype} {[m, n]}")
    if workspace is None and splits > 1:
        workspace = new_split_k_workspace(splits=splits, m=m, n=n, tiles=rows * columns, device=device)
    # A launch takes tensors, whether they are used or not.
    partial, arrived = (out, out) if workspace is None else (workspace.partial, workspace.arrived)
    return SplitKLaunch(grid=(columns, rows, splits), out=out, partial=partial, arrived=arrived)


@jit
def finish_split_k(  # type: ignore[no-untyped-def]
    out,
    accumulator,
    row_scale,
    column_scale,
    partial,
    arrived,
    row,
    column,
    m,
    n,
    tile,
    split,
    splits,
    single: tl.constexpr,
):
    """out[row, column] = (Σ over splits of accumulator) · row_scale · column_scale, by the last to arrive.

    | argument                | dtype | shape                                  |
    |-------------------------|-------|----------------------------------------|
    | out                     | any   | [m, n], contiguous                     |
    | accumulator             | fp32  | [rows, columns] of this program        |
    | row_scale, column_scale | fp32  | [rows], [columns]                      |
    | row, column             | int   | [rows], [columns], where they are in out |
    | partial, arrived        | as in SplitKWorkspace                          |
    """
    mask = (row < m)[:, None] & (column < n)[None, :]
    at = row[:, None].to(tl.int64) * n + column[None, :]
    scale = row_scale[:, None] * column_scale[None, :]
    if single:
        tl.store(out + at, (accumulator * scale).to(out.dtype.element_ty), mask=mask)
    else:
        size = m.to(tl.int64) * n
        tl.store(partial + split * size + at, accumulator, mask=mask)
        tl.debug_barrier()  # every thread's stores come before the counter's release
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
            total = tl.zeros(accumulator.shape, tl.float32)
            for other in range(splits):
                # .cg: read past L1, which may hold what another multiprocessor has since written.
                total += tl.load(partial + other * size + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=mask)
            tl.store(arrived + tile, 0)
