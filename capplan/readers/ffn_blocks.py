"""From a config's keys to the feed-forward blocks of one layer: dense, routed experts, shared ones."""

from capplan.blocks import Ffn, Moe
from capplan.readers.attention_blocks import nas_entry
from capplan.readers.decoder_keys import EXPERT_COUNTS, DecoderKeys
from capplan.specs import Block, Tensor

_DENSE_WIDTHS = (
    "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "inner_dim", "d_ff",
    "inner_hidden_size", "ffn_dim_expanded", "decoder_ffn_dim",
)  # fmt: skip
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk",
    "top_k_experts", "moe_k", "num_selected_experts", "moe_top_k", "moe_num_active_experts",
)  # fmt: skip
_SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim",
)  # fmt: skip


def dense_block(decoder: DecoderKeys, index: int, path: str | None = None) -> list[Block]:
    """Dense feed-forward; empty where a searched model skips it."""
    configs = decoder.keys.items("block_configs")
    if configs is None:
        width = _dense_width(decoder, index)
    else:
        entry = nas_entry(decoder.keys, index, configs, "ffn")
        if entry.flag("no_op", default=False):
            return []
        if entry.flag("replace_with_linear", default=False):
            raise entry.fail("replace_with_linear", "is not understood", "it replaces the block")
        width = entry.optional_integer("intermediate_size") or _rounded_width(
            decoder, entry.number("ffn_mult")
        )
    return [
        Ffn(
            hidden=decoder.hidden,
            ffn=width,
            gated=decoder.arch.mlp_gated,
            bias=decoder.switch(decoder.arch.mlp_bias),
            path=path or decoder.arch.mlp_path,
        )
    ]


def _rounded_width(decoder: DecoderKeys, multiple: float | None) -> int:
    """Nemotron's rule: two thirds of the multiple of the hidden size, rounded up to 256."""
    if multiple is None or not 0 < multiple < 1024:
        raise decoder.keys.fail(
            "block_configs", "ffn_mult missing or absurd", "give ffn_mult or intermediate_size"
        )
    return -(-int(2 * multiple * decoder.hidden / 3) // 256) * 256


def _dense_width(decoder: DecoderKeys, index: int) -> int:
    keys, arch = decoder.keys, decoder.arch
    names: tuple[str, ...] = _DENSE_WIDTHS
    if keys.present(*EXPERT_COUNTS) is not None and arch.routed:
        # Where experts have the plain name, dense layers have one of their own.
        names = ("intermediate_size_mlp", "dense_intermediate_size", *names)
    if arch.dense_width:
        names = (arch.dense_width, *names)
    if keys.present(*names) is None:
        if keys.present("ffn_multiple") is None:
            return keys.integer(names[0])
        width = keys.integer("ffn_multiple", high=64) * decoder.hidden
    else:
        width = keys.per_layer(index, *names)
    width //= arch.ffn_divisor
    if keys.flag("block_auto_adjust_ff_dim", default=False):
        width = _adjusted_width(decoder, width)
    shared = decoder.keys.integer("num_kv_shared_layers", default=0, low=0)
    double = keys.flag("use_double_wide_mlp", default=False)
    doubled = double and shared > 0 and index >= decoder.layers - shared
    return max(1, width) * (2 if doubled else 1)


def _adjusted_width(decoder: DecoderKeys, width: int) -> int:
    """LFM2's rule: two thirds of the width, times a factor, rounded up to a multiple."""
    keys = decoder.keys
    factor = keys.number("block_ffn_dim_multiplier", default=1) or 1
    multiple = keys.integer("block_multiple_of", default=256)
    if not 0 < factor < 1024:
        raise keys.fail("block_ffn_dim_multiplier", f"{factor} is absurd", "a small factor")
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def routed_blocks(decoder: DecoderKeys, index: int) -> list[Block]:
    """Routed experts with their router and shared experts; one set a modality where there are several."""
    keys, arch = decoder.keys, decoder.arch
    # Widths of dense layers, which a model of only routed layers may still state.
    keys.used.update(("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"))
    names: tuple[str, ...] = (
        "moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size",
    )  # fmt: skip
    if arch.plain_expert_width:
        names += ("intermediate_size", "ffn_dim")
    made: list[Block] = []
    for number in range(arch.modalities):
        # Ernie-VL lists experts and widths by modality, Hunyuan by layer.
        place = number if arch.modalities > 1 else index
        experts = keys.per_layer(place, *EXPERT_COUNTS)
        top = keys.per_layer(place, *_EXPERTS_PER_TOKEN)
        if top > experts:
            raise keys.fail(
                "num_experts_per_tok", f"{top} of {experts} experts", "check both values in the file"
            )
        width = keys.per_layer(place, *names)
        shared = _shared_width(decoder, index, width) if number == 0 else 0
        path = arch.moe_path if number == 0 else f"{arch.moe_path}.modality_{number}"
        latent = keys.optional_integer("moe_latent_size", "routed_expert_hidden_size")
        idle = keys.integer("zero_expert_num", default=0, low=0)
        made.append(
            Moe(
                hidden=decoder.hidden,
                experts=experts,
                experts_per_token=top if not idle else top * experts / (experts + idle),
                expert_ffn=width,
                gated=arch.mlp_gated,
                expert_bias=decoder.switch(arch.expert_bias),
                router_bias=decoder.switch(arch.router_bias),
                router_rows=experts + idle,
                shared_ffn=shared,
                shared_bias=decoder.switch(arch.shared_bias),
                shared_gate=arch.shared_gate and shared > 0,
                latent=latent,
                latent_norm=keys.flag("latent_moe_use_norm", default=False),
                path=path,
                extra=_router_extra(decoder, experts, path),
            )
        )
    return made


def _shared_width(decoder: DecoderKeys, index: int, expert_width: int) -> int:
    """Summed width of the shared experts; 0: none."""
    keys, arch = decoder.keys, decoder.arch
    count_names = (
        "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert",
    )  # fmt: skip
    count: int | None = None
    if keys.present(*count_names) is not None:
        count = keys.per_layer(index, *count_names, low=0)
    if not keys.flag("use_mixed_mlp_moe", default=True):
        return 0
    each = keys.optional_integer("moe_shared_expert_intermediate_size", low=0)
    given = keys.optional_integer(*_SHARED_WIDTHS, low=0)
    if given is not None:
        # The width of all shared experts at once.
        return given if count is None or count > 0 else 0
    if each is not None:
        return each * (1 if count is None else count)
    if count is not None:
        return count * expert_width
    return expert_width if arch.defaults.get("always_shared_expert") else 0


def _router_extra(decoder: DecoderKeys, experts: int, path: str) -> tuple[Tensor, ...]:
    if not decoder.arch.dense_beside_moe:
        return ()
    return (
        Tensor(name=f"{path}.router.scale", role="router", shape=(decoder.hidden,)),
        Tensor(name=f"{path}.router.per_expert_scale", role="router", shape=(experts,)),
    )
