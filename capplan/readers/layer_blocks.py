"""One layer of a decoder: its blocks in order, its norms, and the small tensors beside them."""

from typing import Final

from capplan.blocks import Ffn
from capplan.readers.attention_blocks import attention_blocks, shared_attention
from capplan.readers.decoder_keys import DecoderKeys
from capplan.readers.ffn_blocks import dense_block, routed_blocks
from capplan.readers.layer_plan import LayerKinds
from capplan.specs import Block, Layer, Tensor

RECURRENT: Final = ("hybrid", "mamba", "conv", "recurrent", "linear", "rwkv", "rwkv4")


def build_layers(decoder: DecoderKeys, plan: list[LayerKinds]) -> list[Layer]:
    """Every layer of the plan, in order."""
    built: list[Layer] = []
    uses = 0
    for index, (mixer, ffn) in enumerate(plan):
        built.append(_layer(decoder, index, mixer, ffn, uses))
        uses += mixer == "hybrid"
    return built


def _layer(decoder: DecoderKeys, index: int, mixer: str | None, ffn: str | None, uses: int) -> Layer:
    """The layer at `index`; `uses` counts the layers before it that run a shared block."""
    arch = decoder.arch
    if arch.shared_blocks and mixer == "hybrid":
        return _sharing_layer(decoder, uses)
    blocks: list[Block] = []
    if mixer is not None:
        blocks += _mixer(decoder, index, mixer)
    if ffn == "moe":
        if arch.doubled:
            blocks += [
                block
                for number in (0, 1)
                for block in dense_block(decoder, index, f"{arch.mlp_path}.{number}")
            ]
        elif arch.dense_beside_moe:
            blocks += dense_block(decoder, index)
        blocks += routed_blocks(decoder, index)
    elif ffn == "dense" and arch.ffn:
        blocks += dense_block(decoder, index)
    kinds = {"layer", mixer, ffn, "first" if index == 0 else "rest"}
    return Layer(
        blocks=tuple(blocks),
        norms=(
            *_norms(decoder, blocks, mixer, ffn),
            *decoder.extra({kind for kind in kinds if kind is not None}),
        ),
    )


def _mixer(decoder: DecoderKeys, index: int, kind: str) -> list[Block]:
    """The attention or recurrent block (two side by side for "hybrid")."""
    if kind not in RECURRENT:
        return attention_blocks(decoder, index, kind)
    from capplan.readers import recurrent_blocks  # only a hybrid pays for it

    if kind == "hybrid":
        return [*attention_blocks(decoder, index, "full"), recurrent_blocks.mamba_block(decoder)]
    if kind == "mamba":
        return [recurrent_blocks.mamba_block(decoder)]
    if kind == "conv":
        return [recurrent_blocks.conv_block(decoder)]
    if kind == "recurrent":
        return [recurrent_blocks.recurrence_block(decoder)]
    if kind == "linear":
        return [recurrent_blocks.linear_block(decoder)]
    return [recurrent_blocks.rwkv_block(decoder)]


def _sharing_layer(decoder: DecoderKeys, uses: int) -> Layer:
    """Zamba: a Mamba layer after a transformer block that a few layers own and all of them run."""
    from capplan.readers.recurrent_blocks import mamba_block

    keys = decoder.keys
    owners = keys.integer("num_mem_blocks", default=1)
    owner = uses < owners
    path = "shared_transformer.feed_forward"
    shared: list[Block] = [shared_attention(decoder, owner)]
    norms: list[Tensor] = [*decoder.norm("input_layernorm")]
    ffns = dense_block(decoder, 0, path)
    if owner:
        wide = keys.integer("attention_hidden_size", default=2 * decoder.hidden)
        shared += ffns
        norms += decoder.norm("shared_transformer.input_layernorm", wide)
        norms += decoder.norm("shared_transformer.pre_ff_layernorm")
    rank = keys.optional_integer("adapter_rank")
    if rank is not None:
        norms += _adapters(decoder, rank, ffns)
    return Layer(blocks=(*shared, mamba_block(decoder)), norms=(*norms, *decoder.extra({"layer", "hybrid"})))


def _adapters(decoder: DecoderKeys, rank: int, ffns: list[Block]) -> list[Tensor]:
    """Zamba-2: low-rank adapters by which every use of a shared block differs."""
    keys = decoder.keys
    pairs: list[tuple[str, int, int]] = []
    if keys.flag("use_shared_mlp_adapter", default=True):
        pairs += [
            ("gate_up_proj_adapter", decoder.hidden, 2 * block.ffn)
            for block in ffns
            if isinstance(block, Ffn)
        ]
    if keys.flag("use_shared_attention_adapter", default=False):
        wide = keys.integer("attention_hidden_size", default=2 * decoder.hidden)
        pairs += [(f"linear_{letter}_adapter", wide, wide) for letter in "qkv"]
    return [
        Tensor(name=f"shared_transformer.{name}.{number}", role="mlp", shape=shape, linear=True)
        for name, inputs, outputs in pairs
        for number, shape in enumerate(((rank, inputs), (outputs, rank)))
    ]


def _norms(
    decoder: DecoderKeys, blocks: list[Block], mixer: str | None, ffn: str | None
) -> tuple[Tensor, ...]:
    keys, arch = decoder.keys, decoder.arch
    names = arch.layer_norms
    if mixer == "linear" and arch.linear_norms:
        names = arch.linear_norms
    parallel = decoder.switch(arch.parallel)
    if arch.single_blocks:
        names = names[:1]
    elif keys.present("block_configs") is not None:
        # A skipped block takes its norm with it.
        kinds = {block.kind for block in blocks}
        pairs = zip(names, ("attention", "ffn"), strict=True)
        names = tuple(name for name, kind in pairs if kind in kinds)
    elif keys.flag("new_decoder_architecture", default=False):
        names = ("ln_attn", "ln_mlp")[: keys.integer("num_ln_in_parallel_attn", default=2, high=2)]
    elif parallel:
        names = names[:1]
    if ffn == "moe":
        names = (*names, *arch.moe_norms)
    made = [tensor for name in names for tensor in decoder.norm(name)]
    return (*made, *_residual_attention(decoder), *_per_layer_inputs(decoder))


def _residual_attention(decoder: DecoderKeys) -> list[Tensor]:
    """Kimi-K3's attention over the outputs of earlier layers."""
    made: list[Tensor] = []
    if decoder.keys.present("attn_res_block_size") is not None:
        for part in ("self_attention_res", "mlp_res"):
            made += decoder.norm(f"{part}_norm")
            made.append(Tensor(name=f"{part}_proj", role="other", shape=(1, decoder.hidden)))
    return made


def _per_layer_inputs(decoder: DecoderKeys) -> tuple[Tensor, ...]:
    """Gemma 3n and 4: the projection of this layer's own input embedding."""
    decoder.keys.used.add("vocab_size_per_layer_input")
    width = decoder.keys.integer("hidden_size_per_layer_input", default=0, low=0)
    if not width:
        return ()
    return tuple(
        Tensor(name=name, role="other", shape=shape, linear=True)
        for name, shape in (
            ("per_layer_input_gate", (width, decoder.hidden)),
            ("per_layer_projection", (decoder.hidden, width)),
        )
    ) + decoder.norm("post_per_layer_input_norm")
