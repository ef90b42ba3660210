"""A draft's cache in vLLM's groups: both models hold one number of tokens. Figures are worked by hand."""

from dataclasses import replace

import pytest

from capplan import model_source
from capplan.draft import draft_of
from capplan.engines import vllm
from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import rules_for
from capplan.engines.plan import EngineFlags
from capplan.engines.vllm_kv import plan_kv
from capplan.errors import InputError
from capplan.units import GIB

TARGET, DRAFT = model_source.load("8b"), model_source.load("llama-3.2-1b")


def test_a_drafts_pages_are_in_every_block() -> None:
    alone = plan_kv(TARGET, KvQuestion(), kv_bytes=10 * GIB, max_model_len=8192)
    both = plan_kv(TARGET, KvQuestion(draft=DRAFT), kv_bytes=10 * GIB, max_model_len=8192)
    # 32 · 16 · 2 · 8 · 128 · 2 B = 2,097,152 B, and 16 · 16 · 2 · 8 · 64 · 2 B = 524,288 B of the draft.
    assert (alone.page_bytes, both.page_bytes) == (2_097_152, 2_097_152 + 524_288)
    assert (alone.tokens, both.tokens) == (81_920, 65_536)
    assert both.max_concurrency == 8.0
    # One block is never given out.
    assert both.longest_model_len == 65_536 - 16
    assert both.need_bytes == 512 * both.page_bytes


def test_it_counts_one_number_of_tokens_whatever_the_version() -> None:
    """0.6: a cache of its own with as many blocks; 0.11 on: pages of two sizes in one group."""
    for version in ("0.6.4", "0.11.0", "0.19.0"):
        question = KvQuestion(draft=DRAFT, rules=rules_for(version))
        assert plan_kv(TARGET, question, kv_bytes=10 * GIB, max_model_len=8192).tokens == 65_536
    # Between, pages of two sizes could not be held together.
    with pytest.raises(InputError, match=r"16,384|32,768|equal|together"):
        plan_kv(TARGET, KvQuestion(draft=DRAFT, rules=rules_for("0.10.0")), kv_bytes=GIB, max_model_len=8192)


def test_a_draft_on_fewer_ranks_takes_more_of_each() -> None:
    """vllm-project/vllm#9995: a 70B on four ranks, an 8B whole: 81,920 and 131,072 B a token."""
    target = model_source.load("70b")
    question = KvQuestion(tp=4, draft=TARGET, draft_tp=1)
    plan = plan_kv(target, question, kv_bytes=40 * GIB, max_model_len=8192)
    assert plan.page_bytes == 16 * (81_920 + 131_072)
    assert plan_kv(target, replace_tp(question), kv_bytes=40 * GIB, max_model_len=8192).page_bytes == 16 * (
        81_920 + 131_072 // 4
    )


def replace_tp(question: KvQuestion) -> KvQuestion:
    return replace(question, draft_tp=None)


def test_a_draft_is_in_the_last_stage() -> None:
    first, last = (
        plan_kv(
            TARGET,
            KvQuestion(pp=2, stage=stage, draft=DRAFT),
            kv_bytes=10 * GIB,
            max_model_len=8192,
        ).page_bytes
        for stage in (range(16), range(16, 32))
    )
    assert (first, last) == (16 * 65_536, 16 * 65_536 + 524_288)


def test_the_models_own_layers_keep_latents_too() -> None:
    model = model_source.load("deepseek-v3")
    draft = draft_of("mtp", model, None, kv_bits=16).model
    plan = plan_kv(model, KvQuestion(draft=draft), kv_bytes=40 * GIB, max_model_len=8192)
    assert plan.page_bytes == 62 * 16 * 576 * 2


def test_the_plan_has_fewer_tokens_with_a_draft() -> None:
    flags = EngineFlags(version="0.32", max_model_len=8192)
    alone, both = (
        vllm.plan(
            TARGET, weights_bytes=16_060_522_496, total_bytes=80 * GIB, flags=replace(flags, draft=draft)
        )
        for draft in (None, DRAFT)
    )
    # The draft's weights are in extra_bytes; here only its cache differs.
    assert alone.kv_pool == both.kv_pool
    assert both.kv_tokens == both.kv_pool.value // 2_621_440 * 16
    assert alone.kv_tokens == alone.kv_pool.value // 2_097_152 * 16
