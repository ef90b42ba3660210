"""Config keys that do not change memory: names, and shapes of names."""

import re
from typing import Final

_EXACT: Final = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _from_model_config _name_or_path add_cross_attention add_final_layer_norm
    aliases alibi always_use_router apply_query_key_layer_scaling apply_residual_connection_post_layernorm
    attention_multiplier attention_softmax_in_fp32 attention_value_scale attn_config attn_implementation
    attn_logit_softcapping auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens bias_activation_fuse
    bias_dropout_fusion boi_token_index eoi_token_index boundary_token cache_implementation chunk_size
    chunk_size_feed_forward chat_template clip_qkv compress_rope_theta context_window_size
    cross_attention_hidden_size custom_generate
    dim_model_base disable_ngram_loss diversity_penalty do_layer_norm_before do_sample dtype_override
    early_stopping embedding_multiplier emb_scale encoder_no_repeat_ngram_size ep_size expert_dtype
    experts_implementation exponential_decay_length_penalty eoa_token_index fan_in_first
    final_logit_softcapping finetuning_task flash_attn flash_rotary float32_logits
    for_llm_compressor forced_bos_token_id forced_eos_token_id fp32_residual_connection fused_dense
    fuse_norm gate_lower_bound gradient_checkpointing
    hidden_act hidden_activation activation_function activation_situ_beta activation_situ_linear_beta
    activation mlp_hidden_act mamba_hidden_act hidden_dropout head_dropout hc_eps hc_sinkhorn_iters
    id2label ignore_index image_placeholder image_seq_length image_token_index image_token image_grid_pinpoints
    index_share_for_mtp_iteration index_skip_topk_offset index_topk index_topk_freq index_topk_pattern
    indexer_rope_interleave initial_context_length initializer_factor initializer_range input_jitter_noise
    interpolate_factor is_decoder is_encoder_decoder is_llama_config is_causal
    keep_low_precision kv_cache_dtype label2id label_smoothing language language_model_only
    layer_norm_eps layer_norm_epsilon layernorm_epsilon
    length_penalty lm_head_multiplier local_rope_theta logit_scale logits_scaling logits_to_keep
    long_factor short_factor max_length max_new_tokens max_window_layers media_placeholder_token_id min_length
    mlp_multipliers mlp_type key_multiplier ssm_in_multiplier ssm_multipliers ssm_out_multiplier
    attention_in_multiplier attention_out_multiplier
    model_version moe_aux_loss_coeff moe_implementation moe_renormalize moe_router_activation_func
    moe_router_dtype moe_router_enable_expert_bias moe_router_scaling_factor moe_shared_expert_overlap
    mm_tokens_per_image mla_use_nope
    mtp_hybrid_override_pattern mtp_layers_block_type mtp_transformer_layers mtp_use_dedicated_embeddings
    mtp_loss_weight mup_enabled use_mup
    multimodal_projector_bias n_group topk_group num_expert_group no_repeat_ngram_size norm_eps norm_epsilon
    norm_topk_prob normalize_embedding norm_type norm_eps_
    num_beam_groups num_beams num_hash_layers num_logits_to_keep num_return_sequences n_special
    original_max_position_embeddings original_rope original_vocab_size output_attentions output_gate_type
    output_hidden_states output_router_logits output_scores
    parallel_attn partial_rotary_factor post_layer_norm prefix prefill_chunk_size pretraining_tp
    problem_type processor_class projector_hidden_act pruned_heads qk_head_dim qk_layernorm_eps
    qk_nope_scale query_pre_attn_scalar quantization
    remove_invalid_values repetition_penalty reorder_and_upcast_attn rescale_every rescale_prenorm_residual
    residual_in_fp32 residual_multiplier return_dict return_dict_in_generate rms_norm_eps rms_eps
    rope_factor rope_interleave rope_interleaved rope_local_base_freq rope_parameters rope_pct rope_percent
    rope_scaling rope_theta rope_type rope_ratio rope_emb_base rope_traditional rope_scaling_factor
    rotary rotary_base rotary_dim rotary_emb_base rotary_emb_fraction rotary_emb_interleaved
    rotary_emb_scale_base rotary_pct rotary_percent rotary_embedding_base rotary_value
    routed_scaling_factor router_bias_update_speed router_jitter_noise runner_max_sequence_length
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb
    scoring_func score_function scale_fmt seq_aux
    spatial_merge_size summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens swa_rope_theta swiglu_alpha swiglu_limit swiglu_limits
    task_specific_params temperature text_model_id tf_legacy_loss tie_encoder_decoder time_step_floor
    time_step_init_scheme time_step_limit time_step_max time_step_min time_step_scale time_step_rank
    tokenizer_class top_k top_p topk_method torch_dtype torchscript transformers_version
    transformers.js_config typical_p
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_bidirectional_attention use_cache
    use_cache_quantization use_dynamic_ntk use_flash_attn use_flash_attn_ use_gemma_norm use_grouped_topk
    use_kernel use_logn_attn use_mamba_kernels use_associative_scan mamba_kernels use_mrope use_moe_router_bias
    use_routing_bias use_pre_norm use_mtp use_rope use_unified_vision_chunk use_parallel_residual use_xma
    video_placeholder vision_feature_layer vision_feature_select_strategy vision_soft_tokens_per_image
    vision_end_token_id vision_start_token_id max_pixels min_pixels fps video_processor
    wsd_style zero_centered_gamma
    mamba_chunk_size mamba_expand mamba_d_conv quant_kv scale_embeddings
    attention_sink_size embedding_multiplier_scale text_model_type projection_dim_unused
    full_attn_mod num_attn_heads_unused
    """.split()
)
_SHAPES: Final = re.compile(
    r"(token_ids?|_pdrop|dropout|dropout_rate|dropout_prob|_loss_coef|_loss_coeff|_loss_weight|_loss_alpha"
    r"|_theta|_eps|_epsilon|initializer_range|init_std|softcapping|_softcap|_jitter|_noise|_factor_alpha"
    r"|_multiplier|_std|_tokens?_index|_init_range|_alpha)$|^(rope_|rotary_|mrope_|init_|_)"
)


def is_harmless(key: str, value: object) -> bool:
    """Whether an unread key can be ignored: a name known not to matter, or a value that switches off.

    None, false, zero and empty values describe the absence of something; any other unread value of an
    unknown key might describe a part that holds memory.
    """
    if key in _EXACT or _SHAPES.search(key):
        return True
    return value is None or value is False or value in ("", 0, [], {})
