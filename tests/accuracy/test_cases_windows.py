"""Field cases about layers that do not keep everything: windows, chunks, recurrent states."""

import pytest

from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import rules_for
from capplan.engines.vllm_kv import kv_pool, plan_kv
from capplan.formulas import memory
from capplan.units import GIB, KIB, MIB
from tests.accuracy import shapes
from tests.accuracy.cases import FieldCase, field_case
from tests.accuracy.kv_cache import longest_context


@field_case(
    "bc-002",
    "vllm-project/vllm#16118",
    {
        "kv_bytes_per_token_per_gpu_all_layers": 24576,
        "kv_gib_one_request_all_layers_full": (24.0, 0.001),
        "max_len_all_layers_full": (435595, 0.01),
        "kv_gib_one_request_local_layers_windowed": (6.14, 0.05),
    },
)
def test_bc_002_chunked_layers_hold_a_chunk_not_a_million_tokens(case: FieldCase) -> None:
    layout = shapes.layout(shapes.LLAMA_4_SCOUT, tp=8)
    assert layout.by_kind() == {"chunked": 24576 * 36 / 48, "full": 24576 * 12 / 48}
    case.check("kv_bytes_per_token_per_gpu_all_layers", layout.bytes_per_token)
    all_full = {**shapes.LLAMA_4_SCOUT, "no_rope_layers": [0] * 48}
    every = shapes.layout(all_full, tp=8)
    case.check("kv_gib_one_request_all_layers_full", every.sequence_bytes(1 << 20) / GIB)
    case.check("max_len_all_layers_full", longest_context(every, 9.97))
    case.check("kv_gib_one_request_local_layers_windowed", layout.sequence_bytes(1 << 20) / GIB)
    assert longest_context(layout, 9.97) > 1 << 20


@field_case(
    "bc-023",
    "mitchross/talos-argocd-proxmox#1995",
    {
        "kv_bytes_per_token_all_gpus": 32768,
        "attention_kv_gib": (9.24, 0.01),
        "state_and_padding_gib": (0.74, 0.15),
        "blocks_for_262144": 168,
    },
)
def test_bc_023_only_the_attention_layers_grow(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN36_27B, kv_dtype="fp8")
    pool = int(4.99 * GIB)
    # The tokens logged, to the token, by the rules of 0.26 to 0.28.
    kv = plan_kv(
        shapes.read(shapes.QWEN36_27B),
        KvQuestion(kv_bits=8, tp=2, max_num_batched_tokens=8192, rules=rules_for("0.26.0")),
        kv_bytes=pool,
        max_model_len=131072,
    )
    assert (kv.tokens, kv.block_size, round(kv.max_concurrency, 2)) == (302921, 1568, 2.31)
    case.check("kv_bytes_per_token_all_gpus", layout.bytes_per_token)
    case.check("attention_kv_gib", kv.tokens * layout.bytes_per_token / GIB)
    case.check("state_and_padding_gib", (2 * pool - kv.tokens * layout.bytes_per_token) / GIB)
    case.check("blocks_for_262144", -(-262144 // kv.block_size))
    assert (kv.longest_model_len or 0) > 262144


@field_case(
    "bc-064",
    "alvarobartt/hf-mem#70",
    {
        "kv_gib_window_exact": (6.09, 0.005),
        "kv_gib_all_full": (12.0, 0.001),
        "kv_gib_engine_rule_2048_batched": (7.61, 0.02),
        "kv_gib_engine_rule_8192_batched": (12.01, 0.02),
    },
)
def test_bc_064_window_against_all_full(case: FieldCase) -> None:
    for batched in (2048, 8192):
        question = KvQuestion(max_num_batched_tokens=batched, rules=rules_for("0.11.0"))
        pool = kv_pool(shapes.read(shapes.GPT_OSS_20B), question)
        case.check(f"kv_gib_engine_rule_{batched}_batched", 32 * pool.request_bytes(8192) / GIB)
    layout = shapes.layout(shapes.GPT_OSS_20B)
    case.check("kv_gib_window_exact", 32 * layout.sequence_bytes(8192) / GIB)
    # As an engine reserves it that keeps every token in every layer.
    case.check("kv_gib_all_full", 32 * 8192 * layout.bytes_per_token / GIB)


@field_case(
    "bc-066",
    "ai-dynamo/aiconfigurator#1201",
    {"gptoss20b_rate_at_len_1": 49152, "gptoss20b_mean_rate_at_8192": (24960, 0.005)},
)
def test_bc_066_capacity_by_inverting_the_curve(case: FieldCase) -> None:
    layout = shapes.layout(shapes.GPT_OSS_20B)
    case.check("gptoss20b_rate_at_len_1", layout.sequence_bytes(1))
    case.check("gptoss20b_mean_rate_at_8192", layout.sequence_bytes(8192) / 8192)
    # The memory of one 8192-token sequence holds 8192 tokens, not 49152-byte ones (4160).
    assert longest_context(layout, layout.sequence_bytes(8192) / GIB) == 8192


@field_case(
    "bc-095",
    "lmstudio-ai/lmstudio-bug-tracker#1862",
    {"kv_mib": 16384, "kv_mib_if_all_layers": 65536, "state_mib_per_sequence": (149.6, 0.001)},
)
def test_bc_095_recurrent_layers_hold_a_state(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN36_27B)
    attention = layout.sequence_bytes(262144) - layout.state_bytes
    case.check("kv_mib", attention / MIB)
    all_full = shapes.layout(shapes.dense(64, 5120, 24, 4, 17408, 248320, head_dim=256))
    case.check("kv_mib_if_all_layers", all_full.sequence_bytes(262144) / MIB)
    # llama.cpp keeps the whole state in fp32; capplan follows the config: fp32 for the recurrence,
    # 16 bits for the three tokens the convolution looks back on (48 layers × 10,240 channels × 3).
    convolution = 48 * (2 * 16 * 128 + 48 * 128) * 3 * 2
    case.check("state_mib_per_sequence", (layout.state_bytes + convolution) / MIB)


@field_case(
    "bc-096",
    "tmac1973/llama-toolchest#58",
    {"kv_gib": (1.23, 0.02), "kv_gib_uniform": (47.8, 0.005), "overcount": (38.9, 0.02)},
)
def test_bc_096_per_layer_heads_and_windows(case: FieldCase) -> None:
    layout = shapes.layout(shapes.GEMMA_4_12B, kv_dtype="q8_0")
    right = layout.sequence_bytes(131072) / GIB
    uniform = shapes.layout(shapes.dense(48, 3840, 16, 16, 15360, 262144, head_dim=240), kv_dtype="q8_0")
    wrong = uniform.sequence_bytes(131072) / GIB
    case.check("kv_gib", right)
    case.check("kv_gib_uniform", wrong)
    case.check("overcount", wrong / right)


@field_case(
    "bc-097",
    "raullenchai/Rapid-MLX#1423",
    {"growth_kib_per_token": 16, "uniform_kib_per_token": 384, "guide_kib_per_token": 128},
)
def test_bc_097_each_layer_type_with_its_own_width(case: FieldCase) -> None:
    layout = shapes.layout(shapes.GEMMA_4_12B)
    case.check("growth_kib_per_token", layout.by_kind()["full"] / KIB)
    # Past the window only the full layers grow.
    grown = layout.sequence_bytes(5000) - layout.sequence_bytes(4999)
    assert grown == 16 * KIB
    rates = {
        name: memory.kv_bytes_per_token(layers=layers, kv_heads=8, head_dim=width, kv_dtype_bytes=2)
        for name, layers, width in (("uniform", 48, 256), ("guide", 8, 512))
    }
    case.check("uniform_kib_per_token", rates["uniform"] / KIB)
    case.check("guide_kib_per_token", rates["guide"] / KIB)


@field_case(
    "bc-102",
    "tobocop2/lilbee#721",
    {
        "kv_gib": (2.125, 0.001),
        "kv_gib_all_layers": (8.5, 0.001),
        "kv_overcharge_gib": (6.38, 0.001),
    },
)
def test_bc_102_sixteen_of_64_layers(case: FieldCase) -> None:
    layout = shapes.layout(shapes.QWEN36_27B, kv_dtype="q8_0")
    right = layout.by_kind()["full"] * 65536 / GIB
    every = shapes.dense(64, 5120, 24, 4, 17408, 248320, head_dim=256)
    wrong = shapes.layout(every, kv_dtype="q8_0").sequence_bytes(65536) / GIB
    case.check("kv_gib", right)
    case.check("kv_gib_all_layers", wrong)
    case.check("kv_overcharge_gib", wrong - right)


@field_case(
    "bc-106",
    "sammcj/gollama#117",
    {
        "kv_gib_all_full": (2.88, 0.001),
        "kv_gib_window_4096": (2.16, 0.001),
        "formula_gib": (0.92, 0.001),
    },
)
def test_bc_106_layers_counted_and_windows_kept(case: FieldCase) -> None:
    # The script's own: no layers, the width times the heads it had (16), 6.56 bits; as the report rounds.
    case.check("formula_gib", round(2 * 8192 * 4608 * 16 * 6.56 / 8 / GIB, 2))
    layout = shapes.layout(shapes.GEMMA_2_27B)
    case.check("kv_gib_all_full", round(layout.bytes_per_token * 8192 / GIB, 2))
    case.check("kv_gib_window_4096", round(layout.sequence_bytes(8192) / GIB, 2))


@field_case(
    "bc-198",
    "unslothai/unsloth#4757",
    {"kv_gib": (10.41, 0.005), "kv_gib_old": (81.38, 0.001), "head_dim_quotient": 168},
)
def test_bc_198_explicit_head_dim_and_every_sixth_layer_full(case: FieldCase) -> None:
    config = shapes.GEMMA_3_27B
    quotient = config["hidden_size"] // config["num_attention_heads"]
    old = shapes.dense(62, 5376, 32, 16, 21504, 262208, head_dim=quotient)
    case.check("kv_gib", shapes.layout(config).sequence_bytes(131072) / GIB)
    case.check("kv_gib_old", shapes.layout(old).sequence_bytes(131072) / GIB)
    case.check("head_dim_quotient", quotient)


@pytest.mark.parametrize("tokens", [1, 4095, 4096, 8192])
def test_a_window_bounds_what_a_layer_keeps(tokens: int) -> None:
    layout = shapes.layout(shapes.GEMMA_2_27B)
    one_kind = layout.bytes_per_token / 2
    assert layout.sequence_bytes(tokens) == one_kind * (tokens + min(tokens, 4096))
