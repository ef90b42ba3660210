"""Which mixer and which feed-forward each layer has, from what the config says about its layers.

A plan is one (mixer, feed-forward) pair a layer; either may be None. Mixers: "full", "indexed" (full, with
an index branch), "sliding", "chunked", "cross", "linear" (gated delta, KDA, lightning: the config's widths
tell), "mamba", "conv", "recurrent", "rwkv", "hybrid" (attention and Mamba side by side, or Zamba's shared
block). Feed-forwards: "dense", "moe".
"""

from collections.abc import Callable

from capplan.errors import shown
from capplan.readers.config_keys import GGUF_MARK, Keys
from capplan.readers.ffn_plan import feed_forwards, fitted
from capplan.specs import Architecture

LayerKinds = tuple[str | None, str | None]

_MIXER_NAMES = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "deepseek_sparse_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "indexed",
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


def layer_plan(keys: Keys, architecture: Architecture, layers: int) -> list[LayerKinds]:
    """The kinds of every layer, in order.

    Raises InputError where a per-layer list has the wrong length or an unknown entry.
    """
    for rule in architecture.required:
        names = rule.split("|")
        if keys.present(*names) is None:
            raise keys.fail(names[0], "missing", "the kinds of the layers are given by it")
    if GGUF_MARK not in keys.data:
        for rule in architecture.stated:
            _require_stated(keys, rule)
    single = _single_blocks(keys, architecture, layers)
    if single is not None:
        return single
    mixers = _mixers(keys, architecture, layers)
    ffns = feed_forwards(keys, layers) if architecture.routed else ["dense"] * layers
    return list(zip(mixers, ffns, strict=True))


def _require_stated(keys: Keys, rule: str) -> None:
    """Refuse a file that leaves out a key whose absence could mean several things."""
    wanted, _, condition = rule.partition(" if ")
    names = wanted.split("|")
    if condition and not any(keys.data.get(name) for name in condition.split("|")):
        return
    if not any(name in keys.data or name in keys.defaults for name in names):
        raise keys.fail(
            names[0],
            "missing" if not condition else f"missing, though {condition} is there",
            "published files of this architecture state it and its size depends on it; add the key",
        )


def _single_blocks(keys: Keys, architecture: Architecture, layers: int) -> list[LayerKinds] | None:
    """Plans where every "layer" is one block (Nemotron-H)."""
    if not architecture.single_blocks:
        return None
    pattern = keys.text("hybrid_override_pattern")
    names: list[str] | None = list(pattern) if pattern else keys.texts("layers_block_type")
    if names is None:
        raise keys.fail("hybrid_override_pattern", "missing", "the kinds of the layers are given by it")
    made: list[LayerKinds] = []
    for name in fitted(keys, "hybrid_override_pattern", names, layers):
        if name not in _SINGLE_BLOCKS:
            raise keys.fail("hybrid_override_pattern", f"unknown layer kind {shown(name)}", "known: M * - E")
        made.append(_SINGLE_BLOCKS[name])
    return made


def _mixers(keys: Keys, architecture: Architecture, layers: int) -> list[str | None]:
    sources: tuple[Callable[[Keys, Architecture, int], list[str | None] | None], ...] = (
        _from_repeated_types,
        _from_layer_types,
        _from_linear_lists,
        _from_shared_period,
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


def _from_repeated_types(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """A short list of kinds repeated over the layers (RecurrentGemma, GPT-Neo's attention_types)."""
    types = keys.items("attention_types")
    if types is not None and keys.present("attention_layers") is None:
        return _expanded_types(keys, types, layers)
    if architecture.mixer != "recurrent":
        return None
    names = keys.texts("block_types", "_block_types") or []
    kinds = {"recurrent": "recurrent", "attention": "sliding"}
    if not names or set(names) - set(kinds):
        raise keys.fail("block_types", "missing or unknown", "a list of recurrent and attention")
    return [kinds[names[layer % len(names)]] for layer in range(layers)]


def _expanded_types(keys: Keys, types: list[object], layers: int) -> list[str | None]:
    made: list[str | None] = []
    for entry in types:
        match entry:
            case [list() as names, int() as times] if 0 < times <= layers:
                made += [_mixer_name(keys, "attention_types", name) for name in names] * times
            case _:
                raise keys.fail("attention_types", f"{shown(entry)} is no [kinds, times]", "mend it")
        if len(made) > layers:
            break
    return fitted(keys, "attention_types", made, layers)


def _mixer_name(keys: Keys, key: str, name: object) -> str:
    if not isinstance(name, str) or name not in _MIXER_NAMES:
        raise keys.fail(key, f"unknown layer kind {shown(name)}", "known: " + " ".join(sorted(_MIXER_NAMES)))
    return _MIXER_NAMES[name]


def _from_layer_types(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    key = keys.present("layer_types", "layers_block_type", "attention_layers")
    names = keys.texts("layer_types", "layers_block_type", "attention_layers")
    if names is None or key is None:
        return None
    # Saved again by newer tools, Mamba layers are called linear attention.
    linear = "mamba" if "mamba_d_state" in keys.data else "linear"
    made: list[str | None] = []
    for name in fitted(keys, key, names, layers):
        kind = _mixer_name(keys, key, name)
        made.append(linear if kind == "linear" else kind)
    # The class works with a list, whatever the pattern keys beside it say.
    for pattern in (
        "sliding_window_pattern", "full_attention_interval", "attn_layer_indices",
        "hybrid_layer_ids", "attn_layer_period", "attn_layer_offset", "full_attn_idxs",
        "global_attn_every_n_layers", "layer_switch", "attention_types", "attn_type_list",
        "prefix_dense_sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval",
        "use_sliding_window", "max_window_layers", "_sliding_window_pattern",
    ):  # fmt: skip
        keys.used.add(pattern)
    windows = ("sliding_window", "sliding_window_size", "window_size")
    keys.used.update(windows)
    if "sliding" in made and keys.optional_integer(*windows) is None:
        raise keys.fail("sliding_window", "missing", f"{key} has sliding layers: give the window")
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


def _from_shared_period(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """Zamba: which Mamba layers run the shared block; the period counts from layer 3, layer 2 is one."""
    if not architecture.shared_blocks:
        return None
    listed = keys.integers("hybrid_layer_ids", high=layers - 1)
    if listed is not None:
        return ["hybrid" if layer in listed else "mamba" for layer in range(layers)]
    period = keys.integer("attn_layer_period")
    offset = keys.integer("attn_layer_offset", low=0)
    return [
        "hybrid" if layer == 2 or (layer > 2 and (layer - 3) % period == offset) else "mamba"
        for layer in range(layers)
    ]


def _from_attention_period(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
    """Mamba hybrids that name their attention layers by period or index (Jamba, Bamba)."""
    period = keys.optional_integer("attn_layer_period")
    if period is not None:
        offset = keys.integer("attn_layer_offset", default=0, low=0)
        return ["full" if layer % period == offset else "mamba" for layer in range(layers)]
    indices = keys.integers("attn_layer_indices", high=layers - 1)
    if indices is not None:
        return ["full" if layer in indices else "mamba" for layer in range(layers)]
    convolutions = keys.integers("full_attn_idxs", high=layers - 1)
    if convolutions is not None:
        return ["full" if layer in convolutions else "conv" for layer in range(layers)]
    if architecture.mixer not in ("attention", "mixture"):
        return [architecture.mixer] * layers
    return None


def _from_sliding_lists(keys: Keys, architecture: Architecture, layers: int) -> list[str | None] | None:
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
    return ["chunked" if uses else "full" for uses in fitted(keys, "no_rope_layers", rope, layers)]


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
        # Most families end a pattern with the global layer, some begin with it; dense first layers of
        # Cohere's MoE stand outside the pattern and attend everywhere.
        first_global = architecture.sliding.startswith("first:")
        outside = _prefix(keys) if architecture.sliding.startswith("prefix:") else 0
        return [
            "full" if layer < outside or (layer - outside + (not first_global)) % pattern == 0 else "sliding"
            for layer in range(layers)
        ]
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
    _, found, number = architecture.sliding.partition(":")
    return int(number) if found else None


def _prefix(keys: Keys) -> int:
    """Dense layers before a pattern; their own pattern must be the published one, all global."""
    if keys.integer("prefix_dense_sliding_window_pattern", default=1) != 1:
        raise keys.fail("prefix_dense_sliding_window_pattern", "is not understood", "only 1 is")
    return keys.integer("first_k_dense_replace", default=0, low=0)
