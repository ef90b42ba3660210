"""llama.cpp's architecture names: which Hugging Face class each is, and what its file leaves unsaid.

Source: llama.cpp of llama-cpp-python 0.3.36 (src/llama-arch.cpp, src/models/*.cpp, conversion/*.py),
read 2026-11-29. Names not listed are refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """One value of general.architecture.

    `model_type` is the class of config.json (`moe_type` where the file has experts). `every`: every so many
    layers one attends everywhere where the file has a window and no pattern (`first`: the first of them,
    else the last); 0: no windows, whatever the file says. `window` is used when the file gives none.
    `recurrent` is the kind of the layers without attention; linear-attention families attend in every
    `interval`-th layer where the file does not say. `form` names the families whose keys need more
    than renaming. `also` are keys of the class that no GGUF key carries.
    """

    model_type: str
    moe_type: str = ""
    every: int = 0
    first: bool = False
    window: int | None = None
    recurrent: Literal["", "mamba", "linear_attention", "conv", "hybrid"] = ""
    interval: int = 4
    form: Literal[
        "", "searched", "single", "falcon", "two-widths", "chunked", "compressed", "kda", "mamba1"
    ] = ""
    also: Mapping[str, object] = field(default_factory=dict)


def _same(*names: str, **values: str) -> dict[str, GgufArchitecture]:
    """Families whose keys only change names: GGUF's name where Hugging Face's is the same, else given."""
    made = {name: GgufArchitecture(model_type=name) for name in names}
    return made | {gguf: GgufArchitecture(model_type=kind) for gguf, kind in values.items()}


# The converter has rounded the width already.
_AS_WRITTEN: Final[Mapping[str, object]] = {"block_auto_adjust_ff_dim": False}
_KIMI_K3: Final[Mapping[str, object]] = {"mla_use_output_gate": True, "latent_moe_use_norm": True}

ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = {
    **_same(
        "apertus",
        "arcee",
        "baichuan",
        "bitnet",
        "bloom",
        "chatglm",
        "dbrx",
        "deepseek",
        "dots1",
        "ernie4_5",
        "exaone",
        "gemma",
        "gpt2",
        "granite",
        "granitemoe",
        "hy_v3",
        "internlm2",
        "jais2",
        "minicpm",
        "minicpm3",
        "mistral4",
        "mpt",
        "nemotron",
        "olmo",
        "olmoe",
        "orion",
        "phimoe",
        "qwen",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "arctic",
        # GGUF writes - and no _ where Hugging Face writes _
        gptneox="gpt_neox",
        qwen2vl="qwen2",
        qwen2moe="qwen2_moe",
        qwen3moe="qwen3_moe",
        qwen3vl="qwen3",
        qwen3vlmoe="qwen3_moe",
        phi2="phi",
        glm4="glm4",
        glm4moe="glm4_moe",
        starcoder="gpt_bigcode",
        bailingmoe="bailing_moe",
        deepseek32="deepseek_v32",
    ),
    "phi3": GgufArchitecture(model_type="phi3"),
    "llama": GgufArchitecture(model_type="llama", moe_type="mixtral"),
    "llama4": GgufArchitecture(model_type="llama4_text", every=4, window=8192, form="chunked"),
    "mistral3": GgufArchitecture(model_type="ministral3", moe_type="mixtral"),
    "command-r": GgufArchitecture(model_type="cohere"),
    "deepseek2": GgufArchitecture(model_type="deepseek_v3"),
    "glm-dsa": GgufArchitecture(model_type="glm_moe_dsa"),
    "ernie4_5-moe": GgufArchitecture(model_type="ernie4_5_moe"),
    "hunyuan-dense": GgufArchitecture(model_type="hunyuan_v1_dense"),
    "hunyuan-moe": GgufArchitecture(model_type="hunyuan_v1_moe"),
    "minimax-m2": GgufArchitecture(model_type="minimax_m2"),
    "falcon": GgufArchitecture(model_type="falcon", form="falcon"),
    "deci": GgufArchitecture(model_type="nemotron-nas", form="searched"),
    # windows in a pattern of layers
    "afmoe": GgufArchitecture(model_type="afmoe", every=4),
    "cohere2": GgufArchitecture(model_type="cohere2", every=4),
    "cohere2moe": GgufArchitecture(model_type="cohere2_moe", every=4, first=True),
    "exaone4": GgufArchitecture(model_type="exaone4", every=4),
    "exaone-moe": GgufArchitecture(model_type="exaone_moe", every=4, window=128),
    "gemma2": GgufArchitecture(model_type="gemma2", every=2, window=4096),
    "gemma3": GgufArchitecture(model_type="gemma3_text", every=6),
    "gemma3n": GgufArchitecture(model_type="gemma3n_text", every=5),
    "gemma4": GgufArchitecture(model_type="gemma4_text", every=6, form="two-widths"),
    "gpt-oss": GgufArchitecture(model_type="gpt_oss", every=2),
    "granite_swa": GgufArchitecture(model_type="granite_swa", moe_type="granitemoe_swa", every=4),
    "laguna": GgufArchitecture(model_type="laguna", every=4, first=True),
    "mellum": GgufArchitecture(model_type="mellum", every=4),
    "mimo2": GgufArchitecture(
        model_type="mimo_v2_flash",
        every=6,
        also={"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
    ),
    "olmo2": GgufArchitecture(model_type="olmo2", every=4),
    "deepseek4": GgufArchitecture(model_type="deepseek_v4", form="compressed"),
    # states instead of, or beside, attention
    "falcon-h1": GgufArchitecture(model_type="falcon_h1", recurrent="hybrid"),
    "granitehybrid": GgufArchitecture(model_type="granitemoehybrid", recurrent="mamba"),
    "jamba": GgufArchitecture(model_type="jamba", recurrent="mamba", form="mamba1"),
    "kimi-linear": GgufArchitecture(model_type="kimi_linear", form="kda"),
    "kimi-k3": GgufArchitecture(model_type="kimi_linear", form="kda", also=_KIMI_K3),
    "lfm2": GgufArchitecture(model_type="lfm2", recurrent="conv", also=_AS_WRITTEN),
    "lfm2moe": GgufArchitecture(model_type="lfm2_moe", recurrent="conv", also=_AS_WRITTEN),
    "mamba": GgufArchitecture(model_type="mamba", form="mamba1"),
    "mamba2": GgufArchitecture(model_type="mamba2"),
    "minimax-01": GgufArchitecture(model_type="minimax", recurrent="linear_attention", interval=8),
    "nemotron_h": GgufArchitecture(model_type="nemotron_h", form="single"),
    "nemotron_h_moe": GgufArchitecture(model_type="nemotron_h", form="single"),
    "qwen35": GgufArchitecture(model_type="qwen3_5_text", recurrent="linear_attention"),
    "qwen35moe": GgufArchitecture(model_type="qwen3_5_moe_text", recurrent="linear_attention"),
    "qwen3next": GgufArchitecture(model_type="qwen3_next", recurrent="linear_attention"),
}

OTHER_FILES: Final[Mapping[str, str]] = {
    "clip": "a vision or audio projector (mmproj); give the file of the language model beside it",
    "eagle3": "a draft model without layers of its own kind",
    "dflash": "a draft model without layers of its own kind",
}
"""Files that hold something else than a language model."""

HARMLESS: Final = re.compile(
    r"""rope\..*|.*_epsilon|.*softcapping|.*_scale|(?:attention\.)?scale|logit_scale
    |attention\.(?:causal|clamp_kqv|max_alibi_bias|temperature_.*|rope_pattern|compress_rope_freq_base
       |indexer\.(?:top_k|block_size|local_blocks)|group_norm_groups)
    |expert_(?:gating_func|weights_norm|group_.*)|experts_per_group|swiglu_clamp_.*|activation.*
    |hidden_activation|pooling_type|use_parallel_residual|tensor_data_layout|vocab_size
    |n_deepstack_layers|deepstack_mapping|hash_layer_count|kda\.(?:safe_gate|gate_lower_bound)
    |hyper_connection\.(?:sinkhorn_iterations|epsilon|magnitude)|swin_norm|ssm\.dt_b_c_rms
    |activation_sparsity_scale|altup\..*|embedding_length_out|decoder_start_token_id|classifier\..*
    |interleave_moe_layer_step|token_shift_count|rescale_every_n_layers""",
    re.VERBOSE,
)
"""GGUF keys that do not change memory (which layers have experts is told by their tensors)."""
