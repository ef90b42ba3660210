"""TGI's memory: the source's arithmetic worked by hand, and what must hold for every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import model_source
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.tgi import plan, pool_blocks
from capplan.engines.vllm_terms import visible_bytes
from capplan.errors import InputError
from capplan.units import GIB, MIB

LLAMA = model_source.load("llama-3.1-8b")
WEIGHTS = 15 * GIB


def planned(total: float = 80, **flags: object) -> EnginePlan:
    """Llama-3.1-8B in 16 bits on a GPU of `total` GiB."""
    return plan(
        LLAMA,
        weights_bytes=WEIGHTS,
        total_bytes=round(total * GIB),
        flags=EngineFlags(**flags),  # type: ignore[arg-type]
    )


def test_blocks_by_hand() -> None:
    """10 GiB free, blocks of 2 MiB, 259 from the warm-up: 4,864 + 259."""
    assert pool_blocks(10 * GIB, block_bytes=2 * MIB, warm_blocks=259) == 5123


def test_the_plan_by_hand() -> None:
    """2.4: prefill of 4,145 tokens in 260 blocks of 16; peak 4,145 · 2 · 55,296 + 128,256 · 4 B."""
    made = planned(version="2.4")
    step = 4145 * 2 * (3 * 4096 + 3 * 14336) + 128256 * 4
    block = 16 * 131072
    free = visible_bytes(80 * GIB) - WEIGHTS - step - 260 * block - 512 * MIB
    assert made.kv_tokens == (int(free * 0.95 // block) + 260) * 16
    assert made.flag("max_batch_total_tokens").value == made.kv_tokens


def test_fraction_is_of_the_total() -> None:
    """Half of the total less is 0.95 · half less."""
    gap = (
        planned(version="2.4").kv_pool.value
        - planned(version="2.4", gpu_memory_utilization=0.5).kv_pool.value
    )
    assert gap == pytest.approx(0.95 * 0.5 * visible_bytes(80 * GIB), rel=1e-4)


def test_refusals() -> None:
    small = planned(14)
    assert small.starts is False
    assert small.reason is not None
    assert "prefill tokens" in small.reason
    long = planned(24, max_model_len=131072)
    assert long.starts is False
    assert long.reason is not None
    assert "max_total_tokens" in long.reason
    assert long.advice[0].flag == f"--max-total-tokens {long.kv_tokens}"


@given(total=st.integers(1, 300), fraction=st.floats(0.01, 1), tp=st.sampled_from([1, 2, 4, 8]))
def test_nothing_is_negative(total: int, fraction: float, tp: int) -> None:
    made = planned(total, gpu_memory_utilization=fraction, tp=tp)
    assert all(size >= 0 for size in made.terms.values())
    assert 0 <= made.kv_pool.low <= made.kv_pool.value <= made.kv_pool.high


@pytest.mark.parametrize("flags", [{"version": "1.4"}, {"version": "x"}, {"pp": 2}])
def test_impossible(flags: dict[str, object]) -> None:
    with pytest.raises(InputError):
        planned(**flags)  # type: ignore[arg-type]


def test_models_of_states_alone() -> None:
    with pytest.raises(InputError, match="nothing per token"):
        plan(
            model_source.load("falcon-mamba-7b"),
            weights_bytes=WEIGHTS,
            total_bytes=80 * GIB,
            flags=EngineFlags(),
        )


def test_there_are_no_draft_models() -> None:
    with pytest.raises(InputError, match="no draft model"):
        planned(draft=model_source.load("llama-3.2-1b"))
