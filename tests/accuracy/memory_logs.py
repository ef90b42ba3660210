"""Fits profiles/calibrations/memory-vllm.yaml on start-up logs: `python -m tests.accuracy.memory_logs FILE`.

FILE is a CSV of logged terms, one start a row, GiB a GPU (columns: engine, engine_version, model,
dtype_quant, gpu, gpu_total_gib, tp, pp, gpu_memory_utilization, max_model_len, max_num_batched_tokens,
kv_cache_dtype, weights_gib, activation_gib, non_torch_gib, cudagraph_gib, kv_cache_gib, notes). Only the rows
of half of the (model, GPU) pairs are read for the fit, by a hash of their names; accuracy is told on the
others.
"""

import csv
import hashlib
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from capplan import catalog, model_source
from capplan.engines import vllm, vllm_terms
from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import NEWEST, rules_for
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.vllm_defaults import UNKNOWN, facts, number, since
from capplan.engines.vllm_kv import KvPlan, plan_kv
from capplan.engines.vllm_terms import Rank
from capplan.errors import CapplanError
from capplan.specs import Format, Gpu, Model
from capplan.units import GIB
from capplan.weights import tower_bytes, weight_budget

Row = dict[str, str]
_LAST_V0: Final = "0.7.3"
_FORMATS: Final = ("fp8", "int4", "nvfp4", "mxfp4", "awq", "gptq")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """A logged start that can be planned: its row, and what it says in the plan's words."""

    row: Row
    model: Model
    precision: Format | None
    gpu: Gpu | None
    total_bytes: int
    visible_bytes: int | None
    flags: EngineFlags

    def logged(self, column: str) -> float | None:
        """A figure of the row, or None where the log has none."""
        text = self.row[column]
        return float(text) if text else None

    @property
    def weights_bytes(self) -> int:
        """Weights of one rank as planned, encoders included."""
        whole = sum(
            size
            for tower, size in zip(
                self.model.towers, tower_bytes(self.model, self.precision).values(), strict=False
            )
            if tower.role != "mtp"
        )
        return weight_budget(self.model, self.precision, tp=self.flags.tp).bytes + whole

    def plan(self, *, version: str | None = None, with_terms: bool = False) -> EnginePlan:
        """The plan of this start; `with_terms` takes weights, activation and the rest from the log."""
        weights, activation, other = (
            self.logged(f"{name}_gib") for name in ("weights", "activation", "non_torch")
        )
        return vllm.plan(
            self.model,
            weights_bytes=round(weights * GIB) if with_terms and weights else self.weights_bytes,
            total_bytes=self.total_bytes,
            gpu=self.gpu,
            flags=self.flags if version is None else replace(self.flags, version=version),
            visible_bytes=self.visible_bytes,
            activation_bytes=round(activation * GIB) if with_terms and activation else None,
            non_torch_bytes=round(other * GIB) if with_terms and other is not None else None,
        )

    def plan_of_pool(self, pool_bytes: int) -> KvPlan:
        """Blocks, tokens and concurrency of a pool of that size."""
        version = version_of(self.row)
        length = self.flags.max_model_len or self.model.max_context or 1
        question = KvQuestion(
            kv_bits=self.flags.kv_bits,
            tp=self.flags.tp,
            pp=self.flags.pp,
            block_size=self.flags.block_size or 16,
            max_num_batched_tokens=int(self.plan().flag("max_num_batched_tokens").value),
            rules=NEWEST if version is None else rules_for(version),
        )
        return plan_kv(self.model, question, kv_bytes=pool_bytes, max_model_len=length)


def read_rows(path: Path) -> list[Row]:
    """The vLLM rows of the file."""
    with path.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["engine"] == "vLLM"]


def fitted(row: Row) -> bool:
    """Whether the row is in the half that is fitted on: by its model and GPU, never its figures."""
    key = f"{row['model']}|{row['gpu']}".encode()
    return hashlib.sha256(key).digest()[0] % 2 == 0


def start_of(row: Row) -> Start | str:
    """The row as a start to plan, or why it cannot be planned."""
    version = version_of(row)
    try:
        model, precision = _model(row)
        gpu = _gpu(row["gpu"])
    except CapplanError as error:
        return error.message
    visible = round(float(row["gpu_total_gib"]) * GIB) if row["gpu_total_gib"] else None
    if gpu is None and visible is None:
        return "neither the GPU nor its memory is named"
    if row["max_model_len"] and model.max_context and float(row["max_model_len"]) > model.max_context:
        return "longer than the model's own limit"
    sequences = re.search(r"max_num_seqs (\d+)", row["notes"])
    block = re.search(r"block size (\d+);", row["notes"])
    return Start(
        row=row,
        model=model,
        precision=precision,
        gpu=gpu,
        total_bytes=gpu.usable_bytes if gpu else visible or 0,
        visible_bytes=visible,
        flags=EngineFlags(
            version=version or UNKNOWN,
            max_model_len=_whole(row["max_model_len"]),
            max_num_batched_tokens=_whole(row["max_num_batched_tokens"]),
            max_num_seqs=int(sequences.group(1)) if sequences else None,
            gpu_memory_utilization=float(row["gpu_memory_utilization"] or 0) or None,
            block_size=int(block.group(1)) if block else None,
            enforce_eager="enforce_eager" in row["notes"],
            kv_bits=8 if row["kv_cache_dtype"].startswith(("fp8", "int8")) else 16,
            tp=_whole(row["tp"]) or 1,
            pp=_whole(row["pp"]) or 1,
        ),
    )


def version_of(row: Row) -> str | None:
    """The version a row states, the first of a range; the old engine inside newer releases counts as 0.7."""
    text = row["engine_version"]
    if "V0" in text and not text.startswith(("0.6", "0.7")):
        return _LAST_V0
    found = re.match(r"0\.\d+(\.\d+)?", text)
    if found is None:
        return None
    # "0.2x" is 0.20 or newer.
    version = "0.21" if text.startswith("0.2x") else found.group(0)
    return None if number_or_none(version) is None else version


def number_or_none(version: str) -> tuple[int, int, int] | None:
    """The version as numbers; None where the rules do not reach back to it."""
    try:
        return number(version)
    except CapplanError:
        return None


def _whole(text: str) -> int | None:
    return int(float(text)) if text else None


def _gpu(name: str) -> Gpu | None:
    try:
        return catalog.gpu(name)
    except CapplanError:
        return None


def _model(row: Row) -> tuple[Model, Format | None]:
    name, quant = row["model"].split(" ")[0], row["dtype_quant"]
    if quant.startswith("gguf"):
        name, quant = re.sub(r"-Q\d.*$", "", name), "q8_0" if "q8_0" in quant else "q4_k_m"
    try:
        model = model_source.load(name)
    except CapplanError:
        model = model_source.load(f"{name}-Instruct")
    if model.quantization is not None or quant in ("bf16", "fp16"):
        return model, None
    known = next((form for form in (*_FORMATS, "q8_0", "q4_k_m") if quant.startswith(form)), None)
    if known is None:
        found = {"bnb-4bit": "nf4", "int8-w8a8": "int8"}.get(quant)
        return model, catalog.weight_format(found or quant)
    return model, catalog.weight_format(known)


def fit(rows: Iterable[Row]) -> dict[str, float]:
    """The fitted numbers, from the rows of the fitted half."""
    starts = [start for row in rows if fitted(row) and isinstance(start := start_of(row), Start)]
    kept = [
        start.gpu.usable_bytes - start.visible_bytes
        for start in starts
        if start.gpu is not None and start.visible_bytes is not None
    ]
    made = {
        "driver_keeps_bytes": statistics.median(size for size in kept if size > 0),
        "sampler_bytes_with_sort": statistics.median(_sorted_logits(starts)),
        "one_rank_bytes": statistics.median(_terms(starts, "non_torch_gib", several=False)),
        "one_rank_recent_bytes": statistics.median(
            _terms([start for start in starts if _recent(start)], "non_torch_gib", several=False)
        ),
        "several_ranks_bytes": statistics.median(_terms(starts, "non_torch_gib", several=True)),
        "cuda_graph_bytes": statistics.median(
            size
            for several in (False, True)
            for size in _terms(starts, "cudagraph_gib", several=several)
            if size
        ),
    }
    return made


def pool_errors(rows: Iterable[Row]) -> list[float]:
    """Logged pool less the planned, as a part of the budget, of the starts of the fitted half.

    Those that state version and fraction; where the context is not stated it is the model's own.
    """
    made = []
    for row in rows:
        start = start_of(row)
        error = pool_error(start) if fitted(row) and versioned(row) and isinstance(start, Start) else None
        if error is not None:
            made.append(error)
    return made


def versioned(row: Row) -> bool:
    """Whether the log states version and fraction, and nothing was assumed for it."""
    given = version_of(row) and row["gpu_memory_utilization"]
    return bool(given) and "default assumed" not in row["notes"]


def stated(row: Row) -> bool:
    """Whether the log states version, fraction and context."""
    return versioned(row) and bool(row["max_model_len"])


def pool_error(start: Start) -> float | None:
    """Logged pool less the planned, as a part of the budget; None where the log has none."""
    logged = start.logged("kv_cache_gib")
    if logged is None or start.flags.gpu_memory_utilization is None:
        return None
    plan = start.plan()
    return (logged * GIB - plan.kv_pool.value) / plan.terms["budget"]


def _terms(starts: Sequence[Start], column: str, *, several: bool) -> list[float]:
    return [
        logged * GIB
        for start in starts
        if (logged := start.logged(column)) is not None and logged >= 0 and (start.flags.tp > 1) == several
    ]


def _recent(start: Start) -> bool:
    return Rank.of(start.gpu, tp=1, compiles=False, embeds=True).recent


def _sorted_logits(starts: Sequence[Start]) -> list[float]:
    """Bytes a logit took at the peak, where the peak is the sampler's and it sorts."""
    made = []
    for start in starts:
        logged = start.logged("activation_gib")
        version = number_or_none(version_of(start.row) or facts()["newest"])
        if logged is None or version is None or since("sampler_without_sort_since", version):
            continue
        plan = start.plan()
        tokens, sequences = (plan.flag(name).value for name in ("max_num_batched_tokens", "max_num_seqs"))
        own = vllm_terms.activation_bytes(
            start.model, tokens=int(tokens), sequences=0, rank=Rank(tp=start.flags.tp), version=version
        )
        if logged * GIB > 1.1 * own:
            hidden = int(tokens) * 2 * start.model.hidden
            made.append((logged * GIB - hidden) / (int(sequences) * start.model.vocab))
    return made


def main(path: str) -> None:
    """Print the fit, and the pool's errors with the numbers in use."""
    rows = read_rows(Path(path))
    for name, value in fit(rows).items():
        print(f"{name}: {value:.6g}")
    errors = sorted(abs(error) for error in pool_errors(rows))
    eight_of_ten = statistics.quantiles(errors, n=5, method="inclusive")[-1]
    print(f"pool errors with the numbers in use: {len(errors)} starts, 8 of 10 within {eight_of_ten:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
