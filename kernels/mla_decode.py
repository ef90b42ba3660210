"""Decode attention over a latent cache (multi-head latent attention) in Triton, and its torch twins.

With the key and value up-projections absorbed into the query and the output, every query head reads one
shared row a token: its first `latent` entries are key and value at once, the other `rope` entries are
the positional part of the key. So the cache is read once for all heads of a tile.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

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
from capplan.kernels.paged_attention_decode import CPU_CHUNK_TOKENS, LOG2_E, DecodeTile
from capplan.kernels.split_kv import (
    Combine,
    SplitWorkspace,
    check_split,
    finish_split,
    spread,
)

if TYPE_CHECKING:
    from torch import Tensor

ROWS: Final = 16  # query heads a program, the smallest tensor-core tile


def choose_mla_tile(*, capability: tuple[int, int]) -> DecodeTile:
    """Without spills and within shared memory for a latent of 512, found by compiling alone."""
    small_memory = capability in ((8, 6), (8, 9), (12, 0))
    return DecodeTile(block_n=32, warps=8, stages=1 if small_memory else 2)


@jit
def mla_decode_kernel(  # type: ignore[no-untyped-def]
    query,
    cache,
    block_table,
    context_lens,
    out,
    partial,
    lse,
    arrived,
    score_scale,
    value_scale,
    heads,
    splits,
    query_stride_b,
    query_stride_h,
    stride_block,
    stride_slot,
    table_stride,
    rows: tl.constexpr,
    latent: tl.constexpr,
    rope: tl.constexpr,
    block_size: tl.constexpr,
    block_n: tl.constexpr,
    fp8: tl.constexpr,
    single: tl.constexpr,
    last_program: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [splits, ceil(heads / rows), batch]; tensors as in `mla_decode`, fp8 as in the paged kernel.

    score_scale = softmax_scale · cache_scale · log₂e, value_scale = cache_scale.
    """
    split = tl.program_id(0)
    head_tile = tl.program_id(1)
    sequence = tl.program_id(2)
    length = tl.load(context_lens + sequence)
    per_split = tl.cdiv(tl.cdiv(length, block_n), splits)
    low = split * per_split * block_n
    high = tl.minimum(low + per_split * block_n, length)

    head = head_tile * rows + tl.arange(0, rows)
    column = tl.arange(0, latent)
    rope_column = latent + tl.arange(0, rope)
    query_row = query + sequence * query_stride_b + head[:, None] * query_stride_h
    q = tl.load(query_row + column[None, :], mask=(head < heads)[:, None], other=0.0)
    q_rope = tl.load(query_row + rope_column[None, :], mask=(head < heads)[:, None], other=0.0)

    highest = tl.full([rows], -float("inf"), tl.float32)
    denominator = tl.zeros([rows], tl.float32)
    accumulator = tl.zeros([rows, latent], tl.float32)
    for start in tl.range(low, high, block_n, num_stages=stages):
        token = start + tl.arange(0, block_n)
        visible = token < high
        block = tl.load(block_table + sequence * table_stride + token // block_size, mask=visible, other=0)
        at = block.to(tl.int64) * stride_block + (token % block_size) * stride_slot
        kv = tl.load(cache + at[:, None] + column[None, :])
        k_rope = tl.load(cache + at[:, None] + rope_column[None, :])
        kv = e4m3_to(kv, q.dtype) if fp8 == "bits" else kv.to(q.dtype)
        k_rope = e4m3_to(k_rope, q.dtype) if fp8 == "bits" else k_rope.to(q.dtype)
        kv = tl.where(visible[:, None], kv, 0.0)  # a stale NaN times a zero weight is a NaN
        scores = tl.dot(widen(q), tl.trans(widen(kv)))
        scores = tl.dot(widen(q_rope), tl.trans(widen(k_rope)), scores) * score_scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(highest - higher)
        denominator = denominator * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None] + tl.dot(widen(weights.to(q.dtype)), widen(kv))
        highest = higher

    head_tiles = tl.cdiv(heads, rows)
    finish_split(
        out,
        accumulator,
        denominator,
        highest,
        partial,
        lse,
        arrived,
        sequence * head_tiles + head_tile,
        split,
        splits,
        head_tiles,
        heads,
        rows,
        latent,
        value_scale,
        rows,
        latent,
        single,
        last_program,
    )


def mla_decode(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    latent: int,
    softmax_scale: float,
    cache_scale: float = 1.0,
    max_context: int | None = None,
    splits: int | None = None,
    combine: Combine = "last_program",
    workspace: SplitWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one absorbed query token a sequence over its latent cache.

        w[t] = softmax_t(softmax_scale · cache_scale · query[b, h] · cache[t])
        out[b, h] = cache_scale · Σ_t w[t] · cache[t, :latent]

    | tensor       | dtype                   | shape                                             |
    |--------------|-------------------------|---------------------------------------------------|
    | query        | fp16/bf16 (fp32 on CPU) | [batch, heads, latent + rope], the last stride 1  |
    | cache        | as query, or fp8 e4m3   | [num_blocks, block_size, latent + rope], likewise |
    | block_table  | int32                   | [batch, max_blocks]                               |
    | context_lens | int32                   | [batch], each ≥ 1                                 |
    | out, returns | as query                | [batch, heads, latent], contiguous                |

    softmax_scale is that of the unabsorbed head, 1/√(128 + 64) for DeepSeek-V2 and -V3 without YaRN's factor.
    On a GPU latent and rope are powers of two from 16. Lengths and block ids are not checked.

    Raises ValueError, naming the tensor, for a wrong shape or dtype.
    """
    _check(query, cache, block_table, context_lens, latent)
    check_split(splits, combine, workspace)
    if query.device.type == "cpu":
        answer = mla_decode_cpu(
            query,
            cache,
            block_table,
            context_lens,
            latent=latent,
            softmax_scale=softmax_scale,
            cache_scale=cache_scale,
        )
        return answer if out is None else out.copy_(answer)
    return launch_mla_decode(
        query,
        cache,
        block_table,
        context_lens,
        latent=latent,
        softmax_scale=softmax_scale,
        cache_scale=cache_scale,
        max_context=max_context,
        splits=splits,
        combine=combine,
        workspace=workspace,
        out=out,
    )


def launch_mla_decode(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    latent: int,
    softmax_scale: float,
    cache_scale: float = 1.0,
    max_context: int | None = None,
    splits: int | None = None,
    combine: Combine = "last_program",
    native_fp8: bool = False,
    tile: DecodeTile | None = None,
    workspace: SplitWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as mla_decode."""
    import torch

    needs_triton("mla_decode")
    heads, width = query.shape[1:]
    rope, block_size = width - latent, cache.shape[1]
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"query: the kernel takes fp16 and bf16, got {query.dtype}")
    if any(size < 16 or size != power_of_two(size) for size in (latent, rope)):
        raise ValueError(f"latent, rope: expected powers of two from 16, got {latent}, {rope}")
    if query.stride(2) != 1 or cache.stride(2) != 1:
        raise ValueError("query, cache: the last dimension must be contiguous")
    tile = choose_mla_tile(capability=capability_of(query)) if tile is None else tile
    launch = spread(
        query, head_tiles=-(-heads // ROWS), out_columns=latent, rows=ROWS, columns=latent,
        longest=max_context or block_table.shape[1] * block_size, block_n=tile.block_n, splits=splits,
        workspace=workspace, out=out,
    )  # fmt: skip
    fp8 = "no"
    if cache.dtype == torch.float8_e4m3fn:
        fp8 = "native" if native_fp8 else "bits"
    mla_decode_kernel[launch.grid](
        query,
        cache.view(torch.uint8) if fp8 == "bits" else cache,
        block_table,
        context_lens,
        launch.out,
        *launch.scratch,
        softmax_scale * cache_scale * LOG2_E,
        cache_scale,
        heads,
        launch.splits,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        rows=ROWS,
        latent=latent,
        rope=rope,
        block_size=block_size,
        block_n=tile.block_n,
        fp8=fp8,
        single=launch.splits == 1,
        last_program=combine == "last_program",
        stages=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    launch.combine(combine, rows_per_tile=ROWS, out_scale=cache_scale, rows=ROWS, columns=latent)
    return launch.out


def mla_decode_cpu(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    latent: int,
    softmax_scale: float,
    cache_scale: float = 1.0,
) -> Tensor:
    """The CPU route, tensors as mla_decode: chunks of 512 tokens, two products in fp32, online softmax."""
    import torch

    block_size = cache.shape[1]
    output = query.new_empty(*query.shape[:2], latent)
    step = max(1, CPU_CHUNK_TOKENS // block_size)
    for sequence, length in enumerate(context_lens.tolist()):
        q = query[sequence].float()
        accumulator = q.new_zeros(q.shape[0], latent)
        denominator = q.new_zeros(q.shape[0], 1)
        highest = torch.full_like(denominator, -math.inf)
        columns = -(-length // block_size)
        for column in range(0, columns, step):
            blocks = block_table[sequence, column : min(column + step, columns)]
            count = length - column * block_size
            rows = widened(cache.index_select(0, blocks).flatten(0, 1)[:count], torch.float32)
            scores = (q @ rows.T).mul_(softmax_scale * cache_scale)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(higher).exp_()
            rescale = torch.exp(highest - higher)
            denominator = denominator * rescale + weights.sum(-1, keepdim=True)
            accumulator = accumulator * rescale + weights @ rows[:, :latent]
            highest = higher
        output[sequence] = accumulator.mul_(cache_scale).div_(denominator)
    return output


def mla_decode_reference(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    latent: int,
    softmax_scale: float,
    cache_scale: float = 1.0,
) -> Tensor:
    """The formula of mla_decode in float64, a sequence at a time; returns float64 [batch, heads, latent]."""
    import torch

    _check(query, cache, block_table, context_lens, latent)
    outputs = []
    for sequence, length in enumerate(context_lens.tolist()):
        blocks = block_table[sequence, : -(-length // cache.shape[1])].long()
        rows = cache[blocks].double().flatten(0, 1)[:length] * cache_scale
        weights = torch.softmax(query[sequence].double() @ rows.T * softmax_scale, -1)
        outputs.append(weights @ rows[:, :latent])
    return torch.stack(outputs)


def _check(query: Tensor, cache: Tensor, block_table: Tensor, context_lens: Tensor, latent: int) -> None:
    import torch

    if query.ndim != 3 or not 0 < latent < query.shape[2]:
        raise ValueError(f"query: expected [batch, heads, {latent} + rope], got {list(query.shape)}")
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"query: expected fp16, bf16 or fp32, got {query.dtype}")
    if cache.ndim != 3 or cache.shape[2] != query.shape[2]:
        raise ValueError(
            f"cache: expected [num_blocks, block_size, {query.shape[2]}], got {list(cache.shape)}"
        )
    if cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise ValueError(f"cache: expected {query.dtype} or fp8 e4m3, got {cache.dtype}")
    for name, tensor, dims in (("block_table", block_table, 2), ("context_lens", context_lens, 1)):
        if tensor.ndim != dims or tensor.dtype != torch.int32 or tensor.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name}: expected int32, {dims} dimensions, {query.shape[0]} sequences, "
                f"got {tensor.dtype} {list(tensor.shape)}"
            )
