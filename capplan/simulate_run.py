"""One simulation from its beginning to its end, or several with seeds of their own."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from capplan.errors import InputError
from capplan.sim import logs
from capplan.sim.apart import ApartRun
from capplan.sim.disaggregated import Link
from capplan.sim.metrics import Metrics
from capplan.sim.replica import Limits
from capplan.sim.request import Workload
from capplan.sim.simulator import run
from capplan.sim.summary import Rule, Summary, summarise
from capplan.simulate_question import SimulateQuestion
from capplan.simulate_setup import Subject

CHANGING: Final = ("diurnal", "hourly")
"""Arrival processes without one steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a simulation is: requests finished of `requests` (None: nobody knows), or runs of several."""

    time_s: float
    finished: int
    requests: int | None
    run: int = 0
    runs: int = 1


Told = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Files to write: a row a request, a row a step; only of a single run."""

    requests: Path | None = None
    steps: Path | None = None


def once(subject: Subject, seed: int, told: Told | None, files: Logs) -> tuple[Summary, bool]:
    """One run from its beginning to its end, or to an interruption."""
    workload = subject.requests(seed)

    def tell(time_s: float, finished: int) -> None:
        if told is not None:
            told(Progress(time_s=time_s, finished=finished, requests=workload.count))

    metrics = _metrics(subject, tell)
    if subject.link is not None:
        summary, partial = _apart(subject, subject.link, workload, metrics)
    else:
        summary, partial = _together(subject, seed, workload, metrics, files)
    if files.requests is not None:
        logs.write_requests(files.requests, metrics)
    return summary, partial


def _metrics(subject: Subject, told: Callable[[float, int], None] | None = None) -> Metrics:
    limits = subject.limits
    return Metrics(
        slots=subject.places,
        kv_blocks=limits.kv_blocks,
        block_size=limits.block_size,
        kv_groups=limits.kv_groups,
        slope=subject.slope_s,
        told=told,
    )


def _together(
    subject: Subject, seed: int, workload: Workload, metrics: Metrics, files: Logs
) -> tuple[Summary, bool]:
    """One replica for prompts and decoding."""
    partial, replica, scheduler = False, subject.replica(seed), subject.policy.make()
    with logs.steps_log(files.steps, metrics, subject.limits.kv_blocks) as (recorder, single_steps):
        try:
            run(
                workload=workload,
                replica=replica,
                scheduler=logs.stepwise(scheduler) if single_steps else scheduler,
                times=subject.times,
                recorder=recorder,
                looking=subject.looking,
            )
        except KeyboardInterrupt:
            partial = True
    left = len(replica.waiting) + len(replica.running)
    return _summary(subject, metrics, left, partial), partial


def _apart(subject: Subject, link: Link, workload: Workload, metrics: Metrics) -> tuple[Summary, bool]:
    """A replica of prompts and one that decodes."""
    partial = False
    made = ApartRun(
        subject.limits,
        schedulers=(subject.policy.make(), subject.policy.make()),
        times=subject.times,
        prompts=_metrics(subject),
        metrics=metrics,
    )
    try:
        made.serve(workload, link)
    except KeyboardInterrupt:
        partial = True
    made.close()
    if not metrics.steps_taken and metrics.finished and not partial:
        raise InputError(
            "every answer ends with its first token: nothing decodes",
            where="--kv-link-gbps, --osl",
            hint="longer answers, or leave --kv-link-gbps out",
        )
    summary = _summary(subject, metrics, made.left, partial)
    return replace(summary, apart=made.seen(summary)), partial


def _summary(subject: Subject, metrics: Metrics, left: int, partial: bool) -> Summary:
    metrics.told = None
    try:
        return summarise(metrics, _rule(subject), left)
    except ValueError:
        if partial:
            raise KeyboardInterrupt from None
        raise no_request(subject.limits, metrics) from None


def repeated(subject: Subject, told: Told | None) -> tuple[list[Summary], bool]:
    """Runs with seeds of their own, on as many processes as there are processors."""
    question = subject.question
    seeds = range(question.workload.seed, question.workload.seed + question.repeat)
    made: list[Summary] = []
    workers = min(question.repeat, os.cpu_count() or 1)
    if workers == 1:
        for seed in seeds:
            summary, partial = once(subject, seed, None, Logs())
            if partial:
                break
            made.append(summary)
            _tell_runs(told, made, question.repeat)
        return _some(made), len(made) < question.repeat
    import joblib
    from joblib.externals.loky import get_reusable_executor

    pool = joblib.Parallel(n_jobs=workers, return_as="generator")
    found = pool(joblib.delayed(_job)(question, seed) for seed in seeds)
    try:
        for summary in found:
            made.append(summary)
            _tell_runs(told, made, question.repeat)
    except KeyboardInterrupt:
        get_reusable_executor().shutdown(wait=False, kill_workers=True)
        with warnings.catch_warnings():
            # Of runs that were left under way, as they were meant to be.
            warnings.simplefilter("ignore")
            found.close()
        return _some(made), True
    return _some(made), False


def _job(question: SimulateQuestion, seed: int) -> Summary:
    return once(Subject(replace(question, repeat=1)), seed, None, Logs())[0]


def _some(made: list[Summary]) -> list[Summary]:
    if not made:
        raise KeyboardInterrupt
    return made


def _tell_runs(told: Told | None, made: list[Summary], runs: int) -> None:
    if told is not None:
        finished = sum(summary.requests for summary in made)
        told(Progress(time_s=0.0, finished=finished, requests=None, run=len(made), runs=runs))


def _rule(subject: Subject) -> Rule:
    """How a run is read: its warm-up, and its limits."""
    spec, limits = subject.question.workload, subject.setup.slo
    changing = spec.trace is not None or spec.arrivals.partition(":")[0] in CHANGING
    return Rule(
        around_s=subject.around_s,
        warm_up_s=subject.question.warm_up_s,
        stationary=not changing,
        ttft_s=None if limits is None else limits.ttft_s,
        tpot_s=None if limits is None else limits.tpot_s,
        uneven=subject.workload.shares or bool(subject.limits.limited_groups),
    )


def no_request(limits: Limits, metrics: Metrics) -> InputError:
    """The error of a run in which nobody was served."""
    rejected = metrics.rejections
    if not rejected:
        return InputError(
            "no request came", where="--duration, --request-rate", hint="a longer --duration, or --requests N"
        )
    tokens = min(prompt + output for _, _, prompt, output in rejected)
    return InputError(
        f"every request was rejected: the shortest has {tokens:,} tokens, one may have "
        f"{limits.max_model_len or 0:,} and the KV pool holds {limits.kv_blocks * limits.block_size:,}",
        where="--isl, --osl, --max-model-len",
        hint="shorter requests, or more memory: --kv-dtype fp8, --tp 2",
    )
