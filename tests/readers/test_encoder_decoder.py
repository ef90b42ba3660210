"""Encoder-decoder models: cross attention's cache, the encoder beside, tying."""

from typing import Any

import pytest

from capplan import catalog
from capplan.errors import InputError
from capplan.readers.hf_config import read_model
from capplan.specs import Cache, Model

WHISPER = {
    "model_type": "whisper", "d_model": 8, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80, "vocab_size": 100,
    "is_encoder_decoder": True,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 8, "d_kv": 3, "d_ff": 16, "num_heads": 2, "num_layers": 2,
    "num_decoder_layers": 3, "vocab_size": 100, "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32, "is_encoder_decoder": True,
}  # fmt: skip


def read(config: dict[str, Any]) -> Model:
    return read_model(
        config,
        where="config.json",
        name="test",
        architecture=catalog.architecture(str(config["model_type"])),
    )


def caches(model: Model) -> list[tuple[Cache, int]]:
    return [(cache, len(group.indices)) for group in model.groups for cache in group.layer.caches()]


def test_every_decoder_layer_keeps_its_own_tokens_and_the_encoders() -> None:
    own = Cache(kind="full", heads=2, k_width=4, v_width=4)
    # Whisper's encoder always hands on 1,500 frames.
    crossed = Cache(kind="cross", heads=2, k_width=4, v_width=4, window=1500)
    assert caches(read(WHISPER)) == [(own, 3), (crossed, 3)]


def test_the_encoder_is_a_tower_that_keeps_nothing() -> None:
    (encoder,) = read(WHISPER).towers
    assert (encoder.role, encoder.exact, encoder.caches) == ("encoder", True, ())
    # a layer: q, k, v, o 4·64 + 3·8 biases, 8·16 twice + 24, two LayerNorms of 8
    layer = 256 + 24 + 256 + 24 + 32
    convolutions = 8 * 80 * 3 + 8 + 8 * 8 * 3 + 8
    assert encoder.parameters == 2 * layer + convolutions + 1500 * 8 + 16


def test_whisper_decoder_by_hand() -> None:
    # two attentions of 4·64 + 24, feed-forward 256 + 24, three LayerNorms of 8
    layer = 2 * 280 + 280 + 48
    assert read(WHISPER).parameters == 3 * layer + 100 * 8 + 448 * 8 + 16


def test_t5_has_heads_of_their_own_width_and_one_position_table_a_stack() -> None:
    model = read(T5)
    # q, k, v, o 4·8·6; three matrices of 8·16; norms without bias
    assert model.parameters == 3 * (2 * 192 + 384 + 24) + 32 * 2 + 800 + 8
    assert model.towers[0].parameters == 2 * (192 + 384 + 16) + 32 * 2 + 8
    assert {(cache.kind, cache.k_width, cache.window) for cache, _ in caches(model)} == {
        ("full", 3, None),
        ("cross", 3, None),
    }


def test_umt5_has_a_position_table_in_every_layer() -> None:
    umt5 = read({**T5, "model_type": "umt5"})
    assert umt5.parameters - read(T5).parameters == 2 * 64


def test_a_head_of_its_own_is_counted_where_the_file_says_so() -> None:
    # T5 1.1, Flan-T5 and mT5 checkpoints hold one.
    assert read({**T5, "tie_word_embeddings": False}).parameters - read(T5).parameters == 800


def test_a_plain_feed_forward_has_two_matrices() -> None:
    plain = read({**T5, "feed_forward_proj": "relu"})
    assert read(T5).parameters - plain.parameters == 3 * 128


@pytest.mark.parametrize(
    "key", ["decoder_layers", "encoder_layers", "decoder_ffn_dim", "max_target_positions"]
)
def test_a_missing_width_is_named(key: str) -> None:
    config = {name: value for name, value in WHISPER.items() if name != key}
    named = "max_position_embeddings" if key == "max_target_positions" else key
    with pytest.raises(InputError) as caught:
        read(config)
    assert named in caught.value.message
