"""No step, and no figure of an answer, is faster than physics: whatever an engine fuses, on any GPU."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog, model_source
from capplan.latency_estimate import latency
from capplan.op_costs import Bounds, OpCosts
from capplan.specs import Gpu, Parallelism
from capplan.step import Host, Load, StepTable
from capplan.work import StepWork, work_of

ROUNDING = 1 - 1e-12
MODELS = {name: model_source.load(name) for name in ("8b", "gpt-oss-20b", "gemma-3-12b")}
GPUS = [
    gpu
    for gpu in map(catalog.load_gpu, catalog.ids("gpus"))
    if any(gpu.flop_per_s.get(dtype) for dtype in ("bf16", "fp16", "fp32"))
]


def work(name: str, precision: str | None = None) -> StepWork:
    stored = None if precision is None else catalog.weight_format(precision)
    return work_of(MODELS[name], stored, kv_bits=16, parallel=Parallelism())


@given(
    gpu=st.sampled_from(GPUS),
    engine=st.sampled_from(["vllm", "sglang", "tensorrt-llm"]),
    fused=st.floats(0.5, 1.1),
    name=st.sampled_from(list(MODELS)),
    precision=st.sampled_from([None, "fp8", "int4"]),
    decoding=st.integers(1, 300),
    context=st.integers(1, 60_000),
    prompt=st.sampled_from([0, 128, 2048, 16_000]),
)
@settings(max_examples=150, deadline=None)
def test_no_step_is_faster_than_physics(
    gpu: Gpu,
    engine: str,
    fused: float,
    name: str,
    precision: str | None,
    decoding: int,
    context: int,
    prompt: int,
) -> None:
    own = work(name, precision)
    table, physics = StepTable(own, OpCosts(gpu, engine), Host(fused=fused)), StepTable(own, Bounds(gpu))
    load = {"decode_sequences": decoding, "kv_tokens": decoding * context, "prompt_tokens": prompt}
    assert table.step_s(**load) >= physics.step_s(**load) * ROUNDING


@pytest.mark.parametrize("fused", [0.5, 0.9])
def test_piece_step_array_and_operations_are_held_alike(fused: float) -> None:
    gpu = catalog.gpu("rtx-pro-6000-blackwell-server-96gb")
    table = StepTable(work("8b"), OpCosts(gpu, "vllm"), Host(step_s=1e-3, fused=fused))
    batch, context = 64, 640_000.0
    step_s = table.step_s(decode_sequences=batch, kv_tokens=context)
    base_s, slope_s, _, _ = table.decode_piece(batch, context)
    assert base_s + slope_s * context == pytest.approx(step_s, rel=1e-9)
    assert float(table.decode_steps_s(np.array([batch]), np.array([context]))[0]) == pytest.approx(step_s)
    load = Load(decode_sequences=batch, kv_tokens=context)
    assert sum(op.time_s for op in table.ops(load)) == pytest.approx(step_s, rel=0.005)


def test_half_of_the_kernels_time_is_no_less_than_all_of_physics() -> None:
    gpu = catalog.gpu("h100")
    held, physics = (
        StepTable(work("8b"), OpCosts(gpu, "vllm"), Host(fused=0.1)),
        StepTable(work("8b"), Bounds(gpu)),
    )
    load = {"decode_sequences": 8, "kv_tokens": 8000}
    # Kernels take less than ten times their bounds, so a tenth of them is below in every part.
    assert held.step_s(**load) == pytest.approx(physics.step_s(**load))


@pytest.mark.parametrize(
    ("gpu", "fields"),
    [
        pytest.param("rtx-4090", {"engine": "tensorrt-llm", "isl": 16_000}, id="a long prompt, TensorRT-LLM"),
        pytest.param("rtx-pro-6000-blackwell-server-96gb", {"batch": 64, "isl": 8000}, id="64 at once, vLLM"),
        pytest.param("jetson-agx-thor-128gb", {"isl": 128}, id="a short prompt on unified memory"),
    ],
)
def test_estimates_stay_above_their_bounds(gpu: str, fields: dict[str, object]) -> None:
    made = latency("8b", gpu=gpu, figures_alone=True, **fields)
    for figure in (made.ttft, made.tpot, made.e2e):
        assert figure.bound is not None
        assert figure.estimate is not None
        assert figure.estimate >= figure.bound * ROUNDING
    assert made.throughput.bound is not None
    assert made.throughput.estimate is not None
    assert made.throughput.estimate <= made.throughput.bound / ROUNDING
