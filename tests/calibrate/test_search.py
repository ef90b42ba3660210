"""The search finds the numbers that made the times, in any variant, past outliers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from capplan.calibrate.search import Knob, Variant, chosen, fitted

SIZES = np.geomspace(1e3, 1e9, 60)


def line(numbers: Mapping[str, Any]) -> Any:
    """A fixed time and a rate."""
    return numbers["t0_us"] * 1e-6 + SIZES / (numbers["memory"] * 1e12) * numbers["slower"]


KNOBS = (Knob(name="t0_us", start=1, low=0.1, high=100), Knob(name="memory", start=0.3, low=0.01, high=1))


def test_exact_times_give_their_numbers() -> None:
    measured = line({"t0_us": 7.0, "memory": 0.8, "slower": 1.0})
    numbers, error = fitted(line, Variant(knobs=KNOBS, fixed={"slower": 1.0}), measured, rounds=40)
    assert numbers == pytest.approx({"t0_us": 7.0, "memory": 0.8, "slower": 1.0}, rel=1e-3)
    assert error < 1e-4


def test_a_tenth_of_wild_rows_moves_nothing() -> None:
    measured = line({"t0_us": 7.0, "memory": 0.8, "slower": 1.0})
    measured[::10] *= 20
    numbers, _ = fitted(line, Variant(knobs=KNOBS, fixed={"slower": 1.0}), measured, rounds=40)
    assert numbers["memory"] == pytest.approx(0.8, rel=0.02)


def test_limits_hold() -> None:
    measured = line({"t0_us": 7.0, "memory": 4.0, "slower": 1.0})
    numbers, _ = fitted(line, Variant(knobs=KNOBS, fixed={"slower": 1.0}), measured, rounds=40)
    assert 0.99 < numbers["memory"] <= 1 + 1e-12


def test_the_better_variant_is_taken() -> None:
    measured = line({"t0_us": 7.0, "memory": 0.8, "slower": 3.0})
    kinds = [Variant(knobs=KNOBS, fixed={"slower": slower}) for slower in (20.0, 3.0)]
    assert chosen(line, kinds, measured)["slower"] == 3.0


def test_a_variant_needs_a_start() -> None:
    with pytest.raises(ValueError, match="start"):
        fitted(line, Variant(knobs=KNOBS, starts=()), SIZES, rounds=1)
