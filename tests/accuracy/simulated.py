"""Measured online runs simulated: `python -m tests.accuracy.simulated` prints the tables.

Every scored online run, closed loops and rates, is simulated as its client sent it: all users at once,
lengths equal or varied as the benchmark draws them, as many requests as it had, no warm-up left out. The
closed form (serving.py) stands beside it. Each half of the groups is reported with numbers fitted on the
other (simulated_fit.py).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any, Final

import yaml

from capplan import catalog, engine_speed
from capplan.errors import InputError
from capplan.formulas.serving import Traffic
from capplan.results import predict, workload
from capplan.results import subject as subjects
from capplan.results.measured import MeasuredRun
from capplan.sim import simulator
from capplan.sim.around import FILE, Around, around
from capplan.sim.arrivals import AtOnce, Poisson, ThinkTime
from capplan.sim.lengths import Constant, Lengths, Uniform, parse_lengths
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request, Workload
from capplan.sim.schedulers import Policy, Scheduler, scheduler_of
from capplan.sim.schedulers.sglang import Sglang
from capplan.sim.step_times import TableTimes
from capplan.sim.synthetic import ClosedWorkload, OpenWorkload, Prompts
from capplan.sim.workload import stream
from capplan.simulate_setup import Client
from capplan.specs import Parallelism
from capplan.step import Host, StepTable, compile
from tests.accuracy import serving
from tests.accuracy.launches import Launch, launch_of
from tests.accuracy.serving import Row

FOLDS: Final = Path(__file__).with_name("simulated_folds.yaml")
MODES: Final = ("online", "online_closed_loop")
FIGURES: Final = ("TTFT", "TPOT", "E2E", "throughput")
BLOCK_SIZE: Final = 16
# Requests of a run that does not say how many, by user; and of a rate.
REQUESTS_PER_USER: Final = 10
REQUESTS: Final = 300
# A pool without a limit, as of models that keep nothing per token.
MOST_BLOCKS: Final = 10**9
# The longest of lengths that vary like conversations', over their mean.
LONGEST: Final = 8

# Medians that the simulator is to reach: (figure, of models with routed experts).
TARGETS: Final = {("TTFT", False): 0.20, ("TTFT", True): 0.20, ("TPOT", False): 0.09}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run's replica as the simulator takes it; `replicas` of it were run."""

    table: StepTable
    limits: Limits
    policy: Policy
    own: Around
    launch: Launch
    replicas: int
    experts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Means over all requests of a run, as benchmarks print them; throughput is of the whole deployment."""

    ttft_s: float
    tpot_s: float | None
    output_token_per_s: float
    requests: int


class Kept:
    """A Recorder that keeps the finished requests."""

    def __init__(self) -> None:
        self.done: list[Request] = []
        self.refused = 0

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """Steps have passed."""
        self.done += done

    def rejected(self, request: Request, now_s: float) -> None:
        """A request that could never be served."""
        self.refused += 1


def subject_of(
    row: Row, speed: Mapping[str, Any], own: Mapping[str, Any] | Around
) -> Subject | predict.Unanswered:
    """The row's replica by these numbers; Unanswered where the row leaves open what was run."""
    run, subject = row.run, row.subject
    layout = predict.layout_of(run, subject)
    if isinstance(layout, predict.Unanswered):
        return layout
    if run.isl is None or run.osl is None:
        return predict.Unanswered(reason="no token counts")
    parallel, replicas = layout
    fitted = engine_speed.behaviour(
        run.engine,
        subject.gpu,
        version=run.engine_version,
        experts=row.moe,
        attention_ranks=parallel.dp,
        data=speed,
    )
    fp8 = subject.kv is None and workload.fp8_cache(run, subject)
    kv_bits = 8.0 if fp8 else predict.kv_bits_of(subject, run.engine)
    try:
        table = _table(subject, parallel, run.engine, kv_bits, fitted.host)
        plan = predict._plan(run, subject, parallel, run.engine, kv_bits)
    except InputError as error:
        return predict.Unanswered(reason=error.message)
    found = own if isinstance(own, Around) else around(run.engine, experts=row.moe, data=own)
    assert found is not None
    launch, policy = launch_of(row), scheduler_of(run.engine)
    tokens = launch.max_num_batched_tokens or run.notes.max_num_batched_tokens or plan.max_num_batched_tokens
    if policy.whole_prompts:
        # The engine refuses longer prompts, and these were served.
        tokens = max(tokens, math.ceil(run.isl))
    pool = predict._pool_tokens(subject, parallel, kv_bits, plan, run.isl + run.osl / 2)
    limits = Limits(
        max_num_seqs=predict._sequences(
            launch.max_num_seqs or run.notes.max_num_seqs, plan.max_num_seqs, run.engine, parallel.dp
        ),
        max_num_batched_tokens=tokens * parallel.dp,
        kv_blocks=MOST_BLOCKS if pool == math.inf else max(1, int(pool) // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        whole_prompts=policy.whole_prompts,
    )
    return Subject(
        table=table,
        limits=limits,
        policy=policy,
        own=found,
        launch=launch,
        replicas=replicas,
        experts=row.moe,
    )


_tables: dict[Any, StepTable] = {}


def _table(
    subject: subjects.Subject, parallel: Parallelism, engine: str, kv_bits: float, host: Host
) -> StepTable:
    """The step times, those of a layout computed once."""
    key = (id(subject.model), subject.gpu.id, id(subject.weights), parallel, engine, kv_bits, host)
    if key not in _tables:
        _tables[key] = compile(
            subject.model,
            subject.gpu,
            precision=subject.weights,
            kv_bits=kv_bits,
            parallel=parallel,
            engine=engine,
            host=host,
        )
    return _tables[key]


def requests_of(run: MeasuredRun, launch: Launch, replicas: int) -> Workload | None:
    """The requests one replica got; None where the run does not say."""
    assert run.isl is not None
    assert run.osl is not None
    client = workload.CLIENTS.get(launch.client or "")
    if client is not None:
        isl, osl = (_drawn(round(tokens), client.shortest) for tokens in (run.isl, run.osl))
    else:
        traffic = workload.traffic_of(run, run.isl, run.osl)
        isl, osl = (_like(tokens, traffic) for tokens in (run.isl, run.osl))
    prompts = Prompts(isl=isl, osl=osl, streams=partial(stream, 0))
    stated = workload.requests_of(run)
    stated = None if stated is None else max(1, round(stated / replicas))
    rate = run.request_per_s
    if rate is not None and math.isfinite(rate):
        return OpenWorkload(prompts=prompts, times=Poisson(rate / replicas), requests=stated or REQUESTS)
    if run.concurrency is None:
        if stated is None:
            return None
        return OpenWorkload(prompts=prompts, times=AtOnce(), requests=stated)
    users = max(1, round(run.concurrency / replicas))
    per_user = REQUESTS_PER_USER if client is None else round(client.requests_per_user)
    count = stated or users * per_user
    return ClosedWorkload(prompts=prompts, users=min(users, count), think_time=ThinkTime(0), requests=count)


def _drawn(tokens: int, shortest: float) -> Lengths:
    """Lengths as a client draws them: uniform from `shortest` of the nominal one to all of it."""
    return Constant(tokens) if shortest == 1 else Uniform(max(1, int(tokens * shortest)), tokens)


def _like(tokens: float, traffic: Traffic) -> Lengths:
    if traffic.equal:
        return Constant(max(1, round(tokens)))
    spread = f"lognormal:mean={tokens},cv={traffic.variation},max={round(LONGEST * tokens)}"
    return parse_lengths(spread, where="isl, osl")


def simulate(row: Row, subject: Subject) -> Simulated | None:
    """The run from its first request to its last; None where nobody knows how many came, or none fits."""
    sent = requests_of(row.run, subject.launch, subject.replicas)
    if sent is None:
        return None
    kept = Kept()
    end_s = simulator.run(
        workload=Client(sent, subject.own.first_token_s),
        replica=subject.policy.replica(subject.limits),
        scheduler=_scheduler(subject),
        times=TableTimes(subject.table),
        recorder=kept,
        looking=subject.own.looking(subject.launch.poll_steps),
    )
    return _means(kept.done, end_s, subject)


def _scheduler(subject: Subject) -> Scheduler:
    return Sglang(enable_mixed_chunk=True) if subject.launch.mixed_chunk else subject.policy.scheduler()


def _means(done: list[Request], end_s: float, subject: Subject) -> Simulated | None:
    if not done:
        return None
    around_s = subject.own.first_token_s
    longer = [request for request in done if request.output_tokens > 1]
    decoding = [(r.done_s - r.first_token_s) / (r.output_tokens - 1) for r in longer]
    tokens = sum(request.output_tokens for request in done)
    return Simulated(
        ttft_s=fmean(request.first_token_s - request.arrival_s for request in done) + around_s,
        tpot_s=fmean(decoding) if decoding else None,
        output_token_per_s=tokens / (end_s + around_s) * subject.replicas,
        requests=len(done),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One figure of one row: simulated, in closed form, measured."""

    row: Row
    figure: str
    simulated: float
    closed: float
    measured: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated / self.measured

    @property
    def error(self) -> float:
        """Relative error of the simulator, without sign."""
        return abs(self.ratio - 1)

    @property
    def closed_error(self) -> float:
        """Relative error of the closed form, without sign."""
        return abs(self.closed / self.measured - 1)


def beside(row: Row, made: Simulated, closed: predict.Prediction) -> Iterator[Beside]:
    """The row's figures; E2E of all three is TTFT + (osl − 1) · TPOT of the row's osl."""
    run, served = row.run, closed.served
    triples = {
        "TTFT": (made.ttft_s, served.ttft_s, run.ttft_s),
        "TPOT": (made.tpot_s, served.tpot_s, run.tpot_s),
        "E2E": tuple(
            _whole(ttft_s, tpot_s, run.osl or 1)
            for ttft_s, tpot_s in (
                (made.ttft_s, made.tpot_s),
                (served.ttft_s, served.tpot_s),
                (run.ttft_s, run.tpot_s),
            )
        ),
        "throughput": (made.output_token_per_s, closed.output_token_per_s, run.output_token_per_s),
    }
    for figure, (simulated, by_form, measured) in triples.items():
        if simulated is not None and by_form is not None and measured is not None:
            yield Beside(row=row, figure=figure, simulated=simulated, closed=by_form, measured=measured)


def _whole(ttft_s: float | None, tpot_s: float | None, osl: float) -> float | None:
    return None if ttft_s is None or tpot_s is None else ttft_s + (osl - 1) * tpot_s


def online(some: Iterable[Row]) -> list[Row]:
    """The online rows that count: scored and run as they say."""
    rows = [row for row in some if row.scored]
    wrong = serving.flawed(rows)
    return [row for row in rows if row.run.mode in MODES and row.run.line not in wrong]


def folds(file: Path) -> list[Mapping[str, Any]]:
    """Numbers fitted on each half alone."""
    found: list[Mapping[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def figures(
    some: Iterable[Row], speed: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[list[Beside], int]:
    """Every figure of `some` rows by these numbers; and how many rows have none."""
    made: list[Beside] = []
    found: dict[Any, Simulated | None] = {}
    left = 0
    for row in some:
        closed = predict.predict(row.run, row.subject, speed=speed)
        subject = subject_of(row, speed, own)
        if isinstance(subject, predict.Unanswered) or isinstance(closed, predict.Unanswered):
            left += 1
            continue
        key = configuration(row, subject)
        if key not in found:
            found[key] = simulate(row, subject)
        simulated = found[key]
        if simulated is None:
            left += 1
            continue
        made += beside(row, simulated, closed)
    return made, left


@cache
def shipped() -> tuple[tuple[Beside, ...], int]:
    """Every figure of the online rows by the shipped numbers, fitted on all groups."""
    rows, _ = serving.rows()
    speed = catalog.read_yaml(engine_speed.FILE)
    made, left = figures(online(rows), speed, catalog.read_yaml(FILE))
    return tuple(made), left


@cache
def held_out() -> tuple[tuple[Beside, ...], int]:
    """Every figure of the online rows by numbers fitted on the other half; and how many rows have none."""
    rows, _ = serving.rows()
    kept = {row.run.line for row in online(rows)}
    numbers = zip(reversed(folds(serving.FOLDS)), reversed(folds(FOLDS)), strict=True)
    made: list[Beside] = []
    left = 0
    for half, (speed, own) in zip(serving.halves(rows), numbers, strict=True):
        found, without = figures((row for row in half if row.run.line in kept), speed, own)
        made += found
        left += without
    return tuple(made), left


def configuration(row: Row, subject: Subject) -> Any:
    """What makes two runs the same simulation."""
    run = row.run
    asked = (run.isl, run.osl, run.concurrency, run.request_per_s, run.notes.requests, run.notes.varied)
    return id(subject.table), subject.limits, subject.own, subject.launch, asked


def _percent(value: float) -> str:
    """Of a load that grows without end in closed form: no number."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else "–"


def table(some: Iterable[Beside], key: Callable[[Row], str]) -> Iterator[str]:
    """Errors by figure and some property of the row: median and mean, simulated beside closed form."""
    groups: dict[tuple[str, str], list[Beside]] = defaultdict(list)
    for one in some:
        groups[one.figure, key(one.row)].append(one)
    yield "| figure | runs | rows | simulated: median | mean | × | closed form: median | mean |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for (figure, name), own in sorted(
        groups.items(), key=lambda item: (FIGURES.index(item[0][0]), item[0][1])
    ):
        errors, closed = [one.error for one in own], [one.closed_error for one in own]
        cells = (
            figure,
            name,
            str(len(own)),
            _percent(median(errors)),
            _percent(mean(errors)),
            f"{median(one.ratio for one in own):.2f}",
            _percent(median(closed)),
            _percent(mean(closed)),
        )
        yield "| " + " | ".join(cells) + " |"


def kind(row: Row) -> str:
    """Dense or MoE."""
    return "MoE" if row.moe else "dense"


def readme_lines() -> Iterator[str]:
    """The README's table: medians, simulated and in closed form, by both fits, against the targets."""
    yield "| figure | shipped: simulated | closed form | cross-fit: simulated | closed form | target |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for figure in ("TTFT", "TPOT"):
        for moe in (False, True):
            target = TARGETS.get((figure, moe))
            cells = [f"{figure}, {'MoE' if moe else 'dense'}"]
            for found, _ in (shipped(), held_out()):
                own = [one for one in found if one.figure == figure and one.row.moe == moe]
                error = median(one.error for one in own)
                missed = target is not None and error > target
                cells.append(_percent(error) + (" **missed**" if missed else ""))
                cells.append(_percent(median(one.closed_error for one in own)))
            cells.append("–" if target is None else f"≤ {100 * target:.0f} %")
            yield "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the tables, the README's first."""
    print("\n".join(readme_lines()), end="\n\n")
    found, _ = shipped()
    print("**Simulated** (online runs), by the shipped numbers, fitted on all groups:\n")
    print("\n".join(table(found, kind)), end="\n\n")
    found, left = held_out()
    print("By numbers fitted on the other half of the groups:\n")
    for key in (
        kind,
        lambda row: f"{row.run.engine}, {kind(row)}",
        lambda row: f"{row.run.engine}, {kind(row)}, {launch_of(row).client or 'other sources'}",
    ):
        print("\n".join(table(found, key)), end="\n\n")
    print(f"- {len({one.row.run.line for one in found}):,} rows have figures, {left} have none.")


if __name__ == "__main__":
    main()
