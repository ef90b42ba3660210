"""Split-KV: several programs share one sequence's cache, and their partial softmaxes are combined.

Each split s leaves its own normalised output o_s and the base-2 logarithm of its softmax sum e_s:

    out = Σ_s 2^(e_s - max e) · o_s / Σ_s 2^(e_s - max e)

by the last program of the tile to arrive (one launch), or by a second launch. Both run the same code
in the same order, so they agree to the bit. Used by `paged_attention_decode` and `mla_decode`.
Source: Flash-Decoding, pytorch.org/blog/flash-decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from capplan.kernels.device_code import jit, multiprocessors, tl

if TYPE_CHECKING:
    from torch import Tensor

Combine = Literal["last_program", "second_launch"]
MOST_SPLITS: Final = 128
PROGRAMS_PER_MULTIPROCESSOR: Final = 2
TILES_PER_SPLIT: Final = 2  # a shorter split costs more in the combine than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWorkspace:
    """Scratch memory of a split launch; may be reused by every later launch of the same or fewer splits.

    | tensor  | dtype | shape                                                          |
    |---------|-------|----------------------------------------------------------------|
    | partial | fp32  | [tiles, splits, rows, columns]: one tile is (sequence, heads)  |
    | lse     | fp32  | [tiles, splits, rows], base 2                                  |
    | arrived | int32 | [tiles], zero before and after every launch                    |
    """

    partial: Tensor
    lse: Tensor
    arrived: Tensor

    @property
    def splits(self) -> int:
        """Splits that there is room for."""
        return int(self.lse.shape[1])


def new_workspace(*, tiles: int, splits: int, rows: int, columns: int, device: Tensor) -> SplitWorkspace:
    """Scratch memory on `device`'s device: 4 · tiles · (splits · rows · (columns + 1) + 1) bytes."""
    import torch

    return SplitWorkspace(
        partial=torch.empty(tiles, splits, rows, columns, dtype=torch.float32, device=device.device),
        lse=torch.empty(tiles, splits, rows, dtype=torch.float32, device=device.device),
        arrived=torch.zeros(tiles, dtype=torch.int32, device=device.device),
    )


def choose_splits(*, tiles: int, longest: int, block_n: int, device: Tensor) -> int:
    """Enough programs to fill the GPU, no split shorter than two tiles of block_n tokens.

    min(ceil(2 · multiprocessors / tiles), ceil(longest / (2 · block_n)), 128), at least 1
    """
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // tiles)
    useful = -(-longest // (TILES_PER_SPLIT * block_n))
    return max(1, min(wanted, useful, MOST_SPLITS))


def check_split(splits: int | None, combine: str, workspace: SplitWorkspace | None) -> None:
    """Raise ValueError for a number of splits or a way to combine that does not exist."""
    if splits is not None and not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"splits: expected 1 to {MOST_SPLITS}, got {splits}")
    if combine not in ("last_program", "second_launch"):
        raise ValueError(f"combine: expected last_program or second_launch, got {combine!r}")
    if workspace is not None and splits is not None and workspace.splits < splits:
        raise ValueError(f"workspace: room for {workspace.splits} splits, {splits} asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLaunch:
    """How decode attention is spread: `splits` of every sequence, `head_tiles` of its heads, `batch`.

    `out` is contiguous [batch, heads, columns]; the scratch is SplitWorkspace's, unused for one split.
    """

    grid: tuple[int, int, int]
    out: Tensor
    scratch: tuple[Tensor, Tensor, Tensor]

    @property
    def splits(self) -> int:
        """Programs that share a sequence and a tile of its heads."""
        return self.grid[0]

    def combine(
        self, combine: Combine, *, rows_per_tile: int, out_scale: float, rows: int, columns: int
    ) -> None:
        """The second launch, where it was asked for and there is more than one split."""
        if self.splits == 1 or combine == "last_program":
            return
        _, head_tiles, batch = self.grid
        combine_kernel[(head_tiles * batch,)](
            self.out,
            *self.scratch[:2],
            self.splits,
            head_tiles,
            self.out.shape[1],
            rows_per_tile,
            self.out.shape[2],
            out_scale,
            rows_size=rows,
            columns_size=columns,
        )


def spread(
    query: Tensor,
    *,
    head_tiles: int,
    out_columns: int,
    rows: int,
    columns: int,
    longest: int,
    block_n: int,
    splits: int | None,
    workspace: SplitWorkspace | None,
    out: Tensor | None,
) -> SplitLaunch:
    """Splits, scratch and output where they are not given; a tile of heads is [rows, columns].

    query [batch, heads, …]; `longest` context in tokens, `block_n` tokens a loop iteration.
    Raises ValueError for an `out` of another shape or dtype.
    """
    import torch

    shape = (query.shape[0], query.shape[1], out_columns)
    if out is None:
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    if out.shape != shape or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous {query.dtype} {list(shape)}")
    tiles = shape[0] * head_tiles
    splits = splits or choose_splits(tiles=tiles, longest=longest, block_n=block_n, device=query)
    if workspace is None and splits > 1:
        workspace = new_workspace(tiles=tiles, splits=splits, rows=rows, columns=columns, device=query)
    # A launch takes tensors, whether they are used or not.
    scratch = (out, out, out) if workspace is None else (workspace.partial, workspace.lse, workspace.arrived)
    return SplitLaunch(grid=(splits, head_tiles, shape[0]), out=out, scratch=scratch)


@jit
def combine_splits(  # type: ignore[no-untyped-def]
    partial, lse, tile, splits, rows_size: tl.constexpr, columns_size: tl.constexpr
):
    """The weighted mean of a tile's splits: fp32 [rows_size, columns_size]."""
    rows = tl.arange(0, rows_size)
    columns = tl.arange(0, columns_size)
    first = tile.to(tl.int64) * splits * rows_size
    highest = tl.full([rows_size], -float("inf"), tl.float32)
    total = tl.zeros([rows_size], tl.float32)
    mean = tl.zeros([rows_size, columns_size], tl.float32)
    for split in range(splits):
        at = first + split * rows_size + rows
        # .cg: read past L1, which may hold what another multiprocessor has since written.
        logarithm = tl.load(lse + at, cache_modifier=".cg")
        value = tl.load(partial + at[:, None] * columns_size + columns[None, :], cache_modifier=".cg")
        higher = tl.maximum(highest, logarithm)
        # A split with no token has -inf; (-inf) - (-inf) would be NaN.
        old = tl.where(highest == -float("inf"), 0.0, tl.exp2(highest - higher))
        new = tl.where(logarithm == -float("inf"), 0.0, tl.exp2(logarithm - higher))
        mean = mean * old[:, None] + value * new[:, None]
        total = total * old + new
        highest = higher
    return mean / total[:, None]


@jit
def store_tile(  # type: ignore[no-untyped-def]
    out,
    values,
    tile,
    tiles_per_sequence,
    heads,
    rows_per_tile,
    columns_used,
    rows_size: tl.constexpr,
    columns_size: tl.constexpr,
):
    """Write one tile's [rows_size, columns_size] to out [batch, heads, columns_used], as out's dtype."""
    rows = tl.arange(0, rows_size)
    columns = tl.arange(0, columns_size)
    head = (tile % tiles_per_sequence) * rows_per_tile + rows
    row = (tile // tiles_per_sequence).to(tl.int64) * heads + head
    mask = ((rows < rows_per_tile) & (head < heads))[:, None] & (columns < columns_used)[None, :]
    tl.store(out + row[:, None] * columns_used + columns[None, :], values.to(out.dtype.element_ty), mask=mask)


@jit
def finish_split(  # type: ignore[no-untyped-def]
    out,
    accumulator,
    denominator,
    highest,
    partial,
    lse,
    arrived,
    tile,
    split,
    splits,
    tiles_per_sequence,
    heads,
    rows_per_tile,
    columns_used,
    out_scale,
    rows_size: tl.constexpr,
    columns_size: tl.constexpr,
    single: tl.constexpr,
    last_program: tl.constexpr,
):
    """End of one split: the answer if it is the only one, else its part, combined by the last to arrive."""
    if single:
        store_tile(
            out,
            accumulator / denominator[:, None] * out_scale,
            tile,
            tiles_per_sequence,
            heads,
            rows_per_tile,
            columns_used,
            rows_size,
            columns_size,
        )
    else:
        rows = tl.arange(0, rows_size)
        columns = tl.arange(0, columns_size)
        at = tile.to(tl.int64) * splits * rows_size + split * rows_size + rows
        safe = tl.where(denominator > 0, denominator, 1.0)
        value = accumulator / safe[:, None]
        logarithm = tl.where(denominator > 0, highest + tl.log2(safe), -float("inf"))
        tl.store(partial + at[:, None] * columns_size + columns[None, :], value)
        tl.store(lse + at, logarithm)
        if last_program:
            tl.debug_barrier()  # every thread's stores come before the counter's release
            if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1:
                mean = combine_splits(partial, lse, tile, splits, rows_size, columns_size)
                store_tile(
                    out,
                    mean * out_scale,
                    tile,
                    tiles_per_sequence,
                    heads,
                    rows_per_tile,
                    columns_used,
                    rows_size,
                    columns_size,
                )
                tl.store(arrived + tile, 0)


@jit
def combine_kernel(  # type: ignore[no-untyped-def]
    out,
    partial,
    lse,
    splits,
    tiles_per_sequence,
    heads,
    rows_per_tile,
    columns_used,
    out_scale,
    rows_size: tl.constexpr,
    columns_size: tl.constexpr,
):
    """The second launch: grid [tiles], tensors as in SplitWorkspace; out [batch, heads, columns_used]."""
    tile = tl.program_id(0)
    mean = combine_splits(partial, lse, tile, splits, rows_size, columns_size)
    store_tile(
        out,
        mean * out_scale,
        tile,
        tiles_per_sequence,
        heads,
        rows_per_tile,
        columns_used,
        rows_size,
        columns_size,
    )
