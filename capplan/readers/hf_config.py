"""A publisher's config.json → Model. What the config says about its layers decides.

Keys that nobody asked for and that could change memory are errors; harmless ones are listed in
`Model.ignored_keys`.
"""

from collections.abc import Mapping
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.config_keys import MAX_LAYERS, Keys
from capplan.readers.harmless_keys import is_harmless
from capplan.readers.layer_blocks import LayerBuilder
from capplan.readers.layer_plan import LayerKinds, layer_plan
from capplan.readers.quantization_config import read_quantization
from capplan.readers.towers import TOWER_KEYS, mtp_tower, read_towers
from capplan.specs import Architecture, Cache, LayerGroup, Model, Tensor, Tower

TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "decoder_config")
_DTYPE_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16, "float64": 64}
MAX_DEPTH: Final = 12
# Engines pad the vocabulary to this multiple before they split it.
VOCAB_MULTIPLE: Final = 64
PLAIN: Final = Architecture(id="plain decoder")


def model_type_of(config: Mapping[str, object]) -> str | None:
    """The model_type that decides how the decoder is read: the nested text model's, else the file's."""
    text = text_config_of(config)
    for mapping in (text, config):
        value = mapping.get("model_type")
        if isinstance(value, str) and value:
            return value
    return None


def text_config_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """The mapping that describes the decoder."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):
        return text_config_of(thinker)
    for name in TEXT_CONFIGS:
        value = config.get(name)
        if isinstance(value, Mapping) and value:
            return value
    return config


def check_depth(value: object, where: str, depth: int = 0) -> None:
    """Refuse nesting no published config has; it would only serve to exhaust the stack."""
    if depth > MAX_DEPTH:
        raise InputError(
            f"nested more than {MAX_DEPTH} levels deep",
            where=where,
            hint="a model config is a flat mapping with a few nested ones",
        )
    if isinstance(value, Mapping):
        for inner in value.values():
            check_depth(inner, where, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            check_depth(inner, where, depth + 1)


def read_model(
    config: Mapping[str, object],
    *,
    where: str,
    name: str,
    architecture: Architecture | None,
    source: str = "",
    read_on: str = "",
) -> Model:
    """The model a config.json describes.

    `architecture` holds what this model_type's class adds; None reads a plain gated decoder with RMS norms
    (only where the keys say it is one) and says so in `assumptions`.
    Raises InputError naming the key that is missing, malformed or not understood.
    """
    check_depth(config, where)
    text = text_config_of(config)
    arch = architecture or PLAIN
    nested = text is not config
    keys = Keys(
        _renamed(text, arch),
        where=where,
        path="text_config." if nested else "",
        defaults=arch.defaults,
    )
    top = Keys(config, where=where) if nested else keys
    assumptions: list[str] = []
    if architecture is None:
        assumptions.append(_plain_decoder(keys, model_type_of(config)))
    dtype_bits = _dtype_bits(keys, top)
    layers = _layer_count(keys)
    builder = LayerBuilder(keys, arch, layers=layers, dtype_bits=dtype_bits)
    plan = layer_plan(keys, arch, layers)
    groups = _groups(builder, plan, arch)
    outside = _outside(builder, top)
    tied = not any(tensor.role == "lm_head" for tensor in outside)
    towers = (*read_towers(top, arch, builder.hidden), *_mtp(keys, builder, groups))
    quantization = read_quantization(top, keys)
    model = Model(
        name=name,
        architecture=model_type_of(config) or arch.id,
        hidden=builder.hidden,
        vocab=_vocab(keys),
        heads=builder.heads or 1,
        groups=groups,
        outside=outside,
        tied=tied,
        dtype_bits=dtype_bits,
        max_context=_max_context(keys, top),
        quantization=quantization,
        towers=towers,
        ignored_keys=_audit(keys, top, arch, nested),
        assumptions=tuple(assumptions),
        source=source,
        read_on=read_on,
    )
    return model


def _renamed(text: Mapping[str, object], arch: Architecture) -> Mapping[str, object]:
    if not arch.rename:
        return text
    renamed = dict(text)
    for own, usual in arch.rename.items():
        if own in renamed and renamed.get(usual) is None:
            renamed[usual] = renamed.pop(own)
    return renamed


def _plain_decoder(keys: Keys, model_type: str | None) -> str:
    """Accept an unknown model_type only where its keys leave no doubt about the big matrices."""
    activation = keys.text("hidden_act", "hidden_activation", "activation_function")
    norm = keys.present("rms_norm_eps")
    if activation not in ("silu", "swish", "swiglu") or norm is None or model_type is None:
        raise keys.fail(
            "model_type",
            f"unknown architecture {shown(model_type)}"
            if model_type
            else "missing, so the layers are not known",
            "only a decoder with hidden_act silu and rms_norm_eps can be read without its "
            "architecture; add profiles/architectures/<model_type>.yaml",
        )
    return (
        f"architecture {model_type!r} is not known: read as the gated RMS-norm decoder its keys "
        "describe; biases and q/k norms that the config does not name are missing (under 0.1 %)"
    )


def _dtype_bits(keys: Keys, top: Keys) -> int:
    names = [source.text("dtype", "torch_dtype") for source in (keys, top)]
    for source, name in zip((keys, top), names, strict=True):
        if name is not None:
            bits = _DTYPE_BITS.get(name.removeprefix("torch."))
            if bits is None:
                raise source.fail(
                    "torch_dtype", f"unknown {shown(name)}", "float32, float16 or bfloat16"
                )
            # Engines serve float32 and float64 checkpoints at 16 bits.
            return min(bits, 16)
    return 16


def _layer_count(keys: Keys) -> int:
    """Layers of the decoder: the key, else the length of the list that names every layer."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    count = keys.optional_integer(*names, high=MAX_LAYERS)
    if count is None:
        listed = keys.items("layers_block_type", "layer_types", high=MAX_LAYERS)
        count = len(listed) if listed else keys.integer(*names)
    return count


def _vocab(keys: Keys) -> int:
    return keys.integer("padded_vocab_size", "vocab_size", "n_vocab", high=1 << 24)


def _max_context(keys: Keys, top: Keys) -> int | None:
    names = (
        "max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "max_seq_len",
        "model_max_length", "context_length", "n_ctx", "max_seq_length", "max_target_positions",
    )  # fmt: skip
    return keys.optional_integer(*names) or top.optional_integer(*names)


def _groups(
    builder: LayerBuilder, plan: list[LayerKinds], arch: Architecture
) -> tuple[LayerGroup, ...]:
    """Equal layers together, in order of first appearance."""
    found: dict[object, tuple[LayerGroup, list[int]]] = {}
    for index, (mixer, ffn) in enumerate(plan):
        layer = builder.layer(index, mixer, ffn)
        if layer not in found:
            found[layer] = (LayerGroup(layer=layer, indices=(), prefix=arch.layer_path), [])
        found[layer][1].append(index)
    return tuple(
        LayerGroup(layer=group.layer, indices=tuple(indices), prefix=group.prefix)
        for group, indices in found.values()
    )


def _outside(builder: LayerBuilder, top: Keys) -> tuple[Tensor, ...]:
    """Embeddings, final norm and head."""
    keys, arch, hidden = builder.keys, builder.arch, builder.hidden
    vocab = _vocab(keys)
    embedding_width = keys.integer("word_embed_proj_dim", "embedding_size", default=hidden)
    made = [
        Tensor(
            name="model.embed_tokens",
            role="embedding",
            shape=(vocab, embedding_width),
            split_axis=0,
            split_multiple=VOCAB_MULTIPLE,
        )
    ]
    if embedding_width != hidden:
        made += [
            Tensor(name=name, role="embedding", shape=shape)
            for name, shape in (
                ("model.project_in", (hidden, embedding_width)),
                ("model.project_out", (embedding_width, hidden)),
            )
        ]
    if arch.learned_positions is not None:
        positions = _max_context(keys, top)
        if positions is None:
            raise keys.fail(
                "max_position_embeddings", "missing", "this family learns its position embeddings"
            )
        made.append(
            Tensor(
                name="model.embed_positions",
                role="embedding",
                shape=(positions + arch.learned_positions, hidden),
            )
        )
    if arch.embedding_norm:
        made += builder.norm("model.embed_norm")
    if arch.final_norm:
        made += builder.norm("model.norm")
    made += _outside_extras(builder)
    # Tying is a property of the wrapper where it has a text model inside, else of the text model.
    default = arch.tied
    tied = keys.flag("tie_word_embeddings", default=top.flag("tie_word_embeddings", default=default))
    if not tied:
        made.append(
            Tensor(
                name="lm_head",
                role="lm_head",
                shape=(vocab, embedding_width),
                linear=True,
                split_axis=0,
                split_multiple=VOCAB_MULTIPLE,
            )
        )
    if arch.lm_head_bias or keys.flag("lm_head_bias", default=False):
        made.append(
            Tensor(
                name="lm_head.bias",
                role="other",
                shape=(vocab,),
                split_axis=0,
                split_multiple=VOCAB_MULTIPLE,
            )
        )
    return tuple(made)


def _outside_extras(builder: LayerBuilder) -> list[Tensor]:
    """Parts some families hold once: hyper-connection head, residual attention, per-layer inputs."""
    keys, hidden = builder.keys, builder.hidden
    made: list[Tensor] = []
    streams = keys.optional_integer("hc_mult", high=64)
    if streams is not None:
        made += [
            Tensor(name=f"hc_head.{part}", role="other", shape=shape, dtype_bits=32)
            for part, shape in (
                ("fn", (streams, streams * hidden)),
                ("base", (streams,)),
                ("scale", (1,)),
            )
        ]
    if keys.present("attn_res_block_size") is not None:
        made += builder.norm("model.output_attn_res_norm")
        made.append(
            Tensor(name="model.output_attn_res_proj", role="other", shape=(1, hidden))
        )
    width = keys.integer("hidden_size_per_layer_input", default=0, low=0)
    if width:
        layers = builder.layers
        vocab = keys.integer("vocab_size_per_layer_input", default=_vocab(keys))
        made += [
            Tensor(
                name="model.embed_tokens_per_layer",
                role="embedding",
                shape=(vocab, layers * width),
                split_axis=0,
                split_multiple=VOCAB_MULTIPLE,
            ),
            Tensor(
                name="model.per_layer_model_projection",
                role="other",
                shape=(layers * width, hidden),
                linear=True,
            ),
            *builder.norm("model.per_layer_projection_norm", width),
        ]
    return made


def _mtp(keys: Keys, builder: LayerBuilder, groups: tuple[LayerGroup, ...]) -> tuple[Tower, ...]:
    count = keys.optional_integer(
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", low=0, high=64
    )
    if not count or not groups:
        return ()
    last = max(groups, key=lambda group: group.indices[-1])
    return (mtp_tower(last.layer, count, builder.hidden),)


def _audit(keys: Keys, top: Keys, arch: Architecture, nested: bool) -> tuple[str, ...]:
    """Error on unread keys that could change memory; names of the harmless ones."""
    keys.used.update(("model_type", "architectures"))
    top.used.update(("model_type", "architectures", "quantization_config", *TEXT_CONFIGS))
    top.used.update(TOWER_KEYS)
    ignored: list[str] = []
    for source in (keys, top) if nested else (keys,):
        for key in source.unused():
            value = source.data[key]
            if key in arch.harmless or is_harmless(key, value):
                ignored.append(f"{source.path}{key}")
                continue
            raise source.fail(
                key,
                f"not understood (value {shown(value, 40)}), and it could change memory",
                "if it does not, list it under `harmless` in profiles/architectures/"
                f"{arch.id}.yaml; else this architecture cannot be planned yet",
            )
    return tuple(ignored)


def caches_by_kind(model: Model) -> dict[str, list[tuple[Cache, int]]]:
    """Every cache of the model with its number of layers, by kind, in layer order."""
    found: dict[str, list[tuple[Cache, int]]] = {}
    for group in model.groups:
        for cache in group.layer.caches():
            found.setdefault(cache.kind, []).append((cache, len(group.indices)))
    return found
