"""Batches that run to their last request, and Orca, which does not: by hand and by the closed forms."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import queueing
from capplan.sim.replay import LinearTimes
from capplan.sim.request import Request
from tests.sim.scheduling import Kept, requests, serve


def bubble(kept: Kept) -> float:
    padding = sum(row[5] * row[2] for row in kept.rows)
    decoded = sum(row[3] * row[2] for row in kept.rows)
    return padding / (padding + decoded)


def test_a_short_answer_leaves_a_bubble_until_the_long_one_ends() -> None:
    # One step of prompts, then 4 of decoding: the first row is idle in the last 3 of them.
    kept = serve("static", requests((4, 2), (4, 5)), max_num_seqs=2)
    assert [row[:4] + row[5:] for row in kept.rows] == [
        (0, 1, 1, 0, 0),
        (1, 2, 1, 2, 0),
        (2, 5, 3, 1, 1),
    ]
    assert [(request.first_token_s, request.done_s) for request in kept.finished] == [(1, 2), (1, 5)]


def test_the_lessons_straggler() -> None:
    # 20 and 600 tokens: 1 − 620 / 1,200. A prompt's step makes the first token, hence one more.
    kept = serve("static", requests((4, 21), (4, 601)), max_num_seqs=2, max_model_len=700)
    assert bubble(kept) == pytest.approx(580 / 1200)
    assert bubble(kept) == pytest.approx(queueing.static_bubble_fraction(output_tokens=(20, 600)))


@given(output_tokens=st.lists(st.integers(1, 60), min_size=2, max_size=8))
def test_one_batchs_bubble_is_the_formulas(output_tokens: list[int]) -> None:
    coming = requests(*((4, tokens + 1) for tokens in output_tokens))
    kept = serve("static", coming, max_num_seqs=len(output_tokens))
    assert bubble(kept) == pytest.approx(queueing.static_bubble_fraction(output_tokens=output_tokens))


@given(output_tokens=st.lists(st.integers(1, 40), min_size=1, max_size=20), slots=st.integers(1, 5))
def test_steps_are_the_formulas(output_tokens: list[int], slots: int) -> None:
    coming = [(4, tokens) for tokens in output_tokens]
    static = serve("static", requests(*coming), max_num_seqs=slots)
    assert static.step_count == queueing.static_batch_steps(output_tokens=output_tokens, slots=slots)
    for name in ("orca", "vllm_v1"):
        continuous = serve(name, requests(*coming), max_num_seqs=slots, max_num_batched_tokens=1000)
        wanted = queueing.continuous_batch_steps(output_tokens=output_tokens, slots=slots)
        assert continuous.step_count == wanted


def test_the_lessons_four_requests_in_two_slots() -> None:
    coming = [(4, 20), (4, 600), (4, 20), (4, 600)]
    ample = {"max_num_seqs": 2, "max_model_len": 700}
    assert serve("static", requests(*coming), **ample).step_count == 1200
    assert serve("orca", requests(*coming), **ample).step_count == 640


def test_padding_is_computed_too() -> None:
    # µs: a prompt token 10, a row 100, a context token 1. Prompts 2 and 6 become 6 and 6: 120, not 80.
    times = LinearTimes(base=0, prompt_token=10, decode_sequence=100, context_token=1)
    kept = serve("static", requests((2, 2), (6, 3)), times=times, max_num_seqs=2)
    # Contexts are padded as well: 6 + 6, then 7 + 7, the second with one row in vain.
    assert [row[:2] for row in kept.rows] == [(0, 120), (120, 332), (332, 546)]
    assert [row[3:] for row in kept.rows] == [(0, 8, 0), (2, 0, 0), (1, 0, 1)]


def test_a_batch_waits_until_it_is_full() -> None:
    coming = requests((4, 2), (4, 2), (4, 2), arrivals=(0, 10, 50))
    kept = serve("static", coming, max_num_seqs=2)
    # The second comes at 10; the third is the last known to come, and goes alone.
    assert [request.first_scheduled_s for request in kept.finished] == [10, 10, 50]


def test_generate_takes_whoever_waits_and_returns_all_together() -> None:
    coming = requests((4, 2), (4, 5), (4, 3), arrivals=(0, 0, 1))
    kept = serve("hf_generate", coming, max_num_seqs=8)
    assert [(request.index, request.first_token_s, request.done_s) for request in kept.finished] == [
        (0, 1, 5),
        (1, 1, 5),
        (2, 6, 8),
    ]


def test_a_batch_is_as_wide_as_memory_allows() -> None:
    seen: list[tuple[int, int]] = []
    # Rows of 8 + 8 tokens are 4 blocks of 4; 10 blocks hold two.
    kept = serve(
        "static",
        requests((8, 8), (8, 8), (4, 4)),
        kv_blocks=10,
        max_num_seqs=3,
        seen=lambda replica, step, kept: seen.append((replica.blocks.used, len(replica.running))),
    )
    assert max(seen) == (8, 2)
    assert len(kept.finished) == 3


def test_orca_keeps_whole_spans_and_lets_in_at_every_step() -> None:
    # A span is max_model_len, 20 tokens: 5 blocks of 4. 10 blocks hold two.
    kept = serve("orca", requests((4, 3), (4, 6), (4, 2)), kv_blocks=10, max_model_len=20)
    # The third enters in the step after the first has ended, with the second still decoding.
    assert [(request.index, request.first_scheduled_s, request.done_s) for request in kept.finished] == [
        (0, 0, 3),
        (2, 3, 5),
        (1, 0, 6),
    ]
    assert [row[2:5] for row in kept.rows] == [(1, 0, 8), (2, 2, 0), (1, 1, 4), (1, 2, 0), (1, 1, 0)]


def test_continuous_beats_static_by_more_the_more_outputs_vary() -> None:
    rng = random.Random(3)
    gains = []
    for spread in (0, 10, 30):
        lengths = [(4, 40 + rng.randint(-spread, spread)) for _ in range(64)]
        static, continuous = (
            serve(name, [Request(i, 0, *pair) for i, pair in enumerate(lengths)], max_num_seqs=8)
            for name in ("static", "orca")
        )
        gains.append(static.step_count / continuous.step_count)
    assert gains[0] == 1
    assert gains == sorted(gains)
    assert gains[2] > 1.3
