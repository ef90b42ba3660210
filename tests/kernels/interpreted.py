"""What the interpreter runs: every Triton kernel on small shapes, against float64.

Not a test module: `test_interpreted.py` runs it in a process of its own, where TRITON_INTERPRET=1 stands
before triton is imported, and reads one JSON object from it: case → relative error, or what was raised.
    TRITON_INTERPRET=1 python tests/kernels/interpreted.py [WORD]        # only cases with WORD in their name
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CASES: dict[str, Callable[[], float]] = {}


def case(name: str, check: Callable[..., float], **arguments: Any) -> None:
    """One more case; names are unique."""
    assert name not in CASES, name
    CASES[name] = lambda: check(**arguments)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The worst row's ‖got - expected‖ / ‖expected‖ in float64; infinite where got is not finite."""
    got, expected = (each.double().reshape(len(each), -1) for each in (got, expected))
    if not torch.isfinite(got).all():
        return math.inf
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


def block_table(lengths: list[int], block_size: int) -> Tensor:
    """Shuffled blocks from 1 for each sequence's tokens; an id that does not exist where none is needed."""
    columns = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(columns), generator=generator(1)).to(torch.int32) + 1
    table = torch.full((len(lengths), max(columns) + 1), 2**30, dtype=torch.int32)
    for row, own in enumerate(ids.split(columns)):
        table[row, : len(own)] = own
    return table


def filled_cache(
    table: Tensor, lengths: list[int], block_size: int, row: tuple[int, ...], dtype: torch.dtype, seed: int
) -> Tensor:
    """Random tokens in their blocks' slots, NaN in every other slot and in block 0.

    A kernel reads block 0 in place of a token that is not there.
    """
    blocks = 1 + sum(-(-length // block_size) for length in lengths)
    cache = torch.randn(blocks, block_size, *row, generator=generator(seed))
    cache[0] = math.nan
    for sequence, length in enumerate(lengths):
        if length % block_size:
            cache[table[sequence, length // block_size].long(), length % block_size :] = math.nan
    return cache.to(dtype)


def exact_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float, window: int | None
) -> Tensor:
    """Float64; query [batch, heads, d], keys and values a sequence: [tokens, kv_heads, d or dv]."""
    outputs = []
    for q, k, v in zip(query.double(), keys, values, strict=True):
        group = q.shape[0] // k.shape[1]
        k, v = (each.double().repeat_interleave(group, 1) for each in (k, v))
        first = 0 if window is None else max(0, k.shape[0] - window)
        scores = torch.einsum("hd,nhd->hn", q, k[first:]) * scale
        outputs.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v[first:]))
    return torch.stack(outputs)


def tokens_of(cache: Tensor, table: Tensor, lengths: list[int]) -> list[Tensor]:
    """The written tokens of each sequence, in order: float64 [length, …]."""
    block_size = cache.shape[1]
    return [
        cache[table[row, : -(-length // block_size)].long()].double().flatten(0, 1)[:length]
        for row, length in enumerate(lengths)
    ]


def paged(
    *,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "bfloat16",
    fp8: bool = False,
    native_fp8: bool = False,
    window: int | None = None,
    splits: int = 1,
    heads_first: bool = False,
) -> float:
    from capplan.kernels.paged_attention_decode import choose_tile, launch_paged_decode
    from capplan.kernels.split_kv import new_workspace

    kind = getattr(torch, dtype)
    cache_kind = torch.float8_e4m3fn if fp8 else kind
    table = block_table(lengths, block_size)
    keys, values = (
        filled_cache(table, lengths, block_size, (kv_heads, head_dim), cache_kind, seed) for seed in (2, 3)
    )
    if heads_first:  # the other common physical layout, [blocks, kv_heads, block_size, head_dim]
        keys, values = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys, values))
    query = torch.randn(len(lengths), heads, head_dim, generator=generator(3)).to(kind)
    scales = {"k_scale": 0.5, "v_scale": 1.5} if fp8 else {"k_scale": 1.0, "v_scale": 1.0}
    expected = (
        exact_attention(
            query,
            tokens_of(keys, table, lengths),
            tokens_of(values, table, lengths),
            head_dim**-0.5 * scales["k_scale"],
            window,
        )
        * scales["v_scale"]
    )
    rows, columns = max(16, 1 << (heads // kv_heads - 1).bit_length()), 1 << (head_dim - 1).bit_length()
    tile = choose_tile(head_dim=columns, rows=rows, fp8=fp8, capability=(9, 0))
    workspace = new_workspace(
        tiles=len(lengths) * kv_heads, splits=splits, rows=rows, columns=columns, device=query
    )
    workspace.partial.fill_(math.nan)
    workspace.lse.fill_(math.nan)
    outputs = []
    for combine in ("last_program", "second_launch", "last_program") if splits > 1 else ("last_program",):
        outputs.append(
            launch_paged_decode(
                query,
                keys,
                values,
                table,
                torch.tensor(lengths, dtype=torch.int32),
                window=window,
                splits=splits,
                combine=combine,  # type: ignore[arg-type]
                native_fp8=native_fp8,
                tile=tile,
                workspace=workspace,
                out=poisoned(*query.shape, dtype=kind),
                **scales,
            )
        )
        assert not workspace.arrived.any(), "counters left behind"
        assert len(outputs) == 1 or torch.equal(outputs[-1], outputs[0]), "one and two launches differ"
    return relative_error(outputs[0], expected)


RAGGED = [1, 16, 17, 64, 65, 150]
for block in (16, 32, 64):
    case(f"paged gqa, blocks of {block}", paged, lengths=RAGGED, heads=8, kv_heads=2, block_size=block)
case("paged blocks of 4", paged, lengths=[1, 5, 66], heads=4, kv_heads=2, block_size=4)
case("paged mha", paged, lengths=[37, 64], heads=4, kv_heads=4)
case("paged mqa", paged, lengths=[37, 70], heads=20, kv_heads=1)
case("paged odd group of 3", paged, lengths=[1, 70], heads=6, kv_heads=2)
case("paged odd group of 7", paged, lengths=[33, 129], heads=14, kv_heads=2, splits=2)
case("paged fp16", paged, lengths=[5, 90], heads=4, kv_heads=2, dtype="float16")
case("paged head of 128", paged, lengths=[140], heads=4, kv_heads=1, head_dim=128, splits=3)
case("paged head of 80", paged, lengths=[1, 70], heads=4, kv_heads=2, head_dim=80)
case("paged head of 256", paged, lengths=[70], heads=4, kv_heads=2, head_dim=256, splits=2)
case("paged heads-first cache", paged, lengths=[1, 70], heads=4, kv_heads=2, heads_first=True)
case("paged four splits", paged, lengths=[1, 64, 65, 290], heads=8, kv_heads=2, splits=4)
case("paged fp8 three splits", paged, lengths=[1, 129], heads=4, kv_heads=2, fp8=True, splits=3)
case("paged fp8 native", paged, lengths=[1, 70], heads=4, kv_heads=2, fp8=True, native_fp8=True)
case("paged fp8 fp16", paged, lengths=[31, 66], heads=4, kv_heads=2, fp8=True, dtype="float16", block_size=32)
case("paged window of 1", paged, lengths=[1, 16, 100], heads=4, kv_heads=2, window=1)
case("paged window of 50", paged, lengths=[1, 49, 51, 170], heads=4, kv_heads=2, window=50, splits=2)
case("paged window over all", paged, lengths=[1, 100], heads=4, kv_heads=2, window=4096)


def mla(
    *,
    lengths: list[int],
    heads: int,
    latent: int = 128,
    rope: int = 16,
    block_size: int = 16,
    dtype: str = "bfloat16",
    fp8: bool = False,
    splits: int = 1,
) -> float:
    from capplan.kernels.mla_decode import ROWS, launch_mla_decode, mla_decode_reference
    from capplan.kernels.split_kv import new_workspace

    kind = getattr(torch, dtype)
    table = block_table(lengths, block_size)
    cache = filled_cache(
        table, lengths, block_size, (latent + rope,), torch.float8_e4m3fn if fp8 else kind, 2
    )
    query = torch.randn(len(lengths), heads, latent + rope, generator=generator(3)).to(kind)
    options = {"latent": latent, "softmax_scale": 0.1, "cache_scale": 0.75 if fp8 else 1.0}
    context_lens = torch.tensor(lengths, dtype=torch.int32)
    expected = mla_decode_reference(query, cache, table, context_lens, **options)
    workspace = new_workspace(
        tiles=len(lengths) * -(-heads // ROWS), splits=splits, rows=ROWS, columns=latent, device=query
    )
    workspace.partial.fill_(math.nan)
    workspace.lse.fill_(math.nan)
    outputs = []
    for combine in ("last_program", "second_launch", "last_program") if splits > 1 else ("last_program",):
        outputs.append(
            launch_mla_decode(
                query,
                cache,
                table,
                context_lens,
                splits=splits,
                combine=combine,  # type: ignore[arg-type]
                workspace=workspace,
                out=poisoned(len(lengths), heads, latent, dtype=kind),
                **options,
            )
        )
        assert not workspace.arrived.any(), "counters left behind"
        assert len(outputs) == 1 or torch.equal(outputs[-1], outputs[0]), "one and two launches differ"
    return relative_error(outputs[0], expected)


case("mla one split", mla, lengths=[1, 16, 33, 65], heads=16)
case("mla odd heads", mla, lengths=[1, 40], heads=20)
case("mla few heads", mla, lengths=[70], heads=5, block_size=64)
case("mla 512 + 64", mla, lengths=[37], heads=16, latent=512, rope=64)
case("mla fp16", mla, lengths=[37, 3], heads=16, dtype="float16")
case("mla three splits", mla, lengths=[1, 64, 161], heads=20, splits=3)
case("mla fp8", mla, lengths=[1, 70], heads=16, fp8=True, splits=2, block_size=32)


def w4a16(
    *,
    m: int,
    n: int,
    k: int,
    group: int = 128,
    symmetric: bool = False,
    dtype: str = "bfloat16",
    splits: int = 1,
    swapped: bool = True,
    gemv: bool | None = None,
    through: str = "",
) -> float:
    from capplan.kernels import int4_packing
    from capplan.kernels.quantized_gemm import quantize_int4
    from capplan.kernels.split_k import GemmTile, new_split_k_workspace
    from capplan.kernels.w4a16_gemm import launch_w4a16, prepare_int4_gpu, w4a16_reference

    kind = getattr(torch, dtype)
    x = torch.randn(m, k, generator=generator(1)).to(kind)
    weight = quantize_int4(
        torch.randn(n, k, generator=generator(2)), group_size=group, symmetric=symmetric, scale_dtype=kind
    )
    expected = w4a16_reference(x, weight)
    if through == "gptq":
        weight = int4_packing.from_gptq(*int4_packing.to_gptq(weight))
    if through == "awq":
        weight = int4_packing.from_awq(*int4_packing.to_awq(weight))
    tile = GemmTile(block_m=16, block_n=64, block_k=group, warps=4, stages=3, swapped=swapped)
    workspace = new_split_k_workspace(splits=splits, m=m, n=n, tiles=-(-m // 16) * -(-n // 64), device=x)
    workspace.partial.fill_(math.nan)
    out = poisoned(m, n, dtype=kind)
    launch_w4a16(
        x, prepare_int4_gpu(weight, x), splits=splits, tile=tile, gemv=gemv, workspace=workspace, out=out
    )
    assert not workspace.arrived.any(), "counters left behind"
    return relative_error(out, expected)


for group in (32, 64, 128):
    case(f"w4a16 groups of {group}", w4a16, m=5, n=100, k=384, group=group)
    case(f"w4a16 symmetric, groups of {group}", w4a16, m=17, n=70, k=256, group=group, symmetric=True)
    case(f"w4a16 gemv, groups of {group}", w4a16, m=1, n=100, k=384, group=group)
case("w4a16 not swapped", w4a16, m=5, n=100, k=256, swapped=False)
case("w4a16 three splits", w4a16, m=17, n=100, k=640, splits=3)
case("w4a16 more splits than groups", w4a16, m=2, n=64, k=128, splits=3)
case("w4a16 gemv symmetric, three splits", w4a16, m=1, n=130, k=640, symmetric=True, splits=3)
case("w4a16 one row without gemv", w4a16, m=1, n=64, k=256, gemv=False)
case("w4a16 fp16", w4a16, m=3, n=64, k=256, dtype="float16")
case("w4a16 gemv fp16", w4a16, m=1, n=64, k=256, dtype="float16", splits=2)
case("w4a16 through gptq", w4a16, m=3, n=64, k=256, through="gptq")
case("w4a16 through awq", w4a16, m=1, n=64, k=256, through="awq")


def eight_bits(*shape: int, fp8: bool, seed: int) -> Tensor:
    values = torch.randn(*shape, generator=generator(seed))
    return (
        (values * 40).to(torch.float8_e4m3fn)
        if fp8
        else (values * 40).round().clamp(-127, 127).to(torch.int8)
    )


def w8a16(*, m: int, n: int, k: int, fp8: bool = False, dtype: str = "bfloat16", splits: int = 1) -> float:
    from capplan.kernels.split_k import new_split_k_workspace
    from capplan.kernels.w8a16_gemm import launch_w8a16, w8a16_reference

    kind = getattr(torch, dtype)
    x = torch.randn(m, k, generator=generator(1)).to(kind)
    weight = eight_bits(n, k, fp8=fp8, seed=2)
    scales = torch.rand(n, generator=generator(3)) + 0.1
    workspace = new_split_k_workspace(splits=splits, m=m, n=n, tiles=-(-m // 16) * -(-n // 64), device=x)
    workspace.partial.fill_(math.nan)
    out = poisoned(m, n, dtype=kind)
    launch_w8a16(x, weight, scales, splits=splits, workspace=workspace, out=out)
    assert not workspace.arrived.any(), "counters left behind"
    return relative_error(out, w8a16_reference(x, weight, scales))


case("w8a16 int8", w8a16, m=5, n=100, k=300)
case("w8a16 int8, two splits", w8a16, m=17, n=70, k=300, splits=2)
case("w8a16 fp16", w8a16, m=1, n=64, k=128, dtype="float16")
case("w8a16 fp8", w8a16, m=3, n=70, k=200, fp8=True)
case("w8a16 fp8 fp16", w8a16, m=3, n=70, k=200, fp8=True, dtype="float16", splits=2)


def w8a8(*, m: int, n: int, k: int, fp8: bool = False, unpack: bool = False, splits: int = 1) -> float:
    from capplan.kernels.split_k import new_split_k_workspace
    from capplan.kernels.w8a8_gemm import launch_w8a8, w8a8_reference

    x, weight = eight_bits(m, k, fp8=fp8, seed=1), eight_bits(n, k, fp8=fp8, seed=2)
    x_scales, weight_scales = (torch.rand(size, generator=generator(size)) + 0.1 for size in (m, n))
    workspace = new_split_k_workspace(splits=splits, m=m, n=n, tiles=-(-m // 16) * -(-n // 64), device=x)
    workspace.partial.fill_(math.nan)
    out = poisoned(m, n)
    launch_w8a8(
        x, weight, x_scales, weight_scales, splits=splits, unpack_fp8=unpack, workspace=workspace, out=out
    )
    assert not workspace.arrived.any(), "counters left behind"
    return relative_error(out, w8a8_reference(x, weight, x_scales, weight_scales))


case("w8a8 int8", w8a8, m=3, n=96, k=256)
case("w8a8 int8 tails, three splits", w8a8, m=20, n=70, k=300, splits=3)
case("w8a8 fp8", w8a8, m=3, n=96, k=256, fp8=True)
case("w8a8 fp8, two splits", w8a8, m=20, n=70, k=256, fp8=True, splits=2)
case("w8a8 fp8 unpacked, tails", w8a8, m=20, n=70, k=300, fp8=True, unpack=True)


def codes_apart(got: Tensor, expected: Tensor) -> float:
    """How many fp8 values are more than one code apart.

    The interpreter rounds to fp8 wrongly where a GPU rounds to nearest even: ties go up, and a value that
    rounds up to a power of two loses the carry and comes out as half of it. Such halves are let through.
    """
    distance = (got.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    return float(((distance > 1) & (got.float() * 2 != expected.float())).sum())


def quantized_rows(*, dtype: str) -> float:
    """The rows against the reference's, the scales exactly."""
    from capplan.kernels.quantize_rows import launch_quantize_rows, quantize_rows_reference

    x = torch.randn(3, 3000, generator=generator(1)).bfloat16()
    x[1] = 0
    got, scales = launch_quantize_rows(x, getattr(torch, dtype))
    expected, exact_scales = quantize_rows_reference(x, getattr(torch, dtype))
    assert torch.equal(scales, exact_scales)
    assert not got[1].float().any()
    if got.dtype == torch.float8_e4m3fn:
        return codes_apart(got, expected)
    rows = torch.tensor([0, 2])
    return relative_error(got.float()[rows], expected.float()[rows])


case("quantize_rows int8", quantized_rows, dtype="int8")
case("quantize_rows fp8", quantized_rows, dtype="float8_e4m3fn")


def rmsnorm(*, columns: int, residual: bool) -> float:
    from capplan.kernels.rmsnorm import launch_rmsnorm, rmsnorm_reference

    x, added = (torch.randn(3, columns, generator=generator(seed)).bfloat16() for seed in (1, 2))
    weight = torch.rand(columns, generator=generator(3)).bfloat16()
    other = added.clone() if residual else None
    expected, total = rmsnorm_reference(x, weight, eps=1e-5, residual=other)
    got = launch_rmsnorm(x, weight, eps=1e-5, residual=other)
    if other is not None:
        assert relative_error(other, total) < 4e-3
    return relative_error(got, expected)


case("rmsnorm", rmsnorm, columns=100, residual=False)
case("rmsnorm with residual", rmsnorm, columns=256, residual=True)


def silu_mul(*, columns: int) -> float:
    from capplan.kernels.silu_mul import launch_silu_mul, silu_mul_reference

    x = (torch.randn(3, 2 * columns, generator=generator(1)) * 4).bfloat16()
    return relative_error(launch_silu_mul(x), silu_mul_reference(x))


case("silu_mul", silu_mul, columns=1500)


def rope(*, head_dim: int, rotary_dim: int) -> float:
    from capplan.kernels.rope import launch_rope, rope_reference, rope_table

    query, key = (torch.randn(3, heads, head_dim, generator=generator(heads)).bfloat16() for heads in (5, 2))
    positions = torch.tensor([0, 7, 99], dtype=torch.int32)
    table = rope_table(positions=100, rotary_dim=rotary_dim, theta=1e4, like=query)
    expected = [rope_reference(each.double(), positions, table) for each in (query, key)]
    launch_rope(query, key, positions, table)
    return max(relative_error(query, expected[0]), relative_error(key, expected[1]))


case("rope", rope, head_dim=64, rotary_dim=64)
case("rope of a part, 48 of 80", rope, head_dim=80, rotary_dim=48)


def greedy(*, vocabulary: int) -> float:
    """0 where every token is right; ties go to the lowest index."""
    from capplan.kernels.greedy_sampling import greedy_sampling_reference, launch_greedy_sampling

    logits = torch.randn(4, vocabulary, generator=generator(1)).bfloat16()
    logits[1, [vocabulary - 1, 3]] = 50.0
    logits[2] = -math.inf
    logits[3, vocabulary - 1] = 60.0
    return float((launch_greedy_sampling(logits) != greedy_sampling_reference(logits)).sum())


case("greedy_sampling", greedy, vocabulary=9000)
case("greedy_sampling of a small vocabulary", greedy, vocabulary=50)


def written(*, fp8: bool) -> float:
    """0 where the caches hold what the reference leaves."""
    from capplan.kernels.paged_attention import write_token
    from capplan.kernels.write_kv import launch_write_kv

    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    key, value = (torch.randn(3, 2, 80, generator=generator(seed)).bfloat16() * 3 for seed in (1, 2))
    table = torch.tensor([[4, 2], [0, 1], [3, 5]], dtype=torch.int32)
    positions = torch.tensor([0, 17, 31], dtype=torch.int32)
    caches = [torch.zeros(6, 16, 2, 80).to(kind) for _ in range(4)]
    scales = {"k_scale": 0.01, "v_scale": 0.5} if fp8 else {}
    write_token(key, value, caches[0], caches[1], table, positions, **scales)
    launch_write_kv(key, value, caches[2], caches[3], table, positions, **scales)
    pairs = ((caches[2], caches[0]), (caches[3], caches[1]))
    if fp8:
        return sum(codes_apart(got, expected) for got, expected in pairs)
    return float(sum((got != expected).sum() for got, expected in pairs))


case("write_kv", written, fp8=False)
case("write_kv fp8", written, fp8=True)


def copied(*, elements: int) -> float:
    from capplan.kernels.copy_bandwidth import launch_copy

    source = torch.randint(0, 2**31, (elements,), dtype=torch.int32, generator=generator(1))
    target = torch.zeros(elements, dtype=torch.int32)
    launch_copy(source, target)
    return float((source != target).sum())


case("copy_bandwidth", copied, elements=10_000)


def main(word: str = "") -> None:
    """Run the cases whose name holds `word`; print one JSON object of case → error or message."""
    torch.set_num_threads(1)
    results: dict[str, float | str] = {}
    for name, check in CASES.items():
        if word not in name:
            continue
        start = time.perf_counter()
        try:
            results[name] = check()
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{time.perf_counter() - start:6.2f} s  {name}: {results[name]}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
