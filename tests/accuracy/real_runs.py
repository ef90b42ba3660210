"""Real vLLM runs replayed: the same requests at the same moments, through the simulator's own door.

Engine limits are those of the run, KV blocks too where it recorded them, else capplan's own plan; step times
are the shipped ones and were not fitted on these runs. Two more runs of the same benchmark are known by their
means alone (measured/serving.csv): they are replayed with the lengths of the recorded ones.
"""

import csv
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from capplan.simulate_answer import Simulation
from capplan.simulate_estimate import answer
from capplan.simulate_question import question_of
from capplan.simulate_run import Logs
from tests.accuracy import oracles

RUNS: Final = oracles.DATA / "vllm_runs"
STEADY_TARGET: Final = 0.06
"""Of tokens/s and TPOT."""
TTFT_TARGET: Final = 0.10
OVERLOADED: Final = 1.2
"""Utilisation from which the TTFT target holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A run of the same benchmark of which only means are published, line of measured/serving.csv in `line`.

    `lengths`: the recorded run with the same requests; each of `replicas` takes every so manyth one.
    """

    name: str
    line: int
    lengths: str
    model: str
    gpu: str
    replicas: int = 1


# The folder's GPU where the run's meta.json does not name it.
GPUS: Final = {"rtx4090_llama-3.1-8b": "rtx-4090", "rtxpro6000_qwen3-32b": "rtx-pro-6000-server"}
PUBLISHED: Final = (
    Published(
        name="rtxpro6000_llama-3.1-8b",
        line=6937,
        lengths="rtx4090_llama-3.1-8b",
        model="meta-llama/Llama-3.1-8B",
        gpu="rtx-pro-6000-server",
    ),
    Published(
        name="rtxpro6000_qwen3-30b-a3b",
        line=6935,
        lengths="rtxpro6000_qwen3-32b",
        model="Qwen/Qwen3-30B-A3B",
        gpu="rtx-pro-6000-server",
        replicas=2,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run; `target` is the largest error allowed, None: shown only."""

    name: str
    measured: float
    simulated: float
    target: float | None

    @property
    def error(self) -> float:
        """Relative error with its sign."""
        return self.simulated / self.measured - 1

    @property
    def missed(self) -> bool:
        """Whether it has a target and is beyond it."""
        return self.target is not None and abs(self.error) > self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A run and its replay."""

    name: str
    utilization: float
    figures: tuple[Figure, ...]
    requests: int
    preemptions: int

    @property
    def missed(self) -> tuple[Figure, ...]:
        """Figures beyond their target."""
        return tuple(figure for figure in self.figures if figure.missed)


def recorded() -> tuple[str, ...]:
    """Folders of runs with a row a request."""
    return tuple(sorted(path.parent.name for path in RUNS.glob("*/requests.jsonl")))


def rows_of(name: str) -> list[dict[str, Any]]:
    """A run's requests by the moment at which they stood in the engine's queue."""
    with (RUNS / name / "requests.jsonl").open(encoding="utf-8") as stream:
        return sorted(map(json.loads, stream), key=lambda row: float(row["queued_ts"]))


def limits_of(name: str) -> dict[str, Any]:
    """The run's model, engine limits and KV blocks, as fields of a question."""
    meta = json.loads((RUNS / name / "meta.json").read_text(encoding="utf-8"))
    given, kv = meta["engine_kwargs"], meta.get("kv_cache", {})
    fields = {
        "model": meta["model"],
        "gpu": GPUS[name],
        "engine_version": meta["vllm_version"],
        "tp": given["tensor_parallel_size"],
        "max_num_seqs": given["max_num_seqs"],
        "max_num_batched_tokens": given["max_num_batched_tokens"],
        "max_model_len": given["max_model_len"],
        "gpu_memory_utilization": kv.get("gpu_memory_utilization"),
        "kv_blocks": kv.get("num_gpu_blocks"),
    }
    return {key: value for key, value in fields.items() if value is not None}


def simulated(
    rows: list[dict[str, Any]], clock: str, folder: Path, **fields: Any
) -> tuple[Simulation, dict[str, Any], dict[str, Any]]:
    """The requests of `rows`, by their moments of `clock`: the answer, its request log and its step log."""
    trace, requests, steps = (folder / name for name in ("trace.csv", "requests.csv", "steps.csv"))
    with trace.open("w", encoding="utf-8", newline="") as stream:
        write = csv.writer(stream).writerow
        write(("arrival_s", "prompt_tokens", "output_tokens"))
        first = min(row[clock] for row in rows)
        for row in sorted(rows, key=lambda row: float(row[clock])):
            write((row[clock] - first, row["input_toks"], row["output_toks"]))
    made = answer(question_of(trace=trace, **fields), files=Logs(requests=requests, steps=steps))
    return (
        made,
        columns(requests, "arrival_s", "first_token_s", "done_s", "output_tokens"),
        columns(steps, "end_s", "kv_blocks_used", "kv_blocks_total"),
    )


@cache
def replay(name: str, folder: Path) -> Replayed:
    """A recorded run and its replay; `folder` takes the trace."""
    import numpy as np

    rows = rows_of(name)
    made, got, steps = simulated(rows, "queued_ts", folder, **limits_of(name))
    want = {
        "arrival_s": np.array([row["queued_ts"] for row in rows]),
        "first_token_s": np.array([row["first_token_ts"] for row in rows]),
        "done_s": np.array([row["last_token_ts"] for row in rows]),
        "output_tokens": np.array([row["output_toks"] for row in rows]),
    }
    load = made.load.utilization
    ttft = TTFT_TARGET if load > OVERLOADED else None
    targets: dict[str, float | None] = {
        "tokens/s": STEADY_TARGET,
        "TPOT mean, ms": STEADY_TARGET,
        "TPOT P50, ms": STEADY_TARGET,
    }
    targets |= dict.fromkeys(("TTFT mean, s", "TTFT P50, s", "TTFT P90, s"), ttft)
    measured, ours = figures_of(want), figures_of(got)
    found = [
        Figure(name=what, measured=measured[what], simulated=ours[what], target=targets.get(what))
        for what in measured
    ]
    usage = kv_usage(name)
    if usage is not None:
        used = steps["kv_blocks_used"] / steps["kv_blocks_total"]
        own = sampled(steps["end_s"], used, len(usage))
        found.append(
            Figure(name="KV usage, mean", measured=usage.mean(), simulated=float(own.mean()), target=None)
        )
    return Replayed(
        name=name,
        utilization=load,
        figures=tuple(found),
        requests=len(got["arrival_s"]),
        preemptions=made.summary.preemptions,
    )


def columns(log: Path, *names: str) -> dict[str, Any]:
    """Some columns of a log, as arrays of numbers."""
    import numpy as np

    with log.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    return {name: np.array([float(row[name]) for row in rows]) for name in names}


def figures_of(column: dict[str, Any]) -> dict[str, float]:
    """Tokens per second, TPOT and TTFT of some requests; TTFT from the engine's queue on."""
    import numpy as np

    ttft = column["first_token_s"] - column["arrival_s"]
    several = column["output_tokens"] > 1
    tpot = ((column["done_s"] - column["first_token_s"])[several]) / (column["output_tokens"][several] - 1)
    took = column["done_s"].max() - column["arrival_s"].min()
    return {
        "tokens/s": float(column["output_tokens"].sum() / took),
        "TPOT mean, ms": 1e3 * float(tpot.mean()),
        "TPOT P50, ms": 1e3 * float(np.percentile(tpot, 50)),
        "TTFT mean, s": float(ttft.mean()),
        "TTFT P50, s": float(np.percentile(ttft, 50)),
        "TTFT P90, s": float(np.percentile(ttft, 90)),
    }


def kv_usage(name: str) -> Any:
    """The recorded KV usage, second by second, as a fraction; None where the run recorded none."""
    import numpy as np

    with (RUNS / name / "timeseries.csv").open(encoding="utf-8", newline="") as stream:
        usage = np.array([float(row["kv_cache_pct"]) / 100 for row in csv.DictReader(stream)])
    return usage if usage.any() else None


def sampled(end_s: Any, usage: Any, seconds: int) -> Any:
    """The usage of the last step before each whole second; nothing after the end."""
    import numpy as np

    at = np.arange(1, seconds + 1)
    place = np.searchsorted(end_s, at, side="right") - 1
    return np.where(at <= end_s[-1], usage[np.maximum(place, 0)], 0.0)


@cache
def published(run: Published, folder: Path) -> Replayed:
    """A run known by its means, replayed by the moments its clients sent the requests."""
    with (oracles.DATA / "measured" / "serving.csv").open(encoding="utf-8", newline="") as stream:
        row = next(row for number, row in enumerate(csv.DictReader(stream), 2) if number == run.line)
    rows = sorted(rows_of(run.lengths), key=lambda row: float(row["arrival_time"]))[:: run.replicas]
    fields = {
        "model": run.model,
        "gpu": run.gpu,
        "engine_version": row["engine_version"],
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
    }
    made, got, _ = simulated(rows, "arrival_time", folder, **fields)
    ours = figures_of(got)
    measured = {
        "tokens/s": float(row["output_tok_s"]) / run.replicas,
        "TPOT mean, ms": float(row["tpot_ms"]),
        "TTFT mean, s": float(row["ttft_ms"]) / 1e3,
    }
    return Replayed(
        name=run.name,
        utilization=made.load.utilization,
        figures=tuple(
            Figure(name=what, measured=measured[what], simulated=ours[what], target=None) for what in measured
        ),
        requests=len(got["arrival_s"]),
        preemptions=made.summary.preemptions,
    )


def everything(folder: Path) -> tuple[Replayed, ...]:
    """All runs: recorded ones, then those known by their means."""
    return (
        *(replay(name, folder) for name in recorded()),
        *(published(run, folder) for run in PUBLISHED),
    )


def lines(runs: Iterable[Replayed]) -> list[str]:
    """The README's table: every figure of every run, misses included."""
    made = [
        "**Real vLLM runs replayed** (casys-kaist/LLMServingSim, vLLM 0.19.0, 300 requests in overload); no "
        "number was fitted on them:",
        "",
        "| run | figure | measured | simulated | error | target |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        for figure in run.figures:
            target = "shown only" if figure.target is None else f"≤ {100 * figure.target:.0f} %"
            error = f"{100 * figure.error:+.1f} %" + (" **missed**" if figure.missed else "")
            made.append(
                f"| {run.name} | {figure.name} | {figure.measured:,.4g} | {figure.simulated:,.4g} | {error} "
                f"| {target} |"
            )
    return made


def readme_lines() -> list[str]:
    """The same, of all runs."""
    with tempfile.TemporaryDirectory() as name:
        return lines(everything(Path(name)))


if __name__ == "__main__":
    print("\n".join(readme_lines()))
