"""Which mixer and feed-forward each layer has, from the ways files say it."""

from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.config_keys import Keys
from capplan.readers.layer_plan import layer_plan
from capplan.specs import Architecture

PLAIN = Architecture(id="test")


def mixers(arch: Architecture, layers: int, **values: Any) -> list[str | None]:
    keys = Keys(values, where="config.json", defaults=arch.defaults)
    return [mixer for mixer, _ in layer_plan(keys, arch, layers)]


def ffns(layers: int, **values: Any) -> str:
    plan = layer_plan(Keys(values, where="config.json"), PLAIN, layers)
    return "".join("m" if ffn == "moe" else "d" for _, ffn in plan)


F, S = "full", "sliding"


@pytest.mark.parametrize(
    ("arch", "values", "expected"),
    [
        (PLAIN, {}, [F] * 6),
        (PLAIN, {"sliding_window": 8}, [S] * 6),
        (PLAIN, {"sliding_window": None}, [F] * 6),
        (PLAIN, {"sliding_window": 8, "use_sliding_window": False}, [F] * 6),
        (PLAIN, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 4}, [F] * 4 + [S] * 2),
        (PLAIN, {"sliding_window": 8, "sliding_window_pattern": 3}, [S, S, F] * 2),
        (PLAIN, {"sliding_window": 8, "sliding_window_pattern": "LLG"}, [S, S, F] * 2),
        (Architecture(id="t", sliding="pattern:2"), {"sliding_window": 8}, [S, F] * 3),
        (Architecture(id="t", sliding="first:3"), {"sliding_window": 8}, [F, S, S] * 2),
        (Architecture(id="t", sliding="prefix:2"),
         {"sliding_window": 8, "first_k_dense_replace": 2, "num_experts": 8},
         [F, F, S, F, S, F]),
        (Architecture(id="t", sliding="never"), {"sliding_window": 8}, [F] * 6),
        (PLAIN, {"full_attention_interval": 3}, ["linear", "linear", F] * 2),
        (PLAIN, {"attn_type_list": [0, 1] * 3}, ["linear", F] * 3),
        (PLAIN, {"attn_layer_period": 3, "attn_layer_offset": 1}, ["mamba", F, "mamba"] * 2),
        (PLAIN, {"attn_layer_indices": [2]}, ["mamba", "mamba", F, "mamba", "mamba", "mamba"]),
        (PLAIN, {"full_attn_idxs": [0, 5]}, [F, "conv", "conv", "conv", "conv", F]),
        (PLAIN, {"cross_attention_layers": [3]}, [F, F, F, "cross", F, F]),
        (PLAIN, {"hybrid_layer_pattern": [0, 1] * 3, "sliding_window": 8}, [F, S] * 3),
        (PLAIN, {"attention_types": [[["global", "local"], 3]], "window_size": 8}, [F, S] * 3),
        (PLAIN, {"linear_attn_config": {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]}},
         ["linear", "linear", F] * 2),
        (Architecture(id="t", mixer="recurrent"), {"block_types": ["recurrent", "recurrent", "attention"]},
         ["recurrent", "recurrent", S] * 2),
        (Architecture(id="t", mixer="hybrid", shared_blocks=True), {"hybrid_layer_ids": [1, 4]},
         ["mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba"]),
        (Architecture(id="t", mixer="hybrid", shared_blocks=True),
         {"attn_layer_period": 3, "attn_layer_offset": 2},
         ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"]),
        (Architecture(id="t", chunked=True), {"attention_chunk_size": 8, "no_rope_layer_interval": 3},
         ["chunked", "chunked", F] * 2),
    ],
    ids=[
        "nothing said", "a window", "a null window", "a window switched off", "a window in late layers",
        "a pattern as a number", "a pattern as letters", "the class's pattern",
        "a pattern that begins global",
        "dense layers before the pattern", "a class that ignores windows", "every third attends fully",
        "lightning by list", "Mamba by period", "Mamba by index", "convolutions by index", "cross attention",
        "windows by list", "GPT-Neo's types", "KDA's two lists", "Griffin's repeated list", "Zamba by index",
        "Zamba by period", "Llama 4's chunks",
    ],
)  # fmt: skip
def test_mixers(arch: Architecture, values: dict[str, Any], expected: list[str]) -> None:
    assert mixers(arch, 6, **values) == expected


def test_a_list_of_kinds_wins_over_pattern_keys() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert mixers(PLAIN, 3, layer_types=kinds, sliding_window=8, sliding_window_pattern=2) == [S, F, F]


def test_mamba_layers_saved_as_linear_attention_are_mamba_layers() -> None:
    assert mixers(PLAIN, 2, layer_types=["linear_attention", "full_attention"], mamba_d_state=16) == [
        "mamba",
        F,
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "dddddd"),
        ({"num_experts": 8}, "mmmmmm"),
        ({"num_experts": 1}, "dddddd"),
        ({"num_experts": 0}, "dddddd"),
        ({"n_routed_experts": 8, "first_k_dense_replace": 2}, "ddmmmm"),
        ({"num_experts": 8, "decoder_sparse_step": 2}, "dmdmdm"),
        ({"num_experts": 8, "mlp_only_layers": [0, 5]}, "dmmmmd"),
        ({"num_experts": 8, "expert_layer_period": 2, "expert_layer_offset": 1}, "dmdmdm"),
        ({"num_experts": 8, "moe_layers": [1, 2]}, "dmmddd"),
        ({"num_experts": 8, "moe_layers_enum": "4,5"}, "ddddmm"),
        ({"num_experts": 8, "moe_layer_freq": [0, 1, 1, 1, 1, 1]}, "dmmmmm"),
        ({"num_experts": 8, "mlp_layer_types": ["dense"] + ["sparse"] * 5}, "dmmmmm"),
        ({"moe_num_experts": 8, "moe_layer_start_index": 1, "moe_layer_end_index": 3}, "dmmmdd"),
        ({"moe_num_experts": [8, 8], "moe_layer_start_index": [1, 1]}, "dmmmmm"),
        ({"num_experts": 8, "enable_moe_block": False}, "dddddd"),
    ],
    ids=[
        "no experts", "all routed", "one expert is a dense layer", "zero experts", "dense first layers",
        "every second", "listed dense layers", "period and offset", "listed routed layers", "an enumeration",
        "a list of flags", "a list of kinds", "a range", "one range for each modality", "switched off",
    ],
)  # fmt: skip
def test_feed_forwards(values: dict[str, Any], expected: str) -> None:
    assert ffns(6, **values) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("M-M*", ["mamba", None, "mamba", "full"]), ("MEM*", ["mamba", None, "mamba", "full"])],
    ids=["Mamba, MLP, attention", "Mamba, experts, attention"],
)
def test_single_blocks(pattern: str, expected: list[str | None]) -> None:
    arch = Architecture(id="t", single_blocks=True)
    assert mixers(arch, 4, hybrid_override_pattern=pattern) == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"layer_types": ["full_attention"] * 5}, "layer_types"),
        ({"layer_types": ["full_attention"] * 5 + ["telepathy"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window"),
        ({"sliding_window": 8, "sliding_window_pattern": "LXG"}, "sliding_window_pattern"),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
         "linear_attn_config.kda_layers"),
        ({"attn_layer_indices": [99]}, "attn_layer_indices"),
        ({"attention_types": [[["global"], 10**9]]}, "attention_types"),
        ({"num_experts": 8, "moe_layers_enum": "1;2"}, "moe_layers_enum"),
        ({"num_experts": 8, "mlp_layer_types": ["sparse"] * 3}, "mlp_layer_types"),
        ({"hybrid_layer_pattern": [0, 2] * 3}, "hybrid_layer_pattern"),
    ],
    ids=[
        "too short", "an unknown kind", "no window", "no pattern", "layers named by neither list",
        "a layer that is not there", "a huge repetition", "no enumeration", "too few kinds", "no flag",
    ],
)  # fmt: skip
def test_a_plan_that_does_not_add_up_is_refused_by_its_key(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        mixers(PLAIN, 6, **values)
    assert caught.value.message.startswith(named)


def test_a_family_whose_layers_a_key_decides_is_refused_without_it() -> None:
    arch = Architecture(id="t", required=("layer_types|full_attn_idxs",))
    with pytest.raises(InputError, match="layer_types: missing"):
        mixers(arch, 6)
    assert mixers(arch, 1, full_attn_idxs=[0]) == [F]


@pytest.mark.parametrize(
    "values",
    [
        {"moe_intermediate_size": 96}, {"num_experts_per_tok": 2}, {"decoder_sparse_step": 1},
        {"mlp_only_layers": [0]}, {"first_k_dense_replace": 1}, {"moe_layer_freq": 1},
        {"moe_layer_freq": [0, 1, 1, 1, 1, 1]}, {"n_shared_experts": 1}, {"num_shared_experts": 2},
        {"shared_expert_intermediate_size": 8}, {"n_group": 8}, {"mlp_layer_types": ["sparse"] * 6},
        {"moe_something_new": 3},
    ],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
def test_routing_without_an_expert_count_is_refused_not_dense(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"num_experts: missing, but {next(iter(values))}"):
        ffns(6, **values)
    # A count that is stated as none, or blocks switched off, make dense layers.
    for count in (None, 0, 1):
        assert ffns(6, **values, num_experts=count) == "dddddd"
    assert ffns(6, **values, enable_moe_block=False) == "dddddd"


def test_rules_that_route_nowhere_are_dense() -> None:
    assert ffns(2, num_experts_per_tok=0, mlp_only_layers=[], moe_intermediate_size=None) == "dd"
    assert ffns(2, mlp_layer_types=["dense", "dense"], moe_layer_freq=0) == "dd"


def test_the_rules_of_a_class_that_routes_need_a_count_too() -> None:
    arch = Architecture(id="test", defaults={"first_k_dense_replace": 3})
    with pytest.raises(InputError, match="num_experts: missing"):
        mixers(arch, 2)


@pytest.mark.parametrize("values", [{}, {"b": 0}, {"a": None}, {"c": 1}, {"c": None, "b": 3}], ids=str)
def test_a_stated_key_may_be_null_or_under_another_name_but_not_left_out(values: dict[str, Any]) -> None:
    arch = Architecture(id="test", stated=("a|c if b",))
    assert mixers(arch, 1, **values) == [F]


def test_a_stated_key_left_out_is_named() -> None:
    with pytest.raises(InputError, match="head_dim: missing"):
        mixers(Architecture(id="test", stated=("head_dim",)), 1)
    with pytest.raises(InputError, match="a: missing, though b is there"):
        mixers(Architecture(id="test", stated=("a if b",)), 1, b=2)
    default = Architecture(id="test", stated=("head_dim",), defaults={"head_dim": 128})
    assert mixers(default, 1) == [F]
