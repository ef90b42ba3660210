"""Fits what engines add to their kernels, on half of the measured closed loops.

`python -m tests.accuracy.serving_fit` writes profiles/calibrations/serving.yaml. Kernels are not touched:
they were fitted before, on kernels. An engine has two numbers of its own, and three (SGLang: four) on each
GPU architecture.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Any, Final

from capplan.engine_speed import FILE, older
from capplan.formulas.serving import Served
from capplan.results.predict import Prediction, predict
from tests.accuracy import serving
from tests.accuracy.serving import Row

# What is known of an engine: whether prompts stall decoding, the share of the output that must fit first, and
# since when it schedules the next step while the GPU runs one (vLLM's asynchronous scheduling).
KNOWN: Final[dict[str, dict[str, Any]]] = {
    "vllm": {"prefill_first": False, "reserved": 0.5, "overlapped_since": "0.14"},
    "sglang": {"prefill_first": True, "reserved": 0.5},
    "tensorrt-llm": {"prefill_first": False, "reserved": 1.0},
}
FUSED: Final = (0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15)
SEQUENCE_US: Final = (0, 5, 10, 15, 20, 30, 40, 60)
WAIT_STEPS: Final = (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)
BURSTS: Final = (1, 1.5, 2, 2.5, 3, 4, 6)
ALONE_STEP_US: Final = (0, 1000, 2000)
ALONE_SEQUENCE_US: Final = (0, 15, 30, 45, 60, 80)
NOTHING: Final = {"step_us": 0, "sequence_us": 0}
POLL_STEPS: Final = (1, 10, 20, 30)
AROUND_MS: Final = (0, 5, 10, 15, 20, 30, 40, 50, 60, 80, 100, 120, 150, 200)
# An error (ln) beyond this counts no more: the run was not what its columns say, or its kernels are not.
MOST: Final = {"TPOT": 0.3, "throughput": 0.3, "TTFT": 0.6, "older": 0.8}
# A number leaves its neutral value only for this much less mean error.
EARNED: Final = 0.02
# How much wider a band is where engine, GPU or kernels were not measured: both ends to this power.
DOUBTED: Final = 1.5


def fit_rows(some: Iterable[Row]) -> list[Row]:
    """Closed loops and offline runs of cells large enough to tell, without those not run as they say."""
    rows = [row for row in some if row.run.mode in ("online_closed_loop", "offline_max") and row.scored]
    wrong = serving.flawed(rows)
    rows = serving.slower_twins(row for row in rows if row.run.line not in wrong)
    cells: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in rows:
        cells[row.cell] += 1
    return [row for row in rows if cells[row.cell] >= serving.LEAST_ROWS]


def numbers(
    engine: str,
    *,
    families: Mapping[str, Mapping[str, float]],
    wait_steps: float = 0,
    bursts: float = 0,
    alone: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The file's content for one engine."""
    neutral = {"fused": 1.0, "step_us": 0, "sequence_us": 0, "first_token_ms": 0, "poll_steps": 1}
    made = {name: {**neutral, **own} for name, own in families.items()}
    return {
        "engines": {
            engine: {
                **KNOWN[engine],
                "wait_steps": wait_steps,
                "bursts": bursts,
                **({"alone": alone or NOTHING} if "overlapped_since" in KNOWN[engine] else {}),
                "families": {**made, "other": made.get("other", neutral)},
            }
        },
        "error": {"dense": {}, "experts": {}, "doubted": DOUBTED},
    }


def _by_cell(errors: Iterable[tuple[Row, float]], most: float) -> float:
    """Mean over cells of the mean error, each at most `most`."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, error in errors:
        found[row.cell].append(min(most, abs(error)))
    return mean(mean(errors) for errors in found.values()) if found else 0.0


def fit_alone(
    rows: list[Row], engine: str, families: dict[str, dict[str, float]], **shared: Any
) -> dict[str, float]:
    """Host time of a step and of a sequence where scheduling and GPU take turns: versions before."""

    def loss(step_us: float, sequence_us: float) -> float:
        own = {**shared, "alone": {"step_us": step_us, "sequence_us": sequence_us}}
        made, _ = serving.answers(rows, numbers(engine, families=families, **own))
        logs = [(one.row, math.log(one.ratio)) for one in made if one.figure in ("TPOT", "throughput")]
        return _by_cell(logs, MOST["older"])

    _, step_us, sequence_us = min(
        (loss(*pair) + EARNED * sum(value != 0 for value in pair), *pair)
        for pair in itertools.product(ALONE_STEP_US, ALONE_SEQUENCE_US)
    )
    return {"step_us": step_us, "sequence_us": sequence_us}


def fit_tpot(rows: list[Row], engine: str, **shared: Any) -> dict[str, float]:
    """The kernels' share that fusion leaves, and host time of a sequence, on one architecture."""

    def loss(fused: float, sequence_us: float) -> float:
        own = {"other": {"fused": fused, "sequence_us": sequence_us}}
        made, _ = serving.answers(rows, numbers(engine, families=own, **shared))
        logs = [(one.row, math.log(one.ratio)) for one in made if one.figure in ("TPOT", "throughput")]
        return _by_cell(logs, MOST["TPOT"])

    best, chosen = loss(1.0, 0), (1.0, 0.0)
    for fused, sequence_us in itertools.product(FUSED, SEQUENCE_US):
        price = EARNED * ((fused != 1.0) + (sequence_us != 0))
        found = loss(fused, sequence_us) + price
        if found < best:
            best, chosen = found, (fused, float(sequence_us))
    return {"fused": chosen[0], "sequence_us": chosen[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The terms of a row's TTFT, of which the numbers are multiples; seconds."""

    row: Row
    through: float
    decode: float
    start: float
    queue: float
    measured: float

    def ttft_s(self, wait: float, bursts: float, poll: float, around: float) -> float:
        """As formulas/serving has it."""
        steady = self.through * (1 + wait) + (poll - 1) / 2 * self.decode
        return around + self.queue + steady + bursts / 10 * max(0.0, self.start - steady)


def firsts(rows: Iterable[Row], speed: Mapping[str, Any]) -> list[First]:
    """The TTFT terms of rows; `speed` has one burst and no wait."""
    made: list[First] = []
    for row in rows:
        answer = predict(row.run, row.subject, speed=speed)
        if isinstance(answer, Prediction) and row.run.ttft_s is not None:
            own: Served = answer.served
            made.append(
                First(
                    row=row,
                    through=own.prefill_s,
                    decode=own.decode_step_s,
                    start=own.prefill_s + 10 * own.start_s,
                    queue=own.queue_s,
                    measured=row.run.ttft_s,
                )
            )
    return made


def fit_ttft(
    rows: list[Row],
    engine: str,
    families: dict[str, dict[str, float]],
    alone: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """What an engine's prompts wait for; sets first_token_ms and poll_steps of each of `families`."""
    polls = POLL_STEPS if KNOWN[engine]["prefill_first"] else (1,)
    terms: dict[str, list[First]] = defaultdict(list)
    for term in firsts(rows, numbers(engine, families=families, bursts=1, alone=alone)):
        terms[term.row.subject.gpu.architecture].append(term)
    sizes = {family: len({term.row.cell for term in some}) for family, some in terms.items()}
    best, chosen = math.inf, {"wait_steps": 0.0, "bursts": 1.0}
    for wait, bursts in itertools.product(WAIT_STEPS, BURSTS):
        own: dict[str, tuple[float, float, float]] = {
            family: min(
                (_ttft_loss(some, wait, bursts, poll, around / 1e3), float(poll), float(around))
                for poll in polls
                for around in AROUND_MS
            )
            for family, some in terms.items()
        }
        found = sum(own[family][0] * sizes[family] for family in own) / sum(sizes.values())
        if found < best:
            best = found
            chosen = {"wait_steps": float(wait), "bursts": float(bursts)}
            for family, (_, poll, around) in own.items():
                families[family].update(poll_steps=poll, first_token_ms=around)
    return chosen


def _ttft_loss(terms: list[First], wait: float, bursts: float, poll: float, around: float) -> float:
    logs = [(term.row, math.log(term.ttft_s(wait, bursts, poll, around) / term.measured)) for term in terms]
    return _by_cell(logs, MOST["TTFT"])


def fit_engine(rows: list[Row], engine: str, older: list[Row]) -> dict[str, Any]:
    """All numbers of one engine, on the rows to fit on; `older` are runs of versions that take turns."""
    by_family: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_family[row.subject.gpu.architecture].append(row)
    families: dict[str, dict[str, float]] = {name: {} for name in by_family}
    shared: dict[str, Any] = {}
    for _ in range(2):
        for name, some in by_family.items():
            families[name].update(fit_tpot(some, engine, **shared))
        if older:
            shared["alone"] = fit_alone(older, engine, families, **shared)
        shared |= fit_ttft(rows, engine, families, shared.get("alone"))
    # A family without runs takes the plainest numbers: no fusion beyond the kernels', the mean time around.
    served = [own for own in families.values() if "first_token_ms" in own]
    families["other"] = {
        "fused": 1.0,
        "sequence_us": round(mean(own["sequence_us"] for own in served)),
        "first_token_ms": round(mean(own["first_token_ms"] for own in served)),
    }
    for own in families.values():
        own.setdefault("first_token_ms", families["other"]["first_token_ms"])
    made: dict[str, Any] = numbers(engine, families=families, **shared)["engines"][engine]
    return made


def errors(reported: Iterable[Row], speed: Mapping[str, Any]) -> dict[str, Any]:
    """Quantiles of measured over predicted, on the rows not fitted on."""
    made, _ = serving.answers(reported, speed)
    found: dict[str, Any] = {}
    for kind, moe in (("dense", False), ("experts", True)):
        own = [one for one in made if one.row.moe == moe]
        found[kind] = {
            "ttft": _quantiles([one for one in own if one.figure == "TTFT"]),
            "tpot": _quantiles([one for one in own if one.figure == "TPOT"]),
            "e2e": _quantiles([one for one in own if one.figure == "E2E"]),
            "throughput": _quantiles([one for one in own if one.figure == "throughput"]),
        }
    return found


def _quantiles(some: list[serving.Compared]) -> dict[str, float]:
    tenths = quantiles([1 / one.ratio for one in some], n=10, method="inclusive")
    return {
        "p10": round(tenths[0], 3),
        "p50": round(tenths[4], 3),
        "p90": round(tenths[8], 3),
        "runs": len(some),
    }


def fitted() -> dict[str, Any]:
    """The content of the file."""
    rows, _ = serving.rows()
    fit, reported = serving.halves(rows)
    loops = fit_rows(fit)
    made: dict[str, Any] = {"engines": {}}
    for engine in KNOWN:
        own = [row for row in loops if row.run.engine == engine]
        made["engines"][engine] = fit_engine(own, engine, _older_runs(fit, engine))
    made["error"] = {"dense": {}, "experts": {}, "doubted": DOUBTED}
    made["error"] |= errors([row for row in reported if row.scored], made)
    return made


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
# An engine: wait_steps and bursts say how prompts wait. An engine on a GPU architecture: the share of the
# kernels' time that fusion leaves, host time of a sequence in a step, time around the engine before the first
# token, steps between looks for new requests. error: measured / predicted on groups that were not fitted on.
"""


def main() -> None:
    """Writes the file."""
    import yaml

    data = {
        "schema": "capplan.serving/1",
        "sources": [
            {
                "what": "closed loops in ai-dynamo/aiconfigurator's silicon_sample.csv",
                "licence": "Apache-2.0",
                "date": "2026-08-21",
            }
        ],
        **fitted(),
    }
    FILE.write_text(HEADER + yaml.safe_dump(data, sort_keys=False, width=110), encoding="utf-8")


if __name__ == "__main__":
    main()
