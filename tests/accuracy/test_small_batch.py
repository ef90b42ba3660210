"""Speeds of one sequence alone, every card predicted from the others: decode_small_batch.csv."""

from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import pytest

from capplan import catalog
from capplan.calibrate import small_batch_file
from capplan.small_batch_speed import FILE, decode_s, from_dict
from tests.accuracy import small_batch


@pytest.fixture(autouse=True)
def _table(data: None) -> None:
    if not small_batch.TABLE.exists():
        pytest.skip("no decode_small_batch.csv beside the repository")


def test_generation_on_cards_held_out() -> None:
    """Median within 12 %, and half of what 0.8 of the bandwidth is off by."""
    print(f"\n{small_batch.markdown()}")
    found = small_batch.errors(small_batch.decode_scores())
    plain = small_batch.errors(small_batch.baseline_scores())
    assert len(found) >= 550
    assert median(found) <= 0.12
    assert mean(found) <= 0.15
    assert median(found) <= 0.5 * median(plain)
    assert mean(found) <= 0.5 * mean(plain)


def test_one_gpu_alone_is_as_right() -> None:
    """Rows of several GPUs do not carry the figure."""
    single = [
        abs(score.error) for score in small_batch.decode_scores() if score.scored and score.run.host.gpus == 1
    ]
    assert median(single) <= 0.12


def test_few_rows_are_left_out() -> None:
    reasons = small_batch.table().reasons
    print(reasons)
    doubted = reasons.pop("doubted by the collector")
    rows = len(small_batch.table().runs) + reasons.total()
    assert reasons.total() <= 0.02 * rows
    assert doubted <= 0.05 * rows


def test_the_shipped_file_is_what_the_table_says_today() -> None:
    """Every number of the fit within 2 %: `python -m tests.accuracy.small_batch fit` writes it anew."""
    shipped = dict(catalog.read_yaml(FILE))
    assert shipped["hash"] == small_batch_file.digest(shipped["fit"])
    _close(shipped["fit"], small_batch_file.fitted(small_batch.table()), "fit")


def test_the_shipped_numbers_give_the_fitted_speeds() -> None:
    """The file's plain numbers, put through the formula, are the fit: median in-sample error below 7 %."""
    calibration = from_dict(catalog.read_yaml(FILE))
    decode, _ = small_batch_file.split(small_batch.table())
    errors = [
        abs(
            1
            / decode_s(
                backend=calibration.backend(run.engine, run.platform),
                family=run.family,
                reads=run.reads,
                context=run.context,
                host=run.host,
            )
            / (run.decode_token_per_s or 0)
            - 1
        )
        for run in decode
    ]
    assert median(errors) <= 0.07


def _close(old: Any, new: Any, path: str) -> None:
    if isinstance(new, Mapping):
        assert set(old) == set(new), path
        for key in new:
            _close(old[key], new[key], f"{path}.{key}")
    elif isinstance(new, float):
        assert old == pytest.approx(new, rel=0.02), path
    else:
        assert old == new, path
