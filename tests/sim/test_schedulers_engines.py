"""The engines' policies, each worked by hand: a step is a second, blocks hold 4 tokens."""

import pytest

from capplan.sim.replay import LinearTimes
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS
from capplan.sim.schedulers.llama_cpp import llama_cpp
from capplan.sim.schedulers.sglang import Sglang
from capplan.sim.schedulers.tgi import Tgi
from capplan.sim.schedulers.trtllm import guaranteed_no_evict
from tests.sim.scheduling import Kept, limits_of, requests, serve


def loads(kept: Kept) -> list[tuple[int, int, int]]:
    """(steps, decoding, prompt tokens) of each row."""
    return [row[2:5] for row in kept.rows]


def times_of(kept: Kept) -> dict[int, tuple[float, float]]:
    """Request → (first token, done)."""
    return {request.index: (request.first_token_s, request.done_s) for request in kept.finished}


class TestSglang:
    def test_prompts_go_first_and_decoding_waits(self) -> None:
        kept = serve("sglang", requests((4, 3), (8, 2), arrivals=(0, 1)))
        # Prompt, prompt (the first waits), both decode, the first alone.
        assert loads(kept) == [(1, 0, 4), (1, 0, 8), (1, 2, 0), (1, 1, 0)]
        assert times_of(kept) == {0: (1, 4), 1: (2, 3)}

    def test_a_long_prompt_in_chunks_keeps_decoding_out(self) -> None:
        kept = serve("sglang", requests((4, 2), (20, 1), arrivals=(0, 1)), max_num_batched_tokens=8)
        assert loads(kept) == [(1, 0, 4), (1, 0, 8), (1, 0, 8), (1, 0, 4), (1, 1, 0)]

    def test_a_mixed_chunk_shares_its_step(self) -> None:
        kept = serve(
            "sglang",
            requests((4, 3), (20, 1), arrivals=(0, 1)),
            scheduler=Sglang(enable_mixed_chunk=True),
            max_num_batched_tokens=8,
        )
        # A decoding sequence takes one of the 8 tokens.
        assert loads(kept) == [(1, 0, 4), (1, 1, 7), (1, 1, 7), (1, 0, 6)]

    def test_room_is_kept_for_what_those_inside_may_still_make(self) -> None:
        # 60 tokens of memory. The first holds 20 and may make 39 more, 0.7 of which are kept: 27 of 40 free.
        # The second needs 8 + 4 and a page: 16 > 40 − 27 = 13, so it waits until the first is done.
        kept = serve("sglang", requests((20, 40), (8, 4), arrivals=(0, 1)), kv_blocks=15)
        assert times_of(kept)[0] == (1, 40)
        assert times_of(kept)[1][0] > 4
        lower = serve(
            "sglang",
            requests((20, 40), (8, 4), arrivals=(0, 1)),
            kv_blocks=15,
            scheduler=Sglang(schedule_conservativeness=0.5),
        )
        # 0.35 · 39 = 13 kept: 16 of 27 are there at once.
        assert times_of(lower)[1][0] == 2

    def test_the_ratio_sinks_by_the_step_and_starts_again_when_idle(self) -> None:
        policy = Sglang()
        ratios: list[float] = []
        serve(
            "sglang",
            requests((4, 31), (4, 2), arrivals=(0, 100)),
            scheduler=policy,
            seen=lambda replica, step, kept: ratios.append(policy.new_token_ratio(replica)),
        )
        sunk = (0.7 - 0.7 * 0.14) / 600
        assert ratios == pytest.approx([0.7, 0.7 - 30 * sunk, 0.7, 0.7 - sunk])

    def test_the_least_advanced_is_retracted_to_the_queues_end(self) -> None:
        # 0.07 · 59 = 4 tokens are kept for the first: the second's 8 + 40 and a page have room in 60.
        policy = Sglang(schedule_conservativeness=0.1)
        coming = requests((8, 60), (8, 40), (4, 1), arrivals=(0, 1, 24))
        kept = serve("sglang", coming, kv_blocks=17, scheduler=policy)
        # After 24 steps together both hold 8 full blocks and have made 25; one block is free.
        assert kept.preempted == [1]
        assert coming[1].preemptions == 1
        assert coming[2].done_s < coming[1].done_s

    def test_after_retraction_the_ratio_is_how_far_the_others_have_come(self) -> None:
        policy = Sglang(schedule_conservativeness=0.1)
        found: list[float] = []

        def seen(replica, step, kept):  # type: ignore[no-untyped-def]
            if step.preempted:
                found.append(policy._ratio)

        coming = requests((8, 60), (8, 40), arrivals=(0, 1))
        serve("sglang", coming, kv_blocks=17, scheduler=policy, seen=seen)
        # (25 made + 20) / (60 + 1)
        assert found == [pytest.approx(45 / 61)]

    def test_longest_prefix_first(self) -> None:
        system = (("system", 8),)
        coming = [
            Request(0, 0, 12, 2, segments=system),
            Request(1, 1, 12, 2),
            Request(2, 1, 12, 2, segments=system),
        ]
        lpm = Sglang(schedule_policy="lpm")
        kept = serve("sglang", coming, scheduler=lpm, prefix_caching=True, max_num_batched_tokens=12)
        assert coming[2].first_scheduled_s < coming[1].first_token_s
        assert coming[2].cached_tokens == 8
        fcfs = [Request(r.index, r.arrival_s, 12, 2, segments=r.segments) for r in coming]
        serve("sglang", fcfs, prefix_caching=True, max_num_batched_tokens=12)
        assert fcfs[1].first_token_s < fcfs[2].first_token_s
        assert len(kept.finished) == 3


class TestTrtllm:
    def test_no_evict_starts_a_request_only_if_all_of_it_has_room(self) -> None:
        # 12 + 9 − 1 tokens are 5 blocks each in the end; 9 blocks let one in, though both prompts have room.
        coming = [(12, 9), (12, 9)]
        kept = serve("trtllm", requests(*coming), kv_blocks=9)
        assert times_of(kept) == {0: (1, 9), 1: (10, 18)}
        both = serve("trtllm", requests(*coming), kv_blocks=10)
        assert times_of(both) == {0: (1, 9), 1: (1, 9)}

    def test_max_tokens_are_reserved_not_what_will_come(self) -> None:
        kept = serve("trtllm", requests((12, 3), (12, 3)), kv_blocks=10, max_new_tokens=20)
        # 12 + 20 − 1 tokens are 8 blocks: one after the other.
        assert times_of(kept) == {0: (1, 3), 1: (4, 6)}

    def test_max_utilization_starts_both_and_pauses_the_newest(self) -> None:
        kept = serve("trtllm_max_utilization", requests((12, 9), (12, 9)), kv_blocks=9)
        # 3 blocks each; at 16 tokens the fifth one each makes 10 of 9: the second is paused.
        assert kept.preempted == [1]
        first, second = kept.finished
        assert (first.index, first.done_s) == (0, 9)
        assert second.preemptions == 1

    def test_a_whole_prompt_waits_for_a_step_that_has_room_for_it(self) -> None:
        kept = serve("trtllm", requests((6, 2), (6, 2)), max_num_batched_tokens=8)
        # 6 + 6 are more than 8: the second goes with the first's decoding.
        assert loads(kept) == [(1, 0, 6), (1, 1, 6), (1, 1, 0)]

    def test_a_prompt_longer_than_max_num_tokens_is_refused_without_chunks(self) -> None:
        kept = serve("trtllm", requests((9, 2)), max_num_batched_tokens=8)
        assert [request.index for request in kept.refused] == [0]

    def test_chunked_context_cuts_at_whole_blocks(self) -> None:
        kept = serve(
            "trtllm",
            requests((20, 1), (3, 4)),
            scheduler=lambda replica: guaranteed_no_evict(replica, chunked_context=True),
            max_num_batched_tokens=10,
            whole_prompts=False,
        )
        # 8 of 10 are two blocks; then 8, and the last 4 with all 3 of the second.
        assert loads(kept)[:3] == [(1, 0, 8), (1, 0, 8), (1, 0, 7)]


class TestTgi:
    def test_a_prefill_stalls_and_a_decode_follows(self) -> None:
        kept = serve("tgi", requests((4, 4), (4, 2), (4, 2), arrivals=(0, 1, 2)))
        # floor(0.3 · 1) = 0 are enough; after each such prefill comes a decode.
        assert loads(kept) == [(1, 0, 4), (1, 0, 4), (1, 2, 0), (1, 0, 4), (1, 2, 0), (1, 1, 0)]

    def test_too_few_wait_until_max_waiting_tokens_have_passed(self) -> None:
        running = [(4, 30)] * 4
        coming = requests(*running, (4, 2), arrivals=(0, 0, 0, 0, 2))
        policy = Tgi(waiting_served_ratio=0.5, max_waiting_tokens=6)
        kept = serve("tgi", coming, scheduler=policy)
        # Two of four would be enough, one is not: 5 decodes after the first prefill it is let in anyway.
        assert loads(kept)[:1] == [(1, 0, 16)]
        assert coming[4].first_scheduled_s == 6

    def test_enough_of_them_enter_at_once(self) -> None:
        coming = requests(*[(4, 30)] * 4, (4, 2), (4, 2), arrivals=(0, 0, 0, 0, 2, 2))
        kept = serve("tgi", coming, scheduler=Tgi(waiting_served_ratio=0.5, max_waiting_tokens=20))
        assert coming[5].first_scheduled_s == 2
        assert not kept.preempted

    def test_the_token_budget_holds_what_may_come(self) -> None:
        kept = serve("tgi", requests((12, 9), (12, 9)), kv_blocks=9)
        assert times_of(kept) == {0: (1, 9), 1: (10, 18)}

    def test_a_prefill_has_its_own_budget(self) -> None:
        kept = serve("tgi", requests((6, 2), (6, 2)), max_num_batched_tokens=8)
        assert loads(kept) == [(1, 0, 6), (1, 0, 6), (1, 2, 0)]


class TestLlamaCpp:
    def test_prompts_ride_with_decoding_in_pieces_of_the_batch(self) -> None:
        kept = serve("llama_cpp", requests((4, 3), (10, 1), arrivals=(0, 1)), max_num_batched_tokens=8)
        assert loads(kept) == [(1, 0, 4), (1, 1, 7), (1, 1, 3)]

    def test_without_continuous_batching_prompts_wait_for_all_slots(self) -> None:
        kept = serve(
            "llama_cpp",
            requests((4, 3), (4, 2), arrivals=(0, 1)),
            scheduler=lambda replica: llama_cpp(replica, cont_batching=False),
        )
        assert loads(kept) == [(1, 0, 4), (2, 1, 0), (1, 0, 4), (1, 1, 0)]

    def test_requests_wait_for_a_slot(self) -> None:
        kept = serve("llama_cpp", requests((4, 3), (4, 3)), max_num_seqs=1)
        assert times_of(kept) == {0: (1, 3), 1: (4, 6)}

    def test_a_slots_context_bounds_a_request(self) -> None:
        coming = requests((30, 2), (4, 30))
        kept = serve("llama_cpp", coming, max_model_len=24)
        assert [request.index for request in kept.refused] == [0]
        assert kept.finished[0].output_tokens == 20


@pytest.mark.parametrize("name", ["sglang", "tgi"])
def test_a_stalled_step_costs_its_prompts_alone(name: str) -> None:
    times = LinearTimes(base=0, prompt_token=1, decode_sequence=1000, context_token=0)
    kept = serve(name, requests((4, 3), (8, 2), arrivals=(0, 1)), times=times)
    assert [row[:2] for row in kept.rows][:2] == [(0, 4), (4, 12)]


@pytest.mark.parametrize("name", ["trtllm", "tgi", "llama_cpp", "static", "orca", "hf_generate"])
def test_those_that_reserve_never_throw_out(name: str) -> None:
    policy = SCHEDULERS[name]
    coming = requests(*[(prompt, 40 - prompt) for prompt in range(2, 32, 3)])
    kept = serve(name, coming, kv_blocks=limits_of(policy).max_num_batched_tokens // 4, max_model_len=60)
    assert len(kept.finished) == len(coming)
    assert not kept.preempted
