"""Steps that verify drafts: a step worked by hand, what drafts cost, and when they do not pay."""

from dataclasses import replace

import pytest

from capplan import catalog, model_source, step
from capplan.errors import InputError
from capplan.latency_estimate import LatencyEstimate, latency
from capplan.op_costs import Bounds, OpCosts
from capplan.specs import Mixing, Parallelism
from capplan.speculative import SpeculativeTable, draft_work
from capplan.step import Load, StepTable
from capplan.work import Elementwise, Gemm, Mix, StepWork, verifying

GPU = catalog.load_gpu("h100-sxm-80gb")
BYTES_PER_S = GPU.memory_bandwidth_bytes_per_s
FLOP_PER_S = GPU.flop_per_s["bf16"]
ONE = Parallelism()


def small_work(rows: int = 4096) -> StepWork:
    """One layer of one product and attention with 8 heads on 2 KV heads, and nothing else."""
    mixing = Mixing(form="attention", heads=8, kv_heads=2, k_width=128, v_width=128)
    return StepWork(
        gemms=(Gemm(name="up", n=rows, k=4096, dtype="bf16", weight_bits=16),),
        mixes=(Mix(name="attention", mixing=mixing, kv_bits=16),),
        experts=(),
        collectives=(),
        elementwise=(Elementwise(name="norm", bytes_each=8 * 4096),),
        parallel=ONE,
    )


def tpot(**fields: object) -> float:
    made = latency("8b", gpu="h100", figures_alone=True, **fields)
    assert made.tpot.estimate is not None
    return made.tpot.estimate


def test_a_verified_step_worked_by_hand() -> None:
    # 2 sequences bring 1 + 3 tokens each: m = 8 rows. Their caches of 1,000 tokens are read once.
    table = StepTable(verifying(small_work(), 4), Bounds(GPU))
    product = 2 * (4096 * 4096 + 8 * (4096 + 4096)) / BYTES_PER_S
    cache = 2000 * 2 * (128 + 128) * 2
    queries = 2 * 2 * (8 * 4) * (128 + 128)
    norm = 8 * (8 * 4096) / BYTES_PER_S
    expected = product + (cache + queries) / BYTES_PER_S + norm
    # The cache's time lies on knots, exact to 0.1 %.
    assert table.step_s(decode_sequences=2, kv_tokens=2000) == pytest.approx(expected, rel=1e-3)


def test_attention_of_a_few_queries_worked_by_hand() -> None:
    mix = verifying(small_work(), 4).mixes[0]
    # 2,000 entries of 2 KV heads, keys and values of 16 bits, and 4 × 8 heads of 2 sequences.
    flop, moved = mix.decode_load(2, 2000)
    assert flop == 2 * 2000 * (4 * 8) * 256
    assert moved == 2000 * 2 * 256 * 2 + 2 * 2 * (4 * 8) * 256


def test_queries_share_the_read_of_the_cache_and_the_kernel_of_the_models_heads() -> None:
    costs = OpCosts(GPU, "tensorrt-llm")
    one, four = small_work().mixes[0], verifying(small_work(), 4).mixes[0]
    # 16 heads a KV head: more than 32 rows with four queries, but no kernel that shares nothing.
    wide = replace(four, mixing=replace(four.mixing, heads=32))
    for batch, kept in ((1, 100_000), (64, 400_000)):
        alone = costs.decode(one, batch, kept)
        assert alone < costs.decode(four, batch, kept) < 2 * alone
        assert costs.decode(wide, batch, kept) < 3 * costs.decode(replace(wide, queries=1), batch, kept)
    latent = Mixing(form="latent", heads=16, k_width=576, v_width=512)
    mla = Mix(name="latent", mixing=latent, kv_bits=16)
    assert costs.decode(replace(mla, queries=4), 64, 400_000) > costs.decode(mla, 64, 400_000)


def test_many_steps_at_once_are_the_same_table() -> None:
    table = StepTable(verifying(small_work(), 4), OpCosts(GPU, "vllm"))
    batches, contexts = [1, 7, 64], [500.0, 9000.0, 64_000.0]
    for made, batch, tokens in zip(table.decode_steps_s(batches, contexts), batches, contexts, strict=True):
        assert made == pytest.approx(table.step_s(decode_sequences=batch, kv_tokens=tokens), rel=2e-3)


def test_drafts_pass_one_after_another_before_the_model() -> None:
    target = StepTable(verifying(small_work(), 4), Bounds(GPU))
    draft = StepTable(small_work(512), Bounds(GPU))
    both = SpeculativeTable(target, draft, 3)
    load = {"decode_sequences": 2, "kv_tokens": 2000}
    assert both.step_s(**load) == pytest.approx(target.step_s(**load) + 3 * draft.step_s(**load))
    # A prompt goes once through both.
    prompt = {"decode_sequences": 0, "kv_tokens": 0, "prompt_tokens": 512}
    assert both.step_s(**prompt) == pytest.approx(target.step_s(**prompt) + draft.step_s(**prompt))
    mixed = {**load, "prompt_tokens": 512}
    assert both.step_s(**mixed) == pytest.approx(
        target.step_s(**mixed) + draft.step_s(**mixed) + 2 * draft.step_s(**load)
    )


@pytest.mark.parametrize(
    "load",
    [
        Load(decode_sequences=4, kv_tokens=8000),
        Load(prompt_sequences=1, prompt_tokens=600, prompt_pairs=600 * 601 / 2),
        Load(
            decode_sequences=4,
            kv_tokens=8000,
            prompt_sequences=1,
            prompt_tokens=600,
            prompt_pairs=600 * 601 / 2,
        ),
    ],
    ids=["decode", "prompt", "both"],
)
def test_operations_sum_to_the_step(load: Load) -> None:
    costs = OpCosts(GPU, "vllm")
    model = model_source.load("8b")
    target = step.compile(model, GPU)
    work = draft_work("llama-3.2-1b", model, None, kv_bits=16, parallel=ONE)
    table = SpeculativeTable(StepTable(verifying(target.work, 4), costs), StepTable(work, costs), 3)
    whole = table.step_s(
        decode_sequences=load.decode_sequences,
        kv_tokens=load.kv_tokens,
        prompt_tokens=load.prompt_tokens,
        prompt_pairs=load.prompt_pairs,
        prompt_sequences=load.prompt_sequences,
    )
    assert sum(op.time_s for op in table.ops(load)) == pytest.approx(whole, rel=5e-3)


def test_tpot_is_the_step_over_its_tokens() -> None:
    # One user, n-grams: 1 + 0.7 + 0.49 + 0.343 = 2.533 tokens in a step of four tokens.
    made = latency("8b", gpu="h100", speculative_tokens=3, acceptance_rate=0.7, figures_alone=True)
    assert made.served is not None
    assert made.tpot.estimate == pytest.approx(made.served.decode_step_s / 2.533, rel=1e-3)
    assert made.to_dict()["speculation"]["tokens_per_step"] == pytest.approx(2.533)


def test_drafts_pay_for_few_users_and_cost_with_many() -> None:
    drafts = {"speculative_tokens": 3, "acceptance_rate": 0.6}
    assert tpot(**drafts) < 0.6 * tpot()
    busy = {"concurrency": 256, "isl": 256, "osl": 256}
    assert tpot(**busy, **drafts) > 0.6 * tpot(**busy)
    # Nothing accepted: the same tokens, for a longer step.
    assert tpot(**busy, speculative_tokens=3, acceptance_rate=0.0) > tpot(**busy)


def test_a_better_draft_is_never_slower_and_a_draft_model_costs() -> None:
    rates = [
        tpot(speculative_tokens=4, acceptance_rate=rate, concurrency=16) for rate in (0.0, 0.3, 0.6, 0.9, 1.0)
    ]
    assert rates == sorted(rates, reverse=True)
    ngram = tpot(speculative_tokens=3, acceptance_rate=0.7)
    model = tpot(speculative_tokens=3, acceptance_rate=0.7, draft_model="llama-3.2-1b")
    larger = tpot(speculative_tokens=3, acceptance_rate=0.7, draft_model="llama-3.2-3b")
    assert ngram < model < larger


def test_a_draft_takes_memory_from_the_cache() -> None:
    def pool(**fields: object) -> int:
        made = latency("8b", gpu="h100", figures_alone=True, **fields)
        assert made.plan is not None
        assert made.plan.kv_tokens is not None
        return made.plan.kv_tokens

    asked = {"speculative_tokens": 3, "acceptance_rate": 0.7}
    assert pool(**asked, draft_model="llama-3.2-1b") < pool(**asked)


def mtp(drafted: int | None, rate: float | None) -> LatencyEstimate:
    draft = None if drafted is None else "mtp"
    return latency(
        "deepseek-ai/DeepSeek-R1",
        gpu="h200",
        tp=8,
        concurrency=8,
        speculative_tokens=drafted,
        acceptance_rate=rate,
        draft_model=draft,
        figures_alone=True,
    )


def test_mtp_layers_draft_with_one_layer_its_joining_product_and_the_head() -> None:
    model = model_source.load("deepseek-ai/DeepSeek-R1")
    work = draft_work("mtp", model, None, kv_bits=16, parallel=Parallelism(tp=8))
    names = {gemm.name: gemm for gemm in work.gemms}
    assert (names["mtp.eh_proj"].n, names["mtp.eh_proj"].k) == (7168, 2 * 7168)
    assert "lm_head" in names
    # The table of the embedding is read once a step, by the model's own.
    assert not any(entry.resident_bytes for entry in work.elementwise)
    assert [entry.count for entry in work.experts] == [1]
    # Three such layers run one after another, one a pass.
    three = draft_work("mtp", model_source.load("minimax-m2"), None, kv_bits=16, parallel=ONE)
    assert [entry.count for entry in three.experts] == [1]
    with_drafts, without = mtp(1, 0.85), mtp(None, None)
    assert with_drafts.served is not None
    assert without.served is not None
    # One layer of 61 more, and twice the experts' tokens: far less than the 1.85 tokens it adds.
    assert 1.0 < with_drafts.served.decode_step_s / without.served.decode_step_s < 1.85
    assert any(op.name == "draft mtp.eh_proj" for op in with_drafts.decode_ops)


def test_bounds_stay_below_estimates_and_bands_widen() -> None:
    for draft in (None, "llama-3.2-1b"):
        made = latency(
            "8b", gpu="h100", engine_version="0.19", concurrency=32, speculative_tokens=3,
            acceptance_rate=0.7, draft_model=draft,
        )  # fmt: skip
        for figure in (made.ttft, made.tpot, made.e2e):
            assert figure.bound is not None
            assert figure.estimate is not None
            assert figure.low is not None
            assert figure.bound <= figure.low <= figure.estimate
    plain = latency("8b", gpu="h100", engine_version="0.19", concurrency=32, figures_alone=True)
    assert plain.tpot.high is not None
    assert plain.tpot.estimate is not None
    assert made.tpot.high is not None
    assert made.tpot.estimate is not None
    assert made.tpot.high / made.tpot.estimate > plain.tpot.high / plain.tpot.estimate
    assert any("not modelled" in note for note in made.notes)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"speculative_tokens": 3}, "--speculative-tokens"),
        ({"acceptance_rate": 0.7}, "--acceptance-rate"),
        ({"draft_model": "llama-3.2-1b"}, "--draft-model"),
        ({"speculative_tokens": 0, "acceptance_rate": 0.7}, "--speculative-tokens"),
        ({"speculative_tokens": 65, "acceptance_rate": 0.7}, "--speculative-tokens"),
        ({"speculative_tokens": 3, "acceptance_rate": 1.01}, "--acceptance-rate"),
        ({"speculative_tokens": 3, "acceptance_rate": float("nan")}, "--acceptance-rate"),
        ({"speculative_tokens": 3, "acceptance_rate": 0.7, "pp": 2}, "--pp"),
        ({"speculative_tokens": 3, "acceptance_rate": 0.7, "engine": "llama.cpp"}, "--engine llama.cpp"),
        ({"speculative_tokens": 3, "acceptance_rate": 0.7, "draft_model": "mtp"}, "--draft-model"),
        ({"speculative_tokens": 3, "acceptance_rate": 0.7, "draft_model": "nobody"}, "--draft-model"),
    ],
)
def test_half_a_question_is_refused(fields: dict[str, object], where: str) -> None:
    with pytest.raises(InputError) as caught:
        latency("8b", gpu="h100", **fields)
    assert where in caught.value.where
