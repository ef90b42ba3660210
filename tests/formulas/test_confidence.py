"""Intervals and warm-up: worked numbers, and simulated ones of known truth."""

import random

import numpy as np
import pytest

from capplan.formulas import confidence


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [(1, 12.706), (4, 2.776), (19, 2.093), (30, 2.042), (31, 2.0395), (60, 2.0003), (10_000, 1.9602)],
)
def test_student_t_is_that_of_the_tables(degrees: int, expected: float) -> None:
    assert confidence.student_t(degrees=degrees) == pytest.approx(expected, abs=5e-4)


def test_half_width_by_hand() -> None:
    assert confidence.half_width(means=[1, 2, 3]) == pytest.approx(4.3027 / 3**0.5)
    assert confidence.half_width(means=[5.0, 5.0]) == 0
    assert confidence.half_width(means=[5.0]) is None
    assert confidence.half_width(means=[]) is None


def test_95_of_100_intervals_hold_the_true_mean() -> None:
    draw, held = random.Random(1), 0
    for _ in range(1000):
        means = [draw.gauss(10, 3) for _ in range(8)]
        half = confidence.half_width(means=means)
        assert half is not None
        held += abs(sum(means) / 8 - 10) <= half
    assert 930 <= held <= 970


def test_warm_up_is_cut_where_the_level_changes() -> None:
    assert confidence.warm_up_observations(values=np.array([100.0] * 50 + [1.0, 1.1] * 225)) == 50


def test_a_steady_series_loses_little() -> None:
    draw = random.Random(7)
    cut = confidence.warm_up_observations(values=np.array([draw.gauss(1, 0.1) for _ in range(2000)]))
    assert cut is not None
    assert cut <= 1000


def test_equal_values_lose_nothing() -> None:
    assert confidence.warm_up_observations(values=np.full(100, 2.5)) == 0


def test_a_series_that_only_grows_has_no_steady_state() -> None:
    assert confidence.warm_up_observations(values=np.arange(1000.0)) is None


def test_too_few_observations_say_nothing() -> None:
    assert confidence.warm_up_observations(values=np.ones(19)) is None
