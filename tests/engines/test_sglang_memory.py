"""SGLang's memory: worked by hand, the logged pools, and what must hold for every plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import model_source
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.engines.sglang import default_fraction, plan, pool_bytes, pool_tokens, prefill_graph_sizes
from capplan.engines.token_pool import TokenRate, token_rate, tokens_in
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


def test_pool_is_what_is_free_less_the_part_outside() -> None:
    """80 GiB, 60 of weights: 8 GiB at 0.85, 4 too few at 0.70 (sgl-project/sglang#322)."""
    assert pool_bytes(free_before=80 * GIB, free_after=20 * GIB, fraction=0.85) == 8 * GIB
    assert pool_bytes(free_before=80 * GIB, free_after=20 * GIB, fraction=0.70) == -4 * GIB


def test_a_logged_pool() -> None:
    """230.2 GiB free after 56.98 of weights at 0.911: 204.6 planned, 2 · 101.95 logged (#18263)."""
    free = round(230.2 * GIB)
    made = pool_bytes(free_before=free + round(56.98 * GIB), free_after=free, fraction=0.911)
    assert made / GIB == pytest.approx(203.9, rel=0.005)
    model = model_source.load("qwen3-30b-a3b")
    rate = token_rate(model, kv_bits=16)
    assert rate == TokenRate(full=98304, sliding=0, state=0, window=None)
    assert tokens_in(2 * 101.95 * GIB, rate.total) == pytest.approx(2227073, rel=1e-4)


@pytest.mark.parametrize(
    ("version", "gib", "tp", "chunk", "batch", "fraction"),
    [
        ((0, 4, 3), 80, 1, 8192, 160, 0.88),
        ((0, 4, 3), 80, 8, 8192, 160, 0.81),
        # 0.88 + 48 GiB · 0.12 / 141 against (141 − 18) / 141
        ((0, 4, 6), 141, 1, 8192, 160, (141 - 18) / 141),
        ((0, 4, 10), 80, 1, 8192, 160, 0.875),  # 10 GiB
        ((0, 4, 10), 24, 2, 2048, 8, 0.875),  # 3 GiB
        ((0, 5, 3), 80, 1, 8192, 256, 0.836),  # 512 + 12,288 + 512 + 128 MiB
        ((0, 5, 3), 24, 1, 2048, 16, 0.848),  # 512 + 3,072 + 32 + 128 MiB
        ((0, 5, 23), 80, 1, 8192, 256, 0.83),  # and 58 prefill graphs of 8 MiB
    ],
)
def test_default_fractions(
    version: tuple[int, int, int], gib: int, tp: int, chunk: int, batch: int, fraction: float
) -> None:
    made = default_fraction(
        LLAMA, version=version, total_bytes=gib * GIB, tp=tp, pp=1, chunk=chunk, graph_batch=batch
    )
    assert made == pytest.approx(fraction, abs=0.0006)


def test_prefill_graphs() -> None:
    """4…32, 48…256, 288…512, 576…1024, 1280…4096, then every 512."""
    assert [prefill_graph_sizes(size) for size in (3, 4, 256, 4096, 8192)] == [0, 1, 22, 50, 58]


def test_sliding_layers_have_their_own_pool() -> None:
    """375,360 tokens beside 300,288 in the window pool (sgl-project/sglang#18039)."""
    rate = token_rate(model_source.load("mimo-v2-flash"), kv_bits=16, tp=4)
    assert (rate.full, rate.sliding) == (9 * 320 * 2, 39 * 2 * 320 * 2)
    pool = 375360 * rate.full + 300288 * rate.sliding
    assert pool_tokens(pool, rate, version=(0, 5, 23), page=64) == (375360, 0)
    old, _ = pool_tokens(pool, rate, version=(0, 4, 6), page=64)
    assert old == int(pool // rate.total) // 64 * 64
    assert 300288 * rate.sliding / GIB == pytest.approx(13.97, abs=0.01)


def test_states_come_first() -> None:
    """19 of 1.9 units: half of the rest per token."""
    rate = TokenRate(full=10, sliding=0, state=100, window=None)
    # 19,000 · 0.9 / 1.9 = 9,000 B: 90 states; 10,000 B are left for 1,000 tokens.
    assert pool_tokens(19000, rate, version=(0, 5, 23)) == (1000, 90)


def test_the_plan_adds_up() -> None:
    made = planned(gpu_memory_utilization=0.9)
    free = visible_bytes(80 * GIB) - 512 * MIB
    assert made.kv_pool.value == pytest.approx(0.9 * free - WEIGHTS, abs=2)
    assert made.kv_tokens == made.kv_pool.value // 131072
    assert made.kv_pool.low <= made.kv_pool.value <= made.kv_pool.high
    assert made.starts is True


def test_refuses_where_the_weights_exceed_the_fraction() -> None:
    made = planned(80, gpu_memory_utilization=0.1)
    assert made.starts is False
    assert made.kv_tokens == 0
    assert made.reason is not None
    assert "increase it" in made.reason
    assert made.advice[0].flag.startswith("--mem-fraction-static")
    assert planned(15).advice[0].flag == "--tp"


def test_a_draft_is_charged() -> None:
    made = plan(
        LLAMA,
        weights_bytes=WEIGHTS,
        extra_bytes=GIB,
        total_bytes=80 * GIB,
        flags=EngineFlags(),
    )
    assert planned().kv_pool.value - made.kv_pool.value == GIB


@given(
    total=st.integers(4, 300),
    fraction=st.floats(0.01, 1),
    tp=st.sampled_from([1, 2, 4, 8]),
    version=st.sampled_from([None, "0.4.3", "0.4.6", "0.4.10.post2", "0.5.3", "0.5.10", "unknown"]),
)
def test_nothing_is_negative_and_more_is_more(
    total: int, fraction: float, tp: int, version: str | None
) -> None:
    made = planned(total, gpu_memory_utilization=fraction, tp=tp, version=version)
    more = planned(total + 8, gpu_memory_utilization=fraction, tp=tp, version=version)
    assert made.kv_tokens is not None
    assert more.kv_tokens is not None
    assert 0 <= made.kv_tokens <= more.kv_tokens
    assert all(size >= 0 for size in made.terms.values())
    assert planned(total, tp=tp, version=version).kv_pool.low >= 0


@pytest.mark.parametrize("version", ["0.3.6", "latest", ""])
def test_versions(version: str) -> None:
    with pytest.raises(InputError):
        planned(version=version)


def test_more_stages_than_layers() -> None:
    with pytest.raises(InputError, match="stages"):
        planned(pp=33)


def test_a_drafts_cache_shares_the_token_count() -> None:
    draft = model_source.load("llama-3.2-1b")
    alone = planned(version="0.5.23")
    new, old = (planned(version=version, draft=draft) for version in ("0.5.23", "0.5.10"))
    # 131,072 B a token of the model, 2 · 16 · 8 · 64 · 2 = 32,768 of the draft: 4/5 of the tokens.
    assert new.kv_tokens == pytest.approx((alone.kv_tokens or 0) * 4 / 5, abs=1)
    assert "draft_kv_cache_outside" not in new.terms
    assert old.terms["draft_kv_cache_outside"] == (old.kv_tokens or 0) * 32768


def test_the_interval_of_fractions() -> None:
    plan = planned()
    least, most = (plan.more[f"mem_fraction_static_{end}"] for end in ("from", "to"))
    assert most == plan.flag("mem_fraction_static").value
    assert planned(gpu_memory_utilization=least - 0.02).starts is False
    assert planned(gpu_memory_utilization=least + 0.02).starts is True
    assert any("lower it" in note for note in planned(gpu_memory_utilization=most + 0.05).notes)
    assert not any("lower it" in note for note in plan.notes)
    assert planned(total=12).more["mem_fraction_static_from"] is None  # 15 GiB of weights
