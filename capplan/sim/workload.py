"""A workload from plain options: synthetic requests, users, sessions or a trace.

One seed gives independent streams of draws for arrivals, prompt lengths, output lengths, turns and think
time: another arrival process leaves the lengths as they are. The same seed gives the same requests on
every machine.
"""

import math
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from capplan.errors import InputError
from capplan.latency_question import MAX_RATE, MAX_TOKENS, MIN_RATE
from capplan.sim.arrivals import parse_arrivals, parse_think_time
from capplan.sim.lengths import parse_lengths
from capplan.sim.sessions import SessionWorkload, parse_turns
from capplan.sim.synthetic import ClosedWorkload, OpenWorkload, Prompts
from capplan.sim.traces import TraceWorkload

BuiltWorkload = OpenWorkload | ClosedWorkload | SessionWorkload | TraceWorkload
MAX_USERS: Final = 1_000_000
MAX_REQUESTS: Final = 1_000_000_000
MAX_SECONDS: Final = 1e9
"""32 years."""
MAX_SAMPLES: Final = 1024
MAX_SORT_ROWS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """A workload as options give it; `build` checks them. Lengths, arrivals, turns, think time as spelled.

    Requests come at `request_per_s` (of all turns, on average; inf: all at once), or from `users` who each
    wait for an answer, or from a trace. Of a trace `request_per_s` is a mean rate to scale it to.
    """

    isl: str | int | None = None
    osl: str | int | None = None
    request_per_s: float | None = None
    arrivals: str = "poisson"
    users: int | None = None
    think_time: str | float = 0
    ramp_up_s: float = 0.0
    requests: int | None = None
    duration_s: float | None = None
    turns: str | int = 1
    system_prompt_tokens: int = 0
    """In front of every prompt, the same for all; beyond isl."""
    prefix_shared: int = 0
    """Of every prompt's tokens the first so many are the same."""
    max_context_tokens: int | None = None
    samples: int = 1
    seed: int = 0
    trace: Path | None = None
    rate_scale: float | None = None
    trace_limit: int | None = None
    trace_repeat: int = 1
    trace_offset_s: float = 0.0
    trace_sort_rows: int = 0
    skip_bad_rows: bool = False


def stream(seed: int, name: str) -> random.Random:
    """The stream of draws `name` of a seed, independent of the others; text seeds are hashed with SHA-512."""
    return random.Random(f"capplan {seed} {name}")


def build(spec: WorkloadSpec) -> BuiltWorkload:
    """The workload of `spec`; InputError for options that do not go together or are out of range."""
    _check(spec)
    if spec.trace is not None:
        return TraceWorkload(
            spec.trace,
            rate_scale=spec.rate_scale,
            request_per_s=spec.request_per_s,
            offset_s=spec.trace_offset_s,
            duration_s=math.inf if spec.duration_s is None else spec.duration_s,
            limit=spec.trace_limit if spec.trace_limit is not None else spec.requests,
            repeat=spec.trace_repeat,
            sort_rows=spec.trace_sort_rows,
            skip_bad_rows=spec.skip_bad_rows,
            prefix_shared=spec.prefix_shared,
            samples=spec.samples,
        )
    return _synthetic(spec)


def _synthetic(spec: WorkloadSpec) -> BuiltWorkload:
    if spec.isl is None or spec.osl is None:
        missing = "--isl" if spec.isl is None else "--osl"
        raise InputError("no lengths", where=missing, hint="give --isl and --osl, or --trace FILE")
    isl = parse_lengths(spec.isl, where=f"--isl {spec.isl}")
    osl = parse_lengths(spec.osl, where=f"--osl {spec.osl}")
    turns = parse_turns(spec.turns, where=f"--turns {spec.turns}")
    think_time = parse_think_time(spec.think_time, where=f"--think-time {spec.think_time}")
    streams = partial(stream, spec.seed)
    duration_s = math.inf if spec.duration_s is None else spec.duration_s
    times = None
    if spec.users is None:
        assert spec.request_per_s is not None
        # A rate counts requests: sessions start less often.
        where = f"--arrivals {spec.arrivals} --request-rate {spec.request_per_s:g}"
        times = parse_arrivals(spec.arrivals, spec.request_per_s / turns.mean, where=where)
    if turns.mean > 1:
        if spec.prefix_shared:
            hint = "give --system-prompt N: the tokens all sessions begin with"
            raise InputError("a session's prompts differ in length", where="--prefix-shared", hint=hint)
        return SessionWorkload(
            isl=isl,
            osl=osl,
            turns=turns,
            think_time=think_time,
            streams=streams,
            starts=times,
            users=spec.users or 0,
            ramp_up_s=spec.ramp_up_s,
            requests=spec.requests,
            duration_s=duration_s,
            system_prompt_tokens=spec.system_prompt_tokens,
            max_context_tokens=spec.max_context_tokens,
            samples=spec.samples,
        )
    prompts = Prompts(
        isl=isl,
        osl=osl,
        streams=streams,
        system_prompt_tokens=spec.system_prompt_tokens,
        prefix_shared=spec.prefix_shared,
        samples=spec.samples,
    )
    if times is not None:
        return OpenWorkload(prompts=prompts, times=times, requests=spec.requests, duration_s=duration_s)
    assert spec.users is not None
    return ClosedWorkload(
        prompts=prompts,
        users=spec.users,
        think_time=think_time,
        ramp_up_s=spec.ramp_up_s,
        requests=spec.requests,
        duration_s=duration_s,
    )


def _check(spec: WorkloadSpec) -> None:
    """Ranges, and options that do not go together."""
    whole = (
        ("--concurrency", spec.users, 1, MAX_USERS),
        ("--requests", spec.requests, 1, MAX_REQUESTS),
        ("--system-prompt", spec.system_prompt_tokens, 0, MAX_TOKENS),
        ("--prefix-shared", spec.prefix_shared, 0, MAX_TOKENS),
        ("--max-context", spec.max_context_tokens, 1, 2 * MAX_TOKENS),
        ("--n", spec.samples, 1, MAX_SAMPLES),
        ("--trace-limit", spec.trace_limit, 1, MAX_REQUESTS),
        ("--trace-repeat", spec.trace_repeat, 1, MAX_REQUESTS),
        ("--trace-sort", spec.trace_sort_rows, 0, MAX_SORT_ROWS),
    )
    for option, number, low, high in whole:
        if number is not None and not low <= number <= high:
            raise InputError(f"{number} is out of range", where=option, hint=f"from {low} to {high:,}")
    seconds = (
        ("--ramp-up", spec.ramp_up_s),
        ("--trace-offset", spec.trace_offset_s),
        ("--duration", spec.duration_s),
    )
    for option, time_s in seconds:
        if time_s is not None and not 0 <= time_s <= MAX_SECONDS:
            raise InputError(
                f"{time_s:g} s is out of range", where=option, hint=f"from 0 to {MAX_SECONDS:,.0f}"
            )
    if spec.prefix_shared and spec.system_prompt_tokens:
        hint = "--prefix-shared counts tokens within --isl, --system-prompt tokens in front of it: give one"
        raise InputError("two shared beginnings", where="--prefix-shared, --system-prompt", hint=hint)
    if spec.trace is not None:
        _check_trace(spec)
    elif (spec.request_per_s is None) == (spec.users is None):
        what = "no load" if spec.users is None else "requests that come by themselves and users who wait"
        hint = "give one of --request-rate (inf: all at once), --concurrency and --trace"
        raise InputError(what, where="--request-rate, --concurrency", hint=hint)
    elif spec.requests is None and (spec.duration_s is None or spec.request_per_s == math.inf):
        raise InputError("a workload without end", where="--requests", hint="give --requests or --duration")
    elif options := _trace_options(spec):
        raise InputError("options of a trace without one", where=options, hint="give --trace FILE")
    elif options := _idle_options(spec):
        hint = "--arrivals goes with --request-rate, --ramp-up with --concurrency, --max-context with --turns"
        raise InputError(
            "options without effect here", where=options, hint=f"{hint}, --think-time with the last two"
        )


def _check_trace(spec: WorkloadSpec) -> None:
    """Options that a trace takes the place of, and its rate."""
    given = {
        "--isl": spec.isl is not None,
        "--osl": spec.osl is not None,
        "--concurrency": spec.users is not None,
        "--turns": spec.turns not in (1, "1"),
        "--think-time": spec.think_time not in (0, "0"),
        "--ramp-up": spec.ramp_up_s != 0,
        "--system-prompt": spec.system_prompt_tokens != 0,
        "--max-context": spec.max_context_tokens is not None,
        "--arrivals": spec.arrivals != "poisson",
    }
    named = ", ".join(option for option, there in given.items() if there)
    if named:
        hint = "leave them out: the trace has its own lengths and times"
        raise InputError("options a trace takes the place of", where=named, hint=hint)
    if spec.trace_limit is not None and spec.requests is not None:
        hint = "both count the trace's requests: give one"
        raise InputError("two limits", where="--trace-limit, --requests", hint=hint)
    if spec.rate_scale is not None and spec.request_per_s is not None:
        hint = "--rate-scale multiplies the trace's rate, --request-rate sets it: give one"
        raise InputError("two rates", where="--rate-scale, --request-rate", hint=hint)
    for option, rate in (("--rate-scale", spec.rate_scale), ("--request-rate", spec.request_per_s)):
        if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
            hint = f"from {MIN_RATE:g} to {MAX_RATE:g}"
            raise InputError(f"{rate:g} is out of range", where=option, hint=hint)


def _idle_options(spec: WorkloadSpec) -> str:
    """Options given that the kind of workload has no use for."""
    waits, one_turn = spec.users is not None, spec.turns in (1, "1")
    given = {
        "--arrivals": waits and spec.arrivals != "poisson",
        "--ramp-up": not waits and spec.ramp_up_s != 0,
        "--think-time": not waits and one_turn and spec.think_time not in (0, "0"),
        "--max-context": one_turn and spec.max_context_tokens is not None,
    }
    return ", ".join(option for option, there in given.items() if there)


def _trace_options(spec: WorkloadSpec) -> str:
    """The trace's own options among those given."""
    given = {
        "--rate-scale": spec.rate_scale is not None,
        "--trace-limit": spec.trace_limit is not None,
        "--trace-repeat": spec.trace_repeat != 1,
        "--trace-offset": spec.trace_offset_s != 0,
        "--trace-sort": spec.trace_sort_rows != 0,
        "--skip-bad-rows": spec.skip_bad_rows,
    }
    return ", ".join(option for option, there in given.items() if there)
