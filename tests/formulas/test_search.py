"""The search for the largest number that holds: against counting up, and how often it asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas.search import largest


@given(answer=st.integers(0, 300), limit=st.integers(1, 300), guess=st.integers(-5, 400))
def test_it_is_the_largest_that_holds(answer: int, limit: int, guess: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= answer

    assert largest(holds, limit=limit, guess=guess) == min(answer, limit)
    assert all(1 <= number <= limit for number in asked)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("guess", "trials"),
    # At the answer it holds and the next does not; a thousand off takes ten doublings and as many halves.
    [(10**6, 2), (10**6 - 1, 4), (10**6 + 1, 2), (10**6 - 1000, 20), (10**6 + 1000, 20)],
)
def test_a_good_guess_asks_little(guess: int, trials: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= 10**6

    assert largest(holds, limit=2**40, guess=guess) == 10**6
    assert len(asked) <= trials


def test_none_holds() -> None:
    assert largest(lambda number: False, limit=10, guess=5) == 0
    assert largest(lambda number: True, limit=10, guess=1) == 10
