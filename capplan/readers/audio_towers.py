"""Audio towers: the Whisper-like encoders of Qwen and Voxtral; any other is estimated."""

from capplan.readers.config_keys import Keys
from capplan.readers.tower_parts import Parts, depth
from capplan.specs import Tower

_WHISPER_KINDS = ("qwen2_audio_encoder", "voxtral_encoder", "qwen2_5_omni_audio_encoder",
                  "qwen3_omni_moe_audio_encoder")  # fmt: skip


def audio_towers(keys: Keys, hidden: int) -> list[Tower]:
    """The audio encoder and its projector."""
    kind = keys.text("model_type", default="") or ""
    return _whisper(keys, hidden, kind) if kind in _WHISPER_KINDS else _estimated(keys)


def _whisper(keys: Keys, hidden: int, kind: str) -> list[Tower]:
    width = keys.integer("d_model", "hidden_size")
    ffn = keys.integer("encoder_ffn_dim", "intermediate_size")
    mels = keys.integer("num_mel_bins", default=128, high=1 << 16)
    parts, projector = Parts("audio"), Parts("projector")
    newest = kind.startswith("qwen3")
    if newest:
        channels = keys.integer("downsample_hidden_size", default=480)
        parts.linear("conv2d1", channels, 1, 3, 3)
        parts.linear("conv2d", channels, channels, 3, 3, copies=2)
        for _ in range(3):
            mels = (mels + 1) // 2
        parts.linear("conv_out", width, channels * mels, bias=False)
    else:
        parts.linear("conv1", width, mels, 3)
        parts.linear("conv2", width, width, 3)
    layers = depth(keys, "encoder_layers", "num_hidden_layers")
    parts.encoder(layers, width, ffn, k_bias=newest)
    parts.norm("layer_norm", width, bias=True)
    if kind in ("qwen2_audio_encoder", "voxtral_encoder"):
        parts.add("embed_positions", keys.integer("max_source_positions", default=1500), width)
    out = keys.integer("output_dim", default=hidden)
    if newest:
        projector.linear("proj1", width, width)
        projector.linear("proj2", out, width)
    elif kind == "voxtral_encoder":
        # Four frames are joined, as wide together as the feed-forward.
        projector.linear("linear_1", hidden, ffn, bias=False)
        projector.linear("linear_2", hidden, hidden, bias=False)
    else:
        projector.linear("proj", out, width)
        if kind.startswith("qwen2_5"):
            projector.add("audio_bos_eos_token", 2, out)
    return [parts.tower("audio tower"), projector.tower("audio projector")]


def _estimated(keys: Keys) -> list[Tower]:
    """A plain encoder of these widths, marked as an estimate; nothing where no widths are given."""
    widths = ("d_model", "hidden_size", "encoder_embed_dim", "conf_hidden_size", "hidden_dim")
    depths = (
        "encoder_layers", "num_hidden_layers", "num_layers", "conf_num_hidden_layers", "num_blocks",
    )  # fmt: skip
    if keys.present(*widths) is None or keys.present(*depths) is None:
        return []
    width, layers = keys.integer(*widths), depth(keys, *depths)
    parts = Parts("audio")
    parts.encoder(layers, width, keys.integer("encoder_ffn_dim", "intermediate_size", default=4 * width))
    return [parts.tower("audio tower (estimated from its widths)", exact=False)]
