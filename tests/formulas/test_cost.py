"""Cost formulas: hand-worked values and properties."""

from collections.abc import Callable

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


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        pytest.param(cost.month_hours, {"week_hours": 168}, 730.0, id="always is a month"),
        pytest.param(cost.month_hours, {"week_hours": 60}, 260.7142857, id="weekdays from 8 to 20"),
        pytest.param(cost.idle_usd, {"usd": 1460, "utilization": 0.4}, 876.0, id="60 % idle"),
        pytest.param(cost.idle_usd, {"usd": 1460, "utilization": 1}, 0.0, id="never idle"),
        pytest.param(
            cost.tokens_served,
            {"token_per_s": 1000, "hours": 730, "utilization": 0.5},
            1.314e9,
            id="1,000 a second, half the month",
        ),
        pytest.param(
            cost.share_usd_per_million_token,
            {"usd": 1460, "share": 0.1, "tokens": 1e9},
            0.146,
            id="a tenth of the time on a billion prompt tokens",
        ),
        pytest.param(
            cost.token_price_usd, {"tokens": 983_087, "usd_per_million": 0.45}, 0.44238915, id="an API bill"
        ),
        pytest.param(cost.usd_per_token, {"usd_per_million": 8}, 8e-6, id="8 USD a million"),
        pytest.param(cost.spare_gpu_hours, {"gpu_hours": 730, "reserve": 0.1}, 73.0, id="a tenth spare"),
        pytest.param(
            cost.depreciation_usd_per_month,
            {"purchase_usd": 30_000, "residual": 0, "years": 5},
            500.0,
            id="30,000 USD over five years",
        ),
        pytest.param(
            cost.depreciation_usd_per_month,
            {"purchase_usd": 36_000, "residual": 0.3, "years": 3},
            700.0,
            id="sold for 30 % after three",
        ),
        pytest.param(
            cost.capital_usd_per_month,
            {"purchase_usd": 30_000, "residual": 0, "per_year": 0.08},
            100.0,
            id="half of 30,000 at 8 %",
        ),
        pytest.param(
            cost.capital_usd_per_month,
            {"purchase_usd": 30_000, "residual": 1, "per_year": 0.08},
            200.0,
            id="all of it where nothing is lost",
        ),
        pytest.param(cost.energy_kwh, {"watts": 700, "hours": 730}, 511.0, id="700 W all month"),
        pytest.param(
            cost.energy_kwh, {"watts": 700, "hours": 730, "pue": 1.3}, 664.3, id="with the building's share"
        ),
        pytest.param(cost.co2e_kg, {"kwh": 664.3, "gram_per_kwh": 400}, 265.72, id="at 400 g a kWh"),
        pytest.param(
            cost.break_even_months,
            {"purchase_usd": 30_000, "rent_usd": 2000, "running_usd": 500},
            20.0,
            id="1,500 USD saved a month",
        ),
        pytest.param(
            cost.blended_usd_per_million,
            {"input_usd": 0.5, "output_usd": 2, "isl": 3000, "osl": 1000},
            0.875,
            id="three prompt tokens for each output token",
        ),
        pytest.param(
            cost.break_even_tokens, {"usd": 1460, "usd_per_million": 0.5}, 2.92e9, id="1,460 USD at 0.50"
        ),
    ],
)
def test_worked_numbers(function: Callable[..., float], arguments: dict[str, float], expected: float) -> None:
    assert function(**arguments) == pytest.approx(expected, rel=1e-9)


def test_a_purchase_that_saves_nothing_never_pays() -> None:
    for rent in (500, 400):
        assert cost.break_even_months(purchase_usd=1, rent_usd=rent, running_usd=500) is None


@given(
    usd=amounts, share=st.floats(min_value=0, max_value=1), tokens=st.integers(min_value=1, max_value=10**12)
)
def test_the_two_phases_add_up_to_the_bill(usd: int, share: float, tokens: int) -> None:
    prompt = cost.share_usd_per_million_token(usd=usd, share=share, tokens=4 * tokens)
    output = cost.share_usd_per_million_token(usd=usd, share=1 - share, tokens=tokens)
    whole = cost.token_price_usd(tokens=4 * tokens, usd_per_million=prompt)
    whole += cost.token_price_usd(tokens=tokens, usd_per_million=output)
    assert whole == pytest.approx(usd, rel=1e-9, abs=1e-9)


@given(tokens=st.integers(min_value=1, max_value=10**12), price=st.floats(min_value=0.001, max_value=1000))
def test_a_price_per_token_is_a_millionth(tokens: int, price: float) -> None:
    each = cost.usd_per_token(usd_per_million=price)
    assert tokens * each == pytest.approx(cost.token_price_usd(tokens=tokens, usd_per_million=price))
