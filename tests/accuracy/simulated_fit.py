"""Fits what lies around the engines' steps in a simulation: `python -m tests.accuracy.simulated_fit`.

Writes profiles/calibrations/simulator.yaml, fitted on all groups of measured closed loops, and
simulated_folds.yaml, fitted on each half, for the tables. Step times are not touched: kernels and
serving_fit.py come first. An engine has three numbers: steps decided ahead, and the time around a request,
for models with and without routed experts; the first is known.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, Final

import yaml

from capplan import catalog
from capplan.results.predict import Unanswered
from capplan.sim.around import FILE, Around
from tests.accuracy import serving, simulated
from tests.accuracy.serving import Row

# What is known: each decides a step while the GPU runs the one before. vLLM: asynchronous scheduling, SGLang:
# overlap schedule, TensorRT-LLM: overlap scheduler, all on by default.
STEPS_AHEAD: Final = {"vllm": 1, "sglang": 1, "tensorrt-llm": 1}
# Simulated at the first of each, in ms; from there to the others TTFT changes by the difference alone. None
# is 0: a client's next request never comes in the moment of the answer.
FIRST_TOKEN_MS: Final = ((5, 2, 10), (20, 15, 30, 40), (80, 60, 100, 120, 150, 200))
KINDS: Final = {"dense": False, "experts": True}
# An error (ln) beyond this counts no more: the run was not what its columns say, or its kernels are not.
MOST: Final = {"TTFT": 0.6, "TPOT": 0.3}
# Of the closed loops, sorted by cell, lengths and users, every so many are simulated.
EVERY: Final = 3

Ratios = list[tuple[Row, float, float]]
"""(row, TTFT simulated in s, TPOT simulated over measured)."""


def fit_rows(some: Iterable[Row]) -> list[Row]:
    """The closed loops to fit on."""
    loops = [row for row in simulated.online(some) if row.run.mode == "online_closed_loop"]
    loops = [row for row in loops if row.run.ttft_s is not None and row.run.tpot_s is not None]
    loops.sort(key=lambda row: (row.cell, row.run.isl, row.run.osl, row.run.concurrency, row.run.line))
    return loops[::EVERY]


def simulate(rows: Iterable[Row], speed: Mapping[str, Any], own: Around) -> Ratios:
    """The rows under these numbers; those without an answer are left out."""
    made: Ratios = []
    for row in rows:
        subject = simulated.subject_of(row, speed, own)
        if isinstance(subject, Unanswered):
            continue
        found = simulated.simulate(row, subject)
        if found is not None and found.tpot_s is not None and row.run.tpot_s is not None:
            made.append((row, found.ttft_s, found.tpot_s / row.run.tpot_s))
    return made


def loss(some: Ratios, more_s: float) -> float:
    """Mean over cells of the errors (ln) of TTFT, `more_s` added to it, and TPOT."""
    cells: dict[Any, list[float]] = defaultdict(list)
    for row, ttft_s, tpot_ratio in some:
        assert row.run.ttft_s is not None
        first = abs(math.log((ttft_s + more_s) / row.run.ttft_s))
        cells[row.cell].append(min(MOST["TTFT"], first) + min(MOST["TPOT"], abs(math.log(tpot_ratio))))
    return fmean(map(fmean, cells.values())) if cells else 0.0


def fit_first_token(rows: list[Row], speed: Mapping[str, Any], steps_ahead: int) -> int | None:
    """The time around a request with the least loss, in ms; None without rows."""
    found: list[tuple[float, int]] = []
    for first, *others in FIRST_TOKEN_MS:
        some = simulate(rows, speed, Around(first_token_s=first * 1e-3, steps_ahead=steps_ahead))
        if some:
            found += [(loss(some, (more - first) * 1e-3), more) for more in (first, *others)]
    return min(found)[1] if found else None


def fitted(some: Iterable[Row], speed: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of all engines on some rows; of a kind without rows the mean of the other engines."""
    rows = fit_rows(some)
    made: dict[str, Any] = {
        engine: {"steps_ahead": ahead, "first_token_ms": {}} for engine, ahead in STEPS_AHEAD.items()
    }
    for kind, moe in KINDS.items():
        found = {
            engine: fit_first_token(
                [row for row in rows if row.run.engine == engine and row.moe == moe], speed, ahead
            )
            for engine, ahead in STEPS_AHEAD.items()
        }
        typical = round(fmean(value for value in found.values() if value is not None))
        for engine, value in found.items():
            made[engine]["first_token_ms"][kind] = typical if value is None else value
    return {"engines": made}


HEADER: Final = """\
# What lies around an engine's steps when it is simulated: python -m tests.accuracy.simulated_fit.
# steps_ahead: a step is decided so many steps before it starts. first_token_ms: from a client to the engine
# and back with the first token, beside all queues, for models with and without routed experts.
"""


def main() -> None:
    """Writes both files."""
    rows, _ = serving.rows()
    halves = [
        fitted(half, speed)
        for half, speed in zip(serving.halves(rows), simulated.folds(serving.FOLDS), strict=True)
    ]
    simulated.FOLDS.write_text(
        "# Fitted on each half of the groups alone: python -m tests.accuracy.simulated_fit.\n"
        + yaml.safe_dump(halves, sort_keys=False, width=110),
        encoding="utf-8",
    )
    data = {
        "schema": "capplan.simulator/1",
        "sources": [
            {
                "what": "closed loops in ai-dynamo/aiconfigurator's silicon_sample.csv",
                "licence": "Apache-2.0",
                "date": "2026-08-21",
            }
        ],
        **fitted(rows, catalog.read_yaml(catalog.PROFILES / "calibrations" / "serving.yaml")),
    }
    FILE.write_text(HEADER + yaml.safe_dump(data, sort_keys=False, width=110), encoding="utf-8")


if __name__ == "__main__":
    main()
