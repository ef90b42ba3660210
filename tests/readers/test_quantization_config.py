"""quantization_config → rules: which modules are stored how."""

from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.config_keys import Keys
from capplan.readers.quantization_config import ALL_LINEAR, EXPERTS, read_quantization
from capplan.specs import Format, Quantization


def read(quantization: dict[str, Any] | None, **config: Any) -> Quantization | None:
    given = {} if quantization is None else {"quantization_config": quantization}
    top = Keys({**given, **config}, where="config.json")
    return read_quantization(top, top)


def only_format(quantization: dict[str, Any], **config: Any) -> Format:
    found = read(quantization, **config)
    assert found is not None
    ((targets, stored),) = found.rules
    assert targets == ALL_LINEAR
    return stored


def test_a_plain_checkpoint_has_none() -> None:
    assert read(None) is None


def group(weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        },
    }


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (4, "input", 128, 16, 4)),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, (8, "input", 32, 16, 8)),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, (4, "channel", 1, 16, 4)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, (8, "tensor", 1, 0, 0)),
        ({"quant_method": "fbgemm_fp8"}, (8, "channel", 1, 16, 0)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (4, "input", 64, 32, 0)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
         (4, "input", 64, 8.125, 0)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, (8, "channel", 1, 16, 0)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (4, "input", 16, 8, 0)),
        ({"quant_method": "bitnet"}, (2, "tensor", 1, 0, 0)),
        (group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
         (4, "input", 128, 16, 0)),
        (group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False}),
         (4, "input", 128, 16, 4)),
        (group({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8}),
         (8, "channel", 1, 16, 0)),
        (group({"num_bits": 4, "type": "float", "group_size": 32}), (4, "input", 32, 8, 0)),
        (group({"num_bits": 4, "type": "float", "group_size": 16}), (4, "input", 16, 8, 0)),
        (group({"num_bits": 8, "type": "float", "strategy": "tensor"}), (8, "tensor", 1, 0, 0)),
    ],
    ids=[
        "AWQ", "GPTQ int8", "GPTQ without groups", "FP8 a tensor", "FP8 a row", "NF4",
        "NF4 with double quantization: 8 + 32/256", "LLM.int8", "NVFP4", "ternary", "W4A16",
        "W4A16 with zeros",
        "W8A8", "MXFP4", "compressed NVFP4", "compressed FP8",
    ],
)  # fmt: skip
def test_formats(quantization: dict[str, Any], expected: tuple[float, str, int, float, float]) -> None:
    made = only_format(quantization)
    assert (made.element_bits, made.group_shape, made.group, made.scale_bits, made.zero_bits) == expected


def test_block_fp8_has_one_32_bit_scale_a_block() -> None:
    made = only_format({"quant_method": "fp8", "weight_block_size": [128, 64]})
    assert (made.block_rows, made.block_cols, made.scale_bits) == (128, 64, 32)


def test_mxfp4_speaks_of_experts_only() -> None:
    found = read({"quant_method": "mxfp4"})
    assert found is not None
    assert [targets for targets, _ in found.rules] == [EXPERTS]


def test_named_targets_go_before_the_catch_all() -> None:
    found = read(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "a": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                },
                "b": {
                    "targets": ["re:.*experts.*"],
                    "weights": {"num_bits": 4, "type": "int", "group_size": 32},
                },
            },
            "ignore": ["lm_head", "re:.*gate$"],
        }
    )  # fmt: skip
    assert found is not None
    assert [stored.element_bits for _, stored in found.rules] == [4, 8]
    assert found.keep == ("lm_head", "re:.*gate$")


def test_the_head_stays_whole_unless_the_file_says_otherwise() -> None:
    kept = read({"quant_method": "awq", "bits": 4})
    told = read({"quant_method": "gptq", "bits": 4, "lm_head": True})
    assert kept is not None
    assert told is not None
    assert "lm_head" in kept.keep
    assert "lm_head" not in told.keep


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "magic"}, "quant_method"),
        ({"bits": 4, "group_size": 64}, "quant_method"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        (group({"num_bits": 4, "type": "int", "strategy": "tensor"}), "num_bits"),
        (group({"num_bits": 4, "type": "float", "group_size": 7}), "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "FP3"}, "quant_algo"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:(a+)+b"]}, "ignore"),
        ({"quant_method": "awq", "modules_to_not_convert": ["re:(["]}, "ignore"),
    ],
    ids=[
        "an unknown method", "MLX's file without a method", "groups of nothing", "half a block", "no groups",
        "4 bits a tensor", "an odd FP4 group", "an unknown algorithm", "an exponential pattern",
        "a broken pattern",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(quantization: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        read(quantization)
    assert named in caught.value.message
    assert caught.value.message.startswith("quantization_config.")
