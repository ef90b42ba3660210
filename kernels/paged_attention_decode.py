"""Paged-attention decode in Triton: one launch a step, or two, over a cache in blocks.

One program takes all query heads of one KV head (padded to 16, the smallest tensor-core tile), so each
cached token is read once, and one split of the sequence's tokens (`split_kv`). On CPU tensors the
wrapper takes the fastest torch route instead: chunks of 512 tokens, grouped `bmm`, online softmax.
The reference is `paged_attention.paged_attention_reference`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from capplan.kernels.device_code import (
    capability_of,
    e4m3_to,
    jit,
    needs_triton,
    power_of_two,
    tl,
    widen,
    widened,
)
from capplan.kernels.paged_attention import check_shapes, first_visible
from capplan.kernels.split_kv import (
    Combine,
    SplitWorkspace,
    check_split,
    choose_splits,
    finish_split,
    new_workspace,
    spread,
)

if TYPE_CHECKING:
    from torch import Tensor

LOG2_E: Final = 1.4426950408889634  # the kernel's softmax is in base 2, one instruction an element
SHORTEST_TILE: Final = 32  # tokens of the shortest tile that choose_tile gives
CPU_CHUNK_TOKENS: Final = 512  # K and V of a chunk stay in cache between gather and product


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Tokens a loop iteration, warps a program, and iterations of loads in flight."""

    block_n: int
    warps: int
    stages: int


def choose_tile(*, head_dim: int, rows: int, fp8: bool, capability: tuple[int, int]) -> DecodeTile:
    """A tile without register spills that fits the chip's shared memory.

    Found by compiling alone. 128-token tiles on 4 warps spill when FP8 is unpacked; a wide head or many
    query heads (rows) need more warps to hold the accumulator; sm_86 and sm_89 have 100 KiB shared.
    On sm_100 unpacking spills on 4 warps with 64 tokens too.
    """
    large = head_dim > 128 or rows > 32
    small_memory = capability in ((8, 6), (8, 9), (12, 0))
    return DecodeTile(
        block_n=32 if head_dim > 128 else 64,
        warps=8 if large or (fp8 and capability >= (10, 0)) else 4,
        stages=2 if large and small_memory else 3,
    )


@jit
def load_rows(pointers, head_dim: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """[tokens, columns], zero past head_dim; without a mask where there is nothing past it."""
    if columns == head_dim:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(tl.arange(0, columns) < head_dim)[None, :], other=0)


@jit
def paged_decode_kernel(  # type: ignore[no-untyped-def]
    query,
    key_cache,
    value_cache,
    block_table,
    context_lens,
    out,
    partial,
    lse,
    arrived,
    score_scale,
    value_scale,
    window,
    splits,
    kv_heads,
    query_stride_b,
    query_stride_h,
    stride_block,
    stride_slot,
    stride_head,
    table_stride,
    group: tl.constexpr,
    rows: tl.constexpr,
    head_dim: tl.constexpr,
    columns: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    windowed: tl.constexpr,
    fp8: tl.constexpr,
    single: tl.constexpr,
    last_program: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [splits, kv_heads, batch]; a split's programs of one sequence run side by side.

    | argument     | dtype                           | shape                                           |
    |--------------|---------------------------------|-------------------------------------------------|
    | query        | fp16/bf16                       | [batch, kv_heads · group, head_dim], last stride 1 |
    | key_cache    | as query, fp8 e4m3 or its uint8 | [num_blocks, block_size, kv_heads, head_dim]    |
    | value_cache  | as key_cache                    | as key_cache                                    |
    | block_table  | int32                           | [batch, max_blocks]                             |
    | context_lens | int32                           | [batch]                                         |
    | out          | as query                        | as query, contiguous                            |
    | partial, lse, arrived | as in SplitWorkspace   | of these rows and columns                       |

    head_dim is contiguous in all. score_scale = softmax_scale · k_scale · log₂e; window in tokens, read where
    windowed; rows and columns are group and head_dim rounded up to powers of two (rows ≥ 16); fp8: "no",
    "bits" or "native".
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(context_lens + sequence)
    first = 0
    if windowed:
        first = tl.maximum(length - window, 0)
    # Whole tiles a split, so that no tile is read twice.
    first_tile = first // block_n
    tiles = tl.cdiv(length, block_n) - first_tile
    per_split = tl.cdiv(tiles, splits)
    low = (first_tile + split * per_split) * block_n
    high = tl.minimum(low + per_split * block_n, length)

    row = tl.arange(0, rows)
    column = tl.arange(0, columns)
    query_mask = (row < group)[:, None] & (column < head_dim)[None, :]
    query_at = sequence * query_stride_b + (kv_head * group + row)[:, None] * query_stride_h + column[None, :]
    q = tl.load(query + query_at, mask=query_mask, other=0.0)

    highest = tl.full([rows], -float("inf"), tl.float32)
    denominator = tl.zeros([rows], tl.float32)
    accumulator = tl.zeros([rows, columns], tl.float32)
    for start in tl.range(low, high, block_n, num_stages=stages):
        token = start + tl.arange(0, block_n)
        visible = (token < high) & (token >= first)
        block = tl.load(block_table + sequence * table_stride + token // block_size, mask=visible, other=0)
        slot = token % block_size
        at = block.to(tl.int64) * stride_block + slot * stride_slot + kv_head * stride_head
        # Slots that are not visible read block 0, in bounds, and are masked after the load.
        k = load_rows(key_cache + at[:, None] + column[None, :], head_dim, columns)
        k = e4m3_to(k, q.dtype) if fp8 == "bits" else k.to(q.dtype)
        scores = tl.dot(widen(q), tl.trans(widen(k))) * score_scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(highest - higher)
        denominator = denominator * rescale + tl.sum(weights, 1)
        v = load_rows(value_cache + at[:, None] + column[None, :], head_dim, columns)
        v = e4m3_to(v, q.dtype) if fp8 == "bits" else v.to(q.dtype)
        v = tl.where(visible[:, None], v, 0.0)  # a stale NaN times a zero weight is a NaN
        accumulator = accumulator * rescale[:, None] + tl.dot(widen(weights.to(q.dtype)), widen(v))
        highest = higher

    finish_split(
        out,
        accumulator,
        denominator,
        highest,
        partial,
        lse,
        arrived,
        sequence * kv_heads + kv_head,
        split,
        splits,
        kv_heads,
        kv_heads * group,
        group,
        head_dim,
        value_scale,
        rows,
        columns,
        single,
        last_program,
    )


def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context: int | None = None,
    splits: int | None = None,
    combine: Combine = "last_program",
    native_fp8: bool = False,
    workspace: SplitWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query token a sequence over its own cached tokens; see the reference's docstring.

    | tensor       | dtype                          | shape                                            |
    |--------------|--------------------------------|--------------------------------------------------|
    | query        | fp16/bf16 (fp32 on CPU)        | [batch, heads, head_dim], the last stride 1      |
    | key_cache    | as query, or fp8 e4m3          | [num_blocks, block_size, kv_heads, head_dim]    |
    | value_cache  | as key_cache                   | as key_cache                                     |
    | block_table  | int32                          | [batch, max_blocks]                              |
    | context_lens | int32                          | [batch], each ≥ 1, the query's own token counted |
    | out, returns | as query                       | [batch, heads, head_dim], contiguous             |

    head_dim is contiguous in all of them; the caches' other strides are free, but the same for both. k_scale
    and v_scale multiply an FP8 cache's values. max_context is the longest context that the launch must cope
    with well (the block table's room unless given); it decides the splits, never the answer. native_fp8
    converts with the GPU's own instructions (sm_89 and later) instead of integer ones. Shapes and dtypes are
    checked; lengths and block ids, which are on the device, are not. On a GPU it waits for nothing: with
    `workspace` and `out` given it allocates nothing and can be captured.

    Raises ValueError, naming the tensor, for a wrong shape, dtype or device.
    """
    check_shapes(query, key_cache, value_cache, block_table, context_lens)
    check_split(splits, combine, workspace)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale,
        "window": window,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if query.device.type == "cpu":
        answer = paged_attention_decode_cpu(
            query, key_cache, value_cache, block_table, context_lens, **options
        )
        return answer if out is None else out.copy_(answer)
    return launch_paged_decode(
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        max_context=max_context,
        splits=splits,
        combine=combine,
        native_fp8=native_fp8,
        workspace=workspace,
        out=out,
        **options,
    )


def decode_workspace(
    *, batch: int, heads: int, kv_heads: int, head_dim: int, longest: int, device: Tensor
) -> SplitWorkspace:
    """Scratch of every launch with these sizes whose splits are chosen for up to `longest` tokens."""
    tiles = batch * kv_heads
    rows, columns = tile_of(group=heads // kv_heads, head_dim=head_dim)
    splits = choose_splits(tiles=tiles, longest=longest, block_n=SHORTEST_TILE, device=device)
    return new_workspace(tiles=tiles, splits=splits, rows=rows, columns=columns, device=device)


def tile_of(*, group: int, head_dim: int) -> tuple[int, int]:
    """Rows and columns of a program's tile of the output: powers of two, from a tensor core's 16."""
    return max(16, power_of_two(group)), max(16, power_of_two(head_dim))


def launch_paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context: int | None = None,
    splits: int | None = None,
    combine: Combine = "last_program",
    native_fp8: bool = False,
    tile: DecodeTile | None = None,
    workspace: SplitWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as paged_attention_decode."""
    import torch

    needs_triton("paged_attention_decode")
    heads, head_dim = query.shape[1:]
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = heads // kv_heads
    rows, columns = tile_of(group=group, head_dim=head_dim)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"query: the kernel takes fp16 and bf16, got {query.dtype}")
    if rows > 128:
        raise ValueError(f"query: {group} query heads a KV head, the kernel takes up to 128")
    if query.stride(2) != 1 or key_cache.stride(3) != 1:
        raise ValueError("query, key_cache: head_dim must be contiguous")
    if value_cache.stride() != key_cache.stride():
        raise ValueError(
            f"value_cache: expected key_cache's strides {key_cache.stride()}, got {value_cache.stride()}"
        )
    if tile is None:
        fp8_cache = key_cache.dtype == torch.float8_e4m3fn
        tile = choose_tile(head_dim=columns, rows=rows, fp8=fp8_cache, capability=capability_of(query))
    longest = max_context or block_table.shape[1] * block_size
    if window is not None:
        longest = min(longest, window + tile.block_n)
    launch = spread(
        query, head_tiles=kv_heads, out_columns=head_dim, rows=rows, columns=columns, longest=longest,
        block_n=tile.block_n, splits=splits, workspace=workspace, out=out,
    )  # fmt: skip
    fp8 = "no"
    if key_cache.dtype == torch.float8_e4m3fn:
        # A masked load of the fp8 type, which a padded head needs, does not compile.
        fp8 = "native" if native_fp8 and columns == head_dim else "bits"
    bits = fp8 == "bits"
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    paged_decode_kernel[launch.grid](
        query,
        key_cache.view(torch.uint8) if bits else key_cache,
        value_cache.view(torch.uint8) if bits else value_cache,
        block_table,
        context_lens,
        launch.out,
        *launch.scratch,
        scale * k_scale * LOG2_E,
        v_scale,
        window or 0,
        launch.splits,
        kv_heads,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        block_table.stride(0),
        group=group,
        rows=rows,
        head_dim=head_dim,
        columns=columns,
        block_size=block_size,
        block_n=tile.block_n,
        windowed=window is not None,
        fp8=fp8,
        single=launch.splits == 1,
        last_program=combine == "last_program",
        stages=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    launch.combine(combine, rows_per_tile=group, out_scale=v_scale, rows=rows, columns=columns)
    return launch.out


def paged_attention_decode_cpu(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """The CPU route, tensors as paged_attention_decode: gather a chunk, two `bmm`, online softmax.

    Fastest of the torch routes measured: SDPA with one query token is 8 to 14 times slower. A chunk is
    widened to fp32 first: bf16 `bmm` is 1.5 to 2.5 times slower even where the CPU multiplies bf16 itself,
    5 to 13 times where it does not, and rounds the scores to 8 bits.
    """
    import torch

    batch, heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1], key_cache.shape[2]
    scale = (head_dim**-0.5 if softmax_scale is None else softmax_scale) * k_scale
    output = torch.empty(batch, kv_heads, heads // kv_heads, head_dim, dtype=query.dtype)
    grouped = query.reshape(output.shape).float()
    step = max(1, CPU_CHUNK_TOKENS // block_size)

    for sequence, length in enumerate(context_lens.tolist()):
        first = first_visible(length, window)
        accumulator = torch.zeros(output.shape[1:])
        denominator = accumulator.new_zeros((*output.shape[1:3], 1))
        highest = torch.full_like(denominator, -math.inf)
        for column in range(first // block_size, -(-length // block_size), step):
            start = column * block_size
            # Sliced, not masked: a stale NaN beyond the context times a zero weight is a NaN.
            tokens = slice(max(first - start, 0), min(length - start, step * block_size))
            last = min(column + step, -(-length // block_size))
            blocks = block_table[sequence, column:last]
            keys, values = (
                widened(cache.index_select(0, blocks).flatten(0, 1)[tokens], torch.float32).transpose(0, 1)
                for cache in (key_cache, value_cache)
            )  # [kv_heads, tokens, head_dim]
            scores = torch.bmm(grouped[sequence], keys.transpose(1, 2)).mul_(scale)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(higher).exp_()
            rescale = torch.exp(highest - higher)
            denominator = denominator * rescale + weights.sum(-1, keepdim=True)
            accumulator = accumulator * rescale + torch.bmm(weights, values)
            highest = higher
        output[sequence] = accumulator.mul_(v_scale).div_(denominator)
    return output.view(batch, heads, head_dim)
