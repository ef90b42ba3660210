"""Field cases about an engine's own rules: fractions, pools, slots, drafts, multimodal worst cases."""

import io
from typing import Any

import pytest

from capplan import model_source
from capplan.engines import multimodal, sglang, vllm, vllm_graphs, vllm_terms
from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import rules_for
from capplan.engines.log_reader import read_log
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.token_pool import token_rate
from capplan.engines.vllm_kv import kv_pool, plan_kv, state_limited_sequences
from capplan.estimate import vram
from capplan.specs import Model
from capplan.units import GIB, MIB
from capplan.weights import weight_budget
from tests.accuracy import shapes
from tests.accuracy.cases import FieldCase, field_case


def vllm_plan(
    model: Model,
    *,
    total_gib: float,
    weights_gib: float,
    activation_gib: float | None = None,
    non_torch_gib: float | None = None,
    **flags: Any,
) -> EnginePlan:
    """vLLM on a GPU of which CUDA sees `total_gib`; activation and non-torch as logged where given."""
    total = round(total_gib * GIB)
    return vllm.plan(
        model,
        weights_bytes=round(weights_gib * GIB),
        total_bytes=total,
        visible_bytes=total,
        activation_bytes=None if activation_gib is None else round(activation_gib * GIB),
        non_torch_bytes=None if non_torch_gib is None else round(non_torch_gib * GIB),
        flags=EngineFlags(**flags),
    )


@field_case(
    "bc-008",
    "vllm-project/vllm#25350",
    {
        "kv_bytes_per_token": (49152, 0.001),
        "kv_gib_needed_221000": (10.12, 0.005),
        "max_len_for_5.59_gib": (122112, 0.005),
    },
)
def test_bc_008_the_pool_goes_by_the_tokens_profiled(case: FieldCase) -> None:
    # The rate and the weights (29.09 GiB in fp8) are those of Qwen3-30B-A3B.
    model = shapes.read(shapes.QWEN3_30B_A3B)
    layout = shapes.layout(shapes.QWEN3_30B_A3B, kv_dtype="fp8")
    case.check("kv_bytes_per_token", layout.bytes_per_token)
    kv = plan_kv(model, KvQuestion(kv_bits=8), kv_bytes=int(5.59 * GIB), max_model_len=221000)
    case.check("kv_gib_needed_221000", kv.need_bytes / GIB)
    case.check("max_len_for_5.59_gib", kv.longest_model_len)
    assert not kv.starts
    pools = [
        vllm_plan(
            model,
            total_gib=47.4,
            weights_gib=29.09,
            version="0.10.2",
            kv_bits=8,
            max_model_len=100000,
            max_num_batched_tokens=tokens,
            max_num_seqs=16,
        ).kv_pool.value
        for tokens in (8192, 100000, 221000)
    ]
    assert pools[0] > pools[1] > pools[2]


@field_case(
    "bc-012",
    "vllm-project/vllm#11251",
    {
        "pool_gib_at_0.90": (3.76, 0.01),
        "kv_bytes_per_token_per_gpu": (65536, 0.005),
        "headroom_gib_at_0.95": (0.79, 0.02),
        "headroom_gib_at_0.90": (1.58, 0.02),
    },
)
def test_bc_012_graphs_outside_the_fraction(case: FieldCase) -> None:
    plans = {
        fraction: vllm_plan(
            shapes.read(shapes.LLAMA_3_8B),
            total_gib=15.77,
            weights_gib=7.51,
            non_torch_gib=0.39,
            activation_gib=2.53,
            version="0.6.4",
            tp=2,
            gpu_memory_utilization=fraction,
            max_model_len=40000,
        )
        for fraction in (0.9, 0.95)
    }
    case.check("pool_gib_at_0.90", plans[0.9].kv_pool.value / GIB)
    case.check("kv_bytes_per_token_per_gpu", shapes.layout(shapes.LLAMA_3_8B, tp=2).bytes_per_token)
    for fraction, plan in plans.items():
        left = plan.terms["total"] - plan.terms["budget"]
        case.check(f"headroom_gib_at_{fraction:.2f}", left / GIB)
    assert "cuda_graphs_outside" in plans[0.9].terms
    kv = plans[0.9].kv
    assert kv is not None
    # 3,852 blocks and 1.54 requests as logged.
    assert abs(kv.num_blocks - 3852) <= 2
    assert round(kv.max_concurrency, 2) == 1.54


@field_case(
    "bc-013",
    "vllm-project/vllm#14452",
    {
        "pool_gib": (14.26, 0.01),
        "kv_bytes_per_token_per_gpu": (131072, 0.003),
        "capacity_tokens": (116784, 0.01),
        "concurrency_at_50000": (2.34, 0.01),
    },
)
def test_bc_013_whole_blocks_of_the_tighter_rank(case: FieldCase) -> None:
    pools = [
        vllm_plan(
            shapes.read(shapes.QWEN3_32B),
            total_gib=31.37,
            weights_gib=weights,
            non_torch_gib=0.33,
            activation_gib=1.77,
            version="0.7.3",
            tp=2,
            gpu_memory_utilization=0.85,
            max_model_len=50000,
        )
        for weights in (10.30, 10.04)
    ]
    tighter = min(pools, key=lambda plan: plan.kv_pool.value)
    case.check("pool_gib", tighter.kv_pool.value / GIB)
    case.check("capacity_tokens", tighter.kv_tokens)
    case.check("concurrency_at_50000", tighter.max_concurrency)
    case.check("kv_bytes_per_token_per_gpu", shapes.layout(shapes.QWEN3_32B, tp=2).bytes_per_token)


@field_case(
    "bc-015",
    "vllm-project/vllm#57475",
    {"untouched_gib_at_0.98": (0.447, 0.02), "untouched_gib_at_0.97": (0.671, 0.02)},
)
def test_bc_015_graph_capture_needs_what_the_fraction_leaves(case: FieldCase) -> None:
    for fraction in (0.98, 0.97):
        plan = vllm_plan(
            shapes.read(shapes.QWEN36_27B),
            total_gib=22.36,
            weights_gib=17.5,
            version="0.29",
            gpu_memory_utilization=fraction,
            kv_bits=8,
            max_model_len=124000,
            max_num_seqs=1,
            max_num_batched_tokens=2048,
        )
        untouched = plan.terms["total"] - plan.terms["budget"]
        case.check(f"untouched_gib_at_{fraction}", untouched / GIB)
        assert (fraction > plan.more["safe_gpu_memory_utilization"]) is (fraction == 0.98)
        assert any("0.97 is safer" in note for note in plan.notes) is (fraction == 0.98)


@field_case(
    "bc-018",
    "gpustack/runner#251",
    {"gpu_total_gib_implied": (23.7, 0.02), "fraction_to_restore": (0.8352, 0.001)},
)
def test_bc_018_a_fraction_across_the_version_change(case: FieldCase) -> None:
    graphs = round(0.36 * GIB)
    visible = vllm_graphs.visible_from_fractions(fraction=0.82, without_graphs=0.8048, graph_bytes=graphs)
    case.check("gpu_total_gib_implied", visible / GIB)
    after = vllm_graphs.fraction_with_graphs(0.82, graph_bytes=graphs, visible_bytes=visible)
    case.check("fraction_to_restore", after)
    before = vllm_graphs.fraction_without_graphs(0.82, graph_bytes=graphs, visible_bytes=visible)
    assert before == pytest.approx(0.8048)
    # The plan's own pools: equal with the converted fraction, on either side of the change.
    common: dict[str, Any] = {"total_gib": visible / GIB, "weights_gib": 7.5, "tp": 2, "max_model_len": 8192}
    more: dict[str, Any] = {"activation_gib": 2.0, "non_torch_gib": 0.3, "max_num_seqs": 64}
    model = model_source.load("8b")
    own = vllm_terms.graph_bytes()
    converted = vllm_graphs.fraction_with_graphs(0.82, graph_bytes=own, visible_bytes=visible)
    old = vllm_plan(model, version="0.19.1", gpu_memory_utilization=0.82, **common, **more)
    new = vllm_plan(model, version="0.27", gpu_memory_utilization=converted, **common, **more)
    assert new.kv_pool.value == pytest.approx(old.kv_pool.value, abs=2)


@field_case("bc-020", "vllm-project/vllm#51041", {"implied_kib_per_token_one_report": (53.8, 0.02)})
def test_bc_020_a_fixed_part_and_a_rate(case: FieldCase) -> None:
    log = read_log(
        io.StringIO(
            "INFO [core.py:70] Initializing a V1 LLM engine (v0.26.0) with config: model='o/m'\n"
            "INFO Available KV cache memory: 7.70 GiB\nINFO GPU KV cache size: 150,000 tokens\n"
        )
    )
    pool, tokens = log.number("kv_pool_bytes"), log.number("kv_tokens")
    assert pool is not None
    assert tokens is not None
    case.check("implied_kib_per_token_one_report", pool / tokens / 1024)
    # A hybrid's printed tokens over one pool: not a constant, but a fixed part and a rate are.
    pool_of = kv_pool(shapes.read(shapes.QWEN36_27B), KvQuestion(kv_bits=8, rules=rules_for("0.26.0")))
    sizes = {length: pool_of.request_bytes(length) for length in (15680, 78400, 156800)}
    rates = [size / length for length, size in sizes.items()]
    assert rates[0] > 1.1 * rates[-1]
    rate = (sizes[78400] - sizes[15680]) / (78400 - 15680)
    fixed = sizes[15680] - rate * 15680
    assert fixed + rate * 156800 == pytest.approx(sizes[156800], rel=1e-9)


@field_case("bc-027", "rwlove/home-ops#13226", {"pool_tokens_at_131072": (188744, 0.01), "max_num_seqs": 95})
def test_bc_027_states_and_context_out_of_one_pool(case: FieldCase) -> None:
    model = shapes.read(shapes.QWEN36_35B_A3B)
    kv = plan_kv(
        model,
        KvQuestion(kv_bits=8, rules=rules_for("0.24.0")),
        kv_bytes=0,
        num_gpu_blocks_override=95,
        max_model_len=131072,
    )
    assert round(kv.max_concurrency, 2) == 1.44
    case.check("pool_tokens_at_131072", kv.tokens)
    case.check("max_num_seqs", state_limited_sequences(kv))


@field_case("bc-030", "sgl-project/sglang#23862")
def test_bc_030_one_token_count_for_the_target_and_the_draft(case: FieldCase) -> None:
    target, draft = (model_source.load(name) for name in ("70b", "8b"))
    weights = [weight_budget(model, None, tp=4).bytes for model in (target, draft)]

    def plan(version: str) -> EnginePlan:
        return sglang.plan(
            target,
            weights_bytes=weights[0],
            extra_bytes=weights[1],
            total_bytes=80 * GIB,
            flags=EngineFlags(version=version, tp=4, gpu_memory_utilization=0.85, draft=draft),
        )

    new, old = plan("0.5.23"), plan("0.5.10")
    rates = [token_rate(model, kv_bits=16, tp=4).total for model in (target, draft)]
    # (static budget − target weights − draft weights) / (target rate + draft rate)
    assert new.kv_tokens == int((new.terms["budget"] - sum(weights)) / sum(rates))
    # Before, the draft's cache of the target's token count came on top.
    assert old.kv_tokens == int((old.terms["budget"] - sum(weights)) / rates[0])
    assert old.terms["draft_kv_cache_outside"] == round(old.kv_tokens * rates[1])


@field_case(
    "bc-033",
    "vllm-project/vllm#22173",
    {"worst_case_mm_tokens": 180224, "ratio_to_profiled_sequence": 22},
)
def test_bc_033_items_a_prompt_times_their_largest(case: FieldCase) -> None:
    largest = multimodal.image_tokens(pixels=12845056, patch=14, merge=2)
    assert largest == 16384
    worst = multimodal.worst_prompt(
        limits={"image": 10, "video": 1},
        item_tokens={"image": largest, "video": largest},
        max_model_len=8192,
        max_num_batched_tokens=8192,
    )
    case.check("worst_case_mm_tokens", worst.tokens)
    case.check("ratio_to_profiled_sequence", worst.tokens / worst.max_model_len)
    # 8,192 / 11 items
    assert (worst.most_items["image"], worst.largest_item) == (0, 744)
    assert "--limit-mm-per-prompt" in (worst.note() or "")


@field_case(
    "bc-034",
    "vllm-project/vllm#12604",
    {"worst_case_mm_tokens": 131072, "budget_gib": (71.19, 0.001), "excess_tokens": 3072},
)
def test_bc_034_a_worst_case_beyond_the_context(case: FieldCase) -> None:
    worst = multimodal.worst_prompt(
        limits={"image": 1, "video": 1},
        item_tokens={"image": 16384, "video": 114688},
        max_model_len=128000,
        max_num_batched_tokens=2048,
    )
    case.check("worst_case_mm_tokens", worst.tokens)
    case.check("excess_tokens", worst.excess)
    assert worst.encoder_budget == 114688
    plan = vllm_plan(
        model_source.load("8b"),
        total_gib=79.1,
        weights_gib=8.41,
        non_torch_gib=0.43,
        version="0.7.2",
        gpu_memory_utilization=0.9,
        max_model_len=128000,
    )
    case.check("budget_gib", plan.terms["budget"] / GIB)


@field_case(
    "bc-040",
    "llm-d/llm-d#787",
    {
        "kv_bytes_per_token_per_gpu": 131072,
        "capacity_tokens": (342999, 0.01),
        "untouched_gib_per_gpu": (3.96, 0.03),
        "sampler_gib": (1.74, 0.01),
    },
)
def test_bc_040_what_lives_in_the_other_five_percent(case: FieldCase) -> None:
    model = shapes.read(shapes.QWEN3_32B)
    plan = vllm_plan(
        model, total_gib=79.1, weights_gib=30.6, version="0.11.0", tp=2, gpu_memory_utilization=0.95
    )
    case.check("untouched_gib_per_gpu", (plan.terms["total"] - plan.terms["budget"]) / GIB)
    sequences = int(plan.flag("max_num_seqs").value)
    assert sequences == 1024
    sampler = vllm_terms.sampler_bytes(model, sequences=sequences, per_logit=12)
    case.check("sampler_gib", sampler / GIB)
    kv = plan_kv(model, KvQuestion(tp=2), kv_bytes=int(41.87 * GIB), max_model_len=40960)
    case.check("kv_bytes_per_token_per_gpu", kv.page_bytes / kv.block_size)
    case.check("capacity_tokens", kv.tokens)


@field_case(
    "bc-041",
    "vllm-project/vllm#23278",
    {
        "budget_gib": (71.2, 0.005),
        "implied_non_kv_gib": (7.36, 0.05),
        "utilization_for_zero_kv": (0.927, 0.01),
    },
)
def test_bc_041_a_negative_pool_with_its_parts(case: FieldCase) -> None:
    plan = vllm_plan(
        model_source.load("gpt-oss-120b"),
        total_gib=79.1,
        weights_gib=65.9651,  # as logged: experts are padded on loading
        version="0.10.1",
        gpu_memory_utilization=0.9,
        max_model_len=32768,
    )
    terms = plan.terms
    beside = terms["activation"] + terms["non_torch"]
    case.check("budget_gib", terms["budget"] / GIB)
    case.check("implied_non_kv_gib", beside / GIB)
    case.check("utilization_for_zero_kv", (terms["weights"] + beside) / terms["total"])
    assert plan.kv_pool.value < 0
    assert plan.starts is False
    assert plan.advice[0].flag.startswith(("--max-num-seqs", "--max-num-batched-tokens"))


@field_case("bc-043", "vllm-project/vllm#19125", {"first_instance_budget_mib": (3275, 0.01)})
def test_bc_043_each_process_holds_more_than_its_budget(case: FieldCase) -> None:
    plan = vllm_plan(
        model_source.load("qwen2.5-0.5b"),
        total_gib=8188 / 1024,
        weights_gib=0.93,
        version="0.9.0",
        gpu_memory_utilization=0.4,
        max_model_len=4096,
    )
    case.check("first_instance_budget_mib", plan.terms["budget"] / MIB)
    estimate = vram(
        "qwen2.5-0.5b",
        gpu_memory_bytes=8188 * MIB,
        users=1,
        engine="vllm",
        engine_flags=EngineFlags(version="0.10.2", gpu_memory_utilization=0.4, max_model_len=4096),
        services=("qwen2.5-0.5b:gpu_memory_utilization=0.4,max_model_len=4096",),
    )
    first, second = estimate.services
    # The fraction is an instance's own, each has a context beside it, and both fit.
    for service in (first, second):
        assert service.takes_bytes > service.plan.terms["budget"] + 256 * MIB
    assert second.free_bytes == first.free_bytes - first.takes_bytes
    assert second.starts is True


@field_case(
    "bc-054",
    "sgl-project/sglang#322",
    {
        "kv_gib_80gib_60gib_weights_fraction_0.85": (8.0, 0.01),
        "kv_gib_80gib_60gib_weights_fraction_0.70": (-4.0, 0.01),
    },
)
def test_bc_054_a_fraction_too_small_and_one_too_large(case: FieldCase) -> None:
    for fraction in ("0.85", "0.70"):
        pool = sglang.pool_bytes(free_before=80 * GIB, free_after=20 * GIB, fraction=float(fraction))
        case.check(f"kv_gib_80gib_60gib_weights_fraction_{fraction}", pool / GIB)

    def plan(fraction: float) -> EnginePlan:
        return sglang.plan(
            model_source.load("8b"),
            weights_bytes=60 * GIB,
            total_bytes=80 * GIB,
            flags=EngineFlags(gpu_memory_utilization=fraction),
        )

    least, most = (plan(0.8).more[f"mem_fraction_static_{end}"] for end in ("from", "to"))
    assert 0.75 < least < most < 0.9
    assert plan(0.70).starts is False
    assert "increase it" in (plan(0.70).reason or "")
    assert plan(round((least + most) / 2, 3)).starts is True
    assert any("while serving" in note and "lower it" in note for note in plan(0.95).notes)


@field_case("bc-059", "llm-d/llm-d-benchmark#732", {"implied_actual_activation_gib": (2.12, 0.2)})
def test_bc_059_activation_of_the_architecture(case: FieldCase) -> None:
    plan = vllm_plan(
        shapes.read(shapes.MISTRAL_SMALL_24B),
        total_gib=79.18,
        weights_gib=44.0,
        version="0.19.0",
        max_model_len=16384,
    )
    assert (plan.flag("max_num_seqs").value, plan.flag("max_num_batched_tokens").value) == (1024, 8192)
    peak = plan.terms["activation"] / GIB
    case.check("implied_actual_activation_gib", peak)
    assert abs(peak - 2.12) < 0.5
