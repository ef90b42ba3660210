"""Steps decided ahead and looks every few steps: when a request that comes gets its first token, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.sim import simulator
from capplan.sim.looks import Looking
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS
from tests.sim.scheduling import ONE_SECOND, Kept, Listed, limits_of, requests


def serve(coming: list[Request], looking: Looking | None, name: str = "vllm_v1", **given: int) -> Kept:
    """Served in steps of a second each."""
    policy, kept = SCHEDULERS[name], Kept()
    simulator.run(
        workload=Listed(coming),
        replica=policy.replica(limits_of(policy, **given)),
        scheduler=policy.scheduler(),
        times=ONE_SECOND,
        recorder=kept,
        looking=looking,
    )
    return kept


# The first request prefills from 0 to 1 and decodes a token a second from then on.
@pytest.mark.parametrize(
    ("output", "arrival_s", "ahead", "poll", "first_token_s"),
    [
        pytest.param(10, 2.5, 0, 1, 4, id="in the next step"),
        pytest.param(10, 2.5, 1, 1, 5, id="the next step was decided before it came"),
        pytest.param(10, 2.5, 2, 1, 6, id="and the one after"),
        pytest.param(10, 2.5, 0, 4, 6, id="looks at 1, after the prompt, and at 5"),
        pytest.param(10, 2.5, 1, 4, 6, id="came long before the step decided at 4"),
        pytest.param(10, 4.5, 1, 4, 10, id="came after the step decided at 4: at the next look"),
        pytest.param(90, 50.25, 1, 1, 53, id="after a long run of steps alike"),
        pytest.param(90, 50.25, 2, 1, 54, id="two steps after a long run"),
        pytest.param(90, 50.25, 0, 30, 62, id="looks at 1, 31 and 61"),
        pytest.param(10, 20, 2, 30, 21, id="an idle engine sees it as it comes"),
    ],
)
@pytest.mark.parametrize("name", ["vllm_v1", "sglang", "trtllm"])
def test_when_the_second_request_starts(
    name: str, output: int, arrival_s: float, ahead: int, poll: int, first_token_s: float
) -> None:
    coming = requests((4, output), (4, 2), arrivals=(0, arrival_s))
    serve(coming, Looking(steps_ahead=ahead, poll_steps=poll), name)
    assert coming[0].first_token_s == 1
    assert coming[1].first_token_s == pytest.approx(first_token_s)


def test_a_request_that_waited_for_a_slot_was_seen() -> None:
    coming = requests((4, 10), (4, 2), arrivals=(0, 4.5))
    serve(coming, Looking(steps_ahead=1), max_num_seqs=1)
    assert coming[0].done_s == 10
    assert coming[1].first_token_s == 11


COMING = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12
)


def made(drawn: list[tuple[int, int, int]]) -> list[Request]:
    """Requests of (arrival in half seconds, prompt, output)."""
    ordered = sorted(drawn)
    return requests(
        *((prompt, output) for _, prompt, output in ordered), arrivals=[at / 2 for at, _, _ in ordered]
    )


@given(drawn=COMING)
def test_looking_at_every_step_changes_nothing(drawn: list[tuple[int, int, int]]) -> None:
    plain, looked = made(drawn), made(drawn)
    serve(plain, None)
    serve(looked, Looking())
    assert [r.first_token_s for r in looked] == [r.first_token_s for r in plain]
    assert [r.done_s for r in looked] == [r.done_s for r in plain]


@given(drawn=COMING, ahead=st.integers(0, 3), poll=st.integers(1, 7))
def test_everyone_is_served_and_nobody_before_a_look(
    drawn: list[tuple[int, int, int]], ahead: int, poll: int
) -> None:
    coming = made(drawn)
    kept = serve(coming, Looking(steps_ahead=ahead, poll_steps=poll))
    assert len(kept.finished) == len(coming)
    for request in coming:
        assert request.first_scheduled_s >= request.arrival_s
        assert request.first_token_s >= request.arrival_s + 1
