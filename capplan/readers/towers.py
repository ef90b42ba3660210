"""Parts beside the decoder: vision and audio towers, projectors, MTP layers.

A tower family that is known is exact; any other with the usual widths is estimated as a plain transformer
encoder and marked so (`Tower.exact` false).
"""

from collections.abc import Callable, Mapping
from typing import Final

from capplan.readers.audio_towers import audio_towers
from capplan.readers.clip_towers import clip, estimated, internvit, pixtral, siglip
from capplan.readers.config_keys import Keys
from capplan.readers.other_towers import gemma4, llama4, mllama, moonvit, step
from capplan.readers.qwen_towers import (
    ernie_vl,
    glm4v,
    minimax_m3,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
)
from capplan.readers.tower_keys import TOWER_KEYS
from capplan.specs import Layer, Tensor, Tower

TowerReader = Callable[[Keys, Keys, int], list[Tower]]

# Keys of a wrapper that say how images become tokens, not how wide a part is.
PREPROCESSING: Final = (
    "image_grid_pinpoints", "downsample_ratio", "scale_factor", "downsample_factor", "tile_size",
    "max_tiles", "min_tiles", "use_thumbnail", "encoder_patch_size", "num_image_tokens",
    "use_image_newline_parameter", "projection_dim", "ps_version", "select_layer", "template",
    "dynamic_image_size", "force_image_size", "max_dynamic_patch", "min_dynamic_patch",
    "use_backbone_lora", "use_llm_lora", "pad2square", "hidden_size", "vision_feature_layer",
    "projector_hidden_size", "merged_hidden_size", "projector_bias", "max_num_tiles", "vocab_size",
    "position_id_per_seconds", "user_token_id", "max_image_tokens", "min_image_tokens",
    "do_image_splitting", "max_pixels_tolerance", "max_num_patches", "vision_start_token",
)  # fmt: skip
_BY_TYPE: Final[dict[str, TowerReader]] = {
    "siglip_vision_model": siglip,
    "siglip2_vision_model": siglip,
    "idefics2_vision": siglip,
    "idefics3_vision": siglip,
    "smolvlm_vision": siglip,
    "clip_vision_model": clip,
    "pixtral": pixtral,
    "internvl_vision": internvit,
    "intern_vit_6b": internvit,
    "llama4_vision_model": llama4,
    "mllama_vision_model": mllama,
    "gemma4_vision": gemma4,
    "glm4v": glm4v,
    "glm4v_vision": glm4v,
    "glm4v_moe": glm4v,
    "glm4v_moe_vision": glm4v,
    "glm5_next_vision": glm4v,
    "ernie4_5_vl_moe_vision": ernie_vl,
    "DFNRope_vision_transformer": ernie_vl,
    "minimax_m3_vl_vision": minimax_m3,
    "step3p5_vision": step,
    "moonvit": moonvit,
}
# Files without a type of their own: a key only one family has.
_BY_KEY: Final[tuple[tuple[str, TowerReader], ...]] = (
    ("vt_hidden_size", moonvit),
    ("deepstack_visual_indexes", qwen3_vl),
    ("fullatt_block_indexes", qwen2_5_vl),
    ("embed_dim", qwen2_vl),
)


def mtp_tower(last: Layer, count: int, hidden: int) -> Tower:
    """Multi-token-prediction layers: a copy of the last layer, two norms and a joining projection.

    Loaded only when speculative decoding uses them. Embedding and head are shared with the decoder.
    """
    extra = (
        Tensor(name="eh_proj", role="mtp", shape=(hidden, 2 * hidden), linear=True),
        Tensor(name="enorm", role="mtp", shape=(hidden,)),
        Tensor(name="hnorm", role="mtp", shape=(hidden,)),
        Tensor(name="shared_head.norm", role="mtp", shape=(hidden,)),
    )
    tensors = tuple(
        Tensor(
            name=f"mtp.{tensor.name}",
            role="mtp",
            shape=tensor.shape,
            linear=tensor.linear,
            copies=tensor.copies * count,
            active_copies=tensor.active_copies * count,
            split_axis=tensor.split_axis,
            split_units=tensor.split_units,
        )
        for tensor in (*last.tensors(), *extra)
    )
    return Tower(role="mtp", name=f"{count} MTP layer(s)", tensors=tensors, exact=False)


def read_towers(top: Keys, text: Keys, hidden: int) -> tuple[Tower, ...]:
    """Vision and audio towers of a multimodal config; empty for a text model."""
    source = top.child("thinker_config") or top
    made: list[Tower] = []
    vision = source.child("vision_config")
    if vision is not None and vision.data:
        made += _vision(vision, source, hidden)
    for name in ("audio_config", "audio_encoder_config"):
        audio = source.child(name)
        if audio is not None and audio.data:
            made += audio_towers(audio, hidden)
            break
    if made:
        top.used.update(PREPROCESSING if top is not text else PREPROCESSING[:15])
    return tuple(made)


def unread_parts(top: Keys, towers: tuple[Tower, ...]) -> tuple[str, ...]:
    """The key of each part the file describes that `towers` does not hold."""
    roles = {tower.role for tower in towers}
    return tuple(
        name
        for name in TOWER_KEYS
        if isinstance(top.data.get(name), Mapping)
        and top.data.get(name)
        and ("audio" if "audio" in name else "vision") not in roles
    )


def _vision(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    reader = _BY_TYPE.get(keys.text("model_type", default="") or "")
    if reader is None:
        reader = next((found for key, found in _BY_KEY if keys.present(key) is not None), estimated)
    return reader(keys, top, hidden)
