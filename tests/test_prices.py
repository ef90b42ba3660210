"""Choosing a price: age, kinds, nodes, regions, outliers; and the user's own prices in the cache."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import price_cache, prices
from capplan.errors import InputError
from capplan.price_choice import choose, missing
from capplan.price_choice import given as given_price
from capplan.prices import PriceBook, Provider
from capplan.specs import Price

TODAY = datetime.date(2026, 11, 30)
GPU = "h100-sxm-80gb"
CLOUDS = {
    "big": Provider(
        id="big",
        name="Big Cloud",
        provider_class="hyperscaler",
        aliases=("bigc",),
        areas={"eastus": "us"},
        sources={"list": "the list of the big cloud"},
    ),
    "new": Provider(id="new", name="New Cloud", areas={}, sources={"list": "a page"}),
}


def row(usd: float, **fields: Any) -> Price:
    """A price read on the day of the question, unless told otherwise."""
    values: dict[str, Any] = {
        "gpu_id": GPU,
        "cloud": "new",
        "instance": "1x",
        "gpu_count": 1,
        "region": "us-east-1",
        "term": "on-demand",
        "usd_per_hour": usd,
        "read_on": TODAY.isoformat(),
        "source": "list",
    }
    return Price(**(values | fields))


def days_ago(days: int) -> str:
    return (TODAY - datetime.timedelta(days=days)).isoformat()


def chosen(rows: list[Price], **fields: Any) -> Price | None:
    """The row a question gets."""
    values: dict[str, Any] = {"term": "on-demand", "today": TODAY}
    quote = choose(PriceBook(rows, CLOUDS), GPU, **(values | fields))
    return None if quote is None else quote.row


def test_price_of_one_gpu_is_the_instances_over_its_gpus() -> None:
    assert row(55.04, gpu_count=8).usd_per_gpu_hour == 6.88


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(row(2.0), row(3.0, instance="b"), id="the cheaper"),
        pytest.param(row(3.0), row(2.0, instance="b", kind="marketplace"), id="a list price"),
        pytest.param(row(3.0), row(2.0, instance="b", kind="gpu-only"), id="one with the machine in it"),
        pytest.param(
            row(3.0, kind="marketplace"), row(2.5, instance="b", kind="average"), id="an offer, no average"
        ),
        pytest.param(row(3.0), row(2.0, instance="b", read_on=days_ago(121)), id="one of the last 120 days"),
        pytest.param(
            row(3.0, kind="marketplace"), row(2.0, instance="b", read_on=days_ago(366)), id="one of this year"
        ),
        pytest.param(row(3.0), row(16.0, instance="b", gpu_count=8), id="one GPU for 3 before a node for 16"),
    ],
)
def test_the_price_that_is_taken(better: Price, worse: Price) -> None:
    assert chosen([worse, better]) == better
    assert chosen([better, worse]) == better


def test_a_node_is_taken_where_it_costs_less_with_its_unused_gpus() -> None:
    single, node = row(3.0), row(16.0, instance="b", gpu_count=8)
    assert chosen([single, node], gpus=5) == single  # 15 against 16
    assert chosen([single, node], gpus=6) == node  # 18 against 16
    quote = choose(PriceBook([node], CLOUDS), GPU, term="on-demand", today=TODAY, gpus=6)
    assert quote is not None
    assert quote.billed_gpus(6) == 8
    assert quote.billed_gpus(9) == 16


def test_an_outlier_is_taken_only_from_the_provider_asked_for() -> None:
    rows = [row(value, instance=str(value)) for value in (2.0, 2.2, 2.4)] + [row(0.3, instance="teaser")]
    assert chosen(rows) == rows[0]
    quote = choose(PriceBook(rows, CLOUDS), GPU, term="on-demand", today=TODAY, region="us")
    assert quote is not None
    assert not quote.warnings
    assert quote.spread is not None
    assert (quote.spread.low, quote.spread.high, quote.spread.rows) == (2.0, 2.4, 3)
    lone = [*rows[:3], row(0.3, instance="teaser", cloud="big")]
    far = choose(PriceBook(lone, CLOUDS), GPU, term="on-demand", today=TODAY, cloud="big")
    assert far is not None
    assert any("far from what others ask" in text for text in far.warnings)
    spots = [row(2.0), row(0.05, term="spot", cloud="big")]
    assert chosen(spots, term="spot") is None
    assert chosen(spots, term="spot", cloud="big") == spots[1]


def test_the_newest_reading_of_one_price_counts() -> None:
    book = PriceBook([row(2.0, read_on=days_ago(1)), row(3.0, read_on=days_ago(9))], CLOUDS)
    assert [price.usd_per_hour for price in book.rows] == [2.0]
    assert [price.usd_per_hour for price in PriceBook(reversed(book.rows), CLOUDS).rows] == [2.0]


@pytest.mark.parametrize(
    ("cloud", "days", "old"),
    [("new", 60, False), ("new", 61, True), ("big", 120, False), ("big", 121, True)],
)
def test_an_old_price_says_so(cloud: str, days: int, old: bool) -> None:
    quote = choose(
        PriceBook([row(2.0, cloud=cloud, read_on=days_ago(days))], CLOUDS), GPU, term="on-demand", today=TODAY
    )
    assert quote is not None
    assert quote.age_days == days
    assert any(f"{days} days old" in text for text in quote.warnings) == old


def test_a_price_read_after_today_is_not_younger_than_nothing() -> None:
    quote = choose(PriceBook([row(2.0, read_on=days_ago(-3))], CLOUDS), GPU, term="on-demand", today=TODAY)
    assert quote is not None
    assert quote.age_days == 0
    assert any("is the clock right" in text for text in quote.warnings)


@pytest.mark.parametrize(
    ("region", "asked", "there"),
    [
        ("us-east-1", "us", True),
        ("us-east-1", "us-east", True),
        ("us-east-1", "us-east-1", True),
        ("us-east-1", "us-east-2", False),
        ("Texas, US", "us", True),
        ("US-FL", "us", True),
        ("eastus", "us", True),
        ("australia", "us", False),
        ("russia-1", "us", False),
        ("global", "us", False),
    ],
)
def test_regions_by_name_and_by_area(region: str, asked: str, there: bool) -> None:
    price = row(2.0, region=region, cloud="big")
    assert (chosen([price], region=asked) == price) == there


def test_a_cloud_by_its_aliases() -> None:
    book = PriceBook([row(2.0, cloud="big"), row(1.0)], CLOUDS)
    for name in ("big", "BIGC", "Big Cloud", "big-cloud"):
        assert book.resolve_cloud(name) == "big"
    with pytest.raises(InputError, match="unknown cloud") as caught:
        book.resolve_cloud("bigg")
    assert "big" in caught.value.hint


def test_no_price_is_no_price() -> None:
    book = PriceBook([row(2.0)], CLOUDS)
    assert choose(book, GPU, term="3yr", today=TODAY) is None
    assert choose(book, "t4-16gb", term="on-demand", today=TODAY) is None
    error = missing(book, GPU, term="3yr", cloud=None, region=None)
    assert "unpriced, not free" in error.message
    assert "on-demand" in error.hint
    assert "--price" in missing(book, "t4-16gb", term="on-demand", cloud=None, region=None).hint
    assert "new" in missing(book, GPU, term="on-demand", cloud="big", region=None).hint


def test_a_given_price_has_no_day() -> None:
    data = given_price(2.49, "spot").to_dict()
    assert (data["usd_per_gpu_hour"], data["read_on"], data["age_days"]) == (2.49, None, None)


@given(
    usd=st.lists(st.floats(min_value=1.0, max_value=4.0), min_size=1, max_size=8),
    gpus=st.integers(min_value=1, max_value=40),
)
def test_nothing_known_is_cheaper_than_the_choice(usd: list[float], gpus: int) -> None:
    rows = [row(value * (at + 1), instance=str(at), gpu_count=at + 1) for at, value in enumerate(usd)]
    best = choose(PriceBook(rows, CLOUDS), GPU, term="on-demand", today=TODAY, gpus=gpus)
    assert best is not None
    bill = best.billed_gpus(gpus) * best.usd_per_gpu_hour
    for price in rows:
        nodes = -(-gpus // price.gpu_count)
        assert bill <= nodes * price.usd_per_hour * (1 + 1e-9)


def test_cached_rows_come_back_and_join_the_shipped_ones(tmp_path: Path) -> None:
    fresh = row(1.5, cloud="runpod", instance="secure-1x", region="global-lowest", read_on="2027-01-02")
    path = price_cache.write_rows(tmp_path / "new", origin="import", cloud="runpod", rows=[fresh])
    assert price_cache.read_rows(tmp_path / "new") == [fresh]
    assert [file.name for file in path.parent.iterdir()] == ["runpod.import.json"]
    book = price_cache.load(tmp_path / "new")
    assert fresh in book.rows
    # The shipped reading of the same instance is older, and gone.
    shipped = price_cache.load()
    assert len(book.rows) == len(shipped.rows)
    assert fresh not in shipped.rows


def test_no_cache_is_the_shipped_rows(tmp_path: Path) -> None:
    assert price_cache.load(tmp_path / "none").rows == price_cache.load().rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": "capplan.prices/2", "rows": []}',
        '{"schema": "capplan.prices/1", "rows": [{"gpu_id": "t4-16gb"}]}',
        "not json",
    ],
)
def test_a_broken_cache_file_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.import.json").write_text(text)
    with pytest.raises(InputError) as caught:
        price_cache.load(tmp_path)
    assert caught.value.where.endswith("x.import.json")


@pytest.mark.parametrize(
    "wrong",
    [{"usd_per_hour": 0}, {"usd_per_hour": -1}, {"gpu_count": 0}, {"read_on": "soon"}, {"term": "weekly"}],
)
def test_a_cached_row_is_as_sound_as_a_shipped_one(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = price_cache.write_rows(tmp_path, origin="import", cloud="new", rows=[row(2.0)])
    data = json.loads(path.read_text())
    data["rows"][0] |= wrong
    path.write_text(json.dumps(data))
    with pytest.raises(InputError):
        price_cache.load(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = price_cache.write_rows(tmp_path, origin="import", cloud="new", rows=[row(2.0)])
    before = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("capplan.price_cache.os.replace", refuse)
    with pytest.raises(InputError, match="cannot be written"):
        price_cache.write_rows(tmp_path, origin="import", cloud="new", rows=[row(9.0)])
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


PROVIDER = """\
id: new
name: New
class: neocloud
sources: {list: a page}
prices:
- {gpu: t4-16gb, count: 1, instance: 1x, region: us, kind: instance, usd_per_hour: {on-demand: 1},
   read_on: 2026-01-02, source: list}
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("on-demand: 1", "on-demand: 0", "USD per hour"),
        ("on-demand: 1", "on-demand: -2", "USD per hour"),
        ("on-demand: 1", "on-demand: .nan", "not"),
        ("on-demand: 1", "weekly: 1", "term"),
        ("{on-demand: 1}", "{}", "no price"),
        ("count: 1", "count: 0", "count"),
        ("kind: instance", "kind: rumour", "kind"),
        ("source: list", "source: hearsay", "not declared"),
        ("2026-01-02", "yesterday", "no day"),
        ("class: neocloud", "class: cloud", "class"),
        ("id: new", "id: new\ncolour: red", "unknown key"),
        ("count: 1", "count: 1, gpus: 2", "unknown key"),
    ],
)
def test_a_provider_file_is_read_strictly(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(PROVIDER)
    assert len(prices.read_provider(path)[1]) == 1
    path.write_text(PROVIDER.replace(old, new))
    with pytest.raises(InputError, match=problem) as caught:
        prices.read_provider(path)
    assert caught.value.where == str(path)
