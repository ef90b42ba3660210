"""Clocks, canary and contention, with operations that take known times."""

import time
from collections.abc import Iterator

import pytest

from capplan.calibrate.clock import Canary, CpuClock, Timing, cpu_share, quantile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        pytest.param([3.0, 1.0, 2.0], 0.5, 2.0, id="median of three, in any order"),
        pytest.param([1.0, 2.0], 0.5, 1.5, id="between two"),
        pytest.param([1.0, 2.0, 3.0, 4.0, 5.0], 0.1, 1.4, id="P10 of five"),
        pytest.param([7.0], 0.9, 7.0, id="one value"),
    ],
)
def test_quantile(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == pytest.approx(expected)


def test_timing_keeps_the_median_and_its_spread() -> None:
    made = Timing(samples=(5.0, 1.0, 3.0, 2.0, 4.0), cpu=(1.0, 1.0, 2.0))
    assert (made.p10_s, made.p50_s, made.p90_s, made.cpu_s) == (1.4, 3.0, 4.6, 1.0)
    assert Timing(samples=(1.0,)).cpu_s is None


def test_wall_clock_sees_a_sleep_that_the_own_time_does_not() -> None:
    def call(_: int) -> None:
        time.sleep(0.01)

    wall = CpuClock(threads=1).time(call, seconds=0.0)
    own = CpuClock(threads=1, own_time=True).time(call, seconds=0.0)
    assert wall.p50_s >= 0.01
    assert own.p50_s < 0.005
    assert CpuClock(threads=1).name == "wall"
    assert CpuClock(threads=1, own_time=True).name == "thread-cpu"


def test_the_first_call_does_not_count_unless_it_is_warm() -> None:
    numbers: list[int] = []
    CpuClock(threads=1).time(numbers.append, seconds=0.0, least=3)
    assert numbers == [0, 1, 2, 3]
    numbers.clear()
    CpuClock(threads=1).time(numbers.append, seconds=0.0, least=3, warm=True)
    assert numbers == [1, 2, 3]


class Given:
    """A clock that reads out given times."""

    name = "given"

    def __init__(self, times: Iterator[float]) -> None:
        self.times = times

    def time(
        self, call: object, *, seconds: float, least: int = 2, warm: bool = False, rotation: int = 1
    ) -> Timing:
        return Timing(samples=(next(self.times),))


def test_canary_moves_against_the_median_of_its_readings() -> None:
    # Two readings to warm up, five of the reference, then one that is half as slow again.
    canary = Canary(Given(iter([9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.5, 1.0])), lambda _: None)
    assert canary.moved() == pytest.approx(0.5)
    assert canary.moved() == pytest.approx(0.0)
    assert canary.reference_s == 1.0
    assert canary.spread == pytest.approx(0.2, abs=0.01)


def test_share_of_a_thread_that_waits() -> None:
    assert cpu_share(lambda _: time.sleep(0.02), threads=1, seconds=0.1) < 0.5


def test_canary_counts_what_others_had_of_the_cpu() -> None:
    class Shared(Given):
        name = "wall"

        def time(
            self, call: object, *, seconds: float, least: int = 2, warm: bool = False, rotation: int = 1
        ) -> Timing:
            return Timing(samples=(1.0,), share=0.7)

    assert Canary(Shared(iter([])), lambda _: None).moved() == pytest.approx(0.3)
