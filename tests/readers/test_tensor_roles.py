"""Roles by name, for names as publishers write them."""

import pytest

from capplan.readers.tensor_roles import mtp_layers, role_of


@pytest.mark.parametrize(
    ("role", "names"),
    [
        (
            "embedding",
            "model.embed_tokens.weight model.language_model.embed_tokens.weight "
            "transformer.wte.weight transformer.wpe.weight gpt_neox.embed_in.weight "
            "transformer.word_embeddings.weight model.tok_embeddings.weight "
            "backbone.embeddings.weight embed.weight shared.weight "
            "model.embed_tokens_per_layer.weight token_embd.weight per_layer_token_embd.weight "
            "position_embd.weight transformer.embedding.word_embeddings.weight",
        ),
        (
            "lm_head",
            "lm_head.weight lm_head.bias lm_head.qweight output.weight head.weight "
            "embed_out.weight language_model.lm_head.weight transformer.output_layer.weight "
            "lm_head.weight_scale",
        ),
        (
            "attention",
            "model.layers.0.self_attn.q_proj.weight model.layers.0.self_attn.k_proj.bias "
            "model.layers.31.self_attn.o_proj.qweight model.layers.0.self_attn.sinks "
            "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv "
            "model.layers.3.self_attn.indexer.wq_b.weight transformer.h.0.attn.c_attn.weight "
            "transformer.h.0.self_attention.query_key_value.weight "
            "gpt_neox.layers.0.attention.dense.bias layers.0.attn.wq_a.weight "
            "layers.0.attention.wq.weight backbone.layers.7.mixer.q_proj.weight "
            "decoder.block.0.layer.0.SelfAttention.q.weight blk.0.attn_q.weight "
            "blk.3.attn_output.bias blk.0.attn_kv_a_mqa.weight blk.0.attn_sinks.weight "
            "blk.1.indexer.attn_k.weight model.layers.0.self_attn.compressor.gate_proj.weight",
        ),
        (
            "recurrent",
            "model.layers.0.linear_attn.in_proj_qkvz.weight model.layers.0.linear_attn.A_log "
            "backbone.layers.0.mixer.in_proj.weight backbone.layers.0.mixer.A_log "
            "backbone.layers.0.mixer.conv1d.bias model.layers.0.mamba.x_proj.weight "
            "model.layers.2.conv.in_proj.weight blocks.0.att.key.weight blk.0.ssm_in.weight "
            "blk.0.time_mix_key.weight blk.0.shortconv.conv.weight "
            "rwkv.blocks.0.attention.key.weight",
        ),
        (
            "mlp",
            "model.layers.0.mlp.gate_proj.weight model.layers.0.mlp.gate_up_proj.weight "
            "model.layers.0.feed_forward.w1.weight transformer.h.0.mlp.c_fc.bias "
            "model.decoder.layers.0.fc1.weight backbone.layers.1.mixer.up_proj.weight "
            "model.layers.3.mixer.fc1_latent_proj.weight blk.0.ffn_gate.weight blk.0.ffn_up.bias "
            "blk.0.channel_mix_key.weight blocks.0.ffn.key.weight",
        ),
        (
            "experts",
            "model.layers.3.mlp.experts.255.down_proj.weight "
            "model.layers.0.mlp.experts.gate_up_proj "
            "model.layers.0.mlp.experts.gate_up_proj_blocks "
            "model.layers.0.mlp.experts.down_proj_bias "
            "model.layers.0.block_sparse_moe.experts.7.w1.weight layers.3.ffn.experts.0.w1.weight "
            "model.layers.0.block_sparse_moe.input_linear.weight "
            "model.layers.5.moe.up_proj.weight model.layers.0.feed_forward.experts.down_proj "
            "blk.0.ffn_gate_exps.weight blk.0.ffn_gate_up_exps.weight blk.0.ffn_down.7.weight "
            "backbone.layers.1.mixer.experts.0.up_proj.weight",
        ),
        (
            "shared_experts",
            "model.layers.0.mlp.shared_expert.up_proj.weight "
            "model.layers.3.mlp.shared_experts.gate_proj.weight_scale_inv "
            "model.layers.0.mlp.shared_expert_gate.weight "
            "model.layers.0.mlp.shared_mlp.down_proj.weight "
            "model.layers.4.share_expert.down_proj.weight blk.3.ffn_down_shexp.weight "
            "blk.3.ffn_gate_inp_shexp.weight",
        ),
        (
            "router",
            "model.layers.3.mlp.gate.weight model.layers.3.mlp.gate.e_score_correction_bias "
            "model.layers.0.mlp.router.bias model.layers.0.block_sparse_moe.gate.weight "
            "model.layers.0.feed_forward.router.weight "
            "transformer.blocks.0.ffn.router.layer.weight "
            "model.layers.0.block_sparse_moe.e_score_correction_bias layers.0.ffn.gate.tid2eid "
            "model.language_model.layers.0.router.per_expert_scale "
            "backbone.layers.1.mixer.gate.weight blk.3.ffn_gate_inp.weight blk.3.exp_probs_b.bias",
        ),
        (
            "norm",
            "model.norm.weight model.layers.0.input_layernorm.weight "
            "model.layers.0.self_attn.q_norm.weight "
            "model.layers.0.self_attn.kv_a_layernorm.weight transformer.h.0.ln_1.bias "
            "transformer.ln_f.weight backbone.norm_f.weight backbone.layers.0.mixer.norm.weight "
            "layers.0.attn_norm.weight transformer.word_embeddings_layernorm.weight "
            "model.layers.0.post_feedforward_layernorm_1.weight blk.0.attn_norm.weight "
            "blk.0.ffn_norm_exps.weight blk.0.attn_q_a_norm.weight output_norm.weight "
            "token_embd_norm.weight blk.3.indexer.k_norm.bias decoder.final_layer_norm.weight",
        ),
        (
            "vision",
            "visual.blocks.0.attn.qkv.weight model.visual.patch_embed.proj.weight "
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias "
            "vision_model.patch_embedding.linear.weight v.blk.0.attn_q.weight v.patch_embd.weight "
            "model.image_newline",
        ),
        (
            "audio",
            "audio_tower.layers.0.fc1.weight a.blk.0.ln1.weight",
        ),
        (
            "projector",
            "multi_modal_projector.linear_1.weight visual.merger.mlp.0.weight mm.0.weight "
            "mlp1.1.weight model.visual.deepstack_merger_list.0.norm.weight "
            "model.embed_vision.embedding_projection.weight mm.a.fc.weight",
        ),
        (
            "mtp",
            "mtp.layers.0.mlp.up_proj.weight model.layers.61.eh_proj.weight "
            "model.layers.61.enorm.weight model.layers.61.shared_head.head.weight "
            "model.mtp_layers.0.self_attn.q_proj.weight blk.61.nextn.eh_proj.weight "
            "mtp.0.e_proj.weight",
        ),
        (
            "encoder",
            "encoder.block.0.layer.0.SelfAttention.q.weight model.encoder.layers.0.fc1.weight "
            "enc.blk.0.attn_q.weight",
        ),
        (
            "other",
            "rope_freqs.weight layers.0.hc_attn_fn model.layers.0.rotary.weight strange x.y.z",
        ),
    ],
)
def test_roles_of_published_names(role: str, names: str) -> None:
    assert {name: role_of(name) for name in names.split()} == dict.fromkeys(names.split(), role)


def test_the_whole_layer_of_an_mtp_module_is_found() -> None:
    names = [
        "model.layers.60.self_attn.q_a_proj.weight",
        "model.layers.61.self_attn.q_a_proj.weight",
        "model.layers.61.eh_proj.weight",
        "blk.46.nextn.enorm.weight",
        "model.enorm.weight",
        "model.layers.3.input_layernorm.weight",
    ]
    assert mtp_layers(names) == ("blk.46.", "model.layers.61.")


@pytest.mark.parametrize("name", ["", ".", "..", "blk", "blk.0", "blk.", "dec.blk.0.", "v", "a.b"])
def test_any_name_has_a_role(name: str) -> None:
    assert isinstance(role_of(name), str)
