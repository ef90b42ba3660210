"""A table of measured speeds of one sequence alone (CSV) → records; a row that cannot be used says why.

Columns: source, engine, engine_version, model, quant, model_bytes, gpu, n_gpu, prompt_len, gen_len,
context_depth, prefill_tok_s, decode_tok_s, notes. A row has a prompt speed or a generation speed, or both.
An empty cell is "not published".
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from capplan.results import small_batch_names as names
from capplan.results.csv_table import BadRowError, read_rows
from capplan.small_batch import Family, ModelReads, Platform, family_of, model_reads
from capplan.small_batch_speed import CHUNK, Host
from capplan.specs import Format, Model

COLUMNS: Final = (
    "source", "engine", "engine_version", "model", "quant", "model_bytes", "gpu", "n_gpu", "prompt_len",
    "gen_len", "context_depth", "prefill_tok_s", "decode_tok_s", "notes",
)  # fmt: skip
"""What a table has, in any order."""

# Generated tokens where a row does not say: the tools' usual test.
_GENERATED: Final = 256
# A speed may be above the datasheet's bandwidth by rounding only.
_ABOVE_BOUND: Final = 1.02


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallBatchRun:
    """One measured run of one sequence: what ran where, and tokens per second of its prompt or its answer.

    `context` is the mean number of its own tokens a step read. `prompt` tokens came after `depth` others.
    `chunk` is the micro-batch of the prompt.
    """

    line: int
    source: str
    engine: str
    platform: Platform
    model_name: str
    model: Model
    weights: Format | None
    family: Family
    reads: ModelReads
    machine: str
    host: Host
    prompt: int
    generated: int
    depth: int
    chunk: int
    prompt_token_per_s: float | None
    decode_token_per_s: float | None

    @property
    def context(self) -> float:
        """Tokens of its own that the average step read."""
        return self.depth + (self.generated or _GENERATED) / 2

    @property
    def backend(self) -> str:
        """Engine and platform in one word."""
        return f"{self.engine}-{self.platform}"

    @property
    def group(self) -> tuple[str, str, str]:
        """Repository or thread, model and machine."""
        return _repository(self.source), self.model_name, self.machine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SmallBatchTable:
    """The runs of a table, and the rows that are none: line → reason."""

    runs: tuple[SmallBatchRun, ...]
    rejected: Mapping[int, str] = field(default_factory=dict)

    @property
    def reasons(self) -> Counter[str]:
        """How many rows each reason rejected."""
        return Counter(self.rejected.values())


def read_small_batch(path: Path) -> SmallBatchTable:
    """The runs of a CSV file. Errors: InputError for a file that is no such table; never for a row."""
    runs, rejected = read_rows(path, COLUMNS, _run)
    return SmallBatchTable(runs=runs, rejected=rejected)


def _run(cells: Mapping[str, str], line: int) -> SmallBatchRun:
    if "WARN" in cells["notes"]:
        raise BadRowError("doubted by the collector")
    prompt_speed, decode_speed = _number(cells, "prefill_tok_s"), _number(cells, "decode_tok_s")
    if prompt_speed is None and decode_speed is None:
        raise BadRowError("no speed")
    gpu = names.gpu_named(cells["gpu"])
    if gpu is None:
        raise BadRowError("GPU not in the catalog")
    if "fp32" not in gpu.flop_per_s:
        raise BadRowError("no source gives the GPU's arithmetic rate")
    engine = names.engine_of(cells["engine"])
    # A size worked out from the measured speed says nothing beside the speed.
    file_bytes = None if "bw/tok_s" in cells["notes"] else _number(cells, "model_bytes")
    model, weights = _subject(cells, engine, file_bytes)
    reads = _reads(model, weights, file_bytes)
    host = Host(gpu=gpu, gpus=_count(cells, "n_gpu") or 1, board=names.on_board(cells["gpu"]))
    run = SmallBatchRun(
        line=line,
        source=cells["source"],
        engine=engine,
        platform=names.platform_named(cells["engine"], cells["gpu"], gpu),
        model_name=cells["model"],
        model=model,
        weights=weights,
        family=family_of(weights, model),
        reads=reads,
        machine=cells["gpu"],
        host=host,
        prompt=_count(cells, "prompt_len") or 0,
        generated=_count(cells, "gen_len") or 0,
        depth=_count(cells, "context_depth") or 0,
        chunk=_chunk(cells["notes"]),
        prompt_token_per_s=prompt_speed,
        decode_token_per_s=decode_speed,
    )
    if prompt_speed is not None and not run.prompt:
        raise BadRowError("prompt speed of a prompt of unknown length")
    ranks = host.gpus if engine in names.TENSOR_PARALLEL else 1
    bound = ranks * gpu.memory_bandwidth_bytes_per_s / reads.token_bytes
    if decode_speed is not None and decode_speed > _ABOVE_BOUND * bound:
        raise BadRowError("faster than the memory's bandwidth allows")
    return run


def _subject(cells: Mapping[str, str], engine: str, file_bytes: float | None) -> tuple[Model, Format | None]:
    """The model and the format of its weights."""
    model, file_type = names.model_named(cells["model"])
    try:
        weights = names.format_named(cells["quant"], file_type=file_type, engine=engine, model=model)
    except names.UnknownFormatError:
        raise BadRowError("weight format not known") from None
    if model is None:
        printed = re.search(r"\bparams=([\d.]+) ?B\b", cells["notes"])
        model = names.model_labelled(
            cells["model"],
            parameters=float(printed[1]) * 1e9 if printed else None,
            weights=weights,
            file_bytes=file_bytes,
        )
        if model is None:
            raise BadRowError("model not in the catalog")
    return model, weights


@functools.cache
def _reads(model: Model, weights: Format | None, file_bytes: float | None) -> ModelReads:
    return model_reads(model, weights, file_bytes=file_bytes)


def _chunk(notes: str) -> int:
    """Tokens of a prompt worked on at once."""
    found = re.search(r"\bn?_?ubatch=(\d{1,6})\b", notes)
    return int(found[1]) or CHUNK if found else CHUNK


def _number(cells: Mapping[str, str], name: str) -> float | None:
    """A positive number, or None for an empty cell or a nought."""
    text = cells[name]
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadRowError(f"{name} is no number") from None
    if not math.isfinite(value) or value < 0:
        raise BadRowError(f"{name} is not above 0")
    return value or None


def _count(cells: Mapping[str, str], name: str) -> int | None:
    value = _number(cells, name)
    if value is not None and value != int(value):
        raise BadRowError(f"{name} is no whole number")
    return None if value is None else int(value)


def _repository(source: str) -> str:
    """The repository of a file's address, or the source as it stands."""
    found = re.match(r"github:([^/\s]+/[^/@\s]+)", source)
    return found[1] if found else source
