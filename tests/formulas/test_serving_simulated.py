"""The closed forms against a simulation of the same rules, step by step: who waits for what."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from capplan.formulas import serving
from capplan.formulas.serving import Scheduling, Traffic

ISL = 1000
REQUESTS_PER_USER = 10
SENDING_S = 0.005
"""A client's next request arrives within this after an answer."""


@dataclass(frozen=True)
class Case:
    """Users in a closed loop; a prompt takes `prompt_s`, `budget` prompts fit in a step."""

    users: int
    prompt_s: float
    decode_s: Callable[[float], float]
    osl: int
    budget: int
    first: bool
    poll: int = 1
    shortest: float = 1.0


def simulated(case: Case) -> tuple[float, float]:
    """Mean TTFT and TPOT of 10 requests a user, lengths uniform between `shortest` and 1 of the nominal."""
    random_ = random.Random(0)

    def share() -> float:
        return case.shortest + (1 - case.shortest) * random_.random()

    now, step, sent, total = 0.0, 0, case.users, REQUESTS_PER_USER * case.users
    coming = [random_.random() * SENDING_S for _ in range(case.users)]
    heapq.heapify(coming)
    queue: list[list[float]] = []  # arrival, prompt left, tokens out
    running: list[list[float]] = []  # arrival, first token, tokens left, tokens out
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    while len(ttft_s) < total:
        if step % case.poll == 0 or not (running or queue):
            while coming and coming[0] <= now:
                queue.append([heapq.heappop(coming), share(), max(2, round(case.osl * share()))])
        step += 1
        if not running and not queue:
            now = coming[0]
            continue
        room, taken, through = float(case.budget), 0.0, []
        while queue and room > 1e-9:
            chunk = min(room, queue[0][1])
            queue[0][1] -= chunk
            room -= chunk
            taken += chunk
            if queue[0][1] <= 1e-9:
                through.append(queue.pop(0))
        ended: list[list[float]] = []
        now += taken * case.prompt_s
        if running and not (case.first and taken):
            now += case.decode_s(len(running))
            for request in running:
                request[2] -= 1
            ended = [request for request in running if request[2] <= 0]
            running = [request for request in running if request[2] > 0]
        running += [[arrival, now, osl - 1, osl] for arrival, _, osl in through]
        for arrival, began, _, osl in ended:
            ttft_s.append(began - arrival)
            tpot_s.append((now - began) / (osl - 1))
            if sent < total:
                sent += 1
                heapq.heappush(coming, now + 1e-4 + random_.random() * SENDING_S)
    return mean(ttft_s), mean(tpot_s)


def answered(case: Case) -> tuple[float, float]:
    """The closed form's TTFT and TPOT."""

    def step_s(
        *,
        decode_sequences: float,
        kv_tokens: float,
        prompt_tokens: float = 0,
        prompt_pairs: float | None = None,
        prompt_sequences: float | None = None,
    ) -> float:
        decode = case.decode_s(decode_sequences) if decode_sequences else 0.0
        return decode + prompt_tokens / ISL * case.prompt_s

    middle = (1 + case.shortest) / 2
    served = serving.closed_loop(
        step_s=step_s,
        traffic=Traffic(
            isl=ISL * middle,
            osl=case.osl * middle,
            equal=case.shortest == 1,
            variation=(1 - case.shortest) / 12**0.5 / middle,
            requests_per_user=REQUESTS_PER_USER,
        ),
        scheduling=Scheduling(
            max_num_seqs=4096,
            max_num_batched_tokens=case.budget * ISL + case.users,
            prefill_first=case.first,
            poll_steps=case.poll,
            together=case.budget,
        ),
        users=case.users,
    )
    assert served.tpot_s is not None
    return served.ttft_s, served.tpot_s


def dense(base: float, each: float) -> Callable[[float], float]:
    """A decode step that grows with its batch."""
    return lambda batch: base + each * batch


@pytest.mark.parametrize("users", [16, 64, 128])
@pytest.mark.parametrize(
    ("first", "poll", "shortest"),
    [
        pytest.param(False, 1, 0.8, id="prompts in decode steps, lengths 80 to 100 %"),
        pytest.param(False, 1, 0.0, id="prompts in decode steps, lengths 0 to 100 %"),
        pytest.param(True, 1, 1.0, id="prompts first, equal lengths: waves"),
        pytest.param(True, 1, 0.8, id="prompts first, lengths 80 to 100 %"),
        pytest.param(True, 30, 0.8, id="prompts first, looked for every 30 steps"),
    ],
)
@pytest.mark.parametrize(
    ("prompt_s", "decode_s", "osl", "budget"),
    [
        pytest.param(0.0755, dense(0.0073, 1.2e-4), 1024, 2, id="32B, long prompts"),
        pytest.param(0.134, dense(0.0145, 5e-5), 512, 4, id="70B, short answers"),
    ],
)
def test_closed_loops(
    users: int,
    first: bool,
    poll: int,
    shortest: float,
    prompt_s: float,
    decode_s: Callable[[float], float],
    osl: int,
    budget: int,
) -> None:
    case = Case(users, prompt_s, decode_s, osl, budget, first, poll, shortest)
    ttft, tpot = simulated(case)
    found_ttft, found_tpot = answered(case)
    # Lengths from 0 on: the mean of tokens' times is not that of requests'.
    assert found_ttft == pytest.approx(ttft, rel=0.16)
    assert found_tpot == pytest.approx(tpot, rel=0.07)


@pytest.mark.parametrize("users", [64, 128])
def test_equal_requests_that_stay_together_wait_for_each_other_twice(users: int) -> None:
    # A train of steps with two prompts each: one is under way, the next has one's own.
    case = Case(users, 0.0755, dense(0.0073, 1.2e-4), 1024, 2, False)
    assert answered(case)[0] == pytest.approx(simulated(case)[0], rel=0.08)
    assert answered(case)[1] == pytest.approx(simulated(case)[1], rel=0.02)
