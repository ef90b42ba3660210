"""llama.cpp's memory: figures worked by hand and printed ones, and what must hold for every plan."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import catalog, model_source
from capplan.engines import llama_cpp_buffers as buffers
from capplan.engines.llama_cpp import NEWEST, build_number, compute_rule, plan
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError
from capplan.readers import hf_config
from capplan.units import GIB, MIB

LLAMA_3 = model_source.load("llama-3-8b")
Q4_K_M = catalog.weight_format("q4_k_m")


def planned(total: float = 24, **flags: object) -> EnginePlan:
    """Llama-3-8B Q4_K_M on a GPU of `total` GiB."""
    return plan(
        LLAMA_3,
        weights_bytes=0,
        total_bytes=round(total * GIB),
        flags=EngineFlags(**flags),  # type: ignore[arg-type]
        precision=Q4_K_M,
    )


@pytest.mark.parametrize(
    ("gpu_layers", "host", "output"),
    [
        (0, range(28), None),
        (1, range(28), 0),  # the output alone, gpustack/gguf-parser-go#42
        (2, range(27), 0),
        (28, range(1), 0),  # -ngl 28 of 28 layers leaves one behind
        (29, range(0), 0),
        (99, range(0), 0),
    ],
)
def test_the_output_counts_as_the_last_layer(gpu_layers: int, host: range, output: int | None) -> None:
    place = buffers.place_layers(28, gpu_layers)
    assert place.host == tuple(host)
    assert place.output_on == output
    assert place.gpus == (tuple(range(len(host), 28)),)


def test_equal_gpus_share_33_slots() -> None:
    """33 slots over 4: 9 (0 ≤ i < 8.25), 8, 8, and 7 layers with the output."""
    place = buffers.place_layers(32, 33, (1.0, 1.0, 1.0, 1.0))
    assert [len(layers) for layers in place.gpus] == [9, 8, 8, 7]
    assert place.output_on == 3


@given(
    layers=st.integers(1, 80),
    gpu_layers=st.integers(0, 100),
    shares=st.lists(st.floats(0.1, 100), min_size=1, max_size=8),
)
def test_every_layer_is_somewhere_once(layers: int, gpu_layers: int, shares: list[float]) -> None:
    place = buffers.place_layers(layers, gpu_layers, shares)
    found = [*place.host, *(index for device in place.gpus for index in device)]
    assert found == list(range(layers))
    on_gpus = layers - len(place.host) + (place.output_on is not None)
    assert on_gpus == min(gpu_layers, layers + 1)


def test_context_is_padded_and_divided() -> None:
    """4096 for 4 slots: 1024 each (ggml-org/llama.cpp#17767); 1024 unified: all 1024 for each (#23652)."""
    split = buffers.cache_context(n_ctx=4096, sequences=4, unified=False)
    assert (split.tokens, split.total_cells) == (1024, 4096)
    shared = buffers.cache_context(n_ctx=1024, sequences=4, unified=True)
    assert (shared.tokens, shared.total_cells) == (1024, 1024)
    assert buffers.cache_context(n_ctx=1000, sequences=3, unified=False).tokens == 512


def test_token_embedding_stays_on_the_host() -> None:
    """128,256 × 4,096 weights at 4.5 bits = 281.81 MiB; 4,403.49 MiB on the GPU, as printed by b2843."""
    weights = buffers.layer_weights(LLAMA_3, weights_bytes=0, precision=Q4_K_M)
    assert weights.embedding == 128256 * 4096 * 9 // 16
    assert round((weights.output + sum(weights.layers)) / MIB, 2) == 4403.49


def test_tied_embedding_is_held_twice() -> None:
    model = model_source.load("llama-3.2-1b")
    weights = buffers.layer_weights(model, weights_bytes=0, precision=catalog.weight_format("q8_0"))
    # 128,256 × 2,048 at 8.5 bits, and the final norm of 2,048 × 4 B on the GPU
    assert weights.embedding == 128256 * 2048 * 17 // 16
    assert weights.output == weights.embedding + 2048 * 4


def test_shares_without_a_format() -> None:
    """8 GiB of weights shared by parameters: they add up, the embedding takes its share."""
    weights = buffers.layer_weights(LLAMA_3, weights_bytes=8 * GIB)
    assert weights.total == pytest.approx(8 * GIB, rel=1e-8)
    assert weights.embedding == pytest.approx(8 * GIB * 128256 * 4096 / LLAMA_3.parameters, rel=1e-8)


@pytest.mark.parametrize(("bits", "mib"), [(16, 1024), (8, 544), (4, 288)])
def test_kv_types_count_their_scales(bits: int, mib: int) -> None:
    """32 layers × 8 heads × 256 × 8192 cells: 1024 MiB in f16, × 17/32 in q8_0, × 9/32 in q4_0."""
    context = buffers.cache_context(n_ctx=8192, sequences=1, unified=True)
    kv, _ = buffers.layer_cache_bytes(LLAMA_3, context, kv_bits=bits, ubatch=512)
    assert sum(kv) == mib * MIB


def test_sliding_layers_hold_window_and_micro_batch() -> None:
    """Gemma-3-27B, 131,072 cells: 10 full layers × 16,384 B; 52 of 1024 + 512 cells: 10,863 MiB."""
    model = model_source.load("gemma-3-27b")
    context = buffers.cache_context(n_ctx=131072, sequences=1, unified=True)
    kv, _ = buffers.layer_cache_bytes(model, context, kv_bits=16, ubatch=512)
    per_cell = 2 * 16 * 128 * 2
    assert sum(kv) == 10 * per_cell * 131072 + 52 * per_cell * 1536
    # Four slots of a unified cache hold four windows: pad(4 · 1024 + 512).
    shared = replace(context, sequences=4)
    kv, _ = buffers.layer_cache_bytes(model, shared, kv_bits=16, ubatch=512)
    assert sum(kv) == 10 * per_cell * 131072 + 52 * per_cell * 4608


def test_states_are_32_bits() -> None:
    """Qwen3.6-27B: 16 × 2 × 4 × 256 × 2 B × 262,144 = 16,384 MiB; 598.5 MiB of states for 4 sequences."""
    model = model_source.load("qwen3.6-27b")
    context = buffers.cache_context(n_ctx=262144, sequences=4, unified=True)
    kv, state = buffers.layer_cache_bytes(model, context, kv_bits=16, ubatch=512)
    assert sum(kv) == 16384 * MIB
    assert sum(state) / MIB == 598.5


@pytest.mark.parametrize(
    ("name", "build", "cells", "ubatch", "mib"),
    [
        ("llama-2-7b", 1680, 512, 512, 70.5),  # logits 62.5 + hidden 8
        ("llama-2-13b", 1680, 512, 512, 75.0),  # 2 · 27 + 2 · 10 + mask 1
        ("llama-2-70b", 1691, 512, 512, 145.0),  # 2 · 56 + 2 · 16 + 1
        ("llama-3-8b", 2843, 8192, 512, 560.0),  # scores 512 + 4 · 8 + mask 16
        ("llama-3-8b", 2797, 512, 512, 258.5),  # logits 250.5 + 8
        ("qwen3.6-27b", 10809, 32768, 128, 38.5),
    ],
)
def test_compute_buffers(name: str, build: int, cells: int, ubatch: int, mib: float) -> None:
    """Sizes printed by those builds."""
    size = buffers.widths(model_source.load(name))
    rule, _ = compute_rule(build)
    assert buffers.compute_bytes(size, rule, cells=cells, ubatch=ubatch) == mib * MIB


def test_the_plan_adds_up_to_what_was_printed() -> None:
    made = planned(version="2843", max_model_len=8192)
    assert {name: round(size / MIB, 2) for name, size in made.terms.items()} == {
        "total": round(visible_bytes(24 * GIB) / MIB, 2),
        "budget": round(visible_bytes(24 * GIB) / MIB, 2),
        "weights": 4403.49,
        "extra": 0,
        "kv_cache": 1024,
        "compute": 560,
        "host_weights_outside": 281.81,
        "host_kv_cache_outside": 0,
        "host_states_outside": 0,
        "host_compute_outside": 24,
    }
    assert made.starts is True
    assert (made.kv_tokens, made.max_concurrency) == (8192, 1.0)
    assert made.flag("gpu_layers").value == 33


def test_slots_left_out_are_four_on_one_cache() -> None:
    made = planned(max_model_len=1024)
    assert (made.flag("parallel").value, made.flag("kv_unified").value) == (4, True)
    assert made.kv_tokens == 1024
    assert any("4 slots share" in note for note in made.notes)
    asked = planned(max_model_len=4096, max_num_seqs=4)
    assert asked.kv_tokens == 16384
    assert asked.max_concurrency == 4


def test_fit_lowers_context_then_layers() -> None:
    """Left unset, the context shrinks until 1 GiB is free; asked for, the layers do."""
    made = planned(6, kv_bits=16)
    used = sum(made.terms[name] for name in ("weights", "kv_cache", "compute"))
    assert made.starts is True
    assert used <= 5 * GIB
    assert made.kv_tokens is not None
    assert made.kv_tokens < 8192
    fixed = planned(6, max_model_len=8192)
    assert int(fixed.flag("gpu_layers").value) < 33
    assert fixed.starts is True


def test_refusal_names_the_allocation() -> None:
    made = planned(4, version="2843", max_model_len=8192, gpu_layers=33)
    assert made.starts is False
    assert made.reason is not None
    assert "for the model" in made.reason
    assert any(entry.flag.startswith("--gpu-layers") for entry in made.advice)
    # 131,072 B a token: 128 GiB of cache for 2^20 tokens, ggml-org/llama.cpp#8101
    long = planned(80, version="3000", max_model_len=1 << 20, gpu_layers=33)
    assert long.kv_pool.value == 128 * GIB
    assert long.reason is not None
    assert "for the KV cache" in long.reason
    assert long.longest_model_len is not None
    assert long.longest_model_len < 1 << 20


def test_layers_on_the_host_take_their_cache_along() -> None:
    made = planned(version="2843", max_model_len=8192, gpu_layers=17)
    # 16 layers and the output on the GPU: half the cache.
    assert made.terms["kv_cache"] == made.terms["host_kv_cache_outside"] == 512 * MIB


@given(gpu_layers=st.integers(0, 33), total=st.integers(1, 96), length=st.integers(1, 1 << 20))
def test_nothing_is_negative(gpu_layers: int, total: int, length: int) -> None:
    made = planned(total, gpu_layers=gpu_layers, max_model_len=length)
    assert all(value >= 0 for value in made.terms.values())
    assert made.kv_tokens is not None
    assert made.kv_tokens >= length


@pytest.mark.parametrize("version", ["0.3.36", "", "latest", "b", "b99999999"])
def test_versions_are_builds(version: str) -> None:
    with pytest.raises(InputError, match=r"no llama\.cpp build"):
        build_number(version)


def test_builds() -> None:
    assert build_number("b9272") == build_number("9272 (1d7ab2b94)") == 9272
    assert build_number(None) == NEWEST


@pytest.mark.parametrize("flags", [{"tp": 40}, {"gpu_layers": -1}])
def test_impossible_flags(flags: dict[str, int]) -> None:
    with pytest.raises(InputError):
        planned(24, **flags)


SLIDING = hf_config.read_model(
    {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 2048,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    where="test",
    name="random gemma3",
    architecture=catalog.architecture("gemma3_text"),
    source="test",
)


@pytest.mark.parametrize(
    ("n_ctx", "sequences", "unified", "cells", "full_mib", "sliding_mib"),
    [
        (4000, 1, False, 4096, 8, 15),
        (4096, 3, False, 4608, 9, 45),
        (32768, 4, True, 32768, 64, 45),
        (32768, 4, False, 32768, 64, 60),
    ],
)
def test_caches_as_a_build_of_may_2026_printed_them(
    n_ctx: int, sequences: int, unified: bool, cells: int, full_mib: float, sliding_mib: float
) -> None:
    """Run on a CPU with random weights: 2 full and 10 sliding layers of 1,024 tokens, micro-batch 512."""
    context = buffers.cache_context(n_ctx=n_ctx, sequences=sequences, unified=unified)
    assert context.total_cells == cells
    kv, _ = buffers.layer_cache_bytes(SLIDING, context, kv_bits=16, ubatch=512)
    assert kv[5] + kv[11] == full_mib * MIB
    assert sum(kv) == (full_mib + sliding_mib) * MIB


@pytest.mark.parametrize(
    ("ffn", "hidden", "cells", "mib"),
    [
        (2816, 1024, 1536, 25.56),
        (2816, 1024, 4096, 32.51),
        (2816, 1024, 8192, 39.51),
        (2816, 1024, 32768, 106.01),
        (2048, 640, 1536, 23.57),
        (2048, 640, 4096, 28.27),
        (2048, 640, 8192, 36.27),
        (2048, 640, 32768, 117.27),
    ],
)
def test_compute_buffers_of_a_build_of_may_2026(ffn: int, hidden: int, cells: int, mib: float) -> None:
    """Printed with flash attention on a CPU, where inputs are in the same buffer: within 20 %."""
    size = buffers.Widths(hidden=hidden, ffn=ffn, routed=0, kv=256, heads=8, vocab=2048, latent=False)
    rule, _ = compute_rule(9200)
    made = buffers.compute_bytes(size, rule, cells=cells, ubatch=512) / MIB
    assert made == pytest.approx(mib, rel=0.2)
