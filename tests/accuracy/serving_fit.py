"""Fits what engines add to their kernels, on measured closed loops: all groups for use, halves to report.

`python -m tests.accuracy.serving_fit` writes profiles/calibrations/serving.yaml. Kernels are not touched:
they were fitted before, on kernels. An engine has one number of its own, and five on each family of GPUs.
"""

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import mean, median, quantiles
from typing import Any, Final

from capplan.engine_speed import FILE, family_of, older
from capplan.results.predict import Unanswered, layout_of
from tests.accuracy import serving
from tests.accuracy.serving import Row

# What is known of an engine: whether prompts stall decoding, the share of the output that must fit first, and
# since when it schedules the next step while the GPU runs one (vLLM's asynchronous scheduling).
KNOWN: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"prefill_first": False, "reserved": 0.5, "overlapped_since": "0.14"},
    "sglang": {"prefill_first": True, "reserved": 0.5},
    "tensorrt-llm": {"prefill_first": False, "reserved": 1.0},
}
# What is tried for each number of an engine on an architecture, the neutral value first, then ever farther.
TRIED: Final[dict[str, tuple[float, ...]]] = {
    "fused": (1.0, 0.95, 1.05, 0.9, 1.1, 0.85, 1.15, 0.8),
    "prompts": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5),
    "sequence_us": (0, 5, 10, 15, 20, 30, 40, 60),
    "first_token_ms": (0, 5, 10, 15, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200),
}
UNEVEN: Final = (0, 0.1, 0.2, 0.3, 0.4, 0.5)
TOGETHER: Final = (1, 1.5, 2, 2.5, 3, 4)
ALONE_STEP_US: Final = (0, 1000, 2000)
ALONE_SEQUENCE_US: Final = (0, 15, 30, 45, 60, 80)
NOTHING: Final = {"step_us": 0.0, "sequence_us": 0.0}
# An error (ln) beyond this counts no more: the run was not what its columns say, or its kernels are not.
MOST: Final = {"TPOT": 0.3, "throughput": 0.3, "TTFT": 0.6}
OLDER: Final = 0.8
MOST_ROWS: Final = 40
# A family of fewer runs takes the numbers of all others.
LEAST_ROWS: Final = 20
# How much a figure's error weighs beside the others': TTFT spreads twice as much.
WEIGHT: Final = {"TPOT": 1.0, "throughput": 1.0, "TTFT": 0.5}
# A number goes one step farther from its neutral value only for this much less mean error.
EARNED: Final = 0.01
PRICED: Final = ("fused", "prompts", "sequence_us")
# Rounds over the numbers, each in turn with the others held.
ROUNDS: Final = 3
FIGURES: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "throughput": "throughput"}
# How much wider a band is where engine, GPU or kernels were not measured: both ends to this power.
DOUBTED: Final = 1.5


def fit_rows(some: Iterable[Row]) -> list[Row]:
    """Closed loops and offline runs of cells large enough to tell, without those not run as they say."""
    rows = [row for row in some if row.run.mode in ("online_closed_loop", "offline_max") and row.scored]
    wrong = serving.flawed(rows)
    rows = serving.slower_twins(row for row in rows if row.run.line not in wrong)
    kept: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kept[row.cell].append(row)
    # Large cells by every second row, every third …: each cell counts the same, and the fit stays quick.
    return [
        row
        for own in kept.values()
        if len(own) >= serving.LEAST_ROWS
        for row in own[:: -(-len(own) // MOST_ROWS)]
    ]


Numbers = dict[str, float]
_NO_ERRORS: Final = {"dense": {}, "experts": {}, "doubted": DOUBTED}


def numbers(
    engine: str,
    *,
    families: Mapping[str, Mapping[str, float]],
    together: float = 2,
    alone: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The file's content for one engine."""
    neutral = {name: values[0] for name, values in TRIED.items()} | {"step_us": 0, "uneven": 0}
    made = {name: {**neutral, **own} for name, own in families.items()}
    return {
        "engines": {
            engine: {
                **KNOWN[engine],
                "together": together,
                **({"alone": alone or NOTHING} if "overlapped_since" in KNOWN[engine] else {}),
                "families": {**made, "other": made.get("other", neutral)},
            }
        },
        "error": _NO_ERRORS,
    }


def _by_cell(errors: Iterable[tuple[Row, float]]) -> float:
    """Mean over cells of the mean error."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in errors:
        found[row.cell].append(error)
    return mean(mean(errors) for errors in found.values()) if found else 0.0


def loss(rows: Iterable[Row], speed: Mapping[str, Any]) -> float:
    """Errors (ln) of TPOT, throughput and TTFT, each at most MOST and weighed, added up."""
    made, _ = serving.answers(rows, speed)
    return sum(
        weight
        * _by_cell(
            (one.row, min(MOST[figure], abs(math.log(one.ratio)))) for one in made if one.figure == figure
        )
        for figure, weight in WEIGHT.items()
    )


def told_by_kernels(rows: list[Row], engine: str) -> list[Row]:
    """The rows of cells that kernels alone come near to; others tell of their kernels, not of the engine."""
    made, _ = serving.answers(rows, numbers(engine, families={}))
    logs: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in made:
        if one.figure in ("TPOT", "throughput"):
            logs[one.row.cell].append(math.log(one.ratio))
    return [row for row in rows if row.cell in logs and abs(median(logs[row.cell])) < MOST["TPOT"]]


def fit_family(rows: list[Row], engine: str, start: Numbers, **shared: Any) -> Numbers:
    """An engine's numbers on one architecture: each in turn, until none moves."""
    found = dict(start)

    def price(tried: Numbers) -> float:
        moved = sum(TRIED[name].index(tried[name]) for name in PRICED if name in tried)
        speed = numbers(engine, families={"other": tried}, **shared)
        return loss(rows, speed) + EARNED * moved

    best = price(found)
    for _ in range(ROUNDS):
        before = dict(found)
        for name, values in TRIED.items():
            for value in values:
                tried = {**found, name: value}
                if tried != found and (at := price(tried)) < best:
                    best, found = at, tried
        if found == before:
            break
    return found


def fit_alone(rows: list[Row], engine: str, families: dict[str, Numbers], together: float) -> Numbers:
    """Host time of a step and of a sequence where scheduling and GPU take turns: versions before."""

    def price(step_us: float, sequence_us: float) -> float:
        alone = {"step_us": step_us, "sequence_us": sequence_us}
        speed = numbers(engine, families=families, together=together, alone=alone)
        made, _ = serving.answers(rows, speed)
        logs = (
            (one.row, min(OLDER, abs(math.log(one.ratio))))
            for one in made
            if one.figure in ("TPOT", "throughput")
        )
        return _by_cell(logs) + EARNED * sum(value != 0 for value in alone.values())

    _, step_us, sequence_us = min(
        (price(*pair), *pair) for pair in itertools.product(ALONE_STEP_US, ALONE_SEQUENCE_US)
    )
    return {"step_us": step_us, "sequence_us": sequence_us}


def fit_together(rows: list[Row], engine: str, families: dict[str, Numbers], **shared: Any) -> float:
    """How many users with equal requests stay in one step."""
    return min(
        (loss(rows, numbers(engine, families=families, together=value, **shared)), value)
        for value in TOGETHER
    )[1]


def fit_uneven(rows: list[Row], engine: str, own: Mapping[str, Any]) -> None:
    """How much longer steps are on many attention ranks, into each family of the file's content `own`.

    All runs with such ranks count, however far off: what they lack is not the kernels'.
    """
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        layout = layout_of(row.run, row.subject)
        if not isinstance(layout, Unanswered) and layout[0].dp > 1:
            by_family[family_of(row.subject.gpu)].append(row)
    for name, some in by_family.items():
        family = own["families"].get(name)
        if family is None:
            continue
        found: list[tuple[float, float]] = []
        for value in UNEVEN:
            family["uneven"] = value
            made, _ = serving.answers(some, {"engines": {engine: own}, "error": _NO_ERRORS})
            logs = (
                (one.row, abs(math.log(one.ratio))) for one in made if one.figure in ("TPOT", "throughput")
            )
            found.append((_by_cell(logs), value))
        family["uneven"] = min(found)[1]


def fit_engine(rows: list[Row], engine: str, older: list[Row]) -> dict[str, Any]:
    """All numbers of one engine, on the rows to fit on; `older` are runs of versions that take turns."""
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_family[family_of(row.subject.gpu)].append(row)
    by_family = {name: some for name, some in by_family.items() if len(some) >= LEAST_ROWS}
    families: dict[str, Numbers] = {name: {} for name in by_family}
    together, alone = 2.0, dict(NOTHING)
    for _ in range(2):
        for name, some in by_family.items():
            families[name] = fit_family(some, engine, families[name], together=together, alone=alone)
        if older:
            alone = fit_alone(older, engine, families, together)
        if not KNOWN[engine]["prefill_first"]:
            together = fit_together(rows, engine, families, alone=alone)
    # A family without runs takes the plainest numbers: no fusion beyond the kernels', the mean time around.
    families["other"] = {
        name: round(mean(own.get(name, 0) for own in families.values()))
        for name in ("sequence_us", "first_token_ms")
    }
    made: dict[str, Any] = numbers(engine, families=families, together=together, alone=alone)
    return dict(made["engines"][engine])


def errors(rows: list[Row]) -> dict[str, Any]:
    """Quantiles of measured over predicted, each row predicted by numbers fitted on the other half."""
    first = {row.run.line for row in serving.halves(rows)[0]}
    kept = [row for row in rows if row.scored]
    wrong = serving.flawed(kept)
    made = [one for one in serving.held_out(rows) if one.row.scored and one.row.run.line not in wrong]
    found: dict[str, Any] = {}
    for kind, moe in (("dense", False), ("experts", True)):
        found[kind] = {}
        for name, figure in FIGURES.items():
            own = [one for one in made if one.row.moe == moe and one.figure == figure]
            sides = [
                [1 / one.ratio for one in own if (one.row.run.line in first) == side]
                for side in (True, False)
            ]
            found[kind][name] = _quantiles(sides)
    return found


def _quantiles(halves: list[list[float]]) -> dict[str, float]:
    """The 10th and 90th percentile of the half that spreads more: groups differ, and a new one is another."""
    tenths = [quantiles(half, n=10, method="inclusive") for half in halves]
    return {
        "p10": round(min(found[0] for found in tenths), 3),
        "p50": round(median(itertools.chain(*halves)), 3),
        "p90": round(max(found[8] for found in tenths), 3),
        "runs": sum(map(len, halves)),
    }


def fitted(rows: list[Row]) -> dict[str, Any]:
    """What is fitted on some rows: the file's content without its errors."""
    loops = fit_rows(rows)
    made: dict[str, Any] = {"engines": {}}
    for engine in KNOWN:
        own = [row for row in loops if row.run.engine == engine]
        near = told_by_kernels(own, engine)
        made["engines"][engine] = fit_engine(near, engine, _older_runs(rows, engine))
        fit_uneven(own, engine, made["engines"][engine])
    # Ranks wait for one another in every engine: one without such runs takes what others on its GPUs show.
    families = [own["families"] for own in made["engines"].values()]
    for own in families:
        for name, found in own.items():
            shown = [other[name]["uneven"] for other in families if name in other]
            found["uneven"] = found["uneven"] or max(shown)
    made["error"] = {"dense": {}, "experts": {}, "doubted": DOUBTED}
    return made


def verified(rows: list[Row], engine: str) -> str:
    """The oldest to the newest version of the runs that an engine's numbers were fitted on: "0.9–0.19"."""
    used = [row for row in fit_rows(rows) if row.run.engine == engine] + _older_runs(rows, engine)
    stated = (re.match(r"(\d+)\.(\d+)", row.run.engine_version or "") for row in used)
    found = sorted({(int(match[1]), int(match[2])) for match in stated if match is not None})
    ends = (f"{major}.{minor}" for major, minor in dict.fromkeys((found[0], found[-1])))
    return "–".join(ends)


def _older_runs(some: Iterable[Row], engine: str) -> list[Row]:
    """Runs of an engine's versions that schedule and compute in turn."""
    since = KNOWN[engine].get("overlapped_since", "")
    rows = [row for row in some if row.run.engine == engine and row.scored]
    wrong = serving.flawed(rows)
    return [
        row
        for row in rows
        if row.run.engine_version is not None
        and older(row.run.engine_version, since)
        and row.run.line not in wrong
    ]


HEADER: Final = """\
# What engines add to their kernels, fitted on public serving runs: python -m tests.accuracy.serving_fit.
# An engine: `verified`, the oldest to the newest version of the runs fitted. prefill_first: prompts stall
# decoding, instead of sharing its steps. reserved: the share of the output for which KV memory must be free
# before a request starts. overlapped_since: the version from which on the next step is scheduled while the
# GPU runs one; `alone` is host time of a step and of a sequence, added before it. `together` users with equal
# requests stay in one step.
# An engine on a family of GPUs (architecture and compute capability): the share of the kernels' time that
# fusion leaves (never less than physics), how much longer steps of prompts take, how much longer steps are on
# ever more data-parallel attention ranks (uneven), host time of a sequence in a step, time around the engine
# before the first token.
# error: measured / predicted, each group by numbers fitted on the other half of the groups. doubted: where
# engine, version, GPU, kernels or a shape were not measured, both ends of a band to this power.
"""


def main() -> None:
    """Writes the file, fitted on all groups, and what each half of the groups gives, for the tables."""
    import yaml

    rows, _ = serving.rows()
    serving.FOLDS.write_text(
        "# Fitted on each half of the groups alone: python -m tests.accuracy.serving_fit.\n"
        + yaml.safe_dump([fitted(half) for half in serving.halves(rows)], sort_keys=False, width=110),
        encoding="utf-8",
    )
    shipped = fitted(list(rows))
    shipped["error"] |= errors(list(rows))
    for engine, own in shipped["engines"].items():
        shipped["engines"][engine] = {"verified": verified(list(rows), engine), **own}
    data = {
        "schema": "capplan.serving/1",
        "sources": [
            {
                "what": "closed loops in ai-dynamo/aiconfigurator's silicon_sample.csv",
                "licence": "Apache-2.0",
                "date": "2026-08-21",
            }
        ],
        **shipped,
    }
    FILE.write_text(
        HEADER + yaml.safe_dump(data, sort_keys=False, width=110, allow_unicode=True), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
