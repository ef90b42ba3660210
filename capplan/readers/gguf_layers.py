"""What every layer of a GGUF does, by its per-layer arrays: attend, slide, recur; route or not."""

from collections.abc import Sequence

from capplan.readers.gguf_keys import GgufModel

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"


def mixers(model: GgufModel) -> list[str]:
    """The mixer of every layer, in the words of config.json's layer_types."""
    recurs, slides = _recurring(model), _sliding(model)
    other = model.arch.recurrent or LINEAR
    window = CHUNKED if model.arch.form == "chunked" else SLIDING
    return [other if recurs[layer] else window if slides[layer] else FULL for layer in range(model.layers)]


def window_of(model: GgufModel) -> int | None:
    """Width of the window: the file's, else the class's; None where llama.cpp uses none."""
    arch = model.arch
    given = model.keys.optional_integer("attention.sliding_window", low=0)
    if arch.form == "chunked":
        # llama.cpp sets the chunk itself, whatever the file says, unless that is zero.
        return None if given == 0 else arch.window
    if arch.every or arch.form == "compressed":
        return (arch.window if given is None else given) or None
    return None


def _recurring(model: GgufModel) -> Sequence[bool]:
    keys, arch, layers = model.keys, model.arch, model.layers
    listed = model.per_layer("attention.recurrent_layers", high=1)
    every = keys.optional_integer("full_attention_interval")
    if arch.recurrent == "hybrid":
        return [True] * layers
    if listed is not None:
        return [bool(flag) for flag in listed]
    if arch.recurrent == LINEAR:
        return [(layer + 1) % (every or arch.interval) != 0 for layer in range(layers)]
    if not arch.recurrent and arch.form not in ("kda", "single"):
        return [False] * layers
    heads = model.per_layer("attention.head_count_kv") or [1] * layers
    return [count == 0 for count in heads]


def _sliding(model: GgufModel) -> Sequence[bool]:
    keys, arch, layers = model.keys, model.arch, model.layers
    key = "attention.sliding_window_pattern"
    listed = keys.present(key) is not None and isinstance(keys.value(key), list | tuple)
    if not arch.every or window_of(model) is None:
        keys.used.add(key)
        if keys.optional_integer("attention.sliding_window", low=0) and arch.form != "compressed":
            model.notes.append(
                f"llama.cpp keeps every token of {model.name} models: their window is not used"
            )
        return [False] * layers
    if listed:
        return [bool(flag) for flag in model.per_layer(key, high=1) or ()]
    every = keys.integer(key, default=arch.every, low=0)
    if every == 0:
        return [True] * layers
    everywhere = 0 if arch.first else every - 1
    return [layer % every != everywhere for layer in range(layers)]


def single_blocks(model: GgufModel, kinds: Sequence[str]) -> list[str]:
    """Nemotron-H: every layer is one block, a feed-forward where it has such tensors or a width."""
    widths = model.per_layer("feed_forward_length") or [0] * model.layers
    made = []
    for layer, kind in enumerate(kinds):
        if kind == FULL:
            made.append("attention")
        elif model.routes(layer):
            made.append("moe")
        elif model.shape("ffn_up", layer) or (widths[layer] and not model.has_layers):
            made.append("mlp")
        else:
            made.append("mamba")
    return made


def routed(model: GgufModel) -> list[bool]:
    """Which layers have experts: those with such tensors; without any, those past the leading dense."""
    first = model.keys.integer("leading_dense_block_count", default=0, low=0)
    if model.routes_any:
        return [model.routes(layer) for layer in range(model.layers)]
    return [layer >= first for layer in range(model.layers)]
