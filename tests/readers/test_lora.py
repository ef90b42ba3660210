"""LoRA adapters: what adapter_config.json says, one adapter's bytes, the slots of a server."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan import model_source
from capplan.adapters import adapter_size, slot_rank, slots_bytes
from capplan.errors import InputError
from capplan.readers.lora import Adapter, read_adapter
from capplan.specs import Model

# One layer of Llama-3.1-8B, in + out: q 8192, k 5120, v 5120, o 8192, gate, up and down 18,432 each.
LAYER = 8192 + 5120 + 5120 + 8192 + 3 * 18_432
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"],
    "lora_dropout": 0.05, "bias": "none", "task_type": "CAUSAL_LM", "inference_mode": True,
    "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "modules_to_save": None, "use_rslora": True,
    "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "use_dora": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> Model:
    return model_source.load("llama-3.1-8b")


def adapter(tmp_path: Path, **changes: Any) -> Adapter:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return read_adapter(str(tmp_path))


def test_layer_of_llama_sums_to_81_920() -> None:
    assert LAYER == 81_920


def test_rank_16_on_q_and_v(tmp_path: Path, llama: Model) -> None:
    # A: 16 × 4096 twice; B: 4096 × 16 and 1024 × 16; 32 layers at two bytes.
    size = adapter_size(llama, adapter(tmp_path))
    assert size.matrix_bytes == 32 * 16 * (8192 + 5120) * 2 == 13_631_488
    assert (size.modules, size.saved_bytes, size.unmatched) == (64, 0, ())
    words = adapter_size(llama, read_adapter("rank=16,targets=q_proj+v_proj"))
    assert words == size or words.bytes == size.bytes


@pytest.mark.parametrize(
    ("changes", "per_layer_elements"),
    [
        ({"target_modules": "all-linear"}, 16 * LAYER),
        ({"target_modules": ["self_attn.q_proj"]}, 16 * 8192),
        ({"target_modules": r".*\.self_attn\.(q|k)_proj"}, 16 * (8192 + 5120)),
        # Fused modules have one A: 16 × 4096, and a B for all rows.
        ({"target_modules": ["qkv_proj"]}, 16 * (4096 + 6144)),
        ({"target_modules": ["gate_up_proj"]}, 16 * (4096 + 28_672)),
        ({"target_modules": ["w1", "w2", "w3"]}, 16 * 3 * 18_432),
        ({"use_dora": True}, 16 * (8192 + 5120) + 4096 + 1024),
        ({"rank_pattern": {"v_proj": 64}}, 16 * 8192 + 64 * 5120),
        ({"rank_pattern": {r"^model\.layers\.\d+\.self_attn\.q_proj": 8}}, 8 * 8192 + 16 * 5120),
        ({"exclude_modules": ["v_proj"]}, 16 * 8192),
        ({"exclude_modules": r".*q_proj"}, 16 * 5120),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_targets_and_ranks(
    tmp_path: Path, llama: Model, changes: dict[str, Any], per_layer_elements: int
) -> None:
    size = adapter_size(llama, adapter(tmp_path, **changes))
    assert size.matrix_bytes == 32 * per_layer_elements * 2


def test_some_layers_only(tmp_path: Path, llama: Model) -> None:
    size = adapter_size(llama, adapter(tmp_path, layers_to_transform=[0, 1, 31]))
    assert size.matrix_bytes == 3 * 16 * (8192 + 5120) * 2
    assert adapter_size(llama, adapter(tmp_path, layers_to_transform=7)).modules == 2


def test_rank_of_one_layer(tmp_path: Path, llama: Model) -> None:
    made = adapter(tmp_path, rank_pattern={"model.layers.3.self_attn.q_proj": 32})
    assert made.max_rank == 32
    assert adapter_size(llama, made).matrix_bytes == 13_631_488 + 16 * 8192 * 2


def test_modules_saved_whole_and_those_that_are_not_there(tmp_path: Path, llama: Model) -> None:
    made = adapter(
        tmp_path,
        modules_to_save=["embed_tokens", "lm_head", "score"],
        target_modules=["q_proj", "v_proj", "fc9"],
    )
    size = adapter_size(llama, made)
    assert size.saved_bytes == 2 * 128_256 * 4096 * 2
    assert size.unmatched == ("fc9", "score")


def test_every_expert_has_its_own(llama: Model) -> None:
    # 128 experts of 3 · (2048 + 768), q, k, v, o of 2048 and 4096, 512, 512, 4096: 48 layers.
    moe = model_source.load("qwen3-30b-a3b")
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    per_layer = 16 * (128 * 3 * (2048 + 768) + attention)
    assert adapter_size(moe, read_adapter("rank=16")).matrix_bytes == 48 * per_layer * 2
    assert slots_bytes(moe, rank=16, slots=1) == 48 * per_layer * 2


def test_slots_are_as_large_as_the_server_makes_them(llama: Model) -> None:
    assert slots_bytes(llama, rank=16, slots=1) == 32 * 16 * LAYER * 2 == 83_886_080
    assert slots_bytes(llama, rank=16, slots=4) == 4 * 83_886_080
    # Rank 24 needs max_lora_rank 32.
    assert slot_rank(24) == 32
    assert slots_bytes(llama, rank=24, slots=1) == 2 * 83_886_080
    assert [slot_rank(rank) for rank in (1, 2, 8, 9, 300, 512, 600)] == [1, 8, 8, 16, 320, 512, 600]


def test_slots_of_one_of_two_ranks(llama: Model) -> None:
    # Whole A and half of B where outputs are cut, the reverse for o and down.
    q, kv, o = 4096 + 2048, 4096 + 512, 2048 + 4096
    up, down = 4096 + 7168, 7168 + 4096
    half = q + 2 * kv + o + 2 * up + down
    assert slots_bytes(llama, rank=16, slots=1, tp=2) == 32 * 16 * half * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 0}, "r: 0 is outside"),
        ({"r": "16"}, "not a whole number"),
        ({"r": 100_000}, "outside 1 to 4096"),
        ({"target_modules": []}, "target_modules: missing"),
        ({"target_modules": None}, "target_modules: missing"),
        ({"target_modules": ["q_proj", 7]}, "7 is not text"),
        ({"target_modules": "(a+)+b"}, "too intricate"),
        ({"target_modules": ".*.*.*.*.*.*.*x"}, "too intricate"),
        ({"target_modules": "(q_proj"}, "broken pattern"),
        ({"target_modules": ["nothing"]}, "name no linear layer"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"rank_pattern": {"(x+)*": 4}}, "too intricate"),
        ({"rank_pattern": {"q_proj": -1}}, "outside"),
        ({"rank_pattern": {f"a.*{n}": 4 for n in range(65)}}, "65 patterns"),
        ({"target_modules": ["q"] * 513}, "513 names"),
        ({"a_new_matrix": 4096}, "a_new_matrix: not understood"),
        ({"layers_to_transform": "all"}, "is not a list"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_used_is_refused(
    tmp_path: Path, llama: Model, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as raised:
        adapter_size(llama, adapter(tmp_path, **changes))
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3


@pytest.mark.parametrize(
    "text",
    ["rank=", "rank=x", "rank=0", "rank=16,alpha=3", "targets=q_proj", "rank=16,rank=8", "rank=99999",
     "rank=16,targets=q proj", "/nowhere/at/all", "~nosuchuser/x", "a\0b", "x" * 5000],
)  # fmt: skip
def test_words_that_are_no_adapter(text: str) -> None:
    with pytest.raises(InputError) as raised:
        read_adapter(text)
    assert len(str(raised.value).splitlines()) == 3


def test_the_hardest_pattern_allowed_takes_no_time(tmp_path: Path, llama: Model) -> None:
    started = time.perf_counter()
    with pytest.raises(InputError, match="name no linear layer"):
        adapter_size(llama, adapter(tmp_path, target_modules="[a-z.0-9_]*?" * 5 + "!"))
    assert time.perf_counter() - started < 20


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(
    max_examples=400, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(changes=st.dictionaries(st.sampled_from(sorted(CONFIG)) | st.text(max_size=6), _JSON, max_size=4))
def test_any_config_is_an_adapter_or_an_input_error(
    tmp_path: Path, llama: Model, changes: dict[str, Any]
) -> None:
    try:
        size = adapter_size(llama, adapter(tmp_path, **changes))
    except InputError as error:
        assert len(str(error).splitlines()) == 3  # most are refused, some are not
    else:
        assert size.bytes > 0
