"""Prompts on one replica, decoding on another, the KV cache over a link between them."""

import pytest
from hypothesis import given, settings

from capplan.sim import disaggregated
from capplan.sim.disaggregated import Link, Stage
from capplan.sim.flow import StepTimes
from capplan.sim.replay import LinearTimes
from capplan.sim.replica import Replica
from capplan.sim.request import Request
from capplan.sim.schedulers.vllm_v1 import vllm_v1
from tests.sim.scheduling import ONE_SECOND, Kept, Listed, limits_of, requests
from tests.sim.test_schedulers import CASES, TIMES, VLLM, Case

INSTANT = Link(bytes_per_s=1e30, latency_s=0, kv_bytes_per_token=1)


def apart(
    coming: list[Request],
    *,
    link: Link = INSTANT,
    times: StepTimes = ONE_SECOND,
    leaps: bool = True,
    decode_blocks: int = 1000,
    **given: int | bool,
) -> tuple[Kept, Kept]:
    kept = Kept(), Kept()
    prefill = Replica(limits_of(VLLM, **given))
    decode = Replica(limits_of(VLLM, **{**given, "kv_blocks": decode_blocks}))
    decode.leaps = leaps
    disaggregated.run(
        workload=Listed(coming),
        prefill=Stage(prefill, vllm_v1, times, kept[0]),
        decode=Stage(decode, vllm_v1, times, kept[1]),
        link=link,
    )
    assert prefill.blocks.used == decode.blocks.used == 0
    return kept


def test_prompts_never_stall_those_that_decode() -> None:
    first, second = requests((4, 4), (8, 3), arrivals=(0, 2))
    prompts, decoding = apart([first, second])
    assert [row[:5] for row in prompts.rows] == [(0, 1, 1, 0, 4), (2, 3, 1, 0, 8)]
    assert (first.first_token_s, first.done_s) == (1, 4)
    assert (second.first_token_s, second.done_s) == (3, 5)
    # The first alone, from 1 to 3; both until the first ends; the second alone.
    assert [row[:4] for row in decoding.rows] == [(1, 2, 1, 1), (2, 3, 1, 1), (3, 4, 1, 2), (4, 5, 1, 1)]


def test_the_cache_moves_at_the_links_rate() -> None:
    # 8 tokens of 100 bytes at 400 bytes/s are 2 s, and half a second of latency.
    link = Link(bytes_per_s=400, latency_s=0.5, kv_bytes_per_token=100)
    request = requests((8, 3))[0]
    apart([request], link=link)
    assert request.first_token_s == 1
    assert request.done_s == 1 + 2.5 + 2


def test_caches_leave_one_after_another() -> None:
    link = Link(bytes_per_s=400, latency_s=0.5, kv_bytes_per_token=100)
    first, second = requests((8, 2), (8, 2))
    apart([first, second], link=link)
    assert first.first_token_s == second.first_token_s == 1
    # The link is busy from 1 to 3, then to 5.
    assert (first.done_s, second.done_s) == (4.5, 6.5)


def test_prefill_memory_is_held_until_the_cache_has_left() -> None:
    link = Link(bytes_per_s=400, latency_s=0, kv_bytes_per_token=100)
    first, second = requests((8, 2), (8, 2))
    apart([first, second], link=link, kv_blocks=3)
    # 3 blocks hold one prompt of 8: the second starts when the first's cache is over, at 3.
    assert second.first_scheduled_s == 3


def test_an_answer_of_one_token_never_moves() -> None:
    prompts, decoding = apart(requests((4, 1)))
    assert [request.done_s for request in prompts.finished] == [1]
    assert not decoding.rows


def test_one_thrown_out_is_computed_again_where_it_decodes() -> None:
    coming = requests((8, 12), (8, 12))
    prompts, decoding = apart(coming, decode_blocks=7)
    # 5 blocks each in the end: the second is thrown out, and prefills 8 + its tokens on the decode replica.
    assert decoding.preempted == [1]
    assert sum(row[4] for row in prompts.rows) == 16
    assert sum(row[4] for row in decoding.rows) > 8
    assert len(decoding.finished) == 2


@given(case=CASES)
@settings(max_examples=60, deadline=None)
def test_requests_and_tokens_are_conserved(case: Case) -> None:
    link = Link(bytes_per_s=2, latency_s=30, kv_bytes_per_token=5)
    coming = case.requests()
    prompts, decoding = apart(
        coming,
        link=link,
        times=TIMES,
        decode_blocks=case.kv_blocks,
        **case.limits,
    )
    finished = prompts.finished + decoding.finished
    assert len(finished) + len(prompts.refused) == len(coming)
    for request in finished:
        assert request.arrival_s <= request.first_scheduled_s < request.first_token_s <= request.done_s
        assert request.made_tokens == request.output_tokens
        if request.output_tokens > 1:
            assert request.done_s - request.first_token_s >= 30 + request.prompt_tokens * 5 / 2
    made = sum(request.samples * request.output_tokens for request in finished)
    assert prompts.made_tokens + decoding.made_tokens == made


@given(case=CASES)
@settings(max_examples=40, deadline=None)
def test_runs_of_steps_are_the_same_steps_one_by_one(case: Case) -> None:
    link = Link(bytes_per_s=2, latency_s=30, kv_bytes_per_token=5)
    ends = []
    for leaps in (True, False):
        prompts, decoding = apart(case.requests(), link=link, times=TIMES, leaps=leaps, max_model_len=72)
        ends.append([request.done_s for request in prompts.finished + decoding.finished])
    assert ends[0] == ends[1]


def test_a_decode_step_is_shorter_without_prompts_in_it() -> None:
    times = LinearTimes(base=10, prompt_token=1, decode_sequence=1, context_token=0)
    coming = [Request(index, 20.0 * index, 60, 20) for index in range(40)]
    _, decoding = apart([Request(r.index, r.arrival_s, 60, 20) for r in coming], times=times)
    gaps = [(request.done_s - request.first_token_s) / 19 for request in decoding.finished]
    assert max(gaps) == pytest.approx(min(gaps), rel=0.5)
