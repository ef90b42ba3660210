"""From steps to users on a made-up step that can be worked by hand: laws, edges, what must be monotone."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import serving
from capplan.formulas.serving import Scheduling, Served, Traffic

PLAIN = Scheduling(max_num_seqs=1000, max_num_batched_tokens=100_000, wait_steps=0, bursts=0)
TRAFFIC = Traffic(isl=100, osl=101)


def step_s(
    *,
    decode_sequences: float,
    kv_tokens: float,
    prompt_tokens: float = 0,
    prompt_pairs: float | None = None,
    prompt_sequences: float | None = None,
) -> float:
    """10 ms where anything decodes, and 40 ms for every 100 prompt tokens."""
    return (0.01 if decode_sequences else 0.0) + prompt_tokens * 0.4e-3


def growing_s(
    *,
    decode_sequences: float,
    kv_tokens: float,
    prompt_tokens: float = 0,
    prompt_pairs: float | None = None,
    prompt_sequences: float | None = None,
) -> float:
    """A step that grows with its batch and contexts, and takes time even when idle."""
    return 5e-3 + 2e-5 * decode_sequences + 1e-8 * kv_tokens + 4e-5 * prompt_tokens


def loop(
    users: float, traffic: Traffic = TRAFFIC, plan: Scheduling = PLAIN, pool: float | None = None
) -> Served:
    return serving.closed_loop(
        step_s=step_s, traffic=traffic, scheduling=plan, users=users, kv_pool_tokens=pool
    )


def test_four_users_by_hand() -> None:
    # S = 10 + 40 ms (a little more than one prompt shares a step); a = 0.05 + 3 · 0.04 + 1; T = 1.165 s.
    served = loop(4)
    assert served.tpot_s == pytest.approx(0.01115, rel=0.01)
    assert served.ttft_s == pytest.approx(0.05, rel=0.05)
    assert served.request_per_s == pytest.approx(4 / 1.165, rel=0.01)
    assert served.prefill_share == pytest.approx(4 / 1.165 * 0.04, rel=0.02)


def test_one_user_waits_for_nobody() -> None:
    served = loop(1)
    # A prompt of 40 ms, then 100 steps that no one else's prompt is in.
    assert served.queue_s == 0
    assert served.wait_s == 0
    assert served.tpot_s == pytest.approx(0.01)


def test_users_without_a_slot_wait_as_littles_law_says() -> None:
    served = loop(64, plan=replace(PLAIN, max_num_seqs=32))
    assert (served.running, served.limit) == (32, "max_num_seqs")
    assert served.queue_s == pytest.approx(32 / served.request_per_s)


def test_the_pool_bounds_the_running_by_prompt_and_half_the_answer() -> None:
    served = loop(10, traffic=replace(TRAFFIC, equal=True), pool=450.0)
    # 100 + 50.5 tokens each: 2.99 of them.
    assert served.running == pytest.approx(450 / 150.5)
    assert served.limit == "kv"


def test_long_answers_are_met_more_often() -> None:
    """Lengths of an exponential law: who decodes has isl + osl of it on average, not isl + osl / 2."""
    served = loop(10, traffic=replace(TRAFFIC, equal=False, variation=1.0), pool=450.0)
    assert served.running == pytest.approx(450 / 201)


def test_reserving_the_whole_answer_runs_fewer() -> None:
    plan = replace(PLAIN, reserved=1.0)
    limit, what = serving.running_limit(traffic=TRAFFIC, scheduling=plan, kv_pool_tokens=402.0)
    assert what == "kv"
    assert limit == pytest.approx(2.0)


def test_a_single_token_has_no_tpot_and_prompts_queue() -> None:
    served = loop(8, traffic=Traffic(isl=100, osl=1))
    assert served.tpot_s is None
    assert served.ttft_s == pytest.approx(8 * 0.04, rel=0.05)
    assert served.request_per_s == pytest.approx(25, rel=0.05)


def test_long_prompts_go_in_chunks() -> None:
    plan = replace(PLAIN, max_num_batched_tokens=51)
    served = loop(1, plan=plan)
    # Room for 50 beside one that decodes: two steps of 10 + 20 ms.
    assert served.prefill_s == pytest.approx(0.06, rel=0.05)


def test_prompts_stall_decoding_where_they_go_first() -> None:
    first = loop(8, plan=replace(PLAIN, prefill_first=True))
    assert first.prefill_s == pytest.approx(0.04, rel=0.1)
    assert first.tpot_s == pytest.approx((8 / first.request_per_s - first.ttft_s) / 100, rel=0.01)


def test_the_start_counts_by_the_share_of_its_requests() -> None:
    burst = loop(100, plan=replace(PLAIN, bursts=1.0, max_num_batched_tokens=1000))
    calm = loop(100, plan=replace(PLAIN, max_num_batched_tokens=1000))
    assert calm.start_s == 0
    # About 100 prompts at 10 a step of 0.41 s: 2.2 s on average, of which a tenth.
    assert burst.start_s == pytest.approx(0.2, rel=0.2)


def test_equal_lengths_and_prompts_first_move_in_waves() -> None:
    plan = replace(PLAIN, prefill_first=True, max_num_batched_tokens=1600)
    served = loop(64, traffic=replace(TRAFFIC, equal=True), plan=plan)
    # 16 prompts a chunk of 0.64 s, 4 chunks: 1.6 s.
    assert served.ttft_s == pytest.approx(0.64 * (4 + 1) / 2, rel=0.02)


def test_several_tokens_a_step_shorten_the_gaps() -> None:
    guessed = loop(1, plan=replace(PLAIN, tokens_per_step=2.5))
    assert guessed.tpot_s == pytest.approx(0.004)


def test_poisson_by_hand() -> None:
    # 2 requests/s of 40 ms: load 0.08; TPOT = 10 / 0.92 ms; M/G/1: 2 · 0.0016 / (2 · 0.92) = 1.7 ms.
    served = serving.open_loop(step_s=step_s, traffic=TRAFFIC, scheduling=PLAIN, request_per_s=2.0)
    assert served.tpot_s == pytest.approx(0.01 / 0.92, rel=0.01)
    assert served.batch == pytest.approx(2 * 100 * 0.01 / 0.92, rel=0.02)
    assert served.wait_s == pytest.approx(0.0017 + (0.92 * 0.01 + 0.08 * 0.05) / 2, rel=0.05)
    assert served.steady


def test_above_the_stable_rate_there_is_no_steady_state() -> None:
    plan = replace(PLAIN, max_num_seqs=4)
    stable = serving.open_loop(
        step_s=step_s, traffic=TRAFFIC, scheduling=plan, request_per_s=1
    ).stable_request_per_s
    served = serving.open_loop(step_s=step_s, traffic=TRAFFIC, scheduling=plan, request_per_s=1.5 * stable)
    assert not served.steady
    assert served.utilization == pytest.approx(1.5)
    assert math.isinf(served.ttft_s)
    assert served.goodput_request_per_s(ttft_s=10, tpot_s=10) == 0


def test_waiting_explodes_towards_the_stable_rate() -> None:
    plan = replace(PLAIN, max_num_seqs=4)
    stable = serving.open_loop(
        step_s=step_s, traffic=TRAFFIC, scheduling=plan, request_per_s=1
    ).stable_request_per_s
    waits = [
        serving.open_loop(
            step_s=step_s, traffic=TRAFFIC, scheduling=plan, request_per_s=share * stable
        ).ttft_s
        for share in (0.3, 0.6, 0.9, 0.99)
    ]
    assert waits == sorted(waits)
    assert waits[-1] > 5 * waits[0]


EQUAL = replace(TRAFFIC, equal=True)


def worked_off(requests: float, traffic: Traffic = EQUAL, slots: int = 10) -> Served:
    return serving.burst(
        step_s=step_s, traffic=traffic, scheduling=replace(PLAIN, max_num_seqs=slots), requests=requests
    )


def test_a_burst_is_worked_off_in_waves() -> None:
    served = worked_off(40)
    wave = 10 / served.request_per_s
    assert served.queue_s == pytest.approx(1.5 * wave)
    assert served.output_token_per_s == pytest.approx(served.request_per_s * 101)


def test_the_rest_of_a_burst_decodes_by_itself() -> None:
    # One request more than four waves: 100 steps of 10 ms more, of which a tenth was counted.
    even, odd = 40 / worked_off(40).request_per_s, 41 / worked_off(41).request_per_s
    assert odd - even == pytest.approx(even / 40 + 0.9 * 100 * 0.01, rel=0.01)


def test_varied_answers_drain_slowly() -> None:
    # The longest of 10 has 100 · (ln 10 + 0.577) = 288 steps, 188 more than the mean, of 10 ms each.
    equal, varied = worked_off(10), worked_off(10, TRAFFIC)
    assert 10 / varied.request_per_s - 10 / equal.request_per_s == pytest.approx(1.88, rel=0.02)


def test_slots_that_come_free_one_by_one_are_waited_for_less() -> None:
    waves = 4
    equal, varied = worked_off(10 * waves), worked_off(10 * waves, TRAFFIC)
    assert varied.queue_s == pytest.approx((1 - 1 / waves) * equal.queue_s, rel=0.05)


def test_clients_average_the_tpot_of_short_answers_too() -> None:
    plan = replace(PLAIN, prefill_first=True, max_num_seqs=10)
    varied, equal = (
        serving.burst(step_s=step_s, traffic=traffic, scheduling=plan, requests=10)
        for traffic in (TRAFFIC, EQUAL)
    )
    # 5 prompts of 40 ms on average come after one's own: 2 ms a token of 100; 5.04 times that over requests.
    assert varied.tpot_s == pytest.approx((equal.tpot_s or 0) + 0.002 * 4.04, rel=0.1)
    assert varied.e2e_s == pytest.approx(equal.e2e_s, rel=0.02)


def test_a_static_batch_by_hand() -> None:
    # 8 prompts of 40 ms, then 100 steps of 10 ms.
    served = serving.static_batch(step_s=step_s, traffic=TRAFFIC, scheduling=PLAIN, batch=8)
    assert served.ttft_s == pytest.approx(0.32)
    assert served.tpot_s == pytest.approx(0.01)
    assert served.e2e_s == pytest.approx(1.32)
    assert served.output_token_per_s == pytest.approx(8 * 101 / 1.32)


def test_goodput_counts_those_within_both_limits() -> None:
    served = loop(4)
    assert served.goodput_request_per_s(ttft_s=10, tpot_s=1) == pytest.approx(served.request_per_s)
    assert served.goodput_request_per_s(ttft_s=0.001, tpot_s=1) == 0
    assert served.goodput_request_per_s(ttft_s=10, tpot_s=0.001) == 0


@given(
    users=st.floats(1, 3000),
    isl=st.integers(1, 30_000),
    osl=st.integers(2, 5000),
    first=st.booleans(),
    budget=st.sampled_from([256, 2048, 8192]),
)
def test_closed_loops_obey_littles_law_and_stay_finite(
    users: float, isl: int, osl: int, first: bool, budget: int
) -> None:
    plan = Scheduling(max_num_seqs=200, max_num_batched_tokens=budget, prefill_first=first)
    served = serving.closed_loop(
        step_s=growing_s, traffic=Traffic(isl=isl, osl=osl), scheduling=plan, users=users, kv_pool_tokens=1e6
    )
    assert served.tpot_s is not None
    for value in (served.ttft_s, served.tpot_s, served.e2e_s, served.request_per_s, served.batch):
        assert math.isfinite(value)
        assert value >= 0
    assert served.batch <= served.running * 1.001
    # Users = rate · time in system (the start's share apart, which no steady state has).
    assert served.request_per_s * served.e2e_s == pytest.approx(users, rel=0.02)
    assert served.prefill_share <= 1


@given(users=st.integers(1, 400), isl=st.integers(10, 4000), osl=st.integers(10, 1000))
def test_more_users_never_see_tokens_sooner(users: int, isl: int, osl: int) -> None:
    few, more = (
        serving.closed_loop(
            step_s=growing_s, traffic=Traffic(isl=isl, osl=osl), scheduling=PLAIN, users=count
        )
        for count in (users, 2 * users)
    )
    assert more.e2e_s >= few.e2e_s * 0.99
    assert more.output_token_per_s >= few.output_token_per_s * 0.99


def test_a_question_takes_less_than_a_millisecond() -> None:
    began = time.perf_counter()
    for users in range(1, 201):
        serving.closed_loop(step_s=growing_s, traffic=TRAFFIC, scheduling=PLAIN, users=users)
    assert (time.perf_counter() - began) / 200 < 5e-3  # five times the target: machines differ
