"""From a config's keys to the block with a fixed state of one layer."""

from capplan.blocks import GatedDelta, Kda, Lightning, Mamba1, Mamba2, RgLru, Rwkv, ShortConv
from capplan.readers.decoder_keys import DecoderKeys
from capplan.specs import Block


def mamba_block(decoder: DecoderKeys) -> Block:
    """Mamba-2, or Mamba-1 where the class is one."""
    path = "mixer" if decoder.arch.single_blocks or decoder.arch.mixer == "mamba" else "mamba"
    return _mamba1(decoder, path) if decoder.arch.mamba1 else _mamba2(decoder, path)


def _mamba2(decoder: DecoderKeys, path: str) -> Mamba2:
    keys = decoder.keys
    # Only a pure Mamba model calls its heads by the plain names.
    pure = decoder.arch.mixer == "mamba"
    heads = keys.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", *["num_heads"] * pure)
    width = _given_width(decoder, pure)
    inner = keys.optional_integer("mamba_d_ssm", "mamba_intermediate_size")
    expand = keys.number("expand", "mamba_expand", default=2) or 2
    if width is None:
        total = inner or _expanded(decoder, expand)
        if total % heads:
            raise keys.fail(
                "mamba_n_heads", f"{heads} do not divide the inner width {total}", "check the file"
            )
        width = total // heads
    proj_bias = keys.flag("mamba_proj_bias", "use_bias", default=False)
    return Mamba2(
        hidden=decoder.hidden,
        heads=heads,
        head_width=width,
        state=keys.integer("ssm_state_size", "mamba_d_state", "state_size"),
        n_groups=keys.integer("n_groups", "mamba_n_groups", "mamba_ngroups", default=1),
        kernel=keys.integer("conv_kernel", "mamba_d_conv", default=4),
        conv_bias=keys.flag("use_conv_bias", "mamba_conv_bias", default=True),
        in_bias=proj_bias,
        out_bias=keys.flag("projectors_bias", default=proj_bias),
        gated_norm=decoder.switch(decoder.arch.gated_norm),
        state_bits=decoder.state_bits(),
        conv_bits=decoder.dtype_bits,
        path=path,
    )


def _given_width(decoder: DecoderKeys, pure: bool) -> int | None:
    keys = decoder.keys
    names = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")
    name = keys.present(*names)
    if name is not None and keys.value(name) == "auto":
        return None
    width = keys.optional_integer(*names)
    return keys.optional_integer("head_dim") if width is None and pure else width


def _expanded(decoder: DecoderKeys, factor: float) -> int:
    """The inner width a factor of the hidden size gives."""
    if not 0 < factor <= 64:
        raise decoder.keys.fail("mamba_expand", f"{factor} is absurd", "a small factor, mostly 2")
    return max(1, int(factor * decoder.hidden))


def _mamba1(decoder: DecoderKeys, path: str) -> Mamba1:
    keys, arch = decoder.keys, decoder.arch
    expand = keys.number("mamba_expand", "expand", default=2) or 2
    inner = keys.optional_integer("mamba_intermediate_size")
    if inner is None and arch.mixer == "mamba":
        # The class computes the width; the key of that name only repeats it.
        keys.used.update(("intermediate_size", "d_inner"))
    keys.used.add("n_mamba_heads")
    rank = keys.present("mamba_dt_rank", "time_step_rank")
    auto = rank is None or keys.value(rank) == "auto"
    return Mamba1(
        hidden=decoder.hidden,
        inner=inner or _expanded(decoder, expand),
        state=keys.integer("mamba_d_state", "state_size", "ssm_state_size", default=16),
        dt_rank=-(-decoder.hidden // 16) if auto else keys.integer("mamba_dt_rank", "time_step_rank"),
        kernel=keys.integer("mamba_d_conv", "conv_kernel", default=4),
        conv_bias=keys.flag("mamba_conv_bias", "use_conv_bias", default=True),
        proj_bias=keys.flag("mamba_proj_bias", "use_bias", default=False),
        inner_norms=arch.inner_norms,
        state_bits=decoder.state_bits(),
        conv_bits=decoder.dtype_bits,
        path=path,
    )


def linear_block(decoder: DecoderKeys) -> Block:
    """The linear-attention block whose widths the config gives."""
    keys = decoder.keys
    nested = keys.child("linear_attn_config")
    if nested is not None:
        return Kda(
            hidden=decoder.hidden,
            heads=nested.integer("num_heads"),
            head_width=nested.integer("head_dim"),
            kernel=nested.integer("short_conv_kernel_size", default=4),
            full_gate=nested.flag("use_full_rank_gate", default=False),
            conv_bits=decoder.dtype_bits,
        )
    if keys.present("linear_num_heads") is not None:
        return Kda(
            hidden=decoder.hidden,
            heads=keys.integer("linear_num_heads"),
            head_width=keys.integer("linear_head_dim"),
            kernel=keys.integer("linear_conv_kernel_dim", default=4),
            conv_bits=decoder.dtype_bits,
        )
    if keys.present("linear_num_value_heads") is not None:
        return GatedDelta(
            hidden=decoder.hidden,
            k_heads=keys.integer("linear_num_key_heads"),
            v_heads=keys.integer("linear_num_value_heads"),
            k_width=keys.integer("linear_key_head_dim"),
            v_width=keys.integer("linear_value_head_dim"),
            kernel=keys.integer("linear_conv_kernel_dim"),
            fused_inputs=decoder.arch.fused_inputs,
            state_bits=decoder.state_bits(),
            conv_bits=decoder.dtype_bits,
        )
    if not decoder.arch.lightning:
        raise keys.fail(
            "layer_types",
            "linear_attention layers without their widths",
            "linear_num_value_heads and its siblings, or linear_attn_config, are needed",
        )
    heads = decoder.require_heads()
    return Lightning(hidden=decoder.hidden, heads=heads, head_width=decoder.head_width(heads))


def rwkv_block(decoder: DecoderKeys) -> Rwkv:
    """RWKV-4's or RWKV-5's time and channel mixing."""
    keys = decoder.keys
    version = 4 if decoder.arch.mixer == "rwkv4" else 5
    # A missing width is the class's own multiple of the hidden size.
    wide = 4 * decoder.hidden if version == 4 else int(decoder.hidden * 3.5) // 32 * 32
    inner = keys.integer("attention_hidden_size", default=decoder.hidden)
    width = keys.integer("head_size", "head_dim", default=64) if version == 5 else 64
    if inner % width and version == 5:
        raise keys.fail("head_size", f"{width} does not divide {inner}", "check the file")
    return Rwkv(
        hidden=decoder.hidden,
        inner=inner,
        head_width=width,
        ffn=keys.integer("intermediate_size", default=wide),
        version=version,
    )


def conv_block(decoder: DecoderKeys) -> ShortConv:
    """LFM2's gated short convolution."""
    keys = decoder.keys
    return ShortConv(
        hidden=decoder.hidden,
        kernel=keys.integer("conv_L_cache"),
        bias=keys.flag("conv_bias", default=False),
    )


def recurrence_block(decoder: DecoderKeys) -> RgLru:
    """Griffin's gated linear recurrence."""
    keys = decoder.keys
    heads, width = decoder.require_heads(), keys.integer("lru_width", default=decoder.hidden)
    if width % heads:
        raise keys.fail("lru_width", f"{width} is no multiple of {heads} heads", "check the file")
    return RgLru(
        hidden=decoder.hidden,
        width=width,
        heads=heads,
        kernel=keys.integer("conv1d_width", default=4),
        conv_bits=decoder.dtype_bits,
    )
