"""Models from a GGUF's own keys: the same layers, caches and parameters as from the config.json.

gguf_metadata.json holds what llama.cpp's converter writes for one or two models of every architecture that is
mapped: its own code (llama-cpp-python 0.3.36, conversion/) run on the catalog's configs, on the publishers'
published figures and on transformers 5.18.0 defaults; keys that cannot change memory are left out, runs of
equal list entries are folded. The files built here have every tensor of the model, under llama.cpp's names.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan import catalog, model_source
from capplan.errors import InputError
from capplan.kv import KvLayout, kv_layout
from capplan.readers import hf_config
from capplan.readers.checkpoint import Checkpoint
from capplan.readers.gguf import gguf_architecture
from capplan.readers.gguf_architectures import ARCHITECTURES
from capplan.readers.gguf_config import config_of
from capplan.readers.stored_tensor import StoredTensor
from capplan.specs import Model, Tensor

Writer = Any
Shapes = dict[str, tuple[int, ...]]
CASES = json.loads(Path(__file__).with_name("gguf_metadata.json").read_text())
F16 = 1
# llama.cpp keeps every token where the class has a window, and values unpadded where the latent is expanded.
NO_WINDOW = {"phi3", "phimoe", "starcoder2"}
EXPANDED_LATENT = {"minicpm3"}
# The converter writes a bound of its own where the model has none.
OWN_CONTEXT = {"mamba", "mamba2", "nemotron_h", "nemotron_h_moe", "granitehybrid", "bloom", "chatglm",
               "hunyuan-moe", "falcon"}  # fmt: skip
_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "g_proj": "attn_gate", "q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_b_proj": "attn_kv_b",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "lm_head": "output",
}


def unfolded(value: Any) -> Any:
    """Runs [[value, times], …] back into a list."""
    if isinstance(value, dict) and set(value) == {"runs"}:
        return [item for item, times in value["runs"] for _ in range(times)]
    return value


def case_keys(case: dict[str, Any]) -> dict[str, Any]:
    return {key: unfolded(value) for key, value in case["keys"].items()}


def config_model(case: dict[str, Any]) -> Model:
    """The model of the case's config.json."""
    if "catalog" in case:
        return catalog.load_model(case["catalog"])
    config = {key: unfolded(value) for key, value in case["config"].items()}
    model_type = hf_config.model_type_of(config)
    assert model_type is not None
    return hf_config.read_model(
        config, where="test", name=case["name"], architecture=catalog.architecture(model_type)
    )


def block_name(tensor: Tensor) -> str:
    """llama.cpp's name of a layer's tensor, without "blk.N." and suffix; a name of its own where none is."""
    last = tensor.name.removesuffix(".bias").rpartition(".")[2]
    if tensor.role in ("experts", "shared_experts", "mlp"):
        end = {"experts": "_exps", "shared_experts": "_shexp"}.get(tensor.role, "")
        return f"ffn_{last.removesuffix('_proj')}{end}"
    if tensor.role == "router":
        return "ffn_gate_inp"
    if tensor.role == "recurrent":
        return f"ssm_{last}"
    if last in _NAMES:
        return _NAMES[last]
    start = "attn_" if tensor.role == "attention" else ""
    return start + last + ("_norm" if tensor.role == "norm" else "")


def tensors_of(model: Model) -> Shapes:
    """Every tensor of the decoder: experts of a layer as one, everything else apart."""
    made: Shapes = {}

    def add(name: str, tensor: Tensor) -> None:
        suffix = "bias" if tensor.name.endswith(".bias") else "weight"
        merged = tensor.role == "experts"
        shape = (tensor.copies, *tensor.shape) if merged else tensor.shape
        for number in range(1 if merged else tensor.copies):
            unique, again = f"{name}.{suffix}", 0
            while unique in made:
                again += 1
                unique = f"{name}_{number}_{again}.{suffix}"
            made[unique] = shape

    for group in model.groups:
        for index in group.indices:
            for tensor in group.layer.tensors():
                add(f"blk.{index}.{block_name(tensor)}", tensor)
    for tensor in model.outside:
        norm = "_norm" if tensor.role == "norm" else ""
        add(_OUTSIDE.get(tensor.name, tensor.name.replace(".", "_") + norm), tensor)
    return made


def write(path: Path, writer: Writer, architecture: str, keys: dict[str, Any], tensors: Shapes) -> Path:
    writer.key("general.architecture", architecture)
    for key, value in keys.items():
        writer.key(f"{architecture}.{key}", value)
    for name, shape in tensors.items():
        writer.tensor(name, F16, tuple(reversed(shape)))
    return Path(writer.write(path))


def caches(layout: KvLayout) -> set[tuple[str, int, int | None, int, float]]:
    """What is kept per token: kind, layers, window, stride, bytes."""
    return {
        (group.kind, group.layers, group.window, group.stride, group.entry_bytes)
        for group in layout.groups
        if group.kind != "state"
    }


def states(layout: KvLayout) -> tuple[int, int]:
    """Layers with a state, and its bytes."""
    own = [group for group in layout.groups if group.kind == "state"]
    return sum(group.layers for group in own), layout.state_bytes


def test_every_mapped_architecture_has_a_case() -> None:
    assert {case["architecture"] for case in CASES} == set(ARCHITECTURES)
    assert len(CASES) >= 99


@pytest.mark.parametrize("case", CASES, ids=[f"{case['architecture']}:{case['name']}" for case in CASES])
def test_a_gguf_is_the_model_of_its_config(
    case: dict[str, Any], tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    name = case["architecture"]
    wanted = config_model(case)
    path = write(tmp_path / "m.gguf", gguf_writer(), name, case_keys(case), tensors_of(wanted))
    model = model_source.load(str(path))
    got, want = kv_layout(model, kv_bits=16), kv_layout(wanted, kv_bits=16)
    if name in EXPANDED_LATENT:
        # Both expand the latent; vLLM pads the values to the keys' width, llama.cpp keeps them as they are.
        assert (got.bytes_per_token, want.bytes_per_token) == (62 * 40 * 160 * 2, 62 * 40 * 192 * 2)
        assert any("key_length_mla" in note for note in model.assumptions)
        return
    assert got.bytes_per_token == want.bytes_per_token
    if name in NO_WINDOW:
        assert not any(group.window for group in got.groups)
    else:
        assert caches(got) == caches(want)
    assert states(got)[0] == states(want)[0]
    # llama.cpp keeps states in 32 bits; the convolution's part stays the model's here.
    assert states(want)[1] <= states(got)[1] <= 2 * states(want)[1]
    assert model.stored is not None
    assert model.stored.decoder_parameters == pytest.approx(wanted.parameters, rel=1e-3)
    assert model.parameters == pytest.approx(wanted.parameters, rel=0.01)
    assert (model.layers, model.hidden, model.vocab) == (wanted.layers, wanted.hidden, wanted.vocab)
    assert model.tied == wanted.tied
    if name not in OWN_CONTEXT:
        assert model.max_context == wanted.max_context
    assert not any("parameters" in note for note in model.assumptions)


def test_full_heads_where_the_file_has_no_latent_widths(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    # DeepSeek-V3 as converted before 2025-04: 61 · 128 heads · (192 + 128) · 2 B a token, not 70,272 B.
    case = next(case for case in CASES if case["name"] == "deepseek-v3")
    keys = case_keys(case)
    del keys["attention.key_length_mla"], keys["attention.value_length_mla"]
    keys |= {"attention.key_length": 192, "attention.value_length": 128, "attention.head_count_kv": 128}
    path = write(tmp_path / "m.gguf", gguf_writer(), "deepseek2", keys, tensors_of(config_model(case)))
    model = model_source.load(str(path))
    assert kv_layout(model, kv_bits=16).bytes_per_token == 61 * 128 * 320 * 2
    assert any("full keys and values" in note for note in model.assumptions)


def test_minicpm3_keeps_full_heads(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    # 62 layers · 40 heads · (96 + 64) · 2 B: llama.cpp expands its latent before the cache.
    case = next(case for case in CASES if case["architecture"] == "minicpm3")
    path = write(
        tmp_path / "m.gguf", gguf_writer(), "minicpm3", case_keys(case), tensors_of(config_model(case))
    )
    assert kv_layout(model_source.load(str(path)), kv_bits=16).bytes_per_token == 62 * 40 * 160 * 2


def small(**changes: Any) -> dict[str, Any]:
    """Keys of a small llama."""
    keys = {
        "block_count": 2, "context_length": 2048, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    return {key: value for key, value in (keys | changes).items() if value is not None}


def checkpoint_of(
    keys: dict[str, Any], name: str = "llama", tensors: Mapping[str, tuple[int, ...]] | None = None
) -> Checkpoint:
    """A checkpoint of these keys, without a file."""
    shapes = {"token_embd.weight": (320, 64)} if tensors is None else tensors
    return Checkpoint(
        path=Path("m.gguf"),
        format="gguf",
        tensors=tuple(
            StoredTensor(name=tensor, dtype="F16", shape=shape, stored_bytes=2, shard="m.gguf")
            for tensor, shape in shapes.items()
        ),
        metadata={
            "general.architecture": name,
            **{f"{name}.{key}": tuple(v) if isinstance(v, list) else v for key, v in keys.items()},
        },
        files=1,
    )


def read(
    keys: dict[str, Any], name: str = "llama", tensors: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, object]:
    checkpoint = checkpoint_of(keys, name, tensors)
    return config_of(gguf_architecture(checkpoint), checkpoint)[0]


def test_keys_of_a_small_llama() -> None:
    assert read(small()) == {
        "general.architecture": "llama", "model_type": "llama", "num_hidden_layers": 2,
        "vocab_size": 320, "tie_word_embeddings": True,
        "hidden_size": 64, "max_position_embeddings": 2048, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 128,
    }  # fmt: skip


def test_the_head_decides_about_tying() -> None:
    tensors = {"token_embd.weight": (320, 64), "output.weight": (320, 64)}
    assert read(small(), tensors=tensors)["tie_word_embeddings"] is False


def test_experts_are_told_by_the_tensors() -> None:
    keys = small(expert_count=8, expert_used_count=2)
    tensors = {"token_embd.weight": (320, 64), "blk.1.ffn_up_exps.weight": (8, 96, 64),
               "blk.0.ffn_up.weight": (128, 64)}  # fmt: skip
    config = read(keys, tensors=tensors)
    assert config["model_type"] == "mixtral"
    assert config["mlp_layer_types"] == ["dense", "sparse"]
    assert config["moe_intermediate_size"] == 96


def test_experts_one_by_one_as_before_april_2024() -> None:
    keys = small(expert_count=2, expert_used_count=2)
    tensors = {"token_embd.weight": (320, 64)}
    tensors |= {f"blk.{at}.ffn_up.{expert}.weight": (128, 64) for at in (0, 1) for expert in (0, 1)}
    config = read(keys, tensors=tensors)
    assert config["mlp_layer_types"] == ["sparse", "sparse"]
    assert config["moe_intermediate_size"] == 128


@pytest.mark.parametrize(
    ("pattern", "kinds"),
    [
        (None, "SSSSSF"), (3, "SSFSSF"), (0, "SSSSSS"), ([1, 0, 0, 1, 1, 0], "SFFSSF"),
        ([True, True, True, False, True, False], "SSSFSF"),
    ],
    ids=["the class's own", "a period", "all layers", "a list", "a list of booleans"],
)  # fmt: skip
def test_window_patterns(pattern: object, kinds: str) -> None:
    keys = small(block_count=6, **{"attention.sliding_window": 512})
    if pattern is not None:
        keys["attention.sliding_window_pattern"] = pattern
    config = read(keys, "gemma3")
    words = {"S": "sliding_attention", "F": "full_attention"}
    assert config["layer_types"] == [words[letter] for letter in kinds]
    assert config["sliding_window"] == 512


def test_a_window_that_llama_cpp_does_not_use_is_said() -> None:
    checkpoint = checkpoint_of(small(**{"attention.sliding_window": 2047}), "phi3")
    config, notes = config_of(gguf_architecture(checkpoint), checkpoint)
    assert "sliding_window" not in config
    assert "every token" in notes[0]


@pytest.mark.parametrize(
    ("architecture", "keys", "said"),
    [
        ("lama", small(), "'lama' is not known"),
        ("clip", small(), "projector"),
        ("rwkv7", small(), "'rwkv7' is not known"),
        ("llama", small(block_count=None), "block_count"),
        ("llama", small(block_count=5000), "outside 1 to 4096"),
        ("llama", small(block_count=2.5), "not a whole number"),
        ("llama", small(embedding_length=0), "embedding_length"),
        ("llama", small(**{"attention.head_count": [4, 8]}), "in layers that attend alike"),
        ("llama", small(**{"attention.head_count_kv": [2, 2, 2] * 20}), "60 entries for 2 layers"),
        ("llama", small(**{"attention.head_count_kv": [2, -1]}), "-1 is not a whole number"),
        ("llama", small(**{"attention.new_cache_length": 9}), "attention.new_cache_length: not understood"),
        ("llama", small(nextn_predict_layers=2), "outside 0 to 1"),
        ("gemma3", small(**{"attention.sliding_window": 8, "attention.sliding_window_pattern": ["x", 1]}),
         "'x' is not a whole number"),
        ("mamba2", small(**{"ssm.inner_size": 128}), "ssm.state_size"),
        ("deepseek2", small(**{"attention.kv_lora_rank": 32, "attention.key_length_mla": 8,
                               "attention.value_length_mla": 8}), "rope.dimension_count"),
        ("deci", small(), "attention.head_count"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(architecture: str, keys: dict[str, Any], said: str) -> None:
    if architecture == "deci":
        keys = {key: value for key, value in keys.items() if not key.startswith("attention.head")}
    with pytest.raises(InputError) as raised:
        config_model({"name": "x", "config": read(keys, architecture)})
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3


_VALUES = st.one_of(
    st.integers(-(2**40), 2**40),
    st.integers(0, 300),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 70000), max_size=6),
    st.lists(st.floats(), max_size=3),
)


def _mutations() -> Iterator[str]:
    for case in CASES:
        yield from case["keys"]


_KEYS = st.sampled_from(sorted(set(_mutations())))


@settings(
    max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    case=st.sampled_from(CASES),
    changes=st.dictionaries(_KEYS, _VALUES, max_size=4),
    dropped=st.sets(_KEYS, max_size=2),
    tensors=st.dictionaries(
        st.sampled_from(
            ["token_embd.weight", "output.weight", "blk.0.ffn_up_exps.weight", "blk.1.ffn_up_shexp.weight",
             "blk.0.attn_v.weight", "blk.3.ffn_up.weight", "per_layer_token_embd.weight"]
        ),
        st.lists(st.integers(0, 2**33), max_size=3).map(tuple),
        max_size=4,
    ),
)  # fmt: skip
def test_any_metadata_is_a_model_or_an_input_error(
    case: dict[str, Any], changes: dict[str, Any], dropped: set[str], tensors: Shapes
) -> None:
    keys = {key: value for key, value in (case_keys(case) | changes).items() if key not in dropped}
    checkpoint = checkpoint_of(keys, case["architecture"], tensors)
    try:
        config, _ = config_of(gguf_architecture(checkpoint), checkpoint)
        model = config_model({"name": "x", "config": config})
    except InputError as error:
        assert len(str(error).splitlines()) == 3  # most inputs are refused, some are not
        return
    layout = kv_layout(model, kv_bits=16)
    assert 0 <= layout.bytes_per_token < 2**70
    assert layout.state_bytes >= 0
    assert model.parameters > 0
