"""Workloads from options: counts, ends, streams of lengths, users who wait; options that clash."""

import math
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.request import Request
from capplan.sim.workload import WorkloadSpec, build, stream
from tests.sim.service import serve

OPEN = WorkloadSpec(
    isl="uniform:100-200", osl="lognormal:mean=50,cv=1", request_per_s=5, requests=400, seed=3
)
CLOSED = replace(OPEN, request_per_s=None, users=4, think_time=2)


def facts(request: Request) -> tuple[Any, ...]:
    """Everything a workload decides about a request."""
    return (
        request.index,
        request.arrival_s,
        request.prompt_tokens,
        request.output_tokens,
        request.segments,
        request.output_key,
        request.session,
        request.turn,
        request.samples,
    )


def lengths(requests: list[Request]) -> list[tuple[int, int]]:
    return [(request.prompt_tokens, request.output_tokens) for request in requests]


def arrivals(spec: WorkloadSpec) -> list[Request]:
    return list(build(spec).arrivals())


def test_open_workload_has_the_requests_asked_for() -> None:
    workload = build(OPEN)
    found = list(workload.arrivals())
    assert len(found) == workload.count == 400
    assert [request.index for request in found] == list(range(400))
    assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(found))
    assert all(100 <= request.prompt_tokens <= 200 for request in found)
    assert not workload.shares
    assert all(request.segments == () and request.output_key is None for request in found)
    assert workload.after(found[0], 1.0) is None


def test_duration_ends_arrivals() -> None:
    workload = build(replace(OPEN, requests=None, duration_s=20.0))
    found = list(workload.arrivals())
    assert workload.count is None
    assert 60 <= len(found) <= 140  # 100 expected, 4 standard deviations of a Poisson count
    assert found[-1].arrival_s < 20
    assert arrivals(replace(OPEN, requests=10, duration_s=1e6))[-1].index == 9


def test_the_same_seed_gives_the_same_requests_and_another_does_not() -> None:
    first = [facts(request) for request in arrivals(OPEN)]
    workload = build(OPEN)
    assert [facts(request) for request in workload.arrivals()] == first
    assert [facts(request) for request in workload.arrivals()] == first
    assert [facts(request) for request in arrivals(replace(OPEN, seed=4))] != first


GOLDEN_SPECS = {
    "poisson": OPEN,
    "gamma": replace(OPEN, arrivals="gamma:burstiness=0.3"),
    "diurnal": replace(OPEN, arrivals="diurnal:swing=0.9,period_s=60"),
    "sessions": replace(OPEN, turns="geometric:3", think_time="exponential:2"),
}
# Arrival in s, prompt and output tokens of the first requests: a change here changes every seeded result.
GOLDEN = {
    "poisson": [(0.146042191, 104, 9), (0.374043987, 171, 5), (0.376576589, 169, 40), (0.955586538, 154, 59)],
    "gamma": [(0.105624327, 104, 9), (0.105624765, 171, 5), (0.109977394, 169, 40), (0.350876499, 154, 59)],
    "diurnal": [(0.486004783, 104, 9), (4.280636341, 171, 5), (4.487280392, 169, 40), (5.98791481, 154, 59)],
    "sessions": [
        (0.438126572, 104, 9),
        (1.122131959, 154, 59),
        (1.129729765, 117, 32),
        (2.866759613, 190, 48),
    ],
}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_seed_gives_these_requests_on_every_machine(name: str) -> None:
    found = islice(build(GOLDEN_SPECS[name]).arrivals(), 4)
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in found] == GOLDEN[name]


def test_streams_are_independent() -> None:
    base = arrivals(OPEN)
    burst = arrivals(replace(OPEN, arrivals="gamma:burstiness=0.2"))
    assert lengths(burst) == lengths(base)
    longer = arrivals(replace(OPEN, osl=7))
    assert [request.arrival_s for request in longer] == [request.arrival_s for request in base]
    assert [request.prompt_tokens for request in longer] == [request.prompt_tokens for request in base]
    assert len({stream(3, name).random() for name in ("arrivals", "isl", "osl")}) == 3


def test_isl_and_osl_of_one_distribution_are_not_the_same_draws() -> None:
    found = arrivals(replace(OPEN, isl="uniform:1-100000", osl="uniform:1-100000"))
    assert sum(prompt == output for prompt, output in lengths(found)) <= 1


def test_all_at_once() -> None:
    assert {request.arrival_s for request in arrivals(replace(OPEN, request_per_s=math.inf))} == {0.0}


def test_shared_prefix_is_part_of_the_prompt_and_a_system_prompt_stands_before_it() -> None:
    within = build(replace(OPEN, prefix_shared=150))
    found = list(within.arrivals())
    assert within.shares
    assert lengths(found) == lengths(arrivals(OPEN))
    for request in found:
        ((_, tokens),) = request.segments
        assert tokens == min(150, request.prompt_tokens)
    before = arrivals(replace(OPEN, system_prompt_tokens=1000))
    assert [prompt - 1000 for prompt, _ in lengths(before)] == [prompt for prompt, _ in lengths(found)]
    assert {request.segments for request in before} == {(("system prompt", 1000),)}


def test_samples_reach_requests() -> None:
    assert {request.samples for request in arrivals(replace(OPEN, samples=4))} == {4}
    assert {request.samples for request in serve(build(replace(CLOSED, samples=4)), 1.0)} == {4}


def test_users_wait_for_their_answer_and_think() -> None:
    # Answers take 3 s, thinking 2 s: each user sends at 0, 5, 10, ...
    workload = build(replace(CLOSED, requests=12))
    found = serve(workload, 3.0)
    assert workload.count == 12
    assert [request.arrival_s for request in found] == [0.0] * 4 + [5.0] * 4 + [10.0] * 4
    assert {(request.session, request.turn) for request in found} == {
        (user, turn) for user in range(4) for turn in range(3)
    }
    assert sorted(request.index for request in found) == list(range(12))


def test_users_ramp_up() -> None:
    # Users start at 0, 2, 4, 6 and send every 5 s; the eighth request is user 0's third.
    found = serve(build(replace(CLOSED, ramp_up_s=8.0, requests=8)), 3.0)
    assert [request.arrival_s for request in found] == [0.0, 2.0, 4.0, 5.0, 6.0, 7.0, 9.0, 10.0]


def test_fewer_requests_than_users() -> None:
    assert len(serve(build(replace(CLOSED, requests=3)), 1.0)) == 3


def test_users_stop_at_the_duration() -> None:
    found = serve(build(replace(CLOSED, requests=None, duration_s=11.0)), 3.0)
    assert max(request.arrival_s for request in found) == 10.0
    assert len(found) == 12


def test_an_engine_that_rejects_everything_ends() -> None:
    # Without a pause a user would ask endlessly at one moment: it waits RETRY_S = 1 s, so 10 times in 10 s.
    spec = replace(CLOSED, think_time=0, requests=None, duration_s=10.0)
    found = serve(build(spec), 1.0, rejects=lambda request: True)
    assert len(found) == 4 * 10


@settings(max_examples=25)
@given(
    latency_s=st.floats(0.01, 50),
    other_s=st.floats(0.01, 50),
    think=st.sampled_from([0, 1.5, "exponential:3"]),
)
def test_a_slower_engine_gets_the_same_lengths(latency_s: float, other_s: float, think: str | float) -> None:
    spec = replace(CLOSED, requests=60, think_time=think, ramp_up_s=5.0)
    by_index = [
        lengths(sorted(serve(build(spec), each), key=lambda request: request.index))
        for each in (latency_s, other_s)
    ]
    assert by_index[0] == by_index[1]
    # Users or a stream of arrivals: the k-th request is the same.
    assert by_index[0] == lengths(arrivals(OPEN))[:60]


def test_little_law_of_a_closed_loop() -> None:
    # N users, latency R, think Z: throughput N / (R + Z) = 50 / (2 + 8) = 5 a second.
    spec = replace(CLOSED, users=50, think_time="exponential:8", requests=20_000, ramp_up_s=10.0)
    found = serve(build(spec), 2.0)
    span_s = found[-1].arrival_s - found[1000].arrival_s
    assert (len(found) - 1000) / span_s == pytest.approx(5.0, rel=0.03)


@pytest.mark.parametrize(
    "spec",
    [
        replace(OPEN, requests=20_000, system_prompt_tokens=100),
        replace(OPEN, requests=20_000, arrivals="gamma:burstiness=0.5"),
        replace(OPEN, requests=20_000, arrivals="diurnal:swing=0.9,period_s=100"),
        replace(OPEN, requests=20_000, turns=5, think_time=1, system_prompt_tokens=100),
        replace(OPEN, requests=60_000, turns="geometric:3", think_time=1),
    ],
    ids=["system prompt", "gamma", "diurnal", "5 turns", "geometric turns"],
)
def test_load_is_the_mean_of_what_comes(spec: WorkloadSpec) -> None:
    workload = build(spec)
    found = serve(workload, 1.0)
    load = workload.load()
    assert load.users is None
    prompts, outputs = zip(*lengths(found), strict=True)
    assert sum(prompts) / len(found) == pytest.approx(load.mean_prompt_tokens, rel=0.02)
    assert sum(outputs) / len(found) == pytest.approx(load.mean_output_tokens, rel=0.02)
    assert load.request_per_s == pytest.approx(5)
    assert len(found) / found[-1].arrival_s == pytest.approx(5, rel=0.04)


def test_load_of_turns_by_hand() -> None:
    # Prompts 110, 110 + 30, 110 + 60: mean 140.
    load = build(replace(CLOSED, isl=10, osl=20, turns=3, system_prompt_tokens=100)).load()
    assert (load.mean_prompt_tokens, load.mean_output_tokens) == (140, 20)
    assert (load.request_per_s, load.users) == (None, 4)
    assert load.max_context_tokens == 190
    assert build(replace(OPEN, osl=7, prefix_shared=9)).load().max_context_tokens == 207
    sessions = replace(OPEN, osl="uniform:1-7", turns="geometric:3")
    assert build(sessions).load().max_context_tokens is None
    assert build(replace(sessions, max_context_tokens=900)).load().max_context_tokens == 900
    assert build(replace(OPEN, request_per_s=math.inf)).load().request_per_s is None


def test_descriptions_say_what_is_drawn() -> None:
    said = build(OPEN).describe()
    assert said.startswith("Poisson, 5 a second; prompt uniform, 100 to 200 tokens; output lognormal")
    assert build(CLOSED).describe().startswith("4 users, think time 2 s")


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"isl": None}, "no lengths", "--isl"),
        ({"osl": None}, "no lengths", "--osl"),
        ({"request_per_s": None}, "no load", "--request-rate, --concurrency"),
        (
            {"users": 3},
            "requests that come by themselves and users who wait",
            "--request-rate, --concurrency",
        ),
        ({"requests": None}, "a workload without end", "--requests"),
        (
            {"requests": None, "duration_s": 5.0, "request_per_s": math.inf},
            "a workload without end",
            "--requests",
        ),
        ({"requests": 0}, "0 is out of range", "--requests"),
        ({"requests": 10**12}, "1000000000000 is out of range", "--requests"),
        ({"users": -1}, "-1 is out of range", "--concurrency"),
        ({"duration_s": math.nan}, "nan s is out of range", "--duration"),
        ({"ramp_up_s": -1.0}, "-1 s is out of range", "--ramp-up"),
        ({"samples": 0}, "0 is out of range", "--n"),
        ({"prefix_shared": -1}, "-1 is out of range", "--prefix-shared"),
        (
            {"prefix_shared": 5, "system_prompt_tokens": 5},
            "two shared beginnings",
            "--prefix-shared, --system-prompt",
        ),
        ({"turns": 3, "prefix_shared": 5}, "a session's prompts differ in length", "--prefix-shared"),
        ({"turns": 0}, "turns is '0', no whole number from 1", "--turns 0"),
        ({"request_per_s": 0.0}, "0 requests a second", "--arrivals poisson --request-rate 0"),
        (
            {"rate_scale": 2.0, "trace_sort_rows": 5},
            "options of a trace without one",
            "--rate-scale, --trace-sort",
        ),
        ({"think_time": 3, "ramp_up_s": 4.0}, "options without effect here", "--ramp-up, --think-time"),
        ({"max_context_tokens": 3}, "options without effect here", "--max-context"),
        (
            {"request_per_s": None, "users": 3, "arrivals": "constant"},
            "options without effect here",
            "--arrivals",
        ),
        ({"trace": Path("t.csv")}, "options a trace takes the place of", "--isl, --osl"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], what: str, where: str) -> None:
    with pytest.raises(InputError) as caught:
        build(replace(OPEN, **changes))
    assert caught.value.message.startswith(what)
    assert caught.value.where == where
    assert len(str(caught.value).splitlines()) == 3
