"""CLIP-like vision towers (CLIP, SigLIP, Idefics, InternViT, Pixtral) and the projectors after them."""

from capplan.readers.config_keys import Keys
from capplan.readers.tower_parts import Parts, depth, patch_inputs, patches, ratio_width
from capplan.specs import Tower


def siglip(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """SigLIP, SigLIP 2 and the Idefics encoder; a pooling head unless the file says none."""
    kind = keys.text("model_type", default="") or ""
    width = keys.integer("hidden_size", default=768)
    ffn = keys.integer("intermediate_size", default=3072)
    parts = Parts("vision")
    parts.linear("patch_embedding", width, patch_inputs(keys, patch=16))
    # SigLIP 2 has a fixed number of positions, whatever the image.
    default = 256 if kind.startswith("siglip2") else None
    positions = keys.optional_integer("num_patches", high=1 << 24) or default
    parts.add("position_embedding", positions or patches(keys, 224, 16), width)
    layers = depth(keys, "num_hidden_layers", default=12)
    parts.encoder(layers, width, ffn)
    parts.norm("post_layernorm", width, bias=True)
    headless = kind.startswith(("idefics", "smolvlm"))
    if keys.flag("vision_use_head", default=not headless) and not headless:
        parts.add("head.probe", width)
        parts.encoder(1, width, ffn, norms=1)
    return [parts.tower("vision tower"), *_projector(keys, top, width, hidden)]


def clip(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """CLIP: a class token, norms before and after."""
    width = keys.integer("hidden_size", default=768)
    parts = Parts("vision")
    parts.linear("patch_embedding", width, patch_inputs(keys, patch=32), bias=False)
    parts.add("position_embedding", patches(keys, 224, 32) + 1, width)
    parts.add("class_embedding", width)
    parts.encoder(
        depth(keys, "num_hidden_layers", default=12),
        width,
        keys.integer("intermediate_size", default=3072),
    )
    parts.norm("layernorms", width, bias=True, copies=2)
    return [parts.tower("vision tower"), *_projector(keys, top, width, hidden)]


def internvit(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """InternViT: class token, layer scales, optional q/k norms over the whole width."""
    width = keys.integer("hidden_size")
    rms = keys.text("norm_type", default="layer_norm") == "rms_norm"
    layers = depth(keys, "num_hidden_layers")
    parts = Parts("vision")
    parts.linear("patch_embedding", width, patch_inputs(keys))
    parts.add("position_embedding", patches(keys, 448, 14) + 1, width)
    parts.add("class_embedding", width)
    parts.encoder(
        layers,
        width,
        keys.integer("intermediate_size"),
        attention_bias=keys.flag("attention_bias", "qkv_bias", default=False),
        o_bias=True,
        norm_bias=not rms,
        head_norms=width if keys.flag("use_qk_norm", "qk_normalization", default=False) else 0,
    )
    parts.add("layer_scales", width, copies=2 * layers)
    factor = top.number("downsample_ratio", default=0.5) or 0.5
    if not 0.01 <= factor <= 1:
        raise top.fail("downsample_ratio", f"{factor} is absurd", "a fraction, mostly 0.5")
    joined = int(width / factor**2)
    projector = Parts("projector")
    projector.norm("layer_norm", joined, bias=True)
    projector.linear("linear_1", hidden, joined)
    projector.linear("linear_2", hidden, hidden)
    return [parts.tower("vision tower"), projector.tower("projector")]


def pixtral(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Pixtral: gated, RMS norms, no biases, no learned positions."""
    width = keys.integer("hidden_size", default=1024)
    parts = Parts("vision")
    parts.linear("patch_conv", width, patch_inputs(keys, patch=16), bias=False)
    parts.norm("ln_pre", width, bias=False)
    parts.encoder(
        depth(keys, "num_hidden_layers", default=24),
        width,
        keys.integer("intermediate_size", default=4096),
        attention_bias=False,
        gated=True,
        mlp_bias=False,
        norm_bias=False,
    )
    merge = top.optional_integer("spatial_merge_size", high=64)
    bias = top.flag("multimodal_projector_bias", default=merge is None)
    projector = Parts("projector")
    if merge is not None:
        projector.norm("norm", width, bias=False)
        projector.linear("patch_merger", width, width * merge * merge, bias=False)
    projector.linear("linear_1", hidden, width, bias=bias)
    projector.linear("linear_2", hidden, hidden, bias=bias)
    return [parts.tower("vision tower"), projector.tower("projector")]


def _projector(keys: Keys, top: Keys, width: int, hidden: int) -> list[Tower]:
    """What stands between the encoder and the decoder, by the wrapper and its own keys."""
    wrapper = top.text("model_type", default="") or ""
    factor = top.optional_integer("scale_factor", "downsample_factor", high=64)
    parts = Parts("projector")
    if wrapper == "gemma3":
        parts.add("mm_input_projection", width, hidden)
        parts.norm("mm_soft_emb_norm", width, bias=False)
    elif wrapper == "paligemma":
        top.used.update(("projection_dim", "hidden_size"))
        parts.linear("linear", top.integer("projection_dim", default=hidden), width)
    elif wrapper.startswith(("idefics3", "smolvlm")):
        parts.linear("connector", hidden, width * (factor or 2) ** 2, bias=False)
    elif wrapper == "cohere2_vision":
        inner = top.integer("alignment_intermediate_size", default=36864)
        parts.linear("linear_1", inner, width * (factor or 2) ** 2)
        parts.linear("linear_2", hidden, inner // 2)
    elif wrapper == "lfm2_vl":
        joined, inner = width * (factor or 2) ** 2, top.integer("projector_hidden_size", default=2560)
        bias = top.flag("projector_bias", default=True)
        if top.flag("projector_use_layernorm", default=True):
            parts.norm("layer_norm", joined, bias=True)
        parts.linear("linear_1", inner, joined, bias=bias)
        parts.linear("linear_2", hidden, inner, bias=bias)
    elif top.present("projector_patch_to_query_dict") is not None:
        _query_projector(parts, top, width, hidden)
    else:
        return [_llava_projector(parts, top, width, hidden, wrapper)]
    return [parts.tower("projector")]


def _llava_projector(parts: Parts, top: Keys, width: int, hidden: int, wrapper: str) -> Tower:
    bias = top.flag("multimodal_projector_bias", default=True)
    layers = top.data.get("vision_feature_layer")
    # Features of several layers are joined.
    joined = width * (max(1, len(layers)) if isinstance(layers, list) and len(layers) < 64 else 1)
    parts.linear("linear_1", hidden, joined, bias=bias)
    parts.linear("linear_2", hidden, hidden, bias=bias)
    if wrapper in ("llava_next", "llava_onevision", "llava_next_video"):
        parts.add("image_newline", hidden)
    known = wrapper.startswith("llava") or wrapper in ("vipllava",)
    return parts.tower("projector" if known else "projector (estimated)", exact=known)


def _query_projector(parts: Parts, top: Keys, width: int, hidden: int) -> None:
    """Aria: learned queries attend to the patches, then a feed-forward."""
    table = top.child("projector_patch_to_query_dict")
    counts = [value for value in (table.data.values() if table else ()) if isinstance(value, int)]
    if not counts or not 0 < max(counts) < 1 << 16:
        raise top.fail("projector_patch_to_query_dict", "has no counts", "patches: queries")
    queries = top.integer("max_value_projector_patch_to_query_dict", default=max(counts))
    parts.add("query", queries, width)
    for letter in "qkv":
        parts.linear(f"cross_attn.{letter}_proj", width, width, bias=False)
    parts.linear("cross_attn.in_proj", 3 * width, width)
    parts.linear("cross_attn.out_proj", width, width)
    parts.linear("cross_attn.linear", width, width)
    parts.norm("norms", width, bias=True, copies=3)
    parts.linear("feed_forward.linear_in", hidden, width, bias=False)
    parts.linear("feed_forward.linear_out", hidden, hidden, bias=False)


def estimated(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """A plain encoder of these widths, marked as an estimate; nothing where no widths are given."""
    widths = ("hidden_size", "embed_dim", "width", "vision_hidden_size")
    depths = ("num_hidden_layers", "depth", "layers", "num_layers")
    if keys.present(*widths) is None or keys.present(*depths) is None:
        return []
    width, layers = keys.integer(*widths), depth(keys, *depths)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys))
    parts.encoder(layers, width, ratio_width(keys, width))
    projector = Parts("projector")
    projector.linear("linear_1", hidden, width)
    projector.linear("linear_2", hidden, hidden)
    return [
        parts.tower("vision tower (estimated from its widths)", exact=False),
        projector.tower("projector (estimated)", exact=False),
    ]
