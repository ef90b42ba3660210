"""The replay door: an engine's logged requests under its limits and its rule of step times."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capplan.sim import logs
from capplan.sim.metrics import Metrics
from capplan.sim.replay import Logged, LoggedRequests, read_limits
from capplan.sim.schedulers import Policy, scheduler_of
from capplan.sim.simulator import run
from capplan.sim.summary import Rule, Summary, summarise
from capplan.simulate_json import figures, limits_of, rounded
from capplan.simulate_run import Logs, no_request

MICROSECOND_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a log's requests saw; times in seconds, the log's own clock counts microseconds."""

    requests: Path
    logged: Logged
    policy: Policy
    summary: Summary

    def to_dict(self) -> dict[str, Any]:
        """The JSON: as of a simulation, without what a log does not say."""
        found = {
            "schema": "capplan.simulate/1",
            "replay": {"requests": self.requests.name, "prefix": self.logged.prefix},
            "scheduler": {"name": self.policy.name, "verified": self.policy.verified},
            "limits": limits_of(self.logged.limits),
            **figures(self.summary),
        }
        made: dict[str, Any] = rounded(found)
        return made


def replay(requests: Path, limits: Path, *, scheduler: str = "vllm_v1", files: Logs | None = None) -> Replay:
    """Serve a log's requests; InputError for files that cannot be read.

    `files.steps` has a row a step, in microseconds, under the columns of such logs.
    """
    files = files or Logs()
    logged, policy = read_limits(limits), scheduler_of(scheduler)
    workload = LoggedRequests(requests, logged.prefix)
    bounds = logged.limits
    metrics = Metrics(
        slots=bounds.max_num_seqs,
        kv_blocks=bounds.kv_blocks,
        block_size=bounds.block_size,
        clock_s=MICROSECOND_S,
    )
    step = policy.make()
    with logs.steps_log(files.steps, metrics, bounds.kv_blocks, unit="us") as (recorder, single_steps):
        run(
            workload=workload,
            replica=policy.replica(bounds),
            scheduler=logs.stepwise(step) if single_steps else step,
            times=logged.times,
            recorder=recorder,
        )
    metrics.close()
    if not metrics.finished and not len(metrics.requests()):
        raise no_request(bounds, metrics)
    if files.requests is not None:
        logs.write_requests(files.requests, metrics)
    summary = summarise(metrics, Rule(stationary=False, uneven=workload.shares))
    return Replay(requests=requests, logged=logged, policy=policy, summary=summary)
