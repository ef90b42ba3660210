"""Stored bytes: llama.cpp's mixes of types from an architecture alone, ranks, parts beside the decoder."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from capplan import catalog, model_source
from capplan.gguf_mix import in_layers, mix_tensors
from capplan.readers import hf_config
from capplan.specs import Model, StoredWeights
from capplan.weights import tower_bytes, weight_budget

# llama.cpp tools/quantize README, Llama-3.1-8B: bits a weight of 8,030,261,312, the 64 factors of its
# rotary scaling (256 B at 32 bits) included, which are no parameters.
PUBLISHED_BITS = {
    "iq1_s": 2.0042, "iq1_m": 2.1460, "iq2_xxs": 2.3824, "iq2_xs": 2.5882, "iq2_s": 2.7403,
    "iq2_m": 2.9294, "iq3_xxs": 3.2548, "iq3_xs": 3.4977, "iq3_s": 3.6606, "iq3_m": 3.7628,
    "iq4_xs": 4.4597, "iq4_nl": 4.6818, "q2_k_s": 2.9697, "q2_k": 3.1593, "q3_k_s": 3.6429,
    "q3_k_m": 3.9960, "q3_k_l": 4.2979, "q4_k_s": 4.6672, "q4_k_m": 4.8944, "q5_k_s": 5.5704,
    "q5_k_m": 5.7036, "q6_k": 6.5633, "q8_0": 8.5008,
}  # fmt: skip
# Tensor bytes of the files llama.cpp's quantizer wrote of a random 702 M Llama shape.
WRITTEN_BYTES = {
    "iq4_xs": 390_546_432, "q2_k": 277_933_056, "q3_k_m": 352_327_680, "q4_0": 408_007_680,
    "q4_k_m": 429_904_896, "q5_k_m": 500_929_536, "q6_k": 576_393_216, "q8_0": 746_477_568,
}  # fmt: skip


def llama(**changes: object) -> Model:
    """24 layers of 1536, 12 heads over 4, FFN 4096, vocabulary 32,000: 702,359,040 parameters."""
    config = {
        "model_type": "llama", "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32_000, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    made = {**config, **changes}
    return hf_config.read_model(
        made, where="test", name="test", architecture=catalog.architecture(str(made["model_type"]))
    )


@pytest.mark.parametrize("mix", PUBLISHED_BITS)
def test_bits_a_weight_as_llama_cpp_publishes_them(mix: str) -> None:
    model = model_source.load("llama-3.1-8b")
    size = weight_budget(model, catalog.weight_format(mix)).bytes + 64 * 4
    assert round(size * 8 / 8_030_261_312, 4) == PUBLISHED_BITS[mix]


@pytest.mark.parametrize("mix", WRITTEN_BYTES)
def test_bytes_as_the_quantizer_wrote_them(mix: str) -> None:
    assert weight_budget(llama(), catalog.weight_format(mix)).bytes == WRITTEN_BYTES[mix]


def test_every_mix_is_checked_here() -> None:
    mixes = {name for name in catalog.ids("formats") if catalog.load_format(name).rules}
    assert mixes - set(PUBLISHED_BITS) == {"q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0"}


def types_of(model: Model, mix: str) -> dict[str, list[str]]:
    """Types by tensor name, one a layer."""
    made: dict[str, list[str]] = {}
    for tensor, form, _ in mix_tensors(model, catalog.weight_format(mix)):
        made.setdefault(tensor.name, []).append(form.id)
    return made


def test_types_of_q4_k_m_by_tensor() -> None:
    # What the quantizer chose for this shape: 12 of 24 attn_v and ffn_down in Q6_K.
    types = types_of(llama(), "q4_k_m")
    assert types["lm_head"] == ["q6_k"]
    assert types["model.embed_tokens"] == ["q4_k"]
    assert types["model.norm"] == ["f32"]
    assert set(types["self_attn.q_proj"]) == {"q4_k"}
    more = [layer for layer in range(24) if types["self_attn.v_proj"][layer] == "q6_k"]
    assert more == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert types["mlp.down_proj"] == types["self_attn.v_proj"]


@pytest.mark.parametrize(
    ("rule", "layers", "chosen"),
    [
        ("more", 32, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
        ("first 2", 32, [0, 1]),
        ("first 1/8", 24, [0, 1, 2]),
        ("first 1/16", 40, [0, 1]),
        ("middle 1/8", 20, list(range(2, 17))),
        ("all", 3, [0, 1, 2]),
        ("more", 3, [2]),
        ("first 1/8", 7, []),
    ],
)
def test_rules_for_some_layers(rule: str, layers: int, chosen: list[int]) -> None:
    assert [layer for layer in range(layers) if in_layers(rule, layer, layers)] == chosen


def test_a_tied_embedding_is_stored_as_a_head() -> None:
    types = types_of(llama(tie_word_embeddings=True), "q4_k_m")
    assert types["model.embed_tokens"] == ["q6_k"]
    assert "lm_head" not in types


def test_rows_that_are_no_multiple_of_256_fall_back() -> None:
    # Qwen2.5-0.5B, 896 wide: Q4_K becomes Q5_0 and Q6_K Q8_0; only ffn_down (4864 = 19 · 256) stays.
    types = types_of(model_source.load("qwen2.5-0.5b"), "q4_k_m")
    assert set(types["self_attn.q_proj"]) == {"q5_0"}
    assert set(types["self_attn.v_proj"]) == {"q5_0", "q8_0"}
    assert types["model.embed_tokens"] == ["q8_0"]
    assert set(types["mlp.down_proj"]) == {"q4_k", "q6_k"}


def test_rows_that_no_block_divides_stay_at_16_bits() -> None:
    model = llama(hidden_size=1548, num_attention_heads=12, num_key_value_heads=4)
    assert set(types_of(model, "q4_k_m")["self_attn.q_proj"]) == {"f16"}


def test_eight_experts_have_rules_of_their_own() -> None:
    types = types_of(model_source.load("mixtral-8x7b"), "q4_k_m")
    assert set(types["self_attn.v_proj"]) == set(types["self_attn.k_proj"]) == {"q8_0"}
    assert set(types["self_attn.o_proj"]) == {"q5_k"}
    assert set(types["block_sparse_moe.gate"]) == {"f32"}


def test_seventy_billion_has_more_bits_for_values() -> None:
    types = types_of(model_source.load("llama-3.1-70b"), "q4_k_m")
    assert set(types["self_attn.v_proj"]) == {"q5_k", "q6_k"}
    assert set(types_of(model_source.load("llama-3.1-70b"), "q3_k_s")["self_attn.v_proj"]) == {"q5_k"}


def test_joined_queries_keys_and_values_follow_the_values() -> None:
    types = types_of(
        hf_config.read_model(
            {
                "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "vocab_size": 32_064,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                "max_position_embeddings": 4096, "tie_word_embeddings": False,
            },
            where="test", name="phi", architecture=catalog.architecture("phi3"),
        ),
        "q4_k_m",
    )  # fmt: skip
    assert types["self_attn.q_proj"] == types["self_attn.k_proj"] == types["self_attn.v_proj"]
    assert types["self_attn.q_proj"].count("q6_k") == 16


@pytest.mark.parametrize("identity", ["qwen3-30b-a3b", "deepseek-v3", "kimi-linear-48b-a3b", "llama-4-scout"])
def test_a_mix_lies_between_its_types(identity: str) -> None:
    model = model_source.load(identity)
    for mix, low, high in (("q4_k_m", 4.5, 5.3), ("q2_k", 2.6, 3.6), ("q8_0", 8.4, 8.6)):
        budget = weight_budget(model, catalog.weight_format(mix))
        assert low <= budget.bytes * 8 / budget.parameters <= high, mix


def test_the_plain_types_have_no_rules() -> None:
    budget = weight_budget(llama(), catalog.weight_format("q4_k"))
    norms = 49 * 1536
    assert budget.bytes == (702_359_040 - norms) * 144 // 256 + norms * 4


# --- a checkpoint's own bytes ----------------------------------------------------------------------------


def stored(**sizes: int) -> StoredWeights:
    return StoredWeights(
        format="gguf",
        files=1,
        bytes_by_role=sizes,  # type: ignore[arg-type]  # names of roles
        parameters_by_role={role: size // 2 for role, size in sizes.items()},  # type: ignore[misc]
        by_dtype={"Q8_0": sum(sizes.values())},
    )


def test_roles_of_a_rank_are_shared_as_their_shapes_are() -> None:
    model = replace(llama(), stored=stored(attention=1000, mlp=3000, norm=10, embedding=100, other=500))
    whole = {part.role: part.bytes for part in weight_budget(model, None).roles}
    assert whole == {"attention": 1000, "mlp": 3000, "norm": 10, "embedding": 100, "other": 500}
    half = {part.role: part.bytes for part in weight_budget(model, None, tp=2).roles}
    # Norms are whole on every rank; a role that the architecture does not have goes by the average.
    assert half == {"attention": 500, "mlp": 1500, "norm": 10, "embedding": 50, "other": 251}


def test_kv_heads_that_are_repeated_make_a_larger_share() -> None:
    # Two KV heads over four ranks: each holds one, half of k and v; a quarter of q and o.
    model = replace(llama(num_key_value_heads=2), stored=stored(attention=1000))
    q, kv = 1536 * 1536, 256 * 1536
    share = (2 * q / 4 + 2 * kv / 2) / (2 * q + 2 * kv)
    assert weight_budget(model, None, tp=4).bytes == math.ceil(1000 * share) == 286


def test_parts_beside_the_decoder_are_not_in_its_weights() -> None:
    model = replace(llama(), stored=stored(mlp=3000, vision=700, projector=50, audio=9, mtp=400))
    budget = weight_budget(model, None)
    assert (budget.bytes, budget.parameters) == (3000, 1500)
    assert tower_bytes(model) == {
        "audio (in the files)": 9, "projector (in the files)": 50, "vision (in the files)": 700,
    }  # fmt: skip


def test_a_role_with_several_parts_is_shared_by_their_size() -> None:
    model = model_source.load("deepseek-v3")
    size = tower_bytes(replace(model, stored=stored(mlp=10, mtp=12_345)))
    assert sum(size.values()) == 12_345


def test_mtp_layers_have_the_checkpoints_formats() -> None:
    # One layer in FP8 blocks: about a byte a parameter, not two.
    model = model_source.load("deepseek-v3")
    (tower,) = (tower for tower in model.towers if tower.role == "mtp")
    assert tower_bytes(model)[tower.name] / tower.parameters == pytest.approx(1.0, abs=0.03)
    bare = replace(model, quantization=None)
    assert tower_bytes(bare)[tower.name] == 2 * tower.parameters


def test_the_formats_say_where_their_rules_are_from() -> None:
    for name in catalog.ids("formats"):
        form = catalog.load_format(name)
        if form.rules:
            assert "llama-quant.cpp" in form.source
            assert form.rules[-1].tensor == "all", name
            assert Path(catalog.PROFILES / "formats" / f"{name}.yaml").exists()
