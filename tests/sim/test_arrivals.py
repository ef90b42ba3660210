"""Arrival processes: rates and gap moments, the swing of a day, think times, spelling and its errors."""

import math
import random
import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.arrivals import (
    Arrivals,
    AtOnce,
    Diurnal,
    Evenly,
    Gamma,
    Hourly,
    Poisson,
    ThinkTime,
    parse_arrivals,
    parse_think_time,
    user_starts,
)

DRAWS = 40_000


def times(arrivals: Arrivals, number: int = DRAWS, seed: int = 1) -> list[float]:
    return list(islice(arrivals.times(random.Random(seed)), number))


def gaps(arrivals: Arrivals) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times(arrivals)])]


@pytest.mark.parametrize(
    ("process", "cv"),
    [
        (Poisson(4), 1.0),
        (Gamma(4, 1.0), 1.0),
        (Gamma(4, 0.25), 2.0),
        (Gamma(4, 16.0), 0.25),
        (Evenly(4), 0.0),
    ],
    ids=["poisson", "gamma 1 is poisson", "bursty", "regular", "even"],
)
def test_gaps_have_the_stated_mean_and_variation(process: Arrivals, cv: float) -> None:
    found = gaps(process)
    mean = statistics.fmean(found)
    assert abs(mean - 0.25) <= 4 * 0.25 * cv / math.sqrt(DRAWS) + 1e-4
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.04, abs=0.01)


def test_poisson_gaps_are_exponential() -> None:
    # P(gap > t) = exp(−4t): at 0.25 s 0.3679, at 1 s 0.0183
    found = gaps(Poisson(4))
    assert sum(gap > 0.25 for gap in found) / DRAWS == pytest.approx(math.exp(-1), abs=0.01)
    assert sum(gap > 1.0 for gap in found) / DRAWS == pytest.approx(math.exp(-4), abs=0.003)


def test_even_arrivals_do_not_drift() -> None:
    found = times(Evenly(3), 30_001)
    assert found[:4] == [0.0, 0.333333333, 0.666666667, 1.0]
    assert found[-1] == 10_000.0


def test_all_at_once() -> None:
    assert times(AtOnce(), 3) == [0.0, 0.0, 0.0]


def test_diurnal_follows_its_rate() -> None:
    # Expected in the first and second quarter of a period: rate·(P/4 ∓ swing·P/2π).
    process = Diurnal(request_per_s=50, swing=0.8, period_s=400)
    found = [at for at in times(process) if at < 400]
    quarters = [sum(low <= at < low + 100 for at in found) for low in (0, 100, 200, 300)]
    trough, peak = (50 * (100 + sign * 0.8 * 400 / (2 * math.pi)) for sign in (-1, 1))
    for count, expected in zip(quarters, (trough, peak, peak, trough), strict=True):
        assert abs(count - expected) <= 4 * math.sqrt(expected)


def test_a_full_swing_is_silent_at_the_trough() -> None:
    found = times(Diurnal(request_per_s=10, swing=1.0, period_s=1000), 9_000)
    # ∫ 10·(1 − cos) over the first 10 s of a period: 10·(10 − 1000/2π·sin(2π/100)) = 0.066
    assert sum(at % 1000 < 10 for at in found) <= 3


def test_hourly_factors_are_relative_to_their_mean_and_come_again_next_day() -> None:
    process = Hourly(request_per_s=0.5, factors=(*[0.0] * 12, *[3.0] * 12))
    found = [at for at in times(process, 90_000) if at < 2 * 86_400]
    assert all(at % 86_400 >= 43_200 for at in found)
    for day in (0, 1):
        count = sum(day * 86_400 <= at < (day + 1) * 86_400 for at in found)
        assert abs(count - 43_200) <= 4 * math.sqrt(43_200)


@given(
    process=st.sampled_from(
        [
            Poisson(7.5),
            Gamma(7.5, 0.3),
            Evenly(7.5),
            AtOnce(),
            Diurnal(7.5, 0.9, 60),
            Poisson(1e6),
            Gamma(1e-6, 2),
        ]
    ),
    seed=st.integers(0, 2**64),
)
def test_time_never_runs_backwards_and_a_seed_repeats(process: Arrivals, seed: int) -> None:
    found = times(process, 50, seed)
    assert found == times(process, 50, seed)
    assert found[0] >= 0
    assert all(earlier <= later < math.inf for earlier, later in pairwise(found))


def test_the_first_times_of_a_seed_are_these_on_every_machine() -> None:
    # random.Random(7) begins with 0.323833, so the first gap is −ln(1 − 0.323833) / 2 = 0.195657
    assert times(Poisson(2), 3, seed=7) == [0.195657422, 0.277416651, 0.80366446]


def test_think_time_constant_and_exponential() -> None:
    assert ThinkTime(2.5).sampler(random.Random(1))() == 2.5
    draw = ThinkTime(2.5, exponential=True).sampler(random.Random(1))
    found = [draw() for _ in range(DRAWS)]
    assert abs(statistics.fmean(found) - 2.5) <= 4 * 2.5 / math.sqrt(DRAWS)
    assert statistics.pstdev(found) == pytest.approx(2.5, rel=0.03)


def test_users_start_evenly_over_the_ramp() -> None:
    assert list(user_starts(4, 10.0)) == [0.0, 2.5, 5.0, 7.5]
    assert list(user_starts(3, 0.0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("spelling", "rate", "process"),
    [
        ("poisson", 3, Poisson(3)),
        ("constant", 3, Evenly(3)),
        ("gamma:burstiness=0.5", 3, Gamma(3, 0.5)),
        ("diurnal:swing=0.8", 3, Diurnal(3, 0.8, 86_400)),
        ("diurnal:swing=0.8,period_s=60", 3, Diurnal(3, 0.8, 60)),
        ("hourly:" + ",".join(["1"] * 24), 3, Hourly(3, (1.0,) * 24)),
        ("at-once", 3, AtOnce()),
        ("poisson", math.inf, AtOnce()),
    ],
)
def test_spellings(spelling: str, rate: float, process: Arrivals) -> None:
    assert parse_arrivals(spelling, rate, where="--arrivals") == process


@pytest.mark.parametrize(
    ("spelling", "rate", "what"),
    [
        ("possion", 1.0, "'possion' is no kind known here"),
        ("poisson:3", 1.0, "poisson takes no options, got '3'"),
        ("gamma", 1.0, "burstiness is missing"),
        ("gamma:burstiness=0", 1.0, "burstiness is 0"),
        ("diurnal:swing=1.5", 1.0, "swing is 1.5"),
        ("diurnal:swing=0.5,period_s=0", 1.0, "period_s is 0"),
        ("hourly:1,2,3", 1.0, "3 factors of sum 6, not 24"),
        ("hourly:" + ",".join(["0"] * 24), 1.0, "24 factors of sum 0"),
        ("poisson", 0.0, "0 requests a second"),
        ("poisson", -1.0, "-1 requests a second"),
        ("poisson", math.nan, "nan requests a second"),
        ("poisson", 1e9, "1e+09 requests a second"),
    ],
)
def test_bad_spellings_are_named(spelling: str, rate: float, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_arrivals(spelling, rate, where="--arrivals")
    assert caught.value.message.startswith(what)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("spelling", ["-1", "nan", "exponential", "exponential:x", "normal:3", "1e9"])
def test_bad_think_times(spelling: str) -> None:
    with pytest.raises(InputError):
        parse_think_time(spelling, where="--think-time")


def test_think_time_spellings() -> None:
    assert parse_think_time(5, where="") == parse_think_time("constant:5", where="") == ThinkTime(5.0)
    assert parse_think_time("exponential:5", where="") == ThinkTime(5.0, exponential=True)
