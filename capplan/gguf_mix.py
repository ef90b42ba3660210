"""Which type each tensor has in a GGUF that llama.cpp's quantizer writes (Q4_K_M and its kin).

The rules are data (`tensors:` in profiles/formats); here they are matched, with what llama.cpp does for every
mix: vectors, routers, convolutions and positions stay at 32 bits, a tied embedding is stored like a head, and
rows that are no multiple of a block fall back to a type of smaller blocks.

Source: llama.cpp src/llama-quant.cpp (llama-cpp-python 0.3.36): llama_tensor_get_type_impl, use_more_bits,
tensor_type_fallback. Its rules for Falcon alone are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from capplan.blocks import Attention, Mla, Moe
from capplan.readers.ggml_types import GGML_FORMATS
from capplan.specs import Format, Layer, Model, Tensor

_CATEGORIES: Final = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
# Classes whose GGUF holds queries, keys and values as one tensor, which follows the rules of attn_v.
_JOINED: Final = frozenset(
    ("bloom", "chatglm", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi3", "qwen")
)
_IN_JOINED: Final = frozenset(("attn_q", "attn_k", "attn_v"))
_ATTENTION_PATHS: Final = ("attn", "attention", "mixer")
# Kept as converted.
_KEPT_16: Final = "model.per_layer_model_projection"
_SMALLER_BLOCKS: Final = {
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What the rules ask of a model."""

    gqa: int
    experts: int
    layers: int
    joined: bool
    tied: bool


def mix_tensors(model: Model, mix: Format) -> Iterator[tuple[Tensor, Format, int]]:
    """Every decoder tensor with the type it has in a file of this mix, and how many layers have it so."""
    facts = _facts(model)
    for tensor in model.outside:
        yield tensor, _type(tensor, mix, facts, 0, 0), 1
    layers = sorted((index, group.layer) for group in model.groups for index in group.indices)
    attentions = [index for index, layer in layers if _has_values(layer)]
    place = {index: number for number, index in enumerate(attentions)}
    for index, layer in layers:
        for tensor in layer.tensors():
            number = place.get(index, 0)
            yield tensor, _type(tensor, mix, facts, index, number, len(attentions)), 1


def _facts(model: Model) -> _Facts:
    blocks = [block for group in model.groups for block in group.layer.blocks]
    first = next((group.layer.blocks for group in model.groups if 0 in group.indices), ())
    gqa = 0
    for block in first:
        if isinstance(block, Attention):
            gqa = block.heads // block.kv_heads
        elif isinstance(block, Mla):
            gqa = block.heads
    return _Facts(
        gqa=gqa,
        experts=max((block.experts for block in blocks if isinstance(block, Moe)), default=0),
        layers=model.layers,
        joined=model.architecture in _JOINED,
        tied=model.tied,
    )


def _has_values(layer: Layer) -> bool:
    return any(_category(tensor, joined=False) == "attn_v" for tensor in layer.tensors())


def _category(tensor: Tensor, *, joined: bool) -> str:
    """llama.cpp's category of a tensor; "" for one that no rule names."""
    if tensor.role == "lm_head":
        return "output"
    if tensor.role == "embedding":
        return "token_embd"
    path, _, last = tensor.name.rpartition(".")
    found = _CATEGORIES.get(last, "")
    if found.startswith("attn") and not any(part in path for part in _ATTENTION_PATHS):
        return ""
    if joined and found in _IN_JOINED:
        return "attn_v"
    return found


def _type(tensor: Tensor, mix: Format, facts: _Facts, layer: int, number: int, attentions: int = 0) -> Format:
    if tensor.name == _KEPT_16:
        return GGML_FORMATS["F16"]
    embeds = tensor.role == "embedding" and tensor.name.startswith("model.embed_tokens")
    if len(tensor.shape) < 2 or not (tensor.linear or embeds):
        return GGML_FORMATS["F32"]
    category = _category(tensor, joined=facts.joined)
    if category == "token_embd" and facts.tied:
        category = "output"
    for rule in mix.rules:
        if (
            rule.tensor in (category, "all")
            and facts.gqa >= rule.min_gqa
            and facts.experts >= rule.min_experts
            and rule.experts in (None, facts.experts)
            and rule.layer_count in (None, facts.layers)
            and in_layers(
                rule.layers,
                number if category == "attn_v" else layer,
                attentions if category == "attn_v" else facts.layers,
            )
        ):
            return _fitting(rule.stored, tensor.shape[-1])
    return mix


def in_layers(rule: str, layer: int, layers: int) -> bool:
    """Whether a rule for some layers (see MixRule) holds for `layer` of `layers`.

    "more": layer < n/8, layer ≥ 7n/8, or (layer − n/8) mod 3 = 2, in whole numbers.
    Example: of 32 layers 0–3, 6, 9, … 27 and 28–31: 16.
    """
    if rule == "all":
        return True
    if rule == "more":
        eighth = layers // 8
        return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    where, _, count = rule.partition(" ")
    if not count.startswith("1/"):
        return layer < int(count)
    parts = int(count[2:])
    if where == "first":
        return layer < layers // parts
    return layers // parts <= layer < (parts - 1) * layers // parts


def _fitting(stored: Format, columns: int) -> Format:
    """The type, or the one llama.cpp takes where rows of this width cannot be cut into its blocks."""
    if columns % stored.group == 0:
        return stored
    smaller = GGML_FORMATS[_SMALLER_BLOCKS.get(stored.id.upper(), "F16")]
    return smaller if columns % smaller.group == 0 else GGML_FORMATS["F16"]
