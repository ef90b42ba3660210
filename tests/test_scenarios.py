"""The shipped scenarios hold, and each of their expectations fails where its input gets worse."""

from pathlib import Path

import pytest

from capplan.check import Status, check_paths, scenario_files
from capplan.scenario import load_scenarios
from capplan.scenario_keys import KEYS
from capplan.schema import FILE_NAME

FOLDER = Path(__file__).parent.parent / "scenarios"
FILES = [Path(file).name for file in scenario_files([str(FOLDER)])]

SMALL_GPU = "fleet: {gpu: l4}"
# Prompts of so many others interrupt every answer.
SHORT_ANSWERS = "workload: {concurrency: 512, osl: 64}"
# File → expectation → what to change so that it must fail.
MUTATIONS: dict[str, dict[str, str]] = {
    "bursty-chat.yaml": {
        "vram.fits": "model: Qwen/Qwen2.5-72B-Instruct\nprecision: bf16",
        "vram.max_users": "workload: {isl: 20k}",
        "latency.ttft_s": "workload: {requests: 20000}",
        "latency.e2e_s": "workload: {requests: 20000}",
    },
    "deepseek-v3.yaml": {
        "vram.fits": "fleet: {tp: 4}",
        "vram.weights.gb": "model: deepseek-ai/DeepSeek-V2",
        "vram.max_users": "workload: {isl: 15k}",
        "vram.kv_cache.bytes_per_token": "kv_dtype: fp8",
        "latency.tpot_ms": SHORT_ANSWERS,
    },
    "llama-405b-fp8.yaml": {
        "vram.fits": "fleet: {tp: 4}",
        "vram.per_gpu.weights.bytes": "fleet: {tp: 4}",
        "vram.max_users": "fleet: {gpu: h200-sxm}",
        "vram.engine.kv_pool.bytes": "engine: {gpu_memory_utilization: 0.80}",
        "latency.tpot_ms": SHORT_ANSWERS,
    },
    "llama-70b-rag.yaml": {
        "vram.fits": "workload: {concurrency: 64}",
        "vram.max_users": "kv_dtype: bf16",
        "vram.engine.kv_pool.bytes": "fleet: {tp: 1}",
        "latency.ttft_s": "workload: {concurrency: 256}",
        "latency.tpot_ms": "fleet: {gpu: l40s, tp: 8}\nworkload: {concurrency: 32}",
    },
    "llama-8b-chat.yaml": {
        "vram.fits": "model: meta-llama/Llama-3.1-70B-Instruct\nprecision: bf16",
        "vram.max_users": "workload: {isl: 8k}",
        "vram.weights.gib": "precision: bf16",
        "latency.ttft_ms": "workload: {isl: 60k}",
        "latency.tpot_ms": SMALL_GPU,
        "cost.usd_per_month": "fleet: {replicas: 2}",
    },
    "llama-8b-int4-64-users.yaml": {"vram.fits": "workload: {users: 640}"},
    "llama-cpp-4090.yaml": {
        "vram.fits": "model: meta-llama/Llama-3.1-70B-Instruct",
        "vram.total.bytes": "precision: bf16",
        "vram.max_context": "workload: {users: 64}",
    },
    "multi-lora.yaml": {
        "vram.fits": SMALL_GPU,
        "vram.max_users": "workload: {context: 16k}",
        "vram.extra.0.mib": "lora_slots: 200",
    },
    "qwen3-235b-moe-8xh200.yaml": {
        "vram.fits": "fleet: {tp: 1}",
        "vram.weights.gb": "precision: bf16",
        "vram.max_users": "workload: {isl: 16k}",
        "latency.tpot_ms": SHORT_ANSWERS,
    },
    "small-l4-spot.yaml": {
        "vram.fits": "model: Qwen/Qwen2.5-32B-Instruct",
        "vram.max_users": "workload: {isl: 16k}",
        "latency.tpot_ms": "model: meta-llama/Llama-3.1-8B-Instruct",
        "cost.usd_per_month": "cost: {spot_reserve: 0.5}",
    },
    "summarise-offline.yaml": {
        "vram.fits": "workload: {isl: 60k}",
        "vram.max_users": "kv_dtype: bf16",
        "latency.output_token_per_s": "workload: {isl: 60k}",
        "cost.usd_per_month": "cost: {hours: 241}",
        "cost.usd_per_million_output_token": "fleet: {price: {usd_per_gpu_hour: 50}}",
    },
}
EXPECTATIONS = [(file, key) for file, keys in MUTATIONS.items() for key in keys]


def test_there_are_ten_and_more() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("file", FILES)
def test_scenario_holds(file: str) -> None:
    report = check_paths([str(FOLDER / file)])
    bad = [
        result.message
        for entry in report.scenarios
        for result in entry.results
        if result.status is not Status.HOLDS
    ]
    assert bad == []


@pytest.mark.parametrize("file", FILES)
def test_every_expectation_has_a_mutation(file: str) -> None:
    expected = {entry.key for scenario in load_scenarios(FOLDER / file) for entry in scenario.expectations}
    assert MUTATIONS[file].keys() == expected


@pytest.mark.parametrize(("file", "key"), EXPECTATIONS)
def test_a_change_for_the_worse_fails(file: str, key: str, tmp_path: Path) -> None:
    worse = tmp_path / "worse.yaml"
    worse.write_text(f"capplan: 1\nextends: {FOLDER / file}\n{MUTATIONS[file][key]}\n")
    for scenario in check_paths([str(worse)]).scenarios:
        found = [result for result in scenario.results if result.key == key]
        assert [result.status for result in found] == [Status.FAILS], scenario.results
        # The annotation stands on the line of the expectation in the shipped file.
        assert found[0].place.file == str(FOLDER / file)
        assert found[0].place.line > 1


def test_files_name_the_schema_beside_them() -> None:
    assert (FOLDER / FILE_NAME).is_file()
    for file in (*FILES, "_base.yaml"):
        first = (FOLDER / file).read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# yaml-language-server: $schema=./{FILE_NAME}"


def test_every_key_is_explained() -> None:
    for key, entry in KEYS.items():
        assert entry.doc.endswith((".", ":", '"', "]")), key
