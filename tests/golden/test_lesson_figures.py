"""The lessons' headline figures through the real API, to the byte."""

from typing import Any

import pytest

from capplan import catalog
from capplan.estimate import vram
from capplan.units import GB

STUDIO: dict[str, Any] = {
    "params": 8_000_000_000,
    "kv_from": "llama-3-8b",
    "precision": "int4",
    "overhead_bytes": 1_500_000_000,
    "gpu_memory_bytes": 24_000_000_000,
}


def test_the_studio_example_through_the_api() -> None:
    answer = vram(**STUDIO).to_dict()
    assert answer["question"]["users"] == 16
    assert answer["question"]["context"] == 4096
    lesson = answer["lesson"]
    assert [lesson[key] for key in ("weights_gb", "kv_cache_gib", "overhead_gb")] == [4.0, 8.0, 1.5]
    assert lesson["total_mixed"] == 13.5
    assert lesson["headroom_mixed"] == 10.5
    assert answer["weights"]["bytes"] == 4_000_000_000
    assert answer["kv_cache"]["bytes"] == 8_589_934_592
    assert answer["total"]["bytes"] == 14_089_934_592
    assert answer["headroom_bytes"] == 9_910_065_408
    assert answer["fits"] is True


@pytest.mark.parametrize(
    ("model", "precision", "expected"),
    [
        pytest.param("llama-3-8b", "bf16", 16_060_522_496, id="Llama-3-8B in bf16"),
        pytest.param("llama-3-8b", "awq", 5_727_854_592, id="Llama-3-8B in AWQ g128"),
    ],
)
def test_stored_weights_through_the_api(model: str, precision: str, expected: int) -> None:
    assert vram(model, precision=precision).to_dict()["weights"]["bytes"] == expected


@pytest.mark.parametrize(
    ("model", "users", "context", "expected"),
    [
        pytest.param("llama-3-8b", 1, 4096, 536_870_912, id="Llama-3-8B, one user at 4096"),
        pytest.param("llama-3-8b", 64, 8192, 68_719_476_736, id="Llama-3-8B, 64 users at 8192"),
        pytest.param("llama-2-13b", 1, 4096, 3_355_443_200, id="Llama-2-13B, one user at 4096"),
    ],
)
def test_kv_cache_through_the_api(model: str, users: int, context: int, expected: int) -> None:
    assert vram(model, users=users, context=context).to_dict()["kv_cache"]["bytes"] == expected


@pytest.mark.parametrize(
    ("precision", "small", "large"),
    [
        pytest.param("fp32", 28.0, 280.0, id="FP32"),
        pytest.param("fp16", 14.0, 140.0, id="FP16"),
        pytest.param("bf16", 14.0, 140.0, id="BF16"),
        pytest.param("int8", 7.0, 70.0, id="INT8"),
        pytest.param("fp8", 7.0, 70.0, id="FP8"),
        pytest.param("int4", 3.5, 35.0, id="INT4"),
        pytest.param("awq", 3.5, 35.0, id="AWQ"),
        pytest.param("gptq", 3.5, 35.0, id="GPTQ"),
    ],
)
def test_the_weight_table_through_the_api(precision: str, small: float, large: float) -> None:
    for count, expected in ((7, small), (70, large)):
        found = vram(params=count * GB, precision=precision).to_dict()
        assert found["weights"]["bytes"] == expected * GB


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        pytest.param(
            {"model": "llama-3-8b", "users": 64, "context": 8192, "gpus": ("a100-40gb",)},
            False,
            id="64 users at 8192 do not fit an A100-40GB",
        ),
        pytest.param(
            {"model": "llama-2-13b", "precision": "fp16", "users": 20, "gpus": ("a100-sxm-80gb",)},
            False,
            id="13B with 20 users at 4096 ends in OOM, on 80 GB too",
        ),
        pytest.param(
            {"model": "llama-3-70b", "precision": "fp16", "tp": 2, "gpus": ("a100-sxm-80gb",)},
            False,
            id="70B in FP16 does not fit 2 A100s",
        ),
        pytest.param(
            {"model": "llama-3-70b", "precision": "fp16", "tp": 4, "gpus": ("a100-sxm-80gb",)},
            True,
            id="70B in FP16 fits 4 A100s of 80 GB",
        ),
        pytest.param(
            {"model": "llama-3-70b", "precision": "fp16", "tp": 4, "gpus": ("a100-sxm-40gb",)},
            False,
            id="70B in FP16 does not fit 4 A100s of 40 GB",
        ),
        pytest.param(
            {"model": "llama-3-70b", "precision": "fp16", "tp": 8, "gpus": ("a100-sxm-40gb",)},
            True,
            id="70B in FP16 fits 8 A100s of 40 GB",
        ),
    ],
)
def test_what_fits_through_the_api(question: dict[str, Any], expected: bool) -> None:
    assert vram(**question).fits is expected


def test_the_kv_cache_alone_exceeds_an_a100_40gb() -> None:
    cache = vram("llama-3-8b", users=64, context=8192).to_dict()["kv_cache"]["bytes"]
    assert cache > catalog.gpu("a100-sxm-40gb").usable_bytes


def test_fp8_is_native_on_ada_and_hopper_alone_of_the_lesson() -> None:
    assert "fp8" in catalog.gpu("rtx-4090").flop_per_s
    assert "fp8" in catalog.gpu("h100-sxm").flop_per_s
    assert "fp8" not in catalog.gpu("a100-sxm-80gb").flop_per_s
