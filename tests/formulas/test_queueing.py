"""Batching and queueing formulas: hand-worked values and properties."""

import math
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


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(
            lambda: queueing.prompt_pairs(new_tokens=4, past_tokens=10), 50, id="4 new after 10: 40 + 10"
        ),
        pytest.param(
            lambda: queueing.cycle_s(
                ttft_s=0.06, prefill_s=0.05, decode_step_s=0.016, decode_steps=127, users=8
            ),
            pytest.approx(2.4823, abs=1e-4),
            id="a = 2.492, a² − 4 · 0.024 = 6.114",
        ),
        pytest.param(
            lambda: queueing.burst_ttft_s(requests=64, together=8, chunk_s=0.48), 2.16, id="8 steps of 0.48 s"
        ),
        pytest.param(
            lambda: queueing.burst_ttft_s(requests=2, together=8, chunk_s=0.48), 0.48, id="one step"
        ),
        pytest.param(
            lambda: queueing.waiting_users_s(users=64, slots=32, residence_s=50), 50, id="as many wait as run"
        ),
        pytest.param(
            lambda: queueing.requesting_users(users=30, time_in_system_s=2, think_s=4), 10, id="a third asks"
        ),
        pytest.param(
            lambda: queueing.waiting_open_s(utilization=0.9, slots=10, residence_s=10),
            pytest.approx(6.78, abs=0.01),
            id="0.9^3.69 / 0.1",
        ),
        pytest.param(
            lambda: queueing.waiting_open_s(utilization=1.0, slots=10, residence_s=10), math.inf, id="full"
        ),
        pytest.param(
            lambda: queueing.waiting_prompts_s(request_per_s=4, prefill_s=0.1),
            pytest.approx(0.0333, abs=1e-4),
            id="4 · 0.01 / 1.2",
        ),
        pytest.param(
            lambda: queueing.waiting_prompts_s(request_per_s=10, prefill_s=0.1),
            math.inf,
            id="prompts alone fill it",
        ),
        pytest.param(
            lambda: queueing.within_slo(mean_s=0.3, least_s=0.1, limit_s=0.5),
            pytest.approx(1 - math.exp(-2)),
            id="two means above the least",
        ),
        pytest.param(
            lambda: queueing.within_slo(mean_s=0.3, least_s=0.1, limit_s=0.09), 0, id="below the least"
        ),
        pytest.param(lambda: queueing.within_slo(mean_s=0.1, least_s=0.1, limit_s=0.1), 1, id="no spread"),
    ],
)
def test_waits_by_hand(call: Callable[[], float], expected: float) -> None:
    assert call() == expected


@given(
    first=st.floats(1e-3, 10),
    prompt=st.floats(0, 1),
    step=st.floats(1e-4, 1),
    steps=st.floats(1, 10_000),
    users=st.floats(1, 1000),
)
def test_a_cycle_solves_its_own_equation(
    first: float, prompt: float, step: float, steps: float, users: float
) -> None:
    cycle = queueing.cycle_s(
        ttft_s=first, prefill_s=prompt, decode_step_s=step, decode_steps=steps, users=users
    )
    assert cycle >= max(first, users * prompt)
    if users * prompt < 0.999 * cycle:
        again = first + steps * step / (1 - users * prompt / cycle)
        assert again == pytest.approx(cycle, rel=1e-3)


def test_the_last_of_many_answers() -> None:
    pieces = queueing.draining_steps(requests=1000, mean_steps=200, variation=1.0)
    assert sum(steps for _, steps in pieces) == pytest.approx(200 * (math.log(1000) + 0.5772))
    # As many steps of sequences as the answers have together, but for the last, who has no half to lose.
    assert sum(left * steps for left, steps in pieces) == pytest.approx(1000 * 200, rel=0.02)
    assert [left for left, _ in pieces] == sorted((left for left, _ in pieces), reverse=True)


def test_equal_answers_end_together() -> None:
    assert queueing.draining_steps(requests=8, mean_steps=50, variation=0.0) == ((8, 50),)


def test_short_answers_weigh_as_much_as_long_ones() -> None:
    # E1(0.005) = 4.7261 and (1 − e^−0.005) / 0.005 = 0.9975.
    found = queueing.mean_of_ratios(steps=1, mean_steps=200, variation=1.0)
    assert found == pytest.approx(4.7261 + 0.9975, abs=1e-3)
    assert queueing.mean_of_ratios(steps=1, mean_steps=200, variation=0.0) == 1
