"""What holds for every answer: more bandwidth is never slower, longer context never faster."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog, model_source
from capplan.formulas import serving
from capplan.latency_question import LatencyQuestion
from capplan.latency_setup import Setup
from capplan.op_costs import Bounds, OpCosts
from capplan.specs import Model, Parallelism
from capplan.step import StepTable
from capplan.work import verifying, work_of

# A dense model, latent attention with experts, windows with experts, a hybrid with states.
MODELS = (
    "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-120b",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
)
GPUS = ("h100-sxm-80gb", "a100-sxm-80gb", "l40s-48gb", "b200-sxm-180gb", "rtx-4090-24gb", "mi300x")
FORMATS = (None, "fp8", "int4")
CASES = settings(max_examples=60, deadline=None)
SLIGHT = 1 + 1e-9


@cache
def model(name: str) -> Model:
    return model_source.load(name)


def table(name: str, gpu: str, stored: str | None, faster: float, *, bounds: bool, queries: int) -> StepTable:
    """Step times on a GPU whose memory is `faster` times as fast, everything else alike."""
    known = catalog.gpu(gpu)
    made = replace(known, memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s * faster)
    work = work_of(
        model(name),
        None if stored is None else catalog.weight_format(stored),
        kv_bits=16,
        parallel=Parallelism(tp=2),
    )
    return StepTable(verifying(work, queries), Bounds(made) if bounds else OpCosts(made, "vllm"))


@CASES
@given(
    name=st.sampled_from(MODELS),
    gpu=st.sampled_from(GPUS),
    stored=st.sampled_from(FORMATS),
    faster=st.floats(1.0, 8.0),
    batch=st.integers(1, 512),
    context=st.integers(1, 100_000),
    prompt=st.sampled_from((0, 1, 100, 2048, 8192)),
    bounds=st.booleans(),
    queries=st.sampled_from((1, 4)),
)
def test_more_bandwidth_is_never_slower(
    name: str,
    gpu: str,
    stored: str | None,
    faster: float,
    batch: int,
    context: int,
    prompt: int,
    bounds: bool,
    queries: int,
) -> None:
    slow, fast = (
        table(name, gpu, stored, factor, bounds=bounds, queries=queries).step_s(
            decode_sequences=batch, kv_tokens=batch * context, prompt_tokens=prompt
        )
        for factor in (1.0, faster)
    )
    assert 0 < fast <= slow * SLIGHT


@CASES
@given(
    name=st.sampled_from(MODELS),
    gpu=st.sampled_from(GPUS),
    batch=st.integers(1, 256),
    context=st.integers(1, 60_000),
    longer=st.integers(1, 60_000),
    bounds=st.booleans(),
)
def test_a_longer_context_is_never_faster(
    name: str, gpu: str, batch: int, context: int, longer: int, bounds: bool
) -> None:
    steps = table(name, gpu, None, 1.0, bounds=bounds, queries=1)
    short, long = (
        steps.step_s(decode_sequences=batch, kv_tokens=batch * tokens)
        for tokens in (context, context + longer)
    )
    assert short <= long * SLIGHT


@CASES
@given(
    name=st.sampled_from(MODELS),
    gpu=st.sampled_from(GPUS),
    prompt=st.integers(1, 8000),
    longer=st.integers(1, 8000),
    past=st.integers(0, 50_000),
)
def test_a_longer_prompt_never_passes_sooner_at_the_bound(
    name: str, gpu: str, prompt: int, longer: int, past: int
) -> None:
    steps = table(name, gpu, None, 1.0, bounds=True, queries=1)

    def through(tokens: int) -> float:
        pairs = tokens * past + tokens * (tokens + 1) / 2
        return steps.step_s(decode_sequences=0, kv_tokens=0, prompt_tokens=tokens, prompt_pairs=pairs)

    assert through(prompt) <= through(prompt + longer) * SLIGHT


@cache
def setup(name: str, engine: str, isl: int, osl: int) -> Setup:
    return Setup(LatencyQuestion(model=name, gpu="h100", tp=2, isl=isl, osl=osl, engine=engine))


USERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(("isl", "osl"), [(128, 128), (1024, 256), (8192, 512), (128, 2048), (512, 1)])
@pytest.mark.parametrize("name", ["8b", "openai/gpt-oss-120b"])
def test_more_users_make_more_tokens_until_the_cache_is_full(
    name: str, engine: str, isl: int, osl: int
) -> None:
    subject = setup(name, engine, isl, osl)
    ideal = serving.Scheduling(wait_steps=0.0, max_num_seqs=1024)
    bound = [subject.serve(subject.physics, ideal, users) for users in USERS]
    for few, many in pairwise(bound):
        assert few.output_token_per_s <= many.output_token_per_s * SLIGHT or many.limit != "users"
    served = {users: subject.serve(subject.table, subject.scheduling, users) for users in USERS}
    for users, many in served.items():
        if users // 2 in served and users % 2 == 0 and many.limit == "users":
            assert served[users // 2].output_token_per_s <= many.output_token_per_s * SLIGHT
    for few, many in pairwise(served.values()):
        # Measured kernels work in tiles of rows: one more user may start a tile, which costs a few percent.
        assert few.output_token_per_s <= many.output_token_per_s * 1.04 or many.limit != "users"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("load", [{}, {"concurrency": 4}, {"request_per_s": 0.5}], ids=str)
def test_longer_prompts_and_answers_never_wait_less(engine: str, load: dict[str, float]) -> None:
    def seen(isl: int, osl: int) -> serving.Served:
        subject = Setup(LatencyQuestion(model="8b", gpu="h100", isl=isl, osl=osl, engine=engine, **load))
        served = subject.serve(subject.table, subject.scheduling)
        assert served.limit == "users"
        return served

    for short, long in pairwise([1, 2, 100, 128, 129, 1024, 1025, 4096, 8191, 8192, 8193, 16_000]):
        few, many = seen(short, 128), seen(long, 128)
        assert few.ttft_s <= many.ttft_s * SLIGHT
        assert (few.tpot_s or 0) <= (many.tpot_s or 0) * SLIGHT
    for short, long in pairwise([16, 64, 256, 4096]):
        assert seen(1024, short).e2e_s <= seen(1024, long).e2e_s * SLIGHT
