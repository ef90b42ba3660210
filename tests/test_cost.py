"""`capplan cost`: hand-worked line items, tokens, ownership, break-even; what must be refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import cost_json
from capplan.errors import DoesNotFitError, InputError
from capplan.prices import PriceBook
from capplan.units import format_unit_price, format_usd
from tests.cost_questions import BOOK, FakeLatency, asked, price


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> FakeLatency:
    """A model's speed without a model."""
    fake = FakeLatency([])
    monkeypatch.setattr("capplan.latency_estimate.latency", fake)
    return fake


def bill(**fields: Any) -> list[tuple[str, float, str, float, float]]:
    """Line items: name, quantity, unit, unit price, USD, rounded to a hundredth of a cent."""
    return [
        (item.name, round(item.quantity, 4), item.unit, round(item.usd_per_unit, 4), round(item.usd, 4))
        for item in asked(**fields).line_items
    ]


@pytest.mark.parametrize(
    ("fields", "items"),
    [
        pytest.param(
            {"gpus": 4},
            [("GPUs, on-demand", 2920, "GPU-hour", 2.0, 5840.0)],
            id="4 GPUs all month at 2 USD",
        ),
        pytest.param(
            {"gpus": 8, "price_usd_per_gpu_hour": 3},
            [("GPUs, on-demand", 5840, "GPU-hour", 3.0, 17_520.0)],
            id="the lesson's fleet: 8 GPUs at 3 USD",
        ),
        pytest.param(
            {"gpus": 1, "hours": 100},
            [("GPUs, on-demand", 100, "GPU-hour", 2.0, 200.0)],
            id="100 hours",
        ),
        pytest.param(
            {"gpus": 2, "schedule": "weekdays 8-20"},
            # 60 h a week · 730 / 168 = 260.7143 h.
            [("GPUs, on-demand", 521.4286, "GPU-hour", 2.0, 1042.8571)],
            id="office hours",
        ),
        pytest.param(
            {"gpus": 4, "diurnal": ",".join(["1"] * 12 + ["0.3"] * 12)},
            # By day 4 of 4, by night 0.3 · 4 = 1.2, so 2: (4 + 2) / 2 = 3 on average.
            [("GPUs, on-demand", 2190, "GPU-hour", 2.0, 4380.0)],
            id="two GPUs by night",
        ),
        pytest.param(
            {"gpus": 4, "term": "spot"},
            [
                ("GPUs, spot", 2920, "GPU-hour", 1.0, 2920.0),
                ("reserve for interruptions", 292, "GPU-hour", 1.0, 292.0),
            ],
            id="spot with a tenth spare",
        ),
        pytest.param(
            {"gpus": 4, "term": "spot", "spot_reserve": 0},
            [("GPUs, spot", 2920, "GPU-hour", 1.0, 2920.0)],
            id="spot without a reserve",
        ),
        pytest.param(
            {"gpus": 4, "term": "1yr", "hours": 100},
            [("GPUs, 1yr", 2920, "GPU-hour", 1.5, 4380.0)],
            id="a commitment is paid all month",
        ),
        pytest.param(
            {"gpus": 6, "cloud": "nodes", "hours": 10},
            [
                ("GPUs, on-demand", 60, "GPU-hour", 3.0, 180.0),
                ("left over in nodes", 20, "GPU-hour", 3.0, 60.0),
            ],
            id="6 GPUs of a node of 8",
        ),
        pytest.param(
            {
                "gpus": 2,
                "term": "owned",
                "own": {
                    "purchase_usd_per_gpu": 30_000,
                    "depreciation_years": 5,
                    "network_fraction": 0.1,
                    "capital_fraction_per_year": 0.08,
                    "server_watts_per_gpu": 1000,
                    "power_fraction": 0.5,
                    "pue": 1.2,
                    "electricity_usd_per_kwh": 0.1,
                    "hosting_usd_per_kw_month": 200,
                    "maintenance_fraction_per_year": 0.04,
                    "staff_fraction": 0.1,
                },
            },
            [
                ("purchase", 2, "GPU", 500.0, 1000.0),
                ("network", 2, "GPU", 50.0, 100.0),
                # 33,000 USD, half of it tied up, at 8 % / 12.
                ("capital", 2, "GPU", 110.0, 220.0),
                # 2 · 500 W · 730 h · 1.2.
                ("electricity", 876, "kWh", 0.1, 87.6),
                ("hosting", 2, "kW", 200.0, 400.0),
                ("maintenance", 2, "GPU", 100.0, 200.0),
                ("staff", 2007.6, "USD", 0.1, 200.76),
            ],
            id="two bought GPUs",
        ),
    ],
)
def test_line_items(fields: dict[str, Any], items: list[tuple[str, float, str, float, float]]) -> None:
    assert bill(**fields) == items
    made = asked(**fields)
    assert made.usd_per_month == pytest.approx(sum(item[4] for item in items), abs=0.01)
    assert made.to_dict()["usd_per_month"] == sum(item.usd for item in made.line_items)


def test_the_bill_is_never_multiplied_by_utilization() -> None:
    busy, half = (asked(gpus=4, output_token_per_s=1000, utilization=part) for part in (1.0, 0.4))
    assert half.usd_per_month == busy.usd_per_month == 5840
    assert (busy.idle_usd, half.idle_usd) == (0, pytest.approx(0.6 * 5840))
    assert busy.tokens is not None
    assert half.tokens is not None
    assert half.tokens.output == pytest.approx(0.4 * busy.tokens.output)
    assert half.tokens.usd_per_million_output == pytest.approx(2.5 * busy.tokens.usd_per_million_output)


def test_idle_hours_and_gpus_are_inside_the_bill() -> None:
    made = asked(gpus=6, cloud="nodes", utilization=0.5)
    assert made.busy == pytest.approx(0.5 * 6 / 8)
    assert made.gpus_billed == 8
    reserved = asked(gpus=4, term="1yr", hours=365)
    assert reserved.idle_usd == pytest.approx(reserved.usd_per_month / 2)


def test_tokens_of_a_measured_speed() -> None:
    # The lesson's anti-pattern: 3 USD an hour for 15 tokens a second.
    made = asked(gpus=1, price_usd_per_gpu_hour=3, output_token_per_s=15)
    assert made.tokens is not None
    assert made.tokens.usd_per_million_output == pytest.approx(55.5556, rel=1e-5)
    assert made.tokens.usd_per_million_input is None
    assert made.tokens.output == 15 * 3600 * 730
    with_lengths = asked(gpus=1, price_usd_per_gpu_hour=3, output_token_per_s=15, isl=300, osl=100)
    assert with_lengths.tokens is not None
    # Three prompt tokens for each output token: a quarter of 55.56.
    assert with_lengths.tokens.usd_per_million_blended == pytest.approx(13.8889, rel=1e-5)
    # 100 output tokens at 15/s are 6.67 s of 3 USD an hour.
    assert with_lengths.tokens.usd_per_request == pytest.approx(3 * 100 / 15 / 3600)


def test_utilizations_of_the_same_bill() -> None:
    made = asked(gpus=1, output_token_per_s=1000)
    at = made.by_utilization
    assert sorted(at) == [0.4, 0.6, 0.85, 1.0]
    assert at[0.4] == pytest.approx(at[1.0] / 0.4)
    assert at[1.0] == pytest.approx(1e6 * 2 / 3.6e6)


def test_a_model_with_users(speed: FakeLatency) -> None:
    made = asked(gpus=4, model="8b", concurrency=16, isl=1000, osl=500)
    assert speed.asked[0]["concurrency"] == 4  # 16 users on 4 replicas
    assert made.speed is not None
    assert made.speed.output_token_per_s == 4 * 400
    assert (made.speed.low, made.speed.high) == (pytest.approx(1280), pytest.approx(2000))
    tokens = made.tokens
    assert tokens is not None
    assert tokens.output == 1600 * 3600 * 730
    assert tokens.input == 2 * tokens.output
    # A fifth of the time is prefill.
    assert tokens.usd_per_million_output == pytest.approx(1e6 * 5840 * 0.8 / tokens.output)
    assert tokens.usd_per_million_input == pytest.approx(1e6 * 5840 * 0.2 / (2 * tokens.output))
    whole = tokens.usd_per_million_output * tokens.output + tokens.usd_per_million_input * tokens.input
    assert whole / 1e6 == pytest.approx(5840)
    assert tokens.usd_per_million_blended == pytest.approx(1e6 * 5840 / (3 * tokens.output))
    assert made.usd_per_user_month == 5840 / 16
    band = made.to_dict()["usd_per_million_output_token_band"]
    assert band["low"] == pytest.approx(tokens.usd_per_million_output / 1.25)
    assert band["high"] == pytest.approx(tokens.usd_per_million_output / 0.8)
    assert "of the speed" in made.notes


def test_users_that_do_not_divide_among_replicas(speed: FakeLatency) -> None:
    made = asked(gpus=4, model="8b", concurrency=5)
    assert speed.asked[0]["concurrency"] == 2
    assert made.speed is not None
    assert made.speed.output_token_per_s == 5 * 100
    few = asked(gpus=4, model="8b", concurrency=2)
    assert few.speed is not None
    assert few.speed.output_token_per_s == 200


def test_a_model_without_a_load_is_filled_up(speed: FakeLatency) -> None:
    made = asked(gpus=8, model="8b", tp=2)
    assert [question["concurrency"] for question in speed.asked] == [1, 8]
    assert made.speed is not None
    assert made.speed.users == 4 * 8
    assert made.speed.output_token_per_s == 4 * 800
    assert "as full as pays" in made.speed.load


def test_a_model_is_filled_within_limits(speed: FakeLatency) -> None:
    made = asked(gpus=1, model="8b", slo="tpot=50ms")
    assert made.speed is not None
    assert made.speed.users == 4


def test_a_request_rate_says_how_busy_the_fleet_is(speed: FakeLatency) -> None:
    made = asked(gpus=2, model="8b", request_per_s=4, osl=100, isl=100)
    assert speed.asked[0]["request_per_s"] == 2
    assert made.tokens is not None
    assert made.tokens.output == 4 * 100 * 3600 * 730
    assert made.tokens.requests == 4 * 3600 * 730
    assert made.idle_usd == pytest.approx(made.usd_per_month / 2)
    assert made.by_utilization == {}


def test_what_cannot_be_served_does_not_fit(speed: FakeLatency) -> None:
    with pytest.raises(DoesNotFitError, match="2 GPUs serve at most 8"):
        asked(gpus=2, model="8b", request_per_s=9)
    speed.tpot_limit_s = 0.001
    with pytest.raises(DoesNotFitError, match="no number of users"):
        asked(gpus=1, model="8b", slo="tpot=1ms")
    speed.fits = False
    with pytest.raises(DoesNotFitError, match="does not fit"):
        asked(gpus=1, model="8b")


def test_users_and_requests() -> None:
    assert asked(gpus=1, users=100).usd_per_user_month == 14.6
    made = asked(gpus=1, output_token_per_s=100, isl=10, osl=100, requests_per_user_day=24)
    assert made.tokens is not None
    assert made.tokens.usd_per_request == pytest.approx(2 / 3600)
    assert made.usd_per_user_month == pytest.approx(730 * 2 / 3600)


def test_ways_to_pay_list_what_has_no_price() -> None:
    options = {option.way: option for option in asked(gpus=4).options}
    assert [option.way for option in asked(gpus=4).options] == ["on-demand", "spot", "1yr", "3yr", "owned"]
    assert options["on-demand"].usd_per_month == 5840
    assert options["spot"].usd_per_month == pytest.approx(3212)
    assert options["1yr"].usd_per_month == 4380
    missing = options["3yr"].to_dict()
    assert (missing["priced"], missing["usd_per_month"], missing["usd_per_gpu_hour"]) == (False, None, None)


def test_owning_by_typical_figures_has_a_band() -> None:
    made = asked(gpus=8, term="owned")
    owned = made.ownership
    assert owned is not None
    assert owned.low_usd < owned.usd_per_month < owned.high_usd
    # 325,000 USD a node of 8 over 60 months.
    assert made.line_items[0].usd == pytest.approx(325_000 / 60)
    data = made.to_dict()
    assert data["price"]["usd_per_gpu_hour"] == pytest.approx(made.usd_per_month / 8 / 730)
    assert data["price"]["age_days"] >= 0
    assert {
        name for figure in data["ownership"]["assumptions"].values() for name in figure["sources"]
    } == set(data["ownership"]["sources"])


def test_a_gpu_without_a_purchase_price_is_not_owned_for_free() -> None:
    with pytest.raises(InputError, match="no purchase price"):
        asked(gpu="t4", term="owned")
    made = asked(gpu="t4", term="owned", own={"purchase_usd_per_gpu": 1000})
    assert made.usd_per_month > 1000 / 60
    assert any("TDP" in note for note in made.notes)


def test_break_even_of_renting_and_owning() -> None:
    own = {
        "purchase_usd_per_gpu": 10_000,
        "network_fraction": 0,
        "capital_fraction_per_year": 0,
        "electricity_usd_per_kwh": 0,
        "hosting_usd_per_kw_month": 0,
        "maintenance_fraction_per_year": 0.12,
        "staff_fraction": 0,
        "depreciation_years": 5,
    }
    even = asked(gpus=1, own=own).break_even
    # 10,000 / (1,460 rent − 100 upkeep).
    assert even.own_months == pytest.approx(10_000 / 1360)
    # 166.67 + 100 USD a month are 133.3 h at 2 USD.
    assert even.rent_hours_per_month == pytest.approx((10_000 / 60 + 100) / 2)
    assert asked(gpus=1, own=own, price_usd_per_gpu_hour=0.1).break_even.own_months is None


def test_break_even_with_an_api() -> None:
    made = asked(
        gpus=1,
        output_token_per_s=1000,
        isl=3000,
        osl=1000,
        api_price_input=0.5,
        api_price_output=2.0,
        utilization=0.5,
    )
    even = made.break_even
    assert even.api_usd_per_million == 0.875
    # Half of 1,000 output and 3,000 prompt tokens a second for 730 h.
    served = 0.5 * 4000 * 3600 * 730
    assert even.api_usd_per_month == pytest.approx(served * 0.875 / 1e6)
    assert even.api_tokens_per_month == pytest.approx(1460 / 0.875 * 1e6)
    assert even.api_utilization == pytest.approx(1460 / 0.875 * 1e6 / (2 * served))
    alone = asked(gpus=1, output_token_per_s=1000, api_price_output=2.0).break_even
    assert alone.api_usd_per_month == pytest.approx(1000 * 3600 * 730 * 2 / 1e6)


def test_energy_of_the_tdp_or_as_measured() -> None:
    energy = asked(gpus=4, grid_gco2_per_kwh=400).energy
    assert energy is not None
    assert (energy.power.watts, energy.power.provenance) == (700, "tdp")
    assert energy.gpu_kwh == pytest.approx(4 * 0.7 * 730)
    assert energy.facility_kwh == pytest.approx(4 * 0.7 * 730 * 1.3)
    assert energy.co2e_kg == pytest.approx(4 * 0.7 * 730 * 1.3 * 0.4)
    measured = asked(gpus=4, watts=500, hours=100, own={"pue": 1.0}).energy
    assert measured is not None
    assert (measured.power.provenance, measured.facility_kwh) == ("measured", pytest.approx(200))
    assert measured.co2e_kg is None


def test_a_gpu_whose_power_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from capplan import catalog

    known = catalog.gpu("h100")
    monkeypatch.setattr(catalog, "gpu", lambda _: replace(known, tdp_w=None))
    made = asked(gpus=1)
    assert made.energy is None
    assert any("no power" in note for note in made.notes)


@settings(max_examples=40)
@given(
    gpus=st.integers(min_value=1, max_value=1000),
    times=st.integers(min_value=2, max_value=9),
    hours=st.floats(min_value=1, max_value=80),
    usd=st.floats(min_value=0.01, max_value=100),
)
def test_linear_in_gpus_and_hours(gpus: int, times: int, hours: float, usd: float) -> None:
    def month(gpus: int, hours: float) -> float:
        return asked(gpus=gpus, hours=hours, price_usd_per_gpu_hour=usd).usd_per_month

    one = month(gpus, hours)
    assert month(times * gpus, hours) == pytest.approx(times * one)
    assert month(gpus, times * hours) == pytest.approx(times * one)


@settings(max_examples=25)
@given(gpus=st.integers(min_value=1, max_value=64), part=st.floats(min_value=0.01, max_value=1))
def test_every_number_is_finite_and_positive(gpus: int, part: float) -> None:
    made = asked(gpus=gpus, output_token_per_s=123.0, utilization=part, isl=7, osl=3).to_dict()
    json.dumps(made, allow_nan=False)

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert value >= 0

    walk(made)


def test_the_package_offers_it_by_name() -> None:
    import capplan

    for _ in range(2):  # a module of that name would take its place once it is imported
        assert capplan.cost("h100", price_usd_per_gpu_hour=2.0).usd_per_month == 1460
        assert capplan.CostEstimate.__name__ == "CostEstimate"


def test_the_json_has_the_keys_scripts_rely_on() -> None:
    made = asked(gpus=4, output_token_per_s=1000).to_dict()
    assert made["schema"] == "capplan.cost/1"
    for key in ("line_items", "usd_per_month", "usd_per_million_output_token", "usd_per_million_input_token"):
        assert key in made
    assert made["price"].keys() >= {"usd_per_gpu_hour", "read_on", "source", "age_days"}
    assert made["price"]["usd_per_gpu_hour"] == 2.0
    assert made["price"]["age_days"] == 0
    assert made == cost_json.to_dict(asked(gpus=4, output_token_per_s=1000))


def test_measured_power_is_paid_and_provided_for() -> None:
    items = {item.name: item for item in asked(term="owned", watts=2000).line_items}
    assert items["electricity"].quantity == pytest.approx(2 * 730 * 1.3)
    assert items["hosting"].quantity == 2.0  # more than the 1.275 kW of the node's share
    light = {item.name: item for item in asked(term="owned", watts=400).line_items}
    assert light["hosting"].quantity == 1.275


def test_an_answer_says_that_its_price_is_old() -> None:
    old = PriceBook([price(2.0, read_on="2026-06-01")], BOOK.providers)
    made = asked(prices=old)
    assert any("182 days old" in note for note in made.notes)
    assert made.to_dict()["price"]["age_days"] == 182
    assert not any("days old" in note for note in asked().notes)


def test_a_residual_value_is_known_for_three_years_only() -> None:
    three, five = (
        asked(term="owned", own={"depreciation_years": years, "purchase_usd_per_gpu": 36_000}).line_items[0]
        for years in (3, 5)
    )
    assert three.usd == pytest.approx(36_000 * 0.7 / 36)
    assert five.usd == pytest.approx(36_000 / 60)


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "0.00"),
        (1460, "1,460.00"),
        (0.508, "0.508"),
        (0.1, "0.100"),
        (8e-6, "0.000008"),
        (0.000221, "0.000221"),
    ],
)
def test_money_as_text(usd: float, text: str) -> None:
    assert format_usd(usd) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [(2.2884, "2.2884"), (2, "2.00"), (0.085, "0.085"), (677.083333, "677.0833"), (0.7, "0.70")],
)
def test_a_price_that_is_multiplied_keeps_its_digits(usd: float, text: str) -> None:
    assert format_unit_price(usd) == text


def test_a_models_speed_is_that_of_latency() -> None:
    """The two commands cannot disagree: they ask the same function."""
    from capplan import latency_estimate as latency

    alone = latency.latency("8b", gpu="h100", concurrency=8, isl=512, osl=128)
    made = asked(gpus=4, model="8b", concurrency=32, isl=512, osl=128)
    assert made.speed is not None
    assert made.tokens is not None
    assert alone.throughput.estimate is not None
    assert made.speed.output_token_per_s == pytest.approx(4 * alone.throughput.estimate)
    assert alone.served is not None
    assert made.tokens.prefill_share == pytest.approx(alone.served.prefill_share)
    # Every replica full makes cheaper tokens than one user on it.
    single, full = (asked(model="8b", isl=512, osl=128, **load) for load in ({"concurrency": 1}, {}))
    assert single.tokens is not None
    assert full.tokens is not None
    assert full.tokens.usd_per_million_blended < single.tokens.usd_per_million_blended / 5
