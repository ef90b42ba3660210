"""Questions about money that cannot be answered name the option; schedules and assumptions as written."""

from typing import Any

import pytest

from capplan import schedule
from capplan.cost_question import CostQuestion, check
from capplan.errors import InputError
from capplan.ownership import parse_assumptions
from tests.cost_questions import asked


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"gpus": 0}, "--gpus"),
        ({"gpus": 10**7}, "--gpus"),
        ({"gpus": 3, "tp": 2}, "--gpus"),
        ({"price_usd_per_gpu_hour": 0}, "--price"),
        ({"price_usd_per_gpu_hour": -2.0}, "--price"),
        ({"price_usd_per_gpu_hour": float("nan")}, "--price"),
        ({"price_usd_per_gpu_hour": float("inf")}, "--price"),
        ({"price_usd_per_gpu_hour": 2490.0}, "--price"),
        ({"price_usd_per_gpu_hour": 2.0, "cloud": "some"}, "--price"),
        ({"term": "weekly"}, "--term"),
        ({"term": "owned", "cloud": "some"}, "--term owned"),
        ({"term": "3yr"}, "--term"),
        ({"cloud": "nobody"}, "--cloud"),
        ({"cloud": "nodes", "region": "eu"}, "--region"),
        ({"gpu": "t4"}, "--gpu"),
        ({"hours": 0.0}, "--hours"),
        ({"hours": 8760.0}, "--hours"),
        ({"hours": 100.0, "schedule": "daily 8-20"}, "--schedule"),
        ({"schedule": "now and then"}, "--schedule"),
        ({"diurnal": "1,2,3"}, "--diurnal"),
        ({"diurnal": ",".join(["0"] * 24)}, "--diurnal"),
        ({"utilization": 0.0}, "--utilization"),
        ({"utilization": 40.0}, "--utilization"),
        ({"spot_reserve": -0.1}, "--spot-reserve"),
        ({"watts": 0.0}, "--watts"),
        ({"users": 0}, "--users"),
        ({"concurrency": 4}, "--concurrency"),
        ({"request_per_s": 4.0}, "--request-rate"),
        ({"slo": "chat"}, "--slo"),
        ({"model": "8b", "concurrency": 4, "output_token_per_s": 5.0}, "--concurrency"),
        ({"model": "8b", "request_per_s": 4.0, "utilization": 0.5}, "--utilization"),
        ({"output_token_per_s": 5.0, "slo": "chat", "model": "8b"}, "--slo"),
        ({"api_price_output": 2.0}, "--api-price-output"),
        ({"output_token_per_s": 5.0, "api_price_input": 2.0}, "--api-price-input"),
        ({"output_token_per_s": 5.0, "isl": 1, "osl": 1, "api_price_input": 2.0}, "--api-price-input"),
        # A price of one token: eight millionths.
        ({"output_token_per_s": 5.0, "api_price_output": 8e-6}, "--api-price-output"),
        ({"output_token_per_s": 5.0, "requests_per_user_day": 5.0}, "--requests-per-user-day"),
    ],
)
def test_bad_questions_name_the_option(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        asked(**fields)
    assert where in caught.value.where
    assert caught.value.hint


def test_a_calibration_without_a_model_is_refused_and_a_device_is_not() -> None:
    for speed in (None, 900.0):
        with pytest.raises(InputError, match="calibration of step times") as caught:
            check(CostQuestion(gpu="h100", profile="mine.json", output_token_per_s=speed))
        assert caught.value.where == "--profile, --gpu"
    check(CostQuestion(profile="mine.json"))
    check(CostQuestion(gpu="h100", profile="mine.json", model="8b"))


def test_a_price_per_token_is_recognised() -> None:
    with pytest.raises(InputError) as caught:
        check(CostQuestion(gpu="h100", output_token_per_s=1, api_price_output=8e-6))
    assert "8e-06 a token is 8 a million" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("always", 168),
        ("weekdays 8-20", 60),
        ("weekends", 48),
        ("daily 22-6", 56),
        ("mon-fri 9-18, sat 10-14", 49),
        ("sunday 20-4", 8),
        ("fri-mon 0-24", 96),
        ("mon 8-12, mon 10-14", 6),
    ],
)
def test_schedules(text: str, hours: int) -> None:
    assert len(schedule.week_hours(text)) == hours
    assert schedule.month_hours(text) == pytest.approx(hours * 730 / 168)


@pytest.mark.parametrize(
    "text", ["", "monkey 8-20", "weekdays 8", "daily 8-8", "daily 25-26", "mon-xyz", "8-20"]
)
def test_what_is_no_schedule(text: str) -> None:
    with pytest.raises(InputError, match="no schedule"):
        schedule.week_hours(text)


def test_replicas_run_whole() -> None:
    shares = tuple([0.5] * 24)
    assert schedule.running_share(shares, 4) == 0.5
    assert schedule.running_share(shares, 3) == pytest.approx(2 / 3)
    assert schedule.running_share(tuple([0.0] * 23 + [1.0]), 2) == pytest.approx(1 / 24)


@pytest.mark.parametrize(
    "entry", ["pue", "pue=", "pue=hot", "pue=0.5", "pue=nan", "colour=red", "depreciation_years=0"]
)
def test_assumptions_that_make_no_sense(entry: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_assumptions((entry,))
    assert caught.value.where == "--own"


def test_assumptions_by_name() -> None:
    assert parse_assumptions(("pue=1.2", "depreciation-years=4")) == {"pue": 1.2, "depreciation_years": 4}
