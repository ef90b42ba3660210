"""Mistakes seen in other sizing tools, each with worked numbers. None of these needs the measured data."""

import json
import struct
from pathlib import Path

import pytest

from capplan import catalog
from capplan.estimate import VramQuestion, answer
from capplan.readers.safetensors import read_safetensors
from capplan.weights import weight_budget
from tests.accuracy import shapes
from tests.accuracy.kv_cache import verdict_of
from tests.accuracy.parameters import active, by_role


def test_packed_words_are_not_parameters(tmp_path: Path) -> None:
    # One AWQ matrix of 4096 × 4096: eight 4-bit weights an int32, groups of 128.
    tensors = {
        "qweight": ("I32", (4096, 512)),
        "qzeros": ("I32", (32, 512)),
        "scales": ("F16", (32, 4096)),
    }
    header, end = {}, 0
    for part, (dtype, shape) in tensors.items():
        start, end = end, end + shape[0] * shape[1] * (4 if dtype == "I32" else 2)
        name = f"model.layers.0.self_attn.q_proj.{part}"
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    raw = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    checkpoint = read_safetensors(file)
    assert checkpoint.parameters == 4096 * 4096 == 16_777_216
    # 8,388,608 + 65,536 + 262,144 B: 4.15625 bits a weight, where words would give 33.25.
    assert checkpoint.stored_bytes == 8_716_288 == 16_777_216 * 4.15625 / 8


def test_a_quantized_config_has_the_parameters_of_the_model() -> None:
    plain = shapes.read(shapes.LLAMA_3_8B)
    packed = shapes.read({**shapes.LLAMA_3_8B, "quantization_config": shapes.AWQ})
    assert packed.parameters == plain.parameters == 8_030_261_248
    assert weight_budget(packed, None).bytes == 5_727_854_592


def test_kv_cache_is_in_the_total(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.LLAMA_3_8B))

    def total(users: int) -> int:
        question = VramQuestion(model=str(file), users=users, context=8192, overhead_bytes=0)
        return answer(question).need.total_bytes

    # 64 × 8192 tokens of 131,072 B, beside 8,030,261,248 weights of 2 B.
    assert total(64) == 68_719_476_736 + 16_060_522_496
    assert total(64) - total(63) == 8192 * 131_072 == 1 << 30


def test_both_embedding_matrices_unless_tied() -> None:
    untied = shapes.read(shapes.LLAMA_3_8B)
    tied = shapes.read({**shapes.LLAMA_3_8B, "tie_word_embeddings": True})
    assert untied.parameters - tied.parameters == 128256 * 4096 == 525_336_576
    assert by_role(untied)["embedding"] == by_role(untied)["lm_head"] == 525_336_576
    assert "lm_head" not in by_role(tied)
    # Llama-3.2-3B as published: one matrix.
    assert shapes.read(shapes.LLAMA_32_3B).parameters == 3_212_749_824


@pytest.mark.parametrize(
    ("config", "mlp", "total"),
    [
        # 3 × hidden × ffn × layers: 18944 / 3584 = 5.29, 11008 / 4096 = 2.69, 25600 / 5120 = 5.
        pytest.param(shapes.QWEN25_7B, 3 * 3584 * 18944 * 28, 7_615_616_512, id="Qwen2.5-7B"),
        pytest.param(shapes.LLAMA_2_7B, 3 * 4096 * 11008 * 32, 6_738_415_616, id="Llama-2-7B"),
        pytest.param(shapes.QWEN3_32B, 3 * 5120 * 25600 * 64, 32_762_123_264, id="Qwen3-32B"),
    ],
)
def test_ffn_width_is_read_not_guessed(config: shapes.Config, mlp: int, total: int) -> None:
    model = shapes.read(config)
    assert by_role(model)["mlp"] == mlp
    assert model.parameters == total


@pytest.mark.parametrize(
    ("config", "resident", "used"),
    [
        # 32 × (8 or 2 experts × 3 × 4096 × 14336 + router) + attention, norms, two embeddings.
        pytest.param(shapes.MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248, id="Mixtral-8x7B"),
        pytest.param(shapes.QWEN3_30B_A3B, 30_532_122_624, 3_353_032_704, id="Qwen3-30B-A3B"),
        pytest.param(shapes.DEEPSEEK_V3, 671_026_404_352, 37_552_282_624, id="DeepSeek-V3"),
    ],
)
def test_all_experts_are_resident(config: shapes.Config, resident: int, used: int) -> None:
    model = shapes.read(config)
    assert model.parameters == resident
    assert active(model) == used
    assert weight_budget(model, catalog.weight_format("bf16")).bytes == 2 * resident


@pytest.mark.parametrize(
    ("config", "total", "kv_bytes_per_token"),
    [
        # head_dim 128 although 5120 / 32 = 160: 2 × 40 layers × 8 heads × 128 × 2 B.
        pytest.param(shapes.MISTRAL_NEMO, 12_247_782_400, 163_840, id="Mistral-Nemo"),
        # 128 although 1024 / 16 = 64: 2 × 28 × 8 × 128 × 2 B.
        pytest.param(shapes.QWEN3_06B, 596_049_920, 114_688, id="Qwen3-0.6B"),
        # 128 although 5120 / 64 = 80: 2 × 64 × 8 × 128 × 2 B.
        pytest.param(shapes.QWEN3_32B, 32_762_123_264, 262_144, id="Qwen3-32B"),
        # One KV head of 256: 2 × 18 × 256 × 2 B.
        pytest.param(shapes.GEMMA_2B, 2_506_172_416, 18_432, id="Gemma-2B"),
        # 256 although 3584 / 16 = 224: 2 × 42 × 8 × 256 × 2 B.
        pytest.param(shapes.gemma2(42, 3584, 16, 8, 256, 14336), 9_241_705_984, 344_064, id="Gemma-2-9B"),
        # 128 although 4608 / 32 = 144: 2 × 46 × 16 × 128 × 2 B.
        pytest.param(shapes.GEMMA_2_27B, 27_227_128_320, 376_832, id="Gemma-2-27B"),
        # 128 although 5376 / 32 = 168: 2 × 62 × 16 × 128 × 2 B.
        pytest.param(shapes.GEMMA_3_27B, 27_009_346_304, 507_904, id="Gemma-3-27B"),
    ],
)
def test_head_width_is_not_hidden_over_heads(
    config: shapes.Config, total: int, kv_bytes_per_token: int
) -> None:
    assert config["head_dim"] != config["hidden_size"] // config["num_attention_heads"] or (
        config is shapes.GEMMA_2B
    )
    assert shapes.read(config).parameters == total
    assert shapes.layout(config).bytes_per_token == kv_bytes_per_token


def test_weight_and_kv_formats_are_apart(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shapes.LLAMA_3_8B))
    estimate = answer(VramQuestion(model=str(file), precision="int4", users=1, context=4096))
    # Four-bit weights, a 16-bit cache: 4096 × 131,072 B.
    assert estimate.kv_bytes == 536_870_912
    assert estimate.kv_format.id == "bf16"


def test_a_started_block_is_a_whole_block() -> None:
    layout = shapes.layout(shapes.LLAMA_3_8B)
    # Ten blocks of 16 × 131,072 B and a bit: 17 tokens take two blocks, so five users.
    pool = 10 * 16 * 131_072 + 1000
    verdict = verdict_of(layout, pool=pool, context=17, block_size=16)
    assert (verdict.max_concurrency, verdict.max_users, verdict.pool_tokens) == (5.0, 5, 85)
