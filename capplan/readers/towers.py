"""Parts beside the decoder: vision and audio towers, projectors, MTP layers.

A tower family that is known is exact; any other with the usual widths is estimated as a plain transformer
encoder and marked so (`Tower.exact` false).
"""

from collections.abc import Callable
from typing import Final

from capplan.readers.config_keys import Keys
from capplan.specs import Architecture, Layer, Role, Tensor, Tower

TOWER_KEYS: Final = (
    "vision_config", "audio_config", "audio_encoder_config", "vision_tower_config", "img_processor",
    "vision_encoder_config", "speech_config", "audio_processor", "embd_layer", "vision_cfg",
    "talker_config", "code2wav_config", "enable_audio_output", "enable_talker", "sound_config",
)  # fmt: skip


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


def read_towers(top: Keys, architecture: Architecture, hidden: int) -> tuple[Tower, ...]:
    """Vision and audio towers of a multimodal config; empty for a text model."""
    source = top.child("thinker_config") or top
    made: list[Tower] = []
    vision = source.child("vision_config")
    if vision is not None and vision.data:
        made += _vision(vision, source, hidden)
    for name in ("audio_config", "audio_encoder_config"):
        audio = source.child(name)
        if audio is not None and audio.data:
            made.append(_audio(audio))
            break
    return tuple(made)


class _Parts:
    """Collects a tower's tensors; weights and biases by width."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.made: list[Tensor] = []

    def add(self, name: str, *shape: int, copies: int = 1) -> None:
        self.made.append(
            Tensor(name=name, role=self.role, shape=shape, copies=copies, active_copies=copies)
        )

    def linear(self, name: str, rows: int, cols: int, *, bias: bool, copies: int = 1) -> None:
        self.add(name, rows, cols, copies=copies)
        if bias:
            self.add(f"{name}.bias", rows, copies=copies)

    def norm(self, name: str, width: int, *, bias: bool, copies: int = 1) -> None:
        self.add(name, width, copies=copies * (2 if bias else 1))

    def encoder(
        self,
        layers: int,
        width: int,
        ffn: int,
        *,
        attention_width: int | None = None,
        attention_bias: bool = True,
        o_bias: bool | None = None,
        gated: bool = False,
        mlp_bias: bool = True,
        norms: int = 2,
        norm_bias: bool = True,
        head_norms: int = 0,
    ) -> None:
        """`layers` equal transformer encoder layers."""
        inner = attention_width or width
        for name in ("q", "k", "v"):
            self.linear(f"blocks.{name}", inner, width, bias=attention_bias, copies=layers)
        o_has_bias = attention_bias if o_bias is None else o_bias
        self.linear("blocks.proj", width, inner, bias=o_has_bias, copies=layers)
        if gated:
            self.linear("blocks.gate_proj", ffn, width, bias=mlp_bias, copies=layers)
        self.linear("blocks.fc1", ffn, width, bias=mlp_bias, copies=layers)
        self.linear("blocks.fc2", width, ffn, bias=mlp_bias, copies=layers)
        self.norm("blocks.norms", width, bias=norm_bias, copies=norms * layers)
        if head_norms:
            self.norm("blocks.qk_norms", head_norms, bias=False, copies=2 * layers)


def _tower(role: Role, name: str, parts: _Parts, exact: bool = True) -> Tower:
    return Tower(role=role, name=name, tensors=tuple(parts.made), exact=exact)


def _vision(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    kind = keys.text("model_type", default="") or ""
    if keys.present("vt_hidden_size") is not None:
        return _moonvit(keys, hidden)
    readers: dict[str, Callable[[Keys, Keys, int], list[Tower]]] = {
        "qwen2_vl": _qwen2_vl,
        "qwen2_5_vl": _qwen2_vl,
        "siglip_vision_model": _siglip,
        "clip_vision_model": _siglip,
        "pixtral": _pixtral,
        "llama4_vision_model": _llama4,
        "gemma4_vision": _gemma4,
    }
    reader = readers.get(kind)
    if reader is None and keys.present("deepstack_visual_indexes") is not None:
        reader = _qwen3_vl
    if reader is not None:
        return reader(keys, top, hidden)
    return _estimated(keys, top, hidden)


def _patch(keys: Keys, temporal: int = 1) -> int:
    """Inputs of the patch embedding: channels × patch² × frames."""
    size = keys.integer("patch_size", default=14, high=1024)
    channels = keys.integer("in_channels", "num_channels", "in_chans", default=3, high=64)
    return channels * size * size * temporal


def _qwen3_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    width, depth = keys.integer("hidden_size"), keys.integer("depth", high=1024)
    out = keys.integer("out_hidden_size", default=hidden)
    merged = width * keys.integer("spatial_merge_size", default=2, high=64) ** 2
    parts = _Parts("vision")
    patch = _patch(keys, keys.integer("temporal_patch_size", default=2, high=64))
    parts.linear("patch_embed", width, patch, bias=True)
    parts.add("pos_embed", keys.integer("num_position_embeddings", default=2304), width)
    parts.encoder(depth, width, keys.integer("intermediate_size"))
    merger = _Parts("projector")
    deep = len(keys.items("deepstack_visual_indexes") or [])
    merger.norm("merger.norm", width, bias=True)
    if deep:
        # The mergers of intermediate layers norm after joining the patches.
        merger.norm("deepstack.norm", merged, bias=True, copies=deep)
    merger.linear("merger.linear_fc1", merged, merged, bias=True, copies=1 + deep)
    merger.linear("merger.linear_fc2", out, merged, bias=True, copies=1 + deep)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", merger)]


def _qwen2_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    newer = keys.data.get("model_type") == "qwen2_5_vl"
    width = keys.integer("hidden_size" if newer else "embed_dim", default=1280)
    depth = keys.integer("depth", default=32, high=1024)
    out = keys.integer("out_hidden_size", default=hidden) if newer else hidden
    ratio = int(keys.number("mlp_ratio", default=4) or 4)
    ffn = keys.integer("intermediate_size", default=ratio * width)
    merged = width * keys.integer("spatial_merge_size", default=2, high=64) ** 2
    parts = _Parts("vision")
    patch = _patch(keys, keys.integer("temporal_patch_size", default=2, high=64))
    parts.linear("patch_embed", width, patch, bias=False)
    parts.encoder(depth, width, ffn, gated=newer, norm_bias=not newer)
    merger = _Parts("projector")
    merger.norm("merger.ln_q", width, bias=not newer)
    merger.linear("merger.mlp.0", merged, merged, bias=True)
    merger.linear("merger.mlp.2", out, merged, bias=True)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", merger)]


def _siglip(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    clip = keys.data.get("model_type") == "clip_vision_model"
    width = keys.integer("hidden_size", default=768)
    layers = keys.integer("num_hidden_layers", default=12, high=1024)
    patch_size = keys.integer("patch_size", default=32 if clip else 16, high=1024)
    positions = (keys.integer("image_size", default=224, high=1 << 16) // patch_size) ** 2
    channels = keys.integer("num_channels", default=3, high=64)
    ffn = keys.integer("intermediate_size", default=3072)
    parts = _Parts("vision")
    parts.linear("patch_embedding", width, channels * patch_size**2, bias=not clip)
    parts.add("position_embedding", positions + (1 if clip else 0), width)
    if clip:
        parts.add("class_embedding", width)
    parts.encoder(layers, width, ffn)
    parts.norm("post_layernorm", width, bias=True, copies=2 if clip else 1)
    if not clip and keys.flag("vision_use_head", default=True):
        parts.add("head.probe", width)
        parts.encoder(1, width, ffn, norms=1)
    projector = _Parts("projector")
    if top.data.get("model_type") == "gemma3":
        projector.add("mm_input_projection", width, hidden)
        projector.norm("mm_soft_emb_norm", width, bias=False)
    else:
        projector.linear("linear_1", hidden, width, bias=True)
        projector.linear("linear_2", hidden, hidden, bias=True)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", projector)]


def _pixtral(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    width = keys.integer("hidden_size", default=1024)
    parts = _Parts("vision")
    parts.linear("patch_conv", width, _patch(keys), bias=False)
    parts.norm("ln_pre", width, bias=False)
    parts.encoder(
        keys.integer("num_hidden_layers", default=24, high=1024),
        width,
        keys.integer("intermediate_size", default=4096),
        attention_bias=False,
        gated=True,
        mlp_bias=False,
        norm_bias=False,
    )
    merge = top.optional_integer("spatial_merge_size", high=64)
    bias = top.flag("multimodal_projector_bias", default=merge is None)
    projector = _Parts("projector")
    if merge is not None:
        projector.norm("norm", width, bias=False)
        projector.linear("patch_merger", width, width * merge * merge, bias=False)
    projector.linear("linear_1", hidden, width, bias=bias)
    projector.linear("linear_2", hidden, hidden, bias=bias)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", projector)]


def _llama4(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    width = keys.integer("hidden_size", default=768)
    patch = keys.integer("patch_size", default=14, high=1024)
    positions = (keys.integer("image_size", default=448, high=1 << 16) // patch) ** 2 + 1
    ffn = keys.integer("intermediate_size", default=5632)
    out = keys.integer("projector_output_dim", "vision_output_dim", default=7680)
    middle = keys.integer("projector_input_dim", default=4096)
    ratio = keys.number("pixel_shuffle_ratio", default=0.5) or 0.5
    parts = _Parts("vision")
    parts.add("class_embedding", width)
    parts.add("positional_embedding_vlm", positions, width)
    parts.linear("patch_embedding", width, _patch(keys), bias=False)
    parts.norm("layernorms", width, bias=True, copies=2)
    parts.encoder(keys.integer("num_hidden_layers", default=34, high=1024), width, ffn)
    parts.linear("adapter.fc1", middle, int(width / ratio**2), bias=False)
    parts.linear("adapter.fc2", out, middle, bias=False)
    projector = _Parts("projector")
    projector.linear("linear_1", hidden, keys.integer("vision_output_dim", default=7680), bias=False)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", projector)]


def _gemma4(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    width = keys.integer("hidden_size")
    parts = _Parts("vision")
    parts.add("position_embedding_table", 2, keys.integer("position_embedding_size"), width)
    parts.linear("input_proj", width, _patch(keys), bias=False)
    heads = keys.integer("num_attention_heads", high=1 << 16)
    head_width = keys.integer("head_dim", default=width // heads)
    parts.encoder(
        keys.integer("num_hidden_layers", high=1024),
        width,
        keys.integer("intermediate_size"),
        attention_width=heads * head_width,
        attention_bias=False,
        gated=True,
        mlp_bias=False,
        norms=4,
        norm_bias=False,
        head_norms=head_width,
    )
    projector = _Parts("projector")
    projector.linear("embedding_projection", hidden, width, bias=False)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", projector)]


def _moonvit(keys: Keys, hidden: int) -> list[Tower]:
    width = keys.integer("vt_hidden_size")
    newer = keys.data.get("norm_type") == "rmsnorm"
    inner = keys.integer("qkv_hidden_size", default=width)
    height = keys.integer("init_pos_emb_height", high=4096)
    parts = _Parts("vision")
    parts.linear("patch_embed", width, _patch(keys), bias=not newer)
    parts.add("pos_emb", height * keys.integer("init_pos_emb_width", high=4096), width)
    parts.encoder(
        keys.integer("vt_num_hidden_layers", high=1024),
        width,
        keys.integer("vt_intermediate_size"),
        attention_width=inner,
        attention_bias=not newer,
        mlp_bias=not newer,
        norm_bias=not newer,
    )
    parts.norm("final_layernorm", width, bias=not newer)
    kernel = keys.integers("merge_kernel_size", low=1, high=64) or [2, 2]
    merged = width * kernel[0] * kernel[-1]
    projector = _Parts("projector")
    if not newer:
        projector.norm("pre_norm", width, bias=True)
    projector.linear("linear_1", merged, merged, bias=not newer)
    projector.linear("linear_2", hidden, merged, bias=not newer)
    if newer:
        projector.norm("post_norm", hidden, bias=False)
    return [_tower("vision", "vision tower", parts), _tower("projector", "projector", projector)]


def _estimated(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """A plain encoder of these widths; marked as an estimate."""
    width = keys.integer("hidden_size", "embed_dim", "width", "vision_hidden_size")
    layers = keys.integer("num_hidden_layers", "depth", "layers", "num_layers", high=1024)
    ratio = keys.number("mlp_ratio", default=4) or 4
    ffn = keys.integer("intermediate_size", default=int(ratio * width))
    parts = _Parts("vision")
    parts.linear("patch_embed", width, _patch(keys), bias=True)
    parts.encoder(layers, width, ffn)
    projector = _Parts("projector")
    projector.linear("linear_1", hidden, width, bias=True)
    projector.linear("linear_2", hidden, hidden, bias=True)
    return [
        _tower("vision", "vision tower (estimated from its widths)", parts, exact=False),
        _tower("projector", "projector (estimated)", projector, exact=False),
    ]


def _audio(keys: Keys) -> Tower:
    """An audio encoder as a plain encoder of its widths; marked as an estimate."""
    width = keys.integer("d_model", "hidden_size", "encoder_embed_dim", "conf_hidden_size", "hidden_dim")
    layers = keys.integer(
        "encoder_layers", "num_hidden_layers", "num_layers", "conf_num_hidden_layers", "num_blocks",
        high=1024,
    )  # fmt: skip
    ffn = keys.integer("encoder_ffn_dim", "intermediate_size", default=4 * width)
    parts = _Parts("audio")
    parts.encoder(layers, width, ffn)
    return _tower("audio", "audio tower (estimated from its widths)", parts, exact=False)
