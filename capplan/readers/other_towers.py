"""Vision towers with a shape of their own: Llama 3.2 and 4, Gemma 4, MoonViT, Step."""

from capplan.readers.config_keys import Keys
from capplan.readers.tower_parts import Parts, depth, patch_inputs, patches
from capplan.specs import Tower


def llama4(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Llama 4: class token, learned positions, pixel shuffle and an adapter."""
    width = keys.integer("hidden_size", default=768)
    out = keys.integer("projector_output_dim", "vision_output_dim", default=7680)
    middle = keys.integer("projector_input_dim", default=4096)
    ratio = keys.number("pixel_shuffle_ratio", default=0.5) or 0.5
    if not 0.01 <= ratio <= 1:
        raise keys.fail("pixel_shuffle_ratio", f"{ratio} is absurd", "a fraction, mostly 0.5")
    parts = Parts("vision")
    parts.add("class_embedding", width)
    parts.add("positional_embedding_vlm", patches(keys, 448, 14) + 1, width)
    parts.linear("patch_embedding", width, patch_inputs(keys), bias=False)
    parts.norm("layernorms", width, bias=True, copies=2)
    parts.encoder(
        depth(keys, "num_hidden_layers", default=34),
        width,
        keys.integer("intermediate_size", default=5632),
    )
    parts.linear("adapter.fc1", middle, int(width / ratio**2), bias=False)
    parts.linear("adapter.fc2", out, middle, bias=False)
    projector = Parts("projector")
    projector.linear("linear_1", hidden, keys.integer("vision_output_dim", default=7680), bias=False)
    return [parts.tower("vision tower"), projector.tower("projector")]


def mllama(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Llama 3.2 Vision: local and gated global layers, positions and tiles with gates."""
    width = keys.integer("hidden_size", default=1280)
    tiles = keys.integer("max_num_tiles", default=4, high=64)
    # One embedding for each aspect ratio, and one for padding.
    ratios = len(keys.items("supported_aspect_ratios", high=1024) or [None] * 8) + 1
    positions = patches(keys, 448, 14) + 1
    ffn = keys.integer("intermediate_size", default=5120)
    deep = depth(keys, "num_global_layers", default=8)
    parts = Parts("vision")
    parts.add("class_embedding", width)
    parts.linear("patch_embedding", width, patch_inputs(keys), bias=False)
    parts.add("gates", 1, copies=3)
    parts.add("position_embedding", positions, width)
    parts.add("tile_embedding", ratios, tiles * positions * width)
    parts.add("tile_positional_embeddings", ratios, tiles * width, copies=2)
    parts.norm("layernorms", width, bias=True, copies=2)
    for layers in (depth(keys, "num_hidden_layers", default=32), deep):
        parts.encoder(layers, width, ffn, attention_bias=False)
    parts.add("global_gates", 1, copies=2 * deep)
    projector = Parts("projector")
    projector.linear("multi_modal_projector", hidden, keys.integer("vision_output_dim", default=7680))
    return [parts.tower("vision tower"), projector.tower("projector")]


def gemma4(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Gemma 4: two position tables, four norms and head norms a layer."""
    width = keys.integer("hidden_size")
    heads = keys.integer("num_attention_heads", high=1 << 16)
    head_width = keys.integer("head_dim", default=max(1, width // heads))
    parts = Parts("vision")
    parts.add("position_embedding_table", 2, keys.integer("position_embedding_size"), width)
    parts.linear("input_proj", width, patch_inputs(keys, patch=None), bias=False)
    parts.encoder(
        depth(keys, "num_hidden_layers"),
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
    projector = Parts("projector")
    projector.linear("embedding_projection", hidden, width, bias=False)
    return [parts.tower("vision tower"), projector.tower("projector")]


def moonvit(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Kimi's MoonViT: interpolated positions, merged patches; the newer one has RMS norms and no biases."""
    width = keys.integer("vt_hidden_size", "hidden_size")
    newer = keys.data.get("norm_type") == "rmsnorm"
    height = keys.integer("init_pos_emb_height", high=4096)
    parts = Parts("vision")
    parts.linear("patch_embed", width, patch_inputs(keys), bias=not newer)
    parts.add("pos_emb", height * keys.integer("init_pos_emb_width", high=4096), width)
    parts.encoder(
        depth(keys, "vt_num_hidden_layers", "num_hidden_layers"),
        width,
        keys.integer("vt_intermediate_size", "intermediate_size"),
        attention_width=keys.integer("qkv_hidden_size", default=None if newer else width),
        attention_bias=not newer,
        mlp_bias=not newer,
        norm_bias=not newer,
    )
    parts.norm("final_layernorm", width, bias=not newer)
    kernel = keys.integers("merge_kernel_size", low=1, high=64) or [2, 2]
    merged = width * kernel[0] * kernel[-1]
    projector = Parts("projector")
    if not newer:
        projector.norm("pre_norm", width, bias=True)
    projector.linear("linear_1", merged, merged, bias=not newer)
    projector.linear("linear_2", hidden, merged, bias=not newer)
    if newer:
        projector.norm("post_norm", hidden, bias=False)
    return [parts.tower("vision tower"), projector.tower("projector")]


def step(keys: Keys, top: Keys, hidden: int) -> list[Tower]:
    """Step 3.5/3.7: layer scales, and two convolutions that each halve the image."""
    width = keys.integer("hidden_size")
    layers = depth(keys, "num_hidden_layers")
    parts = Parts("vision")
    parts.linear("patch_embedding", width, patch_inputs(keys), bias=False)
    parts.add("position_embedding", patches(keys, 728, 14), width)
    parts.norm("pre_layernorm", width, bias=True)
    parts.encoder(layers, width, keys.integer("intermediate_size"))
    parts.add("layer_scales", width, copies=2 * layers)
    parts.linear("downsampler1", 2 * width, width, 3, 3)
    parts.linear("downsampler2", 4 * width, 2 * width, 3, 3)
    projector = Parts("projector")
    bias = top.flag("projector_bias", default=False)
    projector.linear("multi_modal_projector", hidden, 4 * width, bias=bias)
    return [parts.tower("vision tower"), projector.tower("projector")]
