"""Strict access to a mapping: types, bounds, defaults, what was not read."""

from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.config_keys import Keys


def keys_of(**values: Any) -> Keys:
    return Keys(values, where="config.json", path="text_config.", defaults={"layers": 4})


@pytest.mark.parametrize(
    "value",
    [True, "8", 1.5, [8], {"a": 1}, float("nan"), float("inf"), -1, 0, 2**40],
    ids=["a boolean", "text", "a fraction", "a list", "a mapping", "nan", "inf", "negative", "zero", "huge"],
)
def test_a_width_that_is_no_positive_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(InputError) as caught:
        keys_of(hidden=value).integer("hidden")
    assert caught.value.message.startswith("text_config.hidden")
    assert caught.value.where == "config.json"


def test_a_whole_float_is_a_number() -> None:
    assert keys_of(hidden=8.0).integer("hidden") == 8


def test_a_missing_width_is_refused_and_a_default_is_not() -> None:
    with pytest.raises(InputError, match="hidden: missing"):
        keys_of().integer("hidden")
    assert keys_of().integer("hidden", default=3) == 3
    assert keys_of().integer("layers") == 4


def test_null_is_an_answer_that_the_class_default_does_not_replace() -> None:
    assert keys_of(layers=None).optional_integer("layers") is None
    assert keys_of().optional_integer("layers") == 4


def test_the_first_spelling_that_is_there_wins_and_all_count_as_read() -> None:
    keys = keys_of(n_head=3, heads=5, other=1)
    assert keys.integer("heads", "n_head") == 5
    assert keys.unused() == ["other"]


@pytest.mark.parametrize("value", [1, "true", 0, [True]], ids=["one", "text", "zero", "a list"])
def test_a_switch_must_be_true_or_false(value: object) -> None:
    with pytest.raises(InputError, match="not true or false"):
        keys_of(bias=value).flag("bias")


def test_lists_are_bounded_and_typed() -> None:
    with pytest.raises(InputError, match="too many"):
        keys_of(layers=["x"] * 10).items("layers", high=9)
    with pytest.raises(InputError, match="too many"):
        keys_of(kinds=["full_attention"] * 1_000_000).texts("kinds")
    with pytest.raises(InputError, match="not a whole number"):
        keys_of(layers=[1, "2"]).integers("layers")
    with pytest.raises(InputError, match="not text"):
        keys_of(kinds=["a", 3]).texts("kinds")


def test_a_value_can_be_one_for_all_layers_or_one_each() -> None:
    assert keys_of(ffn=7).per_layer(3, "ffn") == 7
    assert keys_of(ffn=[1, 2, 3, 4]).per_layer(3, "ffn") == 4
    with pytest.raises(InputError, match="none for layer 4"):
        keys_of(ffn=[1, 2, 3, 4]).per_layer(4, "ffn")


def test_a_nested_mapping_keeps_its_place_in_the_errors() -> None:
    inner = keys_of(attn={"heads": "x"}).child("attn")
    assert inner is not None
    with pytest.raises(InputError, match=r"text_config\.attn\.heads"):
        inner.integer("heads")
    with pytest.raises(InputError, match="not a mapping"):
        keys_of(attn=[1]).child("attn")
