"""Models by name and by path: config, safetensors, index, GGUF; what the files say wins over the config."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from capplan import catalog, model_source, vram
from capplan.cli import run
from capplan.errors import InputError
from capplan.kv import kv_layout
from capplan.weights import tower_bytes, weight_budget

Tensors = list[tuple[str, str, Sequence[int]]]
Writer = Callable[..., Path]
# Llama-3-8B: 8,030,261,248 parameters; 16,060,522,496 B at bf16.
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    **LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def tiny(dtype: str = "BF16", head: bool = True, layers: int = 2) -> Tensors:
    """Every tensor of TINY: 139,584 parameters of which 32,768 are the head."""
    made: Tensors = [("model.embed_tokens.weight", dtype, (512, 64)), ("model.norm.weight", dtype, (64,))]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
            "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
            "mlp.down_proj": (64, 128), "input_layernorm": (64,), "post_attention_layernorm": (64,),
        }  # fmt: skip
        made += [(f"{at}{name}.weight", dtype, shape) for name, shape in shapes.items()]
    return [*made, ("lm_head.weight", dtype, (512, 64))] if head else made


def folder(tmp_path: Path, config: dict[str, Any], name: str = "model") -> Path:
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


# --- what a name or path means ---------------------------------------------------------------------------


def test_catalog_names_and_aliases() -> None:
    assert model_source.load("8b").name == "meta-llama/Llama-3.1-8B"
    assert model_source.load("Meta-Llama-3.1-8B").name == "meta-llama/Llama-3.1-8B"


def test_a_catalog_name_goes_before_a_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(tmp_path, TINY, "8b")
    folder(tmp_path, TINY, "mine")
    assert model_source.load("8b").hidden == 4096
    assert model_source.load("./8b").hidden == 64
    assert model_source.load("mine").hidden == 64


def test_a_config_alone_and_its_folder(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA_8B)
    for given in (path, path / "config.json"):
        model = model_source.load(str(given))
        assert model.parameters == 8_030_261_248
        assert model.stored is None
        assert model.name == "model"


def test_a_folder_named_as_the_hub_cache_does(tmp_path: Path) -> None:
    assert model_source.load(str(folder(tmp_path, TINY, "me--mine"))).name == "me/mine"


# --- weights from the files ------------------------------------------------------------------------------


def test_a_folder_with_weights_is_exact(
    tmp_path: Path, write_safetensors: Writer, llama_8b: Callable[[], Tensors]
) -> None:
    path = folder(tmp_path, LLAMA_8B)
    write_safetensors(path / "model.safetensors", llama_8b())
    model = model_source.load(str(path))
    assert model.stored is not None
    assert (model.stored.format, model.stored.files) == ("safetensors", 1)
    budget = weight_budget(model, None)
    assert (budget.bytes, budget.parameters) == (16_060_522_496, 8_030_261_248)
    assert model.assumptions == ()
    answer = vram(str(path)).to_dict()
    assert answer["weights"]["bytes"] == 16_060_522_496
    assert answer["weights"]["stored"] == {
        "format": "safetensors", "files": 1, "bytes_by_type": {"BF16": 16_060_522_496},
    }  # fmt: skip


def test_the_config_beside_a_file_and_an_index(tmp_path: Path, write_safetensors: Writer) -> None:
    path = folder(tmp_path, TINY)
    first, second = tiny()[:9], tiny()[9:]
    for number, tensors in enumerate((first, second), start=1):
        write_safetensors(path / f"model-0000{number}-of-00002.safetensors", tensors)
    weight_map = {name: "model-00001-of-00002.safetensors" for name, _, _ in first}
    weight_map |= {name: "model-00002-of-00002.safetensors" for name, _, _ in second}
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for given in (path, index):
        model = model_source.load(str(given))
        assert model.stored is not None
        assert model.stored.files == 2
        assert model.stored.bytes == 2 * model.parameters
    with pytest.raises(InputError, match="is shard 1 of 2"):
        model_source.load(str(path / "model-00001-of-00002.safetensors"))


def test_one_safetensors_file_by_its_own_path(tmp_path: Path, write_safetensors: Writer) -> None:
    path = folder(tmp_path, TINY)
    file = write_safetensors(path / "adapted.safetensors", tiny())
    model = model_source.load(str(file))
    assert model.stored is not None
    assert model.stored.bytes == 2 * model.parameters


def test_weights_without_a_config_say_what_is_not_known(tmp_path: Path, write_safetensors: Writer) -> None:
    file = write_safetensors(tmp_path / "x.safetensors", tiny())
    for given in (file, tmp_path):
        model = model_source.load(str(given))
        assert model.groups == ()
        assert model.parameters > 0
        assert "no config.json beside" in model.assumptions[0]


def test_an_index_without_its_files_plans_from_the_config(tmp_path: Path) -> None:
    path = folder(tmp_path, TINY)
    (path / "model.safetensors.index.json").write_text("{}")
    model = model_source.load(str(path))
    assert model.stored is None
    assert "not here" in model.assumptions[0]


def test_fewer_parameters_in_the_files_are_said_and_used(tmp_path: Path, write_safetensors: Writer) -> None:
    path = folder(tmp_path, TINY)
    file = write_safetensors(path / "model.safetensors", tiny(layers=1))
    model = model_source.load(str(file))
    held = sum(elements(shape) for _, _, shape in tiny(layers=1))
    assert f"{model.parameters:,} parameters, the files hold {held:,}" in model.assumptions[0]
    assert weight_budget(model, None).parameters == held


def elements(shape: Sequence[int]) -> int:
    product = 1
    for width in shape:
        product *= width
    return product


def test_a_head_stored_beside_a_tied_embedding_is_not_loaded(
    tmp_path: Path, write_safetensors: Writer
) -> None:
    path = folder(tmp_path, {**TINY, "tie_word_embeddings": True})
    write_safetensors(path / "model.safetensors", tiny())
    model = model_source.load(str(path))
    budget = weight_budget(model, None)
    assert budget.bytes == 2 * (139_584 - 32_768) == 2 * model.parameters
    assert "65,536 bytes although the embedding is tied" in model.assumptions[0]


def test_packed_weights_with_their_config(
    tmp_path: Path, write_safetensors: Writer, llama_8b: Callable[..., Tensors]
) -> None:
    # AWQ: words, zero points and scales of groups of 128, as published: 5,727,854,592 B, 5.706 bits.
    def awq(path: str, out: int, width: int) -> Tensors:
        groups = width // 128
        return [
            (f"{path}.qweight", "I32", (width, out // 8)),
            (f"{path}.qzeros", "I32", (groups, out // 8)),
            (f"{path}.scales", "F16", (groups, out)),
        ]

    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    path = folder(tmp_path, {**LLAMA_8B, "quantization_config": quantization})
    write_safetensors(path / "model.safetensors", llama_8b(awq))
    model = model_source.load(str(path))
    budget = weight_budget(model, None)
    assert (budget.bytes, budget.parameters) == (5_727_854_592, 8_030_261_248)
    # What its config alone says is the same here.
    planned = weight_budget(model_source.load(str(path / "config.json")), None)
    assert planned.bytes == budget.bytes
    for role in planned.roles:
        stored = next(own for own in budget.roles if own.role == role.role)
        assert (stored.bytes, stored.parameters) == (role.bytes, role.parameters)


def test_a_format_asked_for_ignores_the_files(tmp_path: Path, write_safetensors: Writer) -> None:
    path = folder(tmp_path, TINY)
    write_safetensors(path / "model.safetensors", tiny("F32"))
    alone = model_source.load(str(path / "config.json"))
    model = model_source.load(str(path))
    for name in ("bf16", "int4", "q4_k_m"):
        form = catalog.weight_format(name)
        asked, planned = weight_budget(model, form), weight_budget(alone, form)
        assert (asked.bytes, asked.parameters) == (planned.bytes, planned.parameters)
    assert weight_budget(model, None).bytes == 4 * 139_584
    answer = vram(str(path), precision="int4")
    assert any("safetensors format is replaced by int4" in note for note in answer.notes)


def test_a_ranks_share_of_the_files_is_that_of_its_shapes(
    tmp_path: Path, write_safetensors: Writer, llama_8b: Callable[[], Tensors]
) -> None:
    path = folder(tmp_path, LLAMA_8B)
    write_safetensors(path / "model.safetensors", llama_8b())
    model, alone = model_source.load(str(path)), model_source.load(str(path / "config.json"))
    for tp in (2, 4, 8, 16):
        files, shapes = weight_budget(model, None, tp=tp), weight_budget(alone, None, tp=tp)
        assert files.bytes == pytest.approx(shapes.bytes, abs=16)
    assert any("rank" in note for note in vram(str(path), tp=2).notes)


def test_towers_come_from_the_files(tmp_path: Path, write_safetensors: Writer) -> None:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "image_size": 28,
        "num_hidden_layers": 1, "patch_size": 14, "num_attention_heads": 2,
    }  # fmt: skip
    path = folder(tmp_path, {"model_type": "llava", "text_config": TINY, "vision_config": vision})
    write_safetensors(
        path / "model.safetensors",
        [
            *((f"language_model.{name}", dtype, shape) for name, dtype, shape in tiny()),
            ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "F32", (64, 32)),
            ("multi_modal_projector.linear_1.weight", "BF16", (64, 32)),
        ],
    )
    model = model_source.load(str(path))
    sizes = tower_bytes(model)
    by_role = {tower.role: sizes[tower.name] for tower in model.towers}
    assert by_role == {"vision": 64 * 32 * 4, "projector": 64 * 32 * 2}
    assert weight_budget(model, None).bytes == 2 * 139_584
    extra = {part["name"]: part["bytes"] for part in vram(str(path)).to_dict()["extra"]}
    assert extra == sizes


def test_parts_that_the_files_do_not_have_take_nothing(tmp_path: Path, write_safetensors: Writer) -> None:
    config = {"model_type": "llava", "text_config": TINY, "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "image_size": 28,
        "num_hidden_layers": 1, "patch_size": 14}}  # fmt: skip
    path = folder(tmp_path, config)
    write_safetensors(path / "model.safetensors", tiny())
    answer = vram(str(path))
    assert answer.extra == {}
    assert any("not in the files" in note for note in answer.notes)


# --- GGUF ------------------------------------------------------------------------------------------------


def gguf(path: Path, writer: Any, split: tuple[int, int] | None = None, tensors: bool = True) -> Path:
    """TINY as GGUF, its matrices in Q8_0; `split` (number, count) from 1."""
    writer.key("general.architecture", "llama").key("general.name", "a name with / and ..")
    keys = {
        "block_count": 2, "context_length": 8192, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    for key, value in keys.items():
        writer.key(f"llama.{key}", value)
    if split:
        writer.key("split.no", split[0] - 1).key("split.count", split[1])
    if tensors:
        for name, _, shape in tiny():
            writer.tensor(gguf_name(name), 8 if len(shape) > 1 else 0, tuple(reversed(shape)))
    return Path(writer.write(path))


def gguf_name(name: str) -> str:
    words = {
        "model.layers": "blk", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd", "lm_head": "output",
        "model.norm": "output_norm",
    }  # fmt: skip
    for old, new in words.items():
        name = name.replace(old, new)
    return name


# 139,264 weights in blocks of 32 at 34 bytes, 320 norm weights at 4.
TINY_GGUF_BYTES = 139_264 // 32 * 34 + 320 * 4


def test_a_gguf_by_its_path_and_by_its_folder(tmp_path: Path, gguf_writer: type[Any]) -> None:
    file = gguf(tmp_path / "tiny-Q8_0.gguf", gguf_writer())
    for given in (file, tmp_path):
        model = model_source.load(str(given))
        assert model.name == "tiny-Q8_0"
        budget = weight_budget(model, None)
        assert (budget.bytes, budget.parameters) == (TINY_GGUF_BYTES, 139_584)
        assert kv_layout(model, kv_bits=16).bytes_per_token == 2 * 2 * 2 * 16 * 2
        assert model.assumptions == ()
    answer = vram(str(file)).to_dict()
    assert answer["weights"]["formats"] == ["Q8_0", "F32"]
    assert answer["weights"]["headline_bytes"] == 139_584


def test_a_split_gguf_by_its_first_part(tmp_path: Path, gguf_writer: type[Any]) -> None:
    first = gguf(tmp_path / "m-00001-of-00002.gguf", gguf_writer(), split=(1, 2), tensors=False)
    second = gguf_writer().key("split.no", 1).key("split.count", 2)
    for name, _, shape in tiny():
        second.tensor(gguf_name(name), 8 if len(shape) > 1 else 0, tuple(reversed(shape)))
    second.write(tmp_path / "m-00002-of-00002.gguf")
    for given in (first, tmp_path):
        model = model_source.load(str(given))
        assert model.name == "m"
        assert model.stored is not None
        assert (model.stored.files, model.stored.bytes) == (2, TINY_GGUF_BYTES)


def test_two_ggufs_in_a_folder_are_ambiguous(tmp_path: Path, gguf_writer: type[Any]) -> None:
    for name in ("a.gguf", "b.gguf"):
        gguf(tmp_path / name, gguf_writer())
    with pytest.raises(InputError, match=r"holds 2 \.gguf files"):
        model_source.load(str(tmp_path))


# --- what cannot be used ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nosuch", "unknown model 'nosuch'"),
        ("", "unknown model ''"),
        ("nobody/nothing", "not in the catalog"),
        ("meta-llama/Llama-3.1-9B", "did you mean"),
        ("./nowhere", "cannot be read"),
        ("nowhere.gguf", "cannot be read"),
        ("a\0b", "no name or path"),
        ("x" * 5000, "no name or path"),
        ("x" * 300 + ".json", "cannot be read"),
        ("~nosuchuser/m.gguf", "cannot be read"),
    ],
)
def test_what_is_no_model_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        model_source.load(name)
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3


def test_an_unknown_hub_id_points_to_the_option() -> None:
    with pytest.raises(InputError) as raised:
        model_source.load("nobody/nothing")
    assert "--online" in raised.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "broken JSON"),
        ("[]", "not a mapping"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ("\xff", "not UTF-8"),
        ("[" * 100_000, "cannot be parsed"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be parsed"),
        ('{"model_type": "llama"}', "missing"),
    ],
    ids=["cut", "a list", "twice", "bytes", "nesting", "digits", "empty"],
)
def test_a_broken_config_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as raised:
        model_source.load(str(file))
    assert said in str(raised.value)
    assert len(str(raised.value).splitlines()) == 3


def test_show_takes_a_checkpoint(
    tmp_path: Path, gguf_writer: type[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = gguf(tmp_path / "tiny.gguf", gguf_writer())
    assert run(["show", str(file), "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stored_bytes"] == TINY_GGUF_BYTES
    assert shown["parameters"] == 139_584
    assert shown["weight_files"] == 1


def test_weights_without_a_config_are_planned_without_a_kv_cache(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "model.embed_tokens.weight": {"dtype": "BF16", "shape": [1000, 64], "data_offsets": [0, 128000]},
            "model.layers.0.mlp.up_proj.weight": {
                "dtype": "BF16",
                "shape": [256, 64],
                "data_offsets": [128000, 160768],
            },
        }
    ).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(160_768))
    alone = vram(str(path), gpus=("l4",))
    assert alone.weights_bytes == 160_768
    assert alone.parameters == 80_384
    assert alone.kv_bytes is None
    assert alone.fits is None
    assert alone.remedies == ()
    with_kv = vram(str(path), kv_from="llama-3-8b", users=1, gpus=("l4",))
    assert with_kv.kv_bytes == 536_870_912
    assert with_kv.fits is True
    with pytest.raises(InputError, match="layers of these weights"):
        vram(str(path), precision="int4")
