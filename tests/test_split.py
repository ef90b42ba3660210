"""Models cut over GPUs: pipeline stages, expert and data parallel ranks, and what cannot be cut."""

from typing import Any

import pytest

from capplan import catalog, estimate, model_source
from capplan.cli import run
from capplan.engines.plan import EngineFlags
from capplan.errors import InputError
from capplan.kv import kv_layout
from capplan.readers import hf_config
from capplan.split import Rank, Split, stages_of
from capplan.weights import check_split, weight_budget

# Llama-3.1-70B in bf16: a layer's 855,654,400 parameters, an embedding (or head) of 128,256 × 8,192.
LAYER = 2 * 855_654_400
EMBEDDING = 2 * 128_256 * 8_192
NORM = 2 * 8_192


def asked(model: str, **fields: Any) -> estimate.VramEstimate:
    return estimate.vram(model, **{"users": 16, "context": 4096} | fields)


@pytest.mark.parametrize(
    ("pp", "layers", "weights"),
    [
        (2, [40, 40], [40 * LAYER + EMBEDDING, 40 * LAYER + NORM + EMBEDDING]),
        (3, [27, 27, 26], [27 * LAYER + EMBEDDING, 27 * LAYER, 26 * LAYER + NORM + EMBEDDING]),
    ],
    ids=["even", "uneven"],
)
def test_stages_of_llama_70b(pp: int, layers: list[int], weights: list[int]) -> None:
    found = asked("llama-3.1-70b", pp=pp)
    assert [rank.need.weights_bytes for rank in found.ranks] == weights
    assert sum(weights) == found.weights_bytes
    stages = found.to_dict()["stages"]
    assert [stage["layers"] for stage in stages] == layers
    # 16 users of 4,096 tokens; a layer keeps 2 · 8 heads · 128 · 2 B = 4,096 B a token.
    assert [stage["kv_cache"]["bytes"] for stage in stages] == [n * 4096 * 16 * 4096 for n in layers]


def test_the_fullest_stage_is_the_one_reported() -> None:
    found = asked("llama-3.1-70b", pp=3, gpus=("h100",))
    assert found.need.weights_bytes == 27 * LAYER + EMBEDDING
    assert [stage["decides"] for stage in found.to_dict()["stages"]] == [True, False, False]
    assert any("27, 27, 26 layers" in note for note in found.notes)
    assert found.told is not None
    assert found.told.max_users == min(rank.verdict.max_users or 0 for rank in found.ranks if rank.verdict)


def test_totals_are_of_all_stages() -> None:
    found = asked("llama-3.1-70b", pp=3, tp=2, overhead_bytes=10**9).to_dict()
    assert found["question"]["gpus"] == 6
    stages = found["stages"]
    assert found["total"]["bytes"] == 2 * sum(stage["total"]["bytes"] for stage in stages)
    assert found["overhead"]["bytes"] == 6 * 10**9
    # Only the norms are on both tensor-parallel ranks: two a layer and the last.
    assert found["total"]["replicated_bytes"] == (80 * 2 + 1) * NORM


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    model = model_source.load("llama-3.2-1b")
    first, last = stages_of((8, 8))
    shared = 2 * 128_256 * 2_048
    sizes = [
        {part.role: part.bytes for part in weight_budget(model, None, rank=Rank(stage=stage)).roles}
        for stage in (first, last)
    ]
    assert [size["embedding"] for size in sizes] == [shared, shared]


def test_stages_given_by_their_layers() -> None:
    # A model of 48 layers with 2 · 4 heads · 128 · 2 B = 2,048 B a token and layer, cut 16 and 32.
    found = asked("qwen3-coder-30b-a3b", pp=2, pp_layers=(16, 32), users=1, context=262_144)
    assert [rank.need.kv_bytes for rank in found.ranks] == [8 * 2**30, 16 * 2**30]
    assert found.need.kv_bytes == 16 * 2**30


def test_a_mix_gives_a_layer_the_type_of_its_place() -> None:
    model, mix = model_source.load("llama-3.1-8b"), catalog.weight_format("q4_k_m")
    parts = [weight_budget(model, mix, rank=Rank(stage=stage)).bytes for stage in stages_of((5, 20, 7))]
    assert sum(parts) == weight_budget(model, mix).bytes


def test_stages_and_a_draft() -> None:
    found = asked("llama-3.1-70b", pp=2, draft_model="llama-3.2-1b")
    assert [bool(rank.extra) for rank in found.ranks] == [False, True]


# --- experts -----------------------------------------------------------------------------------------


def test_experts_of_mixtral_divided_whole() -> None:
    found = asked("mixtral-8x7b", tp=2, ep=2)
    # 4 of 8 experts of 3 · 4,096 · 14,336; half of attention and embeddings; router and norms whole.
    layer = 4 * 3 * 4096 * 14_336 + (4096 * 4096 * 2 + 4096 * 1024 * 2) // 2 + 8 * 4096 + 2 * 4096
    assert found.need.weights_bytes == 2 * (32 * layer + 32_000 * 4096 + 4096)
    assert found.need.weights_bytes == asked("mixtral-8x7b", tp=2).need.weights_bytes


def roles(model: str, split: Split) -> dict[str, int]:
    budget = weight_budget(model_source.load(model), None, rank=split.ranks()[0])
    return {part.role: part.bytes for part in budget.roles}


def test_replicas_of_deepseek_share_the_experts_alone() -> None:
    whole = roles("deepseek-v3", Split())
    for split in (Split(dp=8, ep=8), Split(dp=8)):
        rank = roles("deepseek-v3", split)
        assert rank["attention"] == whole["attention"]
        assert rank["shared_experts"] == whole["shared_experts"]
    divided = roles("deepseek-v3", Split(dp=8, ep=8))
    assert divided["experts"] * 8 == whole["experts"]
    assert roles("deepseek-v3", Split(dp=8, own_replicas=True)) == whole


def test_experts_that_do_not_divide_are_one_more_on_the_first_ranks() -> None:
    # 60 experts over 8 ranks: 8, 8, 8, 8, 7, 7, 7, 7.
    whole = roles("qwen1.5-moe-a2.7b", Split())
    assert roles("qwen1.5-moe-a2.7b", Split(dp=8, ep=8))["experts"] == whole["experts"] * 8 // 60
    found = asked("qwen1.5-moe-a2.7b", dp=8, ep=8)
    assert any("first 4 hold one more (8)" in note for note in found.notes)


def test_users_are_divided_over_replicas() -> None:
    one = asked("llama-3.1-8b", users=5, gpus=("h100",))
    two = asked("llama-3.1-8b", users=9, dp=2, gpus=("h100",))
    assert two.need.kv_bytes == one.need.kv_bytes
    assert two.told is not None
    assert one.told is not None
    assert two.told.max_users == 2 * (one.told.max_users or 0)
    # 5 and 4 users: the cache of nine.
    assert two.kv_bytes == 9 * 4096 * 131_072
    assert two.to_dict()["total"]["bytes"] == 2 * one.need.total_bytes


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 5])
def test_ranks_hold_at_least_the_model(tp: int, dp: int, pp: int) -> None:
    for ep in {1, min(8, tp * dp)}:
        found = asked("mixtral-8x7b", tp=tp, pp=pp, dp=dp, ep=ep)
        held = sum(rank.need.weights_bytes for rank in found.ranks) * tp * dp
        assert held >= found.weights_bytes
        assert found.to_dict()["total"]["replicated_bytes"] >= 0


# --- under an engine ---------------------------------------------------------------------------------


def test_the_stage_with_the_fewest_tokens_decides_under_vllm() -> None:
    found = asked(
        "llama-3.1-70b",
        pp=3,
        gpus=("h100",),
        engine="vllm",
        engine_flags=EngineFlags(version="0.24", max_model_len=8192),
    )
    plans = [rank.plan for rank in found.ranks]
    tokens = [plan.kv_tokens or 0 for plan in plans if plan is not None]
    assert len(tokens) == 3
    assert found.engine is not None
    assert found.engine.kv_tokens == min(tokens)
    per_token = [rank.layout.bytes_per_token for rank in found.ranks if rank.layout]
    assert per_token == [27 * 4096, 27 * 4096, 26 * 4096]
    for plan, size in zip(plans, per_token, strict=True):
        assert plan is not None
        assert plan.kv_tokens == plan.kv_pool.value // int(size * 16) * 16
    # Logits are made on the last stage, tokens are embedded on the first: the one between has the least.
    peaks = [plan.terms["activation"] for plan in plans if plan is not None]
    assert peaks[1] == min(peaks) < max(peaks)


@pytest.mark.parametrize(
    ("engine", "layers"),
    [
        ("vllm", [13, 13, 13, 14, 14, 13]),
        ("sglang", [13, 13, 13, 13, 14, 14]),
        ("tensorrt-llm", [14, 14, 13, 13, 13, 13]),
    ],
)
def test_engines_cut_stages_in_their_own_way(engine: str, layers: list[int]) -> None:
    found = asked("llama-3.1-70b", pp=6, gpus=("h100",), engine=engine)
    assert [len(rank.stage.layers) for rank in found.ranks if rank.stage] == layers


def test_every_stage_is_put_against_its_own_gpu() -> None:
    # 16 layers on 16 GB and 32 on 32 GB: the larger share of a long context decides though its GPU is larger.
    found = asked(
        "qwen3-coder-30b-a3b",
        precision="fp8",
        pp=2,
        pp_layers=(16, 32),
        stage_gpus=("rtx-5070-ti", "rtx-5090"),
        users=1,
        context=131_072,
        overhead_bytes=0,
    )
    small, large = (rank.verdict for rank in found.ranks)
    assert small is not None
    assert large is not None
    assert (small.gpu_id, large.gpu_id) == ("rtx-5070-ti-16gb", "rtx-5090-32gb")
    assert found.told is not None
    assert found.told.headroom_bytes == min(small.headroom_bytes, large.headroom_bytes)
    assert found.fits is (small.fits and large.fits)
    under = asked(
        "qwen3-coder-30b-a3b",
        precision="fp8",
        pp=2,
        pp_layers=(16, 32),
        stage_gpus=("rtx-5070-ti", "rtx-5090"),
        users=1,
        engine="vllm",
        engine_flags=EngineFlags(version="0.15", max_model_len=32_768),
    )
    totals = [rank.plan.terms["total"] for rank in under.ranks if rank.plan]
    assert totals[0] < totals[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_engines_take_stages(engine: str) -> None:
    found = asked("llama-3.1-8b", pp=2, gpus=("l4",), engine=engine)
    assert len(found.ranks) == 2
    assert found.engine is not None
    assert found.engine.terms["weights"] == found.need.weights_bytes < found.weights_bytes


# --- what cannot be cut ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("qwen2.5-7b", "--tp 8", "28 attention heads cannot be split over 8 GPUs"),
        ("qwen2.5-7b", "--tp 8", "--tp 4 --dp 2 or --tp 4 --pp 2"),
        ("llama-3.1-8b", "--pp 33", "at most 32 stages"),
        ("llama-3.1-8b", "--pp 2 --pp-layers 16,15", "to share among 2 stages"),
        ("llama-3.1-8b", "--pp 3 --pp-layers 16,16", "to share among 3 stages"),
        ("llama-3.1-8b", "--pp-layers 16,16", "add --pp 2"),
        ("llama-3.1-8b", "--pp 2 --stage-gpu l4", "1 GPUs for 2 stages"),
        ("llama-3.1-8b", "--pp 2 --stage-gpu l4 --stage-gpu l40s --gpu l4", "given twice"),
        ("llama-3.1-8b", "--pp 2 --pp-layers 16,many", "layers of each"),
        ("llama-3.1-8b", "--ep 2 --tp 2", "no experts to divide"),
        ("mixtral-8x7b", "--ep 16 --tp 16", "8 experts cannot be divided over 16 ranks"),
        ("mixtral-8x7b", "--ep 4", "do not divide the 1 ranks"),
        ("mixtral-8x7b", "--ep 2 --tp 4 --engine vllm --gpu h100", "--ep 4"),
        ("qwen1.5-moe-a2.7b", "--ep 8 --tp 8 --engine sglang --gpu h100", "a divisor of 60"),
        ("mixtral-8x7b", "--ep 2 --tp 2 --engine tgi --gpu h100", "tgi has no --ep"),
        ("llama-3.1-8b", "--pp 2 --engine tgi --gpu h100", "tgi has no --pp"),
        ("llama-3.1-8b", "--dp 2 --engine llama.cpp --gpu h100", "llama.cpp has no --dp"),
        ("llama-3.1-8b", "--dp 0", "--dp"),
    ],
)
def test_splits_that_are_refused_say_why(
    model: str, options: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["vram", "--model", model, *options.split()]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 3
    assert says in error


def test_a_parameter_count_has_nothing_to_cut_but_its_weights() -> None:
    assert estimate.vram(params=70 * 10**9, tp=2).need.weights_bytes == 70 * 10**9
    cuts: tuple[dict[str, Any], ...] = ({"pp": 2}, {"ep": 2}, {"dp": 2})
    for cut in cuts:
        with pytest.raises(InputError, match="no layers or experts"):
            estimate.vram(params=70 * 10**9, **cut)


def test_a_vocabulary_that_does_not_divide_is_refused() -> None:
    # 12 heads and an FFN of 3,072 divide by 3; 50,048 rows, a multiple of 64, do not.
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 50_000,
        "tie_word_embeddings": False,
    }
    model = hf_config.read_model(
        config, where="test", name="of 12 heads", architecture=catalog.architecture("llama"), source="test"
    )
    with pytest.raises(InputError, match="a vocabulary of 50,000, padded to a multiple of 64"):
        check_split(model, 3)
    check_split(model, 4)


def test_kv_heads_beyond_tp_are_said_to_be_replicated() -> None:
    found = asked("qwen2.5-7b", tp=4)
    assert not any("is kept" in note for note in found.notes)
    found = asked("mistral-7b-v0.1", tp=16)
    assert any("8 KV heads over 16 GPUs: each is kept 2 times" in note for note in found.notes)
    model = model_source.load("mistral-7b-v0.1")
    assert kv_layout(model, kv_bits=16, tp=16).bytes_per_token == (
        kv_layout(model, kv_bits=16, tp=8).bytes_per_token
    )
