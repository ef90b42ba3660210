"""Quantization formulas: hand-worked values and properties."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import quantization as q

bits = st.integers(min_value=2, max_value=8)
reals = st.floats(min_value=-1e3, max_value=1e3, allow_nan=False)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(lambda: q.levels(bits=4), 16, id="codes of 4 bits"),
        pytest.param(lambda: q.levels(bits=8), 256, id="codes of 8 bits"),
        # 3 over 15 steps.
        pytest.param(
            lambda: q.affine_scale(r_min=-1, r_max=2, bits=4),
            pytest.approx(0.2),
            id="scale of -1 to 2 in 4 bits",
        ),
        pytest.param(lambda: q.affine_scale(r_min=0, r_max=255, bits=8), 1.0, id="scale of 0 to 255 in 8"),
        pytest.param(lambda: q.affine_zero_point(r_min=-1, scale=0.2), 5, id="zero point of -1 to 2"),
        pytest.param(lambda: q.affine_zero_point(r_min=0, scale=0.2), 0, id="zero point of 0 to 3"),
        pytest.param(
            lambda: q.affine_quantize(value=0.73, scale=0.2, zero_point=5, bits=4),
            9,
            id="0.73 is round(3.65) + 5",
        ),
        pytest.param(
            lambda: q.affine_quantize(value=9, scale=0.2, zero_point=5, bits=4),
            15,
            id="a high outlier saturates",
        ),
        pytest.param(
            lambda: q.affine_quantize(value=-9, scale=0.2, zero_point=5, bits=4),
            0,
            id="a low outlier saturates",
        ),
        pytest.param(
            lambda: q.dequantize(code=9, scale=0.2, zero_point=5),
            pytest.approx(0.8),
            id="code 9 read back",
        ),
        pytest.param(lambda: q.dequantize(code=5, scale=0.2, zero_point=5), 0.0, id="the zero point is 0.0"),
        pytest.param(lambda: q.symmetric_max(bits=8), 127, id="largest symmetric code of 8 bits"),
        pytest.param(lambda: q.symmetric_max(bits=4), 7, id="largest symmetric code of 4 bits"),
        pytest.param(lambda: q.symmetric_scale(max_abs=3.5, bits=4), 0.5, id="weights up to 3.5 in 4 bits"),
        pytest.param(
            lambda: q.symmetric_quantize(value=-1.3, scale=0.5, bits=4), -3, id="-1.3 is -2.6 steps"
        ),
        pytest.param(lambda: q.symmetric_quantize(value=-90, scale=0.5, bits=4), -7, id="stays at -q_max"),
        pytest.param(lambda: q.max_rounding_error(scale=0.2), 0.1, id="half a step"),
        pytest.param(lambda: q.step_ratio(bits=4, than_bits=8), 17.0, id="INT4 against INT8: 255/15"),
        pytest.param(lambda: q.step_ratio(bits=8, than_bits=8), 1.0, id="INT8 against itself"),
        pytest.param(lambda: q.float_max(exponent_bits=4, mantissa_bits=3, specials="nan"), 448.0, id="E4M3"),
        pytest.param(
            lambda: q.float_max(exponent_bits=5, mantissa_bits=2, specials="ieee"),
            57344.0,
            id="E5M2",
        ),
        pytest.param(lambda: q.float_max(exponent_bits=2, mantissa_bits=1, specials="none"), 6.0, id="E2M1"),
        pytest.param(
            lambda: q.float_max(exponent_bits=5, mantissa_bits=10, specials="ieee"),
            65504.0,
            id="FP16",
        ),
        # −(−0.04) / (2/3) · (−1/3)
        pytest.param(
            lambda: q.gptq_correction(error=-0.04, inverse_hessian_own=2 / 3, inverse_hessian_other=-1 / 3),
            pytest.approx(-0.02),
            id="GPTQ moves the neighbour by -0.02",
        ),
        pytest.param(
            lambda: q.awq_error_ratio(step_before=1, step_after=1, channel_scale=2),
            0.5,
            id="AWQ halves a salient weight's error",
        ),
        pytest.param(
            lambda: q.awq_error_ratio(step_before=2, step_after=2.5, channel_scale=2),
            0.625,
            id="AWQ's gain where the group's step grows by a quarter",
        ),
    ],
)
def test_worked_number(call: Callable[[], float], expected: float) -> None:
    assert call() == expected


@given(low=reals, span=st.floats(min_value=1e-3, max_value=1e3), at=st.floats(0, 1), width=bits)
def test_a_value_in_range_comes_back_within_half_a_step(
    low: float, span: float, at: float, width: int
) -> None:
    scale = q.affine_scale(r_min=low, r_max=low + span, bits=width)
    zero = q.affine_zero_point(r_min=low, scale=scale)
    value = low + at * span
    code = q.affine_quantize(value=value, scale=scale, zero_point=zero, bits=width)
    assert 0 <= code < q.levels(bits=width)
    error = abs(q.dequantize(code=code, scale=scale, zero_point=zero) - value)
    assert error <= q.max_rounding_error(scale=scale) * (1 + 1e-6) + 1e-9


@given(low=st.floats(-100, 0), high=st.floats(1e-3, 100), width=bits)
def test_zero_is_exact_where_the_range_holds_it(low: float, high: float, width: int) -> None:
    scale = q.affine_scale(r_min=low, r_max=high, bits=width)
    zero = q.affine_zero_point(r_min=low, scale=scale)
    assert 0 <= zero < q.levels(bits=width)
    code = q.affine_quantize(value=0.0, scale=scale, zero_point=zero, bits=width)
    assert q.dequantize(code=code, scale=scale, zero_point=zero) == 0.0


@given(largest=st.floats(1e-3, 1e3), share=st.floats(-1, 1), width=bits)
def test_symmetric_is_odd_and_within_half_a_step(largest: float, share: float, width: int) -> None:
    scale = q.symmetric_scale(max_abs=largest, bits=width)
    value = share * largest
    code = q.symmetric_quantize(value=value, scale=scale, bits=width)
    assert code == -q.symmetric_quantize(value=-value, scale=scale, bits=width)
    assert abs(code) <= q.symmetric_max(bits=width)
    assert abs(q.dequantize(code=code, scale=scale) - value) <= scale / 2 * (1 + 1e-9)


@given(low=reals, span=st.floats(min_value=1e-3, max_value=1e3), fine=bits, coarse=bits)
def test_step_ratio_is_the_ratio_of_the_scales(low: float, span: float, fine: int, coarse: int) -> None:
    ratio = q.step_ratio(bits=coarse, than_bits=fine)
    scales = [q.affine_scale(r_min=low, r_max=low + span, bits=width) for width in (coarse, fine)]
    assert ratio == pytest.approx(scales[0] / scales[1])


@given(
    a=st.floats(0.5, 10),
    d=st.floats(0.5, 10),
    share=st.floats(-0.9, 0.9),
    error=st.floats(-1, 1),
)
def test_gptq_correction_is_the_least_output_error(a: float, d: float, share: float, error: float) -> None:
    """For H = [[a, b], [b, d]] no other move of the second weight leaves a smaller δᵀHδ."""
    b = share * math.sqrt(a * d)
    determinant = a * d - b * b
    move = q.gptq_correction(
        error=error, inverse_hessian_own=d / determinant, inverse_hessian_other=-b / determinant
    )

    def loss(second: float) -> float:
        first = -error
        return a * first**2 + 2 * b * first * second + d * second**2

    for other in (move - 0.01, move + 0.01, 0.0):
        assert loss(move) <= loss(other) + 1e-12
