"""Tokens a verified step adds, by hand and by drawing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas.speculative import tokens_per_step

RATES = st.floats(0, 1)
DRAFTED = st.integers(1, 16)


@pytest.mark.parametrize(
    ("drafted", "rate", "tokens"),
    [
        pytest.param(3, 0.7, 1 + 0.7 + 0.49 + 0.343, id="three drafted, seven of ten accepted"),
        pytest.param(1, 0.85, 1.85, id="one MTP layer"),
        pytest.param(5, 0.0, 1.0, id="nothing accepted: the model's own token"),
        pytest.param(5, 1.0, 6.0, id="all accepted, and one more"),
        pytest.param(2, 0.5, 1.75, id="half"),
    ],
)
def test_worked_numbers(drafted: int, rate: float, tokens: float) -> None:
    assert tokens_per_step(drafted=drafted, acceptance_rate=rate) == pytest.approx(tokens)


def test_it_is_the_mean_of_accepted_prefixes() -> None:
    draws, made = random.Random(7), 0
    for _ in range(20_000):
        accepted = 0
        while accepted < 4 and draws.random() < 0.6:
            accepted += 1
        made += accepted + 1
    assert made / 20_000 == pytest.approx(tokens_per_step(drafted=4, acceptance_rate=0.6), rel=0.02)


@given(drafted=DRAFTED, rate=RATES)
def test_between_one_token_and_all_of_them(drafted: int, rate: float) -> None:
    assert 1 <= tokens_per_step(drafted=drafted, acceptance_rate=rate) <= drafted + 1


@given(drafted=DRAFTED, rate=RATES)
def test_one_more_draft_adds_the_chance_that_all_are_accepted(drafted: int, rate: float) -> None:
    fewer = tokens_per_step(drafted=drafted, acceptance_rate=rate)
    more = tokens_per_step(drafted=drafted + 1, acceptance_rate=rate)
    assert more - fewer == pytest.approx(rate ** (drafted + 1), abs=1e-12)
