"""Memory formulas: hand-worked values and properties."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.formulas import memory
from capplan.units import GIB

LLAMA_3_8B = {"layers": 32, "kv_heads": 8, "head_dim": 128, "kv_dtype_bytes": 2}

small = st.integers(min_value=1, max_value=1 << 12)
tokens = st.integers(min_value=0, max_value=1 << 20)
blocks = st.sampled_from([1, 8, 16, 32, 64, 100, 128, 256])


@pytest.mark.parametrize(
    ("parameters", "bits", "expected"),
    [
        pytest.param(1, 32, 4.0, id="one parameter in FP32"),
        pytest.param(1, 16, 2.0, id="one parameter in FP16"),
        pytest.param(1, 8, 1.0, id="one parameter in INT8"),
        pytest.param(1, 4, 0.5, id="one parameter in INT4"),
        pytest.param(7e9, 32, 28.0e9, id="7B in FP32"),
        pytest.param(7e9, 16, 14.0e9, id="7B in FP16"),
        pytest.param(7e9, 8, 7.0e9, id="7B in INT8"),
        pytest.param(7e9, 4, 3.5e9, id="7B in INT4"),
        pytest.param(70e9, 32, 280.0e9, id="70B in FP32"),
        pytest.param(70e9, 16, 140.0e9, id="70B in FP16"),
        pytest.param(70e9, 8, 70.0e9, id="70B in INT8"),
        pytest.param(70e9, 4, 35.0e9, id="70B in INT4"),
        pytest.param(8e9, 4, 4.0e9, id="the studio's 8B in INT4"),
    ],
)
def test_weight_bytes(parameters: float, bits: float, expected: float) -> None:
    assert memory.weight_bytes(parameters=parameters, bits=bits) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        # 4096 · 4096 / 128 groups, each 16 + 4 bits.
        pytest.param(
            lambda: memory.group_scales_bytes(groups=131_072, scale_bits=16, zero_bits=4),
            327_680,
            id="scales and zeros of a 4096 x 4096 AWQ matrix",
        ),
        pytest.param(
            lambda: memory.effective_bits(element_bits=4, group=128, scale_bits=16, zero_bits=4),
            4.15625,
            id="AWQ int4 in groups of 128 with zero points",
        ),
        pytest.param(
            lambda: memory.effective_bits(element_bits=4, group=128, scale_bits=16),
            4.125,
            id="symmetric int4 in groups of 128",
        ),
        pytest.param(
            lambda: memory.effective_bits(element_bits=4, group=32, scale_bits=8),
            4.25,
            id="MXFP4: an 8-bit scale for 32",
        ),
        pytest.param(
            lambda: memory.effective_bits(element_bits=4, group=16, scale_bits=8),
            4.5,
            id="NVFP4: an 8-bit scale for 16",
        ),
        pytest.param(lambda: memory.kv_bytes_per_token(**LLAMA_3_8B), 131_072, id="a token of Llama-3-8B"),
        pytest.param(
            lambda: memory.kv_bytes_per_token(**LLAMA_3_8B, tp=4),
            32_768,
            id="a token on one of 4 GPUs: 2 of 8 heads",
        ),
        pytest.param(
            lambda: memory.kv_bytes_per_token(**LLAMA_3_8B, tp=16),
            16_384,
            id="a token on one of 16 GPUs: a replicated head",
        ),
        pytest.param(
            lambda: memory.kv_bytes_per_token(**(LLAMA_3_8B | {"kv_dtype_bytes": 1})),
            65_536,
            id="a token in an fp8 KV cache",
        ),
        pytest.param(
            lambda: memory.kv_entry_bytes(heads=1, k_width=512, v_width=64, element_bits=16),
            1_152,
            id="an MLA entry of DeepSeek-V3",
        ),
        pytest.param(
            lambda: memory.kv_entry_bytes(heads=1, k_width=128, v_width=0, element_bits=8, extra_bytes=4),
            132,
            id="an indexer's fp8 key with its fp32 scale",
        ),
        pytest.param(
            lambda: memory.kv_cache_bytes(**LLAMA_3_8B, batch=64, context=8192),
            68_719_476_736,
            id="the explosion: Llama-3-8B, 64 users at 8192",
        ),
        pytest.param(
            lambda: memory.kv_cache_bytes(**LLAMA_3_8B, batch=64, context=8192) / GIB,
            64.0,
            id="the explosion in GiB",
        ),
        pytest.param(
            lambda: memory.kv_cache_bytes(**LLAMA_3_8B, batch=1, context=4096),
            536_870_912,
            id="Llama-3-8B, 1 user at 4096: half a GiB",
        ),
        pytest.param(
            lambda: memory.kv_cache_bytes(**LLAMA_3_8B, batch=16, context=4096),
            8_589_934_592,
            id="the studio's KV cache: 8 GiB",
        ),
        pytest.param(
            lambda: memory.mha_kv_cache_bytes(
                layers=40, batch=1, context=4096, hidden=5120, kv_dtype_bytes=2
            ),
            3_355_443_200,
            id="Llama-2-13B, 1 user at 4096",
        ),
        pytest.param(
            lambda: memory.mla_kv_bytes_per_token(layers=61, latent=512, rope_width=64, kv_dtype_bytes=2),
            70_272,
            id="a token of DeepSeek-V3",
        ),
        pytest.param(lambda: memory.kept_tokens(context=8192, window=1024), 1024, id="a window of 1024"),
        pytest.param(lambda: memory.kept_tokens(context=500, window=1024), 500, id="not yet full"),
        pytest.param(lambda: memory.kept_tokens(context=8192), 8192, id="full attention"),
        pytest.param(lambda: memory.kept_tokens(context=8195, stride=4), 2048, id="an entry every 4 tokens"),
        pytest.param(
            lambda: memory.recurrent_state_bytes(elements=64 * 64 * 128, element_bits=32),
            2_097_152,
            id="a Mamba-2 state of Nemotron-3-Nano",
        ),
        pytest.param(lambda: memory.kv_blocks(tokens=100, block_size=16), 7, id="blocks of 100"),
        pytest.param(lambda: memory.kv_blocks(tokens=112, block_size=16), 7, id="exactly 7 blocks"),
        pytest.param(lambda: memory.kv_blocks(tokens=0, block_size=16), 0, id="no token, no block"),
        pytest.param(
            lambda: memory.kv_slot(block_table=(9, 4, 31, 7, 0, 12, 2), position=99, block_size=16),
            35,
            id="token 99 is slot 3 of physical block 2",
        ),
        pytest.param(
            lambda: memory.pool_blocks(pool_bytes=8 * GIB, block_size=16, kv_bytes_per_token=131_072),
            4096,
            id="blocks of an 8 GiB pool",
        ),
        pytest.param(
            lambda: memory.pool_blocks(pool_bytes=8 * GIB - 1, block_size=16, kv_bytes_per_token=131_072),
            4095,
            id="a byte less is a block less",
        ),
        pytest.param(
            lambda: memory.kv_usage_fraction(used_blocks=3687, total_blocks=4096),
            pytest.approx(0.9001, abs=5e-5),
            id="usage just past 90 %",
        ),
        pytest.param(lambda: memory.tail_waste_tokens(tokens=100, block_size=16), 12, id="tail of 100"),
        pytest.param(lambda: memory.tail_waste_tokens(tokens=97, block_size=16), 15, id="the worst tail"),
        pytest.param(lambda: memory.tail_waste_tokens(tokens=96, block_size=16), 0, id="no tail"),
        pytest.param(
            lambda: memory.paged_waste_fraction(tokens=1000, block_size=16),
            pytest.approx(8 / 1008),
            id="waste at 1000 tokens",
        ),
        pytest.param(
            lambda: memory.paged_waste_fraction(tokens=0, block_size=16), 0.0, id="no waste of none"
        ),
        pytest.param(
            lambda: memory.contiguous_unused_bytes(
                sequences=16, reserved_tokens=8192, used_tokens=1024, kv_bytes_per_token=131_072
            ),
            15_032_385_536,
            id="16 sequences reserve 8192 and use 1024: 14 GiB",
        ),
        pytest.param(
            lambda: memory.contiguous_waste_fraction(reserved_tokens=4096, used_tokens=1024),
            0.75,
            id="three quarters of a reservation unused",
        ),
        pytest.param(
            lambda: memory.external_fragmentation_bytes(pool_bytes=10 * GIB, reservation_bytes=4 * GIB),
            2 * GIB,
            id="10 GiB in reservations of 4 GiB",
        ),
        pytest.param(
            lambda: memory.shared_prefix_saved_tokens(users=64, prefix_tokens=1000, block_size=16),
            62_496,
            id="64 users share 62 full blocks",
        ),
        pytest.param(
            lambda: memory.shared_prefix_saved_tokens(users=1, prefix_tokens=1000, block_size=16),
            0,
            id="nobody to share with",
        ),
        pytest.param(
            lambda: memory.overhead_bytes(weight_bytes=14e9, fraction=0.20),
            pytest.approx(2.8e9, rel=1e-12),
            id="20 % of 14 GB",
        ),
        pytest.param(
            lambda: memory.overhead_bytes(weight_bytes=14e9, fraction=0.15),
            pytest.approx(2.1e9, rel=1e-12),
            id="15 % of 14 GB",
        ),
        pytest.param(
            lambda: memory.total_bytes(weights=4_000_000_000, kv_cache=8_589_934_592, overhead=1_500_000_000),
            14_089_934_592,
            id="the studio's demand",
        ),
        pytest.param(
            lambda: memory.headroom_bytes(usable=24_000_000_000, total=14_089_934_592),
            9_910_065_408,
            id="the studio's headroom",
        ),
        pytest.param(
            lambda: memory.headroom_bytes(usable=40e9, total=68_719_476_736),
            -28_719_476_736,
            id="64 GiB of KV cache on an A100 40GB",
        ),
        pytest.param(lambda: memory.training_bytes(parameters=7e9), 112e9, id="training 7B with Adam"),
        pytest.param(lambda: memory.stage_layers(layers=61, stages=4), 16, id="61 layers, 4 stages"),
        pytest.param(lambda: memory.stage_layers(layers=80, stages=4), 20, id="80 layers, 4 stages"),
    ],
)
def test_worked_number(call: Callable[[], float], expected: float) -> None:
    assert call() == expected


@given(count=tokens, block=blocks)
def test_tail_is_shorter_than_a_block(count: int, block: int) -> None:
    tail = memory.tail_waste_tokens(tokens=count, block_size=block)
    assert 0 <= tail <= block - 1
    assert memory.kv_blocks(tokens=count, block_size=block) * block == count + tail


@given(count=st.integers(min_value=1, max_value=1 << 20), block=blocks)
def test_waste_of_paging_stays_below_4_percent_from_25_blocks(count: int, block: int) -> None:
    fraction = memory.paged_waste_fraction(tokens=count, block_size=block)
    assert 0 <= fraction < 1
    if memory.kv_blocks(tokens=count, block_size=block) >= 25:
        assert fraction < 0.04


@given(count=st.integers(min_value=1, max_value=1 << 12), block=blocks, seed=st.randoms())
def test_slots_of_a_sequence_are_distinct_and_inside_its_blocks(count: int, block: int, seed: object) -> None:
    table = list(range(memory.kv_blocks(tokens=count, block_size=block)))
    seed.shuffle(table)  # type: ignore[attr-defined]
    slots = [memory.kv_slot(block_table=table, position=at, block_size=block) for at in range(count)]
    assert len(set(slots)) == count
    assert {slot // block for slot in slots} == set(table)


@given(layers=small, heads=small, width=small, batch=small, context=small)
def test_kv_cache_is_linear_in_batch_and_context(
    layers: int, heads: int, width: int, batch: int, context: int
) -> None:
    def size(batch: int, context: int) -> float:
        return memory.kv_cache_bytes(
            layers=layers,
            batch=batch,
            context=context,
            kv_heads=heads,
            head_dim=width,
            kv_dtype_bytes=2,
        )

    assert size(batch, context) == batch * context * size(1, 1)
    assert size(1, 1) == memory.mha_kv_cache_bytes(
        layers=layers, batch=1, context=1, hidden=heads * width, kv_dtype_bytes=2
    )
    entry = memory.kv_entry_bytes(heads=heads, k_width=width, v_width=width, element_bits=16)
    assert size(1, 1) == layers * entry


@given(layers=small, latent=small, rope=small)
def test_a_latent_is_one_head_of_its_two_widths(layers: int, latent: int, rope: int) -> None:
    entry = memory.kv_entry_bytes(heads=1, k_width=latent, v_width=rope, element_bits=16)
    assert layers * entry == memory.mla_kv_bytes_per_token(
        layers=layers, latent=latent, rope_width=rope, kv_dtype_bytes=2
    )


@given(heads=small, tp=st.integers(min_value=1, max_value=256))
def test_more_ranks_never_raise_a_rank_nor_lower_the_sum(heads: int, tp: int) -> None:
    def rank(tp: int) -> float:
        return memory.kv_bytes_per_token(layers=4, kv_heads=heads, head_dim=128, kv_dtype_bytes=2, tp=tp)

    assert rank(tp + 1) <= rank(tp)
    assert tp * rank(tp) >= rank(1)


@given(
    context=tokens,
    window=st.none() | st.integers(min_value=1, max_value=1 << 20),
    stride=st.integers(min_value=1, max_value=64),
)
def test_kept_entries_never_exceed_the_context_or_shrink_with_it(
    context: int, window: int | None, stride: int
) -> None:
    def kept(context: int) -> int:
        return memory.kept_tokens(context=context, window=window, stride=stride)

    assert 0 <= kept(context) <= context
    assert kept(context) <= kept(context + 1) <= kept(context) + 1
    if window is not None:
        assert kept(context) <= window


@given(used=tokens, more=tokens, sequences=small)
def test_unused_reservation_is_bytes_and_share_of_one_thing(used: int, more: int, sequences: int) -> None:
    reserved = used + more + 1
    unused = memory.contiguous_unused_bytes(
        sequences=sequences, reserved_tokens=reserved, used_tokens=used, kv_bytes_per_token=2
    )
    share = memory.contiguous_waste_fraction(reserved_tokens=reserved, used_tokens=used)
    assert 0 < share <= 1
    assert unused == pytest.approx(share * reserved * sequences * 2)


@given(pool=st.integers(0, 1 << 40), reservation=st.integers(1, 1 << 40))
def test_external_fragmentation_takes_no_further_reservation(pool: int, reservation: int) -> None:
    left = memory.external_fragmentation_bytes(pool_bytes=pool, reservation_bytes=reservation)
    assert 0 <= left < reservation
    assert (pool - left) % reservation == 0


@given(users=small, prefix=tokens, block=blocks)
def test_sharing_saves_at_most_every_other_prefix(users: int, prefix: int, block: int) -> None:
    saved = memory.shared_prefix_saved_tokens(users=users, prefix_tokens=prefix, block_size=block)
    assert 0 <= saved <= (users - 1) * prefix
    assert (users - 1) * prefix - saved <= (users - 1) * (block - 1)


@given(
    weights=st.integers(0, 1 << 50),
    kv=st.integers(0, 1 << 50),
    overhead=st.integers(0, 1 << 50),
    usable=st.integers(0, 1 << 50),
)
def test_headroom_and_demand_make_the_memory(weights: int, kv: int, overhead: int, usable: int) -> None:
    total = memory.total_bytes(weights=weights, kv_cache=kv, overhead=overhead)
    assert memory.headroom_bytes(usable=usable, total=total) + total == usable


@given(layers=small, stages=st.integers(min_value=1, max_value=64))
def test_the_largest_stage_holds_its_share_and_no_layer_more(layers: int, stages: int) -> None:
    stage = memory.stage_layers(layers=layers, stages=stages)
    assert stage * stages >= layers > (stage - 1) * stages


@given(elements=st.integers(0, 1 << 40), bits=st.sampled_from([8, 16, 32]))
def test_a_state_is_whole_bytes(elements: int, bits: int) -> None:
    size = memory.recurrent_state_bytes(elements=elements, element_bits=bits)
    assert isinstance(size, int)
    assert size * 8 == elements * bits
