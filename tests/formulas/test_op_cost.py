"""Op costs: hand-worked times, floats against arrays, and that more of anything never makes them faster."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog
from capplan.formulas import op_cost
from capplan.formulas.blend import divisor, read_bytes, rounded_up, smaller, soft_maximum

RATES: dict[str, Any] = {"flop_per_s": 100e12, "bytes_per_s": 1e12, "sms": 100}
# A maximum that is not rounded: the hand-over sharp enough to see one side only.
SHARP = 60.0
GEMM: dict[str, float] = {
    "t0_us": 5,
    "compute": 0.5,
    "memory": 0.8,
    "p": SHARP,
    "steps": 1,
    "half_rows": 0,
    "quantise": 0,
    "cache_reach": 1,
    "cache_speed": 4,
    "tile_m": 16,
    "tile_n": 128,
}
DECODE: dict[str, float] = {
    "t0_us": 10,
    "chain_us": 2,
    "serial_ns": 0.05,
    "memory": 0.8,
    "tile_us": 1,
    "compute": 1,
    "p": SHARP,
    "cache_reach": 1,
    "cache_speed": 4,
    "group": 0.01,
    "single": 0.5,
    "width": 1,
}
PREFILL: dict[str, float] = {
    "t0_us": 10,
    "compute": 0.5,
    "memory": 0.5,
    "kv_passes": 2,
    "chain": 1,
    "tile_us": 1,
    "p": SHARP,
    "p_chain": SHARP,
    "cache_reach": 1,
    "cache_speed": 1,
    "packed": 0,
}


def test_pieces() -> None:
    assert soft_maximum(first=3.0, second=4.0, p=2) == pytest.approx(5)
    assert soft_maximum(first=3.0, second=4.0, p=1) == pytest.approx(7)
    assert soft_maximum(first=0.0, second=0.0, p=2) == 0
    assert (smaller(2.0, 3.0), rounded_up(17, 16), rounded_up(16, 16), divisor(0), divisor(7)) == (
        2,
        32,
        16,
        1,
        7,
    )


def test_a_cache_speeds_up_what_it_holds_and_nothing_else() -> None:
    def read(moved: float, cache: float) -> float:
        return float(read_bytes(moved=moved, cache_bytes=cache, reach=1.0, speed=4.0))

    assert read(1e6, 100e6) == pytest.approx(0.25e6, rel=1e-6)
    assert read(1e9, 100e6) == pytest.approx(1e9, rel=1e-5)
    assert read(1e6, 0.0) == pytest.approx(1e6)
    assert read(0.0, 0.0) == 0


def gemm(fit: Mapping[str, float] = GEMM, **shape: Any) -> float:
    given = {"weight_bits": 16} | RATES | shape
    return float(op_cost.gemm_s(**given, fit=fit))


def test_gemm_of_one_row_is_its_weights_over_the_bandwidth() -> None:
    # 65536 · 4096 · 2 B + (65536 + 4096) · 2 B = 537,010,176 B at 0.8 TB/s, and 5 µs
    assert gemm(m=1, n=65536, k=4096) == pytest.approx(5e-6 + 537_010_176 / 0.8e12, rel=1e-3)
    # 4-bit weights: a quarter of them
    assert gemm(m=1, n=65536, k=4096, weight_bits=4, flop_per_s=1e15) == pytest.approx(
        5e-6 + 134_356_992 / 0.8e12, rel=1e-3
    )


def test_gemm_of_few_columns_waits_for_its_one_wave() -> None:
    # 8 tiles of 16 × 128 on 100 SMs: 2 · 16 · 128 · 8192 FLOP at half an SM's peak, 67 µs; its bytes: 21 µs
    assert gemm(m=1, n=1024, k=8192) == pytest.approx(5e-6 + 2 * 16 * 128 * 8192 / 0.5e12, rel=1e-3)


def test_gemm_of_many_rows_is_whole_waves_of_tiles() -> None:
    # 1024/256 · 8192/128 = 256 tiles on 100 SMs: 3 waves of 2 · 256 · 128 · 8192 FLOP an SM at half its peak
    # (a tile of 256; lower ones need 6, 11, … waves of half, a quarter, … the work)
    tile_s = 2 * 256 * 128 * 8192 / (0.5 * 100e12 / 100)
    halves_s = min(waves * height for waves, height in ((3, 256), (6, 128), (11, 64), (21, 32), (41, 16)))
    assert gemm(m=1024, n=8192, k=8192) == pytest.approx(5e-6 + tile_s * halves_s / 256, rel=1e-3)
    flat = gemm({**GEMM, "steps": 0}, m=1024, n=8192, k=8192)
    assert flat == pytest.approx(5e-6 + tile_s * 2.56, rel=1e-3)


def test_gemm_quantises_its_activations_first() -> None:
    extra = gemm({**GEMM, "quantise": 3}, m=4096, n=8192, k=8192) - gemm(m=4096, n=8192, k=8192)
    assert extra == pytest.approx(3 * 4096 * 8192 / 1e12)


def test_weights_left_in_the_cache_are_read_faster_only_if_asked() -> None:
    cold, warm = (gemm(m=1, n=65536, k=64, flop_per_s=1e15, cache_bytes=size) for size in (0, 1e9))
    # 8 MiB: 10.5 µs at 0.8 TB/s, of which the cache saves three quarters
    assert cold - warm == pytest.approx(0.75 * 8 * 1024 * 1024 / 0.8e12, rel=1e-3)


def decode(fit: Mapping[str, float] = DECODE, **shape: Any) -> float:
    given = {"heads": 32, "kv_heads": 8, "k_width": 128, "v_width": 128, "kv_bits": 16} | RATES | shape
    return float(op_cost.decode_attention_s(**given, fit=fit))


def test_decode_attention_of_long_contexts_is_the_cache_over_the_bandwidth() -> None:
    # 16 · 65,536 tokens of 8 · 256 · 2 B, 16 queries and outputs of 32 · 256 · 2 B; 2 µs · 64^¼ to start
    moved = 16 * 65536 * 4096 + 16 * 32 * 256 * 2
    start = 2e-6 * 64**0.25
    want = 10e-6 + start + moved / 0.8e12
    assert decode(batch=16, kv_tokens=16 * 65536) == pytest.approx(want, rel=1e-3)


def test_decode_attention_of_many_short_contexts_is_its_tiles() -> None:
    # 4,096 · 8 tiles of 1 µs on 100 SMs, a group of 4: +4 %, less half of 1/64
    want = 10e-6 + 2e-6 * (2 / 1024) ** 0.25 + 4096 * 8 * 1e-6 / 100 * 1.04 * (1 - 0.5 / 64)
    assert decode(batch=4096, kv_tokens=8192) == pytest.approx(want, rel=1e-3)


def test_a_kernel_that_does_not_split_a_sequence_takes_its_length() -> None:
    alone = decode({**DECODE, "serial_ns": 16}, batch=1, kv_tokens=131072)
    assert alone == pytest.approx(10e-6 + 2e-6 * 128**0.25 + 131072 * 16e-9, rel=1e-2)


def test_groups_that_share_nothing_read_the_cache_once_a_query_head() -> None:
    shared = {name: value for name, value in DECODE.items() if name not in ("group", "single", "width")}
    own = {**shared, "own_t0_us": 20, "own_memory": 0.5, "own_tile_us": 1}
    inside = decode(own, batch=16, kv_tokens=1 << 20, heads=32, kv_heads=8)
    assert inside == pytest.approx(decode(batch=16, kv_tokens=1 << 20), rel=1e-2)
    outside = decode(own, batch=16, kv_tokens=1 << 20, heads=64, kv_heads=1)
    read = (1 << 20) * 512 * 64 / 0.5e12
    assert outside == pytest.approx(20e-6 + 2e-6 * 64**0.25 + read, rel=1e-2)


def prefill(fit: Mapping[str, float] = PREFILL, **shape: Any) -> float:
    given = {"heads": 32, "kv_heads": 8, "k_width": 128, "v_width": 128, "kv_bits": 16} | RATES | shape
    return float(op_cost.prefill_attention_s(**given, fit=fit))


def test_prefill_attention_of_a_long_prompt_is_its_pairs() -> None:
    # 8,192 · 8,193 / 2 pairs of 4 · 32 · 128 FLOP at half the peak, and its traffic
    pairs = 8192 * 8193 // 2
    traffic = 8192 * 256 * (32 + 2 * 8) * 2 + (pairs / 8192 + 4096) * 8 * 256 * 2
    want = 10e-6 + 4 * 32 * 128 * pairs / 50e12 + traffic / 0.5e12
    assert prefill(sequences=1, tokens=8192, pairs=pairs) == pytest.approx(want, rel=1e-3)


def test_prefill_of_one_head_waits_for_its_last_tile() -> None:
    # the last 128 queries see 4,096 keys: 128 · 4,096.5 · 4 · 128 FLOP on one of 100 SMs
    pairs = 4096 * 4097 // 2
    got = prefill(sequences=1, tokens=4096, pairs=pairs, heads=1, kv_heads=1)
    longest = pairs / 4096 + 2048
    traffic = 4096 * 256 * 3 * 2 + longest * 256 * 2
    assert got == pytest.approx(10e-6 + 128 * longest * 512 / 1e12 + traffic / 0.5e12, rel=1e-3)


def test_packed_queries_of_a_group_share_a_tile() -> None:
    shape: dict[str, Any] = {"sequences": 1000, "tokens": 1000, "pairs": 1000}
    apart, packed = prefill(**shape), prefill({**PREFILL, "packed": 1}, **shape)
    assert apart - packed == pytest.approx(1000 * (32 - 8) * 1e-6 / 100, rel=1e-3)


def test_experts_touch_what_their_tokens_choose() -> None:
    fit = {
        "t0_us": 20, "compute": 0.5, "memory": 0.8, "p": SHARP, "pad_rows": 0, "busy": 0, "gather": 0,
        "permute": 0, "permute_local": 0, "expert_us": 0, "activate": 0,
    }  # fmt: skip
    shape: dict[str, Any] = {"hidden": 4096, "inter": 2048, "top_k": 8, "experts": 128, "weight_bits": 8}
    one = float(op_cost.experts_s(tokens=1, **shape, **RATES, fit=fit))
    assert one == pytest.approx(20e-6 + 8 * 3 * 4096 * 2048 / 0.8e12, rel=1e-3)
    plain = float(op_cost.experts_s(tokens=1, gated=False, **shape, **RATES, fit=fit))
    assert plain == pytest.approx(20e-6 + 8 * 2 * 4096 * 2048 / 0.8e12, rel=1e-3)
    rank = float(op_cost.experts_s(tokens=1 << 17, ep=8, tp=2, **shape, **RATES, fit=fit))
    flop = 2 * 3 * (1 << 17) * 4096 * 1024
    assert rank == pytest.approx(20e-6 + flop / 50e12, rel=1e-3)
    # a skewed router: 8^(1/2) times as many rows on the busiest of 8 ranks
    skewed = op_cost.experts_s(tokens=1 << 17, ep=8, tp=2, skew=1.0, **shape, **RATES, fit={**fit, "busy": 1})
    assert float(skewed) == pytest.approx(20e-6 + 8**0.5 * flop / 50e12, rel=1e-3)


def test_collective_and_elementwise() -> None:
    ring = op_cost.collective_s(
        bytes_moved=1e9, ranks=4, link_bytes_per_s=300e9, fit={"t0_us": 10, "memory": 1, "p": SHARP}
    )
    assert float(ring) == pytest.approx(2.5e-3, rel=1e-6)
    fit = {"t0_us": 2, "memory": 1, "p": SHARP, "cache_reach": 1, "cache_speed": 2}
    small, large = (
        float(op_cost.elementwise_s(bytes_moved=size, bytes_per_s=1e12, fit=fit)) for size in (1e3, 1e9)
    )
    assert [small, large] == pytest.approx([2e-6, 1e-3])


def test_latent_attention_is_read_once_for_all_heads() -> None:
    fit = {
        "t0_us": 10, "chain_us": 0, "serial_ns": 0, "memory": 0.5, "tile_us": 0, "group": 0, "compute": 0.5,
        "p": SHARP, "p_serial": SHARP,
    }  # fmt: skip
    shape: dict[str, Any] = {"batch": 32, "kv_tokens": 1 << 20, "latent_width": 576, "v_width": 512}
    one = float(op_cost.mla_decode_s(heads=1, kv_bits=16, **shape, **RATES, fit=fit))
    assert one == pytest.approx(10e-6 + ((1 << 20) * 576 * 2 + 32 * 1088 * 2) / 0.5e12, rel=1e-3)
    many = float(op_cost.mla_decode_s(heads=128, kv_bits=16, **shape, **RATES, fit=fit))
    assert many == pytest.approx(10e-6 + 2 * 128 * 1088 * (1 << 20) / 50e12, rel=1e-3)


def test_latent_prefill_is_prefill_with_a_key_for_every_head() -> None:
    shape: dict[str, Any] = {"sequences": 2, "tokens": 4096, "pairs": 4096 * 2049 // 2, "heads": 16}
    widths = {"k_width": 192, "v_width": 128}
    latent = op_cost.mla_prefill_s(**shape, **widths, **RATES, fit=PREFILL)
    same = op_cost.prefill_attention_s(**shape, kv_heads=16, kv_bits=16, **widths, **RATES, fit=PREFILL)
    assert float(latent) == pytest.approx(float(same))


def shipped() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Every fit that ships: an id, its operation, its numbers."""
    gpus = set(catalog.ids("gpus"))
    for path in sorted((catalog.PROFILES / "calibrations").glob("*.yaml")):
        if path.stem in gpus:
            for op, inner in yaml.safe_load(path.read_text())["fit"].items():
                for first, by_second in inner.items():
                    for second, numbers in by_second.items():
                        yield f"{path.stem} {op} {first} {second}", op, numbers


FITS: dict[str, list[dict[str, float]]] = {}
for _name, _op, _numbers in shipped():
    FITS.setdefault(_op, []).append(_numbers)

COUNT = st.integers(1, 1 << 15)
HEADS = st.sampled_from([(32, 8), (8, 8), (64, 1), (16, 2), (40, 10), (96, 96)])
GROWN = st.floats(1, 8)


def one_of(op: str) -> Any:
    return st.sampled_from(FITS[op])


def shapes(op: str, draw: Any) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """A shape of an operation, and the arguments that may grow together."""
    count = draw(COUNT)
    if op == "gemm":
        sizes = {"m": count, "n": draw(st.integers(64, 65536)), "k": draw(st.integers(64, 65536))}
        return sizes | {"weight_bits": 8}, {name: (name,) for name in "mnk"}
    heads, kv_heads = draw(HEADS)
    context = draw(st.integers(1, 1 << 16))
    if op in ("decode_attention", "mla_decode"):
        shape = {"batch": count, "kv_tokens": count * context, "heads": heads, "kv_bits": 16}
        shape |= (
            {"latent_width": 576, "v_width": 512}
            if op == "mla_decode"
            else {"kv_heads": kv_heads, "k_width": 128, "v_width": 128}
        )
        return shape, {"context": ("kv_tokens",), "batch": ("batch", "kv_tokens")}
    shape = {"sequences": 1 + count % 64, "heads": heads, "k_width": 128, "v_width": 128}
    shape |= {"tokens": shape["sequences"] * context}
    shape |= {"pairs": shape["tokens"] * (context + 1) / 2}
    if op == "prefill_attention":
        shape |= {"kv_heads": kv_heads, "kv_bits": 8}
    return shape, {"sequences": ("sequences", "tokens", "pairs"), "past": ("pairs",)}


@pytest.mark.parametrize("op", ["gemm", "decode_attention", "prefill_attention", "mla_decode", "mla_prefill"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_more_work_is_never_faster_and_more_rate_never_slower(op: str, data: st.DataObject) -> None:
    fit = data.draw(one_of(op))
    shape, growing = shapes(op, data.draw)
    call: Any = getattr(op_cost, f"{op}_s")
    base = call(**shape, **RATES, fit=fit)
    assert np.isfinite(base)
    assert base > 0
    factor = data.draw(GROWN)
    for names in growing.values():
        more = {**shape, **{name: shape[name] * factor for name in names}}
        assert call(**more, **RATES, fit=fit) >= base * (1 - 1e-9)
    for rate in ("flop_per_s", "bytes_per_s"):
        assert call(**shape, **{**RATES, rate: RATES[rate] * factor}, fit=fit) <= base * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_more_tokens_never_make_experts_faster(data: st.DataObject) -> None:
    fit, tokens, skew = data.draw(one_of("experts")), data.draw(COUNT), data.draw(st.floats(0, 3))
    ep, tp = data.draw(st.sampled_from([1, 2, 8])), data.draw(st.sampled_from([1, 4]))
    shape: dict[str, Any] = {"hidden": 4096, "inter": 1536, "top_k": 8, "experts": 128, "weight_bits": 8}

    def time(count: float, sharing: int) -> float:
        return float(op_cost.experts_s(tokens=count, ep=sharing, tp=tp, skew=skew, **shape, **RATES, fit=fit))

    base = time(tokens, ep)
    assert time(tokens * data.draw(GROWN), ep) >= base * (1 - 1e-9)
    # however skewed, no rank of several has more than all of the layer
    assert base <= time(tokens, 1) * (1 + 1e-9)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all", "reduce_scatter"])
def test_larger_messages_are_never_faster(op: str) -> None:
    sizes = np.geomspace(1, 1e10, 200)
    for by_ranks in FITS[op]:
        times = op_cost.collective_s(bytes_moved=sizes, ranks=4, link_bytes_per_s=1e11, fit=by_ranks)
        assert (np.diff(times) >= 0).all()


def test_arrays_give_what_floats_give() -> None:
    fit = FITS["gemm"][0]
    rows = np.array([1.0, 17.0, 300.0, 5000.0])
    many = op_cost.gemm_s(m=rows, n=4096, k=4096, weight_bits=8, **RATES, fit=fit)
    single = [op_cost.gemm_s(m=m, n=4096, k=4096, weight_bits=8, **RATES, fit=fit) for m in rows.tolist()]
    assert many == pytest.approx(single)
    for own in FITS["decode_attention"]:
        tokens = np.array([1.0, 1e3, 1e6])
        given = {"batch": 4, "heads": 64, "kv_heads": 1, "k_width": 128, "v_width": 128, "kv_bits": 16}
        array = op_cost.decode_attention_s(kv_tokens=tokens, **given, **RATES, fit=own)
        floats = [
            op_cost.decode_attention_s(kv_tokens=one, **given, **RATES, fit=own) for one in tokens.tolist()
        ]
        assert array == pytest.approx(floats)


def test_every_shipped_fit_has_at_most_twelve_numbers() -> None:
    assert {name: len(numbers) for name, _, numbers in shipped() if len(numbers) > 12} == {}
