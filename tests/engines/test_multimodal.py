"""Multimodal prompts at their worst: hand-worked counts, properties, and what cannot be asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.engines.multimodal import WorstPrompt, image_tokens, worst_prompt
from capplan.errors import InputError


def worst(limits: dict[str, int], longest: int = 32768, batched: int = 2048) -> WorstPrompt:
    return worst_prompt(
        limits=limits,
        item_tokens={"image": 16384, "video": 4096},
        max_model_len=longest,
        max_num_batched_tokens=batched,
    )


def test_items_add_up_by_kind() -> None:
    # 2 × 16,384 + 3 × 4,096
    made = worst({"image": 2, "video": 3})
    assert (made.by_kind, made.tokens) == ({"image": 32768, "video": 12288}, 45056)
    assert made.excess == 45056 - 32768
    # 32,768 / 5 items
    assert (made.most_items, made.largest_item) == ({"image": 2, "video": 8}, 6553)
    assert made.note() is not None


def test_the_encoder_runs_at_its_largest_item_or_the_batch() -> None:
    assert worst({"image": 1}).encoder_budget == 16384
    assert worst({"image": 1}, batched=65536).encoder_budget == 65536
    assert worst({"image": 0, "video": 1}).encoder_budget == 4096


def test_nothing_allowed_takes_nothing() -> None:
    made = worst({"image": 0})
    assert (made.tokens, made.encoder_budget, made.excess, made.note()) == (0, 0, 0, None)


@given(images=st.integers(0, 50), videos=st.integers(0, 50), longest=st.integers(1, 1 << 20))
def test_items_at_the_cap_fit(images: int, videos: int, longest: int) -> None:
    made = worst({"image": images, "video": videos}, longest)
    assert made.largest_item * (images + videos) <= longest or not images + videos
    assert (made.note() is None) is (made.tokens <= longest)


def test_tokens_of_an_image() -> None:
    # 1,003,520 pixels / 28²
    assert image_tokens(pixels=1003520, patch=14, merge=2) == 1280
    assert image_tokens(pixels=224 * 224, patch=16) == 196


@pytest.mark.parametrize("limits", [{"image": -1}, {"audio": 1}, {"image": 1 << 40}])
def test_counts_that_are_none(limits: dict[str, int]) -> None:
    with pytest.raises(InputError):
        worst(limits)


@pytest.mark.parametrize(("longest", "batched"), [(0, 1), (1, 0), (-5, 2048)])
def test_lengths_that_are_none(longest: int, batched: int) -> None:
    with pytest.raises(InputError, match="tokens"):
        worst({"image": 1}, longest, batched)


def test_an_image_without_pixels() -> None:
    with pytest.raises(InputError):
        image_tokens(pixels=0, patch=14)
