"""What is kept of a simulation adds up: gaps, blocks, times; also where runs of steps are taken at once."""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.sim import logs, timeline
from capplan.sim.flow import Scheduler
from capplan.sim.metrics import REQUEST_COLUMNS, ROWS, Metrics
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS
from capplan.sim.simulator import run
from capplan.sim.summary import Rule, summarise

POLICIES = sorted(SCHEDULERS)


class Affine:
    """A step of base + a second part for each context, sequence and prompt token."""

    def __init__(self, base: float = 5e-3, sequence: float = 5e-5, context: float = 2e-6) -> None:
        self.base, self.sequence, self.context = base, sequence, context

    def step_s(self, step: Step) -> float:
        decode = self.sequence * step.decoding + self.context * step.kv_tokens
        return self.base + decode + 1e-5 * step.prompt_tokens

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        passed, steps = 0.0, 0
        while not steps or (steps < most and passed < until_s):
            contexts = kv_tokens + steps * decoding
            passed += self.base + self.sequence * decoding + self.context * contexts
            steps += 1
        return steps, passed

    def slope_s(self, decoding: int, kv_tokens: int) -> float:
        return self.context


class Listed:
    """A workload of given requests."""

    shares = False

    def __init__(self, rows: list[tuple[float, int, int]], samples: int = 1) -> None:
        self.rows, self.samples = rows, samples
        self.count: int | None = len(rows)

    def arrivals(self) -> Iterator[Request]:
        for index, (arrival_s, prompt, output) in enumerate(self.rows):
            yield Request(index, arrival_s, prompt, output, samples=self.samples)

    def after(self, request: Request, now_s: float) -> Request | None:
        return None


def limits(**changes: object) -> Limits:
    made = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_blocks": 60,
        "block_size": 16,
        "max_model_len": 600,
    } | changes
    return Limits(**made)  # type: ignore[arg-type]


class Tokens:
    """A recorder that keeps every token's time, from who is in the engine before and after each step."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.times: dict[int, list[float]] = {}
        self.decoders: list[Request] = []
        self.blocks_s = 0.0
        self.waiting_s = 0.0

    def watching(self, scheduler: Scheduler) -> Scheduler:
        def watched(replica: Replica) -> Step:
            step = scheduler(replica)
            step.steady = False
            fresh = {request for request, _, _ in step.chunks}
            late = {*step.held_back, *step.preempted, *fresh}
            running = [request for request in replica.running if request not in replica.prefilling]
            self.decoders = [request for request in running if request not in late] if step.decoding else []
            return step

        return watched

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        assert count == 1
        made = list(self.decoders)
        made += [request for request, _, _ in step.chunks if request not in replica.prefilling]
        for request in made:
            self.times.setdefault(request.index, []).append(end_s)
        self.blocks_s += step.kv_blocks * (end_s - start_s)
        self.waiting_s += len(replica.waiting) * (end_s - start_s)
        self.metrics.steps(replica, step, count, start_s, end_s, done)

    def rejected(self, request: Request, now_s: float) -> None:
        self.metrics.rejected(request, now_s)

    def gaps(self) -> np.ndarray:
        return np.concatenate([np.diff(times) for times in self.times.values()])


def metrics_of(bounds: Limits, times: Affine) -> Metrics:
    return Metrics(
        slots=bounds.max_num_seqs,
        kv_blocks=bounds.kv_blocks,
        block_size=bounds.block_size,
        slope=times.slope_s,
    )


def simulate(name: str, bounds: Limits, workload: Listed, times: Affine | None = None) -> Metrics:
    times, policy = times or Affine(), SCHEDULERS[name]
    metrics = metrics_of(bounds, times)
    run(
        workload=workload,
        replica=policy.replica(bounds),
        scheduler=policy.scheduler(),
        times=times,
        recorder=metrics,
    )
    metrics.close()
    return metrics


def watched(name: str, bounds: Limits, workload: Listed) -> tuple[Metrics, Tokens]:
    times, policy = Affine(), SCHEDULERS[name]
    metrics = metrics_of(bounds, times)
    tokens = Tokens(metrics)
    scheduler = tokens.watching(policy.scheduler())
    run(workload=workload, replica=policy.replica(bounds), scheduler=scheduler, times=times, recorder=tokens)
    metrics.close()
    return metrics, tokens


def column(metrics: Metrics, name: str) -> Any:
    return metrics.requests()[:, REQUEST_COLUMNS.index(name)]


def some_requests(seed: int, count: int, gap_s: float) -> Listed:
    draw, now, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(1 / gap_s) if gap_s else 0.0
        rows.append((now, draw.randint(1, 200), draw.randint(1, 300)))
    return Listed(rows)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "hf_generate"])
@pytest.mark.parametrize("gap_s", [0.0, 0.05, 2.0])
def test_gaps_add_up_to_the_time_between_first_and_last_tokens(name: str, gap_s: float) -> None:
    bounds = limits(whole_prompts=SCHEDULERS[name].whole_prompts)
    metrics = simulate(name, bounds, some_requests(3, 80, gap_s))
    line, everything = metrics.timeline, slice(0, None)
    outputs = column(metrics, "output_tokens")
    assert len(outputs) == 80
    assert line.sum_of("gaps", everything) == pytest.approx((outputs - 1).sum(), rel=1e-9)
    between = (column(metrics, "done_s") - column(metrics, "first_token_s")).sum()
    if name != "static":  # its answers may leave later than their last token
        assert line.sum_of("gap_s", everything) == pytest.approx(between, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from([name for name in POLICIES if name not in ("hf_generate", "static")]),
    seed=st.integers(0, 10**6),
    blocks=st.sampled_from([45, 60, 100, 300]),
    budget=st.sampled_from([256, 300, 1000]),
    slots=st.sampled_from([2, 8, 32]),
    gap_s=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    caching=st.booleans(),
)
def test_no_gap_is_lost_under_any_scheduler(
    name: str, seed: int, blocks: int, budget: int, slots: int, gap_s: float, caching: bool
) -> None:
    bounds = limits(
        kv_blocks=blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        whole_prompts=SCHEDULERS[name].whole_prompts,
        prefix_caching=caching,
    )
    metrics = simulate(name, bounds, some_requests(seed, 50, gap_s))
    between = (column(metrics, "done_s") - column(metrics, "first_token_s")).sum()
    assert metrics.timeline.sum_of("gap_s", slice(0, None)) == pytest.approx(between, rel=1e-6)
    gaps = (column(metrics, "output_tokens") - 1).sum()
    assert metrics.timeline.sum_of("gaps", slice(0, None)) == pytest.approx(gaps)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(40, 200),
    budget=st.integers(8, 300),
    slots=st.integers(1, 32),
    gap_s=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
)
def test_vllm_gaps_are_those_of_every_token(
    seed: int, blocks: int, budget: int, slots: int, gap_s: float
) -> None:
    """Preempted and held back requests included: the same gaps as from every token's time."""
    bounds = limits(kv_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=slots)
    metrics, tokens = watched("vllm_v1", bounds, some_requests(seed, 40, gap_s))
    gaps = np.sort(tokens.gaps())
    line, everything = metrics.timeline, slice(0, None)
    assert line.sum_of("gaps", everything) == pytest.approx(len(gaps))
    assert line.sum_of("gap_s", everything) == pytest.approx(gaps.sum(), rel=1e-9)
    for percent in (50, 90, 99):
        exact = gaps[math.ceil(len(gaps) * percent / 100) - 1]
        assert line.gap_percentile_s(everything, percent) == pytest.approx(exact, rel=0.003)


def test_runs_of_steps_are_read_as_if_they_came_one_by_one() -> None:
    bounds, workload = limits(kv_blocks=400, max_num_seqs=32), some_requests(5, 300, 0.05)
    together = simulate("vllm_v1", bounds, workload)
    single, tokens = watched("vllm_v1", bounds, workload)
    assert together.steps_taken == single.steps_taken
    for name in ("done_s", "first_token_s", "first_scheduled_s"):
        assert column(together, name) == pytest.approx(column(single, name), rel=1e-9)
    for name in timeline.SUMS:
        first, second = (kept.timeline.sum_of(name, slice(0, None)) for kept in (together, single))
        # Inside a run blocks grow evenly, and those who come are seen at its end.
        even = ("kv_block_s", "unfilled_token_s", "waiting_s", "idle_slot_s")
        tolerance = 0.03 if name in even else 1e-9
        assert first == pytest.approx(second, rel=tolerance), name
    assert single.timeline.sum_of("kv_block_s", slice(0, None)) == pytest.approx(tokens.blocks_s)
    assert single.timeline.sum_of("waiting_s", slice(0, None)) == pytest.approx(tokens.waiting_s)
    gaps = np.sort(tokens.gaps())
    for percent in (50, 90, 95, 99):
        exact = gaps[math.ceil(len(gaps) * percent / 100) - 1]
        assert together.timeline.gap_percentile_s(slice(0, None), percent) == pytest.approx(exact, rel=0.01)


def test_gaps_inside_a_long_run_of_steps_are_spread() -> None:
    """One sequence of 20,000 tokens: its first gaps are 5.05 ms, its last 45 ms."""
    bounds = limits(kv_blocks=5000, max_model_len=30_000)
    metrics = simulate("vllm_v1", bounds, Listed([(0.0, 1, 20_000)]))
    for percent in (10, 50, 90, 99):
        exact = 5e-3 + 5e-5 + 2e-6 * 20_000 * percent / 100
        assert metrics.timeline.gap_percentile_s(slice(0, None), percent) == pytest.approx(exact, rel=0.005)


def test_two_requests_by_hand() -> None:
    """Prompts of 32 and 16 tokens in one step, then 2 tokens together and 2 alone; steps of 1 s."""
    bounds = limits(kv_blocks=10, max_num_seqs=4)
    times = Affine(base=1.0, sequence=0.0, context=0.0)
    metrics = simulate("vllm_v1", bounds, Listed([(0.0, 32, 5), (0.0, 16, 3)]), times)
    first_s = 1.0 + 48e-5
    assert column(metrics, "first_token_s") == pytest.approx([first_s, first_s])
    assert column(metrics, "done_s") == pytest.approx([first_s + 4, first_s + 2])
    line, everything = metrics.timeline, slice(0, None)
    assert metrics.steps_taken == 5
    assert line.sum_of("tokens", everything) == pytest.approx(2 + 2 + 2 + 1 + 1)
    assert line.sum_of("decoded", everything) == pytest.approx(2 + 2 + 1 + 1)
    assert line.sum_of("prompt_tokens", everything) == pytest.approx(48)
    # 3 blocks in the first step, 3 + 2 in the next two, 3 in the last two.
    assert line.sum_of("kv_block_s", everything) == pytest.approx(3 * first_s + 5 + 5 + 3 + 3, rel=0.02)
    summary = summarise(metrics, Rule())
    assert summary.spreads["tpot_s"] is not None
    assert summary.spreads["tpot_s"].p50 == pytest.approx(1.0)
    assert summary.kv_usage.max == pytest.approx(0.5)
    assert summary.output_token_per_s == pytest.approx((4 + 2 + 2) / (first_s + 4), rel=0.01)


def test_a_preempted_request_is_counted_with_what_it_computes_again() -> None:
    """Two requests of 64 + 64 tokens in 12 blocks: the second is thrown out once, and computed again."""
    bounds = limits(kv_blocks=12, max_num_seqs=2)
    metrics = simulate("vllm_v1", bounds, Listed([(0.0, 64, 65), (0.0, 64, 65)]))
    preempted = column(metrics, "preemptions")
    assert metrics.preemptions == preempted.sum() == 1
    # Six blocks each hold 96 tokens: thrown out when it needs the seventh, with 96 computed.
    assert metrics.recomputed_tokens == 96


def test_rejected_requests_are_kept_apart() -> None:
    metrics = simulate("vllm_v1", limits(), Listed([(0.0, 10, 5), (1.0, 900, 5)]))
    assert metrics.rejections == [(1, 1.0, 900, 5)]
    assert len(metrics.requests()) == 1


@pytest.mark.parametrize("samples", [1, 3])
def test_several_answers_count_as_several(samples: int) -> None:
    workload = Listed([(0.0, 20, 11)] * 2, samples=samples)
    metrics = simulate("vllm_v1", limits(), workload)
    assert metrics.timeline.sum_of("gaps", slice(0, None)) == pytest.approx(2 * samples * 10)
    assert summarise(metrics, Rule()).output_tokens == 2 * samples * 11


def test_time_bins_are_bounded_and_keep_every_sum() -> None:
    """Over 7 orders of magnitude of time the bins stay 512, and nothing is lost when they are joined."""
    line = timeline.Timeline(slots=4, kv_blocks=100, block_size=16, slope=None)
    now, total = 0.0, 0.0
    for power in range(8):
        took = 10.0**power * 1e-3
        rows = [
            [now + at * took, now + (at + 1) * took, 2, 3, 50, 0, 6, 30, 60, 1, 3, 0, 6] for at in range(200)
        ]
        line.add(np.array(rows), [])
        now += 200 * took
        total += 200 * took
        assert len(line.sums["busy_s"]) == timeline.BINS
        assert line.width_s * timeline.BINS >= now
    assert line.sum_of("busy_s", slice(0, None)) == pytest.approx(total)
    assert line.sum_of("gaps", slice(0, None)) == pytest.approx(8 * 200 * 6)
    assert line.usage_s(slice(0, None)).sum() == pytest.approx(total)
    assert line.most_kv_blocks.max() == 30


def test_many_requests_take_bounded_memory() -> None:
    """Buffers are worked off: rows of steps do not pile up, a request takes its row of numbers."""
    metrics = metrics_of(limits(), Affine())
    replica, step = Replica(limits()), Step()
    step.decoding, step.kv_tokens, step.kv_blocks = 4, 100, 10
    done = Request(0, 0.0, 10, 5)
    for number in range(3 * ROWS):
        metrics.steps(replica, step, 1, number * 1e-2, (number + 1) * 1e-2, [done])
    assert metrics.finished == 3 * ROWS - 1
    assert sum(map(len, metrics._full)) == 3 * ROWS * 8 * len(REQUEST_COLUMNS)
    assert metrics.timeline.sum_of("steps", slice(0, None)) == pytest.approx(3 * ROWS)


def test_stepwise_leaves_the_scheduler_as_it_is() -> None:
    policy, bounds = SCHEDULERS["vllm_v1"], limits()
    replica = policy.replica(bounds)
    replica.enqueue(Request(0, 0.0, 10, 5))
    step = logs.stepwise(policy.scheduler())(replica)
    assert not step.steady
    assert step.prompt_tokens == 10
