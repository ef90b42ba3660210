"""Several answers of one prompt: its blocks are shared, its last one copied when they write to it."""

import pytest

from capplan.sim.replay import LinearTimes
from tests.sim.scheduling import requests, serve


def blocks_used(name: str, prompt: int, output: int, samples: int) -> list[int]:
    found: list[int] = []
    serve(
        name,
        requests((prompt, output), samples=samples),
        times=LinearTimes(base=1, prompt_token=0, decode_sequence=0, context_token=0),
        max_num_batched_tokens=8,
        seen=lambda replica, step, kept: found.append(step.kv_blocks),
    )
    return found


def test_full_blocks_are_shared_and_the_tail_is_copied() -> None:
    # 10 tokens in blocks of 4: 2 full ones shared, the third once for each of 3 answers: 2 + 3.
    # Chunks of 8 and 2: copies come with the last one. At 13 tokens each answer has a fourth: 2 + 6.
    used = blocks_used("vllm_v1", 10, 5, samples=3)
    assert used[0] == 2
    assert used[1] == 5
    assert used[-1] == 8


def test_a_prompt_of_whole_blocks_has_no_tail_to_copy() -> None:
    used = blocks_used("vllm_v1", 8, 2, samples=4)
    # 2 shared; then a block each for the first token written.
    assert used == [2, 6]


def test_answers_are_sequences_that_read_the_prompt_each() -> None:
    times = LinearTimes(base=0, prompt_token=1, decode_sequence=100, context_token=1)
    kept = serve("vllm_v1", requests((8, 2), samples=3), times=times)
    # 8 prompt tokens once; then 3 answers over 8 tokens each.
    assert [row[:4] for row in kept.rows] == [(0, 8, 1, 0), (8, 332, 1, 3)]
    assert kept.made_tokens == 6


@pytest.mark.parametrize(("samples", "first_s"), [(2, 0), (3, 4)])
def test_answers_count_against_max_num_seqs(samples: int, first_s: float) -> None:
    first, second = requests((4, 4), (4, 2))
    second.samples = samples
    kept = serve("vllm_v1", [first, second], max_num_seqs=3)
    assert len(kept.finished) == 2
    assert second.first_scheduled_s == first_s


def test_more_answers_than_places_are_refused() -> None:
    kept = serve("vllm_v1", requests((4, 4), samples=9), max_num_seqs=8)
    assert [request.index for request in kept.refused] == [0]


def test_shared_prompts_need_less_memory_than_requests_of_their_own() -> None:
    peak = max(blocks_used("vllm_v1", 40, 4, samples=4))
    alone = max(blocks_used("vllm_v1", 40, 4, samples=1))
    # 10 shared + 4 · 1, against 4 · 11.
    assert (peak, alone) == (14, 11)
