"""A GGUF's own keys → the keys of a config.json, so that one reader builds every model.

Which layers route to experts, and whether the embedding is the head too, is told by the tensors that are
there; which attend, recur or slide by GGUF's per-layer arrays. A key that is neither used nor known to be
harmless is an error: it could change memory.

llama.cpp's own ways are kept where they differ from the model's class: recurrent states in 32 bits, no
windows for the families it has none for, full keys and values for latent attention without the *_mla keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.readers.checkpoint import Checkpoint
from capplan.readers.config_keys import GGUF_MARK
from capplan.readers.gguf_architectures import ARCHITECTURES, OTHER_FILES
from capplan.readers.gguf_keys import GgufModel
from capplan.readers.gguf_layers import FULL, SLIDING, mixers, single_blocks, window_of
from capplan.readers.gguf_widths import feed_forward, kda, recurrent, searched

# GGUF key: config.json key, where the value is the same number.
_RENAMED: Final[Mapping[str, str]] = {
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "moe_latent_size": "moe_latent_size",
    "expert_latent_length": "moe_latent_size",
    "shortconv.l_cache": "conv_L_cache",
    "attn_res.block_size": "attn_res_block_size",
    "hyper_connection.count": "hc_mult",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
}


def config_of(
    found: Mapping[str, object], checkpoint: Checkpoint
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The config.json of the model in `checkpoint`, and notes on what llama.cpp does differently.

    `found` is `gguf_architecture(checkpoint)`. Errors: InputError naming an architecture that is not known,
    a key that is missing, malformed or not understood, or per-layer values that no config can express.
    """
    name, where = str(found.get("general.architecture")), str(checkpoint.path)
    if name in OTHER_FILES:
        raise InputError(
            f"general.architecture {shown(name)}: {OTHER_FILES[name]}",
            where=where,
            hint="give the GGUF of a language model",
        )
    if name not in ARCHITECTURES:
        raise InputError(
            f"general.architecture {shown(name)} is not known",
            where=where,
            hint=did_you_mean(name, ARCHITECTURES, "give the model's config.json instead"),
        )
    model = GgufModel(dict(found), checkpoint, ARCHITECTURES[name])
    # A GGUF writes no key for a part it does not have: the mark says that what is missing is not there.
    config = {**_config(model), GGUF_MARK: name}
    model.check_unused()
    return config, tuple(model.notes)


def _config(model: GgufModel) -> dict[str, Any]:
    keys, arch = model.keys, model.arch
    rows = model.shape("token_embd")
    made: dict[str, Any] = {
        "num_hidden_layers": model.layers,
        "vocab_size": rows[0] if rows else keys.integer("vocab_length", high=1 << 24),
        "tie_word_embeddings": not keys.data.get("has_output_weight"),
        **{
            new: value
            for old, new in _RENAMED.items()
            if (value := keys.optional_integer(old, low=0)) is not None
        },
        **arch.also,
    }
    experts = made.get("num_experts", 0) > 1 and (not model.has_layers or model.routes_any)
    if not experts:
        made.pop("num_experts", None)
    made["model_type"] = arch.moe_type if experts and arch.moe_type else arch.model_type
    if arch.form == "searched":
        return made | searched(model)
    kinds = mixers(model)
    made |= _attention(model, kinds)
    if arch.form == "single":
        made["layers_block_type"] = single_blocks(model, kinds)
    elif arch.form == "kda":
        made |= kda(model, kinds, made.get("num_attention_heads", 1))
    elif arch.every or arch.recurrent:
        made["layer_types"] = kinds
    if arch.form == "falcon" and "num_attention_heads" in made:
        heads, kv = made["num_attention_heads"], made["num_key_value_heads"]
        made |= {"multi_query": kv == 1, "new_decoder_architecture": 1 < kv < heads}
    made |= feed_forward(model, experts) | recurrent(model)
    if made.get("hidden_size_per_layer_input"):
        made["vocab_size_per_layer_input"] = (model.shape("per_layer_token_embd") or rows or (1,))[0]
    return made


def _attention(model: GgufModel, kinds: Sequence[str]) -> dict[str, Any]:
    keys, arch = model.keys, model.arch
    made: dict[str, Any] = {}
    window = window_of(model)
    if window:
        made["attention_chunk_size" if arch.form == "chunked" else "sliding_window"] = window
    heads = model.per_layer("attention.head_count")
    if heads is None or not any(heads):
        keys.used.add("attention.head_count_kv")
        return made
    counts = model.per_layer("attention.head_count_kv") or heads
    of_kind = {
        kind: (
            model.agreed("attention.head_count", heads, kinds, kind),
            model.agreed("attention.head_count_kv", counts, kinds, kind),
        )
        for kind in sorted(set(kinds))
        if kind != arch.recurrent or arch.recurrent == "hybrid"
    }
    wide = of_kind.get(FULL) or next(iter(of_kind.values()), (max(heads), max(counts)))
    narrow = of_kind.get(SLIDING, wide)
    made["num_attention_heads"] = wide[0]
    if narrow[0] != wide[0]:
        made["num_attention_heads_per_layer"] = list(heads)
    latent = _latent(model)
    if latent:
        return made | latent
    # llama.cpp's own default where the file gives no width.
    default = max(1, keys.integer("embedding_length") // max(heads))
    width = keys.integer("attention.key_length", default=default)
    v_width = keys.integer("attention.value_length", default=default)
    if arch.form == "two-widths":
        small = keys.integer("attention.key_length_swa", default=width)
        keys.used.add("attention.value_length_swa")
        has_v = all(model.shape("attn_v", at) for at, kind in enumerate(kinds) if kind == FULL)
        return made | {
            "head_dim": small,
            "global_head_dim": width,
            "num_key_value_heads": narrow[1],
            "num_global_key_value_heads": wide[1],
            "attention_k_eq_v": model.has_layers and not has_v,
        }
    made |= {"head_dim": width, "num_key_value_heads": wide[1]}
    if v_width != width:
        made["v_head_dim"] = v_width
    if narrow[1] != wide[1]:
        made["swa_num_key_value_heads"] = narrow[1]
    if arch.form == "compressed":
        made["q_lora_rank"] = keys.integer("attention.q_lora_rank")
        made["qk_rope_head_dim"] = keys.integer("rope.dimension_count")
        made["compress_ratios"] = list(model.per_layer("attention.compress_ratios") or ())
    return made


def _latent(model: GgufModel) -> dict[str, Any]:
    """Keys of latent attention; none where the file has full keys and values."""
    keys = model.keys
    rank = keys.optional_integer("attention.kv_lora_rank")
    width = keys.optional_integer("attention.key_length_mla")
    v_width = keys.optional_integer("attention.value_length_mla")
    q_rank = keys.optional_integer("attention.q_lora_rank", low=0)
    if rank is None:
        return {}
    if width is None or v_width is None:
        model.notes.append(
            "the file has no attention.key_length_mla: llama.cpp keeps full keys and values of every "
            "head, not the latent; convert it again to save most of the KV cache"
        )
        return {}
    rope = keys.integer("rope.dimension_count", high=width - 1)
    keys.used.update(("attention.key_length", "attention.value_length", "attention.head_count_kv"))
    types = model.per_layer("attention.indexer.types", high=1)
    return {
        "kv_lora_rank": rank,
        "qk_nope_head_dim": width - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v_width,
        "q_lora_rank": q_rank or None,
        **({} if types is None else {"indexer_types": ["full" if own else "shared" for own in types]}),
    }
