"""Multi-turn sessions: prompts that grow by prompts and answers, who starts them and where they end."""

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.request import Request
from capplan.sim.sessions import Turns, parse_turns
from capplan.sim.workload import WorkloadSpec, build
from tests.sim.service import serve

OPEN = WorkloadSpec(
    isl=100, osl=20, request_per_s=2, requests=60, turns=3, think_time=5, system_prompt_tokens=1000
)
CLOSED = replace(OPEN, request_per_s=None, users=2)


def by_session(requests: list[Request]) -> dict[int, list[Request]]:
    found: dict[int, list[Request]] = {}
    for request in requests:
        found.setdefault(request.session, []).append(request)
    return found


def test_prompts_grow_by_text_and_answers() -> None:
    found = by_session(serve(build(OPEN), 1.0))
    assert len(found) == 20
    for session in found.values():
        assert [request.turn for request in session] == [0, 1, 2]
        assert [request.prompt_tokens for request in session] == [1100, 1220, 1340]
        # An answer of 1 s, then 5 s of thought.
        assert [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(session)] == pytest.approx(
            [6, 6]
        )


def test_segments_name_the_system_prompt_all_texts_and_all_answers() -> None:
    session = by_session(serve(build(OPEN), 1.0))[7]
    assert session[2].segments == (
        ("system prompt", 1000),
        ((7, 0, "text"), 100),
        ((7, 0, "answer"), 20),
        ((7, 1, "text"), 100),
        ((7, 1, "answer"), 20),
        ((7, 2, "text"), 100),
    )
    assert session[0].output_key == (7, 0, "answer")


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    users=st.sampled_from([None, 1, 3]),
    system=st.sampled_from([0, 50]),
    latency_s=st.floats(0, 30),
)
def test_a_turn_begins_with_the_turn_before_and_its_answer(
    seed: int, users: int | None, system: int, latency_s: float
) -> None:
    spec = WorkloadSpec(
        isl="uniform:1-50",
        osl="uniform:1-50",
        request_per_s=None if users else 1.0,
        users=users,
        turns="geometric:3",
        think_time="exponential:2",
        requests=80,
        system_prompt_tokens=system,
        seed=seed,
    )
    found = serve(build(spec), latency_s)
    assert len(found) == 80
    assert sorted(request.index for request in found) == list(range(80))
    seen: set[object] = set()
    for session in by_session(found).values():
        for request in session:
            assert sum(tokens for _, tokens in request.segments) == request.prompt_tokens
            own = [key for key, _ in request.segments if key != "system prompt"]
            assert own[-1] not in seen
            seen.update(own)
        for earlier, later in pairwise(session):
            begins = (*earlier.segments, (earlier.output_key, earlier.output_tokens))
            assert later.segments[: len(begins)] == begins
            assert len(later.segments) == len(begins) + 1


@given(latency_s=st.floats(0, 100))
@settings(max_examples=20)
def test_sessions_do_not_depend_on_how_fast_answers_come(latency_s: float) -> None:
    spec = replace(
        OPEN, isl="uniform:1-50", osl="uniform:1-50", turns="geometric:4", think_time="exponential:9"
    )
    facts = [
        sorted((r.session, r.turn, r.prompt_tokens, r.output_tokens) for r in serve(build(spec), each))
        for each in (latency_s, 1.0)
    ]
    assert facts[0] == facts[1]


def test_a_rate_counts_requests_not_sessions() -> None:
    # 6 requests a second in sessions of 3 turns: 2 sessions a second.
    found = serve(build(replace(OPEN, request_per_s=6, requests=30_000)), 1.0)
    starts = [request.arrival_s for request in found if request.turn == 0]
    assert len(starts) == 10_000
    assert len(starts) / starts[-1] == pytest.approx(2.0, rel=4 / math.sqrt(10_000))


def test_users_begin_their_next_session_after_the_last_answer() -> None:
    found = serve(build(CLOSED), 1.0)
    assert len(found) == 60
    assert [request.session for request in found[:8]] == [0, 1, 0, 1, 0, 1, 2, 3]
    assert [request.arrival_s for request in found[::2]] == [6.0 * turn for turn in range(30)]


def test_a_session_ends_before_it_passes_the_longest_context() -> None:
    # Turn 2 would need 1220 + 20 tokens, turn 3 1340 + 20.
    workload = build(replace(OPEN, max_context_tokens=1240))
    found = by_session(serve(workload, 1.0))
    assert {len(session) for session in found.values()} == {2}
    assert len(found) == 30
    # Of the last one only two turns were wanted.
    assert workload.cut_sessions == 29  # type: ignore[union-attr]
    assert len(serve(build(replace(CLOSED, max_context_tokens=1240)), 1.0)) == 60


def test_a_first_turn_beyond_the_longest_context_comes_all_the_same() -> None:
    found = serve(build(replace(OPEN, requests=5, max_context_tokens=10)), 1.0)
    assert [(request.turn, request.prompt_tokens) for request in found] == [(0, 1100)] * 5


def test_a_rejected_turn_ends_its_session() -> None:
    workload = build(OPEN)
    found = by_session(serve(workload, 1.0, rejects=lambda request: request.turn == 1))
    assert [len(session) for session in found.values()] == [2] * 20


def test_users_of_an_engine_that_rejects_everything_come_to_an_end() -> None:
    spec = replace(CLOSED, think_time=0, requests=None, duration_s=10.0)
    assert len(serve(build(spec), 1.0, rejects=lambda request: True)) == 2 * 10


def test_no_turn_starts_at_the_end_of_the_duration() -> None:
    found = serve(build(replace(OPEN, requests=None, duration_s=30.0)), 1.0)
    assert max(request.arrival_s for request in found) < 30
    assert any(len(session) < 3 for session in by_session(found).values())


def test_a_finished_workload_keeps_no_session_and_starts_anew() -> None:
    workload = build(OPEN)
    first = [(r.index, r.arrival_s, r.segments) for r in serve(workload, 1.0)]
    assert not workload._sessions  # type: ignore[union-attr]
    assert [(r.index, r.arrival_s, r.segments) for r in serve(workload, 1.0)] == first


def test_turns_constant_and_geometric() -> None:
    assert Turns(4).sampler(random.Random(1))() == 4
    draw = Turns(4, geometric=True).sampler(random.Random(1))
    found = [draw() for _ in range(40_000)]
    assert min(found) == 1
    # sd of a geometric: √(1 − p) / p = √0.75 · 4 = 3.46
    assert abs(statistics.fmean(found) - 4) <= 4 * 3.46 / 200
    assert found.count(1) / len(found) == pytest.approx(0.25, abs=0.01)
    assert Turns(1, geometric=True).sampler(random.Random(1))() == 1


@pytest.mark.parametrize(
    "spelling", ["0", "2.5", "-1", "geometric:0", "geometric:x", "geometric:1e9", "often", "nan"]
)
def test_bad_turns(spelling: str) -> None:
    with pytest.raises(InputError):
        parse_turns(spelling, where="--turns")


def test_turns_spellings() -> None:
    assert parse_turns(4, where="") == parse_turns("constant:4", where="") == Turns(4)
    assert parse_turns("geometric:2.5", where="") == Turns(2.5, geometric=True)
