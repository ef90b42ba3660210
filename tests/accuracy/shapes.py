"""Published shapes the field cases and traps are about, as config.json mappings typed from public facts."""

from typing import Any

from capplan import catalog
from capplan.kv import KvLayout, kv_layout
from capplan.readers import hf_config
from capplan.specs import Model

Config = dict[str, Any]


def dense(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    *,
    model_type: str = "llama",
    **more: Any,
) -> Config:
    """A gated decoder; `more` overrides and adds keys."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 1 << 21,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA_3_8B = dense(32, 4096, 32, 8, 14336, 128256)
LLAMA_3_70B = dense(80, 8192, 64, 8, 28672, 128256)
LLAMA_2_7B = dense(32, 4096, 32, 32, 11008, 32000)
LLAMA_32_3B = dense(28, 3072, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True)
TINYLLAMA = dense(22, 2048, 32, 4, 5632, 32000)
DEEPSEEK_CODER_67B = dense(32, 4096, 32, 32, 11008, 32256)
MISTRAL_7B = dense(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=None)
MISTRAL_SMALL_24B = dense(40, 5120, 32, 8, 32768, 131072, model_type="mistral", head_dim=128)
MISTRAL_NEMO = dense(40, 5120, 32, 8, 14336, 131072, model_type="mistral", head_dim=128)
QWEN15_7B = dense(32, 4096, 32, 32, 11008, 151936, model_type="qwen2")
QWEN25_7B = dense(28, 3584, 28, 4, 18944, 152064, model_type="qwen2")
QWEN25_15B = dense(28, 1536, 12, 2, 8960, 151936, model_type="qwen2")
QWEN3_06B = dense(28, 1024, 16, 8, 3072, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True)
QWEN3_32B = dense(64, 5120, 64, 8, 25600, 151936, model_type="qwen3", head_dim=128)
GRANITE_2B = dense(40, 2048, 32, 8, 8192, 49155, model_type="granite", tie_word_embeddings=True)
QWEN3_30B_A3B = dense(
    48, 2048, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128,
    num_experts_per_tok=8, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
MIXTRAL_8X7B = dense(
    32, 4096, 32, 8, 14336, 32000, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2
)
DEEPSEEK_V3 = dense(
    61, 7168, 128, 128, 18432, 129280, model_type="deepseek_v3", kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
    moe_layer_freq=1, num_nextn_predict_layers=1,
)  # fmt: skip
DEEPSEEK_V2_LITE = dense(
    27, 2048, 16, 16, 10944, 102400, model_type="deepseek_v2", kv_lora_rank=512, q_lora_rank=None,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=1408,
    n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1,
    moe_layer_freq=1,
)  # fmt: skip
GPT_OSS_20B = dense(
    24, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=32,
    num_experts_per_tok=4, sliding_window=128, attention_bias=True,
    layer_types=["sliding_attention", "full_attention"] * 12,
)  # fmt: skip
GEMMA_2B = dense(
    18, 2048, 8, 1, 16384, 256000, model_type="gemma", head_dim=256, tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip


def gemma2(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> Config:
    """Gemma 2: every second layer keeps 4,096 tokens."""
    return dense(
        layers, hidden, heads, kv_heads, ffn, 256000, model_type="gemma2", head_dim=head_dim,
        sliding_window=4096, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip


GEMMA_2_27B = gemma2(46, 4608, 32, 16, 128, 36864)


def gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> Config:
    """Gemma 3: every sixth layer is full, the others keep 1,024 tokens."""
    return dense(
        layers, hidden, heads, kv_heads, ffn, 262208, model_type="gemma3_text", head_dim=head_dim,
        sliding_window=1024, sliding_window_pattern=6, tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip


GEMMA_3_12B = gemma3(48, 3840, 16, 8, 256, 15360)
GEMMA_3_27B = gemma3(62, 5376, 32, 16, 128, 21504)
# Global layers: one KV head of 512; sliding layers: eight of 256.
GEMMA_4_12B = dense(
    48, 3840, 16, 8, 15360, 262144, model_type="gemma4_text", head_dim=256, global_head_dim=512,
    num_global_key_value_heads=1, attention_k_eq_v=True, sliding_window=1024,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=262144, num_kv_shared_layers=0,
    enable_moe_block=False, use_double_wide_mlp=False, hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 8,
)  # fmt: skip


def qwen35(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> Config:
    """Qwen 3.5/3.6: three gated-delta layers to one of full attention."""
    ffn, kind = (0, "qwen3_5_moe_text") if "num_experts" in more else (17408, "qwen3_5_text")
    config = dense(
        layers, hidden, heads, kv_heads, ffn, 248320, model_type=kind, head_dim=256,
        attn_output_gate=True, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=value_heads,
        linear_value_head_dim=128, mamba_ssm_dtype="float32", mlp_only_layers=[],
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * (layers // 4), **more,
    )  # fmt: skip
    if not ffn:
        del config["intermediate_size"]
    return config


QWEN36_27B = qwen35(64, 5120, 24, 4, 48)
QWEN36_35B_A3B = qwen35(
    40, 2048, 16, 2, 32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
)  # fmt: skip
QWEN35_122B_A10B = qwen35(
    48, 3072, 32, 2, 64, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
)  # fmt: skip
LLAMA_4_SCOUT = dense(
    48, 5120, 40, 8, 8192, 202048, model_type="llama4_text", head_dim=128, intermediate_size_mlp=16384,
    num_local_experts=16, num_experts_per_tok=1, interleave_moe_layer_step=1,
    attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0] * 12, use_qk_norm=True,
)  # fmt: skip
QWEN25_VL_72B: Config = {
    "model_type": "qwen2_5_vl",
    **{key: value for key, value in dense(80, 8192, 64, 8, 29568, 152064).items() if key != "model_type"},
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3456,
        "num_heads": 16, "out_hidden_size": 8192, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "in_chans": 3, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}  # fmt: skip
FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def read(config: Config) -> Model:
    """The model a config describes."""
    kind = hf_config.model_type_of(config)
    return hf_config.read_model(
        config,
        where="a restated config.json",
        name=str(kind),
        architecture=catalog.architecture(kind) if kind else None,
    )


def layout(config: Config, *, kv_dtype: str = "bf16", tp: int = 1) -> KvLayout:
    """Its caches on one rank."""
    bits = catalog.weight_format(kv_dtype).effective_bits
    return kv_layout(read(config), kv_bits=bits, tp=tp)
