"""Random and mutated configs: an InputError or a sane model, never anything else, in bounded time."""

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan import catalog
from capplan.errors import InputError
from capplan.readers.hf_config import model_type_of, read_model
from capplan.specs import Model


def written_out(mapping: dict[str, Any]) -> Any:
    """The list that runs of [entry, times] stand for (see test_hf_config_families)."""
    if set(mapping) == {"runs"}:
        return [entry for entry, times in mapping["runs"] for _ in range(times)]
    return mapping


LINES = (Path(__file__).parent / "families.jsonl").read_text().splitlines()
CONFIGS = [json.loads(line, object_hook=written_out)["config"] for line in LINES]
ODD_VALUES: list[Any] = [
    None, -1, 0, 1, 2, 3, 7, 4096, 2**31, 2**40, 10**30, True, False, 0.5, 2.0, -0.5, 1e308,
    float("nan"), float("inf"), "", "x", "auto", "full_attention", "1,2", [], [None], [-1], ["x"],
    [1, 2], [[1]], [1] * 5000, {}, {"a": 1}, {"a": [1]},
]  # fmt: skip


def read(config: dict[str, Any]) -> Model:
    model_type = model_type_of(config)
    return read_model(
        config,
        where="config.json",
        name="fuzzed",
        architecture=catalog.architecture(model_type) if model_type else None,
    )


def check(config: dict[str, Any]) -> None:
    """The config is refused in a one-line message, or gives positive, finite sizes."""
    started = time.monotonic()
    model: Model | None = None
    refusal: InputError | None = None
    try:
        model = read(config)
    except InputError as error:
        refusal = error
    if refusal is not None:
        assert refusal.message
        assert refusal.hint
        assert "\n" not in refusal.message
        assert len(refusal.message) < 300
    if model is not None:
        assert 0 < model.parameters < 10**16
        tensors = [tensor for group in model.groups for tensor in group.layer.tensors()]
        tensors += model.outside
        tensors += [tensor for tower in model.towers for tensor in tower.tensors]
        for tensor in tensors:
            assert all(isinstance(width, int) and width > 0 for width in tensor.shape), tensor
            assert tensor.copies > 0
            assert math.isfinite(tensor.active_copies)
            assert 0 < tensor.active_copies <= tensor.copies
        for group in model.groups:
            for cache in group.layer.caches():
                assert cache.heads > 0
                assert cache.stride > 0
                assert min(cache.k_width, cache.v_width) >= 0
                assert cache.window is None or cache.window > 0
                assert all(size >= 0 and bits > 0 for size, bits in cache.state_elements)
    assert time.monotonic() - started < 30


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A family's config with one to three of its values replaced, or removed."""
    config: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(1, 3))):
        place = config
        nested = [value for value in config.values() if isinstance(value, dict) and value]
        inside = draw(st.booleans())
        if nested and inside:
            place = draw(st.sampled_from(nested))
        if not place:
            break
        key = draw(st.sampled_from(sorted(place)))
        value = draw(st.sampled_from([*ODD_VALUES, "remove", "entry"]))
        if value == "remove":
            del place[key]
        elif value == "entry" and isinstance(place[key], list) and place[key]:
            place[key][draw(st.integers(0, len(place[key]) - 1))] = draw(st.sampled_from(ODD_VALUES))
        else:
            place[key] = copy.deepcopy(value)
    return config


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated())
def test_a_mutated_config_is_refused_or_sane(config: dict[str, Any]) -> None:
    check(config)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
KNOWN_KEYS = sorted({key for config in CONFIGS for key in config})


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(KNOWN_KEYS) | st.text(max_size=12), json_values, max_size=20))
def test_a_random_mapping_is_refused_or_sane(config: dict[str, Any]) -> None:
    check(config)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_the_most_layers_a_file_may_have_are_read_in_bounded_time(model_type: str) -> None:
    config = {
        "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4096,
        "num_attention_heads": 8, "vocab_size": 100, "head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 8, "sliding_window": 16,
    }  # fmt: skip
    if model_type == "deepseek_v3":
        config |= {
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
        }  # fmt: skip
    check(config)


def test_a_list_of_a_million_entries_is_refused() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 8, "vocab_size": 100, "layer_types": ["full_attention"] * 10**6,
    }  # fmt: skip
    with pytest.raises(InputError, match=r"too many|entries"):
        read(config)
