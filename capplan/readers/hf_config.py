"""A publisher's config.json → Model. What the config says about its layers decides.

Keys that nobody asked for and that could change memory are errors; harmless ones are listed in
`Model.ignored_keys`.
"""

from collections.abc import Mapping
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.config_keys import GGUF_MARK, MAX_LAYERS, Keys
from capplan.readers.decoder_keys import KV_HEADS, DecoderKeys
from capplan.readers.harmless_keys import is_harmless
from capplan.readers.layer_blocks import build_layers
from capplan.readers.layer_plan import layer_plan
from capplan.readers.model_parts import ModelParts, grouped
from capplan.readers.nested_keys import audit_nested, check_mappings
from capplan.readers.outside_tensors import max_context, outside_tensors, vocabulary
from capplan.readers.tower_keys import TOWER_KEYS
from capplan.specs import Architecture, Layer, Model, Quantization, Tower

TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config")
QUANT_KEYS: Final = ("quantization_config", "compression_config")
_DTYPE_BITS: Final = {"float32": 32, "float16": 16, "bfloat16": 16, "float64": 64, "auto": 16}
MAX_DEPTH: Final = 12
# A thousand times the largest published model.
MAX_PARAMETERS: Final = 10**16
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
    check_mappings(config, "", where, (*TEXT_CONFIGS, *QUANT_KEYS))
    text = text_config_of(config)
    check_mappings(text, "text_config.", where, QUANT_KEYS)
    arch = architecture or PLAIN
    nested = text is not config
    keys = Keys(
        _renamed(text, arch),
        where=where,
        path="text_config." if nested else "",
        defaults={**arch.defaults, **arch.nested_defaults} if nested else arch.defaults,
    )
    top = Keys(config, where=where) if nested else keys
    assumptions: list[str] = []
    if architecture is None:
        assumptions.append(_plain_decoder(keys, top, model_type_of(config)))
    dtype_bits = _dtype_bits(keys, top)
    if arch.encoder != "none":
        from capplan.readers.encoder_decoder import encoder_decoder  # a rare kind

        parts = encoder_decoder(keys, arch, dtype_bits)
    else:
        parts = _decoder_only(keys, top, arch, dtype_bits)
    unread = _unread_parts(top, parts.towers)
    model = Model(
        name=name,
        architecture=model_type_of(config) or arch.id,
        hidden=parts.hidden,
        vocab=vocabulary(keys, top),
        heads=parts.heads,
        groups=parts.groups,
        outside=parts.outside,
        tied=not any(tensor.role == "lm_head" for tensor in parts.outside),
        dtype_bits=dtype_bits,
        max_context=max_context(keys, top),
        quantization=_quantization(top, keys),
        towers=parts.towers,
        ignored_keys=_audit(keys, top, arch, nested),
        assumptions=(*assumptions, *_unread_sentences(unread)),
        uncounted=unread,
        source=source,
        read_on=read_on,
    )
    if model.parameters > MAX_PARAMETERS:
        raise keys.fail(
            "hidden_size",
            f"with the other widths it makes {model.parameters:.1e} parameters",
            "no model is that large; check the widths in the file",
        )
    return model


def _decoder_only(keys: Keys, top: Keys, arch: Architecture, dtype_bits: int) -> ModelParts:
    layers = _layer_count(keys)
    decoder = DecoderKeys(keys, arch, layers=layers, dtype_bits=dtype_bits)
    built = build_layers(decoder, layer_plan(keys, arch, layers))
    groups = grouped(built, arch.layer_path)
    # A model without attention is split by the heads of its states.
    state_heads = max((cache.heads for group in groups for cache in group.layer.caches()), default=1)
    return ModelParts(
        hidden=decoder.hidden,
        heads=decoder.heads or state_heads,
        groups=groups,
        outside=outside_tensors(decoder, top),
        towers=(*_towers(top, keys, decoder.hidden), *_mtp(keys, built, decoder.hidden)),
    )


# Most models have neither towers nor a quantization of their own: their readers are imported on demand.


def _quantization(top: Keys, text: Keys) -> Quantization | None:
    if not any(isinstance(source.data.get(name), Mapping) for source in (top, text) for name in QUANT_KEYS):
        return None
    from capplan.readers.quantization_config import read_quantization

    return read_quantization(top, text)


def _towers(top: Keys, text: Keys, hidden: int) -> tuple[Tower, ...]:
    if not any(name in top.data for name in (*TOWER_KEYS, "thinker_config")):
        return ()
    from capplan.readers.towers import read_towers

    return read_towers(top, text, hidden)


def _unread_parts(top: Keys, towers: tuple[Tower, ...]) -> tuple[str, ...]:
    """Keys of the parts that the file describes and `towers` does not hold."""
    if not any(name in top.data for name in TOWER_KEYS):
        return ()
    from capplan.readers.towers import unread_parts

    return unread_parts(top, towers)


def _unread_sentences(names: tuple[str, ...]) -> list[str]:
    return [f"{name} describes a part whose weights are not known: they are not counted" for name in names]


def _renamed(text: Mapping[str, object], arch: Architecture) -> Mapping[str, object]:
    """The keys under their usual names; nested mappings that hold one of them come up a level."""
    if not arch.rename:
        return text
    renamed = dict(text)
    for outer in {own.partition(".")[0] for own in arch.rename if "." in own}:
        inner = renamed.get(outer)
        if isinstance(inner, Mapping):
            del renamed[outer]
            renamed.update({f"{outer}.{key}": value for key, value in inner.items()})
    for own, usual in arch.rename.items():
        if own in renamed and renamed.get(usual) is None:
            renamed[usual] = renamed.pop(own)
    return renamed


def _plain_decoder(keys: Keys, top: Keys, model_type: str | None) -> str:
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
    # What classes answer differently when the file does not say: no guess of a plain class is right for all.
    needed: list[tuple[str, ...]] = [] if keys.present("kv_lora_rank") is not None else [KV_HEADS]
    if top.data.get("tie_word_embeddings") is None:
        needed.append(("tie_word_embeddings",))
    if keys.data.get("sliding_window"):
        needed.append(("layer_types", "use_sliding_window", "sliding_window_pattern"))
    for names in needed:
        if all(keys.data.get(name) is None for name in names):
            raise keys.fail(
                names[0],
                f"missing, and the architecture {model_type!r} is not known",
                "a model of an unknown architecture is planned only where the file says it; add the key",
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
                raise source.fail("torch_dtype", f"unknown {shown(name)}", "float32, float16 or bfloat16")
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


def _mtp(keys: Keys, built: list[Layer], hidden: int) -> tuple[Tower, ...]:
    count = keys.optional_integer(
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers",
        low=0, high=64,
    )  # fmt: skip
    if not count or not built:
        return ()
    from capplan.readers.towers import mtp_tower

    return (mtp_tower(built[-1], count, hidden),)


def _ignorable(key: str, value: object, arch: Architecture) -> bool:
    """Whether an unread key changes nothing; where the family lists values, only with one of those."""
    listed = [entry for entry in arch.harmless if entry.startswith(f"{key}=")]
    if listed:
        return value is None or f"{key}={str(value).lower()}" in listed
    return key in arch.harmless or is_harmless(key, value, known=arch is not PLAIN)


def _audit(keys: Keys, top: Keys, arch: Architecture, nested: bool) -> tuple[str, ...]:
    """Error on unread keys that could change memory; names of the harmless ones."""
    keys.used.update(("model_type", "architectures", GGUF_MARK))
    top.used.update(("model_type", "architectures", "quantization_config", *TEXT_CONFIGS))
    top.used.update(TOWER_KEYS)
    ignored: list[str] = []
    for source in {id(source): source for source in (keys, top)}.values():
        audit_nested(source)
    for source in (keys, top) if nested else (keys,):
        for key in source.unused():
            value = source.data[key]
            if _ignorable(key, value, arch):
                ignored.append(f"{source.path}{key}")
                continue
            raise source.fail(
                key,
                f"not understood (value {shown(value, 40)}), and it could change memory",
                "if it does not, list it under `harmless` in profiles/architectures/"
                f"{arch.id if arch is not PLAIN else '<model_type>'}.yaml; else this architecture cannot be "
                "planned yet",
            )
    return tuple(ignored)
