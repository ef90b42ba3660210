"""Logical parameters of packed checkpoints: every format that hides more, or fewer, weights than
elements."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.packing import logical_parameters
from capplan.readers.stored_tensor import StoredTensor

WEIGHTS = 512 * 1024  # out × in of the layer in every case below
GPTQ_8 = {"quant_method": "gptq", "bits": 8, "group_size": 128}


def counted(
    tensors: Mapping[str, tuple[str, Sequence[int]]], config: Mapping[str, object] | None = None
) -> dict[str, int]:
    """Logical parameters by name, of tensors given as (dtype, shape)."""
    stored = [
        StoredTensor(name=name, dtype=dtype, shape=tuple(shape), stored_bytes=0, shard="x")
        for name, (dtype, shape) in tensors.items()
    ]
    found = logical_parameters(stored, where="x", quantization_config=config)
    return dict(zip(tensors, found, strict=True))


def grouped(bits: int, group: int | None = 128, **more: object) -> dict[str, Any]:
    """A compressed-tensors config with one group of weights."""
    weights = {"num_bits": bits, "group_size": group, "type": "int"}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
        **more,
    }


MIXED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128}},
        "group_1": {"weights": {"num_bits": 8, "group_size": 128}},
    },
}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        pytest.param({"m.weight": ("BF16", (512, 1024))}, None, id="bf16"),
        pytest.param(
            {"m.weight": ("F8_E4M3", (512, 1024)), "m.weight_scale_inv": ("F32", (4, 8))},
            None,
            id="fp8 in blocks",
        ),
        pytest.param(
            {
                "m.weight": ("F8_E4M3", (512, 1024)),
                "m.weight_scale": ("F32", ()),
                "m.input_scale": ("F32", ()),
                "m.k_scale": ("F32", (1,)),
            },
            None,
            id="fp8 per tensor",
        ),
        pytest.param(
            {"m.weight": ("F8_E4M3", (512, 1024)), "m.scale": ("F8_E8M0", (4, 8))},
            None,
            id="DeepSeek fp8 with ue8m0 scales",
        ),
        pytest.param(
            {
                "m.qweight": ("I32", (1024, 64)),
                "m.qzeros": ("I32", (8, 64)),
                "m.scales": ("F16", (8, 512)),
            },
            None,
            id="AWQ",
        ),
        *(
            pytest.param(
                {
                    "m.qweight": ("I32", (1024 * bits // 32, 512)),
                    "m.qzeros": ("I32", (8, 512 * bits // 32)),
                    "m.scales": ("F16", (8, 512)),
                    "m.g_idx": ("I32", (1024,)),
                },
                None,
                id=f"GPTQ {bits} bits",
            )
            for bits in (2, 3, 4, 8)
        ),
        pytest.param(
            {"m.qweight": ("I32", (256, 512)), "m.scales": ("F16", (8, 512))},
            GPTQ_8,
            id="GPTQ without companions, by config",
        ),
        pytest.param(
            {
                "m.weight_packed": ("I32", (512, 128)),
                "m.weight_scale": ("BF16", (512, 8)),
                "m.weight_shape": ("I64", (2,)),
            },
            grouped(4),
            id="compressed-tensors W4A16",
        ),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 256)), "m.weight_scale": ("BF16", (512, 1))},
            grouped(8, None),
            id="compressed-tensors W8A16 per channel",
        ),
        pytest.param(
            {
                "m.weight_packed": ("I32", (512, 128)),
                "m.weight_scale": ("BF16", (512, 8)),
                "m.weight_zero_point": ("I32", (64, 8)),
            },
            None,
            id="compressed-tensors with zero points",
        ),
        pytest.param(
            {
                "m.weight_packed": ("I32", (512, 256)),
                "m.weight_scale": ("BF16", (512, 8)),
                "m.weight_g_idx": ("I32", (1024,)),
            },
            None,
            id="compressed-tensors with g_idx",
        ),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 256)), "m.weight_scale": ("BF16", (512, 8))},
            MIXED,
            id="compressed-tensors of two widths, told by the group size",
        ),
        pytest.param(
            {"m.weight": ("I8", (512, 1024)), "m.weight_scale": ("F32", (512, 1))},
            None,
            id="INT8 per channel",
        ),
        pytest.param(
            {"m.weight": ("I8", (512, 1024)), "m.weight_scale_inv": ("F32", (4, 8))},
            None,
            id="INT8 in blocks",
        ),
        pytest.param(
            {"m.weight": ("I8", (512, 1024)), "m.weight_scale": ("BF16", (512, 8))},
            grouped(4),
            id="compressed-tensors int4 kept in int8, one a byte",
        ),
        pytest.param(
            {
                "m.weight": ("U8", (512, 512)),
                "m.weight_scale": ("F8_E4M3", (512, 64)),
                "m.weight_scale_2": ("F32", ()),
                "m.input_scale": ("F32", ()),
            },
            None,
            id="NVFP4 modelopt",
        ),
        pytest.param(
            {
                "m.weight_packed": ("U8", (512, 512)),
                "m.weight_scale": ("F8_E4M3", (512, 64)),
                "m.weight_global_scale": ("F32", (1,)),
                "m.input_global_scale": ("F32", (1,)),
            },
            None,
            id="NVFP4 compressed-tensors",
        ),
        pytest.param(
            {
                "m.experts.gate_up_proj": ("U8", (4, 256, 256)),
                "m.experts.gate_up_proj_weight_scale": ("F8_E4M3", (4, 256, 32)),
                "m.experts.gate_up_proj_weight_scale_2": ("F32", (4,)),
            },
            None,
            id="NVFP4 fused experts",
        ),
        pytest.param(
            {"m.weight_packed": ("U8", (512, 512)), "m.weight_scale": ("U8", (512, 32))},
            None,
            id="MXFP4 compressed-tensors",
        ),
        pytest.param(
            {
                "m.down_proj_blocks": ("U8", (4, 128, 32, 16)),
                "m.down_proj_scales": ("U8", (4, 128, 32)),
            },
            None,
            id="MXFP4 gpt-oss",
        ),
        pytest.param(
            {"m.weight": ("I8", (512, 512)), "m.scale": ("F8_E8M0", (512, 32))},
            None,
            id="DeepSeek-V4 fp4 experts",
        ),
        pytest.param(
            {"m.weight": ("U8", (512, 1024)), "m.weight_scale": ("U8", (512, 32))}, None, id="MXFP8"
        ),
        pytest.param({"m.weight": ("F4", (512, 1024)), "m.scale": ("F8_E8M0", (512, 32))}, None, id="F4"),
        pytest.param(
            {
                "m.weight": ("U8", (WEIGHTS // 2, 1)),
                "m.weight.absmax": ("U8", (WEIGHTS // 64,)),
                "m.weight.nested_absmax": ("F32", (32,)),
                "m.weight.nested_quant_map": ("F32", (256,)),
                "m.weight.quant_map": ("F32", (16,)),
                "m.weight.quant_state.bitsandbytes__nf4": ("U8", (91,)),
            },
            None,
            id="bitsandbytes nf4, double quantized",
        ),
        pytest.param(
            {
                "m.weight": ("I8", (512, 1024)),
                "m.SCB": ("F32", (512,)),
                "m.weight_format": ("U8", ()),
            },
            None,
            id="bitsandbytes LLM.int8",
        ),
        pytest.param(
            {
                "m.weight": ("U8", (256, 1024)),
                "m.weight_scale": ("F32", (512, 8)),
                "m.pre_quant_scale": ("BF16", (1024,)),
            },
            None,
            id="modelopt W4A16 AWQ",
        ),
        pytest.param(
            {
                "m.weight": ("U32", (512, 128)),
                "m.scales": ("BF16", (512, 16)),
                "m.biases": ("BF16", (512, 16)),
            },
            {"bits": 4, "group_size": 64},
            id="MLX 4 bits",
        ),
        pytest.param(
            {"m.weight": ("U32", (512, 256)), "m.scales": ("BF16", (512, 32))},
            {"bits": 4, "group_size": 64, "m": {"bits": 8, "group_size": 32}},
            id="MLX with an override",
        ),
        pytest.param(
            {"m.weight": ("U8", (128, 1024)), "m.weight_scale": ("BF16", (1,))},
            {"quant_method": "bitnet"},
            id="BitNet",
        ),
    ],
)
def test_the_layer_has_its_weights_whatever_the_packing(
    tensors: dict[str, tuple[str, Sequence[int]]], config: Mapping[str, object] | None
) -> None:
    found = counted(tensors, config)
    first, *companions = found
    assert found[first] == WEIGHTS
    assert [found[name] for name in companions] == [0] * len(companions)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("model.rotary_emb.inv_freq", "F32", (64,)),
        ("rope_freqs.weight", "F32", (64,)),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "F32", (256,)),
        ("blk.3.exp_probs_b.bias", "F32", (256,)),
        ("vision_model.embeddings.position_ids", "I64", (1, 577)),
        ("h.0.attn.bias", "F32", (1, 1, 1024, 1024)),
        ("h.0.attn.masked_bias", "F32", ()),
        ("attn.mask", "BOOL", (64, 64)),
        ("layers.0.ffn.gate.tid2eid", "I64", (129280, 6)),
    ],
)
def test_buffers_are_stored_but_are_no_parameters(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert counted({name: (dtype, shape)}) == {name: 0}


def test_names_of_scales_that_are_parameters() -> None:
    tensors: dict[str, tuple[str, Sequence[int]]] = {
        "norm.scale": ("BF16", (64,)),  # a norm without "weight"
        "router.scale": ("BF16", (64,)),
        "router.proj.weight": ("BF16", (8, 64)),
        "v.scales": ("F32", (3,)),
        "m.bias": ("F16", (512,)),
        "a.blk.0.per_dim_k_scale.weight": ("F32", (64,)),
    }
    assert counted(tensors) == {
        "norm.scale": 64,
        "router.scale": 64,
        "router.proj.weight": 512,
        "v.scales": 3,
        "m.bias": 512,
        "a.blk.0.per_dim_k_scale.weight": 64,
    }


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        pytest.param({"m.qweight": ("I32", (128, 512))}, GPTQ_8, id="qweight alone"),
        pytest.param(
            {"m.qweight": ("I32", (256, 512)), "m.scales": ("F16", (8, 512))},
            None,
            id="4 or 8 bits, nothing tells",
        ),
        pytest.param(
            {"m.qweight": ("I32", (128, 512)), "m.scales": ("F16", (8, 512))},
            GPTQ_8,
            id="a config that does not fit the scales",
        ),
        pytest.param(
            {
                "m.qweight": ("I32", (128, 512)),
                "m.scales": ("F16", (8, 512)),
                "m.qzeros": ("I32", (8, 128)),
                "m.g_idx": ("I32", (1024,)),
            },
            None,
            id="g_idx says 4 bits, qzeros 8",
        ),
        pytest.param(
            {
                "m.qweight": ("I32", (128, 512)),
                "m.scales": ("F16", (8, 512)),
                "m.g_idx": ("I32", (1000,)),
            },
            None,
            id="g_idx of a strange length",
        ),
        pytest.param(
            {"m.qweight": ("I32", (1024, 64)), "m.scales": ("F16", (8, 500))}, None, id="AWQ uneven"
        ),
        pytest.param({"m.qweight": ("I32", (0, 64)), "m.scales": ("F16", (0, 512))}, None, id="AWQ empty"),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 128)), "m.weight_scale": ("BF16", (512, 8))},
            None,
            id="compressed-tensors without its config",
        ),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 128)), "m.weight_scale": ("BF16", (512, 8))},
            grouped(8),
            id="compressed-tensors with a config that does not fit",
        ),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 128)), "m.weight_scale": ("BF16", (512, 1))},
            {
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "strategy": "channel"}},
                    "group_1": {"weights": {"num_bits": 8, "strategy": "channel"}},
                }
            },
            id="compressed-tensors of two widths that both fit",
        ),
        pytest.param(
            {"m.weight_packed": ("I32", (512, 128)), "m.weight_zero_point": ("I32", (60, 8))},
            None,
            id="zero points uneven",
        ),
        pytest.param(
            {"m.weight": ("U32", (512, 128)), "m.scales": ("BF16", (512, 16))},
            None,
            id="MLX, no config",
        ),
        pytest.param(
            {"m.weight": ("U8", (512, 512)), "m.weight_scale": ("F8_E4M3", (512, 60))},
            None,
            id="NVFP4 uneven",
        ),
        pytest.param({"m.weight": ("U8", (512, 512))}, {"bits": 4}, id="bytes without scales"),
        pytest.param({"m.W_q": ("U8", (512, 512)), "m.scale": ("F16", (8192, 1))}, None, id="HQQ"),
        pytest.param({"m.x_blocks": ("U8", (4, 16)), "m.x_scales": ("U8", (5,))}, None, id="blocks uneven"),
        pytest.param({"m.q_weight": ("I32", (512, 512))}, None, id="EXL2"),
        pytest.param({"m.codes": ("I16", (512, 512))}, None, id="AQLM"),
        pytest.param({"m.weight": ("I64", (4, 4))}, None, id="int64"),
        pytest.param(
            {"m.qweight": ("I32", (128, 512)), "m.scales": ("F16", (8, 512))},
            {"bits": "4"},
            id="bits as text",
        ),
        pytest.param(
            {"m.qweight": ("I32", (128, 512)), "m.scales": ("F16", (8, 512))},
            {"bits": 0},
            id="no bits",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(
    tensors: dict[str, tuple[str, Sequence[int]]], config: Mapping[str, object] | None
) -> None:
    with pytest.raises(InputError, match=r"m\.|bits") as caught:
        counted(tensors, config)
    assert caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        {"config_groups": []},
        {"config_groups": {"a": None}},
        {"config_groups": {"a": {"weights": None}}},
        {"config_groups": {"a": {"weights": {"num_bits": None}}}},
        {"bits": 4, "group_size": "128"},
        {"bits": True},
        {"m": 3, "bits": 4, "group_size": -1},
        {"quant_method": ["bitnet"]},
    ],
)
def test_any_config_is_used_or_refused(config: Mapping[str, object]) -> None:
    tensors = {"m.weight_packed": ("I32", (512, 128)), "m.weight_scale": ("BF16", (512, 8))}
    with pytest.raises(InputError):
        counted(tensors, config)
