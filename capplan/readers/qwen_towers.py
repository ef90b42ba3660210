"""Vision towers of the Qwen-VL line and of those built like them (EXAONE, GLM-V, Ernie-VL, MiniMax)."""

from capplan.readers.config_keys import Keys
from capplan.readers.tower_parts import Parts, depth, patch_inputs, patches, ratio_width
from capplan.specs import Tower


def _merged(keys: Keys, width: int) -> int:
    """Width of the patches a merger joins."""
    names = ("spatial_merge_size", "spatial_conv_size")
    return width * keys.integer(*names, default=2, high=64) ** 2


def _frames(keys: Keys) -> int:
    return keys.integer("temporal_patch_size", default=2, high=64)


def qwen3_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Learned positions, LayerNorms, and extra mergers at intermediate layers."""
    width = keys.integer("hidden_size")
    out = keys.integer("out_hidden_size", default=hidden)
    merged = _merged(keys, width)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys, _frames(keys), patch=None))
    parts.add("pos_embed", keys.integer("num_position_embeddings", default=2304), width)
    parts.encoder(depth(keys, "depth"), width, keys.integer("intermediate_size"))
    merger = Parts("projector")
    deep = len(keys.items("deepstack_visual_indexes", high=1024) or [])
    merger.norm("merger.norm", width, bias=True)
    if deep:
        # The mergers of intermediate layers norm after joining the patches.
        merger.norm("deepstack.norm", merged, bias=True, copies=deep)
    merger.linear("merger.linear_fc1", merged, merged, copies=1 + deep)
    merger.linear("merger.linear_fc2", out, merged, copies=1 + deep)
    return [parts.tower("vision tower"), merger.tower("projector")]


def qwen2_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """No positions, LayerNorms, plain feed-forward; hidden_size is the decoder's width here."""
    width = keys.integer("embed_dim", default=1280)
    return _qwen2(keys, width, hidden, ratio_width(keys, width), newer=False)


def qwen2_5_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """RMS norms and a gated feed-forward; EXAONE 4.5 adds grouped keys and values."""
    width = keys.integer("hidden_size")
    out = keys.integer("out_hidden_size", default=hidden)
    return _qwen2(keys, width, out, keys.integer("intermediate_size"), newer=True)


def _qwen2(keys: Keys, width: int, out: int, ffn: int, *, newer: bool) -> list[Tower]:
    merged = _merged(keys, width)
    # EXAONE's own widths are no defaults of Qwen's classes.
    exaone = (keys.text("model_type", default="") or "").startswith("exaone")
    heads = keys.integer("num_heads", default=None if exaone else 16, high=1 << 16)
    kv_heads = keys.integer("num_key_value_heads", default=None if exaone else heads, high=1 << 16)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys, _frames(keys)), bias=False)
    parts.encoder(
        depth(keys, "depth", default=None if exaone else 32),
        width,
        ffn,
        kv_width=width * kv_heads // heads,
        gated=newer,
        norm_bias=not newer,
    )
    merger = Parts("projector")
    merger.norm("merger.ln_q", width, bias=not newer)
    merger.linear("merger.mlp.0", merged, merged)
    merger.linear("merger.mlp.2", out, merged)
    return [parts.tower("vision tower"), merger.tower("projector")]


def glm4v(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """GLM-V: gated, without biases; its feed-forward is as wide as the decoder, its merger wider."""
    width = keys.integer("hidden_size")
    out = keys.integer("out_hidden_size", default=hidden)
    bias = keys.flag("attention_bias", default=False)
    # The next generation names the merger's width, and gives biases and head norms to the layers.
    newer = keys.present("projection_intermediate_size") is not None
    merge = keys.integer("spatial_merge_size", default=2, high=64)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys, _frames(keys)))
    if not newer:
        parts.add("position_embedding", patches(keys, 336, 14), width)
        parts.norm("post_conv_layernorm", width, bias=False)
    heads = keys.integer("num_heads", default=12, high=1 << 16)
    parts.encoder(
        depth(keys, "depth", default=24),
        width,
        keys.integer("intermediate_size") if newer else out,
        attention_bias=bias,
        gated=True,
        mlp_bias=newer,
        norm_bias=False,
        head_norms=max(1, width // heads) if newer else 0,
    )
    parts.norm("post_layernorm", width, bias=False)
    merger = Parts("projector")
    merger.linear("downsample", out, width, merge, merge)
    merger.linear("merger.proj", out, out, bias=False)
    merger.norm("merger.post_projection_norm", out, bias=True)
    inner = keys.integer("projection_intermediate_size", "intermediate_size")
    for name in ("gate_proj", "up_proj"):
        merger.linear(f"merger.{name}", inner, out, bias=False)
    merger.linear("merger.down_proj", out, inner, bias=False)
    return [parts.tower("vision tower"), merger.tower("projector")]


def ernie_vl(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Ernie-VL: a plain encoder and a resampler over space and time."""
    width = keys.integer("hidden_size", "embed_dim")
    merged = _merged(keys, width)
    frames = keys.integer("temporal_merge_size", "temporal_conv_size", default=2, high=64)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys), bias=False)
    parts.encoder(depth(keys, "depth"), width, ratio_width(keys, width))
    parts.norm("ln", width, bias=True)
    sampler = Parts("projector")
    for name, inputs in (("spatial_linear", merged), ("temporal_linear", merged * frames)):
        sampler.linear(f"{name}.fc1", merged, inputs)
        sampler.linear(f"{name}.fc2", merged, merged)
        sampler.norm(f"{name}.ln", merged, bias=True)
    sampler.linear("mlp", hidden, merged)
    sampler.norm("after_norm", hidden, bias=False)
    return [parts.tower("vision tower"), sampler.tower("projector")]


def minimax_m3(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """MiniMax-M3: a CLIP-like encoder over frames, and a projector in two stages."""
    width = keys.integer("hidden_size")
    inner = top.integer("projector_hidden_size", default=hidden)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys, _frames(keys)), bias=False)
    parts.norm("pre_layernorm", width, bias=True)
    parts.encoder(depth(keys, "num_hidden_layers"), width, keys.integer("intermediate_size"))
    projector = Parts("projector")
    merged = top.integer("merged_hidden_size", default=_merged(keys, inner))
    for name, rows, cols in (
        ("linear_1", inner, width),
        ("linear_2", hidden, inner),
        ("merge_linear_1", inner, merged),
        ("merge_linear_2", hidden, inner),
    ):
        projector.linear(name, rows, cols)
    return [parts.tower("vision tower"), projector.tower("projector")]
