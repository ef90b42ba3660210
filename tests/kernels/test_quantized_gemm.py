"""The int4 GEMM reference against plain loops and matrix products in float64."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.kernels.quantized_gemm import (
    Int4Weight,
    dequantize_int4,
    pack_int4,
    quantize_int4,
    quantized_gemm_reference,
    unpack_int4,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = pytest.importorskip("torch", reason="the kernels' references run on torch")

FP32_RELATIVE = 2e-6
ROUNDING = {"float32": FP32_RELATIVE, "bfloat16": 2**-8, "float16": 2**-11}


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, dtype))


def nibble(weight: Int4Weight, row: int, column: int) -> int:
    """The stored 4 bits, by Python's integers alone."""
    return (int(weight.packed[row, column // 8]) % 2**32) >> (4 * (column % 8)) & 15


def plain_dequantised(weight: Int4Weight, group_size: int) -> Tensor:
    """Float64 from the stored fields, element by element."""
    rows, columns = weight.packed.shape[0], weight.packed.shape[1] * 8
    output = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            group = column // group_size
            zero = 8 if weight.zeros is None else int(weight.zeros[row, group])
            scale = float(weight.scales[row, group])
            output[row, column] = (nibble(weight, row, column) - zero) * scale
    return output


def steps_of(weight: Int4Weight, columns: int) -> Tensor:
    """Each element's scale, float64 [n, k]."""
    return weight.scales.double().repeat_interleave(columns // weight.scales.shape[1], dim=1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- packing


def test_first_input_is_the_lowest_nibble() -> None:
    packed = pack_int4(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [0x87654321 - 2**32] == [-2_023_406_815]
    assert pack_int4(torch.tensor([0, 0, 0, 0, 0, 0, 0, 15])).tolist() == [-(2**28)]
    assert pack_int4(torch.full((8,), 15)).tolist() == [-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 15), min_size=8, max_size=8), max_size=12))
def test_unpack_undoes_pack(rows: list[list[int]]) -> None:
    nibbles = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 8)
    assert torch.equal(unpack_int4(pack_int4(nibbles)), nibbles.int())
    flat = nibbles.reshape(-1)
    assert torch.equal(unpack_int4(pack_int4(flat)), flat.int())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=12))
def test_pack_undoes_unpack(words: list[int]) -> None:
    packed = torch.tensor(words, dtype=torch.int32)
    unpacked = unpack_int4(packed)
    assert unpacked.tolist() == [(word % 2**32) >> 4 * j & 15 for word in words for j in range(8)]
    assert torch.equal(pack_int4(unpacked), packed)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64"])
def test_pack_takes_any_integer_dtype_and_leading_shape(dtype: str) -> None:
    nibbles = torch.arange(96).remainder(16).reshape(2, 3, 16).to(getattr(torch, dtype))
    packed = pack_int4(nibbles)
    assert packed.shape == (2, 3, 2)
    assert torch.equal(unpack_int4(packed), nibbles.int())


# ---------------------------------------------------------------- quantising


def test_affine_group_by_hand() -> None:
    # r_min -1, r_max 2: s = 3/15 = 0.2, z = round(1/0.2) = 5; w/s + z is the nibble.
    row = torch.tensor([[-1.0, 2.0, 0.0, 0.6, -0.4, 1.0, 0.11, 0.09]])
    weight = quantize_int4(row, group_size=8)
    assert weight.scales.item() == pytest.approx(0.2, rel=1e-7)
    assert weight.zeros is not None
    assert weight.zeros.item() == 5
    assert unpack_int4(weight.packed).tolist() == [[0, 15, 5, 8, 3, 10, 6, 5]]
    expected = [-1.0, 2.0, 0.0, 0.6, -0.4, 1.0, 0.2, 0.0]
    assert dequantize_int4(weight)[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_symmetric_group_by_hand() -> None:
    # max|w| 3.5: s = 0.5, z = 0; q = w/s, stored as q + 8.
    row = torch.tensor([[-3.5, 3.0, 0.0, 0.5, -0.5, 1.2, 0.2, -1.8]])
    weight = quantize_int4(row, group_size=8, symmetric=True)
    assert weight.scales.item() == 0.5
    assert weight.zeros is None
    assert unpack_int4(weight.packed).tolist() == [[1, 14, 8, 9, 7, 10, 8, 4]]
    assert dequantize_int4(weight).tolist() == [[-3.5, 3.0, 0.0, 0.5, -0.5, 1.0, 0.0, -2.0]]


def test_groups_along_the_inputs_have_their_own_scale() -> None:
    row = torch.cat([torch.full((16,), 7.0), torch.full((16,), 0.07)])[None]
    weight = quantize_int4(row, group_size=16, symmetric=True)
    assert weight.scales[0].tolist() == pytest.approx([1.0, 0.01])
    assert (weight.out_features, weight.in_features, weight.group_size) == (1, 32, 16)
    assert dequantize_int4(weight)[0].tolist() == pytest.approx(row[0].tolist())


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("constant", [0.0, 1.0, -1.0, 3e-5, -3e30])
def test_constant_groups_come_back(constant: float, symmetric: bool) -> None:
    row = torch.full((1, 32), constant)
    weight = quantize_int4(row, group_size=32, symmetric=symmetric)
    assert dequantize_int4(weight)[0].tolist() == pytest.approx([constant] * 32, rel=1e-6, abs=0)
    assert float(weight.scales.min()) > 0


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_zero_is_exact_in_every_group(symmetric: bool) -> None:
    rows = normal(4, 64) + torch.tensor([[-9.0], [0.0], [0.3], [9.0]])
    rows[:, ::5] = 0.0
    weight = quantize_int4(rows, group_size=32, symmetric=symmetric)
    assert not dequantize_int4(weight)[:, ::5].any()


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
def test_a_group_too_small_for_its_scale_dtype_reads_as_zeros(symmetric: bool) -> None:
    weight = quantize_int4(
        torch.full((1, 8), 1e-9), group_size=8, symmetric=symmetric, scale_dtype=torch.float16
    )
    assert weight.scales.item() == 1
    assert not dequantize_int4(weight).any()


@pytest.mark.parametrize(("sign", "zero"), [(-1, 15), (1, 0)], ids=["negative", "positive"])
def test_a_subnormal_scale_clips_at_the_end_of_its_range(sign: int, zero: int) -> None:
    # 1e-6 / 15 = 1.12 of the smallest fp16 number: stored as 1 of it, 16.8 steps of which 15 fit.
    row = torch.full((1, 8), sign * 1e-6)
    weight = quantize_int4(row, group_size=8, scale_dtype=torch.float16)
    assert weight.zeros is not None
    assert weight.zeros.item() == zero
    assert dequantize_int4(weight)[0].tolist() == [sign * 15 * 2.0**-24] * 8


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("largest", [1e38, 1.5e38])
def test_extremes_neither_overflow_nor_lose_their_sign(largest: float, symmetric: bool) -> None:
    row = torch.tensor([[largest, -largest, 0, 0, 0, 0, 0, 1.0]])
    decoded = dequantize_int4(quantize_int4(row, group_size=8, symmetric=symmetric))
    assert decoded[0, 2:].tolist() == [0.0] * 6
    # 15 levels do not hold both ends exactly: half a step at most.
    assert decoded[0, :2].tolist() == pytest.approx([largest, -largest], rel=1 / 15 + 1e-6)


GROUPS = st.integers(1, 3).flatmap(
    lambda count: st.lists(
        st.lists(
            st.just(0.0) | st.floats(2**-66, 2**66, width=32) | st.floats(-(2**66), -(2**-66), width=32),
            min_size=8 * count,
            max_size=8 * count,
        ),
        min_size=1,
        max_size=3,
    )
)


@settings(max_examples=80, deadline=None)
@given(GROUPS, st.booleans())
def test_error_is_at_most_half_a_step(rows: list[list[float]], symmetric: bool) -> None:
    original = torch.tensor(rows)
    weight = quantize_int4(original, group_size=8, symmetric=symmetric)
    error = (dequantize_int4(weight).double() - original.double()).abs()
    assert (error <= steps_of(weight, original.shape[1]) * 0.5 * (1 + 1e-5)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.booleans(), st.sampled_from(["float16", "bfloat16"]))
def test_error_is_at_most_half_a_step_within_the_range_of_a_rounded_scale(
    seed: int, symmetric: bool, dtype: str
) -> None:
    original = normal(4, 64, seed=seed)
    weight = quantize_int4(original, group_size=32, symmetric=symmetric, scale_dtype=getattr(torch, dtype))
    step = steps_of(weight, 64)
    zero = (
        torch.full_like(step, 8)
        if weight.zeros is None
        else weight.zeros.double().repeat_interleave(32, dim=1)
    )
    error = (dequantize_int4(weight).double() - original.double()).abs()
    low, high = (0 - zero) * step, (15 - zero) * step
    inside = (original.double() >= low) & (original.double() <= high)
    assert (error <= step * 0.5 * (1 + 1e-5))[inside].all()
    assert (error <= step * (0.5 + 15 * 2**-8 + 1e-5)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(-20, 20), st.booleans())
def test_doubling_the_weights_doubles_the_scales_alone(seed: int, exponent: int, symmetric: bool) -> None:
    original = normal(3, 64, seed=seed)
    once = quantize_int4(original, group_size=32, symmetric=symmetric)
    scaled = quantize_int4(original * 2.0**exponent, group_size=32, symmetric=symmetric)
    assert torch.equal(scaled.packed, once.packed)
    assert torch.equal(scaled.scales, once.scales * 2.0**exponent)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31))
def test_symmetric_is_odd_and_stable(seed: int) -> None:
    original = normal(3, 64, seed=seed)
    decoded = dequantize_int4(quantize_int4(original, group_size=32, symmetric=True))
    mirrored = dequantize_int4(quantize_int4(-original, group_size=32, symmetric=True))
    assert torch.equal(mirrored, -decoded)
    again = dequantize_int4(quantize_int4(decoded, group_size=32, symmetric=True))
    assert torch.allclose(again, decoded, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_follow_the_weight_unless_told(dtype: str) -> None:
    original = normal(2, 64, dtype=dtype)
    assert quantize_int4(original, group_size=32).scales.dtype == original.dtype
    told = quantize_int4(original, group_size=32, scale_dtype=torch.float16)
    assert told.scales.dtype == torch.float16


def test_finer_groups_lose_less() -> None:
    original = normal(32, 512)
    errors = [
        relative_error(dequantize_int4(quantize_int4(original, group_size=g)), original.double())
        for g in (32, 64, 128, 512)
    ]
    assert errors == sorted(errors)
    # Uniform rounding: step / sqrt(12), of a range of about 5.2 sigma at 128 samples, / 15.
    assert errors[2] == pytest.approx(5.2 / 15 / math.sqrt(12), rel=0.05)


# ---------------------------------------------------------------- product


@pytest.mark.parametrize("symmetric", [False, True], ids=["affine", "symmetric"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("m", [1, 5, 17])
def test_product_equals_the_dequantised_matmul(m: int, group_size: int, symmetric: bool) -> None:
    weight = quantize_int4(normal(24, 384), group_size=group_size, symmetric=symmetric)
    x, bias = normal(m, 384, seed=1), normal(24, seed=2)
    expected = x.double() @ plain_dequantised(weight, group_size).T
    assert relative_error(quantized_gemm_reference(x, weight), expected) < FP32_RELATIVE
    biased = quantized_gemm_reference(x, weight, bias)
    assert relative_error(biased, expected + bias.double()) < FP32_RELATIVE


@pytest.mark.parametrize("block_k", [8, 24, 40, 128, 256, 4096])
@pytest.mark.parametrize(("k", "group_size"), [(8, 8), (192, 64), (320, 32), (320, 320)])
def test_tiles_need_divide_neither_the_inputs_nor_the_group(k: int, group_size: int, block_k: int) -> None:
    weight = quantize_int4(normal(9, k), group_size=group_size)
    x = normal(3, k, seed=1)
    expected = x.double() @ plain_dequantised(weight, group_size).T
    got = quantized_gemm_reference(x, weight, block_k=block_k)
    assert relative_error(got, expected) < FP32_RELATIVE


@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_product_is_the_exact_one_rounded_once(dtype: str, bias_dtype: str) -> None:
    weight = quantize_int4(normal(16, 512, dtype=dtype), group_size=128)
    x = normal(7, 512, seed=1, dtype=dtype)
    bias = normal(16, seed=2, dtype=dtype if bias_dtype == "same" else bias_dtype)
    got = quantized_gemm_reference(x, weight, bias)
    assert got.dtype == x.dtype
    assert got.shape == (7, 16)
    expected = x.double() @ plain_dequantised(weight, 128).T + bias.double()
    excess = (got.double() - expected).abs() - ROUNDING[dtype] * expected.abs()
    assert float(excess.max()) < 1e-4  # fp32 sums of 512 products of about 1


def test_identity_reads_the_weights_back() -> None:
    weight = quantize_int4(normal(12, 64), group_size=32)
    assert torch.equal(quantized_gemm_reference(torch.eye(64), weight), dequantize_int4(weight).T)
    assert torch.equal(dequantize_int4(weight).double(), plain_dequantised(weight, 32).float())


def test_zero_weights_give_the_bias_alone() -> None:
    weight = quantize_int4(torch.zeros(3, 64), group_size=32)
    bias = torch.tensor([1.0, -2.0, 0.5])
    got = quantized_gemm_reference(normal(2, 64), weight, bias)
    assert got.tolist() == [bias.tolist()] * 2


def test_empty_batch_gives_an_empty_answer() -> None:
    weight = quantize_int4(normal(3, 64), group_size=32)
    assert quantized_gemm_reference(torch.zeros(0, 64), weight).shape == (0, 3)


@settings(max_examples=50, deadline=None)
@given(
    m=st.integers(1, 4),
    n=st.integers(1, 6),
    groups=st.integers(1, 4),
    group_size=st.sampled_from([8, 32, 64, 128]),
    block_words=st.none() | st.integers(1, 20),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_stored_weight_equals_the_dequantised_matmul(
    m: int,
    n: int,
    groups: int,
    group_size: int,
    block_words: int | None,
    symmetric: bool,
    seed: int,
) -> None:
    """Bits nobody's quantiser chose: every nibble, zero point and sign of scale."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (n, groups * group_size // 8), generator=generator)
    zeros = torch.randint(0, 16, (n, groups), generator=generator).to(torch.uint8)
    weight = Int4Weight(
        packed=words.to(torch.int32),
        scales=normal(n, groups, seed=seed),
        zeros=None if symmetric else zeros,
    )
    x = normal(m, groups * group_size, seed=seed + 1)
    decoded = plain_dequantised(weight, group_size)
    got = quantized_gemm_reference(x, weight, block_k=block_words and 8 * block_words)
    # Against the sum of magnitudes: terms that cancel leave the rounding of the larger ones.
    magnitude = x.double().abs() @ decoded.abs().T
    assert ((got.double() - x.double() @ decoded.T).abs() <= FP32_RELATIVE * magnitude).all()


# ---------------------------------------------------------------- refusals


def stored(**changes: Any) -> Int4Weight:
    fields: dict[str, Any] = {
        "packed": torch.zeros(4, 16, dtype=torch.int32),
        "scales": torch.ones(4, 4),
        "zeros": torch.zeros(4, 4, dtype=torch.uint8),
    }
    return Int4Weight(**{**fields, **changes})


BAD: list[tuple[Any, str]] = [
    (lambda: pack_int4(torch.zeros(8)), "nibbles: expected an integer dtype"),
    (lambda: pack_int4(torch.zeros(8, dtype=torch.bool)), "nibbles: expected an integer dtype"),
    (lambda: pack_int4(torch.zeros(12, dtype=torch.uint8)), "nibbles: expected [..., k] with k a"),
    (lambda: pack_int4(torch.tensor(3)), "nibbles: expected [..., k] with k a"),
    (lambda: pack_int4(torch.full((8,), 16)), "nibbles: expected values from 0 to 15, got 16"),
    (lambda: pack_int4(torch.full((8,), -1)), "nibbles: expected values from 0 to 15, got -1"),
    (lambda: unpack_int4(torch.zeros(8)), "packed: expected int32"),
    (lambda: unpack_int4(torch.zeros(8, dtype=torch.int64)), "packed: expected int32"),
    (lambda: quantize_int4(torch.zeros(4, 100)), "weight: 100 inputs are not a multiple of"),
    (lambda: quantize_int4(torch.zeros(4, 60), group_size=12), "group_size: expected a positive"),
    (lambda: quantize_int4(torch.zeros(4, 64), group_size=0), "group_size: expected a positive"),
    (lambda: quantize_int4(torch.zeros(4, 64), group_size=-1), "group_size: expected a positive"),
    (lambda: quantize_int4(torch.zeros(128)), "weight: expected [n, k]"),
    (lambda: quantize_int4(torch.zeros(0, 128)), "weight: expected [n, k]"),
    (lambda: quantize_int4(torch.zeros(4, 128).double()), "weight: expected fp16, bf16 or fp32"),
    (lambda: quantize_int4(torch.zeros(4, 128).int()), "weight: expected fp16, bf16 or fp32"),
    (lambda: quantize_int4(torch.full((1, 128), math.nan)), "weight: holds a value that is not"),
    (lambda: quantize_int4(torch.full((1, 128), -math.inf)), "weight: holds a value that is not"),
    (
        lambda: quantize_int4(torch.full((1, 128), 1e7), scale_dtype=torch.float16),
        "weight: too large for scales in torch.float16",
    ),
    (
        lambda: quantize_int4(torch.full((1, 128), 3.4e38), symmetric=True),
        "weight: too large for scales in torch.float32",
    ),
    (
        lambda: quantize_int4(torch.ones(1, 128), scale_dtype=torch.int8),
        "scale_dtype: expected fp16, bf16 or fp32",
    ),
    (lambda: stored(packed=torch.zeros(4, 16)), "packed: expected int32"),
    (lambda: stored(packed=torch.zeros(16, dtype=torch.int32)), "packed: expected [n, k / 8]"),
    (lambda: stored(packed=torch.zeros(0, 16, dtype=torch.int32)), "packed: expected [n, k / 8]"),
    (lambda: stored(scales=torch.ones(5, 4)), "scales: expected [4, k / group_size]"),
    (lambda: stored(scales=torch.ones(4, 3)), "scales: 3 groups do not split 128 inputs"),
    (lambda: stored(scales=torch.ones(4, 0)), "scales: 0 groups do not split 128 inputs"),
    (lambda: stored(scales=torch.ones(4, 4).double()), "scales: expected fp16, bf16 or fp32"),
    (lambda: stored(scales=torch.ones(4, 4).to("meta")), "scales: on meta"),
    (lambda: stored(scales=torch.full((4, 4), math.nan)), "scales: 15 times a scale"),
    (lambda: stored(scales=torch.full((4, 4), 3e38)), "scales: 15 times a scale"),
    (lambda: stored(zeros=torch.zeros(4, 1, dtype=torch.uint8)), "zeros: expected the shape"),
    (lambda: stored(zeros=torch.zeros(4, 4)), "zeros: expected uint8 from 0 to 15"),
    (lambda: stored(zeros=torch.full((4, 4), 16).byte()), "zeros: expected uint8 from 0 to 15"),
    (lambda: quantized_gemm_reference(torch.zeros(2, 64), stored()), "x: expected shape [m, 128]"),
    (lambda: quantized_gemm_reference(torch.zeros(128), stored()), "x: expected shape [m, 128]"),
    (lambda: quantized_gemm_reference(torch.zeros(2, 128).int(), stored()), "x: expected fp16"),
    (lambda: quantized_gemm_reference(torch.zeros(2, 128).to("meta"), stored()), "x: on meta"),
    (
        lambda: quantized_gemm_reference(torch.zeros(2, 128), stored(), torch.zeros(5)),
        "bias: expected shape [4]",
    ),
    (
        lambda: quantized_gemm_reference(torch.zeros(2, 128), stored(), torch.zeros(4).int()),
        "bias: expected fp16",
    ),
    (
        lambda: quantized_gemm_reference(torch.zeros(2, 128), stored(), block_k=12),
        "block_k: expected a positive multiple of 8",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()
