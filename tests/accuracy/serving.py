"""Measured serving runs against what capplan says of them.

A group is (engine, GPU, shape of the model): each half of them is reported with numbers that were fitted on
the other (serving_fit.py, serving_folds.yaml).
What is left out, and why, is counted. serving_tables.py prints it all.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from capplan.formulas import serving
from capplan.op_costs import Bounds
from capplan.results.measured import MeasuredRun, read_measured
from capplan.results.predict import Prediction, Unanswered, kv_bits_of, layout_of, predict
from capplan.results.subject import Subject, Unknown, subject_of
from capplan.specs import Model
from capplan.step import StepTable
from capplan.work import work_of
from tests.accuracy import oracles

TABLE: Final = oracles.DATA / "measured" / "serving.csv"
FOLDS: Final = Path(__file__).with_name("serving_folds.yaml")
ENGINES: Final = ("vllm", "sglang", "tensorrt-llm")
ARCHITECTURES: Final = ("Ampere", "Ada Lovelace", "Hopper", "Blackwell", "Blackwell Ultra", "CDNA3")
SHOWN_ONLY: Final = ("mlperf_offline", "mlperf_server", "mlperf_interactive")
# Static batches of old engines under one script, for comparison among themselves.
SHOWN_STUDY: Final = "argonne-lcf/LLM-Inference-Bench"
LEAST_ROWS: Final = 5
# No engine comes closer to physics over a whole request; rows that do had cached prompts or guessed tokens.
CLOSEST_TO_PHYSICS: Final = 0.8
# A closed loop keeps its users busy but for its start and its end.
LEAST_UNDER_WAY: Final = 0.5
# Equal configurations further apart than this were not run alike.
APART: Final = 0.8
# A day's runs of a version of which so many, of three at least, are so much faster per token than the same
# configurations on other days guessed tokens (speculative decoding), and did not say so.
GUESSED: Final = 0.75
GUESSED_SHARE: Final = 0.8
GUESSED_LEAST: Final = 3
_DAY: Final = re.compile(r"(?:^|; )measured=([^;]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measured run whose subject is known."""

    run: MeasuredRun
    subject: Subject

    @property
    def group(self) -> tuple[str, str, str]:
        """What is held out together: models of one shape are one."""
        return self.run.engine, self.subject.gpu.id, shape(self.subject.model)

    @property
    def cell(self) -> tuple[str, str, str]:
        """What is scored together."""
        return self.run.engine, self.subject.gpu.id, self.subject.model.name

    @property
    def moe(self) -> bool:
        """Whether the model routes to experts."""
        return any(
            tensor.role == "experts"
            for group in self.subject.model.groups
            for tensor in group.layer.tensors()
        )

    @property
    def scored(self) -> bool:
        """Whether the issue's targets hold for it."""
        return (
            self.run.engine in ENGINES
            and self.subject.gpu.architecture in ARCHITECTURES
            and self.run.mode not in SHOWN_ONLY
            and SHOWN_STUDY not in self.run.source
        )


def shape(model: Model) -> str:
    """A model's shape: DeepSeek-R1, V3 and V3.1 are one."""
    return f"{model.architecture} {model.layers}x{model.hidden}"


@cache
def rows() -> tuple[tuple[Row, ...], Counter[str]]:
    """The usable rows, and how many were left out for what reason."""
    table = read_measured(TABLE)
    left = Counter({f"rejected: {reason}": count for reason, count in table.reasons.items()})
    found: list[Row] = []
    for run in table.runs:
        if run.notes.warnings:
            left["marked WARN"] += 1
            continue
        subject = subject_of(run)
        if isinstance(subject, Unknown):
            left[f"unknown {subject.what}"] += 1
            continue
        if run.notes.speculative:
            left["speculative decoding of unknown acceptance"] += 1
            continue
        found.append(Row(run=run, subject=subject))
    return tuple(found), left


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of one row: predicted and measured."""

    row: Row
    figure: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def error(self) -> float:
        """Relative error, without sign."""
        return abs(self.ratio - 1)


def compared(row: Row, answer: Prediction) -> Iterator[Compared]:
    """TPOT, TTFT, E2E and throughput of a row, as far as both have them."""
    run, served = row.run, answer.served
    if run.tpot_s is not None and served.tpot_s is not None:
        yield Compared(row=row, figure="TPOT", predicted=served.tpot_s, measured=run.tpot_s)
    if run.ttft_s is not None and math.isfinite(served.ttft_s):
        yield Compared(row=row, figure="TTFT", predicted=served.ttft_s, measured=run.ttft_s)
    if run.ttft_s is not None and run.tpot_s is not None and run.osl and math.isfinite(served.e2e_s):
        whole = run.ttft_s + (run.osl - 1) * run.tpot_s
        yield Compared(row=row, figure="E2E", predicted=served.e2e_s, measured=whole)
    elif run.e2e_s is not None and math.isfinite(served.e2e_s):
        yield Compared(row=row, figure="E2E", predicted=served.e2e_s, measured=run.e2e_s)
    if run.output_token_per_s is not None:
        yield Compared(
            row=row,
            figure="throughput",
            predicted=answer.output_token_per_s,
            measured=run.output_token_per_s,
        )


def answers(
    some: Iterable[Row], speed: Mapping[str, Any] | None = None
) -> tuple[list[Compared], Counter[str]]:
    """Every figure of `some` rows, and why others have none; `speed` in place of the shipped numbers."""
    made: list[Compared] = []
    left: Counter[str] = Counter()
    for row in some:
        answer = predict(row.run, row.subject, speed=speed)
        if isinstance(answer, Unanswered):
            left[answer.reason] += 1
        else:
            made += compared(row, answer)
    return made, left


def held_out(some: Iterable[Row]) -> list[Compared]:
    """Every figure of `some` rows, each half of their groups by the numbers fitted on the other."""
    import yaml

    folds = yaml.safe_load(FOLDS.read_text(encoding="utf-8"))
    made: list[Compared] = []
    for half, other in zip(halves(some), reversed(folds), strict=True):
        made += answers(half, other)[0]
    return made


def repeated(some: Iterable[Row]) -> set[int]:
    """Lines whose figures are printed for two GPUs: one of the two tables was copied."""
    seen: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    lines: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for row in some:
        run = row.run
        figures = (run.output_token_per_s, run.ttft_s, run.tpot_s)
        if None not in figures:
            seen[(run.model, *figures)].add(row.subject.gpu.id)
            lines[(run.model, *figures)].append(run.line)
    return {line for key, gpus in seen.items() if len(gpus) > 1 for line in lines[key]}


def halves(some: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The two halves of the groups: what is fitted on one is reported on the other.

    The groups of an engine and architecture, in the order of their hashes, go to the two in turn; those with
    closed loops, which are fitted on, apart from the others.
    """
    groups: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in some:
        groups[row.run.engine, row.subject.gpu.architecture]["|".join(row.group)].append(row)
    made: tuple[list[Row], list[Row]] = ([], [])
    for by_group in groups.values():
        loops = {name for name, own in by_group.items() if any(map(_loop, own))}
        for names in (loops, by_group.keys() - loops):
            for place, name in enumerate(sorted(names, key=_digest)):
                made[place % 2].extend(by_group[name])
    return made


def _loop(row: Row) -> bool:
    return row.run.mode == "online_closed_loop"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def physics_share(row: Row) -> float | None:
    """A closed loop's shortest possible time per request over the measured one; None for other runs.

    Prompts and answers are taken 10 % shorter than nominal, as some clients vary them.
    """
    run = row.run
    if (
        run.mode != "online_closed_loop"
        or run.ttft_s is None
        or run.tpot_s is None
        or run.concurrency is None
    ):
        return None
    layout = layout_of(run, row.subject)
    if isinstance(layout, Unanswered) or run.isl is None or run.osl is None:
        return None
    parallel, replicas = layout
    kv_bits = kv_bits_of(row.subject, run.engine)
    work = work_of(row.subject.model, row.subject.weights, kv_bits=kv_bits, parallel=parallel)
    least = serving.closed_loop(
        step_s=StepTable(work, Bounds(row.subject.gpu)).step_s,
        traffic=serving.Traffic(isl=0.9 * run.isl, osl=0.9 * run.osl),
        scheduling=serving.Scheduling(max_num_seqs=1 << 20, wait_steps=0, bursts=0),
        users=run.concurrency / replicas,
    )
    return least.e2e_s / (run.ttft_s + (0.9 * run.osl - 1) * run.tpot_s)


def kept_under_way(row: Row) -> float | None:
    """Requests under way, by Little's law from the row's own figures, over the users it states; None unknown.

    X · T = (tokens/s / osl) · (TTFT + (osl − 1) · TPOT): a client that sends too slowly keeps fewer.
    """
    run = row.run
    if run.concurrency is None or run.osl is None or run.ttft_s is None or run.tpot_s is None:
        return None
    if run.output_token_per_s is None:
        return None
    whole = run.ttft_s + (run.osl - 1) * run.tpot_s
    return run.output_token_per_s / run.osl * whole / run.concurrency


def _twins(some: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by configuration: what was run, how it was laid out, and under which load."""
    twins: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in some:
        run, notes = row.run, row.run.notes
        layout = (run.tp, run.pp, run.n_gpu, notes.attention_dp_ranks, notes.moe_ep)
        twins[*row.group, run.weight_dtype, layout, run.isl, run.osl, run.concurrency].append(row)
    return twins


def guessed(some: Iterable[Row]) -> set[int]:
    """Lines of a day's runs of which most are far faster per token than equal ones on another day."""
    rows_ = [row for row in some if row.run.mode == "online_closed_loop" and row.run.tpot_s is not None]

    def day(row: Row) -> tuple[Any, ...]:
        found = _DAY.search(row.run.notes.text)
        return *row.group, row.run.weight_dtype, row.run.engine_version, found[1] if found else ""

    slower: dict[tuple[Any, ...], list[bool]] = defaultdict(list)
    for twins in _twins(rows_).values():
        for row in twins:
            others = [twin.run.tpot_s or 0.0 for twin in twins if day(twin) != day(row)]
            if others:
                slower[day(row)].append((row.run.tpot_s or 0.0) < GUESSED * max(others))
    days = {
        name
        for name, found in slower.items()
        if len(found) >= GUESSED_LEAST and sum(found) >= GUESSED_SHARE * len(found)
    }
    return {row.run.line for row in rows_ if day(row) in days}


def flawed(some: Iterable[Row]) -> dict[int, str]:
    """Rows that were not run as their columns say: line → why."""
    kept = list(some)
    found = dict.fromkeys(repeated(kept), "the same figures printed for two GPUs")
    found |= dict.fromkeys(guessed(kept), "a day's runs far faster than others alike: tokens guessed, unsaid")
    for row in kept:
        under_way = kept_under_way(row)
        if under_way is not None and under_way < LEAST_UNDER_WAY:
            found[row.run.line] = (
                f"under {LEAST_UNDER_WAY:.0%} of the stated users under way by Little's law: a slow client"
            )
        share = physics_share(row)
        if share is not None and share > CLOSEST_TO_PHYSICS:
            found[row.run.line] = (
                f"within {CLOSEST_TO_PHYSICS:.0%} of physics: cached prompts or guessed tokens"
            )
    return found


def slower_twins(some: Iterable[Row]) -> list[Row]:
    """The rows without those that a slower run of the same configuration contradicts.

    Vendors' tables mix runs with and without speculative decoding and do not say which is which.
    """
    twins = _twins(some)
    made: list[Row] = []
    for rows_ in twins.values():
        slowest = max((row.run.tpot_s or 0.0) for row in rows_)
        made += [row for row in rows_ if (row.run.tpot_s or slowest) >= APART * slowest]
    return made
