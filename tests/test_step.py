"""One step by hand on made-up costs, the table against its operations, and what must be monotone."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog, model_source, step
from capplan.errors import InputError
from capplan.op_costs import Bounds
from capplan.specs import Model, Parallelism
from capplan.step import Host, Load, StepTable
from capplan.work import Collective, Elementwise, Experts, Gemm, Mix, work_of

LLAMA = model_source.load("8b")
H100 = catalog.gpu("h100")


class Counted(Bounds):
    """Costs of a whole number of seconds each, so that sums can be worked by hand."""

    def gemm(self, shape: Gemm, m: float) -> float:
        return m

    def decode(self, mix: Mix, batch: float, kept: float) -> float:
        return batch + kept

    def prefill(self, mix: Mix, sequences: float, tokens: float, pairs: float) -> float:
        return pairs

    def experts(self, shape: Experts, tokens: float) -> float:
        return 100 * tokens

    def collective(self, shape: Collective, count: float) -> float:
        return 1000 * count

    def elementwise(self, shape: Elementwise, count: float) -> float:
        return 0.0


def counted(model: Model = LLAMA, host: Host | None = None, **parallel: int) -> StepTable:
    work = work_of(model, None, kv_bits=16, parallel=Parallelism(**parallel))
    return StepTable(work, Counted(H100), host)


def test_a_decode_step_by_hand() -> None:
    # 4 products in 32 layers of 2 rows each, the head's 2, 32 attentions of 2 + 64.
    expected = 4 * 32 * 2 + 2 + 32 * (2 + 64)
    assert counted().step_s(decode_sequences=2, kv_tokens=64) == pytest.approx(expected)


def test_prompts_share_the_products_and_bring_their_pairs() -> None:
    # 2 + 4 rows in the products, 3 in the head, and pairs 4 · 5 / 2 = 10 in each layer.
    expected = 4 * 32 * 6 + 3 + 32 * (2 + 64) + 32 * 10
    found = counted().step_s(decode_sequences=2, kv_tokens=64, prompt_tokens=4)
    assert found == pytest.approx(expected)


def test_the_engine_adds_its_own_time_and_fuses_the_kernels() -> None:
    host = Host(step_s=5.0, sequence_s=2.0, fused=0.5)
    plain = counted().step_s(decode_sequences=2, kv_tokens=64)
    assert counted(host=host).step_s(decode_sequences=2, kv_tokens=64) == pytest.approx(9 + plain / 2)


def test_attention_replicas_share_sequences_and_see_all_experts_tokens() -> None:
    model = model_source.load("deepseek-ai/DeepSeek-V3")
    table = counted(model, dp=8, ep=8)
    ops = {(op.kind, op.name): op for op in table.ops(Load(decode_sequences=64, kv_tokens=6400))}
    assert ops["experts", "experts"].time_s == 58 * 100 * 64
    assert ops["decode attention", "latent"].time_s == pytest.approx(61 * (8 + 800))


def test_nothing_to_do_takes_no_time() -> None:
    assert counted(host=Host(step_s=1)).step_s(decode_sequences=0, kv_tokens=0) == 0


@pytest.mark.parametrize("name", ["8b", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3", "qwen3.5-9b"])
@pytest.mark.parametrize("gpu", ["h100", "a100-sxm-80gb", "l40s", "rtx-4090"])
def test_the_table_is_within_half_a_percent_of_its_operations(name: str, gpu: str) -> None:
    table = step.compile(model_source.load(name), catalog.gpu(gpu), parallel=Parallelism(tp=1))
    for batch, context in ((1, 1), (1, 100), (3, 3000), (17, 777), (100, 9000), (512, 50)):
        load = Load(decode_sequences=batch, kv_tokens=batch * context)
        exact = sum(op.time_s for op in table.ops(load))
        assert table.step_s(decode_sequences=batch, kv_tokens=batch * context) == pytest.approx(
            exact, rel=0.005
        )


def test_many_points_at_once_read_the_same_table() -> None:
    table = step.compile(LLAMA, H100)
    batches = np.array([1, 7, 64, 64, 300])
    contexts = np.array([10.0, 5e3, 64.0, 64e3, 3e6])
    one_by_one = [
        table.step_s(decode_sequences=int(batch), kv_tokens=context)
        for batch, context in zip(batches, contexts, strict=True)
    ]
    assert table.decode_steps_s(batches, contexts) == pytest.approx(one_by_one, rel=1e-6)


def test_ops_have_work_bounds_and_times() -> None:
    table = step.compile(LLAMA, H100, parallel=Parallelism(tp=2))
    load = Load(
        decode_sequences=8, kv_tokens=8000, prompt_sequences=1, prompt_tokens=512, prompt_pairs=131_328
    )
    ops = table.ops(load)
    kinds = {op.kind for op in ops}
    assert {"gemm", "decode attention", "prefill attention", "collective", "elementwise"} <= kinds
    for op in ops:
        assert op.time_s > 0
        assert math.isfinite(op.time_s)
        assert op.flop >= 0
        assert op.bytes >= 0


def test_the_headline_bound_reads_every_weight_once() -> None:
    model = model_source.load("70b")
    stored = catalog.weight_format("fp16")
    table = step.compile(model, catalog.gpu("a100-sxm-80gb"), precision=stored, bounds=True)
    # 70.55 · 10⁹ parameters of 2 bytes over 2,039 GB/s.
    expected = model.parameters * 2 / 2.039e12
    assert table.step_s(decode_sequences=1, kv_tokens=0) == pytest.approx(expected, rel=2e-3)


def test_layers_that_are_not_known_are_refused() -> None:
    with pytest.raises(InputError, match="not known"):
        step.compile(replace(LLAMA, groups=()), H100)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 512),
    context=st.integers(1, 100_000),
    more=st.integers(1, 30_000),
    faster=st.floats(1.0, 4.0),
    name=st.sampled_from(["8b", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3"]),
)
def test_longer_contexts_are_never_faster_and_more_bandwidth_never_slower(
    batch: int, context: int, more: int, faster: float, name: str
) -> None:
    model = model_source.load(name)
    table = step.compile(model, H100)
    short = table.step_s(decode_sequences=batch, kv_tokens=batch * context)
    assert table.step_s(decode_sequences=batch, kv_tokens=batch * (context + more)) >= short * (1 - 1e-12)
    wider = replace(H100, memory_bandwidth_bytes_per_s=H100.memory_bandwidth_bytes_per_s * faster)
    quick = step.compile(model, wider).step_s(decode_sequences=batch, kv_tokens=batch * context)
    assert quick <= short * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 16_000), more=st.integers(1, 4000))
def test_longer_prompts_are_never_faster(tokens: int, more: int) -> None:
    table = step.compile(LLAMA, H100)
    short = table.step_s(decode_sequences=0, kv_tokens=0, prompt_tokens=tokens)
    assert table.step_s(decode_sequences=0, kv_tokens=0, prompt_tokens=tokens + more) >= short * (1 - 1e-9)
