"""Keys inside the nested mappings of a config: what nobody read there must be harmless too."""

from collections.abc import Callable, Mapping
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.config_keys import Keys
from capplan.readers.harmless_keys import is_harmless

# How a checkpoint was calibrated, and how engines compute with it: nothing of that is stored.
_QUANTIZATION: Final = frozenset(
    """
    act_bits act_data_type act_dynamic act_group_size act_sym activation_bits activation_dtype
    activation_scale_ub activation_scheme actorder amax autoround_version backend batch_size
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type cache_block_outputs calib_size
    calibration_method checkpoint_format damp_percent dataset desc_act disable_exllama do_fuse
    enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input exllama_config fmt format
    fuse_max_seq_len global_compression_ratio gradient_accumulate_steps input_activations is_marlin_format
    iters llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold low_gpu_mem_usage
    lr max_input_length minmax_lr model_file_base_name model_name_or_path
    module_name_preceding_first_block modules_to_fuse mse nsamples observer observer_kwargs
    output_activations producer provider quant_type quantization_status scale_dtype scale_fmt seqlen
    static_groups supported_formats sym to_quant_block_names tokenizer true_sequential use_cuda_fp16
    use_exllama uses_scale version zp_dtype
    """.split()
)
# Formats of what is computed, not of what is stored.
_COMPUTED: Final = ("input_activations", "output_activations", "kv_cache_scheme")
# What sparse attention reads of its cache, and bounds of gates.
_MIXERS: Final = frozenset(
    """
    gate_lower_bound sparse_block_size sparse_disable_index_value sparse_init_block sparse_local_block
    sparse_score_type sparse_topk_blocks
    """.split()
)
# Heads only divide a tower's width; the rest says how an image becomes tokens.
_TOWERS: Final = frozenset(
    """
    attention_heads chunk_size_feed_forward default_output_length encoder_attention_heads global_head_dim
    head_dim hidden_size image_size image_seq_length init_pos_emb_time intermediate_layers_indices
    max_position_embeddings max_source_positions mm_hidden_size n_window num_attention_heads num_heads
    num_key_value_heads pooling_kernel_size projection_dim spatial_patch_size text_hidden_size torch_dtype
    tokens_per_second video_seq_length vision_feature_layer vocab_size vt_num_attention_heads window_size
    max_length min_length num_beams top_k num_return_sequences num_beam_groups tie_word_embeddings
    """.split()
)
_WIDE: Final = (
    "size", "dim", "width", "layer", "depth", "ffn", "hidden", "channel", "rank", "expert", "num_",
)  # fmt: skip
_PARTS: Final = ("bias", "gate", "glu", "norm", "head", "attn", "attention", "moe", "cls")
_TOWER_CONFIGS: Final = ("vision_config", "audio_config", "audio_encoder_config", "thinker_config")


def check_mappings(data: Mapping[str, object], path: str, where: str, names: tuple[str, ...]) -> None:
    """Refuse a nested config that is there but no mapping: ignoring it would plan another model."""
    for name in names:
        value = data.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise InputError(
                f"{path}{name}: {shown(value, 40)} is not a mapping",
                where=where,
                hint="write key: value pairs, or remove it",
            )


def audit_nested(keys: Keys) -> None:
    """Refuse what is unread in the nested configs below `keys` and could hold memory."""
    for name, child in keys.children.items():
        if name in ("quantization_config", "compression_config"):
            _audit(child, lambda key, value: key in _QUANTIZATION)
        elif name in ("sparse_attention_config", "linear_attn_config"):
            _audit(child, lambda key, value: key in _MIXERS)
        elif name == "thinker_config":
            audit_nested(child)
        elif name in _TOWER_CONFIGS:
            _audit(child, _tower_harmless)


def _tower_harmless(key: str, value: object) -> bool:
    if key in _TOWERS:
        return True
    if isinstance(value, bool):
        return not any(word in key for word in _PARTS)
    wide = isinstance(value, int | float | list | dict) and any(word in key for word in _WIDE)
    return not wide


def _audit(keys: Keys, harmless: Callable[[str, object], bool]) -> None:
    for key in keys.unused():
        value = keys.data[key]
        if not harmless(key, value) and not is_harmless(key, value):
            raise keys.fail(
                key,
                f"not understood (value {shown(value, 40)}), and it could change memory",
                "remove it if it changes nothing; else this model cannot be planned yet",
            )
    for name, child in keys.children.items():
        if name not in _COMPUTED:
            _audit(child, harmless)
