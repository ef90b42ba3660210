"""Config keys that do not change memory: names, and shapes of names."""

from typing import Final

_EXACT: Final = frozenset(
    # One word a key: a list of strings would be ten times as long.
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _from_model_config _name_or_path activation activation_function
    activation_situ_beta activation_situ_linear_beta alibi alpha alpha_pattern always_use_router
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm attention_in_multiplier
    attention_multiplier attention_out_multiplier attention_softmax_in_fp32 attention_value_scale
    attn_implementation attn_logit_softcapping attn_scale auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bf16 bias_dropout_fusion boi_token_index boundary_token cache_implementation
    calc_logits_for_entire_prompt chat_template chunk_size chunk_size_feed_forward clip_qkv
    compress_rope_theta context_window_size custom_generate dim_model_base disable_ngram_loss
    diversity_penalty do_sample dtype_override early_stopping emb_scale embedding_multiplier
    encoder_no_repeat_ngram_size eoa_token_index eoi_token_index ep_size experts_implementation
    exponential_decay_length_penalty fan_in_first final_logit_softcapping final_w_init_variance_scale
    finetuning_task flash_attn flash_rotary float32_logits for_llm_compressor forced_bos_token_id
    forced_eos_token_id fp16 fp32 fp32_residual_connection fps fuse_norm fused_dense gate_lower_bound
    gate_soft_cap gradient_checkpointing hc_eps hc_sinkhorn_iters hidden_act hidden_activation
    hidden_dropout hidden_mamba_act id2label ignore_index image_grid_pinpoints image_placeholder
    image_seq_length image_token image_token_index index_block_size index_local_blocks
    index_share_for_mtp_iteration index_topk index_topk_blocks indexer_rope_interleave init_method
    init_method_std init_std initial_context_length initializer_cutoff_factor initializer_factor
    initializer_range input_jitter_noise is_causal is_composition is_decoder is_llama_config
    key_multiplier label2id label_smoothing lambda_std_dev language language_model_only layer_norm_eps
    layer_norm_epsilon layer_rope_theta layernorm_epsilon length_penalty lm_head_multiplier
    local_rope_theta logit_scale logits_scaling logits_to_keep long_factor mamba_chunk_size
    mamba_hidden_act max_length max_new_tokens max_pixels max_sequence_length max_window_layers
    media_placeholder_token_id min_length min_pixels mla_use_nope mlp_hidden_act mlp_multipliers
    mm_tokens_per_image model_version moe_aux_loss_coeff moe_implementation moe_renormalize
    moe_router_activation_func moe_router_dtype moe_router_scaling_factor moe_shared_expert_overlap
    moe_z_loss_coeff mrope_interleaved mrope_section mscale_all_dim mtp_loss_weight
    multimodal_projector_bias mup_enabled n_group no_repeat_ngram_size norm_eps norm_epsilon
    norm_softmax norm_topk_prob num_beam_groups num_beams num_expert_group num_image_tokens
    num_logits_to_keep num_return_sequences offset_alibi original_max_position_embeddings original_rope
    original_vocab_size output_attentions output_gate_type output_hidden_states output_past
    output_router_logits output_scores partial_rotary_factor prefill_chunk_size prefix pretraining_tp
    problem_type processor_class projector_hidden_act projector_patch_type qk_layernorm_eps
    qk_nope_scale query_pre_attn_scalar remove_invalid_values reorder_and_upcast_attn repetition_penalty
    rescale_every rescale_prenorm_residual residual_in_fp32 residual_multiplier return_dict
    return_dict_in_generate rms_eps rms_norm_eps rope_beta_fast rope_beta_slow rope_emb_base rope_factor
    rope_interleave rope_interleaved rope_local_base_freq rope_local_theta rope_mscale rope_parameters
    rope_pct rope_percent rope_ratio rope_scaling rope_scaling_factor
    rope_scaling_original_max_position_embeddings rope_scaling_type rope_theta rope_theta_scaling
    rope_traditional rope_type rotary rotary_base rotary_dim rotary_emb_base rotary_emb_fraction
    rotary_emb_interleaved rotary_emb_scale_base rotary_embedding_base rotary_pct rotary_percent
    rotary_value routed_scaling_factor router_bias_update_speed router_jitter_noise
    router_scaling_factor router_type runner_max_sequence_length sample_rate
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth
    scale_emb scale_embeddings scale_fmt score_function scoring_func seq_aux short_factor slow_but_exact
    spatial_merge_size ssm_in_multiplier ssm_multipliers ssm_out_multiplier summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    swa_rope_theta swiglu_alpha swiglu_limit swiglu_limits task_specific_params temperature
    text_model_id tf_legacy_loss time_step_floor time_step_init_scheme time_step_limit time_step_max
    time_step_min time_step_scale token_type_ids tokenizer_class tokenizer_model_max_length
    tokenizer_name top_p topk_group topk_method torch_dtype torchscript transformers.js_config
    transformers_version typical_p unk_index unk_token_id unsloth_fixed unsloth_version
    use_associative_scan use_bfloat16 use_bidirectional_attention use_cache use_cache_quantization
    use_dynamic_ntk use_flash_attn use_flash_attn_ use_gemma_norm use_grouped_topk use_kernel
    use_logn_attn use_mamba_kernels use_mambapy use_mrope use_mup use_mup_init use_rope
    use_unified_vision_chunk video_placeholder video_processor vision_end_token_id vision_feature_layer
    vision_feature_layers vision_feature_select_strategy vision_soft_tokens_per_image
    vision_start_token_id w_init_variance_scale wsd_style z_loss_weight zero_centered_gamma
    """.split()
)
# Endings of names that no width has; plain tuples, since compiling an expression costs every command 5 ms.
_ENDINGS: Final = (
    "token_id", "token_ids", "_pdrop", "dropout", "dropout_rate", "dropout_prob", "_loss_coef",
    "_loss_coeff", "_loss_weight", "_loss_alpha", "_theta", "_eps", "_epsilon", "initializer_range",
    "init_std", "softcapping", "_softcap", "_token_index", "_tokens_index", "_init_range",
)  # fmt: skip
_VALUES: Final = {
    "position_embedding_type": {"nope", "rope", "rope_gptj", "alibi", "none", "rotary"},
    # The sampler's default, which older files carry; experts chosen by a key of this name would differ.
    "top_k": {"50"},
}
# Words in the names of keys whose "off" still changes what a layer of an unknown class holds or keeps.
_WEIGHTY: Final = (
    "glu", "gate", "mlp", "ffn", "ff_", "kv", "expert", "moe", "tie", "head", "layer", "cache", "attn",
    "attention", "bias", "norm", "window", "share", "hidden", "state", "size", "dim", "rank", "width",
)  # fmt: skip
# Keys every exporter writes, whose "off" is the absence of a part this reader never adds.
_OFF: Final = frozenset(
    (
        "add_cross_attention", "cross_attention_hidden_size", "is_encoder_decoder", "pruned_heads",
        "tie_encoder_decoder", "attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qk_norm", "qk_norm",
        "attn_output_gate", "attention_output_gate", "tie_word_embeddings", "sliding_window",
        "use_sliding_window", "head_dim",
    )
)  # fmt: skip


def is_harmless(key: str, value: object, *, known: bool = True) -> bool:
    """Whether an unread key can be ignored: a name known not to matter, or a value that switches off.

    None, false, zero and empty values describe the absence of something, in a class that is `known`; in an
    unknown one `gated_mlp: false` or `kv_multiplier: null` may describe another layer than the plain one. Any
    other unread value of an unknown key might describe a part that holds memory.
    """
    if key in _EXACT:
        return True
    key = key.rpartition(".")[2]
    if key in _EXACT or key.endswith(_ENDINGS):
        return True
    if key in _VALUES and str(value) in _VALUES[key]:
        return True
    off = value is None or value is False or value in ("", 0, [], {})
    if known and "tie_" not in key:
        return off
    # Whether matrices are shared is told by "false" too, whatever the class.
    return off and (key in _OFF or not any(word in key for word in _WEIGHTY))
