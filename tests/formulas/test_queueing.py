"""Batching and queueing formulas: hand-worked values and properties."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import queueing

lengths = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(
            lambda: queueing.static_batch_steps(output_tokens=(20, 600), slots=2),
            600,
            id="the short request waits for the long one",
        ),
        pytest.param(
            lambda: queueing.static_batch_steps(output_tokens=(20, 600) * 2, slots=2),
            1200,
            id="two static batches",
        ),
        # Slot A: 20 + 20 + 600 = 640; slot B: 600.
        pytest.param(
            lambda: queueing.continuous_batch_steps(output_tokens=(20, 600) * 2, slots=2),
            640,
            id="a freed slot takes the next request",
        ),
        pytest.param(
            lambda: queueing.static_bubble_fraction(output_tokens=(20, 600)),
            pytest.approx(580 / 1200),
            id="580 of 1200 slot-steps idle",
        ),
        pytest.param(
            lambda: queueing.static_bubble_fraction(output_tokens=(7, 7, 7)), 0.0, id="no straggler"
        ),
        pytest.param(
            lambda: queueing.requests_in_system(request_per_s=20, time_in_system_s=10),
            200,
            id="20 a second for 10 s each",
        ),
    ],
)
def test_worked_number(call: Callable[[], float], expected: float) -> None:
    assert call() == expected


@given(tokens=lengths, slots=st.integers(1, 16))
def test_continuous_never_takes_more_steps_and_never_less_than_the_work(
    tokens: list[int], slots: int
) -> None:
    static = queueing.static_batch_steps(output_tokens=tokens, slots=slots)
    continuous = queueing.continuous_batch_steps(output_tokens=tokens, slots=slots)
    assert max(max(tokens), -(-sum(tokens) // slots)) <= continuous <= static


@given(tokens=lengths)
def test_bubble_is_what_one_static_batch_leaves_empty(tokens: list[int]) -> None:
    steps = queueing.static_batch_steps(output_tokens=tokens, slots=len(tokens))
    bubble = queueing.static_bubble_fraction(output_tokens=tokens)
    assert 0 <= bubble < 1
    assert bubble * steps * len(tokens) == pytest.approx(steps * len(tokens) - sum(tokens))
