"""A simulation small enough to follow by hand: requests in a list, steps of whole seconds, all kept."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from capplan.sim import flow, simulator
from capplan.sim.replay import LinearTimes
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS, Policy

ONE_SECOND = LinearTimes(base=1, prompt_token=0, decode_sequence=0, context_token=0)
"""Every step takes a second, whatever it computes."""


class Listed:
    """A workload that is a list of requests, already in order of arrival."""

    shares = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.count: int | None = len(self.requests)

    def arrivals(self) -> Iterator[Request]:
        yield from self.requests

    def after(self, request: Request, now_s: float) -> Request | None:
        return None


@dataclass
class Kept:
    """Everything that happened; each row is (start, end, steps, decoding, prompt tokens, padding rows)."""

    rows: list[tuple[float, float, int, int, int, int]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    refused: list[Request] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    made_tokens: int = 0
    seen: Any = None
    """Called with (replica, step, finished so far) after each step."""

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        padding = step.padding.decoding if step.padding else 0
        self.rows.append((start_s, end_s, count, step.decoding, step.prompt_tokens, padding))
        self.finished += done
        self.preempted += [request.index for request in step.preempted]
        self.made_tokens += step.made_tokens
        if self.seen is not None:
            self.seen(replica, step, self)

    def rejected(self, request: Request, now_s: float) -> None:
        self.refused.append(request)

    @property
    def step_count(self) -> int:
        """Steps, each run of steps alike by its number."""
        return sum(row[2] for row in self.rows)


def requests(*lengths: tuple[int, int], arrivals: Sequence[float] = (), **more: Any) -> list[Request]:
    """Requests of (prompt, output) tokens; all at 0 without `arrivals`."""
    times = arrivals or [0.0] * len(lengths)
    return [
        Request(index, at, prompt, output, **more)
        for index, (at, (prompt, output)) in enumerate(zip(times, lengths, strict=True))
    ]


def limits_of(policy: Policy, **given: Any) -> Limits:
    """Limits as the policy needs them; ample where not given."""
    ample: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_blocks": 1000,
        "block_size": 4,
        "max_model_len": 100,
        "whole_prompts": policy.whole_prompts,
    }
    return Limits(**{**ample, **given})


def serve(
    name: str,
    coming: Sequence[Request],
    *,
    times: flow.StepTimes = ONE_SECOND,
    replica: Replica | None = None,
    scheduler: flow.Scheduler | None = None,
    seen: Any = None,
    **given: Any,
) -> Kept:
    """Serve the requests by the scheduler of that name."""
    policy = SCHEDULERS[name]
    kept = Kept(seen=seen)
    simulator.run(
        workload=Listed(coming),
        replica=replica or policy.replica(limits_of(policy, **given)),
        scheduler=scheduler or policy.scheduler(),
        times=times,
        recorder=kept,
    )
    return kept
