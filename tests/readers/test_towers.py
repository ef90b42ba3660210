"""Parts beside the decoder: known towers are exact, others estimated or named, never silently dropped."""

from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.config_keys import Keys
from capplan.readers.towers import read_towers, unread_parts
from capplan.specs import Tower

HIDDEN = 16


def towers(**config: Any) -> dict[str, Tower]:
    top = Keys(config, where="config.json")
    text = Keys({}, where="config.json")
    return {tower.role: tower for tower in read_towers(top, text, HIDDEN)}


SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "image_size": 28, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
LAYER = 4 * (64 + 8) + 2 * 96 + 12 + 8 + 32  # q k v o, fc1 and fc2 with biases, two LayerNorms


def test_siglip_by_hand() -> None:
    found = towers(model_type="gemma3", vision_config=SIGLIP)
    # patches 3·14² inputs and a bias, four positions, the last LayerNorm
    assert found["vision"].parameters == 8 * 588 + 8 + 4 * 8 + 2 * LAYER + 16
    assert found["projector"].parameters == 8 * HIDDEN + 8
    assert found["vision"].exact


def test_a_pooling_head_is_counted_unless_the_file_says_none() -> None:
    headless = towers(model_type="gemma3", vision_config=SIGLIP)["vision"].parameters
    headed = {key: value for key, value in SIGLIP.items() if key != "vision_use_head"}
    # a probe, an attention and a feed-forward, one norm
    added = 8 + LAYER - 16
    assert towers(model_type="gemma3", vision_config=headed)["vision"].parameters == headless + added


@pytest.mark.parametrize(
    ("wrapper", "extra", "expected"),
    [
        ("llava", {}, 8 * 16 + 16 + 16 * 16 + 16),
        ("llava", {"multimodal_projector_bias": False}, 8 * 16 + 16 * 16),
        ("llava", {"vision_feature_layer": [-2, -1]}, 16 * 16 + 16 + 16 * 16 + 16),
        ("llava_next", {}, 8 * 16 + 16 + 16 * 16 + 16 + 16),
        ("paligemma", {"projection_dim": 16}, 8 * 16 + 16),
        ("idefics3", {"scale_factor": 3}, 9 * 8 * 16),
        ("cohere2_vision", {"downsample_factor": 2, "alignment_intermediate_size": 10},
         32 * 10 + 10 + 5 * 16 + 16),
        ("lfm2_vl", {"downsample_factor": 2, "projector_hidden_size": 6}, 64 + 32 * 6 + 6 + 6 * 16 + 16),
    ],
    ids=["LLaVA", "LLaVA without biases", "features of two layers", "a newline", "PaliGemma", "Idefics 3",
         "Cohere Vision", "LFM2-VL"],
)  # fmt: skip
def test_projectors_by_hand(wrapper: str, extra: dict[str, Any], expected: int) -> None:
    found = towers(model_type=wrapper, vision_config=SIGLIP, **extra)
    assert found["projector"].parameters == expected
    assert found["projector"].exact


def test_a_tower_of_an_unknown_kind_is_an_estimate() -> None:
    vision = {"model_type": "new_eyes", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    found = towers(model_type="llava", vision_config=vision)
    assert not found["vision"].exact
    assert found["vision"].parameters == 8 * 588 + 8 + 2 * LAYER
    assert "estimated" in found["vision"].name


def test_a_tower_without_widths_is_named_not_guessed() -> None:
    top = Keys({"vision_config": {"architecture": "mobilenet"}, "audio_config": {}}, where="config.json")
    made = read_towers(top, top, HIDDEN)
    assert made == ()
    (note,) = unread_parts(top, made)
    assert note.startswith("vision_config")


def test_a_files_own_keys_tell_qwen_towers_apart() -> None:
    old = {"embed_dim": 8, "hidden_size": 16, "depth": 2, "mlp_ratio": 4, "num_heads": 2, "patch_size": 14}
    new = {
        "hidden_size": 8, "intermediate_size": 12, "depth": 2, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    patch = 8 * 3 * 2 * 14 * 14
    plain = 4 * 72 + 2 * 256 + 32 + 8 + 32
    gated = 4 * 72 + 3 * 96 + 12 + 12 + 8 + 16
    assert towers(vision_config=old)["vision"].parameters == patch + 2 * plain
    assert towers(vision_config=new)["vision"].parameters == patch + 2 * gated
    merger = 32 * 32 + 32 + 32 * 16 + 16
    assert towers(vision_config=old)["projector"].parameters == merger + 16
    assert towers(vision_config=new)["projector"].parameters == merger + 8


def test_audio_and_vision_stand_side_by_side() -> None:
    audio = {
        "model_type": "qwen2_audio_encoder", "d_model": 8, "encoder_layers": 1, "encoder_ffn_dim": 12,
        "num_mel_bins": 10, "max_source_positions": 20,
    }  # fmt: skip
    found = towers(model_type="omni", thinker_config={"vision_config": SIGLIP, "audio_config": audio})
    # the key projection has no bias; two convolutions of 3, positions, a last LayerNorm
    assert found["audio"].parameters == LAYER - 8 + 8 * 30 + 8 + 8 * 24 + 8 + 160 + 16
    assert set(found) == {"vision", "projector", "audio"}


@pytest.mark.parametrize(
    "changes",
    [{"patch_size": 0}, {"patch_size": 30}, {"patch_size": [14, 7]}, {"hidden_size": "wide"},
     {"num_hidden_layers": 10**6}],
    ids=["no patch", "a patch larger than the image", "an oblong patch", "no width", "too many layers"],
)  # fmt: skip
def test_values_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        towers(model_type="gemma3", vision_config={**SIGLIP, **changes})
