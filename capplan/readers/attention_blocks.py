"""From a config's keys to the attention block of one layer."""

from typing import TYPE_CHECKING

from capplan.blocks import Attention
from capplan.readers.config_keys import Keys
from capplan.readers.decoder_keys import EXPERT_COUNTS, DecoderKeys
from capplan.specs import Block, Tensor

if TYPE_CHECKING:
    from capplan.blocks import FactoredAttention, MixtureAttention


def attention_blocks(decoder: DecoderKeys, index: int, kind: str) -> list[Block]:
    """The attention of a layer, by the keys that only one form of it has; empty for a skipped one."""
    keys = decoder.keys
    if keys.present("compress_ratios", "kv_lora_rank") is not None:
        return _latent(decoder, index)
    if keys.present("share_q_dim") is not None:
        return [_factored(decoder)]
    if decoder.arch.mixer == "mixture":
        return [_mixture(decoder)]
    configs = keys.items("block_configs")
    if configs is not None:
        return _searched(decoder, index, configs)
    return [_attention(decoder, index, kind)]


def shared_attention(decoder: DecoderKeys, owner: bool) -> Block:
    """Zamba's shared attention: it reads two joined streams; every use keeps a cache of its own."""
    keys = decoder.keys
    heads = decoder.require_heads()
    wide = keys.integer("attention_hidden_size", default=2 * decoder.hidden)
    width = keys.optional_integer("attention_head_dim")
    block = Attention(
        hidden=decoder.hidden,
        input_width=wide,
        heads=heads,
        kv_heads=decoder.kv_heads(heads),
        k_width=width or wide // heads,
        v_width=width or wide // heads,
        path="shared_transformer.self_attn",
    )
    if owner:
        return block
    from capplan.blocks import Reused

    return Reused(inner=block)


def nas_entry(keys: Keys, index: int, configs: list[object], part: str) -> Keys:
    """The attention or ffn of one layer of a searched (NAS) model."""
    entry = configs[index] if index < len(configs) else None
    inner = entry.get(part) if isinstance(entry, dict) else None
    if not isinstance(inner, dict):
        raise keys.fail("block_configs", f"layer {index} has no {part}", "give one entry for each layer")
    return Keys(inner, where=keys.where, path=f"block_configs[{index}].{part}.")


def _attention(decoder: DecoderKeys, index: int, kind: str) -> Attention:
    """Full, sliding, chunked or cross attention with this layer's widths."""
    keys, arch = decoder.keys, decoder.arch
    heads = decoder.require_heads()
    width = decoder.head_width(heads)
    heads = keys.per_layer(index, "num_attention_heads_per_layer", default=heads)
    kv = decoder.kv_heads(heads)
    v_width = keys.integer("v_head_dim", "v_channels", default=width)
    if kind == "sliding":
        heads = keys.integer("swa_num_attention_heads", default=heads)
        kv = keys.integer("swa_num_key_value_heads", default=kv)
        width = keys.integer("swa_head_dim", default=width)
        v_width = keys.integer("swa_v_head_dim", default=v_width)
    has_v = True
    if kind == "full" and keys.present("global_head_dim") is not None:
        width = v_width = keys.integer("global_head_dim", default=width)
        has_v = not keys.flag("attention_k_eq_v", default=False)
        # Where keys are the values too, these layers have fewer heads: how many, only the file knows.
        kv = keys.integer("num_global_key_value_heads", default=kv if has_v else None)
    window = None
    if kind == "sliding":
        window = keys.integer("sliding_window", "sliding_window_size", "attention_window_size", "window_size")
    elif kind == "chunked":
        window = keys.integer("attention_chunk_size")
    shared = _shares_kv(decoder, index)
    qk_norm = _qk_norm(decoder) if kind != "cross" else "none"
    gate = arch.attention_gate
    if keys.flag("attn_output_gate", default=gate == "double"):
        gate = "double"
    path = "cross_attn" if kind == "cross" else arch.attention_path
    index_heads, index_width = _index_branch(decoder, index, kind)
    if kind == "indexed":
        kind = "full"
    return Attention(
        hidden=decoder.hidden,
        heads=heads,
        kv_heads=kv,
        k_width=width,
        v_width=v_width,
        keeps="shared" if shared else kind,  # type: ignore[arg-type]  # the plan's kinds
        window=window,
        qkv_bias=decoder.switch(arch.qkv_bias),
        k_bias=decoder.switch(arch.k_bias),
        o_bias=decoder.switch(arch.o_bias),
        qk_norm=qk_norm,
        qk_norm_bias=arch.qk_norm_bias,
        gate=gate == "double",
        sinks=_has_sinks(decoder, kind),
        has_k=not shared,
        has_v=has_v and not shared,
        path=path,
        index_heads=index_heads,
        index_width=index_width,
        extra=_gate(gate, path, heads, v_width, decoder.hidden),
    )


def _qk_norm(decoder: DecoderKeys) -> str:
    kind = decoder.arch.qk_norm
    named = decoder.keys.text("qk_norm_type")
    if named is not None:
        by_name = {"per_layer": "width", "per_head": "head"}
        if named not in by_name:
            raise decoder.keys.fail("qk_norm_type", f"unknown {named!r}", "per_layer or per_head")
        kind = by_name[named]
    return kind if decoder.switch(decoder.arch.qk_norm_switch) else "none"


def _has_sinks(decoder: DecoderKeys, kind: str) -> bool:
    keys = decoder.keys
    per_kind = {"sliding": "add_swa_attention_sink_bias", "full": "add_full_attention_sink_bias"}
    keys.used.update(per_kind.values())
    if any(name in keys.data for name in per_kind.values()):
        return keys.flag(per_kind.get(kind, ""), default=False)
    return decoder.switch(decoder.arch.sinks)


def _shares_kv(decoder: DecoderKeys, index: int) -> bool:
    """Whether the layer reads an earlier layer's cache (the last num_kv_shared_layers do)."""
    shared = decoder.keys.integer("num_kv_shared_layers", default=0, low=0)
    return shared > 0 and index >= decoder.layers - shared


def _gate(gate: str, path: str, heads: int, width: int, hidden: int) -> tuple[Tensor, ...]:
    """An output gate with a projection of its own: one value a head, or one an output ("full")."""
    if gate not in ("heads", "full"):
        return ()
    rows = heads if gate == "heads" else heads * width
    return (
        Tensor(
            name=f"{path}.g_proj",
            role="attention",
            shape=(rows, hidden),
            linear=True,
            split_axis=0,
            split_units=heads,
        ),
    )


def _index_branch(decoder: DecoderKeys, index: int, kind: str) -> tuple[int, int]:
    """Heads and width of block-sparse attention's index branch (MiniMax-M3); 0, 0 without one."""
    sparse = decoder.keys.child("sparse_attention_config")
    decoder.keys.used.update(("index_n_heads", "index_head_dim"))
    if sparse is None:
        if kind != "indexed":
            return 0, 0
        heads = decoder.keys.integer("index_n_heads", low=0)
        width = decoder.keys.integer("index_head_dim", default=128)
        return heads, width
    if not sparse.flag("use_sparse_attention", default=True):
        return 0, 0
    layers = sparse.integers("sparse_attention_freq", low=0, high=1)
    if layers is None or len(layers) < decoder.layers:
        raise sparse.fail("sparse_attention_freq", "missing or short", "give 0 or 1 for each layer")
    if not layers[index]:
        return 0, 0
    return sparse.integer("sparse_num_index_heads"), sparse.integer("sparse_index_dim")


def _searched(decoder: DecoderKeys, index: int, configs: list[object]) -> list[Block]:
    """Attention of a searched (NAS) model: its own KV heads, or none."""
    entry = nas_entry(decoder.keys, index, configs, "attention")
    if entry.flag("no_op", default=False):
        return []
    if entry.flag("replace_with_linear", default=False):
        raise entry.fail("replace_with_linear", "is not understood", "only attention or no_op")
    window = entry.optional_integer("window_length")
    sparsify = entry.present("sparsify", "num_sink_tokens")
    if sparsify is not None:
        raise entry.fail(sparsify, "is not understood", "only plain attention can be planned")
    heads = decoder.require_heads()
    group = entry.optional_integer("n_heads_in_group", high=heads)
    kv = entry.integer("num_key_value_heads", default=heads) if group is None else heads // group
    if kv > heads or heads % kv:
        raise entry.fail("n_heads_in_group", f"does not divide {heads} heads", "check the file")
    width = decoder.head_width(heads)
    return [
        Attention(
            hidden=decoder.hidden,
            heads=heads,
            kv_heads=kv,
            k_width=width,
            v_width=width,
            keeps="sliding" if window else "full",
            window=window,
            qkv_bias=decoder.switch(decoder.arch.qkv_bias),
            o_bias=decoder.switch(decoder.arch.o_bias),
        )
    ]


def _latent(decoder: DecoderKeys, index: int) -> list[Block]:
    """MLA, or DeepSeek-V4's compressed attention; LongCat's layers have two."""
    from capplan.readers.latent_blocks import compressed_block, mla_block

    if decoder.keys.present("compress_ratios") is not None:
        return [compressed_block(decoder, index)]
    path = decoder.arch.attention_path
    if decoder.arch.doubled:
        return [mla_block(decoder, index, f"{path}.{number}") for number in (0, 1)]
    return [mla_block(decoder, index, path)]


def _factored(decoder: DecoderKeys) -> "FactoredAttention":
    from capplan.blocks import FactoredAttention

    heads = decoder.require_heads()
    return FactoredAttention(
        hidden=decoder.hidden,
        heads=heads,
        kv_heads=decoder.kv_heads(heads),
        width=decoder.keys.integer("head_dim"),
        q_rank=decoder.keys.integer("share_q_dim"),
    )


def _mixture(decoder: DecoderKeys) -> "MixtureAttention":
    from capplan.blocks import MixtureAttention

    keys = decoder.keys
    return MixtureAttention(
        hidden=decoder.hidden,
        kv_heads=keys.integer("num_key_value_heads"),
        width=keys.integer("kv_channels"),
        experts=keys.integer(*EXPERT_COUNTS),
        experts_per_token=keys.integer("num_experts_per_tok"),
    )
