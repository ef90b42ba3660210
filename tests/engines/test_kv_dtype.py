"""Which dtype the KV cache has, and why: one rule for memory, speed and measured runs."""

import pytest

from capplan import catalog, model_source
from capplan.engines.kv_dtype import AUTO, kv_dtype
from capplan.errors import InputError
from capplan.estimate import vram
from capplan.latency_estimate import latency

PLAIN = "meta-llama/Llama-3.1-8B"
WITH_SCHEME = "nvidia/Llama-3.1-8B-Instruct-FP8"
WITHOUT_SCHEME = "deepseek-ai/DeepSeek-V3"


@pytest.mark.parametrize(
    ("model", "weights", "engine", "found", "why"),
    [
        (PLAIN, None, "vllm", "bf16", "16-bit by default"),
        (PLAIN, None, "tensorrt-llm", "bf16", "16-bit by default"),
        (PLAIN, "fp8", "vllm", "bf16", "16-bit by default"),
        (PLAIN, "fp8", "tensorrt-llm", "fp8", "TensorRT-LLM's"),
        (PLAIN, "nvfp4", "tensorrt-llm", "fp8", "TensorRT-LLM's"),
        (PLAIN, "int4", "tensorrt-llm", "bf16", "16-bit by default"),
        (PLAIN, "int8", "tensorrt-llm", "bf16", "16-bit by default"),
        (WITH_SCHEME, None, "vllm", "fp8", "the checkpoint's own KV scheme"),
        (WITH_SCHEME, None, None, "fp8", "the checkpoint's own KV scheme"),
        (WITHOUT_SCHEME, None, "vllm", "bf16", "16-bit by default"),
        (WITHOUT_SCHEME, None, "tensorrt-llm", "fp8", "TensorRT-LLM's"),
    ],
)
def test_auto(model: str, weights: str | None, engine: str | None, found: str, why: str) -> None:
    stored = None if weights is None else catalog.weight_format(weights)
    chosen, reason = kv_dtype(AUTO, model_source.load(model), stored, engine=engine)
    assert chosen.id == found
    assert why in reason


def test_what_is_asked_goes_before_every_rule() -> None:
    chosen, reason = kv_dtype("bf16", model_source.load(WITH_SCHEME), None, engine="tensorrt-llm")
    assert (chosen.id, reason) == ("bf16", "asked")
    with pytest.raises(InputError, match="is a weight format"):
        kv_dtype("awq", None, None)


def test_memory_and_speed_say_the_same_and_never_follow_the_precision() -> None:
    for engine in ("vllm", "tensorrt-llm"):
        memory = vram("8b", precision="fp8", gpus=("h100",), engine=engine)
        speed = latency("8b", precision="fp8", gpu="h100", engine=engine, figures_alone=True)
        assert memory.kv_format.id == speed.kv_format.id == "bf16"
        assert speed.to_dict()["kv_dtype_reason"] == memory.kv_reason
