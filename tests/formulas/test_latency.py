"""Latency definitions: hand-worked values and properties."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import latency

seconds = st.floats(min_value=0, max_value=1e4)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(
            lambda: latency.ttft_s(received_at_s=10.0, first_token_at_s=10.4),
            pytest.approx(0.4),
            id="first token after 0.4 s",
        ),
        pytest.param(
            lambda: latency.tpot_s(first_token_at_s=10.4, last_token_at_s=15.4, output_tokens=101),
            pytest.approx(0.05),
            id="100 gaps in 5 s",
        ),
        pytest.param(
            lambda: latency.tpot_s(first_token_at_s=1, last_token_at_s=1, output_tokens=1),
            None,
            id="undefined for one token",
        ),
        pytest.param(
            lambda: latency.e2e_s(ttft_s=0.4, tpot_s=0.05, output_tokens=101),
            pytest.approx(5.4),
            id="0.4 s and 100 gaps of 50 ms",
        ),
        pytest.param(lambda: latency.e2e_s(ttft_s=0.4, tpot_s=0.05, output_tokens=1), 0.4, id="one token"),
        pytest.param(lambda: latency.throughput_token_per_s(tokens=6400, time_s=5), 1280.0, id="64 users"),
        pytest.param(
            lambda: latency.reading_tpot_s(word_per_min=200, tokens_per_word=1.5),
            pytest.approx(0.2),
            id="200 words a minute: 200 ms",
        ),
        pytest.param(lambda: latency.percentile(values=[4, 1, 3, 2], percent=50), 2.5, id="median of four"),
        pytest.param(lambda: latency.percentile(values=[7], percent=99), 7, id="P99 of one value"),
        pytest.param(
            lambda: latency.percentile(values=[0.3] * 98 + [15.0] * 2, percent=99),
            15.0,
            id="P99 shows what a mean of 0.594 s hides",
        ),
        pytest.param(
            lambda: latency.percentile(values=[1, 2, 3, 4], percent=100),
            4,
            id="P100 is the maximum",
        ),
    ],
)
def test_worked_number(call: Callable[[], float | None], expected: float | None) -> None:
    assert call() == expected


@given(received=seconds, ttft=seconds, gaps=st.lists(st.floats(1e-4, 10), min_size=1, max_size=50))
def test_the_definitions_agree_with_the_clock(received: float, ttft: float, gaps: list[float]) -> None:
    first = received + ttft
    last = first + sum(gaps)
    tpot = latency.tpot_s(first_token_at_s=first, last_token_at_s=last, output_tokens=len(gaps) + 1)
    assert tpot is not None
    total = latency.e2e_s(
        ttft_s=latency.ttft_s(received_at_s=received, first_token_at_s=first),
        tpot_s=tpot,
        output_tokens=len(gaps) + 1,
    )
    assert total == pytest.approx(last - received, abs=1e-6)


@given(values=st.lists(seconds, min_size=1, max_size=40), percent=st.floats(0, 100))
def test_percentile_is_the_benchmarks_own(values: list[float], percent: float) -> None:
    found = latency.percentile(values=values, percent=percent)
    assert found == pytest.approx(float(np.percentile(values, percent)), abs=1e-9)
    assert min(values) <= found <= max(values)
