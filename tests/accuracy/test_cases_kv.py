"""Field cases about the KV cache of full and latent attention: rates, replication, what fits a pool."""

from capplan import catalog
from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import rules_for
from capplan.engines.vllm_kv import plan_kv
from capplan.formulas import memory
from capplan.units import GIB, MIB
from capplan.weights import weight_budget
from tests.accuracy import shapes
from tests.accuracy.cases import FieldCase, field_case
from tests.accuracy.kv_cache import longest_context, pool_tokens, verdict_of


@field_case(
    "bc-003",
    "vllm-project/vllm#34076",
    {
        "kv_bytes_per_token_model": 98304,
        "kv_gib_stage0_16_layers": (8.0, 0.001),
        "kv_gib_stage1_32_layers": (16.0, 0.001),
        "max_len_if_3.18_gib_is_on_stage0": (104202, 0.01),
        "max_len_if_3.18_gib_is_on_stage1": (52101, 0.01),
    },
)
def test_bc_003_every_stage_with_its_own_layers(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN3_30B_A3B)
    case.check("kv_bytes_per_token_model", layout.bytes_per_token)
    assert layout.sequence_bytes(262144) == 24 * GIB
    model = shapes.read(shapes.QWEN3_30B_A3B)
    for number, layers in enumerate((range(16), range(16, 48))):
        question = KvQuestion(pp=2, stage=layers, rules=rules_for("0.15.0"))
        pool = int(3.18 * GIB)
        kv = plan_kv(model, question, kv_bytes=pool, max_model_len=262144)
        case.check(f"kv_gib_stage{number}_{len(layers)}_layers", kv.need_bytes / GIB)
        case.check(f"max_len_if_3.18_gib_is_on_stage{number}", kv.longest_model_len)
        assert not kv.starts


@field_case(
    "bc-005",
    "OpenRLHF/OpenRLHF#336",
    {
        "kv_bytes_per_token_all_gpus": 327680,
        "kv_pool_gib_all_gpus": (1.846, 0.01),
        "kv_gib_needed_all_gpus": (2.5, 0.001),
    },
)
def test_bc_005_378_blocks_are_6048_tokens(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_3_70B)
    case.check("kv_bytes_per_token_all_gpus", layout.bytes_per_token)
    case.check("kv_pool_gib_all_gpus", layout.paged_bytes(378 * 16, 16) / GIB)
    case.check("kv_gib_needed_all_gpus", layout.paged_bytes(8192, 16) / GIB)
    pool = round(378 * layout.paged_bytes(1, 16))
    verdict = verdict_of(layout, pool=pool, context=8192, block_size=16)
    assert (verdict.max_context, verdict.fits) == (6048, False)


@field_case(
    "bc-006",
    "Graph-COM/SubgraphRAG#19",
    {
        "kv_gib_needed_one_request": (16.0, 0.001),
        "kv_pool_gib": (4.76, 0.01),
        "largest_max_model_len": (39024, 0.01),
    },
)
def test_bc_006_longest_length_instead_of_the_default(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_3_8B)
    case.check("kv_gib_needed_one_request", layout.sequence_bytes(131072) / GIB)
    case.check("kv_pool_gib", layout.sequence_bytes(39024) / GIB)
    case.check("largest_max_model_len", longest_context(layout, 4.76))


@field_case(
    "bc-007",
    "QwenLM/Qwen3#295",
    {
        "kv_bytes_per_token": 524288,
        "kv_pool_gib": (3.586, 0.01),
        "kv_gib_needed": (16.0, 0.001),
    },
)
def test_bc_007_all_heads_keep_keys_and_values(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN15_7B)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_pool_gib", layout.sequence_bytes(7344) / GIB)
    case.check("kv_gib_needed", layout.sequence_bytes(32768) / GIB)


@field_case(
    "bc-009",
    "vllm-project/vllm#22291",
    {
        "kv_bytes_per_token": 57344,
        "kv_gib_per_request": (0.164, 0.01),
        "overestimate_factor": (28.0, 0.001),
    },
)
def test_bc_009_bits_for_bytes_and_all_heads(case: FieldCase) -> None:
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False, "sym": True}
    layout = shapes.layout({**shapes.QWEN25_7B, "quantization_config": gptq})
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_gib_per_request", layout.sequence_bytes(3072) / GIB)
    case.check("overestimate_factor", 2 * 3584 * 28 * 8 / layout.bytes_per_token)


@field_case(
    "bc-010",
    "vllm-project/vllm#14350",
    {
        "kv_bytes_per_token": 28672,
        "kv_bytes_per_token_by_their_formula": 172032,
        "formula_overcount": 6.0,
        "kv_mib_per_4096_request": (112.0, 0.001),
    },
)
def test_bc_010_hidden_size_in_place_of_kv_heads(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN25_15B)
    mha = memory.mha_kv_cache_bytes(layers=28, batch=1, context=1, hidden=1536, kv_dtype_bytes=2)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_bytes_per_token_by_their_formula", mha)
    case.check("formula_overcount", mha / layout.bytes_per_token)
    case.check("kv_mib_per_4096_request", layout.sequence_bytes(4096) / MIB)


@field_case(
    "bc-029",
    "vllm-project/vllm#9995",
    {
        "target_kv_bytes_per_token_per_gpu": 81920,
        "draft_kv_bytes_per_token_on_its_gpu": 131072,
        "draft_weights_gib": (15.0, 0.02),
        "combined_rate_on_rank0": 212992,
        "rank0_capacity_loss_vs_target_only": (0.615, 0.01),
    },
)
def test_bc_029_a_draft_at_tp_1_costs_more_than_the_target_shard(case: FieldCase) -> None:
    target = shapes.layout(shapes.LLAMA_3_70B, tp=4).bytes_per_token
    draft = shapes.layout(shapes.LLAMA_3_8B).bytes_per_token
    case.check("target_kv_bytes_per_token_per_gpu", target)
    case.check("draft_kv_bytes_per_token_on_its_gpu", draft)
    case.check("draft_weights_gib", weight_budget(shapes.read(shapes.LLAMA_3_8B), None).bytes / GIB)
    case.check("combined_rate_on_rank0", target + draft)
    case.check("rank0_capacity_loss_vs_target_only", 1 - target / (target + draft))


@field_case(
    "bc-045",
    "vllm-project/vllm#5248",
    {
        "kv_bytes_per_token_per_gpu": 262144,
        "capacity_tokens": 8112,
        "kv_gib_per_gpu": (1.98, 0.01),
        "kv_gib_per_gpu_for_16384": (4.0, 0.001),
    },
)
def test_bc_045_the_block_count_is_per_rank(case: FieldCase) -> None:
    layout = shapes.layout(shapes.DEEPSEEK_CODER_67B, tp=2)
    case.check("kv_bytes_per_token_per_gpu", layout.bytes_per_token)
    blocks = 507 * layout.paged_bytes(1, 16)
    case.check("capacity_tokens", pool_tokens(layout, blocks / GIB))
    case.check("kv_gib_per_gpu", blocks / GIB)
    case.check("kv_gib_per_gpu_for_16384", layout.sequence_bytes(16384) / GIB)


@field_case(
    "bc-050",
    "huggingface/transformers#48566",
    {
        "ratio": (4.0, 0.01),
        "kv_bytes_per_token_per_gpu": 65536,
        "pool_gib_per_gpu": (50.9, 0.02),
    },
)
def test_bc_050_a_rank_holds_a_quarter_of_the_heads(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN3_32B, tp=4)
    whole = shapes.layout(shapes.QWEN3_32B)
    case.check("kv_bytes_per_token_per_gpu", layout.bytes_per_token)
    case.check("pool_gib_per_gpu", 3258 * layout.paged_bytes(1, 256) / GIB)
    pool = 3258 * layout.paged_bytes(1, 256) / GIB
    case.check("ratio", pool_tokens(layout, pool, 256) / pool_tokens(whole, pool, 256))


@field_case(
    "bc-051",
    "tenstorrent/vllm#50",
    {"kv_heads_per_device": 1, "kv_parallel_factor": 8},
)
def test_bc_051_never_less_than_one_head(case: FieldCase) -> None:
    one_head = 2 * 80 * 128 * 2
    rates = {tp: shapes.layout(shapes.LLAMA_3_70B, tp=tp).bytes_per_token for tp in (1, 8, 16, 32)}
    case.check("kv_heads_per_device", rates[32] / one_head)
    case.check("kv_parallel_factor", rates[1] / rates[32])
    assert rates[8] == rates[16] == rates[32]


@field_case(
    "bc-052",
    "zartbot/shallowsim#4",
    {"kv_bytes_per_token_per_gpu_any_tp": 70272, "kv_bytes_per_token_all_gpus_tp8": 562176},
)
def test_bc_052_every_rank_holds_the_whole_latent(case: FieldCase) -> None:
    rates = {tp: shapes.layout(shapes.DEEPSEEK_V3, tp=tp).bytes_per_token for tp in (1, 4, 8)}
    assert len(set(rates.values())) == 1
    case.check("kv_bytes_per_token_per_gpu_any_tp", rates[4])
    case.check("kv_bytes_per_token_all_gpus_tp8", 8 * rates[8])


@field_case(
    "bc-055",
    "sgl-project/sglang#18263",
    {
        "kv_bytes_per_token": 98304,
        "kv_gib": (152.88, 0.001),
        "kv_gib_before_fix": (203.89, 0.001),
    },
)
def test_bc_055_tokens_back_to_bytes(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN3_30B_A3B)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_gib", layout.sequence_bytes(1669816) / GIB)
    case.check("kv_gib_before_fix", layout.sequence_bytes(2227073) / GIB)


@field_case(
    "bc-068",
    "LMCache/LMCache#694",
    {
        "kv_bytes_per_token": 70272,
        "kv_bytes_per_token_in_change": 124928,
        "overcount": (1.778, 0.001),
    },
)
def test_bc_068_a_latent_is_stored_once(case: FieldCase) -> None:
    layout = shapes.layout(shapes.DEEPSEEK_V3)
    twice = memory.kv_bytes_per_token(layers=61, kv_heads=1, head_dim=512, kv_dtype_bytes=2)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_bytes_per_token_in_change", twice)
    case.check("overcount", twice / layout.bytes_per_token)


@field_case(
    "bc-069",
    "NVIDIA/Model-Optimizer#2482",
    {
        "mistral_kv_bytes_per_token": 163840,
        "mistral_error": (0.25, 0.001),
        "gptoss_kv_bytes_per_token_all_full": 49152,
        "gptoss_error": (-0.297, 0.001),
        "gemma3_12b_error": (-0.062, 0.001),
    },
)
def test_bc_069_head_dim_is_not_the_quotient(case: FieldCase) -> None:
    def error(config: shapes.Config) -> float:
        right = shapes.layout(config).bytes_per_token
        quotient = config["hidden_size"] // config["num_attention_heads"]
        return shapes.layout({**config, "head_dim": quotient}).bytes_per_token / right - 1

    case.check("mistral_kv_bytes_per_token", shapes.layout(shapes.MISTRAL_SMALL_24B).bytes_per_token)
    case.check("mistral_error", error(shapes.MISTRAL_SMALL_24B))
    case.check("gptoss_kv_bytes_per_token_all_full", shapes.layout(shapes.GPT_OSS_20B).bytes_per_token)
    case.check("gptoss_error", error(shapes.GPT_OSS_20B))
    # -6.25 %, which the report rounds.
    case.check("gemma3_12b_error", round(error(shapes.GEMMA_3_12B) + 1e-9, 3))


@field_case(
    "bc-070",
    "KolosalAI/model-memory-calculator#2",
    {"kv_bytes_per_token": 131072, "kv_bytes_per_token_wrong": 524288, "overcount": 4.0},
)
def test_bc_070_embedding_length_is_not_the_kv_width(case: FieldCase) -> None:
    right = shapes.layout(shapes.LLAMA_3_8B).bytes_per_token
    wrong = memory.mha_kv_cache_bytes(layers=32, batch=1, context=1, hidden=4096, kv_dtype_bytes=2)
    case.check("kv_bytes_per_token", right)
    case.check("kv_bytes_per_token_wrong", wrong)
    case.check("overcount", wrong / right)


@field_case(
    "bc-071",
    "jranaraki/vllm-fit#2",
    {"kv_bytes_per_token": 524288, "formula_bytes_per_token": 4194304, "overcount": 8.0},
)
def test_bc_071_heads_times_hidden(case: FieldCase) -> None:
    right = shapes.layout(shapes.LLAMA_2_7B).bytes_per_token
    case.check("kv_bytes_per_token", right)
    case.check("formula_bytes_per_token", 2 * 32 * 32 * 4096 * 4 / 8)
    case.check("overcount", 2 * 32 * 32 * 4096 * 4 / 8 / right)


@field_case(
    "bc-076",
    "vllm-project/vllm#10927",
    {
        "kv_bytes_per_token_materialised": (442368, 0.001),
        "kv_bytes_per_token_mla": 31104,
        "saving": (14.2, 0.01),
        "mla_tokens_in_same_pool": (1222734, 0.01),
    },
)
def test_bc_076_the_latent_holds_fourteen_times_the_tokens(case: FieldCase) -> None:
    layout = shapes.layout(shapes.DEEPSEEK_V2_LITE)
    case.check("kv_bytes_per_token_mla", layout.bytes_per_token)
    # Before the latent was stored; 5,373 blocks and 10.49 requests as logged.
    old = plan_kv(
        shapes.read(shapes.DEEPSEEK_V2_LITE),
        KvQuestion(rules=rules_for("0.6.4")),
        kv_bytes=int(35.42 * GIB),
        max_model_len=8192,
    )
    assert (old.num_blocks, round(old.max_concurrency, 2)) == (5373, 10.49)
    materialised = old.page_bytes / old.block_size
    case.check("kv_bytes_per_token_materialised", materialised)
    case.check("saving", materialised / layout.bytes_per_token)
    case.check("mla_tokens_in_same_pool", pool_tokens(layout, 35.42))


@field_case(
    "bc-077",
    "NVIDIA/TensorRT-LLM#1400",
    {
        "kv_bytes_per_token": 524288,
        "kv_gib_for_5_beams_of_5120": (12.5, 0.001),
        "tokens_needed": 25600,
    },
)
def test_bc_077_needed_is_not_what_will_be_allocated(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_2_7B)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_gib_for_5_beams_of_5120", 5 * layout.sequence_bytes(4096 + 1024) / GIB)
    case.check("tokens_needed", 5 * layout.sequence_bytes(5120) / layout.bytes_per_token)


@field_case(
    "bc-079",
    "NVIDIA/TensorRT-LLM#224",
    {
        "trtllm_kv_gib": (5.23, 0.001),
        "vllm_claim_gib": (65.2, 0.001),
        "vllm_max_possible_tokens": (14416, 0.1),
        "claim_possible": False,
    },
)
def test_bc_079_a_claim_larger_than_the_card(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_2_7B)
    weights = weight_budget(shapes.read(shapes.LLAMA_2_7B), None).bytes
    case.check("trtllm_kv_gib", layout.sequence_bytes(10718) / GIB)
    claim = 8348 * layout.paged_bytes(1, 16)
    case.check("vllm_claim_gib", claim / GIB)
    # 0.9 of the 22.1 GiB CUDA shows, 0.3 GiB beside the weights.
    pool = 0.9 * 22.1 - weights / GIB - 0.3
    case.check("vllm_max_possible_tokens", pool_tokens(layout, pool))
    case.check("claim_possible", claim <= pool * GIB)


@field_case(
    "bc-083",
    "ggml-org/llama.cpp#8101",
    {"kv_bytes_per_token": 131072, "kv_gib": 128.0, "extra_bytes": 32},
)
def test_bc_083_a_million_tokens_of_an_8b(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_3_8B)
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    case.check("kv_gib", layout.sequence_bytes(1 << 20) / GIB)
    case.check("extra_bytes", 137438953504 - layout.sequence_bytes(1 << 20))


@field_case(
    "bc-090",
    "ollama/ollama#5756",
    {"kv_tokens": 131072, "kv_gib": 16.0, "weights_gib": (4.3, 0.05)},
)
def test_bc_090_slots_multiply_the_context(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_3_8B)
    case.check("kv_tokens", 64 * layout.sequence_bytes(2048) / layout.bytes_per_token)
    case.check("kv_gib", 64 * layout.sequence_bytes(2048) / GIB)
    stored = catalog.weight_format("q4_0")
    case.check("weights_gib", weight_budget(shapes.read(shapes.LLAMA_3_8B), stored).bytes / GIB)


@field_case(
    "bc-093",
    "ollama/ollama#17201",
    {"kv_gib_formula": (6.75, 0.001), "kv_gib_expanded": (8.44, 0.001), "kv_gib_latent": (0.95, 0.002)},
)
def test_bc_093_the_latent_not_the_expanded_heads(case: FieldCase) -> None:
    layout = shapes.layout(shapes.DEEPSEEK_V2_LITE)
    quotient = memory.kv_bytes_per_token(layers=27, kv_heads=16, head_dim=2048 // 16, kv_dtype_bytes=2)
    case.check("kv_gib_formula", quotient * 32768 / GIB)
    # As a loader without latent attention keeps it: keys of 192 and values of 128 for every head.
    expanded = memory.kv_entry_bytes(heads=16, k_width=192, v_width=128, element_bits=16, extra_bytes=0)
    case.check("kv_gib_expanded", 27 * expanded * 32768 / GIB)
    case.check("kv_gib_latent", layout.sequence_bytes(32768) / GIB)


@field_case(
    "bc-094",
    "lmstudio-ai/lmstudio-bug-tracker#14",
    {"kv_gib_1048576": 320.0, "kv_gib_57344": (17.5, 0.001)},
)
def test_bc_094_a_million_tokens_of_a_70b(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_3_70B)
    case.check("kv_gib_1048576", layout.sequence_bytes(1 << 20) / GIB)
    case.check("kv_gib_57344", layout.sequence_bytes(57344) / GIB)


@field_case(
    "bc-105",
    "b4rtaz/distributed-llama#157",
    {
        "expression_gib": (0.98, 0.001),
        "kv_gib_f32": (28.0, 0.001),
        "kv_gib_f32_per_node": (7.0, 0.001),
    },
)
def test_bc_105_every_factor_has_a_name(case: FieldCase) -> None:
    whole = shapes.layout(shapes.LLAMA_32_3B, kv_dtype="fp32")
    node = shapes.layout(shapes.LLAMA_32_3B, kv_dtype="fp32", tp=4)
    case.check("expression_gib", round((3072 * 8 / 24) * 128256 * 2 * 4 / GIB, 2))
    case.check("kv_gib_f32", whole.sequence_bytes(131072) / GIB)
    case.check("kv_gib_f32_per_node", node.sequence_bytes(131072) / GIB)


@field_case("bc-201", "Osmantic/ODS#3375", {"kv_gib_32768": 4.5, "kv_gib_262144": 36.0})
def test_bc_201_reference_rate_of_36_layers(case: FieldCase) -> None:
    config = shapes.dense(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128)
    layout = shapes.layout(config)
    assert layout.bytes_per_token == 147456
    case.check("kv_gib_32768", layout.sequence_bytes(32768) / GIB)
    case.check("kv_gib_262144", layout.sequence_bytes(262144) / GIB)
