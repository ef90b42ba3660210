"""Length distributions: moments against formulas, bounds, spelling and its errors."""

import math
import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.latency_question import MAX_TOKENS
from capplan.sim.lengths import Constant, Histogram, Lengths, LogNormal, Uniform, parse_lengths

DRAWS = 40_000


def draws(lengths: Lengths, number: int = DRAWS, seed: int = 1) -> list[int]:
    sample = lengths.sampler(random.Random(seed))
    return [sample() for _ in range(number)]


def parsed(text: str | int) -> Lengths:
    return parse_lengths(text, where="--isl")


@pytest.mark.parametrize("spelling", ["1024", 1024, "constant:1024", " 1024 ", "1024.0"])
def test_constant_spellings(spelling: str | int) -> None:
    lengths = parsed(spelling)
    assert lengths == Constant(1024)
    assert draws(lengths, 3) == [1024, 1024, 1024]
    assert (lengths.mean_tokens, lengths.max_tokens) == (1024.0, 1024)


def test_lognormal_of_mean_and_cv_by_hand() -> None:
    # sigma² = ln(1 + 1.44) = 0.891998, mu = ln 1000 − 0.445999 = 6.461756
    lengths = parsed("lognormal:mean=1000,cv=1.2")
    assert isinstance(lengths, LogNormal)
    assert lengths.sigma == pytest.approx(0.944457, abs=1e-6)
    assert lengths.mu == pytest.approx(6.461756, abs=1e-6)
    assert lengths.unclipped_mean == pytest.approx(1000)


def test_lognormal_of_mean_and_median_by_hand() -> None:
    # mu = ln 500, sigma² = 2 ln 2
    lengths = parsed("lognormal:mean=1000,p50=500")
    assert isinstance(lengths, LogNormal)
    assert math.exp(lengths.mu) == pytest.approx(500)
    assert lengths.sigma**2 == pytest.approx(2 * math.log(2))
    assert statistics.median(draws(lengths)) == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize(
    "spelling",
    [
        "uniform:100-2000",
        "uniform:7-7",
        "lognormal:mean=300,cv=0.5",
        "lognormal:mean=1000,cv=1.2,max=8192",
        "lognormal:mean=1000,p50=400,min=200,max=1500",
        "lognormal:mean=5,cv=3,min=4",
        "hist:128:0.7,2048:0.3",
    ],
)
def test_mean_of_draws_is_the_stated_mean(spelling: str) -> None:
    lengths = parsed(spelling)
    found = draws(lengths)
    error = statistics.pstdev(found) / math.sqrt(DRAWS)
    # Rounding of a skewed density near a clip adds a few hundredths of a token.
    assert abs(statistics.fmean(found) - lengths.mean_tokens) <= 4 * error + 0.05
    assert max(found) <= lengths.max_tokens
    assert min(found) >= 1


def test_clipping_moves_mass_to_the_ends() -> None:
    lengths = parsed("lognormal:mean=1000,cv=1.2,min=300,max=2000")
    found = draws(lengths)
    # P(X > 2000) = 1 − Φ((ln 2000 − 6.461756) / 0.944457) = 1 − Φ(1.206) = 0.1139
    # P(X < 300) = Φ((ln 300 − 6.461756) / 0.944457) = Φ(−0.803) = 0.2111
    assert found.count(2000) / DRAWS == pytest.approx(0.1139, abs=0.007)
    assert found.count(300) / DRAWS == pytest.approx(0.2111, abs=0.009)
    assert "clipped to 300..2000 tokens" in lengths.describe()
    assert f"mean {lengths.mean_tokens:.6g} after clipping" in lengths.describe()


def test_uniform_reaches_both_ends_evenly() -> None:
    found = draws(Uniform(3, 6))
    assert {value: round(found.count(value) / DRAWS, 2) for value in (3, 4, 5, 6)} == dict.fromkeys(
        (3, 4, 5, 6), 0.25
    )


def test_histogram_never_draws_a_value_without_weight() -> None:
    lengths = Histogram((10, 20, 30, 40), (0.0, 1.0, 3.0, 0.0))
    found = draws(lengths)
    assert set(found) == {20, 30}
    assert found.count(30) / DRAWS == pytest.approx(0.75, abs=0.01)
    assert lengths.mean_tokens == 27.5
    assert lengths.max_tokens == 30

    class Highest(random.Random):
        def random(self) -> float:
            return math.nextafter(1.0, 0.0)

    assert lengths.sampler(Highest())() == 30


def test_histogram_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("tokens,weight\n100,1\n\n200,2  # twice as often\n400\n")
    lengths = parsed(f"hist:{path}")
    assert lengths == Histogram((100, 200, 400), (1.0, 2.0, 1.0), "lengths.csv")
    assert lengths.mean_tokens == 225


def test_a_far_tail_does_not_overflow() -> None:
    assert max(draws(parsed("lognormal:mean=60000000,cv=100"), 2000)) <= MAX_TOKENS


@given(seed=st.integers(0, 2**64), low=st.integers(1, 10**6), more=st.integers(0, 10**6))
def test_same_seed_same_draws_within_bounds(seed: int, low: int, more: int) -> None:
    lengths = Uniform(low, low + more)
    first = draws(lengths, 5, seed)
    assert first == draws(lengths, 5, seed)
    assert all(low <= value <= low + more for value in first)


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        ("0", "the length is '0', no whole number from 1"),
        ("-5", "the length is '-5'"),
        ("12.5", "the length is '12.5'"),
        ("1e99", "the length is '1e99'"),
        ("nan", "'nan' is no kind known here"),
        ("", "'' is no kind known here"),
        ("unifrom:1-2", "'unifrom' is no kind known here"),
        ("uniform:100", "'100' is no range"),
        ("uniform:200-100", "the range 200-100 runs backwards"),
        ("uniform:0-5", "an end of the range is '0'"),
        ("lognormal:mean=100", "a lognormal is given by its mean and one of p50 and cv"),
        ("lognormal:mean=100,p50=50,cv=1", "a lognormal is given by its mean and one of p50 and cv"),
        ("lognormal:mean=100,p50=100", "p50 100 is not between 0 and mean 100"),
        ("lognormal:mean=100,cv=0", "cv 0 is not above 0"),
        ("lognormal:mean=0,cv=1", "mean 0 is not in 1.."),
        ("lognormal:mean=inf,cv=1", "mean is 'inf', no number from 0 up"),
        ("lognormal:mean=9,cv=1,min=9,max=8", "min 9 is above max 8"),
        ("lognormal:mean=9,sd=1", "unknown key 'sd'"),
        ("lognormal:mean=9,cv=1,cv=2", "cv is given twice"),
        ("lognormal:mean", "'mean' is not key=value"),
        ("hist:", "a histogram of nothing"),
        ("hist:0:1", "a value is '0'"),
        ("hist:5:-1", "a weight is '-1'"),
        ("hist:5:0,6:0", "a histogram without weight"),
        ("hist:nowhere.csv", "'nowhere.csv' cannot be read: No such file or directory"),
    ],
)
def test_bad_spellings_are_named(spelling: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_lengths(spelling, where="--isl X")
    assert caught.value.message.startswith(what)
    assert caught.value.where == "--isl X"
    assert len(str(caught.value).splitlines()) == 3


def test_a_near_miss_is_suggested_and_forms_are_listed() -> None:
    with pytest.raises(InputError) as caught:
        parsed("unifrom:1-2")
    assert caught.value.hint == "did you mean uniform?"
    with pytest.raises(InputError) as caught:
        parsed("zipf:1.1")
    assert "uniform:100-2000" in caught.value.hint


@pytest.mark.parametrize(("line", "what"), [("abc,1", "a value is 'abc'"), ("5,x", "a weight is 'x'")])
def test_a_bad_line_of_a_histogram_file_has_its_number(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "h.csv"
    path.write_text(f"4,1\n{line}\n")
    with pytest.raises(InputError) as caught:
        parsed(f"hist:{path}")
    assert caught.value.message.startswith(what)
    assert caught.value.where == f"{path}, line 2"
