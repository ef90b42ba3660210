"""What a decoder holds once: embeddings, positions, final norm, head, and a few families' extras."""

from typing import Final

from capplan.readers.config_keys import Keys
from capplan.readers.decoder_keys import DecoderKeys
from capplan.specs import Tensor

# Engines pad the vocabulary to this multiple before they split it.
VOCAB_MULTIPLE: Final = 64
_CONTEXT: Final = (
    "max_position_embeddings", "n_positions", "seq_length", "max_sequence_length", "max_seq_len",
    "model_max_length", "context_length", "n_ctx", "max_seq_length", "max_target_positions",
    "max_position_embedding",
)  # fmt: skip


def vocabulary(keys: Keys, top: Keys) -> int:
    """Rows of the embedding; a wrapper may state them instead of its text model."""
    names = ("padded_vocab_size", "vocab_size", "n_vocab")
    given = keys.optional_integer(*names, high=1 << 24)
    wrapper = top.optional_integer(*names, high=1 << 24)
    if given is None and wrapper is None:
        return keys.integer("vocab_size", high=1 << 24)
    return given or wrapper or 0


def max_context(keys: Keys, top: Keys) -> int | None:
    """Longest sequence the file states, or None."""
    return keys.optional_integer(*_CONTEXT) or top.optional_integer(*_CONTEXT)


def by_vocabulary(name: str, role: str, rows: int, *rest: int, linear: bool = False) -> Tensor:
    """A tensor that ranks share by rows of the padded vocabulary."""
    return Tensor(
        name=name,
        role=role,  # type: ignore[arg-type]  # callers pass literals
        shape=(rows, *rest),
        linear=linear,
        split_axis=0,
        split_multiple=VOCAB_MULTIPLE,
    )


def is_tied(decoder: DecoderKeys, top: Keys) -> bool:
    """Whether head and embedding are one matrix: the text model's key, the wrapper's, the class's."""
    outer = top.flag("tie_word_embeddings", default=decoder.arch.tied)
    return decoder.keys.flag("tie_word_embeddings", default=outer)


def outside_tensors(decoder: DecoderKeys, top: Keys) -> tuple[Tensor, ...]:
    """Embeddings, final norm and head."""
    keys, arch, hidden = decoder.keys, decoder.arch, decoder.hidden
    vocab = vocabulary(keys, top)
    width = keys.integer("word_embed_proj_dim", "embedding_size", default=hidden)
    made = [by_vocabulary("model.embed_tokens", "embedding", vocab + arch.embedding_rows, width)]
    if width != hidden:
        made += [
            Tensor(name=name, role="embedding", shape=shape)
            for name, shape in (
                ("model.project_in", (hidden, width)),
                ("model.project_out", (width, hidden)),
            )
        ]
    if arch.learned_positions is not None:
        positions = max_context(keys, top)
        if positions is None:
            raise keys.fail(
                "max_position_embeddings", "missing", "this family learns its position embeddings"
            )
        shape = (positions + arch.learned_positions, hidden)
        made.append(Tensor(name="model.embed_positions", role="embedding", shape=shape))
    if arch.embedding_norm:
        made += decoder.norm("model.embed_norm")
    if decoder.switch(arch.final_norm):
        made += decoder.norm("model.norm")
    made += _residual_attention(decoder)
    made += _per_layer_inputs(decoder, vocab)
    made += decoder.extra({"outside"})
    if not is_tied(decoder, top):
        made.append(by_vocabulary("lm_head", "lm_head", vocab, width, linear=True))
    if decoder.switch(arch.lm_head_bias):
        made.append(by_vocabulary("lm_head.bias", "other", vocab))
    return tuple(made)


def _residual_attention(decoder: DecoderKeys) -> list[Tensor]:
    """Kimi-K3: the last attention over layer outputs."""
    if decoder.keys.present("attn_res_block_size") is None:
        return []
    return [
        *decoder.norm("model.output_attn_res_norm"),
        Tensor(name="model.output_attn_res_proj", role="other", shape=(1, decoder.hidden)),
    ]


def _per_layer_inputs(decoder: DecoderKeys, vocab: int) -> list[Tensor]:
    """Gemma 3n and 4: one more embedding, as wide as all layers' inputs together."""
    keys = decoder.keys
    width = keys.integer("hidden_size_per_layer_input", default=0, low=0)
    if not width:
        return []
    rows = keys.integer("vocab_size_per_layer_input", default=vocab)
    total = decoder.layers * width
    return [
        by_vocabulary("model.embed_tokens_per_layer", "embedding", rows, total),
        Tensor(
            name="model.per_layer_model_projection",
            role="other",
            shape=(total, decoder.hidden),
            linear=True,
        ),
        *decoder.norm("model.per_layer_projection_norm", width),
    ]
