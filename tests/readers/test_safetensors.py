"""safetensors checkpoints: byte-exact examples, files of true size (sparse), indexes, folders."""

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.safetensors import INDEX_NAME, read_safetensors

Tensors = list[tuple[str, str, Sequence[int]]]
Write = Callable[..., Path]
LLAMA_8B_PARAMETERS = 8_030_261_248


def raw_file(path: Path, header: bytes, data_bytes: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    return path


def shard_by_layer(tensors: Tensors, folder: Path, write: Write, shards: int) -> dict[str, str]:
    """Deal the tensors over `shards` files; the weight map."""
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = tensors[number::shards]
        write(folder / name, part, {"format": "pt"})
        weight_map |= {tensor[0]: name for tensor in part}
    return weight_map


def write_index(folder: Path, weight_map: dict[str, Any], total_size: int = 0) -> Path:
    path = folder / INDEX_NAME
    path.write_text(json.dumps({"metadata": {"total_size": total_size}, "weight_map": weight_map}))
    return path


# --- worked examples -----------------------------------------------------------------------------


def test_every_byte_of_a_hand_written_file(tmp_path: Path) -> None:
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},'
        b'"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}  '
    )
    path = raw_file(tmp_path / "x.safetensors", header, 16)
    checkpoint = read_safetensors(path)
    assert [(t.name, t.dtype, t.shape, t.stored_bytes, t.shard) for t in checkpoint.tensors] == [
        ("a", "F32", (), 4, "x.safetensors"),
        ("b", "BF16", (2, 3), 12, "x.safetensors"),
    ]
    assert checkpoint.format == "safetensors"
    assert checkpoint.path == path
    assert checkpoint.files == 1
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.stored_bytes == 16
    assert checkpoint.file_bytes == 8 + len(header) + 16
    assert checkpoint.parameters == 7
    assert checkpoint.bytes_by_dtype == {"F32": 4, "BF16": 12}


def test_llama_3_8b_bf16_in_four_shards(
    tmp_path: Path, write_safetensors: Write, llama_8b: Callable[..., Tensors]
) -> None:
    weight_map = shard_by_layer(llama_8b(), tmp_path, write_safetensors, 4)
    write_index(tmp_path, weight_map, 16_060_522_496)
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.stored_bytes == 16_060_522_496
    assert checkpoint.parameters == LLAMA_8B_PARAMETERS
    assert checkpoint.files == 4
    assert len(checkpoint.tensors) == 291
    assert checkpoint.metadata == {"format": "pt", "total_size": 16_060_522_496}
    assert checkpoint.bytes_by_role == {
        "embedding": 2 * 128256 * 4096,
        "lm_head": 2 * 128256 * 4096,  # untied: both matrices are there
        "attention": 2 * 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096),
        "mlp": 2 * 32 * 3 * 14336 * 4096,
        "norm": 2 * 65 * 4096,
    }
    assert sum(checkpoint.parameters_by_role.values()) == LLAMA_8B_PARAMETERS
    # The folder, its index, and the same files without an index say the same.
    assert read_safetensors(tmp_path / INDEX_NAME).tensors == checkpoint.tensors
    (tmp_path / INDEX_NAME).unlink()
    assert read_safetensors(tmp_path).tensors == checkpoint.tensors


def test_llama_3_8b_awq_g128_is_not_counted_in_words(
    tmp_path: Path, write_safetensors: Write, llama_8b: Callable[..., Tensors]
) -> None:
    def linear(path: str, out: int, width: int) -> Tensors:
        return [
            (path + ".qweight", "I32", (width, out // 8)),
            (path + ".qzeros", "I32", (width // 128, out // 8)),
            (path + ".scales", "F16", (width // 128, out)),
        ]

    path = write_safetensors(tmp_path / "model.safetensors", llama_8b(linear), {"format": "pt"})
    checkpoint = read_safetensors(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.stored_bytes == 5_727_854_592
    assert checkpoint.parameters == LLAMA_8B_PARAMETERS
    assert sum(tensor.elements for tensor in checkpoint.tensors) < 2_100_000_000
    assert checkpoint.bytes_by_dtype["I32"] == 3_516_923_904
    assert checkpoint.file_bytes == path.stat().st_size


@pytest.mark.parametrize(("bits", "stored"), [(4, 5_727_854_592), (8, 9_244_778_496)])
@pytest.mark.parametrize("told_by", ["g_idx", "qzeros"])
def test_llama_3_8b_gptq_int4_and_int8_differ_only_in_shapes(
    bits: int,
    stored: int,
    told_by: str,
    tmp_path: Path,
    write_safetensors: Write,
    llama_8b: Callable[..., Tensors],
) -> None:
    packed = 32 // bits

    def linear(path: str, out: int, width: int) -> Tensors:
        made: Tensors = [
            (path + ".qweight", "I32", (width // packed, out)),
            (path + ".qzeros", "I32", (width // 128, out // packed)),
            (path + ".scales", "F16", (width // 128, out)),
        ]
        return made + ([(path + ".g_idx", "I32", (width,))] if told_by == "g_idx" else [])

    write_safetensors(tmp_path / "model.safetensors", llama_8b(linear))
    checkpoint = read_safetensors(tmp_path)
    order = 4 * 32 * (6 * 4096 + 14336) if told_by == "g_idx" else 0
    assert checkpoint.stored_bytes == stored + order
    assert checkpoint.parameters == LLAMA_8B_PARAMETERS


def test_llama_3_8b_compressed_tensors_needs_its_config(
    tmp_path: Path, write_safetensors: Write, llama_8b: Callable[..., Tensors]
) -> None:
    def linear(path: str, out: int, width: int) -> Tensors:
        return [
            (path + ".weight_packed", "I32", (out, width // 8)),
            (path + ".weight_scale", "BF16", (out, width // 128)),
            (path + ".weight_shape", "I64", (2,)),
        ]

    path = write_safetensors(tmp_path / "model.safetensors", llama_8b(linear))
    # 224 linear layers of 6,979,321,856 weights: half a byte each, 2 of scale in 128, 16 of shape.
    stored = 2 * (LLAMA_8B_PARAMETERS - 6_979_321_856) + 3_489_660_928 + 109_051_904 + 224 * 16
    without = read_safetensors(path)
    assert without.stored_bytes == stored
    with pytest.raises(InputError, match=r"weight_packed.*nothing stored beside it"):
        _ = without.parameters
    config = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}}
    checkpoint = read_safetensors(path, quantization_config=config)
    assert checkpoint.stored_bytes == stored
    assert checkpoint.parameters == LLAMA_8B_PARAMETERS
    assert checkpoint.parameters_by_role["mlp"] == 32 * 3 * 14336 * 4096


def test_a_numbered_mtp_layer_is_told_apart_from_the_decoder(
    tmp_path: Path, write_safetensors: Write
) -> None:
    path = write_safetensors(
        tmp_path / "model.safetensors",
        [
            ("model.layers.60.mlp.experts.0.up_proj.weight", "BF16", (4, 8)),
            ("model.layers.61.mlp.experts.0.up_proj.weight", "BF16", (4, 8)),
            ("model.layers.61.eh_proj.weight", "BF16", (8, 16)),
        ],
    )
    checkpoint = read_safetensors(path)
    assert checkpoint.bytes_by_role == {"experts": 64, "mtp": 64 + 256}
    assert checkpoint.parameters_by_role == {"experts": 32, "mtp": 32 + 128}
    assert checkpoint.role_of("model.layers.61.mlp.gate.weight") == "mtp"
    assert checkpoint.role_of("model.layers.6.mlp.gate.weight") == "router"


def test_an_index_of_400_shards_opens_within_a_second(tmp_path: Path, write_safetensors: Write) -> None:
    tensors: Tensors = [
        (f"model.layers.{n // 120}.mlp.experts.{n % 120}.down_proj.weight", "BF16", (2048, 768))
        for n in range(400 * 40)
    ]
    write_index(tmp_path, shard_by_layer(tensors, tmp_path, write_safetensors, 400))
    start = time.process_time()
    checkpoint = read_safetensors(tmp_path)
    assert time.process_time() - start < 1.0
    assert checkpoint.files == 400
    assert checkpoint.stored_bytes == 400 * 40 * 2048 * 768 * 2


# --- indexes and folders -------------------------------------------------------------------------

ONE: Tensors = [("a.weight", "F32", (2,))]
TWO: Tensors = [("b.weight", "F32", (2,))]


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a.weight": "../1.safetensors"}, "leaves the folder"),
        ({"a.weight": "/etc/passwd"}, "leaves the folder"),
        ({"a.weight": "x/../../1.safetensors"}, "leaves the folder"),
        ({"a.weight": "./1.safetensors"}, "leaves the folder"),
        ({"a.weight": "C:\\1.safetensors"}, "leaves the folder"),
        ({"a.weight": "x//1.safetensors"}, "leaves the folder"),
        ({"a.weight": INDEX_NAME}, "is the index itself"),
        ({"a.weight": "1.bin"}, "is no .safetensors file"),
        ({"a.weight": ""}, "is empty"),
        ({"a.weight": "1\n.safetensors"}, "unprintable"),
        ({"a.weight": 7}, "is not a string"),
        ({"a.weight": "3.safetensors"}, "cannot be read"),
        ({"a.weight": "1.safetensors"}, ""),
        ({"a.weight": "1.safetensors", "b.weight": "1.safetensors"}, "'b.weight' is not in '1.saf"),
        (
            {"a.weight": "2.safetensors"},
            "'b.weight' is in '2.safetensors', the index puts it in None",
        ),
        (
            {"a.weight": "2.safetensors", "b.weight": "1.safetensors"},
            "'a.weight' is in '1.safetensors', the index puts it in '2.safetensors'",
        ),
        ({}, "no weight_map"),
        (["1.safetensors"], "no weight_map"),
    ],
)
def test_index_and_shards_must_agree(
    weight_map: Any, problem: str, tmp_path: Path, write_safetensors: Write
) -> None:
    write_safetensors(tmp_path / "1.safetensors", ONE)
    write_safetensors(tmp_path / "2.safetensors", TWO)
    write_index(tmp_path, weight_map)
    if not problem:
        assert read_safetensors(tmp_path).stored_bytes == 8
        return
    with pytest.raises(InputError, match=problem):
        read_safetensors(tmp_path)


def test_a_tensor_in_two_shards_is_not_counted_twice(tmp_path: Path, write_safetensors: Write) -> None:
    write_safetensors(tmp_path / "x.safetensors", ONE)
    write_safetensors(tmp_path / "y.safetensors", ONE)
    with pytest.raises(InputError, match=r"'a.weight' is in 'x.safetensors' and in 'y.safetensors'"):
        read_safetensors(tmp_path)


def test_model_caches_are_made_of_links(tmp_path: Path, write_safetensors: Write) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_safetensors(blobs / "0a1b", ONE)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0a1b")
    assert read_safetensors(snapshot).stored_bytes == 8
    (blobs / "0a1b").unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_safetensors(snapshot)


def test_links_in_a_circle_and_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        read_safetensors(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(InputError, match="not a regular file"):
        read_safetensors(tmp_path / "pipe.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        read_safetensors(tmp_path / ("a" * 300 + ".safetensors"))
    with pytest.raises(InputError, match="cannot be read"):
        read_safetensors(tmp_path / "a\0.safetensors")


def test_a_folder_half_downloaded_is_refused(tmp_path: Path, write_safetensors: Write) -> None:
    write_safetensors(tmp_path / "model-00001-of-00003.safetensors", ONE)
    write_safetensors(tmp_path / "model-00003-of-00003.safetensors", TWO)
    with pytest.raises(InputError, match=r"1 of 3 shards are missing.*model-00002-of-00003"):
        read_safetensors(tmp_path)
    with pytest.raises(InputError, match="is shard 1 of 3"):
        read_safetensors(tmp_path / "model-00001-of-00003.safetensors")


def test_the_same_weights_under_two_names_are_not_added_up(tmp_path: Path, write_safetensors: Write) -> None:
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", ONE)
    write_safetensors(tmp_path / "consolidated.safetensors", TWO)
    with pytest.raises(InputError, match="more than one checkpoint"):
        read_safetensors(tmp_path)
    write_index(tmp_path, {"a.weight": "model-00001-of-00001.safetensors"})
    assert [tensor.name for tensor in read_safetensors(tmp_path).tensors] == ["a.weight"]


def test_folders_without_weights_or_with_two_indexes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no \.safetensors file"):
        read_safetensors(tmp_path)
    for name in ("x", "y"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="has 2 indexes"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b"{}", b"null", b"", b"\xff", b'{"weight_map":null}', b'{"metadata":[]}']
)
def test_a_json_file_that_is_no_index(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / INDEX_NAME
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_safetensors(path)
