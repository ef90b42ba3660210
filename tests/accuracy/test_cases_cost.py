"""Field cases about money: a million left out, a price entered per token, a bill times utilisation.

Beside them, the shipped prices against the table they were taken from, row by row.
"""

import csv
import datetime
from functools import cache

import pytest

from capplan import price_cache
from capplan.cost_estimate import cost
from capplan.errors import InputError
from capplan.formulas import cost as formulas
from capplan.prices import TERMS
from tests.accuracy import oracles
from tests.accuracy.cases import FieldCase, field_case

TABLE = oracles.DATA / "catalog" / "prices.csv"
COLUMNS = dict(zip(TERMS, ("on_demand", "spot", "1yr", "3yr"), strict=True))


@field_case(
    "bc-152",
    "anomalyco/opencode#11175",
    {"usd": (0.4424, 0.001), "buggy_usd": (442389.15, 0.0001), "overcharge": 1000000.0},
)
def test_bc_152_a_price_is_per_million(case: FieldCase) -> None:
    usd = formulas.token_price_usd(tokens=983_087, usd_per_million=0.45)
    case.check("usd", usd)
    buggy = 0.45 * 983_087 * 100 / 100  # cents, as the tool had it
    case.check("buggy_usd", buggy)
    case.check("overcharge", round(buggy / usd, 3))


@field_case(
    "bc-153",
    "maximhq/bifrost#3559",
    {
        "input_usd_per_token": 8.0e-06,
        "output_usd_per_token": 2.8e-05,
        "cache_read_usd_per_token": 2.0e-06,
        "correction_error_input": 0.1,
        "correction_error_output": 0.01,
    },
)
def test_bc_153_prices_are_entered_per_million_and_tiny_ones_refused(case: FieldCase) -> None:
    per_token = {name: formulas.usd_per_token(usd_per_million=usd) for name, usd in
                 (("input", 8), ("output", 28), ("cache_read", 2))}  # fmt: skip
    for name, usd in per_token.items():
        case.check(f"{name}_usd_per_token", usd)
    case.check("correction_error_input", round(8.0e-07 / per_token["input"], 12))
    case.check("correction_error_output", round(2.8e-07 / per_token["output"], 12))
    for entered in (8.0e-07, 2.8e-07, 8.0e-06):
        with pytest.raises(InputError, match="per million"):
            cost("h100", output_token_per_s=100, api_price_output=entered)
    cost("h100", output_token_per_s=100, api_price_output=28)


@field_case(
    "bc-156",
    "https://kickllm.com/tools/self-host-vs-api-break-even-calculator",
    {"usd_always_on": 1460, "usd_scale_to_zero_ideal": 584, "understatement": 2.5},
)
def test_bc_156_an_idle_gpu_is_billed(case: FieldCase) -> None:
    always = cost("h100", gpus=1, price_usd_per_gpu_hour=2.0, utilization=0.4)
    released = cost("h100", gpus=1, price_usd_per_gpu_hour=2.0, hours=0.4 * 730)
    case.check("usd_always_on", always.usd_per_month)
    case.check("usd_scale_to_zero_ideal", released.usd_per_month)
    case.check("understatement", always.usd_per_month / released.usd_per_month)
    assert always.idle_usd == pytest.approx(1460 - 584)


@cache
def table() -> tuple[dict[str, str], ...]:
    """The rows the snapshot was taken from."""
    if not TABLE.exists():
        pytest.skip(f"no {TABLE.name} beside the repository")
    with TABLE.open(encoding="utf-8", newline="") as stream:
        return tuple(csv.DictReader(stream))


def test_every_row_of_the_table_is_shipped_as_it_was_read() -> None:
    shipped = {
        (row.cloud, row.region, row.instance, row.gpu_id, row.gpu_count, row.term): row
        for row in price_cache.load().rows
    }
    left, seen = [], set()
    for row in table():
        for term, column in COLUMNS.items():
            text = row[f"price_{column}_usd_hr"]
            if not text:
                continue
            count = float(row["gpu_count"])
            key = (row["cloud"], row["region"], row["instance_type"], row["gpu_id"], int(count), term)
            found = shipped.get(key)
            if found is None or found.read_on != row["as_of"]:
                left.append((row["instance_type"], term, row["as_of"], found and found.read_on))
                continue
            assert found.usd_per_hour == float(text)
            assert abs(found.usd_per_gpu_hour - float(text) / count) < 1e-9
            seen.add(key)
    assert seen == set(shipped)
    # Two readings that a later one replaced, and a sixth of a GPU.
    assert sorted(left, key=str) == [
        ("Standard_NV6ads_A10_v5", "on-demand", "2026-09-06", None),
        ("Standard_NV6ads_A10_v5", "spot", "2026-09-06", None),
        ("p5.4xlarge", "on-demand", "2026-02-15", "2026-10-01"),
        ("p6-b200.48xlarge", "on-demand", "2026-02-15", "2026-10-01"),
    ]


def test_ages_are_the_tables_on_its_day() -> None:
    day = datetime.date(2026, 11, 29)
    for row in table():
        assert (day - datetime.date.fromisoformat(row["as_of"])).days == int(row["age_days"])
