"""Encoder-decoder models (T5, BART, Whisper and their kin): decoder layers with cross attention, and an
encoder beside them that keeps nothing of its own.

The decoder caches its own tokens like any other; each layer's cross attention keeps keys and values of the
encoder's tokens. `Cache.window` bounds those where the encoder's length is fixed (Whisper).
"""

from dataclasses import replace

from capplan.blocks import Attention, Ffn
from capplan.readers.config_keys import MAX_LAYERS, Keys
from capplan.readers.decoder_keys import DecoderKeys
from capplan.readers.model_parts import ModelParts, grouped
from capplan.readers.outside_tensors import by_vocabulary, is_tied, max_context
from capplan.specs import Architecture, Layer, Tensor, Tower

_KERNEL = 3


def encoder_decoder(keys: Keys, arch: Architecture, dtype_bits: int) -> ModelParts:
    """The parts of an encoder-decoder model.

    Raises InputError for a missing width, or a family without a reader.
    """
    keys.used.add("is_encoder_decoder")
    t5 = arch.encoder in ("t5", "umt5")
    if t5:
        encoder_layers = keys.integer("num_layers", "num_hidden_layers", high=MAX_LAYERS)
        layers = keys.integer("num_decoder_layers", default=encoder_layers, high=MAX_LAYERS)
        keys.used.update(("is_gated_act", "dense_act_fn"))
    else:
        encoder_layers = keys.integer("encoder_layers", high=MAX_LAYERS)
        layers = keys.integer("decoder_layers", high=MAX_LAYERS)
    decoder = DecoderKeys(keys, arch, layers=layers, dtype_bits=dtype_bits)
    heads = keys.integer("num_heads" if t5 else "decoder_attention_heads")
    encoder_heads = keys.integer("num_heads" if t5 else "encoder_attention_heads")
    ffn = keys.integer("d_ff" if t5 else "decoder_ffn_dim")
    encoder_ffn = keys.integer("d_ff" if t5 else "encoder_ffn_dim")
    built = [_decoder_layer(decoder, index, heads, ffn) for index in range(layers)]
    encoder = [_encoder_layer(decoder, index, encoder_heads, encoder_ffn) for index in range(encoder_layers)]
    return ModelParts(
        hidden=decoder.hidden,
        heads=heads,
        groups=grouped(built, arch.layer_path),
        outside=_outside(decoder),
        towers=(_encoder_tower(decoder, encoder),),
    )


def _attention(decoder: DecoderKeys, heads: int, path: str, *, cross: bool = False) -> Attention:
    keys, arch = decoder.keys, decoder.arch
    width = keys.optional_integer("d_kv", "head_dim")
    if width is None:
        if decoder.hidden % heads:
            raise keys.fail("d_model", f"{decoder.hidden} is no multiple of {heads} heads", "check the file")
        width = decoder.hidden // heads
    bias = decoder.switch(arch.qkv_bias)
    return Attention(
        hidden=decoder.hidden,
        heads=heads,
        kv_heads=heads,
        k_width=width,
        v_width=width,
        keeps="cross" if cross else "full",
        window=keys.optional_integer("max_source_positions") if cross else None,
        qkv_bias=bias,
        k_bias=decoder.switch(arch.k_bias),
        o_bias=decoder.switch(arch.o_bias),
        path=path,
    )


def _ffn(decoder: DecoderKeys, width: int) -> Ffn:
    projection = decoder.keys.text("feed_forward_proj", default="")
    return Ffn(
        hidden=decoder.hidden,
        ffn=width,
        gated=decoder.arch.mlp_gated or (projection or "").startswith("gated-"),
        bias=decoder.switch(decoder.arch.mlp_bias),
    )


def _positions(decoder: DecoderKeys, index: int, heads: int) -> tuple[Tensor, ...]:
    """T5's relative position table: in the first layer, or in every one (UMT5)."""
    if decoder.arch.encoder != "umt5" and (decoder.arch.encoder != "t5" or index > 0):
        return ()
    buckets = decoder.keys.integer("relative_attention_num_buckets", default=32, high=1 << 20)
    return (Tensor(name="relative_attention_bias", role="attention", shape=(buckets, heads)),)


def _decoder_layer(decoder: DecoderKeys, index: int, heads: int, ffn: int) -> Layer:
    names = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    return Layer(
        blocks=(
            _attention(decoder, heads, "self_attn"),
            _attention(decoder, heads, "encoder_attn", cross=True),
            _ffn(decoder, ffn),
        ),
        norms=(
            *(tensor for name in names for tensor in decoder.norm(name)),
            *_positions(decoder, index, heads),
        ),
    )


def _encoder_layer(decoder: DecoderKeys, index: int, heads: int, ffn: int) -> Layer:
    names = ("self_attn_layer_norm", "final_layer_norm")
    return Layer(
        blocks=(_attention(decoder, heads, "self_attn"), _ffn(decoder, ffn)),
        norms=(
            *(tensor for name in names for tensor in decoder.norm(name)),
            *_positions(decoder, index, heads),
        ),
    )


def _outside(decoder: DecoderKeys) -> tuple[Tensor, ...]:
    keys, arch = decoder.keys, decoder.arch
    vocab = keys.integer("vocab_size", high=1 << 24)
    made = [by_vocabulary("model.shared", "embedding", vocab, decoder.hidden)]
    if arch.learned_positions is not None:
        made.append(_position_table(decoder, "model.decoder.embed_positions", _context(decoder)))
    if arch.embedding_norm:
        made += decoder.norm("model.decoder.layernorm_embedding")
    if decoder.switch(arch.final_norm):
        made += decoder.norm("model.decoder.layer_norm")
    if not is_tied(decoder, keys):
        made.append(by_vocabulary("lm_head", "lm_head", vocab, decoder.hidden, linear=True))
    return tuple(made)


def _context(decoder: DecoderKeys) -> int:
    length = max_context(decoder.keys, decoder.keys)
    if length is None:
        raise decoder.keys.fail(
            "max_position_embeddings", "missing", "this family learns its position embeddings"
        )
    return length


def _position_table(decoder: DecoderKeys, name: str, positions: int) -> Tensor:
    shape = (positions + (decoder.arch.learned_positions or 0), decoder.hidden)
    return Tensor(name=name, role="embedding", shape=shape)


def _encoder_tower(decoder: DecoderKeys, layers: list[Layer]) -> Tower:
    """All of the encoder; equal layers together."""
    keys, arch, width = decoder.keys, decoder.arch, decoder.hidden
    made: list[Tensor] = []
    for group in grouped(layers, "model.encoder.layers"):
        times = len(group.indices)
        made += [
            replace(
                tensor,
                name=f"{group.prefix}.N.{tensor.name}",
                role="encoder",
                copies=tensor.copies * times,
                active_copies=tensor.active_copies * times,
            )
            for tensor in group.layer.tensors()
        ]
    outside: list[Tensor] = []
    if arch.encoder == "whisper":
        mels = keys.integer("num_mel_bins", default=80, high=1 << 16)
        for number, inputs in ((1, mels), (2, width)):
            name = f"model.encoder.conv{number}"
            outside.append(Tensor(name=name, role="encoder", shape=(width, inputs, _KERNEL)))
            outside.append(Tensor(name=f"{name}.bias", role="encoder", shape=(width,)))
    if arch.learned_positions is not None:
        source = keys.optional_integer("max_source_positions")
        length = _context(decoder) if source is None else source
        outside.append(_position_table(decoder, "model.encoder.embed_positions", length))
    if arch.embedding_norm:
        outside += decoder.norm("model.encoder.layernorm_embedding")
    if decoder.switch(arch.final_norm):
        outside += decoder.norm("model.encoder.layer_norm")
    made += [replace(tensor, role="encoder") for tensor in outside]
    return Tower(role="encoder", name="encoder", tensors=tuple(made))
