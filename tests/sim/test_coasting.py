"""Coasting against asking the scheduler at every step: the same steps, moments and blocks."""

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.sim import coasting, simulator
from capplan.sim.looks import Looking
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers.vllm_v1 import vllm_v1

KEPT = (
    "index",
    "first_scheduled_s",
    "first_token_s",
    "done_s",
    "computed_tokens",
    "made_tokens",
    "preemptions",
    "cached_tokens",
)


class Times:
    """Every part of a step has its own price."""

    def step_s(self, step: Step) -> float:
        return (
            0.01
            + 1e-5 * step.prompt_tokens
            + 1e-9 * step.prompt_pairs
            + 1e-4 * step.decoding
            + 1e-8 * step.kv_tokens
        )

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        passed, steps = 0.0, 0
        while not steps or (steps < most and passed < until_s):
            passed += 0.01 + 1e-4 * decoding + 1e-8 * (kv_tokens + steps * decoding)
            steps += 1
        return steps, passed


class Mixed:
    """Requests of all kinds, plain ones mostly; every seventh answer brings another request."""

    shares = True
    count = None

    def __init__(self, seed: int, plain: bool = False) -> None:
        self.seed, self.plain = seed, plain

    def arrivals(self) -> Iterator[Request]:
        draw = random.Random(self.seed)
        rate, longest = draw.choice([1, 5, 30]), draw.choice([3, 200])
        now_s = 0.0
        for index in range(draw.choice([20, 150])):
            now_s += draw.expovariate(rate)
            yield Request(
                index,
                now_s,
                draw.randint(1, 400),
                draw.randint(1, longest),
                samples=2 if draw.random() < 0.05 and not self.plain else 1,
                segments=(("system", 32),) if draw.random() < 0.1 and not self.plain else (),
            )

    def after(self, request: Request, now_s: float) -> Request | None:
        if request.index % 7 or request.index >= 1000:
            return None
        return Request(request.index + 1000, now_s + 0.3, 50, 20)


class Everything:
    """All that a step leaves behind."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        parts = step.decoding, step.kv_tokens, step.prompt_tokens, step.prompt_sequences, step.prompt_pairs
        state = step.kv_blocks, step.made_tokens, len(replica.running), len(replica.waiting)
        ended = [tuple(getattr(request, name) for name in KEPT) for request in done]
        self.seen.append((start_s, end_s, count, parts, state, ended))

    def rejected(self, request: Request, now_s: float) -> None:
        self.seen.append((request.index, now_s))


def served(seed: int, limits: Limits, looking: Looking | None, coast: bool) -> tuple[Any, ...]:
    replica, kept = Replica(limits), Everything()
    end_s = simulator.run(
        workload=Mixed(seed),
        replica=replica,
        scheduler=vllm_v1,
        times=Times(),
        recorder=kept,
        looking=looking,
        coast=coast,
    )
    return end_s, kept.seen, replica.blocks.free, replica.sequences, replica.phases, replica.kv_tokens


@given(
    seed=st.integers(0, 10**6),
    max_num_seqs=st.sampled_from([2, 8, 64]),
    max_num_batched_tokens=st.sampled_from([64, 512, 4096]),
    kv_blocks=st.sampled_from([60, 300, 5000]),
    block_size=st.sampled_from([4, 16]),
    caching=st.booleans(),
    spare=st.sampled_from([0, 5]),
    longest=st.sampled_from([None, 300]),
    threshold=st.sampled_from([0, 0, 30]),
    looking=st.sampled_from([None, Looking(), Looking(steps_ahead=1), Looking(steps_ahead=2)]),
)
@settings(max_examples=100, deadline=None)
def test_coasting_makes_the_schedulers_steps(
    seed: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_blocks: int,
    block_size: int,
    caching: bool,
    spare: int,
    longest: int | None,
    threshold: int,
    looking: Looking | None,
) -> None:
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_blocks=kv_blocks,
        block_size=block_size,
        prefix_caching=caching,
        spare_blocks=spare,
        max_model_len=longest,
        long_prefill_token_threshold=threshold,
    )
    assert served(seed, limits, looking, coast=True) == served(seed, limits, looking, coast=False)


def test_most_steps_of_a_moderate_load_are_coasted(monkeypatch: Any) -> None:
    """The test above would pass if nothing ever coasted."""
    asked = 0

    def counted(replica: Replica) -> Step:
        nonlocal asked
        asked += 1
        return vllm_v1(replica)

    monkeypatch.setattr(simulator, "vllm_v1", counted)
    kept = Everything()
    limits = Limits(max_num_seqs=64, max_num_batched_tokens=4096, kv_blocks=5000)
    workload = Mixed(3, plain=True)
    simulator.run(workload=workload, replica=Replica(limits), scheduler=counted, times=Times(), recorder=kept)
    assert asked < len(kept.seen) / 4
    assert coasting.can_coast(Replica(limits))
