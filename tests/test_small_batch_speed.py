"""Small-batch speeds: what a step reads, and the shipped calibration's answers."""

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import catalog
from capplan.errors import InputError
from capplan.small_batch import (
    GGUF_FAMILIES,
    family_of,
    matrix_flop_per_s,
    model_reads,
    platform_of,
    vector_flop_per_s,
)
from capplan.small_batch_speed import FILE, Host, decode_s, prompt_time_s, shipped
from capplan.weights import weight_budget

LLAMA = catalog.load_model("llama-3-8b")
Q4 = catalog.load_format("q4_k_m")
READS = model_reads(LLAMA, Q4)
RTX_4090 = catalog.gpu("rtx-4090")
CUDA = shipped().backend("llama.cpp", "cuda")


def test_a_token_reads_all_but_the_embedding() -> None:
    # 128,256 rows of 4,096 at 4.5 bits.
    embedding = 128_256 * 4_096 * 144 // 256
    assert READS.token_bytes == weight_budget(LLAMA, Q4).bytes - embedding
    assert READS.prompt_bytes == READS.token_bytes
    assert READS.flop == 2 * (LLAMA.parameters - 128_256 * 4_096)
    # Nine tensors a layer, and the embedding's row, the last norm and the output matrix.
    assert READS.kernels == 32 * 9 + 3
    assert READS.kv_bytes(1000) == 131_072 * 1000


def test_a_tied_embedding_is_read_as_the_output() -> None:
    gemma = catalog.load_model("gemma-2-2b")
    assert model_reads(gemma, None).token_bytes == weight_budget(gemma, None).bytes


def test_a_token_reads_the_experts_chosen_and_a_prompt_all() -> None:
    mixtral = catalog.load_model("mixtral-8x7b")
    reads = model_reads(mixtral, None)
    budget = {role.role: role.bytes for role in weight_budget(mixtral, None).roles}
    rest = sum(budget.values()) - budget["experts"] - budget["embedding"]
    assert reads.token_bytes == pytest.approx(rest + budget["experts"] * 2 / 8)
    assert reads.prompt_bytes == pytest.approx(rest + budget["experts"])


def test_the_files_size_decides() -> None:
    doubled = model_reads(LLAMA, Q4, file_bytes=2 * weight_budget(LLAMA, Q4).bytes)
    assert doubled.token_bytes == pytest.approx(2 * READS.token_bytes)
    assert doubled.flop == READS.flop


def test_attention_of_a_prompt() -> None:
    # 4 · pairs · 32 heads · 128 wide · 32 layers; of n tokens n (n + 1) / 2 pairs, of their past n · p.
    per_pair = 4 * 32 * 128 * 32
    assert READS.attention_flop(tokens=512) == per_pair * 512 * 513 / 2
    assert READS.attention_flop(tokens=100, past=1000) == per_pair * (100 * 101 / 2 + 100 * 1000)
    windowed = model_reads(catalog.load_model("mistral-7b-v0.1"), None)
    # Window 4,096: the first 4,096 tokens see all before them, the others 4,096.
    assert windowed.attention_flop(tokens=8192) == per_pair * (4096 * 4097 / 2 + 4096 * 4096)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("fp32", "f16"), ("bf16", "f16"), ("q8_0", "q8"), ("q6_k", "q6"), ("q5_k_m", "q5"), ("q4_k_s", "q4"),
        ("q4_0", "legacy"), ("q5_1", "legacy"), ("iq4_xs", "iq"), ("q2_k", "q2"), ("mxfp4", "mxfp4"),
        ("fp8", "fp8"), ("int8", "int8"), ("awq", "int4"), ("nvfp4", "int4"),
    ],
)  # fmt: skip
def test_families(name: str, family: str) -> None:
    assert family_of(catalog.load_format(name), LLAMA) == family


def test_a_checkpoints_own_family() -> None:
    assert family_of(None, LLAMA) == "f16"
    assert family_of(None, catalog.load_model("gpt-oss-20b")) == "mxfp4"


def test_rates_of_a_gpu() -> None:
    assert vector_flop_per_s(RTX_4090) == 82.6e12
    assert matrix_flop_per_s(RTX_4090) == 330.3e12
    # No 16-bit products to speak of: half of its int8 rate.
    assert matrix_flop_per_s(catalog.gpu("p40-24gb")) == 23.5e12
    assert [platform_of(catalog.gpu(name)) for name in ("l4", "mi300x", "m3-max", "b580")] == [
        "cuda",
        "rocm",
        "metal",
        "vulkan",
    ]


def test_every_family_of_gguf_files_is_answered() -> None:
    for backend in shipped().backends.values():
        for family, fractions in backend.families.items():
            assert 0 < fractions.bandwidth <= 1, (backend.engine, family)
            assert 0 < fractions.compute <= 1, (backend.engine, family)
            assert 0 < fractions.prompt <= 1, (backend.engine, family)
        if backend.engine in ("llama.cpp", "ollama"):
            assert set(backend.families) >= set(GGUF_FAMILIES)


def test_what_was_never_measured_is_refused() -> None:
    with pytest.raises(InputError, match=r"no measured speed of .* on sycl"):
        shipped().backend("llama.cpp", "sycl")
    with pytest.raises(InputError, match="not measured with q4 weights"):
        shipped().backend("exllamav2", "cuda").fractions("q4")
    bare = replace(RTX_4090, flop_per_s={})
    with pytest.raises(InputError, match="arithmetic rate"):
        decode_s(backend=CUDA, family="q4", reads=READS, context=0, host=Host(gpu=bare))


def test_the_band_holds_the_speed_and_borrowing_is_said() -> None:
    host = Host(gpu=RTX_4090)
    speed = shipped().decode(backend=CUDA, family="q4", reads=READS, context=512, host=host)
    assert speed.low < speed.token_per_s < speed.high
    assert not speed.borrowed
    assert shipped().decode(backend=CUDA, family="q5", reads=READS, context=512, host=host).borrowed
    prompt = shipped().prompt(backend=CUDA, family="q4", reads=READS, tokens=512, host=host)
    assert prompt.low < prompt.token_per_s < prompt.high
    # One token at 1,008 GB/s: 218 a second at the very most.
    assert 0.4 * 218 < speed.token_per_s < 218


@given(
    st.sampled_from(sorted(shipped().backends)),
    st.floats(min_value=1, max_value=10),
    st.integers(min_value=0, max_value=100_000),
    st.integers(min_value=1, max_value=100_000),
    st.integers(min_value=1, max_value=8),
)
def test_faster_memory_never_slower_longer_context_never_faster(
    name: str, factor: float, context: int, more: int, gpus: int
) -> None:
    backend = shipped().backends[name]
    family = sorted(backend.families)[0]
    faster = replace(RTX_4090, memory_bandwidth_bytes_per_s=RTX_4090.memory_bandwidth_bytes_per_s * factor)
    host = Host(gpu=RTX_4090, gpus=gpus)
    asked: dict[str, Any] = {"backend": backend, "family": family, "reads": READS}
    step_s = decode_s(**asked, context=context, host=host)
    assert decode_s(**asked, context=context, host=replace(host, gpu=faster)) <= step_s
    assert decode_s(**asked, context=context + more, host=host) >= step_s
    assert decode_s(**asked, context=context, host=replace(host, board=True)) >= step_s
    if not backend.tensor_parallel:
        assert decode_s(**asked, context=context, host=Host(gpu=RTX_4090)) <= step_s
    prompt_s = prompt_time_s(**asked, tokens=more, past=0, chunk=512, host=host)
    assert prompt_time_s(**asked, tokens=more, past=context, chunk=512, host=host) >= prompt_s
    assert prompt_time_s(**asked, tokens=more, past=0, chunk=512, host=replace(host, gpu=faster)) <= prompt_s


def test_the_file_hashes_its_fit() -> None:
    data = catalog.read_yaml(FILE)
    canonical = json.dumps(data["fit"], sort_keys=True, separators=(",", ":"))
    assert data["hash"] == sha256(canonical.encode()).hexdigest()
    assert data["schema"] == "capplan.calibration/1"
    assert data["origin"] == "public"
    for backend in data["fit"]["backends"].values():
        assert all(len(numbers) == 4 for numbers in backend["families"].values())  # three, and the runs
