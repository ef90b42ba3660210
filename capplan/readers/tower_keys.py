"""Keys of a config that describe a part beside the decoder."""

from typing import Final

TOWER_KEYS: Final = (
    "vision_config", "audio_config", "audio_encoder_config", "vision_tower_config", "img_processor",
    "vision_encoder_config", "speech_config", "audio_processor", "embd_layer", "vision_cfg",
    "talker_config", "code2wav_config", "token2wav_config", "enable_audio_output", "enable_talker",
    "sound_config", "speech_lora", "vision_lora", "perceiver_config", "mm_vision_tower",
)  # fmt: skip
