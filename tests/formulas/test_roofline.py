"""Roofline formulas: hand-worked values and properties."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import roofline

A100 = {"flop_per_s": 312e12, "bytes_per_s": 2.0e12}
work = st.floats(min_value=1, max_value=1e18)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(lambda: roofline.gemm_flop(m=1, n=14336, k=4096), 117_440_512, id="GEMV 4096 x 14336"),
        pytest.param(
            lambda: roofline.gemm_bytes(m=1, n=14336, k=4096, weight_bits=16),
            117_477_376,
            id="its traffic in fp16",
        ),
        # 29,360,128 B of weights and the same 36,864 B of activations.
        pytest.param(
            lambda: roofline.gemm_bytes(m=1, n=14336, k=4096, weight_bits=4),
            29_396_992,
            id="its traffic with int4 weights",
        ),
        pytest.param(
            lambda: roofline.attention_flop(queries=1, context=4096, heads=32, head_dim=128),
            67_108_864,
            id="a token against 4096",
        ),
        pytest.param(lambda: roofline.uncached_projections(tokens=1001), 501_501, id="token 1001 uncached"),
        pytest.param(
            lambda: roofline.arithmetic_intensity(flop=140e9, bytes_moved=140e9),
            1.0,
            id="70B decode in fp16: one FLOP a byte",
        ),
        pytest.param(lambda: roofline.ridge_intensity(**A100), 156.0, id="ridge of an A100"),
        pytest.param(
            lambda: roofline.bandwidth_bound_s(bytes_moved=140e9, bytes_per_s=2.0e12),
            0.07,
            id="the trap: 140 GB at 2.0 TB/s is 70 ms",
        ),
        pytest.param(
            lambda: 1 / roofline.bandwidth_bound_s(bytes_moved=140e9, bytes_per_s=2.0e12),
            pytest.approx(14.2857, abs=1e-4),
            id="the trap: 14 tokens/s",
        ),
        pytest.param(lambda: roofline.compute_bound_s(flop=312e9, flop_per_s=312e12), 0.001, id="312 GFLOP"),
        pytest.param(
            lambda: roofline.bound_s(flop=140e9, bytes_moved=140e9, **A100),
            0.07,
            id="memory-bound at one token",
        ),
        # 2048 · 140e9 / 312e12
        pytest.param(
            lambda: roofline.bound_s(flop=2048 * 140e9, bytes_moved=140e9, **A100),
            pytest.approx(0.918974, abs=1e-6),
            id="compute-bound at 2048 tokens",
        ),
        pytest.param(
            lambda: roofline.bandwidth_fraction(bytes_moved=140e9, time_s=0.1, bytes_per_s=2.0e12),
            pytest.approx(0.7),
            id="70 % of the bandwidth",
        ),
    ],
)
def test_worked_number(call: Callable[[], float], expected: float) -> None:
    assert call() == expected


@given(flop=work, size=work)
def test_the_side_of_the_ridge_says_what_bounds(flop: float, size: float) -> None:
    intensity = roofline.arithmetic_intensity(flop=flop, bytes_moved=size)
    bound = roofline.bound_s(flop=flop, bytes_moved=size, **A100)
    memory = roofline.bandwidth_bound_s(bytes_moved=size, bytes_per_s=A100["bytes_per_s"])
    if intensity < roofline.ridge_intensity(**A100) * (1 - 1e-9):
        assert bound == memory
    assert bound >= memory


@given(flop=work, size=work, faster=st.floats(1, 100))
def test_more_bandwidth_is_never_slower(flop: float, size: float, faster: float) -> None:
    after = A100 | {"bytes_per_s": A100["bytes_per_s"] * faster}
    assert roofline.bound_s(flop=flop, bytes_moved=size, **after) <= roofline.bound_s(
        flop=flop, bytes_moved=size, **A100
    )


@given(
    m=st.integers(1, 4096),
    n=st.integers(1, 4096),
    k=st.integers(1, 4096),
    more=st.integers(1, 4096),
)
def test_a_larger_batch_is_never_less_intense(m: int, n: int, k: int, more: int) -> None:
    def intensity(m: int) -> float:
        return roofline.arithmetic_intensity(
            flop=roofline.gemm_flop(m=m, n=n, k=k),
            bytes_moved=roofline.gemm_bytes(m=m, n=n, k=k, weight_bits=16),
        )

    assert intensity(m) <= intensity(m + more) * (1 + 1e-12)


@given(tokens=st.integers(0, 10**6))
def test_uncached_work_is_the_sum_of_all_prefixes(tokens: int) -> None:
    after = roofline.uncached_projections(tokens=tokens + 1)
    assert isinstance(after, int)
    assert after - roofline.uncached_projections(tokens=tokens) == tokens + 1
