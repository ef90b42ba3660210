"""What a stored tensor is for, told from its name: Hugging Face's modules, GGUF's vocabulary.

Rules go by whole name segments ("model.layers.0.mlp.gate.weight" is six), first match wins:

1. projector (between a tower and the decoder), vision, audio: a segment names the tower;
2. mtp: an "mtp…" or "nextn" segment, or any tensor of a layer that holds enorm / hnorm / eh_proj;
3. encoder: names that start with "encoder", "model.encoder" or GGUF's "enc";
4. norm: the module that owns the tensor is a norm, wherever it stands (q_norm in attention too);
5. router, shared_experts (with their gate), experts;
6. lm_head, embedding;
7. recurrent (Mamba, linear attention, RWKV time mixing), attention, mlp;
8. other.

Scales, zero points and other companions of a quantized weight have the role of their weight.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from capplan.specs import Role

_PROJECTOR: Final = frozenset(
    "multi_modal_projector multimodal_projector mm_projector vision_projector vision_projection "
    "visual_projection audio_projector audio_projection image_projection modality_projection "
    "merger patch_merger deepstack_merger_list connector embed_vision embed_audio vision_proj "
    "vision_adapter vision_language_adapter vision_aligner aligner resampler".split()
)
_VISION: Final = frozenset(
    "vision_tower vision_model vision_encoder vision_backbone vision_embed_tokens visual vision "
    "image_encoder image_newline view_seperator vit vpm siglip vqmodel".split()
)
_AUDIO: Final = frozenset(
    "audio_tower audio_model audio_encoder speech_encoder speech audio apm token2wav".split()
)
_MTP: Final = frozenset("mtp mtp_layers nextn enorm hnorm eh_proj shared_head".split())
_MTP_MARKS: Final = frozenset("nextn enorm hnorm eh_proj".split())
_ROUTER: Final = frozenset("router e_score_correction_bias tid2eid".split())
_GATE: Final = frozenset("gate wg".split())
_SHARED: Final = frozenset("shared_mlp share_expert".split())
_EXPERTS: Final = frozenset("experts local_experts block_sparse_moe moe switch_mlp".split())
_LM_HEAD: Final = frozenset("lm_head embed_out output_layer".split())
_EMBEDDING: Final = frozenset(
    "embed_tokens embed_tokens_per_layer embed_positions embed_in embed embedding embeddings "
    "word_embeddings tok_embeddings position_embeddings wte wpe token_embd token_types "
    "position_embd per_layer_token_embd".split()
)
_RECURRENT: Final = frozenset("linear_attn mamba ssm temporal_block rglru conv short_conv att".split())
_ATTENTION: Final = frozenset(
    "self_attn attn attention self_attention cross_attn cross_attention crossattention "
    "encoder_attn SelfAttention EncDecAttention indexer compressor".split()
)
_MLP: Final = frozenset(
    "mlp feed_forward feedforward ffn ff fc1 fc2 DenseReluDense gate_proj up_proj down_proj "
    "gate_up_proj w1 w2 w3".split()
)
# Nemotron-H calls every kind of block "mixer"; the next segment tells them apart.
_MIXER_ATTENTION: Final = frozenset("q_proj k_proj v_proj o_proj qkv_proj Wqkv".split())
_MIXER_MLP: Final = frozenset("up_proj down_proj gate_proj fc1_latent_proj fc2_latent_proj".split())
_LAYER_NUMBER: Final = re.compile(r"\.\d+(?=\.)")
_NORM: Final = re.compile(r"norm|^(?:ln|rms)(?:_|\d|$)|_ln$", re.IGNORECASE)


def role_of(name: str) -> Role:
    """Role of one tensor by its name alone.

    MTP layers that are numbered after the decoder's (DeepSeek-V3's model.layers.61) look like any
    other layer except for a few tensors: use `mtp_layers` on all names for those.
    """
    # Layers and experts differ only in numbers, so a few hundred answers serve 200,000 names.
    return _role_of(_LAYER_NUMBER.sub(".0", name))


@lru_cache(maxsize=4096)
def _role_of(name: str) -> Role:
    parts = name.split(".")
    modules, leaf = parts[:-1], parts[-1]
    words = frozenset(parts)
    first = parts[0]
    if first in ("mm", "mlp1") or words & _PROJECTOR:
        return "projector"
    if first == "v" or words & _VISION:
        return "vision"
    if first == "a" or words & _AUDIO:
        return "audio"
    if words & _MTP or first.startswith("mtp"):
        return "mtp"
    if first in ("encoder", "enc") or parts[:2] == ["model", "encoder"]:
        return "encoder"
    if first in ("blk", "dec") and "blk" in modules:
        return _gguf_block_role(parts[parts.index("blk") + 2 :])
    owner = modules[-1] if modules else leaf
    if _NORM.search(owner) or _NORM.search(leaf):
        return "norm"
    mixing = words & _ATTENTION or words & _RECURRENT
    if (words & _ROUTER and "altup" not in words) or (
        not words.isdisjoint(_GATE) and not mixing and "experts" not in words
    ):
        return "router"
    if words & _SHARED or any(part.startswith("shared_expert") for part in parts):
        return "shared_experts"
    if words & _EXPERTS:
        return "experts"
    if words & _LM_HEAD or modules in (["output"], ["head"]):
        return "lm_head"
    if words & _EMBEDDING or first == "shared":
        return "embedding"
    if "mixer" in modules:
        if words & _MIXER_ATTENTION:
            return "attention"
        return "mlp" if words & _MIXER_MLP else "recurrent"
    if words & _RECURRENT or (first == "rwkv" and "attention" in words):
        return "recurrent"
    if words & _ATTENTION:
        return "attention"
    return "mlp" if words & _MLP else "other"


def _gguf_block_role(rest: list[str]) -> Role:
    """Role of what follows "blk.<n>." in a GGUF name (llama.cpp's tensor vocabulary)."""
    stem = rest[0] if rest else ""
    if "norm" in stem or (len(rest) > 1 and "norm" in rest[1]):
        return "norm"
    if stem.endswith("_shexp"):
        return "shared_experts"
    # Before 2024-04 each expert was its own tensor: ffn_gate.0.weight.
    if stem.endswith("exps") or (stem.startswith("ffn_") and len(rest) > 2 and rest[1].isdigit()):
        return "experts"
    if stem in ("ffn_gate_inp", "ffn_gate_tid2eid", "exp_probs_b"):
        return "router"
    if stem.startswith(("attn", "cross_attn", "indexer", "vis_attn")):
        return "attention"
    if stem.startswith(("ssm_", "time_mix", "shortconv")):
        return "recurrent"
    return "mlp" if stem.startswith(("ffn", "channel_mix", "vis_")) else "other"


def mtp_layers(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes ("model.layers.61.") of the layers that are multi-token-prediction modules.

    Such a layer joins two hidden states (enorm, hnorm, eh_proj; GGUF: nextn) before an ordinary
    block.
    """
    found: set[str] = set()
    for name in names:
        # A substring test first: models have 200,000 names and a handful of these.
        if "norm" not in name and "eh_proj" not in name and "nextn" not in name:
            continue
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part in _MTP_MARKS and at and parts[at - 1].isdigit():
                found.add(".".join(parts[:at]) + ".")
    return tuple(sorted(found))
