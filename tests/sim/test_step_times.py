"""Runs of steps against the same steps one by one."""

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog, model_source, step
from capplan.sim.step_times import TableTimes
from capplan.specs import Parallelism
from capplan.step import StepTable

# Full attention; window and full layers; one latent on data-parallel ranks; states; a pipeline.
TABLES = {
    "8b": ("llama-3.1-8b", Parallelism()),
    "windows": ("gemma-3-12b", Parallelism()),
    "latents": ("deepseek-r1", Parallelism(tp=1, dp=8, ep=8)),
    "states": ("qwen3-next-80b-a3b", Parallelism(tp=2)),
    "stages": ("llama-3.1-70b", Parallelism(tp=2, pp=2)),
}


@cache
def table(name: str) -> StepTable:
    model, parallel = TABLES[name]
    return step.compile(model_source.load(model), catalog.gpu("h100"), parallel=parallel)


@pytest.mark.parametrize("name", TABLES)
@given(
    decoding=st.integers(1, 300),
    context=st.integers(1, 20_000),
    most=st.integers(1, 400),
    share=st.floats(0, 1.5),
)
@settings(max_examples=25, deadline=None)
def test_a_run_of_steps_is_the_sum_of_its_steps(
    name: str, decoding: int, context: int, most: int, share: float
) -> None:
    steps = table(name)
    one_by_one = [
        steps.step_s(decode_sequences=decoding, kv_tokens=decoding * (context + at)) for at in range(most)
    ]
    until_s = share * math.fsum(one_by_one)
    count, took = TableTimes(steps).steps_s(decoding, decoding * context, most, until_s)
    passed = math.fsum(one_by_one[:count])
    assert took == pytest.approx(passed, rel=1e-9)
    # It stops with the first step that ends at the moment or later, or with the last of all.
    assert count == most or passed >= until_s * (1 - 1e-9)
    assert count == 1 or math.fsum(one_by_one[: count - 1]) < until_s * (1 + 1e-9)


@pytest.mark.parametrize("name", TABLES)
@given(decoding=st.integers(1, 300), context=st.floats(0, 50_000), further=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_a_piece_is_the_step_from_where_it_begins_to_its_end(
    name: str, decoding: int, context: float, further: float
) -> None:
    contexts = decoding * context
    base_s, slope_s, first, end = table(name).decode_piece(decoding, contexts)
    assert first <= contexts < end
    within = contexts + further * min(end - contexts, 1e6) * (1 - 1e-9)
    expected = table(name).step_s(decode_sequences=float(decoding), kv_tokens=within)
    assert base_s + slope_s * within == pytest.approx(expected, rel=1e-9)
