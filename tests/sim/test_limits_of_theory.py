"""The simulator where queueing theory knows the answer: M/D/1, M/M/1, M/M/c, M/G/∞ and processor sharing.

Twenty independent runs a case, seeds fixed; the mean of the runs must lie within its 99 % confidence interval
of the theory. Step times are stand-ins: what is tested is the clock, the queue, the slots and the recorder.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from capplan.formulas import queueing
from capplan.formulas.confidence import half_width
from capplan.sim import flow, simulator
from capplan.sim.metrics import REQUEST_COLUMNS, Metrics
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers.vllm_v1 import vllm_v1
from tests.sim.scheduling import Listed

RUNS = 20
WIDER = 2.861 / 2.093
"""From a 95 % interval of 20 runs to one of 99 %: Student's t of 19 degrees."""
WARM_UP = 0.1
"""Of a run's requests, its empty start."""
SLOT_STEPS = 100
"""Steps of the mean request where requests share steps: whole steps are 1 % of it."""


@dataclass(frozen=True)
class Constant:
    """Steps of one length, whatever they compute."""

    seconds: float = 1.0

    def step_s(self, step: Step) -> float:
        return self.seconds

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        steps = max(1, min(most, math.ceil(until_s / self.seconds) if until_s < math.inf else most))
        return steps, steps * self.seconds


class Exponential:
    """Steps whose length is drawn: exponential, of mean 1."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(f"service {seed}")

    def step_s(self, step: Step) -> float:
        return self.draw.expovariate(1.0)

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        raise AssertionError("a request of one token never decodes")


@dataclass(frozen=True)
class Shared:
    """Steps as long as the sequences in them: each gets an equal share of one processor."""

    seconds: float

    def step_s(self, step: Step) -> float:
        return self.seconds * (step.decoding + step.prompt_sequences)

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        whole = Constant(self.seconds * decoding)
        return whole.steps_s(decoding, kv_tokens, most, until_s)


@dataclass(frozen=True)
class Run:
    """One run: its finished requests by column, in order of arrival, and its recorder."""

    column: dict[str, Any]
    metrics: Metrics

    @property
    def steady(self) -> slice:
        """Requests after the start."""
        return slice(int(WARM_UP * len(self.column["arrival_s"])), None)

    def mean(self, first: str, second: str) -> float:
        """Mean time from one moment of a request to another."""
        return float((self.column[second] - self.column[first])[self.steady].mean())


def geometric(draw: random.Random, mean: float) -> int:
    """Tokens that end with the same chance each: memoryless."""
    return 1 + int(math.log(1.0 - draw.random()) / math.log(1 - 1 / mean))


def run(
    seed: int,
    *,
    request_per_s: float,
    requests: int,
    times: flow.StepTimes,
    slots: int,
    tokens: Callable[[random.Random], int] = lambda draw: 1,
) -> Run:
    """Poisson arrivals of one-token prompts at a replica without any limit but its slots."""
    arrivals, lengths = random.Random(f"arrivals {seed}"), random.Random(f"lengths {seed}")
    at, coming = 0.0, []
    for index in range(requests):
        at += arrivals.expovariate(request_per_s)
        coming.append(Request(index, at, 1, tokens(lengths)))
    replica = Replica(Limits(max_num_seqs=slots, max_num_batched_tokens=1 << 20, kv_blocks=1 << 30))
    metrics = Metrics(slots=slots, kv_blocks=1 << 30, block_size=16)
    simulator.run(workload=Listed(coming), replica=replica, scheduler=vllm_v1, times=times, recorder=metrics)
    metrics.close()
    column = dict(zip(REQUEST_COLUMNS, metrics.requests().T, strict=True))
    assert len(column["arrival_s"]) == requests
    return Run(column, metrics)


def assert_within(means: Sequence[float], theory: float, bias: float = 0.0) -> None:
    """The theory lies in the interval around the mean of the runs, `bias` aside that is known to exist."""
    half = half_width(means=means)
    assert half is not None
    mean = math.fsum(means) / len(means)
    print(f"simulated {mean:.5g} ± {WIDER * half:.2g}, theory {theory:.5g} ({mean / theory - 1:+.2%})")
    assert abs(mean - theory) <= WIDER * half + bias


@cache
def one_server(load: float, kind: str) -> tuple[Run, ...]:
    """M/D/1 or M/M/1 of service 1 s: one slot, requests of a single token."""
    return tuple(
        run(
            seed,
            request_per_s=load,
            requests=4000,
            times=Constant() if kind == "D" else Exponential(seed),
            slots=1,
        )
        for seed in range(RUNS)
    )


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize(("kind", "variation"), [("D", 0.0), ("M", 1.0)])
def test_one_server_waits_as_pollaczek_and_khinchine_say(kind: str, variation: float, load: float) -> None:
    waits = [one.mean("arrival_s", "first_scheduled_s") for one in one_server(load, kind)]
    theory = queueing.waiting_prompts_s(request_per_s=load, prefill_s=1.0, variation=variation)
    assert theory == pytest.approx(load * (1 + variation) / (2 * (1 - load)))
    assert_within(waits, theory)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("kind", ["D", "M"])
def test_poisson_arrivals_see_time_averages(kind: str, load: float) -> None:
    """PASTA: the share of requests that meet a busy server is the share of the time it is busy."""
    runs = one_server(load, kind)
    met_busy = [
        float((one.column["first_scheduled_s"] > one.column["arrival_s"])[one.steady].mean()) for one in runs
    ]
    busy = [one.metrics.timeline.sum_of("busy_s", slice(None)) / one.metrics.end_s for one in runs]
    assert_within(met_busy, load)
    assert_within(busy, load)


def test_m_m_1_times_are_exponential() -> None:
    """T of M/M/1 is exponential of rate µ − λ: its percentiles are known, not its mean alone."""
    load = 0.6
    for percent in (50, 90, 99):
        found = [
            float(np.percentile((one.column["done_s"] - one.column["arrival_s"])[one.steady], percent))
            for one in one_server(load, "M")
        ]
        assert_within(found, -math.log(1 - percent / 100) / (1 - load))


def erlang_c(slots: int, offered: float) -> float:
    """The chance that all of `slots` are busy: M/M/c."""
    inverse = 1.0
    for count in range(1, slots + 1):
        inverse = 1 + inverse * count / offered  # 1 / Erlang B
    return 1 / (1 + (1 - offered / slots) * (inverse - 1))


def test_erlang_c_by_hand() -> None:
    assert erlang_c(1, 0.5) == pytest.approx(0.5)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(("slots", "load"), [(2, 0.7), (8, 0.8), (8, 0.95), (32, 0.9)])
def test_slots_wait_as_erlang_says(slots: int, load: float) -> None:
    """Memoryless answers in slots: M/M/c, and Sakasegawa's form of it that `latency` uses."""
    step_s = 1 / SLOT_STEPS
    runs = [
        run(
            seed,
            request_per_s=load * slots,
            requests=6000,
            times=Constant(step_s),
            slots=slots,
            tokens=lambda draw: geometric(draw, SLOT_STEPS),
        )
        for seed in range(RUNS)
    ]
    waits = [one.mean("arrival_s", "first_scheduled_s") for one in runs]
    theory = erlang_c(slots, load * slots) / (slots * (1 - load))
    # A request that finds a free slot still waits for the step under way.
    assert_within(waits, theory, bias=step_s)
    formula = queueing.waiting_open_s(utilization=load, slots=slots, residence_s=1.0)
    assert formula == pytest.approx(theory, rel=0.12)


def test_slots_without_end_hold_a_poisson_number() -> None:
    """M/G/∞: the number under way is Poisson of mean λ · T, whatever the lengths' law."""
    rate, step_s, mean = 20.0, 1 / SLOT_STEPS, 50
    held, spread, times = [], [], []
    for seed in range(RUNS):
        one = run(
            seed,
            request_per_s=rate,
            requests=4000,
            times=Constant(step_s),
            slots=100_000,
            tokens=lambda draw: draw.choice((1, 2 * mean - 1)),
        )
        arrival, done = one.column["arrival_s"], np.sort(one.column["done_s"])
        inside = np.arange(len(arrival)) - np.searchsorted(done, arrival, side="right")
        held.append(float(inside[one.steady].mean()))
        times.append(one.mean("arrival_s", "done_s"))
        spread.append(float(inside[one.steady].var()))
    assert_within(times, mean * step_s, bias=step_s)
    assert_within(held, rate * mean * step_s, bias=rate * step_s)
    assert_within(spread, rate * mean * step_s, bias=rate * step_s)


@pytest.mark.parametrize("load", [0.4, 0.8])
@pytest.mark.parametrize("law", ["constant", "geometric"])
def test_steps_as_long_as_their_batch_share_a_processor(law: str, load: float) -> None:
    """Processor sharing, E[T] = S / (1 − ρ): the same for all laws of length (insensitivity)."""
    step_s = 1 / SLOT_STEPS
    runs = [
        run(
            seed,
            request_per_s=load,
            requests=3000,
            times=Shared(step_s),
            slots=100_000,
            tokens=lambda draw: SLOT_STEPS if law == "constant" else geometric(draw, SLOT_STEPS),
        )
        for seed in range(RUNS)
    ]
    times = [one.mean("arrival_s", "done_s") for one in runs]
    # The step under way when a request comes is not shared with it: as long as those it holds.
    assert_within(times, 1 / (1 - load), bias=step_s / (1 - load))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("kind", ["D", "M"])
def test_littles_law_holds_in_every_run(kind: str, load: float) -> None:
    """Σ times in the system is the integral of their number, as the timeline kept it.

    It counts who waits as a step ends: a request is missed from its arrival to the end of that step.
    """
    for one in one_server(load, kind):
        column, line = one.column, one.metrics.timeline
        inside = line.sum_of("running_s", slice(None)) + line.sum_of("waiting_s", slice(None))
        whole = float((column["done_s"] - column["arrival_s"]).sum())
        starts = np.sort(column["first_scheduled_s"])
        ends = np.sort(column["done_s"])
        place = np.searchsorted(ends, column["arrival_s"], side="right")
        found_busy = (place < len(ends)) & (starts[np.minimum(place, len(ends) - 1)] < column["arrival_s"])
        missed = float((ends[place[found_busy]] - column["arrival_s"][found_busy]).sum())
        assert inside == pytest.approx(whole - missed, rel=1e-9)
        # X = N / T, and the server is busy for as long as it serves.
        assert line.sum_of("busy_s", slice(None)) == pytest.approx(float((ends - starts).sum()), rel=1e-9)
