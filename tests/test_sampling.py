"""Parallel sampling: n samples of a user share the full blocks of its prompt."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import estimate
from capplan.cli import run
from capplan.errors import InputError

TOKEN = 131_072  # Llama-3.1-8B in bf16: 2 · 32 layers · 8 heads · 128 · 2 B.


def asked(**fields: Any) -> estimate.VramEstimate:
    return estimate.vram("llama-3.1-8b", **fields)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        # 3,000 prompt tokens are 187 full blocks, 2,992 tokens; the rest and the output are each sample's.
        ({"users": 1, "n": 4, "isl": 3000, "osl": 1000}, 4000 + 3 * 1008),
        ({"users": 8, "n": 4, "isl": 3000, "osl": 1000}, 8 * (4000 + 3 * 1008)),
        ({"users": 8, "n": 1, "isl": 3000, "osl": 1000}, 8 * 4000),
        ({"users": 8, "n": 4, "isl": 15, "osl": 49}, 8 * 4 * 64),
        # 2,048 tokens of every prompt are the same: seven users less keep 128 blocks.
        ({"users": 8, "n": 4, "isl": 3000, "osl": 1000, "prefix_shared": 2048}, 8 * 7024 - 7 * 2048),
    ],
    ids=["one user", "eight users", "one sample", "less than a block", "with a shared prefix"],
)
def test_tokens_kept(fields: dict[str, Any], tokens: int) -> None:
    assert asked(**fields).need.kv_bytes == tokens * TOKEN


def test_the_tail_of_a_prompt_is_copied_for_each_sample() -> None:
    # 3,000 + 1,003 tokens: 250 full blocks and 3 of 16 slots of the last, once a sample.
    assert asked(users=1, n=4, isl=3000, osl=1003).need.tail_bytes == 4 * 13 * TOKEN


def test_what_fits_is_counted_in_users() -> None:
    found = asked(users=8, n=4, isl=3000, osl=1000, gpus=("h100",), overhead_bytes=0)
    verdict = found.told
    assert verdict is not None
    assert verdict.pool_bytes is not None
    assert verdict.max_users == verdict.pool_bytes // (7024 * TOKEN)


def test_windows_share_nothing() -> None:
    alone = estimate.vram("mistral-7b-v0.1", users=1, isl=3072, osl=1024)
    four = estimate.vram("mistral-7b-v0.1", users=1, n=4, isl=3072, osl=1024)
    assert four.need.kv_bytes == 4 * (alone.need.kv_bytes or 0)


def test_two_of_the_three_lengths_give_the_third() -> None:
    for lengths in (
        {"isl": 3000, "osl": 1000},
        {"isl": 3000, "context": 4000},
        {"osl": 1000, "context": 4000},
    ):
        question = asked(n=2, **lengths).question
        assert (question.context, question.isl) == (4000, 3000)


def test_samples_beyond_the_sequences_of_an_engine_wait() -> None:
    from capplan.engines.plan import EngineFlags

    flags = EngineFlags(max_num_seqs=16)
    found = asked(users=8, n=4, isl=512, osl=512, gpus=("h100",), engine="vllm", engine_flags=flags)
    assert found.engine is not None
    assert any("32 sequences" in note for note in found.engine.notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4},
        {"n": 0},
        {"isl": 3000},
        {"isl": 3000, "osl": 2000, "context": 4000},
        {"isl": 5000, "context": 4000},
        {"osl": 4000, "context": 4000},
        {"n": 2, "isl": 1000, "osl": 1000, "prefix_shared": 1500},
    ],
    ids=str,
)
def test_lengths_that_contradict(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        asked(**fields)


@given(users=st.integers(1, 50), n=st.integers(1, 20), isl=st.integers(1, 5000), osl=st.integers(1, 3000))
def test_more_samples_never_take_more_than_alone_nor_less(users: int, n: int, isl: int, osl: int) -> None:
    both = [asked(users=users, n=samples, isl=isl, osl=osl).need.kv_bytes or 0 for samples in (n, n + 1)]
    assert both[0] < both[1]
    assert both[0] <= n * (asked(users=users, isl=isl, osl=osl).need.kv_bytes or 0)


def test_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    options = "--n 4 --isl 3000 --osl 1000 --users 8 --explain"
    assert run(["vram", "--model", "8b", *options.split()]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert "4 samples" in out
    assert "−9,412,018,176 B" in out
