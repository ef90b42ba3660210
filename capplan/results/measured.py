"""A table of measured serving runs (CSV) → records in SI units; a row that cannot be used says why.

Columns: source, engine, engine_version, model, gpu, n_gpu, tp, pp, weight_dtype, kv_dtype, isl, osl,
concurrency_or_batch, request_rate, output_tok_s, total_tok_s, ttft_ms, tpot_ms, e2e_ms, mode, notes.
An empty cell is "not published".
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from capplan.errors import shown
from capplan.results.csv_table import BadRowError, read_rows
from capplan.results.notes import RunNotes, read_notes

COLUMNS: Final = (
    "source", "engine", "engine_version", "model", "gpu", "n_gpu", "tp", "pp", "weight_dtype", "kv_dtype",
    "isl", "osl", "concurrency_or_batch", "request_rate", "output_tok_s", "total_tok_s", "ttft_ms",
    "tpot_ms", "e2e_ms", "mode", "notes",
)  # fmt: skip
"""What a table has, in any order; others are an error, for a misspelt one would be lost."""

MODES: Final = (
    "offline_max", "online", "online_closed_loop", "online_all_at_once", "static_batch",
    "disagg_closed_loop", "mlperf_offline", "mlperf_server", "mlperf_interactive",
)  # fmt: skip

ENGINES: Final = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "tensorrt-llm",
    "tensorrt-llm": "tensorrt-llm",
    "llama.cpp": "llama.cpp",
    "tgi": "tgi",
}
"""Names tables give the engines capplan knows; any other name stands for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One measured run. Seconds and tokens per second; throughputs are of the whole deployment.

    `isl`, `osl` are tokens a request (means where they vary). `concurrency` is users at once, or the batch
    of a static one. `request_per_s` is None for a closed loop, inf where all requests came at once.
    `statistic` says what `ttft_s` and `tpot_s` are.
    """

    line: int
    source: str
    engine: str
    engine_version: str | None
    model: str
    gpu: str
    n_gpu: int | None
    tp: int | None
    pp: int | None
    weight_dtype: str | None
    kv_dtype: str | None
    isl: float | None
    osl: float | None
    concurrency: float | None
    request_per_s: float | None
    output_token_per_s: float | None
    total_token_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    mode: str
    statistic: str
    notes: RunNotes

    @property
    def group(self) -> tuple[str, str, str]:
        """Engine, GPU and model as written: what is held out together."""
        return self.engine, self.gpu, self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTable:
    """The runs of a table, and the rows that are none: line → reason."""

    runs: tuple[MeasuredRun, ...]
    rejected: Mapping[int, str] = field(default_factory=dict)

    @property
    def reasons(self) -> Counter[str]:
        """How many rows each reason rejected."""
        return Counter(self.rejected.values())


def read_measured(path: Path) -> MeasuredTable:
    """The runs of a CSV file. Errors: InputError for a file that is no such table; never for a row."""
    runs, rejected = read_rows(path, COLUMNS, _run)
    return MeasuredTable(runs=runs, rejected=rejected)


def _run(cells: Mapping[str, str], line: int) -> MeasuredRun:
    mode = cells["mode"]
    if mode not in MODES:
        raise BadRowError(f"unknown mode {shown(mode)}")
    for name in ("engine", "model", "gpu"):
        if not cells[name]:
            raise BadRowError(f"no {name}")
    notes = read_notes(cells["notes"])
    run = MeasuredRun(
        line=line,
        source=cells["source"],
        engine=ENGINES.get(cells["engine"].lower(), cells["engine"]),
        engine_version=cells["engine_version"] or None,
        model=cells["model"],
        gpu=cells["gpu"],
        n_gpu=_count(cells, "n_gpu"),
        tp=_count(cells, "tp"),
        pp=_count(cells, "pp"),
        weight_dtype=cells["weight_dtype"] or None,
        kv_dtype=cells["kv_dtype"] or None,
        isl=_number(cells, "isl"),
        osl=_number(cells, "osl"),
        concurrency=_number(cells, "concurrency_or_batch"),
        request_per_s=_number(cells, "request_rate", infinite=True),
        output_token_per_s=_number(cells, "output_tok_s"),
        total_token_per_s=_number(cells, "total_tok_s"),
        ttft_s=_seconds(cells, "ttft_ms"),
        tpot_s=_seconds(cells, "tpot_ms"),
        e2e_s=_seconds(cells, "e2e_ms"),
        mode=mode,
        statistic=notes.statistic,
        notes=notes,
    )
    measured = (run.output_token_per_s, run.total_token_per_s, run.ttft_s, run.tpot_s, run.e2e_s)
    if all(value is None for value in measured):
        raise BadRowError("nothing measured")
    return run


def _number(cells: Mapping[str, str], name: str, *, infinite: bool = False) -> float | None:
    """A positive number, or None for an empty cell."""
    text = cells[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadRowError(f"{name} is no number") from None
    if math.isnan(value) or value <= 0 or (math.isinf(value) and not infinite):
        raise BadRowError(f"{name} is not above 0")
    return value


def _seconds(cells: Mapping[str, str], name: str) -> float | None:
    value = _number(cells, name)
    return None if value is None else value / 1000


def _count(cells: Mapping[str, str], name: str) -> int | None:
    value = _number(cells, name)
    if value is not None and value != int(value):
        raise BadRowError(f"{name} is no whole number")
    return None if value is None else int(value)
