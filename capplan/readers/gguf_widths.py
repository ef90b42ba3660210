"""Widths of a GGUF's feed-forward, recurrent and searched layers, in config.json's keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from capplan.readers.gguf_keys import GgufModel
from capplan.readers.gguf_layers import FULL, routed


def feed_forward(model: GgufModel, experts: bool) -> dict[str, Any]:
    keys = model.keys
    made: dict[str, Any] = {}
    widths = model.per_layer("feed_forward_length")
    if widths and any(widths):
        known = sorted({width for width in widths if width})
        shares = keys.integer("attention.shared_kv_layers", default=0, low=0, high=model.layers)
        doubled = [known[0] * (2 if at >= model.layers - shares else 1) for at in range(model.layers)]
        if len(known) == 1:
            made["intermediate_size"] = known[0]
        elif list(widths) == doubled:
            made |= {"intermediate_size": known[0], "use_double_wide_mlp": True}
        else:
            made["intermediate_size"] = [max(1, width) for width in widths]
    used = model.per_layer("expert_used_count")
    own = model.per_layer("expert_feed_forward_length")
    shared = keys.optional_integer("expert_shared_feed_forward_length", low=0)
    count = keys.optional_integer("expert_shared_count", low=0)
    keys.used.update(("leading_dense_block_count", "moe_every_n_layers", "expert_count"))
    if not experts:
        return made
    sparse = routed(model)
    made["num_experts_per_tok"] = max(used or (1,))
    made["moe_intermediate_size"] = max(own or (0,)) or _expert_width(model, made)
    if own and len({width for width in own if width}) > 1:
        raise keys.fail("expert_feed_forward_length", "differs by layer", "give its config.json")
    if model.arch.form != "single":
        made["mlp_layer_types"] = ["sparse" if own else "dense" for own in sparse]
    first = model.shape("ffn_up_shexp", sparse.index(True)) if True in sparse else ()
    if first:
        made["shared_expert_intermediate_size"] = first[0]
    elif shared and not model.has_layers:
        made["shared_expert_intermediate_size"] = shared
    elif count and not model.has_layers:
        made["shared_expert_intermediate_size"] = count * made["moe_intermediate_size"]
    else:
        made["shared_expert_intermediate_size"] = 0
    return made


def _expert_width(model: GgufModel, made: Mapping[str, Any]) -> int:
    """Width of an expert where no key has it: its tensor's, else the dense width."""
    for layer in range(model.layers):
        shape = model.shape("ffn_up_exps", layer) or model.shape("ffn_up.0", layer)
        if len(shape) > 1:
            return shape[-2]
    width = made.get("intermediate_size")
    if not isinstance(width, int):
        raise model.keys.fail("expert_feed_forward_length", "missing", "convert the model again")
    return width


def recurrent(model: GgufModel) -> dict[str, Any]:
    """Widths of Mamba or gated-delta layers; empty without them."""
    keys, arch = model.keys, model.arch
    kernel = keys.optional_integer("ssm.conv_kernel")
    inner = keys.optional_integer("ssm.inner_size")
    state = keys.optional_integer("ssm.state_size")
    rank = keys.optional_integer("ssm.time_step_rank")
    groups = keys.optional_integer("ssm.group_count")
    if inner is None or arch.form == "kda":
        return {}
    # llama.cpp keeps the states in 32 bits.
    made: dict[str, Any] = {"mamba_ssm_cache_dtype": "float32"}
    if rank is None or state is None or kernel is None:
        raise keys.fail("ssm.state_size", "missing beside ssm.inner_size", "convert the model again")
    if arch.recurrent == "linear_attention":
        return made | {
            "linear_num_key_heads": groups or rank,
            "linear_num_value_heads": rank,
            "linear_key_head_dim": state,
            "linear_value_head_dim": max(1, inner // rank),
            "linear_conv_kernel_dim": kernel,
        }
    made |= {"mamba_d_conv": kernel, "mamba_d_state": state}
    if arch.form == "mamba1":
        return made | {"mamba_intermediate_size": inner, "mamba_dt_rank": rank}
    return made | {
        "mamba_n_heads": rank,
        "mamba_d_head": max(1, inner // rank),
        "mamba_n_groups": groups or 1,
    }


def kda(model: GgufModel, kinds: Sequence[str], heads: int) -> dict[str, Any]:
    """Kimi's delta attention: layers counted from one."""
    full = [at + 1 for at, kind in enumerate(kinds) if kind == FULL]
    return {
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": model.keys.integer("kda.head_dim"),
            "short_conv_kernel_size": model.keys.integer("ssm.conv_kernel", default=4),
            "full_attn_layers": full,
            "kda_layers": [at for at in range(1, len(kinds) + 1) if at not in set(full)],
        }
    }


def searched(model: GgufModel) -> dict[str, Any]:
    """Nemotron's searched models: heads and widths by layer, zero for a block that is left out."""
    keys = model.keys
    heads = model.per_layer("attention.head_count") or ()
    counts = model.per_layer("attention.head_count_kv") or ()
    widths = model.per_layer("feed_forward_length") or ()
    if not (heads and counts and widths) or not max(heads):
        raise keys.fail("attention.head_count", "missing or zero", "convert the model again")
    keys.used.update(("attention.value_length",))
    default = max(1, keys.integer("embedding_length") // max(heads))
    return {
        "num_attention_heads": max(heads),
        "head_dim": keys.integer("attention.key_length", default=default),
        "block_configs": [
            {
                "attention": {"no_op": not kv, "num_key_value_heads": kv or None},
                "ffn": {"no_op": not width, "intermediate_size": width or None},
            }
            for kv, width in zip(counts, widths, strict=True)
        ],
    }
