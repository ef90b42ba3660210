"""vLLM's KV cache layout: worked by hand, by version, and what must hold for every mix of layers.

Hand-worked figures are written out; where a figure is a start-up log's, its source is named.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import catalog
from capplan.blocks.attention import Attention
from capplan.blocks.compressed import CompressedAttention
from capplan.blocks.linear_attention import GatedDelta
from capplan.blocks.mamba import Mamba2
from capplan.blocks.mla import Mla
from capplan.engines.kv_groups import stage_layers
from capplan.engines.kv_layers import LayerCache
from capplan.engines.kv_question import LONGEST, KvQuestion
from capplan.engines.kv_rules import NEWEST, RULES, rules_for
from capplan.engines.vllm_kv import KvPlan, kv_pool, plan_kv, state_limited_sequences
from capplan.errors import InputError
from capplan.specs import Block, Layer, LayerGroup, Model
from capplan.units import GIB


def model_of(blocks: Sequence[Block]) -> Model:
    """A model of one block a layer, in this order."""
    indices: dict[Block, list[int]] = {}
    for index, block in enumerate(blocks):
        indices.setdefault(block, []).append(index)
    groups = tuple(
        LayerGroup(layer=Layer(blocks=(block,)), indices=tuple(places)) for block, places in indices.items()
    )
    return Model(
        name="mix",
        architecture="mix",
        hidden=1024,
        vocab=1000,
        heads=16,
        groups=groups,
        outside=(),
        tied=False,
    )


def full(kv_heads: int = 8, width: int = 128, v_width: int | None = None) -> Attention:
    return Attention(hidden=1024, heads=16, kv_heads=kv_heads, k_width=width, v_width=v_width or width)


def windowed(
    window: int, kv_heads: int = 8, width: int = 128, v_width: int | None = None, chunked: bool = False
) -> Attention:
    kept = full(kv_heads, width, v_width)
    return replace(kept, keeps="chunked" if chunked else "sliding", window=window)


def mamba(
    *, heads: int = 128, head_width: int = 64, state: int = 128, n_groups: int = 8, state_bits: int = 32
) -> Mamba2:
    return Mamba2(
        hidden=1024,
        heads=heads,
        head_width=head_width,
        state=state,
        n_groups=n_groups,
        kernel=4,
        state_bits=state_bits,
    )


def mla(indexer: bool = False) -> Mla:
    return Mla(
        hidden=1024,
        heads=16,
        q_rank=512,
        kv_rank=512,
        nope_width=128,
        rope_width=64,
        v_width=128,
        index_heads=64 if indexer else 0,
        index_width=128 if indexer else 0,
        indexer=indexer,
    )


LLAMA_3_1_8B = model_of([full()] * 32)
GEMMA_2_9B = model_of([windowed(4096, width=256), full(width=256)] * 21)
GEMMA_3_1B = model_of(([windowed(512, 1, 256)] * 5 + [full(1, 256)]) * 4 + [windowed(512, 1, 256)] * 2)
LLAMA_4_SCOUT = model_of(([windowed(8192, chunked=True)] * 3 + [full()]) * 12)
GPT_OSS_120B = model_of([windowed(128, width=64), full(width=64)] * 18)
MIMO_V2_FLASH = model_of([full(4, 192, 128)] * 9 + [windowed(128, 8, 192, 128)] * 39)
DEEPSEEK_V3 = model_of([mla()] * 61)
DELTA = GatedDelta(hidden=2048, k_heads=16, v_heads=32, k_width=128, v_width=128, kernel=4)
QWEN3_NEXT = model_of(([DELTA] * 3 + [full(2, 256)]) * 12)
# Nemotron-H 8B: 24 Mamba-2 layers (128 heads of 64, state 128, 8 groups, fp32), 4 of attention, 24 MLP.
NEMOTRON_H_8B = model_of(([mamba()] * 6 + [full()]) * 4)


def plan(model: Model, gib: float, max_model_len: int, **given: object) -> KvPlan:
    return plan_bytes(model, int(gib * GIB), max_model_len, **given)


def plan_bytes(model: Model, kv_bytes: int, max_model_len: int, **given: object) -> KvPlan:
    question = KvQuestion(**given)  # type: ignore[arg-type]
    return plan_kv(model, question, kv_bytes=kv_bytes, max_model_len=max_model_len)


def test_one_kind_of_layer_is_one_group() -> None:
    got = plan(LLAMA_3_1_8B, 10, 8192)
    # A page is 16 tokens · 2 · 8 · 128 · 2 B = 65,536 B, a block 32 pages = 2 MiB, 10 GiB are 5,120 blocks.
    assert (got.groups, got.block_size, got.page_bytes, got.num_blocks) == (1, 16, 32 * 65536, 5120)
    assert (got.tokens, got.max_concurrency, got.starts) == (81920, 10.0, True)
    assert got.layers == ("32 × full, blocks of 16 tokens in 65,536 B",)
    assert state_limited_sequences(got) is None


def test_the_catalog_model_is_laid_out_alike() -> None:
    model = catalog.load_model("llama-3.1-8b")
    assert plan(model, 10, 8192) == plan(LLAMA_3_1_8B, 10, 8192)
    assert plan(model, 10, 8192, tp=8).num_blocks == 8 * 5120


def test_refusal_counts_all_blocks_but_one() -> None:
    got = plan(LLAMA_3_1_8B, 10, 131072)
    # 8,192 blocks of 2 MiB = 16 GiB are needed; 5,119 of 5,120 blocks can be given out: 81,904 tokens.
    assert (got.starts, got.need_bytes, got.longest_model_len) == (False, 16 * GIB, 81904)
    assert plan(LLAMA_3_1_8B, 10, 81904).starts
    assert not plan(LLAMA_3_1_8B, 10, 81905).starts
    # Before 0.29 the block that is never given out was not counted.
    assert plan(LLAMA_3_1_8B, 10, 81920, rules=rules_for("0.28.0")).starts


def test_sliding_layers_hold_the_window_and_what_is_in_flight() -> None:
    got = plan(GEMMA_2_9B, 10, 32768)
    # Page: 16 · 2 · 8 · 256 · 2 B = 131,072; block: 21 pages = 2,752,512 B; 10 GiB / that = 3,900.9.
    assert (got.groups, got.page_bytes, got.num_blocks) == (2, 2752512, 3900)
    # Full: 2,048 blocks. Sliding: min(4,095 + 2 · 2,048, 32,768) = 8,191 tokens, 512 blocks + 1.
    assert got.request_blocks == 2048 + 513
    assert got.max_concurrency == pytest.approx(3900 / 2561)
    assert got.tokens == 49900  # int(1.522843 · 32,768)


def test_more_scheduled_tokens_cost_windows_concurrency() -> None:
    small = plan(GEMMA_2_9B, 10, 32768, max_num_batched_tokens=2048)
    large = plan(GEMMA_2_9B, 10, 32768, max_num_batched_tokens=8192)
    # 4,095 + 2 · 8,192 = 20,479 tokens: 1,280 blocks + 1.
    assert large.request_blocks == 2048 + 1281
    assert large.max_concurrency < small.max_concurrency
    # Without async scheduling one step is in flight: 4,095 + 2,048 = 6,143 tokens, 384 blocks + 1.
    assert plan(GEMMA_2_9B, 10, 32768, steps_in_flight=1).request_blocks == 2048 + 385


def test_groups_get_equal_numbers_of_layers() -> None:
    # 22 sliding and 4 full layers: groups of 4, so 6 (the last padded by 2) and 1.
    got = plan(GEMMA_3_1B, 10, 8192)
    assert (got.groups, got.page_bytes, got.num_blocks) == (7, 4 * 16384, 163840)
    # Full 512; sliding min(511 + 4,096, 8,192) = 4,607: 288 + 1 in each of six groups.
    assert got.request_blocks == 512 + 6 * 289


def test_nearly_equal_kinds_are_padded_to_the_larger() -> None:
    mix = model_of([full()] * 13 + [windowed(128)] * 12)
    assert plan(mix, 10, 8192).groups == 2
    assert plan(mix, 10, 8192).page_bytes == 13 * 65536
    # Before 0.12 the smaller kind gave the size: 12 layers, so the 13 need two groups.
    assert plan(mix, 10, 8192, rules=rules_for("0.11.2")).groups == 3
    # 14 against 10 is 1.4: padded since 0.18, split in 0.12–0.17.
    wide = model_of([full()] * 14 + [windowed(128)] * 10)
    assert plan(wide, 10, 8192).groups == 2
    assert plan(wide, 10, 8192, rules=rules_for("0.17.1")).groups == 3


def test_chunked_layers_hold_a_chunk_and_what_is_in_flight() -> None:
    got = plan(LLAMA_4_SCOUT, 40, 131072)
    # 36 chunked and 12 full layers: 3 + 1 groups. Chunked: (8,192 + 4,096) / 16 = 768 blocks.
    assert (got.groups, got.request_blocks) == (4, 8192 + 3 * 768)
    # 0.10.1–0.13 ran models with chunked layers without groups.
    old = plan(LLAMA_4_SCOUT, 40, 131072, rules=rules_for("0.11.0"))
    assert (old.groups, old.request_blocks) == (1, 8192)


def test_gpt_oss_has_two_groups() -> None:
    got = plan(GPT_OSS_120B, 10, 8192, kv_bits=8)
    # Page 16 · 2 · 8 · 64 B = 16,384 in fp8; sliding: 127 + 4,096 = 4,223 tokens, 264 blocks + 1.
    assert (got.groups, got.page_bytes, got.request_blocks) == (2, 18 * 16384, 512 + 265)


def test_smaller_pages_get_more_tokens_a_block() -> None:
    got = plan(MIMO_V2_FLASH, 10, 8192)
    # Full 4 · 320 · 2 · 16 = 40,960 B, sliding 8 heads 81,920 B: full blocks hold 32 tokens.
    assert (got.groups, got.page_bytes) == (6, 9 * 81920)
    # Full ceil(8,192 / 32) = 256; sliding 127 + 4,096 = 4,223: 264 + 1, five groups of at most 9.
    assert got.request_blocks == 256 + 5 * 265
    # Eight ranks: one head each, pages are equal by themselves.
    assert plan(MIMO_V2_FLASH, 10, 8192, tp=8).request_blocks == 512 + 5 * 265


def test_pages_that_do_not_divide_are_padded_since_0_24() -> None:
    mix = model_of([full(4, 128)] * 10 + [windowed(1024, 1, 96)] * 20)
    # 32,768 B against 16 · 2 · 96 · 2 = 6,144 B: no multiple.
    assert plan(mix, 10, 8192).page_bytes == 10 * 32768
    with pytest.raises(InputError, match="6,144 and 32,768"):
        plan(mix, 10, 8192, rules=rules_for("0.23.0"))


def test_state_pages_raise_the_block() -> None:
    got = plan(QWEN3_NEXT, 10, 8192)
    # State: 32·128·128 · 2 + (2·16·128 + 32·128)·3 · 2 = 1,097,728 B. 16 · ceil(1,097,728 / 32,768) = 544.
    assert got.layers == (
        "36 × state of 1,097,728 B padded to 1,114,112 B",
        "12 × full, blocks of 544 tokens in 1,114,112 B",
    )
    assert (got.groups, got.block_size, got.page_bytes) == (4, 544, 12 * 1114112)
    # Prefix caching keeps two states a sequence: 16 blocks of attention and 3 · 2 of states.
    assert (got.request_blocks, got.state_blocks) == (16 + 6, 6)
    # In fp8 a token is half as large, and 1,072 tokens fill the state's page exactly.
    assert plan(QWEN3_NEXT, 10, 8192, kv_bits=8).block_size == 1072
    assert plan(QWEN3_NEXT, 10, 8192, kv_bits=8).layers[0] == "36 × state of 1,097,728 B"


def test_mamba_2_keeps_a_checkpoint_beside_its_states() -> None:
    got = plan(NEMOTRON_H_8B, 10, 8192)
    # State: 128·64·128 · 4 + (8,192 + 2·8·128)·3 · 2 = 4,255,744 B; 16 · ceil(/ 65,536) = 1,040 tokens.
    assert (got.groups, got.block_size) == (7, 1040)
    assert (got.request_blocks, got.state_blocks) == (8 + 6 * 3, 18)
    assert state_limited_sequences(got) == got.num_blocks
    # 0.26–0.28: two states. Without prefix caching: one.
    assert plan(NEMOTRON_H_8B, 10, 8192, rules=rules_for("0.27.1")).state_blocks == 12
    assert plan(NEMOTRON_H_8B, 10, 8192, mamba_cache_mode="none").state_blocks == 6


def test_mamba_groups_that_do_not_divide_are_replicated() -> None:
    mix = model_of([mamba(n_groups=1)] * 3 + [full()])
    # Two ranks, two copies of B and C: (8,192 + 2·2·128)·3 / 2 = 13,056 elements in 16 bits,
    # and 128·64·128 / 2 in fp32.
    got = kv_pool(mix, KvQuestion(tp=2)).placed[0].cache
    assert got.shape == (128 * 64 * 128 // 2 * 4, 13056 * 2)


def test_states_alone_need_no_length() -> None:
    got = plan(model_of([mamba()] * 10), 10, 8192)
    assert (got.groups, got.page_bytes, got.request_blocks) == (1, 10 * 4255744, 1)
    assert got.longest_model_len == LONGEST


def test_latents_are_whole_on_every_rank() -> None:
    one = plan(DEEPSEEK_V3, 40, 32768, kv_bits=8, block_size=64)
    # 64 · 576 B · 61 layers = 2,248,704 B a block.
    assert (one.page_bytes, one.num_blocks) == (2248704, 40 * GIB // 2248704)
    assert one == plan(DEEPSEEK_V3, 40, 32768, kv_bits=8, block_size=64, tp=8)


def test_indexer_keys_share_the_latents_group() -> None:
    sparse = model_of([mla(indexer=True)] * 61)
    # 16 bits: 1,152 + 132 B a token; fp8: 512 + 16 of scales + 128 of rotary part = 656, + 132.
    assert plan(sparse, 40, 32768, block_size=64).page_bytes == 61 * 64 * (1152 + 132)
    got = plan(sparse, 40, 32768, block_size=64, kv_bits=8)
    assert (got.groups, got.page_bytes) == (1, 61 * 64 * (656 + 132))


def test_a_hybrid_with_latents_has_blocks_of_128() -> None:
    mix = model_of(([mamba(heads=16, head_width=64, n_groups=1)] * 3 + [mla()]) * 7)
    # State: 16·64·128 · 4 + (1,024 + 256)·3 · 2 = 531,968 B over 1,152 B a token = 462 tokens.
    assert plan(mix, 10, 8192).block_size == 512
    assert plan(mix, 10, 8192, rules=rules_for("0.26.0")).block_size == 512
    assert plan(mix, 10, 8192, rules=rules_for("0.11.0")).block_size == 464


def test_without_the_hybrid_manager_windows_count_in_full() -> None:
    got = plan(GEMMA_2_9B, 10, 32768, hybrid=False)
    assert (got.groups, got.page_bytes, got.request_blocks) == (1, 42 * 131072, 2048)
    assert got.max_concurrency < plan(GEMMA_2_9B, 10, 32768).max_concurrency
    # A model of windows alone keeps them; states cannot be held at all.
    assert plan(model_of([windowed(4096)] * 32), 10, 32768, hybrid=False).request_blocks == 513
    with pytest.raises(InputError, match="hybrid KV cache manager"):
        plan(QWEN3_NEXT, 10, 8192, hybrid=False)
    with pytest.raises(InputError, match=r"windows of \[512, 1024\]"):
        plan(model_of([full(), windowed(512), windowed(1024)]), 10, 8192, hybrid=False)


def test_stages_leave_the_last_and_then_the_first_short() -> None:
    assert [len(stage) for stage in stage_layers(30, 4)] == [7, 8, 8, 7]
    assert [len(stage) for stage in stage_layers(61, 2)] == [31, 30]
    assert [len(stage) for stage in stage_layers(5, 3)] == [2, 2, 1]


def test_the_widest_stage_limits_all() -> None:
    got = plan(DEEPSEEK_V3, 10, 8192, pp=4)
    assert got.page_bytes == 16 * 18432  # 15, 15, 16, 15 layers
    # Each group is dealt out over the stages: 11 and 10 of 21 layers a kind.
    two = plan(GEMMA_2_9B, 10, 32768, pp=2)
    assert (two.groups, two.page_bytes) == (2, 11 * 131072)
    # Three batches are in flight in two stages: 4,095 + 3 · 2,048 = 10,239 tokens, 640 blocks + 1.
    assert two.request_blocks == 2048 + 641


def test_groups_are_dealt_out_evenly_over_stages() -> None:
    # 20 sliding and 10 full layers, 15 a stage: every group of 10 has five in each.
    got = plan(model_of(([windowed(1024)] * 2 + [full()]) * 10), 10, 8192, pp=2)
    assert (got.groups, got.page_bytes) == (3, 5 * 65536)


def test_a_window_reaches_back_over_the_token_it_is_at() -> None:
    cache = LayerCache(kind="sliding", block_size=16, shape=(1, 1, 1), entry_bytes=Fraction(4), window=17)
    # 16 tokens back and 16 in flight: two blocks, and one because the window starts inside a block.
    assert cache.blocks(10_000, in_flight=16) == 3
    assert cache.blocks(20, in_flight=16) == 3
    assert cache.blocks(16, in_flight=16) == 2


def test_an_override_of_the_blocks_replaces_the_memory() -> None:
    def override(blocks: int) -> KvPlan:
        asked = {"kv_bytes": 10 * GIB, "max_model_len": 8192, "num_gpu_blocks_override": blocks}
        return plan_kv(LLAMA_3_1_8B, KvQuestion(), **asked)

    got = override(1000)
    assert (got.num_blocks, got.tokens, got.starts) == (1000, 16000, True)
    assert not override(512).starts
    assert override(513).starts
    with pytest.raises(InputError) as raised:
        override(0)
    assert raised.value.where == "--num-gpu-blocks-override"


def test_cross_attention_keeps_the_encoder() -> None:
    cross = replace(full(), keeps="cross")
    got = plan(model_of([full(), cross] * 4), 1, 448, encoder_tokens=1500)
    assert (got.groups, got.request_blocks) == (2, 28 + 94)


@pytest.mark.parametrize("gib", [0, -1.05])
def test_no_memory_starts_nothing(gib: float) -> None:
    got = plan(LLAMA_3_1_8B, gib, 4096)
    assert (got.num_blocks, got.tokens, got.starts, got.longest_model_len) == (0, 0, False, None)


def test_a_log_of_0_11_exaone_4() -> None:
    """A public start-up log: EXAONE-4.0-32B-FP8, 0.11.0, 10.31 GiB: 42,224 tokens, 10.28x for 4,096."""
    exaone = model_of(([windowed(4096)] * 3 + [full()]) * 16)
    got = plan(exaone, 10.31, 4096, rules=rules_for("0.11.0"))
    assert (got.groups, got.tokens, round(got.max_concurrency, 2)) == (4, 42224, 10.28)


def test_a_log_before_0_20_1_qwen3_5() -> None:
    """A public start-up log: Qwen3.5-122B-A10B, fp8 cache, prefix caching on, 21.43 GiB.

    467,712 tokens and 11.79x for 131,072: tokens by blocks, concurrency by whole requests.
    """
    delta = replace(DELTA, hidden=3072, v_heads=64, state_bits=32)
    qwen = model_of(([delta] * 3 + [full(2, 256)]) * 12)
    got = plan(qwen, 21.43, 131072, kv_bits=8, rules=rules_for("0.19"), mamba_cache_mode="align")
    assert (got.tokens, round(got.max_concurrency, 2)) == (467712, 11.79)


def test_a_pool_of_0_8_prints_tokens_over_length() -> None:
    got = plan(GEMMA_2_9B, 10, 30000, rules=rules_for("0.8.5"))
    # One group of 42 layers, 1,950 blocks: 31,200 tokens, 1.04 requests.
    assert (got.groups, got.num_blocks, got.tokens, got.max_concurrency) == (1, 1950, 31200, 1.04)
    assert got.starts


def test_0_14_to_0_18_checked_the_first_group_only() -> None:
    checked = {
        version: plan(GEMMA_2_9B, 10, 131072, rules=rules_for(version)).need_bytes // 131072
        for version in ("0.13.0", "0.14.0", "0.19.0")
    }
    # Sliding comes first: 4,095 + 2,048 tokens, 385 blocks; full 8,192.
    assert checked == {"0.13.0": 21 * (385 + 8192), "0.14.0": 21 * 385, "0.19.0": 21 * (385 + 8192)}


@pytest.mark.parametrize(
    ("version", "since"),
    [
        ("0.32.0", "0.29.0"),
        ("1.4", "0.29.0"),
        ("v0.20.0", "0.19.0"),
        ("0.20.1rc1", "0.20.1"),
        ("0.10", "0.10.0"),
        ("0.6.4.post1", "0.2"),
    ],
)
def test_a_version_finds_its_rules(version: str, since: str) -> None:
    assert rules_for(version).since == since


@pytest.mark.parametrize("version", ["", "latest", "0", "0.1.4", "١.٢"])
def test_no_version_has_no_rules(version: str) -> None:
    with pytest.raises(InputError) as raised:
        rules_for(version)
    assert raised.value.where == "--engine-version"


def test_rules_are_in_order() -> None:
    assert RULES[-1] == NEWEST
    assert [rules_for(rules.since) for rules in RULES] == list(RULES)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"tp": 0}, "--tp"),
        ({"pp": 33}, "--pp"),
        ({"tp": 3}, "--tp"),
        ({"block_size": 0}, "--block-size"),
        ({"kv_bits": float("nan")}, "--kv-bits"),
        ({"kv_bits": float("inf")}, "--kv-bits"),
        ({"max_num_batched_tokens": -1}, "--max-num-batched-tokens"),
        ({"steps_in_flight": 0}, "--steps-in-flight"),
        ({"max_model_len": 0}, "--max-model-len"),
    ],
    ids=str,
)
def test_values_that_cannot_be_used_are_named(given: dict[str, float], where: str) -> None:
    with pytest.raises(InputError) as raised:
        plan_bytes(LLAMA_3_1_8B, **{"kv_bytes": GIB, "max_model_len": 4096, **given})  # type: ignore[arg-type]
    assert raised.value.where == where


def test_layouts_that_are_not_known_are_refused() -> None:
    packed = CompressedAttention(
        hidden=1024, heads=16, width=512, q_rank=512, o_groups=1, o_rank=512, window=128, ratio=4
    )
    with pytest.raises(InputError, match="packed pages"):
        plan(model_of([packed] * 2), 10, 8192)
    with pytest.raises(InputError, match="no KV cache"):
        plan(model_of([replace(full(), keeps="shared")]), 10, 8192)
    with pytest.raises(InputError, match="encoder"):
        plan(model_of([full(), replace(full(), keeps="cross")]), 10, 8192)


def test_fractions_of_a_byte_are_rounded_up() -> None:
    cache = LayerCache(kind="full", block_size=1, shape=(1, 1, 0), entry_bytes=Fraction(1, 2))
    assert cache.page_bytes == 1
    # nvfp4 keeps 4.5 bits an element.
    assert plan(LLAMA_3_1_8B, 10, 8192, kv_bits=4.5).page_bytes == 32 * 16 * 2 * 8 * 128 * 9 // 16


KINDS: tuple[Block, ...] = (
    full(),
    full(4, 64),
    windowed(128),
    windowed(4096),
    windowed(1024, 2, 96),
    windowed(8192, chunked=True),
    mamba(),
    DELTA,
)
mixes = st.lists(st.sampled_from(KINDS), min_size=1, max_size=24).map(model_of)
lengths = st.integers(1, 300_000)
memories = st.integers(0, 80 * GIB)


@settings(max_examples=60, deadline=None)
@given(model=mixes, memory=memories, more=memories, length=lengths, tp=st.sampled_from([1, 2, 4]))
def test_more_memory_is_never_worse(model: Model, memory: int, more: int, length: int, tp: int) -> None:
    low = plan_bytes(model, memory, length, tp=tp)
    high = plan_bytes(model, memory + more, length, tp=tp)
    assert high.num_blocks >= low.num_blocks
    assert high.tokens >= low.tokens
    assert high.starts >= low.starts
    assert (high.longest_model_len or 0) >= (low.longest_model_len or 0)


@settings(max_examples=60, deadline=None)
@given(model=mixes, memory=memories, length=lengths, longer=lengths)
def test_a_longer_limit_is_never_more_concurrent(model: Model, memory: int, length: int, longer: int) -> None:
    short = plan_bytes(model, memory, length)
    long = plan_bytes(model, memory, length + longer)
    assert long.max_concurrency <= short.max_concurrency
    assert long.need_bytes >= short.need_bytes
    assert long.longest_model_len == short.longest_model_len


@settings(max_examples=60, deadline=None)
@given(model=mixes, memory=memories, length=lengths, pp=st.integers(1, 4), rules=st.sampled_from(RULES))
def test_blocks_fit_and_the_longest_length_is_the_longest(
    model: Model, memory: int, length: int, pp: int, rules: object
) -> None:
    given = {"pp": min(pp, model.layers), "rules": rules}
    try:
        got = plan_bytes(model, memory, length, **given)
    except InputError:
        return  # This version cannot hold this mix.
    assert got.num_blocks * got.page_bytes <= memory < (got.num_blocks + 1) * got.page_bytes
    assert got.starts == ((got.longest_model_len or 0) >= length)
    for tokens, starts in ((got.longest_model_len or 0, True), ((got.longest_model_len or 0) + 1, False)):
        if 0 < tokens < LONGEST:
            assert plan_bytes(model, memory, tokens, **given).starts is starts


@settings(max_examples=40, deadline=None)
@given(model=mixes, length=lengths)
def test_more_ranks_never_hold_fewer_blocks(model: Model, length: int) -> None:
    blocks = [plan_bytes(model, 10 * GIB, length, tp=tp).num_blocks for tp in (1, 2, 4)]
    assert blocks == sorted(blocks)
