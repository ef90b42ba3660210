"""The load of a simulation in closed form, beside what was seen: what comes, what could be served."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from capplan import simulate_apart
from capplan.formulas import queueing, serving
from capplan.sim.summary import Summary
from capplan.simulate_setup import Subject, pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The load in closed form: what comes, what could be served, and what users would see.

    `parts`: with prompts apart, the most that replicas and link serve; `served` is then of one replica that
    does both, and no more than its step times mean anything. `seen_request_per_s` was measured.
    """

    offered_request_per_s: float | None
    served: serving.Served
    parts: Mapping[str, float] = field(default_factory=dict)
    seen_request_per_s: float = 0.0

    @property
    def stable_request_per_s(self) -> float:
        """The most that can be served."""
        return min(self.parts.values()) if self.parts else self.served.stable_request_per_s

    @property
    def utilization(self) -> float:
        """The load over it; above 1 there is no steady state."""
        if not self.parts:
            return self.served.utilization
        return (self.offered_request_per_s or self.seen_request_per_s) / self.stable_request_per_s

    @property
    def steady(self) -> bool:
        """False where more requests come by themselves than can be served."""
        if not self.parts:
            return self.served.steady
        return self.offered_request_per_s is None or self.utilization < 1


def closed_form(subject: Subject, seen: Summary) -> ClosedForm:
    """The question's load by formulas/serving.py, with the mean request as it was seen.

    Rejected requests are no load. A closed loop's start counts as far as it was not left out.
    """
    spec, setup = subject.question.workload, subject.setup
    prompt, started = seen.prompt_tokens / seen.requests, seen.window.start_s > 0
    traffic = serving.Traffic(
        isl=prompt,
        osl=max(1.0, seen.answer_tokens),
        cached=min(seen.cached_tokens / seen.requests, prompt - 1),
        equal=seen.equal_lengths,
        requests_per_user=math.inf if started else seen.requests / (spec.users or seen.requests),
        network_s=subject.question.network_s,
    )
    accepted = seen.requests / (seen.requests + seen.rejected)
    asked = subject.question.max_new_tokens or 0
    scheduling = replace(
        setup.scheduling,
        # An engine that reserves goes by what is asked, not by what is made.
        reserved=setup.scheduling.reserved * max(1.0, asked / traffic.osl),
        max_num_seqs=subject.limits.max_num_seqs,
        max_num_batched_tokens=subject.limits.max_num_batched_tokens,
    )
    pool = subject.pool_tokens
    step_s = subject.table.step_s
    if subject.link is not None:
        parts = simulate_apart.stable_request_per_s(subject.link, step_s, traffic, scheduling, pool)
        return ClosedForm(
            offered_request_per_s=subject.load.request_per_s,
            served=serving.closed_loop(
                step_s=step_s, traffic=traffic, scheduling=scheduling, users=1, kv_pool_tokens=pool
            ),
            parts=parts,
            seen_request_per_s=seen.request_per_s,
        )
    if spec.users is not None:
        served = _with_users(subject, traffic, scheduling, pool)
        return ClosedForm(offered_request_per_s=None, served=served)
    rate = subject.load.request_per_s
    if rate is None:
        requests = float(spec.requests or 1)
        served = serving.burst(
            step_s=step_s, traffic=traffic, scheduling=scheduling, requests=requests, kv_pool_tokens=pool
        )
        return ClosedForm(offered_request_per_s=None, served=served)
    served = serving.open_loop(
        step_s=step_s,
        traffic=traffic,
        scheduling=scheduling,
        request_per_s=rate * accepted,
        kv_pool_tokens=pool,
    )
    return ClosedForm(offered_request_per_s=rate, served=served)


def _with_users(
    subject: Subject, traffic: serving.Traffic, scheduling: serving.Scheduling, pool: float
) -> serving.Served:
    """A closed loop; of users who think only those count that wait."""
    users, pause = float(subject.question.workload.users or 1), pause_s(subject.workload)
    waiting = users
    for _ in range(32):
        served = serving.closed_loop(
            step_s=subject.table.step_s,
            traffic=traffic,
            scheduling=scheduling,
            users=max(1.0, waiting),
            kv_pool_tokens=pool,
        )
        found = queueing.requesting_users(users=users, time_in_system_s=served.e2e_s, think_s=pause)
        if abs(found - waiting) < 1e-3 * users:
            break
        waiting = (waiting + found) / 2
    return served
