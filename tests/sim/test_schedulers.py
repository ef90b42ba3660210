"""Laws that every scheduler obeys on every workload: conservation, causality, order, determinism."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.replay import LinearTimes
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS, Scheduler, scheduler_of
from capplan.sim.schedulers.batches import BatchReplica
from capplan.sim.schedulers.llama_cpp import llama_cpp
from capplan.sim.schedulers.sglang import Sglang
from capplan.sim.schedulers.tgi import Tgi
from capplan.sim.schedulers.trtllm import guaranteed_no_evict, max_utilization
from tests.sim.scheduling import Kept, limits_of, serve

NAMES = sorted(SCHEDULERS)
VLLM = SCHEDULERS["vllm_v1"]
TIMES = LinearTimes(base=100, prompt_token=3, decode_sequence=2, context_token=0.1)


@dataclass(frozen=True)
class Case:
    """A random workload and the memory it meets; `rows` are (gap before it, prompt, output, answers)."""

    rows: list[tuple[int, int, int, int]]
    kv_blocks: int
    max_num_seqs: int
    caching: bool
    max_num_batched_tokens: int = 64

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "kv_blocks": self.kv_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "prefix_caching": self.caching,
            "max_model_len": 72,
        }

    def requests(self) -> list[Request]:
        at, made = 0, []
        for index, (gap, prompt, output, samples) in enumerate(self.rows):
            at += gap
            shared = (("system", 10),) if index % 2 else ()
            made.append(Request(index, at, prompt, output, samples=samples, segments=shared))
        return made


CASES = st.builds(
    Case,
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 50, 400, 3000]),
            st.integers(1, 40),
            st.integers(1, 30),
            st.sampled_from([1, 1, 1, 3]),
        ),
        min_size=1,
        max_size=14,
    ),
    kv_blocks=st.integers(18, 90),
    max_num_seqs=st.integers(3, 8),
    caching=st.booleans(),
    max_num_batched_tokens=st.sampled_from([9, 20, 64]),
)


def served(name: str, case: Case, seen: object = None) -> tuple[Kept, list[Request]]:
    coming = case.requests()
    return serve(name, coming, times=TIMES, seen=seen, **case.limits), coming


@pytest.mark.parametrize("leaps", [True, False], ids=["leaping", "walking"])
@pytest.mark.parametrize("name", NAMES)
@given(case=CASES)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_or_is_refused_and_memory_is_whole(name: str, leaps: bool, case: Case) -> None:
    coming = case.requests()
    entered = len(coming)
    last_end = 0.0
    # Where nothing need be decided vLLM's steps are taken apart, and its blocks counted after them.
    coasts = leaps and name == "vllm_v1"

    def seen(replica, step, kept):  # type: ignore[no-untyped-def]
        nonlocal last_end
        start, end = kept.rows[-1][:2]
        assert last_end <= start < end
        last_end = end
        undelivered = len(replica.undelivered) if isinstance(replica, BatchReplica) else 0
        arrived = sum(request.arrival_s <= start for request in coming)
        inside = len(replica.running) + len(replica.waiting) + undelivered
        assert len(kept.finished) + inside + len(kept.refused) == arrived
        assert 0 <= replica.blocks.used <= replica.blocks.total
        assert replica.blocks.used + replica.blocks.free == replica.blocks.total
        assert replica.sequences == sum(request.samples for request in replica.running)
        assert replica.sequences <= replica.limits.max_num_seqs
        decoding = [request for request in replica.running if request not in replica.prefilling]
        assert replica.decoding == sum(request.samples for request in decoding)
        assert replica.kv_tokens == sum(request.samples * replica.context(request) for request in decoding)
        assert 0 <= step.kv_blocks <= replica.blocks.total
        if not replica.running and not coasts:
            assert replica.blocks.used == 0

    policy = SCHEDULERS[name]
    replica = policy.replica(limits_of(policy, **case.limits))
    replica.leaps = leaps
    kept = serve(name, coming, times=TIMES, replica=replica, seen=seen)
    assert replica.blocks.used == 0
    assert len(kept.finished) + len(kept.refused) == entered
    assert {request.index for request in kept.finished} | {request.index for request in kept.refused} == set(
        range(entered)
    )
    empty = policy.replica(limits_of(policy, **case.limits))
    for request in case.requests():
        assert empty.fits(request) == all(request.index != other.index for other in kept.refused)


@pytest.mark.parametrize("name", NAMES)
@given(case=CASES)
@settings(max_examples=40, deadline=None)
def test_nothing_comes_before_its_cause(name: str, case: Case) -> None:
    kept, _ = served(name, case)
    for request in kept.finished:
        assert request.arrival_s <= request.first_scheduled_s
        assert request.first_scheduled_s < request.first_token_s <= request.done_s
        assert request.made_tokens == request.output_tokens
        if request.output_tokens > 1:
            assert request.first_token_s < request.done_s
    made = sum(request.samples * request.output_tokens for request in kept.finished)
    assert kept.made_tokens == made


@pytest.mark.parametrize("name", NAMES)
@given(case=CASES)
@settings(max_examples=15, deadline=None)
def test_the_same_again_is_the_same(name: str, case: Case) -> None:
    first, second = (served(name, case)[0] for _ in range(2))
    assert first.rows == second.rows
    assert [request.done_s for request in first.finished] == [request.done_s for request in second.finished]


@pytest.mark.parametrize("name", NAMES)
@given(case=CASES)
@settings(max_examples=40, deadline=None)
def test_runs_of_steps_are_the_same_steps_one_by_one(name: str, case: Case) -> None:
    policy = SCHEDULERS[name]
    leaping = served(name, case)[0]
    replica = policy.replica(limits_of(policy, **case.limits))
    replica.leaps = False
    walking = serve(name, case.requests(), times=TIMES, replica=replica)
    assert walking.step_count == len(walking.rows) == leaping.step_count
    assert [request.done_s for request in walking.finished] == [
        request.done_s for request in leaping.finished
    ]
    assert walking.preempted == leaping.preempted


VARIANTS: dict[str, tuple[str, Callable[[], Scheduler]]] = {
    "sglang, mixed chunks": ("sglang", lambda: Sglang(enable_mixed_chunk=True)),
    "sglang, longest prefix first": ("sglang", lambda: Sglang(schedule_policy="lpm")),
    "sglang, careless": ("sglang", lambda: Sglang(schedule_conservativeness=0.1)),
    "trtllm, chunked context": ("trtllm", lambda: partial(guaranteed_no_evict, chunked_context=True)),
    "trtllm, chunked, max utilization": (
        "trtllm_max_utilization",
        lambda: partial(max_utilization, chunked_context=True),
    ),
    "tgi, patient": ("tgi", lambda: Tgi(waiting_served_ratio=1.2, max_waiting_tokens=5)),
    "llama.cpp, one kind of work at a time": ("llama_cpp", lambda: partial(llama_cpp, cont_batching=False)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@given(case=CASES)
@settings(max_examples=60, deadline=None)
def test_an_engines_other_settings_serve_everybody_too(variant: str, case: Case) -> None:
    name, scheduler = VARIANTS[variant]
    coming = case.requests()
    whole = SCHEDULERS[name].whole_prompts and "chunked" not in variant
    limits = {**case.limits, "whole_prompts": whole}
    if "chunked" in variant:
        # Chunks are whole blocks beside the decoding tokens: a step must have room for one.
        limits["max_num_batched_tokens"] = max(16, case.max_num_batched_tokens)
    kept = serve(name, coming, times=TIMES, scheduler=scheduler(), **limits)
    assert len(kept.finished) + len(kept.refused) == len(coming)
    assert kept.made_tokens == sum(request.samples * request.output_tokens for request in kept.finished)


@pytest.mark.parametrize("name", NAMES)
def test_a_long_request_is_not_starved_by_short_ones_that_keep_coming(name: str) -> None:
    short = [Request(index, 60.0 * index, 4, 4) for index in range(400)]
    long = Request(1000, 30.0, 40, 30)
    coming = sorted([*short, long], key=lambda request: request.arrival_s)
    kept = serve(name, coming, times=TIMES, kv_blocks=20, max_num_seqs=4, max_model_len=72)
    assert not kept.refused
    before = sum(request.done_s < long.first_token_s for request in kept.finished)
    assert before < 60, f"{before} requests that came later were served first"


def test_names_are_found_by_engine_and_by_spelling() -> None:
    assert scheduler_of("sglang").engine == "sglang"
    assert scheduler_of("tensorrt-llm").name == "trtllm"
    assert scheduler_of("llama.cpp").name == "llama_cpp"
    assert scheduler_of("vllm").name == scheduler_of("vLLM-V1").name == "vllm_v1"
    with pytest.raises(InputError, match="no scheduler 'orka'") as caught:
        scheduler_of("orka")
    assert "did you mean orca?" in str(caught.value)


def test_only_what_was_compared_with_logs_is_called_verified() -> None:
    assert [name for name in NAMES if SCHEDULERS[name].verified] == ["vllm_v1"]
