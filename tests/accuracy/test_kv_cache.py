"""KV cache of every row of kv.csv, equal to what vLLM itself computes."""

import pytest

from tests.accuracy import oracles
from tests.accuracy.kv_cache import CapacityRow, KvRow, kv_rows

pytestmark = pytest.mark.usefixtures("data")


@pytest.fixture(scope="module")
def measured() -> list[KvRow]:
    return kv_rows()


@pytest.fixture(scope="module")
def capacity(measured: list[KvRow]) -> list[CapacityRow]:
    return [row.capacity for row in measured if row.capacity is not None]


def test_all_rows_are_measured(measured: list[KvRow], capacity: list[CapacityRow]) -> None:
    assert len(measured) == len(oracles.rows("kv")) >= 2907
    # One group of full or latent attention; the rest waits for the engine's pool rules.
    assert len(capacity) >= 1890
    assert sum(row.refused for row in capacity) >= 99


def test_bytes_per_token_by_kind_windows_and_state(measured: list[KvRow]) -> None:
    wrong = {(row.model, row.tp, row.kv_dtype) for row in measured if not row.columns_equal}
    assert not wrong


def test_layers_of_each_kind(measured: list[KvRow]) -> None:
    wrong = {(row.model, row.tp, row.kv_dtype) for row in measured if not row.layers_equal}
    assert not wrong


@pytest.mark.parametrize("figure", ["blocks", "tokens", "concurrency"])
def test_what_fits(measured: list[KvRow], figure: str) -> None:
    wrong = {
        (row.model, row.tp, row.kv_dtype): pair
        for row in measured
        if row.capacity is not None
        and (pair := getattr(row.capacity, figure)) is not None
        and pair[0] != pair[1]
    }
    assert not wrong


def test_whether_one_request_fits(capacity: list[CapacityRow]) -> None:
    for row in capacity:
        assert row.one_fits is not row.refused
        if row.refused:
            assert row.longest is not None
            assert row.longest[0] == row.longest[1]
            assert row.need_gib is not None
            # vLLM prints two decimals.
            assert row.need_gib[0] == pytest.approx(row.need_gib[1], abs=0.005)


def test_only_the_null_block_parts_the_verdicts(capacity: list[CapacityRow]) -> None:
    # vLLM keeps one block back; where a request needs every block, capplan still says it fits.
    parted = [row for row in capacity if row.one_fits_without_null_block is not row.one_fits]
    assert all(row.refused for row in parted)
    assert len(parted) == 12
