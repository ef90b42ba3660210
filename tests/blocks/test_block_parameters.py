"""Parameters and caches of every block kind, worked by hand on small widths."""

import pytest

from capplan.blocks import (
    BLOCKS,
    Attention,
    CompressedAttention,
    FactoredAttention,
    Ffn,
    GatedDelta,
    Kda,
    Lightning,
    Mamba1,
    Mamba2,
    MixtureAttention,
    Mla,
    Moe,
    Reused,
    RgLru,
    Rwkv,
    ShortConv,
)
from capplan.specs import Block, Cache

GQA = Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4)
MLA = Mla(hidden=8, heads=2, q_rank=4, kv_rank=6, nope_width=3, rope_width=2, v_width=5)
MOE = Moe(hidden=8, experts=4, experts_per_token=2, expert_ffn=3)
MAMBA2 = Mamba2(hidden=4, heads=2, head_width=4, state=3, n_groups=1, kernel=4)

WORKED: list[tuple[str, Block, int]] = [
    # q 16·8, k and v 8·8, o 8·16
    ("grouped queries: 128 + 2 · 64 + 128", GQA, 384),
    ("biases on q, k, v and o add 16 + 8 + 8 + 8",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, qkv_bias=True, o_bias=True), 424),
    ("Whisper's key projection has no bias",
     Attention(hidden=8, heads=2, kv_heads=2, k_width=4, v_width=4, qkv_bias=True, k_bias=False), 256 + 16),
    ("one norm for every query head and one for every key head",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, qk_norm="head"), 384 + 4 + 4),
    ("norms over the whole projections",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, qk_norm="width"), 384 + 16 + 8),
    ("a gate as wide as the queries",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, gate=True), 384 + 128),
    ("a shared cache leaves no key or value projection",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, keeps="shared", has_k=False, has_v=False),
     256),
    ("an index branch: 2 heads of 3, one key of 3, two norms",
     Attention(hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, index_heads=2, index_width=3),
     384 + 8 * 6 + 8 * 3 + 6),
    ("queries read two joined streams",
     Attention(hidden=8, input_width=16, heads=4, kv_heads=4, k_width=4, v_width=4), 3 * 16 * 16 + 8 * 16),
    # q_a 4·8, norm 4, q_b 10·4, kv_a 8·8, norm 6, kv_b 2·8·6, o 8·10
    ("latent attention with low-rank queries", MLA, 32 + 4 + 40 + 64 + 6 + 96 + 80),
    ("latent attention with direct queries: 10 · 8 for 32 + 4 + 40",
     Mla(hidden=8, heads=2, q_rank=None, kv_rank=6, nope_width=3, rope_width=2, v_width=5), 322 - 76 + 80),
    ("a lightning indexer: 2·3 · 4, 3 · 8, a LayerNorm of 3, 2 · 8",
     Mla(hidden=8, heads=2, q_rank=4, kv_rank=6, nope_width=3, rope_width=2, v_width=5, index_heads=2,
         index_width=3, indexer=True), 322 + 24 + 24 + 6 + 16),
    # wq_a 4·8, 4, wq_b 8·4, wkv 4·8, 4, wo_a 2·3·(8/2), wo_b 8·6, sinks 2
    ("compressed attention, window only",
     CompressedAttention(hidden=8, heads=2, width=4, q_rank=4, o_groups=2, o_rank=3, window=16, ratio=0),
     32 + 4 + 32 + 32 + 4 + 24 + 48 + 2),
    ("a compressor of 128 to one adds 128·4 + 2·4·8 + 4",
     CompressedAttention(hidden=8, heads=2, width=4, q_rank=4, o_groups=2, o_rank=3, window=16, ratio=128),
     178 + 512 + 64 + 4),
    ("factored attention: 8·(6 + 2·4) + 6 + 8·6 + 8·8",
     FactoredAttention(hidden=8, heads=2, kv_heads=1, width=4, q_rank=6), 112 + 6 + 48 + 64),
    ("attention experts: 3·2·8·4 + 2·4·8 + 3·8 + 8",
     MixtureAttention(hidden=8, kv_heads=2, width=2, experts=3, experts_per_token=1), 192 + 64 + 24 + 8),
    ("a gated feed-forward: 3 · 8 · 6", Ffn(hidden=8, ffn=6), 144),
    ("a plain one with biases: 2 · 48 + 6 + 8", Ffn(hidden=8, ffn=6, gated=False, bias=True), 110),
    ("four experts of 3 · 8 · 3 and a router of 4 · 8", MOE, 4 * 72 + 32),
    ("a shared expert and its gate: 3 · 8 · 5 + 8",
     Moe(hidden=8, experts=4, experts_per_token=2, expert_ffn=3, shared_ffn=5, shared_gate=True), 320 + 128),
    ("experts in a latent of 4: 4 · 36 + 32 + two projections of 32",
     Moe(hidden=8, experts=4, experts_per_token=2, expert_ffn=3, latent=4), 144 + 32 + 64),
    ("two experts that do nothing have router rows only",
     Moe(hidden=8, experts=4, experts_per_token=2, expert_ffn=3, router_rows=6), 288 + 48),
    # in (8+14+2)·4, conv 14·4 + 14, A, D, dt 3·2, norm 8, out 4·8
    ("Mamba-2: inner 8, convolution over 8 + 2·3", MAMBA2, 96 + 70 + 6 + 8 + 32),
    # in 16·4, conv 8·4 + 8, x (2+6)·8, dt 8·2 + 8, A 8·3, D 8, out 4·8
    ("Mamba-1: inner 8, state 3, rank 2", Mamba1(hidden=4, inner=8, state=3, dt_rank=2, kernel=4),
     64 + 40 + 64 + 24 + 24 + 8 + 32),
    # keys 4, values 8, conv 16: in 4·(16+8+4), conv 16·4, A and dt 4, norm 4, out 4·8
    ("gated delta net", GatedDelta(hidden=4, k_heads=2, v_heads=2, k_width=2, v_width=4, kernel=4),
     112 + 64 + 4 + 4 + 32),
    # q k v o 4·(4·4), three convolutions 4·4, f and g 2·(2·4 + 4·2), b 2·4, A 2, dt 4, norm 2
    ("Kimi delta attention", Kda(hidden=4, heads=2, head_width=2, kernel=4), 64 + 48 + 32 + 8 + 2 + 4 + 2),
    ("lightning attention: 5 · 16 + 4", Lightning(hidden=4, heads=2, head_width=2), 84),
    ("a short convolution: 3·16 + 4·3 + 16", ShortConv(hidden=4, kernel=3), 76),
    # x, y 2·(4·4 + 4), out 16 + 4, conv 4·4 + 4, decay 4, gates 2·(2·2·2 + 4)
    ("Griffin's recurrence", RgLru(hidden=4, width=4, heads=2, kernel=4), 40 + 20 + 20 + 4 + 24),
    # r k v g o 5·16, mix 4·4, decay and first 2·4, norm 2·4; channel 2·4·6 + 16 + 8
    ("RWKV-5", Rwkv(hidden=4, inner=4, head_width=2, ffn=6), 80 + 16 + 8 + 8 + 48 + 16 + 8),
    ("RWKV-4 has no gate and no group norm",
     Rwkv(hidden=4, inner=4, head_width=2, ffn=6, version=4), 64 + 12 + 8 + 48 + 16 + 8),
    ("a reused block holds nothing of its own", Reused(inner=GQA), 0),
]  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), [row[1:] for row in WORKED], ids=[row[0] for row in WORKED])
def test_parameters_match_the_hand_count(block: Block, expected: int) -> None:
    assert sum(tensor.parameters for tensor in block.tensors()) == expected


def test_every_block_kind_has_a_worked_count() -> None:
    assert {row[1].kind for row in WORKED} == set(BLOCKS)
    assert all(isinstance(block, BLOCKS[block.kind]) for _, block, _ in WORKED)


@pytest.mark.parametrize("block", [row[1] for row in WORKED], ids=[row[0] for row in WORKED])
def test_every_tensor_can_be_split_where_it_says(block: Block) -> None:
    for tensor in block.tensors():
        assert tensor.elements > 0
        assert 0 < tensor.active_copies <= tensor.copies
        if tensor.split_axis is not None:
            assert tensor.shape[tensor.split_axis] % tensor.split_units == 0


STATES: list[tuple[str, Block, tuple[tuple[int, int], ...]]] = [
    ("Mamba-2 keeps 8 · 3 and a convolution of 14 · 3", MAMBA2, ((24, 16), (42, 16))),
    ("Mamba-1 keeps 8 · 3 and 8 · 3", Mamba1(hidden=4, inner=8, state=3, dt_rank=2, kernel=4),
     ((24, 16), (24, 16))),
    ("gated delta keeps 2 · 2 · 4 and 16 · 3",
     GatedDelta(hidden=4, k_heads=2, v_heads=2, k_width=2, v_width=4, kernel=4), ((16, 16), (48, 16))),
    ("KDA keeps 2 · 2 · 2 in fp32 and three convolutions of 4 · 3",
     Kda(hidden=4, heads=2, head_width=2, kernel=4), ((8, 32), (36, 16))),
    ("lightning keeps 2 · 2 · 2 in fp32", Lightning(hidden=4, heads=2, head_width=2), ((8, 32),)),
    ("LFM2 keeps the last two inputs", ShortConv(hidden=4, kernel=3), ((8, 16),)),
    ("Griffin keeps its state in fp32 and three inputs", RgLru(hidden=4, width=4, heads=2, kernel=4),
     ((4, 32), (12, 16))),
    ("RWKV-5 keeps a matrix a head", Rwkv(hidden=4, inner=4, head_width=2, ffn=6), ((8, 32), (8, 16))),
    ("RWKV-4 keeps three vectors", Rwkv(hidden=4, inner=4, head_width=2, ffn=6, version=4),
     ((12, 32), (8, 16))),
]  # fmt: skip


@pytest.mark.parametrize(("block", "expected"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
def test_states_match_the_hand_count(block: Block, expected: tuple[tuple[int, int], ...]) -> None:
    (cache,) = block.caches()
    assert cache.kind == "state"
    assert cache.state_elements == expected


def test_grouped_queries_cache_only_their_key_value_heads() -> None:
    assert GQA.caches() == (Cache(kind="full", heads=2, k_width=4, v_width=4),)


def test_more_key_value_heads_never_cache_fewer_elements() -> None:
    sizes = []
    for heads in (1, 2, 4, 8):
        block = Attention(hidden=8, heads=8, kv_heads=heads, k_width=4, v_width=4)
        (cache,) = block.caches()
        sizes.append(cache.heads * (cache.k_width + cache.v_width))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8 * sizes[0]


def test_latent_attention_caches_one_latent_whatever_the_heads() -> None:
    assert MLA.caches() == (Cache(kind="mla", k_width=8, splits=False),)


def test_an_indexer_caches_one_fp8_key_and_its_scale() -> None:
    block = Mla(
        hidden=8, heads=2, q_rank=4, kv_rank=6, nope_width=3, rope_width=2, v_width=5,
        index_heads=2, index_width=128, indexer=True,
    )  # fmt: skip
    _, keys = block.caches()
    assert (keys.kind, keys.k_width, keys.element_bits, keys.entry_extra_bytes) == ("indexer", 128, 8, 4)


def test_compressed_attention_keeps_a_window_and_one_entry_every_few_tokens() -> None:
    block = CompressedAttention(
        hidden=8, heads=2, width=4, q_rank=4, o_groups=2, o_rank=3, window=16, ratio=4,
        index_heads=2, index_width=3,
    )  # fmt: skip
    kept = [(cache.kind, cache.window, cache.stride) for cache in block.caches()]
    assert kept == [("sliding", 16, 1), ("compressed", None, 4), ("indexer", None, 4)]


def test_a_shared_cache_keeps_nothing_and_a_reused_block_keeps_its_own() -> None:
    shared = Attention(
        hidden=8, heads=4, kv_heads=2, k_width=4, v_width=4, keeps="shared", has_k=False, has_v=False
    )
    assert shared.caches() == ()
    assert Reused(inner=GQA).caches() == GQA.caches()


def test_active_experts_are_fewer_than_resident_ones() -> None:
    experts = [tensor for tensor in MOE.tensors() if tensor.role == "experts"]
    assert {(tensor.copies, tensor.active_copies) for tensor in experts} == {(4, 2)}
