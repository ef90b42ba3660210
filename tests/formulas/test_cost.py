"""Cost formulas: hand-worked values and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import cost

amounts = st.integers(min_value=0, max_value=10**6)


@pytest.mark.parametrize(
    ("gpus", "hours", "rate", "expected"),
    [
        pytest.param(8, 730, 3, 17_520.0, id="8 GPUs for a month at 3 USD"),
        pytest.param(1, 1, 5, 5.0, id="one GPU for an hour"),
        pytest.param(0, 730, 3, 0.0, id="no GPU"),
    ],
)
def test_cost(gpus: float, hours: float, rate: float, expected: float) -> None:
    assert cost.cost_usd(gpus=gpus, hours=hours, usd_per_gpu_hour=rate) == expected


@pytest.mark.parametrize(
    ("rate", "speed", "expected"),
    [
        # 54,000 tokens an hour.
        pytest.param(3, 15, 55.5556, id="3 USD an hour at a miserable 15 tokens/s"),
        pytest.param(5, 15, 92.5926, id="5 USD an hour at 15 tokens/s"),
        pytest.param(3, 1500, 0.555556, id="a hundred times the tokens"),
        pytest.param(3.6, 1000, 1.0, id="3.6 million tokens for 3.6 USD"),
    ],
)
def test_cost_per_token(rate: float, speed: float, expected: float) -> None:
    found = cost.usd_per_million_token(usd_per_hour=rate, token_per_s=speed)
    assert found == pytest.approx(expected, rel=1e-5)


@given(gpus=amounts, hours=amounts, rate=amounts)
def test_cost_is_linear_in_gpus_and_hours(gpus: int, hours: int, rate: int) -> None:
    one = cost.cost_usd(gpus=gpus, hours=hours, usd_per_gpu_hour=rate)
    assert cost.cost_usd(gpus=2 * gpus, hours=hours, usd_per_gpu_hour=rate) == 2 * one
    assert cost.cost_usd(gpus=gpus, hours=2 * hours, usd_per_gpu_hour=rate) == 2 * one
