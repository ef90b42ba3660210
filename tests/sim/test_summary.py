"""From kept rows to figures: percentiles, windows, limits, rates, usage, by hand."""

import math
import random

import numpy as np
import pytest

from capplan.sim.metrics import Metrics
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.summary import METRICS, SERIES, STATISTICS, Rule, Summary, summarise

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=100, kv_blocks=100, block_size=16)


class Kept:
    """Metrics filled by hand."""

    def __init__(self) -> None:
        self.metrics = Metrics(slots=4, kv_blocks=100, block_size=16)
        self.replica = Replica(LIMITS)

    def step(
        self,
        start_s: float,
        end_s: float,
        *,
        blocks: int = 10,
        decoding: int = 1,
        done: tuple[Request, ...] = (),
    ) -> None:
        step = Step()
        step.decoding, step.kv_tokens, step.kv_blocks = decoding, 100, blocks
        self.metrics.steps(self.replica, step, 1, start_s, end_s, list(done))


def served(
    index: int, arrival_s: float, *, first_s: float = 1.0, output: int = 11, tpot_s: float = 0.1
) -> Request:
    """A request that waits first_s / 2 for its step, and gets its first token after first_s."""
    request = Request(index, arrival_s, 100, output)
    request.first_scheduled_s = arrival_s + first_s / 2
    request.first_token_s = arrival_s + first_s
    request.done_s = request.first_token_s + tpot_s * (output - 1)
    return request


def summary_of(requests: list[Request], rule: Rule | None = None) -> Summary:
    kept = Kept()
    end_s = max(request.done_s for request in requests)
    kept.step(0.0, end_s, done=tuple(requests))
    return summarise(kept.metrics, rule or Rule(warm_up_s=0.0))


def test_percentiles_are_numpys() -> None:
    draw = random.Random(2)
    firsts = [draw.uniform(0.1, 3) for _ in range(500)]
    made = summary_of([served(at, at * 1.0, first_s=first) for at, first in enumerate(firsts)])
    spread = made.spreads["ttft_s"]
    assert spread is not None
    for name, percent in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert getattr(spread, name) == pytest.approx(np.percentile(firsts, percent))
    assert spread.mean == pytest.approx(sum(firsts) / 500)
    assert spread.confidence is not None
    assert spread.p50 <= spread.p90 <= spread.p95 <= spread.p99


def test_what_lies_around_the_engine_is_in_ttft_and_e2e_but_not_in_the_queue() -> None:
    made = summary_of([served(0, 0.0), served(1, 5.0)], Rule(warm_up_s=0.0, around_s=0.25))
    found = {name: spread.mean for name, spread in made.spreads.items() if spread is not None}
    assert found["ttft_s"] == pytest.approx(1.25)
    assert found["tpot_s"] == pytest.approx(0.1)
    assert found["e2e_s"] == pytest.approx(2.25)
    assert found["queue_s"] == pytest.approx(0.5)


def test_a_single_token_has_no_tpot() -> None:
    made = summary_of([served(0, 0.0, output=1), served(1, 1.0, output=1)])
    assert made.spreads["tpot_s"] is None
    assert made.spreads["e2e_s"] is not None
    mixed = summary_of([served(0, 0.0, output=1), served(1, 1.0, output=3, tpot_s=0.2)])
    assert mixed.spreads["tpot_s"] is not None
    assert mixed.spreads["tpot_s"].mean == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [
        (None, None, None),
        (1.5, None, 0.5),
        (None, 0.15, 0.75),
        (1.5, 0.15, 0.5),
        (0.5, None, 0.0),
        (9, 9, 1.0),
    ],
)
def test_limits_are_met_by_requests_one_by_one(
    ttft_s: float | None, tpot_s: float | None, met: float | None
) -> None:
    requests = [
        served(0, 0.0, first_s=1.0, tpot_s=0.1),
        served(1, 1.0, first_s=1.0, output=1),
        served(2, 2.0, first_s=2.0, tpot_s=0.2),
        served(3, 100.0, first_s=2.0, tpot_s=0.1),
    ]
    made = summary_of(requests, Rule(warm_up_s=0.0, ttft_s=ttft_s, tpot_s=tpot_s))
    assert made.met == met
    if met is None:
        assert made.goodput_request_per_s is None
    else:
        assert made.goodput_request_per_s == pytest.approx(met * made.request_per_s)


def test_rates_are_of_the_time_until_the_last_request_is_let_in() -> None:
    """Ten requests, one a second from 0 on, let in after 0.2 s and done after 0.5 s: nine before 9.2 s."""
    made = summary_of([served(at, float(at), first_s=0.4, output=2) for at in range(10)])
    assert made.window.end_s == 9.2
    assert made.request_per_s == pytest.approx(9 / 9.2)
    # The tokens of nine requests are inside, those of the tenth after it.
    assert made.output_token_per_s == pytest.approx(9 * 2 / 9.2)
    assert made.offered_request_per_s == pytest.approx(1.0)
    assert made.output_tokens == 20
    assert made.prompt_tokens == 1000


def test_an_overload_is_measured_until_its_queue_is_let_in() -> None:
    """Ten requests within a second, one let in a second: rates are those of ten seconds, not of one."""
    requests = [served(at, at * 0.1, first_s=2.0 * at * 0.9 + 0.2, output=2) for at in range(10)]
    made = summary_of(requests)
    assert made.window.end_s == pytest.approx(0.9 + 8.2)
    assert made.queue[0] == made.queue[1] == 0


def test_a_burst_is_measured_whole() -> None:
    made = summary_of([served(at, 0.0) for at in range(4)], Rule())
    assert (made.window.start_s, made.window.end_s) == (0.0, made.end_s)
    assert made.offered_request_per_s is None
    assert made.request_per_s == pytest.approx(4 / 2.0)


def test_a_warm_up_leaves_out_all_that_came_together() -> None:
    # 15 of the 20 that come at once are slow: MSER-5 cuts after them.
    slow = [served(at, 0.0, first_s=50.0 if at < 15 else 1.0) for at in range(20)]
    made = summary_of(
        [*slow, *(served(at, at * 1.0, first_s=1 + at % 2 / 10) for at in range(20, 300))], Rule()
    )
    assert made.window.rule == "MSER-5: 20 requests left out"
    assert made.window.start_s == 20
    assert made.measured == 280
    # Three in four came at once: what is left would not be half of the run.
    most = [served(at, 0.0, first_s=50.0 if at < 15 else 1.0) for at in range(225)]
    made = summary_of(
        [*most, *(served(at, at * 1.0, first_s=1 + at % 2 / 10) for at in range(225, 300))], Rule()
    )
    assert not made.window.steady
    assert made.measured == 300


def test_the_warm_up_asked_for_is_left_out() -> None:
    made = summary_of([served(at, float(at)) for at in range(10)], Rule(warm_up_s=4.5))
    assert made.window.start_s == 4.5
    assert made.measured == 5
    assert made.requests == 10


def test_a_slow_beginning_is_found_and_left_out() -> None:
    requests = [served(at, float(at), first_s=50.0 if at < 50 else 1.0 + at % 3 * 0.1) for at in range(600)]
    made = summary_of(requests, Rule())
    assert made.window.rule == "MSER-5: 50 requests left out"
    assert made.window.start_s == 50.0
    assert made.measured == 550
    assert made.spreads["ttft_s"] is not None
    assert made.spreads["ttft_s"].p99 < 2


def test_a_queue_that_grows_has_no_steady_state_and_loses_nothing() -> None:
    requests = [served(at, float(at), first_s=1.0 + at) for at in range(400)]
    made = summary_of(requests, Rule())
    assert not made.window.steady
    assert made.measured == 400
    assert made.spreads["ttft_s"] is not None
    assert made.spreads["ttft_s"].confidence is None


def test_a_load_that_changes_by_itself_loses_nothing() -> None:
    requests = [served(at, float(at), first_s=9.0 if at < 100 else 1.0) for at in range(400)]
    assert summary_of(requests, Rule(stationary=False)).measured == 400


def test_usage_over_time_with_idle_time_as_none() -> None:
    """Of 10 s: 4 s at 50 blocks of 100, 1 s at all of them, 5 s without a step."""
    kept = Kept()
    kept.step(0.0, 4.0, blocks=50)
    kept.step(4.0, 5.0, blocks=100)
    kept.step(
        10.0 - 1e-9, 10.0, blocks=0, done=(served(0, 0.0), served(1, 10.0 - 1e-9, output=1, first_s=0.0))
    )
    usage = summarise(kept.metrics, Rule(warm_up_s=0.0)).kv_usage
    assert usage.mean == pytest.approx((4 * 0.5 + 1) / 10, rel=0.01)
    assert usage.max == 1.0
    assert usage.full == pytest.approx(0.1, rel=0.02)
    assert usage.p95 == pytest.approx(1.0, abs=0.002)


def test_the_series_covers_the_run_in_a_bounded_number_of_parts() -> None:
    kept = Kept()
    for at in range(5000):
        kept.step(float(at), at + 1.0, blocks=at // 50, done=(served(at, float(at)),))
    series = summarise(kept.metrics, Rule(warm_up_s=0.0)).series
    assert len(series.kv_usage) == len(series.running) == SERIES
    assert series.width_s * SERIES == pytest.approx(5000, rel=0.01)
    assert list(series.kv_usage) == sorted(series.kv_usage)
    assert series.kv_usage[-1] == pytest.approx(0.98, abs=0.02)


def test_nobody_finished_is_an_error() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise(Metrics(slots=4, kv_blocks=100, block_size=16), Rule())


def test_every_figure_is_finite() -> None:
    made = summary_of([served(0, 0.0)], Rule())
    assert set(made.spreads) == set(METRICS)
    for name in METRICS:
        spread = made.spreads[name]
        for statistic in STATISTICS if spread is not None else ():
            assert math.isfinite(getattr(spread, statistic))
    assert math.isfinite(made.request_per_s)
    assert made.request_per_s > 0
