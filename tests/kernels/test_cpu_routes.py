"""The CPU route of every kernel's wrapper against its reference in float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from capplan.kernels import int4_packing
from capplan.kernels.bf16_linear import (
    WIDENED_BYTES,
    bf16_linear,
    bf16_linear_reference,
    bf16_linear_widened,
    widens,
)
from capplan.kernels.copy_bandwidth import copy_bandwidth, copy_bytes
from capplan.kernels.greedy_sampling import greedy_sampling, greedy_sampling_reference
from capplan.kernels.mla_decode import mla_decode, mla_decode_reference
from capplan.kernels.paged_attention import paged_attention_reference, write_token
from capplan.kernels.paged_attention_decode import paged_attention_decode
from capplan.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from capplan.kernels.quantize_rows import quantize_rows
from capplan.kernels.quantized_gemm import Int4Weight, dequantize_int4, quantize_int4
from capplan.kernels.rmsnorm import rmsnorm, rmsnorm_reference
from capplan.kernels.rope import rope, rope_reference, rope_table
from capplan.kernels.silu_mul import silu_mul, silu_mul_reference
from capplan.kernels.w4a16_gemm import prepare_int4, w4a16_gemm, w4a16_reference
from capplan.kernels.w8a8_gemm import w8a8_gemm, w8a8_reference
from capplan.kernels.w8a16_gemm import w8a16_gemm, w8a16_reference
from capplan.kernels.write_kv import write_kv

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = pytest.importorskip("torch", reason="the kernels' CPU routes run on torch")

LIMIT = 1e-2
BF16_HALF_STEP = 2**-8


def normal(*shape: int, seed: int = 0, dtype: str = "bfloat16") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))


def worst_row(got: Tensor, expected: Tensor) -> float:
    """The largest ‖got - expected‖ / ‖expected‖ of a row, in float64."""
    assert torch.isfinite(got.double()).all()
    got, expected = (each.double().reshape(len(each), -1) for each in (got, expected))
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).max())


def paged(
    lengths: list[int],
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 80,
    block_size: int = 16,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, caches with NaN past every end, a table with ids that do not exist, lengths."""
    columns = [-(-length // block_size) for length in lengths]
    ids = torch.randperm(sum(columns), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = torch.full((len(lengths), max(columns) + 1), 2**30, dtype=torch.int32)
    caches = [normal(len(ids), block_size, kv_heads, head_dim, seed=seed, dtype="float32") for seed in (2, 3)]
    for row, own in enumerate(ids.split(columns)):
        table[row, : len(own)] = own
        used = lengths[row] % block_size
        if used:
            for cache in caches:
                cache[own[-1].long(), used:] = math.nan
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    query = normal(len(lengths), heads, head_dim, seed=4)
    return query, caches[0].to(kind), caches[1].to(kind), table, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16 cache", "fp8 cache"])
@pytest.mark.parametrize("window", [None, 1, 40, 600])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_paged_attention_over_several_chunks(block_size: int, window: int | None, fp8: bool) -> None:
    """Lengths on both sides of a chunk of 512 tokens and of a block."""
    arguments = paged([1, 16, 17, 511, 512, 513, 1100], block_size=block_size, fp8=fp8)
    scales = {"k_scale": 0.5, "v_scale": 3.0} if fp8 else {}
    expected = paged_attention_reference(*arguments, window=window, **scales)
    out = torch.full_like(expected, math.nan)
    assert paged_attention_decode(*arguments, window=window, out=out, **scales) is out
    assert worst_row(out, expected) <= LIMIT


@pytest.mark.parametrize("heads", [2, 14], ids=["mha", "odd group of 7"])
def test_paged_attention_groups(heads: int) -> None:
    arguments = paged([33, 600], heads=heads, kv_heads=2, fp8=False)
    expected = paged_attention_reference(*arguments, softmax_scale=0.3)
    assert worst_row(paged_attention_decode(*arguments, softmax_scale=0.3), expected) <= LIMIT


def test_fp8_cache_reference_is_the_16_bit_one_on_decoded_values() -> None:
    query, keys, values, table, lengths = paged([5, 40], fp8=True)
    decoded = [(cache.float() * scale).nan_to_num() for cache, scale in ((keys, 0.5), (values, 3.0))]
    expected = paged_attention_reference(query.float(), *decoded, table, lengths)
    got = paged_attention_reference(query.float(), keys, values, table, lengths, k_scale=0.5, v_scale=3.0)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_mla_over_several_chunks(fp8: bool) -> None:
    lengths = [1, 512, 530]
    _, cache, _, table, context_lens = paged(lengths, kv_heads=1, head_dim=80, fp8=fp8)
    query = normal(3, 5, 80, seed=9)
    options: dict[str, Any] = {"latent": 64, "softmax_scale": 0.1, "cache_scale": 0.5 if fp8 else 1.0}
    arguments = (query, cache[:, :, 0], table, context_lens)
    assert worst_row(mla_decode(*arguments, **options), mla_decode_reference(*arguments, **options)) <= LIMIT


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_write_kv_leaves_what_write_token_leaves(fp8: bool) -> None:
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    key, value = normal(2, 2, 8, seed=1), normal(2, 2, 8, seed=2) * 1000
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    positions = torch.tensor([4, 1], dtype=torch.int32)
    caches = [torch.zeros(4, 4, 2, 8).to(kind) for _ in range(4)]
    scales = {"k_scale": 0.5, "v_scale": 2.0} if fp8 else {}
    write_token(key, value, caches[0], caches[1], table, positions, **scales)
    write_kv(key, value, caches[2], caches[3], table, positions, **scales)
    for expected, got in ((caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(expected.float(), got.float())
    stored = caches[2][0, 0].float() * scales.get("k_scale", 1.0)  # position 4 is slot 0 of block 0
    assert torch.allclose(stored, key[0].float(), rtol=2**-4, atol=2**-8)
    assert not fp8 or float(caches[3][0, 0].float().abs().max()) == 448  # clamped, not NaN


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True], ids=["zeros", "symmetric"])
@pytest.mark.parametrize(("m", "n"), [(1, 64), (5, 100)], ids=["one row", "rows and an odd n"])
def test_w4a16(m: int, n: int, symmetric: bool, group: int) -> None:
    x = normal(m, 384, seed=1)
    weight = quantize_int4(normal(n, 384, seed=2), group_size=group, symmetric=symmetric)
    got = w4a16_gemm(x, prepare_int4(weight, x))
    assert got.shape == (m, n)
    assert worst_row(got, w4a16_reference(x, weight)) <= LIMIT


@pytest.mark.parametrize("k", [512, 100], ids=["torch's kernel", "inputs it gets wrong"])
@pytest.mark.parametrize("fp8", [False, True], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_w8a16(dtype: str, fp8: bool, k: int) -> None:
    x = normal(5, k, seed=1, dtype=dtype)
    weight, scales = quantize_rows(normal(70, k, seed=2), torch.float8_e4m3fn if fp8 else torch.int8)
    assert worst_row(w8a16_gemm(x, weight, scales), w8a16_reference(x, weight, scales)) <= LIMIT


@pytest.mark.parametrize("vnni", [False, True], ids=["no int8 instructions", "int8 instructions"])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_w8a8(kind: str, vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    x, x_scales = quantize_rows(normal(5, 300, seed=1), getattr(torch, kind))
    weight, scales = quantize_rows(normal(70, 300, seed=2), getattr(torch, kind))
    got = w8a8_gemm(x, weight, x_scales, scales)
    assert worst_row(got, w8a8_reference(x, weight, x_scales, scales)) <= BF16_HALF_STEP


def test_quantize_rows_by_hand() -> None:
    """Row maximum 254: scale 2; 3 / 2 rounds to even 2, 5 / 2 to 2; a row of zeros keeps scale 1."""
    x = torch.tensor([[254.0, -3.0, 5.0], [0.0, 0.0, 0.0]])
    values, scales = quantize_rows(x, torch.int8)
    assert values.tolist() == [[127, -2, 2], [0, 0, 0]]
    assert scales.tolist() == [2.0, 1.0]


@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 40), (7, 40), (1, 40)], ids=["prompt", "chunk", "token"])
@pytest.mark.parametrize("window", [None, 8])
def test_prefill_attention(q_len: int, kv_len: int, window: int | None) -> None:
    query, key, value = (
        normal(2, size, heads, 16, seed=size + heads)
        for size, heads in ((q_len, 6), (kv_len, 2), (kv_len, 2))
    )
    value = value + 1
    got = prefill_attention(query, key, value, window=window)
    assert worst_row(got, prefill_attention_reference(query, key, value, window=window)) <= LIMIT


def test_prefill_of_one_token_is_paged_decode() -> None:
    query, keys, values, table, lengths = paged([40], kv_heads=2, fp8=False)
    dense = [cache[table[0, :3].long()].flatten(0, 1)[None, :40] for cache in (keys, values)]
    expected = paged_attention_reference(query, keys, values, table, lengths)
    assert worst_row(prefill_attention(query[:, None], *dense)[:, 0], expected) <= LIMIT


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "with residual"])
def test_rmsnorm(residual: bool) -> None:
    x, weight = normal(3, 100, seed=1), normal(100, seed=2)
    other = normal(3, 100, seed=3) if residual else None
    expected, total = rmsnorm_reference(x, weight, eps=1e-5, residual=other)
    assert worst_row(rmsnorm(x, weight, eps=1e-5, residual=other), expected) <= LIMIT
    assert other is None or worst_row(other, total) <= BF16_HALF_STEP


def test_rmsnorm_by_hand() -> None:
    """mean(9, 16) = 12.5: 3 / √12.5 and 4 / √12.5."""
    got = rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), eps=0.0)
    assert got.tolist() == [pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])]


def test_silu_mul() -> None:
    x = normal(3, 200, seed=1)
    assert worst_row(silu_mul(x), silu_mul_reference(x)) <= LIMIT


@pytest.mark.parametrize("rotary_dim", [16, 10], ids=["whole head", "a part"])
def test_rope(rotary_dim: int) -> None:
    query, key = normal(3, 4, 16, seed=1), normal(3, 2, 16, seed=2)
    before = query.clone(), key.clone()
    positions = torch.tensor([0, 5, 31], dtype=torch.int32)
    table = rope_table(positions=32, rotary_dim=rotary_dim, theta=1e4, like=query)
    rope(query, key, positions, table)
    for got, old in zip((query, key), before, strict=True):
        assert worst_row(got, rope_reference(old.double(), positions, table)) <= LIMIT
        assert torch.equal(got[0], old[0])  # position 0 turns by nothing
        assert torch.equal(got[..., rotary_dim:], old[..., rotary_dim:])


def test_rope_by_hand() -> None:
    """One pair at position 2, theta^0 = 1: (1, 0) turns by 2 radians."""
    query, key = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    table = rope_table(positions=3, rotary_dim=2, theta=1e4, like=query)
    rope(query, key, torch.tensor([2], dtype=torch.int32), table)
    assert query.flatten().tolist() == pytest.approx([math.cos(2), math.sin(2)])
    assert key.flatten().tolist() == pytest.approx([-math.sin(2), math.cos(2)])


def test_greedy_sampling_takes_the_first_of_equals() -> None:
    logits = normal(3, 50, seed=1)
    logits[1, [40, 7]] = 9.0
    got = greedy_sampling(logits)
    assert torch.equal(got, greedy_sampling_reference(logits))
    assert int(got[1]) == 7


def test_bf16_linear() -> None:
    x, weight = normal(3, 200, seed=1), normal(50, 200, seed=2)
    assert worst_row(bf16_linear(x, weight), bf16_linear_reference(x, weight)) <= BF16_HALF_STEP


@pytest.mark.parametrize("m", [1, 40], ids=["one row", "many"])
def test_bf16_linear_in_parts(m: int) -> None:
    """The route of CPUs without bf16 instructions; two whole parts and a rest."""
    n, k = 2 * (WIDENED_BYTES // (4 * 2048)) + 3, 2048
    x, weight = normal(m, k, seed=1), normal(n, k, seed=2)
    assert worst_row(bf16_linear_widened(x, weight), bf16_linear_reference(x, weight)) <= BF16_HALF_STEP


@pytest.mark.parametrize(
    ("capability", "bf16", "rows", "expected"),
    [
        pytest.param("AVX2", False, 32, True, id="many rows without bf16 instructions"),
        pytest.param("AVX512", False, 8, False, id="few rows are bound by memory"),
        pytest.param("AVX512", True, 32, False, id="bf16 instructions"),
        pytest.param("NEON", False, 32, False, id="no x86"),
    ],
)
def test_which_cpu_widens(
    monkeypatch: pytest.MonkeyPatch, capability: str, bf16: bool, rows: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    assert widens(rows=rows) is expected
    x, weight = normal(rows, 64, seed=1), normal(8, 64, seed=2)
    assert worst_row(bf16_linear(x, weight), bf16_linear_reference(x, weight)) <= BF16_HALF_STEP


def test_copy_bandwidth() -> None:
    source, target = normal(1000, seed=1), torch.zeros(1000, dtype=torch.bfloat16)
    copy_bandwidth(source, target)
    assert torch.equal(source, target)
    assert copy_bytes(source) == 4000


def stored_int4(*, zeros: bool) -> Int4Weight:
    return quantize_int4(normal(24, 64, seed=5), group_size=32, symmetric=not zeros)


@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "symmetric"])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
def test_checkpoint_packing_round_trip(form: str, zeros: bool) -> None:
    weight = stored_int4(zeros=zeros)
    if form == "awq":
        back = int4_packing.from_awq(*int4_packing.to_awq(weight))
    else:
        offset = 1 if form == "gptq" else 0
        back = int4_packing.from_gptq(*int4_packing.to_gptq(weight, zero_offset=offset), zero_offset=offset)
    assert torch.equal(dequantize_int4(back), dequantize_int4(weight))


def test_gptq_packing_by_hand() -> None:
    """8 inputs, 8 outputs, one group: a word of qweight is one output's inputs; qzeros holds zero - 1."""
    qweight = torch.zeros(1, 8, dtype=torch.int32)
    qweight[0, 3] = 0x76543210  # output 3, input c is nibble c
    qzeros = torch.tensor([[0x00002000]], dtype=torch.int32)  # output 3: stored 2, so zero 3
    scales = torch.full((1, 8), 0.5)
    matrix = dequantize_int4(int4_packing.from_gptq(qweight, qzeros, scales))
    assert matrix[3].tolist() == [(c - 3) * 0.5 for c in range(8)]
    assert matrix[0].tolist() == [-0.5] * 8


def test_awq_packing_by_hand() -> None:
    """8 inputs, 8 outputs: a word is one input's outputs 0, 2, 4, 6, 1, 3, 5, 7 from the low end."""
    qweight = torch.zeros(8, 1, dtype=torch.int32)
    qweight[5, 0] = 0x76543210
    qzeros = torch.zeros(1, 1, dtype=torch.int32)
    matrix = dequantize_int4(int4_packing.from_awq(qweight, qzeros, torch.ones(1, 8)))
    assert matrix[:, 5].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert not matrix[:, :5].any()


def bad(call: Callable[[], Any], message: str) -> Any:
    return pytest.param(call, message, id=message)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        bad(lambda: paged_attention_decode(*paged([5], fp8=False), splits=0), "splits: expected 1 to 128"),
        bad(lambda: paged_attention_decode(*paged([5], fp8=False), combine="x"), "combine: expected"),
        bad(lambda: paged_attention_decode(*paged([5], heads=5, fp8=False)), "query: 5 heads"),
        bad(
            lambda: prepare_int4(quantize_int4(normal(8, 48), group_size=16), normal(1, 48)),
            "weight: expected",
        ),
        bad(
            lambda: w4a16_gemm(normal(1, 32), prepare_int4(stored_int4(zeros=True), normal(1, 64))),
            "x: expected [m, 64]",
        ),
        bad(
            lambda: w4a16_gemm(
                normal(1, 64, dtype="float32"), prepare_int4(stored_int4(zeros=True), normal(1, 64))
            ),
            "x: got torch.float32",
        ),
        bad(lambda: w8a16_gemm(normal(1, 4), normal(3, 4), torch.ones(3)), "weight: expected int8"),
        bad(
            lambda: w8a16_gemm(normal(1, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(4)),
            "scales: expected fp32 [3]",
        ),
        bad(
            lambda: w8a8_gemm(
                torch.ones(2, 4, dtype=torch.int8),
                torch.ones(3, 5, dtype=torch.int8),
                torch.ones(2),
                torch.ones(3),
            ),
            "weight: expected torch.int8 [n, 4]",
        ),
        bad(lambda: quantize_rows(normal(2, 3), torch.int32), "dtype: expected int8 or fp8"),
        bad(lambda: rmsnorm(normal(2, 3), normal(4), eps=0.0), "weight: expected torch.bfloat16 [3]"),
        bad(lambda: silu_mul(normal(2, 3)), "gate_up: expected"),
        bad(lambda: copy_bandwidth(normal(2), normal(3)), "target: expected"),
        bad(lambda: bf16_linear(normal(2, 3), normal(2, 4)), "weight: expected [n, k]"),
        bad(
            lambda: prefill_attention(normal(1, 5, 4, 8), normal(1, 4, 2, 8), normal(1, 4, 2, 8)),
            "key: expected [1, 5 or more",
        ),
        bad(
            lambda: mla_decode(
                *paged([5], fp8=False)[:2], *paged([5], fp8=False)[3:], latent=8, softmax_scale=1
            ),
            "cache: expected",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()
