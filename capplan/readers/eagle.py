"""EAGLE draft heads: a config.json like the target's, for one or a few layers that read the target's states.

A head joins the target's hidden states with the embedding (`fc`) and borrows the target's embedding; EAGLE-3
reads three of its layers, widens the first layer's input to two streams and has a head of its own, often over
a smaller vocabulary. The first versions borrow the target's head too.

Source: vLLM 0.32.0, model_executor/models/llama_eagle.py and llama_eagle3.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from capplan.blocks import Attention
from capplan.errors import InputError, shown
from capplan.specs import Layer, Model, Tensor

_KEYS: Final = frozenset(
    (
        "draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states", "norm_before_residual", "norm_before_fc", "has_own_embed_tokens",
        "speculators_config", "speculators_version", "speculators_model_type",
        "transformer_layer_config", "embed_requires_grad",
    )
)  # fmt: skip
_MAX_VOCAB: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """What makes a config an EAGLE head: streams joined by `fc`, own vocabulary (None: the target's head)."""

    streams: int
    target_hidden: int | None
    vocab: int | None


def eagle_head(config: Mapping[str, object], where: str) -> EagleHead | None:
    """The head a config describes, or None where it is a whole model."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if "eagle" not in name.lower():
        return None
    third = "eagle3" in name.lower()
    return EagleHead(
        streams=3 if third else 2,
        target_hidden=_width(config, "target_hidden_size", where),
        vocab=_width(config, "draft_vocab_size", where) or _width(_inner(config), "vocab_size", where)
        if third
        else None,
    )


def decoder_config(config: Mapping[str, object]) -> dict[str, object]:
    """The config of the head's own layers, as any decoder's."""
    made = {**config, **_inner(config)}
    return {key: value for key, value in made.items() if key not in _KEYS}


def as_eagle(model: Model, head: EagleHead) -> Model:
    """`model`, read from `decoder_config`, with what a head has outside its layers instead of a model's."""
    hidden = model.hidden
    joined = 2 * hidden if head.streams == 2 else 3 * (head.target_hidden or hidden)
    outside = [Tensor(name="fc", role="other", shape=(hidden, joined), linear=True)]
    outside += [tensor for tensor in model.outside if tensor.role == "norm"]
    if head.vocab is not None:
        outside.append(
            Tensor(name="lm_head", role="lm_head", shape=(head.vocab, hidden), linear=True, split_axis=0,
                   split_multiple=64)
        )  # fmt: skip
    groups = model.groups
    if head.streams == 3:
        groups = tuple(
            replace(group, layer=_widened(group.layer, hidden)) if 0 in group.indices else group
            for group in groups
        )
    return replace(model, groups=groups, outside=tuple(outside), tied=head.vocab is None)


def _widened(layer: Layer, hidden: int) -> Layer:
    """The first layer of EAGLE-3 reads the embedding beside the joined states, with a norm for each."""
    blocks = tuple(
        replace(block, input_width=2 * hidden) if isinstance(block, Attention) else block
        for block in layer.blocks
    )
    norm = Tensor(name="hidden_norm", role="norm", shape=(hidden,))
    return replace(layer, blocks=blocks, norms=(*layer.norms, norm))


def _inner(config: Mapping[str, object]) -> Mapping[str, object]:
    """The speculators format nests the layers' own config."""
    inner = config.get("transformer_layer_config")
    return inner if isinstance(inner, Mapping) else config


def _width(config: Mapping[str, object], key: str, where: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= _MAX_VOCAB:
        raise InputError(f"{key}: {shown(value)} is no size", where=where, hint="check the file")
    return value
