"""Which mixer and which feed-forward each layer has, from what the config says about its layers.

A plan is one (mixer, feed-forward) pair a layer; either may be None. Mixers: "full", "sliding", "chunked",
"linear" (gated delta, KDA, lightning: the config's widths tell), "mamba", "conv", "cross", "hybrid"
(attention and Mamba side by side). Feed-forwards: "dense", "moe".
"""

from collections.abc import Callable
from typing import TypeVar

from capplan.errors import shown
from capplan.readers.config_keys import Keys
from capplan.specs import Architecture

_T = TypeVar("_T")
LayerKinds = tuple[str | None, str | None]

_MIXER_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "hybrid": "hybrid",
}
_SINGLE_BLOCKS: dict[str, LayerKinds] = {
    "M": ("mamba", None),
    "*": ("full", None),
    "-": (None, "dense"),
    "E": (None, "moe"),
    "mamba": ("mamba", None),
    "attention": ("full", None),
    "mlp": (None, "dense"),
    "moe": (None, "moe"),
}
EXPERT_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)


def layer_plan(keys: Keys, architecture: Architecture, layers: int) -> list[LayerKinds]:
    """The kinds of every layer, in order.

    Raises InputError where a per-layer list has the wrong length or an unknown entry.
    """
    single = _single_blocks(keys, architecture, layers)
    if single is not None:
        return single
    mixers = _mixers(keys, architecture, layers)
    ffns = _ffns(keys, layers)
    return list(zip(mixers, ffns, strict=True))


def fitted(keys: Keys, name: str, values: list[_T], layers: int) -> list[_T]:
    """`values` cut to one per layer; entries past the decoder's layers belong to its MTP layers."""
    if layers <= len(values) <= layers + 8:
        return values[:layers]
    raise keys.fail(
        name, f"has {len(values)} entries for {layers} layers", "give one entry for each layer"
    )


def _single_blocks(keys: Keys, architecture: Architecture, layers: int) -> list[LayerKinds] | None:
    """Plans where every "layer" is one block (Nemotron-H)."""
    if not architecture.single_blocks:
        return None
    pattern = keys.text("hybrid_override_pattern")
    names: list[str] | None = list(pattern) if pattern else keys.texts("layers_block_type")
    if names is None:
        raise keys.fail(
            "hybrid_override_pattern", "missing", "the kinds of the layers are given by it"
        )
    made: list[LayerKinds] = []
    for name in fitted(keys, "hybrid_override_pattern", names, layers):
        if name not in _SINGLE_BLOCKS:
            raise keys.fail(
                "hybrid_override_pattern", f"unknown layer kind {shown(name)}", "known: M * - E"
            )
        made.append(_SINGLE_BLOCKS[name])
    return made


def _mixers(keys: Keys, architecture: Architecture, layers: int) -> list[str | None]:
    sources: tuple[Callable[[Keys, Architecture, int], list[str | None] | None], ...] = (
        _from_layer_types,
        _from_linear_lists,
        _from_attention_period,
        _from_sliding_lists,
        _from_chunks,
        _from_window,
    )
    for source in sources:
        found = source(keys, architecture, layers)
        if found is not None:
            return found
    return ["full"] * layers


def _from_layer_types(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    names = keys.texts("layer_types", "layers_block_type", "_block_types", "block_types")
    if names is None:
        return None
    made: list[str | None] = []
    for name in fitted(keys, "layer_types", names, layers):
        if name not in _MIXER_NAMES:
            raise keys.fail(
                "layer_types",
                f"unknown layer kind {shown(name)}",
                "known: " + " ".join(sorted(_MIXER_NAMES)),
            )
        made.append(_MIXER_NAMES[name])
    # The class works with a list, whatever the pattern keys beside it say.
    for pattern in ("sliding_window_pattern", "full_attention_interval", "attn_layer_indices"):
        keys.used.add(pattern)
    if "sliding" in made and keys.optional_integer("sliding_window", "sliding_window_size") is None:
        raise keys.fail("sliding_window", "missing", "layer_types has sliding layers: give the window")
    return made


def _from_linear_lists(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """Hybrids of linear and full attention without layer_types."""
    linear = keys.child("linear_attn_config")
    if linear is not None:
        full = linear.integers("full_attn_layers", low=0, high=layers + 1)
        delta = linear.integers("kda_layers", low=0, high=layers + 1)
        keys.used.add("linear_attn_config")
        if full is None or delta is None:
            raise linear.fail("full_attn_layers", "missing", "give kda_layers and full_attn_layers")
        # Both lists count layers from one; trailing zeros are padding.
        full_set, delta_set = set(full) - {0}, set(delta) - {0}
        if full_set & delta_set or full_set | delta_set != set(range(1, layers + 1)):
            raise linear.fail(
                "kda_layers",
                "kda_layers and full_attn_layers do not name every layer once",
                f"together they must be 1 to {layers}",
            )
        return ["full" if layer in full_set else "linear" for layer in range(1, layers + 1)]
    interval = keys.optional_integer("full_attention_interval")
    if interval is not None:
        return ["full" if (layer + 1) % interval == 0 else "linear" for layer in range(layers)]
    types = keys.integers("attn_type_list", low=0, high=1)
    if types is not None:
        return ["full" if kind else "linear" for kind in fitted(keys, "attn_type_list", types, layers)]
    return None


def _from_attention_period(
    keys: Keys, architecture: Architecture, layers: int
) -> list[str | None] | None:
    """Mamba hybrids that name their attention layers by period or index (Jamba, Bamba)."""
    period = keys.optional_integer("attn_layer_period")
    if period is not None:
        offset = keys.integer("attn_layer_offset", default=0, low=0)
        return ["full" if layer % period == offset else "mamba" for layer in range(layers)]
    indices = keys.integers("attn_layer_indices", high=layers - 1)
    if indices is not None:
        return ["full" if layer in indices else "mamba" for layer in range(layers)]
    if architecture.mixer != "attention":
        return [architecture.mixer] * layers
    return None


def _from_sliding_lists(
    keys: Keys, architecture: Architecture, layers: int
) -> list[str | None] | None:
    """Per-layer 0/1 lists and cross-attention layers."""
    pattern = keys.integers("hybrid_layer_pattern", low=0, high=1)
    if pattern is not None:
        return [
            "sliding" if slides else "full"
            for slides in fitted(keys, "hybrid_layer_pattern", pattern, layers)
        ]
    cross = keys.integers("cross_attention_layers", high=layers - 1)
    if cross is not None:
        return ["cross" if layer in cross else "full" for layer in range(layers)]
    return None


def _from_chunks(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """Llama 4: layers with rotary positions attend within chunks, the others everywhere."""
    if not architecture.chunked:
        return None
    if keys.optional_integer("attention_chunk_size") is None:
        return None
    rope = keys.integers("no_rope_layers", low=0, high=1)
    if not rope:
        interval = keys.integer("no_rope_layer_interval", default=4)
        rope = [int((layer + 1) % interval != 0) for layer in range(layers)]
    return [
        "chunked" if uses else "full" for uses in fitted(keys, "no_rope_layers", rope, layers)
    ]


def _from_window(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """One window for the model: all layers, a pattern of them, or those past max_window_layers."""
    if architecture.sliding == "never":
        keys.used.update(("sliding_window", "use_sliding_window", "max_window_layers"))
        return None
    window = keys.optional_integer("sliding_window", "sliding_window_size", low=0)
    uses = keys.flag("use_sliding_window", default=True)
    first = keys.optional_integer("max_window_layers", low=0)
    pattern = _pattern(keys, architecture)
    if not window or not uses:
        return None
    if pattern is not None:
        return ["full" if (layer + 1) % pattern == 0 else "sliding" for layer in range(layers)]
    if "use_sliding_window" in keys.data and first is not None:
        return ["sliding" if layer >= first else "full" for layer in range(layers)]
    return ["sliding"] * layers


def _pattern(keys: Keys, architecture: Architecture) -> int | None:
    """Every how many layers one attends everywhere; None: no pattern."""
    name = keys.present(
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "global_attn_every_n_layers",
        "layer_switch",
    )
    if name is not None:
        value = keys.value(name)
        if isinstance(value, str):
            # "LLLG": three local layers, then a global one.
            if not value or set(value) - set("LG") or not value.endswith("G"):
                raise keys.fail(name, f"{shown(value)} is no pattern", "write a number or LLLG")
            if value.count("G") != 1:
                raise keys.fail(name, f"{shown(value)} has several global layers", "give layer_types")
            return len(value)
        return keys.integer(name)
    if architecture.sliding.startswith("pattern:"):
        return int(architecture.sliding.removeprefix("pattern:"))
    return None


def _ffns(keys: Keys, layers: int) -> list[str | None]:
    experts = keys.optional_integer(*EXPERT_COUNTS, low=0)
    if not keys.flag("enable_moe_block", default=True):
        experts = None
    if not experts:
        _forget_moe_rules(keys)
        return ["dense"] * layers
    return ["moe" if sparse else "dense" for sparse in _sparse_layers(keys, layers)]


def _forget_moe_rules(keys: Keys) -> None:
    keys.used.update(
        ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "moe_layer_freq")
    )


def _sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers route to experts."""
    types = keys.texts("mlp_layer_types")
    dense_first = keys.optional_integer("first_k_dense_replace", "num_dense_layers", low=0)
    frequency = keys.present("moe_layer_freq")
    if types is not None:
        keys.used.add("moe_layer_freq")
        for kind in types:
            if kind not in ("dense", "sparse"):
                raise keys.fail("mlp_layer_types", f"unknown kind {shown(kind)}", "dense or sparse")
        return [kind == "sparse" for kind in fitted(keys, "mlp_layer_types", types, layers)]
    if frequency is not None and isinstance(keys.data.get("moe_layer_freq"), list):
        flags = keys.integers("moe_layer_freq", low=0, high=1) or []
        return [bool(flag) for flag in fitted(keys, "moe_layer_freq", flags, layers)]
    if keys.present("moe_layers") is not None:
        chosen = keys.integers("moe_layers", high=layers - 1) or []
        return [layer in chosen for layer in range(layers)]
    every = keys.integer(
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_freq",
        "expert_layer_period",
        "moe_layer_interval",
        default=1,
        low=0,
    )
    if every == 0:
        return [False] * layers
    only_dense = set(keys.integers("mlp_only_layers", high=MAX_INDEX) or [])
    offset = keys.optional_integer("expert_layer_offset", low=0)
    start = keys.integer("moe_layer_start_index", default=0, low=0)
    end = keys.optional_integer("moe_layer_end_index", low=-1)
    last = layers - 1 if end is None or end < 0 else end

    def sparse(layer: int) -> bool:
        if layer in only_dense or layer < (dense_first or 0) or not start <= layer <= last:
            return False
        if offset is not None:
            return layer % every == offset
        if dense_first is not None:
            # DeepSeek counts from layer 0, the interleaved families from layer 1.
            return layer % every == 0
        return (layer + 1) % every == 0

    return [sparse(layer) for layer in range(layers)]


MAX_INDEX = 1 << 20
