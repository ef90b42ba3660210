"""SGLang's and TensorRT-LLM's rows of memory_engine_logs.csv: tokens of a pool, pool of what is free.

Nothing here is fitted. A row is taken where its model is one this project knows by its bytes per token.
"""

import csv
import functools
import re
from dataclasses import dataclass

import pytest

from capplan import catalog, model_source
from capplan.engines.plan import EngineFlags
from capplan.engines.sglang import plan as plan_sglang
from capplan.engines.tensorrt_llm import pool_bytes
from capplan.engines.token_pool import token_rate
from capplan.units import GIB
from capplan.weights import weight_budget
from tests.accuracy.oracles import DATA, Row

FILE = DATA / "measured" / "memory_engine_logs.csv"
# What a model column begins with, in the catalog's names.
NAMES = {
    "DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "meta-llama/Llama-2-7b": "llama-2-7b",
    "Llama-2-7B": "llama-2-7b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Qwen2.5-0.5B": "qwen2.5-0.5b",
    "Qwen2.5-coder-0.5B": "qwen2.5-0.5b",
    "Qwen2.5-1.5B": "qwen2.5-1.5b",
    "XiaomiMiMo/MiMo-V2-Flash": "mimo-v2-flash",
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
}


@pytest.fixture(autouse=True)
def _table(data: None) -> None:
    if not FILE.exists():
        pytest.skip("no memory_engine_logs.csv beside the repository")


@functools.cache
def rows() -> tuple[Row, ...]:
    """The rows of the two engines."""
    with FILE.open(encoding="utf-8", newline="") as stream:
        return tuple(row for row in csv.DictReader(stream) if row["engine"] in ("SGLang", "TensorRT-LLM"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A row's tokens beside those of its printed pool."""

    name: str
    printed: int
    planned: int

    @property
    def error(self) -> float:
        """Relative error."""
        return abs(self.planned / self.printed - 1)


def tokens_of(row: Row) -> Tokens | None:
    """Tokens of the printed pool; None where model or pool are not known."""
    known = next((name for start, name in NAMES.items() if row["model"].startswith(start)), None)
    if known is None or not row["kv_cache_gib"] or not row["kv_tokens"]:
        return None
    model = model_source.load(known)
    rate = token_rate(model, kv_bits=8 if "fp8 KV" in row["notes"] else 16, tp=int(row["tp"]))
    # The sliding layers' pool where the row says that it is theirs.
    per_token = rate.sliding if "SWA pool" in row["notes"] else rate.total
    planned = int(float(row["kv_cache_gib"]) * GIB / per_token)
    name = f"{row['engine']} {row['engine_version']} {row['model']} {row['gpu']}"
    return Tokens(name=name, printed=int(row["kv_tokens"]), planned=planned)


def test_tokens_of_a_printed_pool() -> None:
    """Within 1 %, but for one row whose own notes doubt its model."""
    made = [tokens for tokens in map(tokens_of, rows()) if tokens is not None]
    for tokens in made:
        print(f"{tokens.error:8.2%} {tokens.printed:>9,} {tokens.planned:>9,} {tokens.name}")
    print(f"{len(made)} of {len(rows())} rows")
    assert len(made) >= 8
    failures = [tokens.name for tokens in made if tokens.error > 0.01]
    assert failures == ["TensorRT-LLM 0.12 meta-llama/Llama-2-7b-hf H100-80GB"]


def test_pool_of_what_is_free() -> None:
    """Fraction × the memory printed as available: the pool, to the rounding of the log."""
    checked = 0
    for row in rows():
        free = re.search(r"(?:of|available) (\d+\.\d+) GiB", row["notes"])
        if row["engine"] != "TensorRT-LLM" or free is None or not row["gpu_memory_utilization"]:
            continue
        pool = pool_bytes(float(free.group(1)) * GIB, float(row["gpu_memory_utilization"]))
        assert pool / GIB == pytest.approx(float(row["kv_cache_gib"]), abs=0.01), row["notes"]
        checked += 1
    print(f"{checked} pools within 0.01 GiB")
    assert checked >= 3


def test_pool_of_a_whole_plan() -> None:
    """SGLang rows with GPU and fraction: the pool from the plan, as a part of the budget."""
    errors = []
    for row in rows():
        if row["engine"] != "SGLang" or row["gpu"] == "unknown" or not row["gpu_memory_utilization"]:
            continue
        known = next(name for start, name in NAMES.items() if row["model"].startswith(start))
        model = model_source.load(known)
        tp = int(row["tp"])
        made = plan_sglang(
            model,
            weights_bytes=weight_budget(model, catalog.weight_format(row["dtype_quant"]), tp=tp).bytes,
            total_bytes=catalog.gpu(row["gpu"].replace("H100-80GB", "h100-sxm-80gb")).usable_bytes,
            flags=EngineFlags(tp=tp, gpu_memory_utilization=float(row["gpu_memory_utilization"])),
        )
        printed = float(row["kv_cache_gib"]) * GIB
        errors.append((made.kv_pool.value - printed) / made.terms["budget"])
        low, high = made.kv_pool.low / GIB, made.kv_pool.high / GIB
        print(f"{errors[-1]:+.2%} of the budget, {low:.2f} to {high:.2f} GiB")
        print(f"  {printed / GIB:.2f} GiB printed, {made.kv_pool.value / GIB:.2f} planned: {row['model']}")
    assert len(errors) == 1
    assert max(map(abs, errors)) <= 0.05
