"""Drafts accepted in a simulation: all, none, or as often as the rate says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import latency_estimate
from capplan.formulas import speculative
from capplan.latency_question import LatencyQuestion
from capplan.latency_setup import Setup
from capplan.sim import simulator
from capplan.sim.replica import Limits
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS
from capplan.sim.speculative import SpeculativeReplica
from capplan.sim.step_times import SingleSteps
from capplan.sim.trial import Totals
from capplan.sim.workload import WorkloadSpec, build
from capplan.speculative import SpeculativeTable
from tests.sim.scheduling import Kept, limits_of, requests, serve
from tests.sim.test_schedulers import CASES, TIMES, VLLM, Case


def speculated(
    coming: list[Request], drafted: int, rate: float, seed: int = 0, name: str = "vllm_v1", **more: int
) -> tuple[Kept, SpeculativeReplica]:
    limits = limits_of(SCHEDULERS[name], **{"max_num_batched_tokens": 1000, "max_model_len": None, **more})
    replica = SpeculativeReplica(limits, drafted=drafted, acceptance_rate=rate, seed=seed)
    return serve(name, coming, replica=replica), replica


def test_all_accepted_is_one_and_all_drafts_a_step() -> None:
    # The prompt's step makes 1, then 4 a step: 1 + 4 + 4 + 1.
    kept, _ = speculated(requests((4, 10)), drafted=3, rate=1.0)
    assert kept.step_count == 4
    assert kept.made_tokens == 10


def test_none_accepted_is_a_token_a_step() -> None:
    kept, _ = speculated(requests((4, 10)), drafted=3, rate=0.0)
    assert kept.step_count == 10


@pytest.mark.parametrize(("drafted", "rate"), [(3, 0.7), (5, 0.5), (1, 0.9)])
def test_the_mean_is_the_formulas(drafted: int, rate: float) -> None:
    # 40,000 tokens: the mean of some 16,000 draws is within 2 % (their spread is below 2 tokens: 4 σ).
    coming = requests(*[(4, 5000)] * 8)
    kept, _ = speculated(coming, drafted, rate, kv_blocks=100_000)
    decoded = sum(row[3] for row in kept.rows)
    wanted = speculative.tokens_per_step(drafted=drafted, acceptance_rate=rate)
    assert (kept.made_tokens - len(coming)) / decoded == pytest.approx(wanted, rel=0.02)


def test_the_same_seed_accepts_the_same() -> None:
    runs = [speculated(requests((4, 200), (6, 150)), 3, 0.6, seed=seed)[0] for seed in (1, 1, 2)]
    assert runs[0].rows == runs[1].rows
    assert runs[0].rows != runs[2].rows


def test_drafts_take_their_tokens_of_the_budget() -> None:
    # Two sequences of 1 + 3 tokens leave 2 of 10 for the third's prompt of 6.
    coming = requests((4, 9), (4, 9), (6, 1), arrivals=(0, 0, 1))
    kept, _ = speculated(coming, drafted=3, rate=0.0, max_num_batched_tokens=10)
    assert [row[3:5] for row in kept.rows[:4]] == [(0, 8), (2, 2), (2, 2), (2, 2)]


def test_drafts_hold_memory_in_advance() -> None:
    used: list[int] = []
    limits = limits_of(VLLM, max_num_batched_tokens=1000, max_model_len=None)
    replica = SpeculativeReplica(limits, drafted=4, acceptance_rate=0.0)
    serve(
        "vllm_v1",
        requests((4, 9)),
        replica=replica,
        seen=lambda replica, step, kept: used.append(step.kv_blocks),
    )
    # 4 tokens, then 4 + 1 + 4 = 9 in 3 blocks of 4, at most the 12 that it ends with.
    assert used == [1, 3, 3, 3, 3, 3, 3, 3, 3]
    assert replica.blocks.used == 0


@pytest.mark.parametrize(
    "name", ["vllm_v1", "sglang", "trtllm", "trtllm_max_utilization", "tgi", "llama_cpp"]
)
@given(case=CASES, drafted=st.integers(1, 4), rate=st.sampled_from([0.0, 0.4, 0.8, 1.0]))
@settings(max_examples=40, deadline=None)
def test_requests_and_memory_are_conserved(name: str, case: Case, drafted: int, rate: float) -> None:
    limits = limits_of(SCHEDULERS[name], **{**case.limits, "max_num_batched_tokens": 80})
    replica = SpeculativeReplica(limits, drafted=drafted, acceptance_rate=rate)

    def seen(replica, step, kept):  # type: ignore[no-untyped-def]
        assert 0 <= replica.blocks.used <= replica.blocks.total
        if not replica.running:
            assert replica.blocks.used == 0

    coming = case.requests()
    kept = serve(name, coming, times=TIMES, replica=replica, seen=seen)
    assert len(kept.finished) + len(kept.refused) == len(coming)
    assert all(request.made_tokens == request.output_tokens for request in kept.finished)
    assert kept.made_tokens == sum(request.samples * request.output_tokens for request in kept.finished)


@pytest.mark.parametrize(("users", "drafted", "rate"), [(1, 3, 0.7), (32, 5, 0.5)])
def test_tpot_is_near_the_closed_form_of_latency(users: int, drafted: int, rate: float) -> None:
    question = LatencyQuestion(
        model="8b",
        gpu="h100",
        concurrency=users,
        isl=512,
        osl=256,
        speculative_tokens=drafted,
        acceptance_rate=rate,
    )
    setup = Setup(question)
    assert isinstance(setup.table, SpeculativeTable)
    assert setup.pool_tokens is not None
    limits = Limits(max_num_seqs=256, max_num_batched_tokens=8192, kv_blocks=int(setup.pool_tokens) // 16)
    totals = Totals(memory_bound=False)
    simulator.run(
        workload=build(WorkloadSpec(isl=512, osl=256, users=users, requests=10 * users)),
        replica=SpeculativeReplica(limits, drafted=drafted, acceptance_rate=rate),
        scheduler=VLLM.scheduler(),
        times=SingleSteps(setup.table.step_s),
        recorder=totals,
    )
    closed = latency_estimate.figures(question).tpot.estimate
    assert totals.outcome().tpot_mean_s == pytest.approx(closed, rel=0.05)
