"""config.json → Model: caches by family, nested files, defaults, refusals."""

import copy
from typing import Any

import pytest

from capplan import catalog
from capplan.errors import InputError
from capplan.readers.hf_config import MAX_DEPTH, model_type_of, read_model
from capplan.specs import Cache, Model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def read(config: dict[str, Any]) -> Model:
    model_type = model_type_of(config)
    return read_model(
        config,
        where="config.json",
        name="test",
        architecture=catalog.architecture(model_type) if model_type else None,
    )


def llama(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(LLAMA), **changes}


def caches(model: Model) -> list[tuple[Cache, int]]:
    return [(cache, len(group.indices)) for group in model.groups for cache in group.layer.caches()]


def kinds(model: Model) -> list[tuple[str, int]]:
    return [(cache.kind, layers) for cache, layers in caches(model)]


def test_a_small_llama_by_hand() -> None:
    # a layer: q and o 2·64·64, k and v 2·16·64, three of 64·96, two norms of 64
    layer = 2 * 4096 + 2 * 1024 + 3 * 6144 + 128
    model = read(LLAMA)
    assert model.parameters == 4 * layer + 2 * 6400 + 64
    assert caches(model) == [(Cache(kind="full", heads=2, k_width=8, v_width=8), 4)]
    assert (model.layers, model.hidden, model.vocab, model.heads, model.tied) == (4, 64, 100, 8, False)


def test_parameters_are_additive_over_layers() -> None:
    sizes = [read(llama(num_hidden_layers=layers)).parameters for layers in (1, 2, 3, 5)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == (sizes[3] - sizes[2]) // 2 > 0


def test_more_key_value_heads_never_cache_less() -> None:
    sizes = [caches(read(llama(num_key_value_heads=heads)))[0][0].heads for heads in (1, 2, 4, 8)]
    assert sizes == [1, 2, 4, 8]


def test_tied_weights_are_counted_once() -> None:
    assert read(LLAMA).parameters - read(llama(tie_word_embeddings=True)).parameters == 6400


def test_equal_layers_are_one_group_and_keep_their_positions() -> None:
    gemma = llama(model_type="gemma2", head_dim=8, sliding_window=16, num_hidden_layers=5)
    positions = [group.indices for group in read(gemma).groups]
    assert positions == [(0, 2, 4), (1, 3)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gemma2", "head_dim": 8, "sliding_window": 16}, [("sliding", 2), ("full", 2)]),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, [("full", 4)]),
        ({"model_type": "mistral", "sliding_window": 16}, [("sliding", 4)]),
        ({"model_type": "gemma3n_text", "head_dim": 8, "num_kv_shared_layers": 2, "sliding_window": 16,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, [("sliding", 1), ("full", 1)]),
        ({"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 4,
          "num_experts": 1},
         [("state", 3), ("full", 1)]),
        ({"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
          "head_dim": 8},
         [("full", 4), ("state", 4)]),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [1]}, [("full", 3), ("cross", 1)]),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 4,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": None}, [("mla", 4)]),
        ({"model_type": "longcat_flash", "kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 4,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "moe_topk": 2,
          "expert_ffn_hidden_size": 8, "zero_expert_num": 2}, [("mla", 4), ("mla", 4)]),
        ({"model_type": "recurrent_gemma", "attention_window_size": 16, "num_hidden_layers": 6},
         [("state", 4), ("sliding", 2)]),
        ({"model_type": "rwkv", "num_key_value_heads": None}, [("state", 4)]),
    ],
    ids=[
        "Gemma 2 slides on even layers", "Qwen2 leaves its window off", "Mistral slides everywhere",
        "Gemma 3n's last layers keep nothing", "Jamba attends once in a period", "Falcon-H1 does both",
        "Llama 3.2 Vision keeps the image's keys", "DeepSeek keeps latents", "LongCat keeps two a layer",
        "Griffin slides every third layer", "RWKV keeps states",
    ],
)  # fmt: skip
def test_what_families_keep(changes: dict[str, Any], expected: list[tuple[str, int]]) -> None:
    assert kinds(read(llama(**changes))) == expected


def test_every_use_of_a_shared_block_keeps_its_own_cache() -> None:
    config = llama(
        model_type="zamba2", num_hidden_layers=6, hybrid_layer_ids=[1, 3, 5], num_mem_blocks=1,
        n_mamba_heads=8, mamba_headdim=16, mamba_d_state=4, adapter_rank=2, num_key_value_heads=8,
    )  # fmt: skip
    model = read(config)
    full = [(cache, layers) for cache, layers in caches(model) if cache.kind == "full"]
    assert sum(layers for _, layers in full) == 3
    assert {cache.k_width for cache, _ in full} == {128 // 8}
    attention = [
        tensor.parameters * len(group.indices)
        for group in model.groups
        for tensor in group.layer.tensors()
        if tensor.role == "attention"
    ]
    assert sum(attention) == 3 * 128 * 128 + 64 * 128  # one block owns them


@pytest.mark.parametrize("value", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_width_is_named(value: str) -> None:
    config = llama()
    del config[value]
    with pytest.raises(InputError) as caught:
        read(config)
    assert value in caught.value.message
    assert caught.value.where == "config.json"


def test_an_unknown_key_is_refused_with_its_value_and_what_to_do() -> None:
    with pytest.raises(InputError) as caught:
        read(llama(telepathy_heads=7))
    text = str(caught.value)
    assert "telepathy_heads" in text
    assert "7" in text
    assert "config.json" in text
    assert "profiles/architectures/llama.yaml" in text


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}], ids=str)
def test_an_unknown_key_that_switches_off_is_ignored_and_listed(value: object) -> None:
    assert "telepathy_heads" in read(llama(telepathy_heads=value)).ignored_keys


def test_harmless_keys_are_listed_and_change_nothing() -> None:
    model = read(llama(bos_token_id=1, rope_theta=1e6, attention_dropout=0.1, pretraining_tp=2))
    assert model.parameters == read(LLAMA).parameters
    assert {"bos_token_id", "rope_theta", "attention_dropout"} <= set(model.ignored_keys)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "chatglm", "multi_query_group_num": 2, "rmsnorm": False},
        {"model_type": "chatglm", "post_layer_norm": False},
        {"model_type": "mpt", "attn_config": {"qk_ln": True}},
        {"model_type": "mpt", "no_bias": False},
        {"model_type": "hunyuan_v1_moe", "use_cla": True},
        {"model_type": "doge", "is_moe": True},
        {"model_type": "gpt2", "add_cross_attention": True, "n_positions": 64},
        {"is_encoder_decoder": True},
        {"kv_cache_dtype": "fp8"},
        {"quantization": {"bits": 4, "group_size": 64}},
    ],
    ids=lambda changes: " ".join(key for key in changes if key != "model_type"),
)  # fmt: skip
def test_a_key_with_a_value_that_changes_memory_is_not_harmless(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not understood"):
        read(llama(**changes))


def test_an_unknown_architecture_is_a_plain_decoder_only_where_its_keys_say_so() -> None:
    model = read(llama(model_type="new_llama", tie_word_embeddings=False))
    assert model.parameters == read(LLAMA).parameters
    assert "new_llama" in model.assumptions[0]
    with pytest.raises(InputError, match="unknown architecture 'new_gelu'"):
        read(llama(model_type="new_gelu", hidden_act="gelu"))
    without = llama()
    del without["model_type"]
    with pytest.raises(InputError, match="model_type: missing"):
        read(without)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_text_model_of_a_wrapper_is_read(name: str) -> None:
    model = read({"model_type": "wrapper", name: LLAMA, "torch_dtype": "bfloat16"})
    assert model.parameters == read(LLAMA).parameters
    assert model.architecture == "llama"


def test_a_text_config_without_a_type_has_the_wrappers() -> None:
    text = llama()
    del text["model_type"]
    assert model_type_of({"model_type": "llava", "text_config": text}) == "llava"
    assert read({"model_type": "llava", "text_config": text}).parameters == read(LLAMA).parameters


def test_widths_a_wrapper_leaves_out_are_the_classes_own_but_only_there() -> None:
    text = {"model_type": "llama", "vocab_size": 32064}
    # Vicuna 7B with 64 more tokens: 6,738,415,616 + 2 · 64 · 4096
    assert read({"model_type": "llava", "text_config": text}).parameters == 6_738_939_904
    with pytest.raises(InputError, match="num_hidden_layers: missing"):
        read(text)


def test_errors_in_a_nested_file_name_the_nested_key() -> None:
    with pytest.raises(InputError, match=r"text_config\.hidden_size"):
        read({"model_type": "llava", "text_config": llama(hidden_size="wide")})


def test_the_text_models_tying_goes_before_the_wrappers() -> None:
    tied = {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": llama(tie_word_embeddings=True),
    }
    assert read(tied).tied
    outer = {"model_type": "llava", "tie_word_embeddings": True, "text_config": llama()}
    assert read(outer).tied


def test_a_nested_mapping_of_a_family_is_read_key_by_key() -> None:
    config = {
        "model_type": "dbrx", "d_model": 64, "n_heads": 8, "n_layers": 2, "vocab_size": 100,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = read(config)
    # q, o 2·64·64; k, v 2·16·64; four experts of 3·64·16; router 4·64; two norms
    assert model.parameters == 2 * (8192 + 2048 + 12288 + 256 + 128) + 2 * 6400 + 64
    config["attn_config"]["heads_of_another_kind"] = 3  # type: ignore[index]
    with pytest.raises(InputError, match=r"attn_config\.heads_of_another_kind"):
        read(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 16},
        {"hidden_size": 65},
        {"torch_dtype": "int7"},
        {"num_hidden_layers": 4097},
        {"num_experts": 4, "num_experts_per_tok": 5},
        {"hidden_size": 2**31, "intermediate_size": 2**31},
    ],
    ids=["heads that do not divide", "more KV heads than heads", "no whole head", "an unknown dtype",
         "too many layers", "more experts than there are", "an absurd size"],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        read(llama(**changes))


def test_deep_nesting_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 2):
        nested = {"inner": nested}
    with pytest.raises(InputError, match="nested more than"):
        read(llama(rope_scaling=nested))


def test_float32_files_are_served_at_16_bits() -> None:
    assert read(llama(torch_dtype="float32")).dtype_bits == 16


def test_mtp_layers_stand_beside_the_decoder() -> None:
    model = read(llama(num_nextn_predict_layers=1))
    assert model.parameters == read(LLAMA).parameters
    (tower,) = model.towers
    layer = sum(tensor.parameters for tensor in model.groups[0].layer.tensors())
    assert (tower.role, tower.parameters) == ("mtp", layer + 2 * 64 * 64 + 3 * 64)


PLAIN: dict[str, Any] = {**LLAMA, "model_type": "new_llama", "tie_word_embeddings": False}
# Widths of one small config a family; every published file of these families states the key that goes.
ROUTED: dict[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "head_dim": 8,
}  # fmt: skip


def plain(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(PLAIN), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"use_glu": False}, {"gated_mlp": False}, {"is_gated_act": False}, {"glu_width": None},
        {"kv_heads_per_group": 0}, {"expert_table": None}, {"layer_sharing": {}},
        {"cache_rows": None}, {"attn_kernel_width": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_off_says_nothing_about_the_layers_of_an_unknown_class(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(changes))}: not understood"):
        read(plain(**changes))
    assert next(iter(changes)) in read(llama(**changes)).ignored_keys


@pytest.mark.parametrize(
    "changes",
    [
        {"ffn_dim_multiplier": 1.3}, {"intermediate_multiplier": 2}, {"kv_multiplier": 2},
        {"width_alpha": 2.0}, {"_hidden_layers": 7}, {"rope_head_dim": 32}, {"init_width": 9},
        {"expert_dtype": "fp4"}, {"time_step_rank": 8}, {"mamba_d_conv": 4}, {"mamba_expand": 2},
        {"use_mtp": True}, {"top_k": 8},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_no_shape_of_a_name_swallows_a_width(changes: dict[str, Any]) -> None:
    for config in (plain(**changes), llama(**changes)):
        with pytest.raises(InputError, match=next(iter(changes))):
            read(config)


def test_the_samplers_top_k_is_harmless() -> None:
    assert "top_k" in read(llama(top_k=50)).ignored_keys


@pytest.mark.parametrize("key", ["num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "hidden_act"])
def test_an_unknown_class_is_refused_without_what_classes_answer_differently(key: str) -> None:
    config = plain()
    del config[key]
    with pytest.raises(InputError, match="model_type" if key in ("rms_norm_eps", "hidden_act") else key):
        read(config)


def test_an_unknown_class_must_say_which_layers_slide() -> None:
    with pytest.raises(InputError, match="layer_types: missing"):
        read(plain(sliding_window=16))
    kinds_of = {"layer_types": ["sliding_attention"] + ["full_attention"] * 3}
    assert kinds(read(plain(sliding_window=16, **kinds_of))) == [("sliding", 1), ("full", 3)]
    assert kinds(read(plain(sliding_window=16, use_sliding_window=False))) == [("full", 4)]
    assert kinds(read(plain(sliding_window=16, sliding_window_pattern=4))) == [("sliding", 3), ("full", 1)]
    assert kinds(read(plain(sliding_window=None))) == [("full", 4)]


def test_a_wrappers_tying_answers_for_an_unknown_class() -> None:
    text = plain()
    del text["tie_word_embeddings"]
    assert read({"model_type": "wrapper", "tie_word_embeddings": True, "text_config": text}).tied


@pytest.mark.parametrize(
    ("model_type", "changes", "gone"),
    [
        ("qwen3_moe", {}, "num_experts"),
        ("qwen3_moe", {}, "moe_intermediate_size"),
        ("qwen3_moe", {}, "head_dim"),
        ("deepseek", {"n_shared_experts": 1, "first_k_dense_replace": 1}, "n_shared_experts"),
        ("deepseek", {"n_shared_experts": 1, "first_k_dense_replace": 1}, "first_k_dense_replace"),
        ("minimax_m2", {}, "head_dim"),
        ("mistral", {}, "num_key_value_heads"),
        ("qwen3_next", {"shared_expert_intermediate_size": 8, "full_attention_interval": 1},
         "shared_expert_intermediate_size"),
    ],
)  # fmt: skip
def test_a_key_every_file_of_a_family_states_is_missed(
    model_type: str, changes: dict[str, Any], gone: str
) -> None:
    config = llama(model_type=model_type, **(ROUTED if model_type != "mistral" else {}), **changes)
    # Only the name this family gives its experts.
    config.pop("num_experts" if model_type == "deepseek" else "n_routed_experts", None)
    assert read(config).parameters > 0
    del config[gone]
    with pytest.raises(InputError, match=f"{gone}: missing"):
        read(config)


MLA: dict[str, Any] = {
    "model_type": "deepseek_v32", "kv_lora_rank": 16, "q_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": None, "index_n_heads": 2,
    "index_head_dim": 128, "index_topk": 64,
}  # fmt: skip


@pytest.mark.parametrize("gone", ["index_n_heads", "q_lora_rank"])
def test_latent_attention_states_its_ranks_and_its_indexer(gone: str) -> None:
    config = llama(**MLA)
    assert "indexer" in {kind for kind, _ in kinds(read(config))}
    del config[gone]
    with pytest.raises(InputError, match=f"{gone}: missing"):
        read(config)


def test_gemma_4_states_the_heads_of_layers_whose_keys_are_their_values() -> None:
    config = llama(
        model_type="gemma4_text", head_dim=8, global_head_dim=16, layer_types=["full_attention"] * 4,
        sliding_window=8, attention_k_eq_v=True, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
    )  # fmt: skip
    assert [cache.heads for cache, _ in caches(read(config))] == [1]
    del config["num_global_key_value_heads"]
    with pytest.raises(InputError, match="num_global_key_value_heads: missing"):
        read(config)


@pytest.mark.parametrize("name", ["text_config", "llm_config", "quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [[1, 2], "gptq", 7, True], ids=str)
def test_a_nested_config_that_is_no_mapping_is_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name}: .* is not a mapping"):
        read(llama(**{name: value}))


@pytest.mark.parametrize(
    "nested",
    [
        {"quantization_config": {"quant_method": "fp8", "ignored": ["model.layers.0"]}},
        {"quantization_config": {"quant_method": "awq", "bits": 4, "layer_bits": {"3": 8}}},
        {"quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 4, "type": "int", "group_size": 128, "second_scale_bits": 8}}}}},
        {"vision_config": {**dict.fromkeys(("hidden_size", "intermediate_size"), 8), "num_hidden_layers": 1,
                           "model_type": "siglip_vision_model", "second_hidden_size": 64}},
    ],
    ids=["a list by another name", "bits of single layers", "inside a group", "a tower's width"],
)  # fmt: skip
def test_what_nested_configs_hold_is_accounted_for(nested: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not understood"):
        read(llama(**nested))


def test_how_a_checkpoint_was_calibrated_is_harmless() -> None:
    calibrated = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True,
        "damp_percent": 0.01, "true_sequential": True, "producer": {"name": "x"}, "version": "1",
    }  # fmt: skip
    assert read(llama(quantization_config=calibrated)).quantization is not None


def test_a_part_that_is_not_counted_is_named_for_machines_too() -> None:
    model = read(llama(vision_config={"model_type": "eye_of_newt"}, audio_config={"frames": "many"}))
    assert model.uncounted == ("vision_config", "audio_config")
    assert read(LLAMA).uncounted == ()


@pytest.mark.parametrize(
    ("vision", "gone"),
    [
        ({"model_type": "qwen3_vl", "hidden_size": 8, "depth": 1, "intermediate_size": 8, "patch_size": 16,
          "deepstack_visual_indexes": [0]}, "patch_size"),
        ({"model_type": "gemma4_vision", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8,
          "num_attention_heads": 2, "position_embedding_size": 4, "patch_size": 16}, "patch_size"),
        ({"model_type": "exaone4_5_vision", "hidden_size": 8, "depth": 1, "num_heads": 2,
          "num_key_value_heads": 1, "intermediate_size": 8, "fullatt_block_indexes": [0]}, "depth"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)  # fmt: skip
def test_a_known_tower_without_a_width_is_refused(vision: dict[str, Any], gone: str) -> None:
    assert read(llama(vision_config=vision)).towers
    del vision[gone]
    with pytest.raises(InputError, match=f"{gone}: missing"):
        read(llama(vision_config=vision))


def test_an_unknown_word_on_tying_is_not_harmless_even_when_false() -> None:
    with pytest.raises(InputError, match="tie_head_and_input: not understood"):
        read(llama(tie_head_and_input=False))
    assert "tie_encoder_decoder" in read(llama(tie_encoder_decoder=False)).ignored_keys
