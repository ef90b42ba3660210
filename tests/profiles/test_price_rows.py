"""Invariants over every shipped price and every figure of ownership."""

import datetime
from collections import Counter

import pytest

from capplan import catalog, price_cache, prices, tco
from capplan.specs import Price

BOOK = price_cache.load()
ROWS = prices.shipped()[0]
GPUS = set(catalog.ids("gpus"))
# Prices five times off the median of their GPU (spot: fifteen times below it): teasers, retired GPUs, lone
# GPUs in large machines. Each was looked at; a new one must be, too.
OUTLIERS = {
    ("aws", "g4dn.16xlarge", "t4-16gb", "on-demand", 4.352),
    ("dataoorts", "gc2.a10-24-1", "a10-24gb", "on-demand", 0.35),
    ("dataoorts", "gc2.h100-80-1", "h100-sxm-80gb", "on-demand", 0.69),
    ("dataoorts", "gc2.h100-80-8", "h100-sxm-80gb", "on-demand", 0.69),
    ("exoscale", "GPU HUGE", "p100-pcie-16gb", "on-demand", 0.3525),
    ("runpod", "community-1x", "v100-sxm-16gb", "on-demand", 0.19),
    ("vast", "1x", "a100-sxm-40gb", "on-demand", 0.2681),
    ("vast", "1x", "a100-sxm-40gb", "on-demand", 0.2689),
    ("vast", "1x", "a100-sxm-80gb", "on-demand", 0.4422),
    ("vast", "1x", "l4-24gb", "on-demand", 0.0218),
    ("vast", "1x", "l4-24gb", "on-demand", 0.0324),
    ("vast", "1x", "l40s-48gb", "on-demand", 0.4007),
    ("vast", "1x-Tesla_V100", "v100-sxm-16gb", "on-demand", 0.18),
    ("verda", "1V100.6V", "v100-sxm-16gb", "on-demand", 0.1381),
    ("verda", "1x", "v100-sxm-16gb", "on-demand", 0.17),
    ("vast", "1x", "a100-sxm-40gb", "spot", 0.1333),
    ("vast", "1x", "a100-sxm-80gb", "spot", 0.1333),
    ("vast", "1x", "l4-24gb", "spot", 0.0267),
    ("verda", "1x", "v100-sxm-16gb", "spot", 0.085),
}


def told(row: Price) -> str:
    return f"{row.cloud}, {row.instance}, {row.region}, {row.gpu_id}, {row.term}"


def test_the_snapshot_is_as_large_as_promised() -> None:
    assert len(ROWS) >= 764
    assert len(BOOK.providers) >= 44
    assert len(BOOK.gpu_ids()) >= 48


def test_every_price_is_a_price_of_a_known_gpu_on_a_day_from_a_source() -> None:
    today = datetime.date.today()
    for row in ROWS:
        assert 0 < row.usd_per_gpu_hour <= 20, told(row)
        assert row.gpu_count >= 1, told(row)
        assert row.gpu_id in GPUS, told(row)
        assert row.instance, told(row)
        assert row.region, told(row)
        assert datetime.date(2023, 1, 1) <= datetime.date.fromisoformat(row.read_on), told(row)
        assert datetime.date.fromisoformat(row.read_on) <= today + datetime.timedelta(days=1), told(row)
        assert BOOK.providers[row.cloud].sources[row.source], told(row)


def test_no_price_twice() -> None:
    counts = Counter(map(prices.row_key, ROWS))
    assert [key for key, count in counts.items() if count > 1] == []


def test_every_source_and_area_of_a_provider_is_used() -> None:
    for provider in BOOK.providers.values():
        rows = [row for row in ROWS if row.cloud == provider.id]
        assert {row.source for row in rows} == set(provider.sources), provider.id
        assert set(provider.areas) <= {row.region for row in rows}, provider.id
        assert set(provider.areas.values()) <= {"us", "eu", "ap", "ca"}, provider.id


def test_file_names_and_aliases_are_one_providers() -> None:
    paths = sorted((catalog.PROFILES / "prices").glob("*.yaml"))
    assert [path.stem for path in paths] == sorted(BOOK.providers)
    claims = Counter(
        name
        for provider in BOOK.providers.values()
        for name in {catalog.normalised(name) for name in (provider.id, provider.name, *provider.aliases)}
    )
    assert [name for name, count in claims.items() if count > 1] == []


def test_prices_far_from_the_others_are_those_listed() -> None:
    found = {
        (row.cloud, row.instance, row.gpu_id, row.term, row.usd_per_gpu_hour)
        for row in BOOK.rows
        if BOOK.is_outlier(row)
    }
    assert found == OUTLIERS
    assert sum(row.term == "on-demand" and BOOK.is_outlier(row) for row in BOOK.rows) == 15


@pytest.mark.parametrize("gpu_id", BOOK.gpu_ids())
def test_prices_of_a_gpu_lie_in_a_plausible_range(gpu_id: str) -> None:
    rows = [row for row in BOOK.of_gpu(gpu_id) if not BOOK.is_outlier(row)]
    demand = [row.usd_per_gpu_hour for row in rows if row.term == "on-demand"]
    assert demand
    assert max(demand) <= 25 * min(demand)
    # A spot, a commitment: never dearer than the dearest on demand.
    assert all(row.usd_per_gpu_hour <= max(demand) for row in rows)


def test_a_commitment_costs_less_the_longer_it_is() -> None:
    for row in ROWS:
        longer = {"1yr": "on-demand", "3yr": "1yr"}.get(row.term)
        same = [
            other.usd_per_hour
            for other in ROWS
            if other.term == longer and prices.row_key(other)[:5] == prices.row_key(row)[:5]
        ]
        assert all(row.usd_per_hour < other for other in same), told(row)


def test_figures_of_ownership_are_of_known_gpus_with_sources() -> None:
    known = tco.load()
    for table in (known.purchase_usd_per_gpu, known.node_usd, known.node_max_watts):
        assert set(table) <= GPUS
    figures = [*known.figures.values(), *known.purchase_usd_per_gpu.values(), *known.node_usd.values()]
    for figure in figures:
        assert figure.status in ("read", "partly-read", "recall")
        assert figure.sources
        assert figure.dated
    assert 1.0 < known.figures["pue"].typical < 2.0
    used = {source for figure in figures for source in figure.sources}
    used |= {source for figure in known.node_max_watts.values() for source in figure.sources}
    assert used == set(known.sources)


def test_a_node_costs_more_than_its_gpus_and_draws_more() -> None:
    known = tco.load()
    for gpu_id, node in known.node_usd.items():
        alone = known.purchase_usd_per_gpu.get(gpu_id)
        if alone is not None:
            assert node.typical / node.gpus > alone.typical, gpu_id
    for gpu_id, power in known.node_max_watts.items():
        tdp = catalog.load_gpu(gpu_id).tdp_w
        assert tdp is not None
        assert power.high / power.gpus > tdp, gpu_id
