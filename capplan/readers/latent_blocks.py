"""From a config's keys to attention over latents: MLA with its indexer, and DeepSeek-V4's compression."""

from capplan.blocks import CompressedAttention, Mla
from capplan.readers.decoder_keys import DecoderKeys


def mla_block(decoder: DecoderKeys, index: int, path: str) -> Mla:
    """Multi-head latent attention, with the sparse indexer where this layer has its own."""
    keys = decoder.keys
    # One latent serves all heads: the config's KV heads and head width are not read by the class.
    keys.used.update(("num_key_value_heads", "head_dim", "qk_head_dim"))
    index_heads = _index_heads(decoder)
    if "q_lora_rank" not in keys.data and "q_lora_rank" not in keys.defaults:
        raise keys.fail("q_lora_rank", "missing", "state it, or null where queries are not compressed")
    gate = keys.flag("mla_use_output_gate", default=False)
    full = decoder.arch.attention_gate == "full"
    return Mla(
        hidden=decoder.hidden,
        heads=decoder.require_heads(),
        q_rank=keys.optional_integer("q_lora_rank"),
        kv_rank=keys.integer("kv_lora_rank"),
        nope_width=keys.integer("qk_nope_head_dim"),
        rope_width=keys.integer("qk_rope_head_dim", low=0),
        v_width=keys.integer("v_head_dim"),
        bias=keys.flag("attention_bias", default=False),
        latent_cache=decoder.arch.latent_cache,
        index_heads=index_heads,
        index_width=keys.integer("index_head_dim", default=128),
        indexer=index_heads > 0 and _owns_indexer(decoder, index),
        index_pool=keys.optional_integer("index_kpool", high=4096),
        selected=keys.optional_integer("index_topk") if index_heads else None,
        gate=gate or full,
        gate_name="gate_proj" if full else "g_proj",
        sinks=decoder.switch(decoder.arch.sinks),
        path=path,
    )


def _index_heads(decoder: DecoderKeys) -> int:
    """Heads of the sparse indexer; 0 without one. A file that selects tokens must say how many."""
    keys = decoder.keys
    selects = any(keys.data.get(name) for name in ("index_topk", "indexer_types", "index_topk_pattern"))
    return keys.integer("index_n_heads", default=None if selects else 0, low=0)


def _owns_indexer(decoder: DecoderKeys, index: int) -> bool:
    """Whether the layer selects tokens itself; the others reuse the last selection."""
    keys = decoder.keys
    types = keys.texts("indexer_types")
    pattern = keys.value("index_topk_pattern") if keys.present("index_topk_pattern") else None
    if types is None and pattern is not None:
        letters = list(pattern) if isinstance(pattern, str) else keys.texts("index_topk_pattern")
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in letters or []]
    every = keys.integer("index_topk_freq", default=1, low=0)
    offset = keys.integer("index_skip_topk_offset", default=2, low=0)
    if types is None:
        return max(index - offset + 1, 0) % max(every, 1) == 0
    if index >= len(types) or types[index] not in ("full", "shared"):
        raise keys.fail("indexer_types", f"says nothing for layer {index}", "full or shared for each layer")
    return types[index] == "full"


def compressed_block(decoder: DecoderKeys, index: int) -> CompressedAttention:
    """DeepSeek-V4's windowed and compressed attention."""
    keys = decoder.keys
    keys.used.update(("num_key_value_heads", "qk_rope_head_dim"))
    ratios = keys.integers("compress_ratios", high=1 << 20) or []
    if len(ratios) < decoder.layers:
        raise keys.fail(
            "compress_ratios",
            f"has {len(ratios)} entries",
            f"give one for each of {decoder.layers} layers",
        )
    ratio = ratios[index]
    # Only the finely compressed layers select entries by an indexer.
    indexed = 0 < ratio <= 4
    return CompressedAttention(
        hidden=decoder.hidden,
        heads=decoder.require_heads(),
        width=keys.integer("head_dim"),
        q_rank=keys.integer("q_lora_rank"),
        o_groups=keys.integer("o_groups", high=decoder.require_heads()),
        o_rank=keys.integer("o_lora_rank"),
        window=keys.integer("sliding_window"),
        ratio=ratio,
        index_heads=keys.integer("index_n_heads") if indexed else 0,
        index_width=keys.integer("index_head_dim") if indexed else 0,
        selected=keys.optional_integer("index_topk") if indexed else None,
        path=decoder.arch.attention_path,
    )
