"""Parts beside the decoder in a budget: LoRA slots, draft models, EAGLE heads, the model's own MTP layers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capplan import model_source, vram
from capplan.cli import run
from capplan.draft import draft_of
from capplan.errors import InputError
from capplan.estimate import VramEstimate
from capplan.weights import tower_share, weight_budget

GIB = 1 << 30
# Llama-3.1-8B: 131,072 B a token; Llama-3.2-1B: 16 · 2 · 8 · 64 · 2 B = 32,768 B a token.
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 1, "vocab_size": 128_256, "draft_vocab_size": 32_000, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "torch_dtype": "float16", "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


def plan(**fields: Any) -> VramEstimate:
    return vram("llama-3.1-8b", users=16, context=4096, gpu_memory_bytes=80 * 10**9, **fields)


def extra(estimate: VramEstimate) -> dict[str, int]:
    return {part["name"]: part["bytes"] for part in estimate.to_dict()["extra"]}


def test_lora_slots_are_a_part_of_the_budget() -> None:
    plain, served = plan(), plan(lora=("rank=16,targets=q_proj+v_proj",), lora_slots=4)
    assert extra(served) == {"LoRA slots": 4 * 83_886_080}
    assert served.need.total_bytes - plain.need.total_bytes == 4 * 83_886_080
    assert served.verdicts[0].max_users is not None
    assert plain.verdicts[0].max_users is not None
    assert served.verdicts[0].max_users <= plain.verdicts[0].max_users
    notes = " ".join(served.notes)
    assert "4 × rank 16 (max_loras × max_lora_rank)" in notes
    assert "13.00 MiB of its own beside 64 layers" in notes


def test_slots_default_to_the_adapters_given_and_the_largest_rank() -> None:
    served = plan(lora=("rank=8,targets=q_proj", "rank=32,targets=all-linear"))
    assert extra(served) == {"LoRA slots": 2 * 2 * 83_886_080}


def test_a_draft_model_has_weights_and_a_cache_of_its_own() -> None:
    plain, drafted = plan(), plan(draft_model="llama-3.2-1b")
    assert extra(drafted) == {"draft: meta-llama/Llama-3.2-1B": 2_471_628_800}
    answer = drafted.to_dict()
    cache = 16 * 4096 * 32_768
    assert answer["draft_kv_cache"] == {"bytes": cache, "bytes_per_token": 32_768}
    # The target's own figures stay what they were.
    for key in ("kv_cache", "weights"):
        assert answer[key] == plain.to_dict()[key]
    assert answer["per_gpu"]["kv_cache"] == plain.to_dict()["per_gpu"]["kv_cache"]
    assert drafted.need.total_bytes == plain.need.total_bytes + 2_471_628_800 + cache
    assert plain.to_dict()["draft_kv_cache"] is None


def test_users_and_context_hold_both_caches() -> None:
    drafted = plan(draft_model="llama-3.2-1b")
    verdict = drafted.verdicts[0]
    assert verdict.pool_bytes is not None
    assert verdict.max_users == verdict.pool_bytes // (4096 * (131_072 + 32_768))
    assert verdict.max_context == verdict.pool_bytes // (16 * (131_072 + 32_768)) // 16 * 16


def test_own_mtp_layers() -> None:
    model = model_source.load("deepseek-v3")
    draft = draft_of("mtp", model, None, kv_bits=16)
    # One more layer of latents: 576 elements at two bytes.
    assert draft.layout.bytes_per_token == 1152
    plain, drafted = vram("deepseek-v3"), vram("deepseek-v3", draft_model="MTP")
    assert any("--draft-model mtp" in note for note in plain.notes)
    assert not any("not counted" in note for note in drafted.notes)
    assert extra(drafted) == {"draft: 1 MTP layer(s)": draft.weights_bytes}
    assert drafted.draft_kv_bytes == 16 * 4096 * 1152


def test_own_mtp_layers_on_several_ranks() -> None:
    model = model_source.load("deepseek-v3")
    one, eight = (draft_of("mtp", model, None, kv_bits=16, tp=tp) for tp in (1, 8))
    assert one.weights_bytes / 8 < eight.weights_bytes < one.weights_bytes / 7
    # A latent is whole on every rank.
    assert eight.layout.bytes_per_token == 1152


def test_a_draft_on_several_ranks() -> None:
    model = model_source.load("llama-3.1-8b")
    draft = draft_of("llama-3.2-1b", model, None, kv_bits=8, tp=2)
    assert draft.layout.bytes_per_token == 32_768 / 2 / 2
    assert draft.whole_layout.bytes_per_token == 32_768 / 2
    assert draft.weights_bytes == weight_budget(model_source.load("llama-3.2-1b"), None, tp=2).bytes


def eagle(tmp_path: Path, **changes: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3 | changes))
    return str(tmp_path)


def test_an_eagle_3_head_as_published(tmp_path: Path) -> None:
    # fc 3·4096 × 4096, one layer that reads two streams, a head of 32,000; the file of
    # EAGLE3-LLaMA3.1-Instruct-8B has 850 MB.
    layer = 2 * 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336
    parameters = 3 * 4096 * 4096 + layer + 32_000 * 4096 + 4 * 4096
    model = model_source.load(eagle(tmp_path))
    assert model.parameters == parameters
    assert weight_budget(model, None).bytes == 2 * parameters == 849_379_328
    draft = draft_of(str(tmp_path), model_source.load("8b"), None, kv_bits=16)
    assert draft.layout.bytes_per_token == 2 * 8 * 128 * 2


def test_an_eagle_head_borrows_embedding_and_head(tmp_path: Path) -> None:
    model = model_source.load(eagle(tmp_path, architectures=["EagleLlamaForCausalLM"]))
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14_336
    assert model.parameters == 2 * 4096 * 4096 + layer + 3 * 4096


def test_a_head_for_a_wider_target(tmp_path: Path) -> None:
    plain = model_source.load(eagle(tmp_path)).parameters
    wide = model_source.load(eagle(tmp_path, target_hidden_size=8192)).parameters
    assert wide - plain == 3 * 4096 * 4096


def test_the_speculators_layout(tmp_path: Path) -> None:
    inner = {key: value for key, value in EAGLE3.items() if key not in ("architectures", "draft_vocab_size")}
    outer = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.1", "speculators_config": {"algorithm": "eagle3"},
        "draft_vocab_size": 32_000, "transformer_layer_config": inner, "norm_before_residual": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert model_source.load(str(tmp_path)).parameters * 2 == 849_379_328


@pytest.mark.parametrize("value", [0, -1, "32000", 1.5, 1 << 40, True])
def test_an_absurd_vocabulary_of_a_head_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(InputError, match="draft_vocab_size"):
        model_source.load(eagle(tmp_path, draft_vocab_size=value))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "8b", "draft_model": "mtp"}, "has no MTP layers"),
        ({"model": "8b", "draft_model": "nosuch"}, "unknown model"),
        ({"model": "8b", "lora_slots": 2}, "slots without an adapter"),
        ({"model": "8b", "lora": ("rank=8",), "lora_slots": 0}, "0 slots"),
        ({"model": "8b", "lora": ("rank=8",), "lora_slots": 2000}, "2000 slots"),
        ({"model": "8b", "lora": ("/nowhere",)}, "cannot be read"),
        ({"params": 10**9, "lora": ("rank=8",)}, "needs the layers of a model"),
        ({"params": 10**9, "draft_model": "8b"}, "needs the layers of a model"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_planned_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as raised:
        vram(**fields)
    assert said in str(raised.value)


def test_the_command_shows_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["vram", "--model", "8b", "--lora", "rank=16,targets=q_proj", "--lora-slots", "2"]
    arguments += ["--draft-model", "llama-3.2-1b"]
    assert run([*arguments, "-o", "md"]) == 0
    shown = capsys.readouterr().out
    for line in ("| LoRA slots | 0.16 |", "| draft: meta-llama/Llama-3.2-1B | 2.30 |",
                 "| KV cache | 8.00 |", "| draft KV cache | 2.00 |"):  # fmt: skip
        assert line in shown
    assert run([*arguments, "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    parts = answer["weights"]["bytes"] + sum(part["bytes"] for part in answer["extra"])
    caches = answer["kv_cache"]["bytes"] + answer["draft_kv_cache"]["bytes"]
    assert answer["total"]["bytes"] == parts + caches + answer["overhead"]["bytes"]


def test_mtp_layers_from_the_files(tmp_path: Path, write_safetensors: Callable[..., Path]) -> None:
    config = {
        "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 512,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "num_nextn_predict_layers": 1, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(
        tmp_path / "model.safetensors",
        [
            ("model.embed_tokens.weight", "BF16", (512, 64)),
            ("model.layers.2.eh_proj.weight", "F8_E4M3", (64, 128)),
            ("model.layers.2.mlp.experts.0.up_proj.weight", "F8_E4M3", (32, 64)),
        ],
    )
    model = model_source.load(str(tmp_path))
    assert weight_budget(model, None).bytes == 512 * 64 * 2
    assert draft_of("mtp", model, None, kv_bits=16).weights_bytes == 64 * 128 + 32 * 64


def test_encoder_layers_are_cut_over_ranks_and_the_rest_is_whole() -> None:
    """Qwen2.5-VL: 32 layers of 4 · 1280² + 3 · 1280 · 3420 in the encoder, patches and norms beside them."""
    model = model_source.load("qwen2.5-vl-7b")
    encoder, projector = model.towers
    cut = 32 * (4 * 1280**2 + 3 * 1280 * 3420 + 3 * 1280 + 2 * 3420)
    assert encoder.parameters - cut == 1280 * 1176 + 32 * (2 * 1280 + 2 * 1280)
    whole, four = tower_share(encoder, 1), tower_share(encoder, 4)
    assert (whole, tower_share(projector, 4)) == (1, 1)
    # Biases of the output rows are whole, those of q, k, v, gate and up are cut.
    assert four == pytest.approx((cut / 4 + (encoder.parameters - cut)) / encoder.parameters, rel=1e-9)
    estimate = vram("qwen2.5-vl-7b", users=1, tp=4, gpu_memory_bytes=80 * 10**9)
    held = {part["name"]: part["bytes"] for part in estimate.to_dict()["per_gpu"]["extra"]}
    assert held["vision tower"] == pytest.approx(four * encoder.parameters * 2, abs=2)
