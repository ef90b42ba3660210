"""vLLM's plan beside 73 logged starts: weights, KV pool, tokens, and whether it starts.

Nothing is fitted on a start that is told here: the fit reads half of the (model, GPU) pairs, these tables
the other half, but for weights, tokens and whether it starts, which nothing is fitted on.
"""

import csv
import functools
import json
import re
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from capplan import catalog, model_source
from capplan.engines import vllm
from capplan.engines.plan import EngineFlags
from capplan.engines.vllm_defaults import UNKNOWN
from capplan.units import GIB
from capplan.weights import weight_budget
from tests.accuracy import memory_logs, oracles
from tests.accuracy.memory_logs import Start

LOGS = oracles.DATA / "measured" / "memory_engine_logs.csv"
RUN = oracles.DATA / "vllm_runs" / "rtx4090_llama-3.1-8b" / "meta.json"
# Not refused by the engine's own check: memory ran out while loading or capturing, or was held by others.
NOT_A_REFUSAL = re.compile(r"OOM (during|in|while)|other process|resident|another process|failed to run")

# Notes that do not say what failed, and what their threads say: memory ran out, no check refused.
RAN_OUT_BY_THREAD = {
    "github thread vllm-project/vllm#2348": "CUDA error: out of memory, at a fraction of 1",
    "github thread QwenLM/Qwen3-VL#1684": "out of memory with a worst-case video; a shorter context starts",
}

pytestmark = pytest.mark.usefixtures("data")


@functools.cache
def starts() -> tuple[Start, ...]:
    if not LOGS.exists():
        pytest.skip("the start-up logs are not beside the repository")
    rows = [row for row in memory_logs.read_rows(LOGS) if row["tp"]]
    return tuple(start for row in rows if isinstance(start := memory_logs.start_of(row), Start))


def told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{text}")


def ninth(values: list[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def name(start: Start) -> str:
    row = start.row
    return f"{row['model']} {row['gpu']} {row['engine_version']} tp {row['tp']}"


def test_weights(capsys: pytest.CaptureFixture[str]) -> None:
    errors = {
        f"{name(start)} {number}": start.weights_bytes / (logged * GIB) - 1
        for number, start in enumerate(starts())
        if (logged := start.logged("weights_gib")) and "includes" not in start.row["notes"]
    }
    sizes = [abs(error) for error in errors.values()]
    far = [f"  {key}: {error:+.1%}" for key, error in errors.items() if abs(error) > 0.02]
    told(
        f"weights of {len(errors)} starts: median error {statistics.median(sizes):.2%}\n" + "\n".join(far),
        capsys,
    )
    assert len(errors) >= 30
    assert statistics.median(sizes) <= 0.01


def test_kv_pool(capsys: pytest.CaptureFixture[str]) -> None:
    errors = {}
    for start in starts():
        error = memory_logs.pool_error(start)
        if not memory_logs.fitted(start.row) and memory_logs.stated(start.row) and error is not None:
            errors[f"{name(start)} at {start.row['max_model_len']}"] = error
    sizes = [abs(error) for error in errors.values()]
    lines = [f"  {key}: {error:+.2%}" for key, error in errors.items()]
    told(
        f"KV pool of {len(errors)} held-out starts that state version, fraction and context, error as a part "
        f"of the budget: median {statistics.median(sizes):.2%}, P90 {ninth(sizes):.2%}\n" + "\n".join(lines),
        capsys,
    )
    assert len(errors) >= 10
    assert statistics.median(sizes) <= 0.015
    assert ninth(sizes) <= 0.05


def test_kv_pool_with_the_logs_own_activation(capsys: pytest.CaptureFixture[str]) -> None:
    errors = {}
    for start in starts():
        logged = start.logged("kv_cache_gib")
        given = [start.logged(f"{term}_gib") for term in ("weights", "activation", "non_torch")]
        sized = start.visible_bytes is not None and start.row["gpu_memory_utilization"]
        if logged is None or None in given or not sized or "includes" in start.row["notes"]:
            continue
        # A version whose graphs are inside the fraction logs them too; those are not estimated here.
        plan = replace(start, flags=replace(start.flags, enforce_eager=True)).plan(with_terms=True)
        errors[name(start)] = (logged * GIB - plan.kv_pool.value) / plan.terms["budget"]
    sizes = [abs(error) for error in errors.values()]
    far = [f"  {key}: {error:+.2%}" for key, error in errors.items() if abs(error) > 0.005]
    told(
        f"KV pool of {len(errors)} starts from the log's own terms: median {statistics.median(sizes):.3%}, "
        f"P90 {ninth(sizes):.3%}\n" + "\n".join(far),
        capsys,
    )
    assert len(errors) >= 15
    assert ninth(sizes) <= 0.005


def test_tokens_and_concurrency_of_a_printed_pool(capsys: pytest.CaptureFixture[str]) -> None:
    tokens: dict[str, float] = {}
    concurrency: dict[str, float] = {}
    for start in starts():
        pool, length = start.logged("kv_cache_gib"), start.logged("max_model_len")
        if pool is None or pool <= 0 or start.flags.pp > 1:
            continue
        kv = start.plan_of_pool(round(pool * GIB))
        if (logged := start.logged("kv_tokens")) is not None and logged:
            tokens[name(start)] = kv.tokens / logged - 1
        if (many := start.logged("max_concurrency")) is not None and many and length:
            concurrency[name(start)] = kv.max_concurrency / many - 1
    lines = [f"  tokens {key}: {error:+.1%}" for key, error in tokens.items() if abs(error) > 0.01]
    lines += [f"  concurrency {key}: {error:+.1%}" for key, error in concurrency.items() if abs(error) > 0.01]
    near = sum(abs(error) <= 0.01 for error in tokens.values())
    close = sum(abs(error) <= 0.01 for error in concurrency.values())
    told(
        f"from a printed pool: tokens within 1 % in {near} / {len(tokens)}, concurrency in "
        f"{close} / {len(concurrency)}\n" + "\n".join(lines),
        capsys,
    )
    assert statistics.median(map(abs, tokens.values())) <= 0.01
    assert statistics.median(map(abs, concurrency.values())) <= 0.01


def test_starts_or_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    matrix: Counter[tuple[str, str]] = Counter()
    ran_out: Counter[str] = Counter()
    wrong = []
    for start in starts():
        refused = start.row["oom"] == "y"
        if refused and NOT_A_REFUSAL.search(start.row["notes"]):
            continue
        plan = start.plan()
        says = bool(plan.more["starts_at_estimate"])
        if start.row["source"] in RAN_OUT_BY_THREAD:
            ran_out["starts" if says else "refuses"] += 1
            wrong.append(f"  {name(start)}: {RAN_OUT_BY_THREAD[start.row['source']]}")
            continue
        matrix["refused" if refused else "started", "starts" if says else "refuses"] += 1
        if says == refused:
            wrong.append(f"  {name(start)}: {'refused' if refused else 'started'}, {start.row['notes'][:70]}")
    right = matrix["started", "starts"] + matrix["refused", "refuses"]
    told(
        f"starts or refuses: right {right} / {matrix.total()}; "
        + ", ".join(f"{a}, planned {b}: {count}" for (a, b), count in sorted(matrix.items()))
        + f"; out of memory without a check, planned as starting: {ran_out['starts']} / {ran_out.total()}\n"
        + "\n".join(wrong),
        capsys,
    )
    assert right / matrix.total() >= 0.9
    refusals = matrix["refused", "starts"] + matrix["refused", "refuses"]
    assert matrix["refused", "refuses"] / refusals >= 0.8
    started = matrix["started", "starts"] + matrix["started", "refuses"]
    assert matrix["started", "starts"] / started >= 0.9


def test_an_unknown_version_has_a_band_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    inside: dict[str, bool] = {}
    for start in starts():
        logged = start.logged("kv_cache_gib")
        sized = start.row["gpu_memory_utilization"] and start.row["max_model_len"]
        if logged is None or memory_logs.fitted(start.row) or not sized:
            continue
        band = start.plan(version=UNKNOWN).kv_pool
        inside[name(start)] = band.low <= logged * GIB <= band.high
    held = sum(inside.values())
    out = [f"  outside: {key}" for key, value in inside.items() if not value]
    told(f"version not told: {held} / {len(inside)} held-out pools in the band\n" + "\n".join(out), capsys)
    assert held / len(inside) >= 0.7


def test_a_4090_of_0_19(capsys: pytest.CaptureFixture[str]) -> None:
    meta = json.loads(RUN.read_text())
    kwargs, cache = meta["engine_kwargs"], meta["kv_cache"]
    total = meta["hardware"]["device_total_memory_bytes"]
    model = model_source.load(meta["model"])
    plan = vllm.plan(
        model,
        weights_bytes=weight_budget(model, None).bytes,
        total_bytes=total,
        visible_bytes=total,
        gpu=catalog.gpu("rtx-4090"),
        flags=EngineFlags(
            version=meta["vllm_version"],
            max_model_len=kwargs["max_model_len"],
            max_num_seqs=kwargs["max_num_seqs"],
            max_num_batched_tokens=kwargs["max_num_batched_tokens"],
            gpu_memory_utilization=cache["gpu_memory_utilization"],
        ),
    )
    assert plan.kv is not None
    error = plan.kv.num_blocks / cache["num_gpu_blocks"] - 1
    told(
        f"RTX 4090, 0.19.0: {plan.kv.num_blocks:,} blocks for {cache['num_gpu_blocks']:,} ({error:+.1%})",
        capsys,
    )
    assert abs(error) <= 0.03
    pool = cache["num_gpu_blocks"] * plan.kv.page_bytes
    assert plan.kv_pool.low <= pool <= plan.kv_pool.high


def test_every_row_is_planned_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    with LOGS.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["engine"] == "vLLM"]
    left = {
        f"{row['model']} {row['gpu']}": found if isinstance(found, str) else "no tensor parallel degree"
        for row in rows
        if isinstance(found := memory_logs.start_of(row), str) or not row["tp"]
    }
    told(
        f"{len(rows) - len(left)} of {len(rows)} vLLM rows planned; left:\n"
        + "\n".join(f"  {key}: {why}" for key, why in left.items()),
        capsys,
    )
    assert len(rows) == 73
    assert len(left) <= 22
