"""llama.cpp's layers on the GPU and on the host, through `vram`."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import estimate
from capplan.cli import run
from capplan.engines.plan import EngineFlags
from capplan.units import MIB


def asked(model: str = "llama-3-8b", *, gpu_layers: int | None, **fields: Any) -> estimate.VramEstimate:
    flags: dict[str, Any] = {"version": "b2843", "max_model_len": 8192, "max_num_seqs": 1}
    return estimate.vram(
        model,
        users=1,
        context=fields.pop("context", 8192),
        precision=fields.pop("precision", "q4_k_m"),
        gpu_memory_bytes=fields.pop("memory", 24 * 10**9),
        engine="llama.cpp",
        engine_flags=EngineFlags(gpu_layers=gpu_layers, **(flags | fields)),
    )


def test_all_layers_as_published() -> None:
    # A start on an A100: 4403.49 MiB on the GPU, the embedding's 281.81 MiB on the host, 1024 of KV cache.
    found = asked(gpu_layers=33)
    assert found.engine is not None
    assert found.need.weights_bytes / MIB == pytest.approx(4403.49, rel=1e-4)
    assert found.engine.more["host"]["weights"] / MIB == pytest.approx(281.81, rel=1e-4)
    assert found.need.kv_bytes == 1024 * MIB


def test_one_layer_is_the_output() -> None:
    # OLMoE: 50,304 × 2,048 in Q6_K, 6.5625 bits: 80.60 MiB, as the engine printed.
    found = asked("olmoe-1b-7b", gpu_layers=1, context=2048)
    assert found.need.weights_bytes / MIB == pytest.approx(80.60, abs=0.01)
    assert found.need.kv_bytes == 0
    assert found.engine is not None
    assert found.engine.terms["host_kv_cache_outside"] > 0


def test_a_part_of_the_layers_has_its_part_of_the_cache() -> None:
    found = asked(gpu_layers=20)
    # 19 of 32 layers beside the output; a layer keeps 4,096 B a token.
    assert found.need.kv_bytes == 19 * 4096 * 8192
    assert found.engine is not None
    assert found.engine.terms["host_kv_cache_outside"] == 13 * 4096 * 8192
    assert any("19 of 32 layers on the GPU" in note for note in found.engine.notes)
    total = found.to_dict()["total"]
    assert total["replicated_bytes"] == 0
    assert total["bytes"] > found.need.total_bytes


@given(gpu_layers=st.integers(0, 40))
def test_weights_are_on_the_gpu_or_the_host(gpu_layers: int) -> None:
    whole, found = asked(gpu_layers=33), asked(gpu_layers=gpu_layers)
    assert whole.engine is not None
    assert found.engine is not None
    held = found.need.weights_bytes + found.engine.more["host"]["weights"]
    assert held == whole.need.weights_bytes + whole.engine.more["host"]["weights"]
    assert 0 <= found.need.weights_bytes <= whole.need.weights_bytes


def test_fewer_layers_start_where_all_do_not() -> None:
    assert asked(gpu_layers=33, memory=4 * 10**9).fits is False
    assert asked(gpu_layers=8, memory=4 * 10**9).fits is True


def test_users_share_the_cells_of_the_context() -> None:
    one = estimate.vram(
        "llama-3-8b",
        users=8,
        context=4096,
        gpus=("h100",),
        engine="llama.cpp",
        engine_flags=EngineFlags(max_model_len=4096, max_num_seqs=8),
    )
    assert one.fits is True
    assert one.engine is not None
    assert one.engine.kv_tokens == 8 * 4096
    assert one.told is not None
    assert one.told.max_users == 8
    few = estimate.vram(
        "llama-3-8b",
        users=9,
        context=4096,
        gpus=("h100",),
        engine="llama.cpp",
        engine_flags=EngineFlags(max_model_len=4096, max_num_seqs=8),
    )
    assert few.fits is False
    assert few.engine is not None
    assert few.engine.advice[0].flag == "--max-model-len 4096 --max-num-seqs 9"


def test_heads_are_not_cut() -> None:
    found = estimate.vram("qwen2.5-7b", tp=8, gpus=("l4",), engine="llama.cpp", users=1)
    assert found.engine is not None
    assert sum(gpu["layers"] for gpu in found.engine.more["gpus"]) == 28


def test_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    base = ["vram", "--model", "llama-3-8b", "--precision", "q4_k_m", "--gpu-memory", "24GB"]
    base += ["--users", "1", "--engine", "llama.cpp", "--max-model-len", "8192", "-o", "json"]
    assert run([*base, "--gpu-layers", "all"]) == 0
    every = json.loads(capfd.readouterr().out)
    assert every["engine"]["flags"]["gpu_layers"] == {"value": 33, "source": "asked"}
    assert run([*base, "--gpu-layers", "0"]) == 0
    none = json.loads(capfd.readouterr().out)
    assert none["per_gpu"]["weights"]["bytes"] == 0
