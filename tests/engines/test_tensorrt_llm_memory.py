"""TensorRT-LLM's memory: logged pools worked back, and what must hold for every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import model_source
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.tensorrt_llm import plan, pool_bytes, step_bytes
from capplan.engines.token_pool import token_rate, tokens_in
from capplan.errors import InputError
from capplan.units import GIB

LLAMA = model_source.load("llama-3.1-8b")
WEIGHTS = 15 * GIB


def planned(total: float = 80, free: float | None = None, **flags: object) -> EnginePlan:
    """Llama-3.1-8B in 16 bits on a GPU of `total` GiB."""
    return plan(
        LLAMA,
        weights_bytes=WEIGHTS,
        total_bytes=round(total * GIB),
        flags=EngineFlags(**flags),  # type: ignore[arg-type]
        free_bytes=None if free is None else round(free * GIB),
    )


@pytest.mark.parametrize(
    ("free", "fraction", "pool"), [(17.83, 0.9, 16.05), (63.62, 0.99, 62.99), (8.73, 0.25, 2.18)]
)
def test_fraction_of_what_is_free(free: float, fraction: float, pool: float) -> None:
    """Start-up logs: available memory, fraction, pool."""
    assert pool_bytes(free * GIB, fraction) / GIB == pytest.approx(pool, abs=0.01)


def test_tokens_of_a_logged_pool() -> None:
    """69,524,783,104 B of 524,288 B a token: 132,608 tokens in blocks of 64 (NVIDIA/TensorRT-LLM#1400)."""
    rate = token_rate(model_source.load("llama-2-7b"), kv_bits=16)
    assert rate.total == 524288
    assert tokens_in(69524783104, rate.total, 64) == 132608


def test_plan_from_a_log() -> None:
    """17.83 GiB free, fp8 cache of 65,536 B a token, blocks of 32: 8,219 blocks logged."""
    made = planned(32, 17.83, kv_bits=8, version="0.17", block_size=32)
    assert made.kv_tokens is not None
    assert made.kv_tokens / 32 == pytest.approx(8219, rel=0.001)
    assert made.kv_pool.low == made.kv_pool.value == made.kv_pool.high


def test_step_by_hand() -> None:
    """8,192 · 2 B · (3 · 4,096 + 3 · 14,336) + 2,048 · 128,256 · 4 B"""
    assert step_bytes(LLAMA, tokens=8192, sequences=2048, tp=1) == (
        8192 * 2 * (3 * 4096 + 3 * 14336) + 2048 * 128256 * 4
    )


def test_blocks_and_batches_by_version() -> None:
    old, new = planned(version="0.8"), planned()
    assert (old.flag("tokens_per_block").value, new.flag("tokens_per_block").value) == (64, 32)
    assert (old.flag("max_batch_size").value, new.flag("max_batch_size").value) == (256, 2048)


def test_the_pool_is_taken_whether_needed_or_not() -> None:
    made = planned(max_model_len=5120)
    assert any("whether needed or not" in note for note in made.notes)
    assert made.starts is True


def test_refusal() -> None:
    made = planned(15)
    assert made.starts is False
    assert made.reason is not None
    assert made.kv_pool.high == 0
    assert made.advice[0].flag == "--tp_size"


@given(total=st.integers(1, 300), fraction=st.floats(0.01, 1), tp=st.sampled_from([1, 2, 4, 8]))
def test_nothing_is_negative(total: int, fraction: float, tp: int) -> None:
    made = planned(total, gpu_memory_utilization=fraction, tp=tp)
    assert all(size >= 0 for size in made.terms.values())
    assert 0 <= made.kv_pool.low <= made.kv_pool.value <= made.kv_pool.high
    assert made.kv_tokens is not None
    assert made.kv_tokens % 32 == 0


@pytest.mark.parametrize("version", ["0.1", "latest"])
def test_versions(version: str) -> None:
    with pytest.raises(InputError):
        planned(version=version)


def test_a_drafts_cache_shares_the_pool() -> None:
    alone = planned(free=60)
    both = planned(free=60, draft=model_source.load("llama-3.2-1b"))
    assert both.kv_pool == alone.kv_pool
    # 131,072 B a token of the model, 32,768 of the draft: 4/5 of the tokens, in whole blocks of 32.
    assert both.kv_tokens == pytest.approx((alone.kv_tokens or 0) * 4 / 5, abs=32)
