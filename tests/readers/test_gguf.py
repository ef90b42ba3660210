"""GGUF checkpoints: byte-exact examples, files of true size (sparse), split sets."""

import csv
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.ggml_types import GGML_TYPES
from capplan.readers.gguf import gguf_architecture, read_gguf
from capplan.readers.gguf_header import GgufArray

Writer = Any  # conftest.GgufWriter; test modules cannot import from conftest
F32, F16, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 8, 12, 14, 30
SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LLAMA_8B_PARAMETERS = 8_030_261_248


def shared_file(name: str) -> Path:
    path = SHARED_DATA / name
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not in the shared data")
        pytest.skip(f"needs {name} of the shared data")
    return path


def with_llama_8b(writer: Writer, type_of: Callable[[str], int]) -> Writer:
    """Add Llama-3.1-8B's tensors as llama.cpp names them; matrices of `type_of` their name."""
    writer.tensor("rope_freqs.weight", F32, [64])
    writer.tensor("token_embd.weight", type_of("token_embd"), [4096, 128256])
    widths = {
        "attn_q": [4096, 4096],
        "attn_k": [4096, 1024],
        "attn_v": [4096, 1024],
        "attn_output": [4096, 4096],
        "ffn_gate": [4096, 14336],
        "ffn_up": [4096, 14336],
        "ffn_down": [14336, 4096],
    }
    for layer in range(32):
        writer.tensor(f"blk.{layer}.attn_norm.weight", F32, [4096])
        writer.tensor(f"blk.{layer}.ffn_norm.weight", F32, [4096])
        for name, width in widths.items():
            writer.tensor(f"blk.{layer}.{name}.weight", type_of(name), width)
    writer.tensor("output_norm.weight", F32, [4096])
    return writer.tensor("output.weight", type_of("output"), [4096, 128256])


def llama_8b_keys(writer: Writer, tokens: int = 0) -> Writer:
    writer.key("general.architecture", "llama").key("llama.block_count", 32)
    writer.key("llama.embedding_length", 4096).key("llama.attention.head_count_kv", 8)
    writer.key("llama.rope.freq_base", 500000.0)
    return writer.key("tokenizer.ggml.tokens", [f"<{n}>" for n in range(tokens)])


# --- worked examples -----------------------------------------------------------------------------


def test_every_byte_of_a_hand_written_file(tmp_path: Path) -> None:
    content = (
        b"GGUF"
        + struct.pack("<IQQ", 3, 2, 3)
        + struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
        + struct.pack("<Q", 17) + b"llama.block_count" + struct.pack("<II", 4, 1)
        + struct.pack("<Q", 7) + b"a.array" + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 2)
        + struct.pack("<Q", 11) + b"norm.weight" + struct.pack("<IQIQ", 1, 3, 0, 0)
        + struct.pack("<Q", 13) + b"output.weight" + struct.pack("<IQQIQ", 2, 64, 2, 8, 32)
    )  # fmt: skip
    padding = -len(content) % 32
    path = tmp_path / "x.gguf"
    path.write_bytes(content + bytes(padding) + bytes(32) + bytes(4 * 34))
    checkpoint = read_gguf(path)
    assert [(t.name, t.dtype, t.shape, t.stored_bytes, t.shard) for t in checkpoint.tensors] == [
        ("norm.weight", "F32", (3,), 12, "x.gguf"),
        ("output.weight", "Q8_0", (2, 64), 136, "x.gguf"),
    ]
    assert checkpoint.format == "gguf"
    assert checkpoint.files == 1
    assert checkpoint.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "a.array": (0.5, 2.0),
    }
    assert checkpoint.stored_bytes == 148
    assert checkpoint.file_bytes == path.stat().st_size
    assert checkpoint.parameters == 131
    assert gguf_architecture(checkpoint) == {
        "block_count": 1,
        "general.architecture": "llama",
        "vocab_length": None,
        "has_output_weight": True,
    }


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    with shared_file("oracles/quant_bits.csv").open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["format"].startswith("GGUF ")]
    published = {
        row["format"].removeprefix("GGUF "): (
            int(row["weights_per_block"]),
            int(row["bytes_per_block"]),
        )
        for row in rows
    }
    assert {name: (block, size) for name, block, size in GGML_TYPES.values()} == published


@pytest.mark.parametrize(
    ("type_of", "stored"),
    [
        # 8,029,995,008 weights in matrices; 65 norms and 64 rope factors stay F32: 1,065,216 B.
        pytest.param(lambda _: Q8_0, 8_029_995_008 // 32 * 34 + 1_065_216, id="Q8_0"),
        pytest.param(lambda _: Q4_K, 8_029_995_008 // 256 * 144 + 1_065_216, id="Q4_K"),
        pytest.param(
            lambda name: Q6_K if name == "output" else Q4_K,
            (8_029_995_008 - 525_336_576) // 256 * 144 + 525_336_576 // 256 * 210 + 1_065_216,
            id="Q4_K with the output in Q6_K",
        ),
        pytest.param(lambda _: BF16, 2 * 8_029_995_008 + 1_065_216, id="BF16"),
    ],
)
def test_llama_3_1_8b(
    type_of: Callable[[str], int], stored: int, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    writer = with_llama_8b(llama_8b_keys(gguf_writer(), tokens=128), type_of)
    checkpoint = read_gguf(writer.write(tmp_path / "x.gguf"))
    assert checkpoint.stored_bytes == stored
    # transformers' count: llama.cpp's own includes the 64 rope factors.
    assert checkpoint.parameters == LLAMA_8B_PARAMETERS
    roles = checkpoint.bytes_by_role
    assert set(roles) == {"embedding", "lm_head", "attention", "mlp", "norm", "other"}
    assert roles["norm"] == 65 * 4096 * 4
    assert roles["other"] == 64 * 4
    assert gguf_architecture(checkpoint) == {
        "block_count": 32,
        "embedding_length": 4096,
        "attention.head_count_kv": 8,
        "rope.freq_base": 500000.0,
        "general.architecture": "llama",
        "vocab_length": 128,
        "has_output_weight": True,
    }


def test_the_files_llama_cpp_wrote_add_up(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    """Types per tensor that llama.cpp's quantizer chose for a 702M Llama shape, and its own
    totals."""
    numbers = {name: number for number, (name, _, _) in GGML_TYPES.items()}
    with shared_file("oracles/gguf_quantize_random_702M.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert rows
    for row in rows:
        if "x" in "".join(row[key] for key in ("attn_v", "ffn_down")):
            continue  # mixed over the layers; the order is not recorded
        writer = gguf_writer()
        writer.blocks = {number: shape[1:] for number, shape in GGML_TYPES.items()}
        # 24 layers of hidden 1536, ffn 4096, 12 heads of 128 with 4 KV heads, vocabulary 32,000.
        widths = {
            "attn_q": [1536, 1536],
            "attn_k": [1536, 512],
            "attn_v": [1536, 512],
            "attn_output": [1536, 1536],
            "ffn_gate": [1536, 4096],
            "ffn_up": [1536, 4096],
            "ffn_down": [4096, 1536],
        }
        for name in ("token_embd", "output"):
            writer.tensor(name + ".weight", numbers[row[name]], [1536, 32000])
        for layer in range(24):
            for name, width in widths.items():
                writer.tensor(f"blk.{layer}.{name}.weight", numbers[row[name]], width)
            for name in ("attn_norm", "ffn_norm"):
                writer.tensor(f"blk.{layer}.{name}.weight", F32, [1536])
        writer.tensor("output_norm.weight", F32, [1536])
        checkpoint = read_gguf(writer.write(tmp_path / "x.gguf"))
        assert checkpoint.parameters == int(row["params"]), row["format"]
        assert checkpoint.stored_bytes == int(row["tensor_bytes"]), row["format"]


@pytest.mark.parametrize("version", [1, 2, 3])
def test_all_versions_say_the_same(version: int, tmp_path: Path, gguf_writer: type[Writer]) -> None:
    writer = llama_8b_keys(gguf_writer(version), tokens=3)
    writer.tensor("token_embd.weight", F16, [8, 3]).tensor("output_norm.weight", F32, [8])
    checkpoint = read_gguf(writer.write(tmp_path / "x.gguf"))
    assert checkpoint.stored_bytes == 48 + 32
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ("<0>", "<1>", "<2>")
    assert gguf_architecture(checkpoint)["has_output_weight"] is False


def test_a_tied_model_without_a_tokenizer_has_the_vocabulary_of_its_embedding(
    tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    writer = gguf_writer().key("general.architecture", "gemma")
    writer.tensor("token_embd.weight", F16, [8, 77])
    found = gguf_architecture(read_gguf(writer.write(tmp_path / "x.gguf")))
    assert found == {
        "general.architecture": "gemma",
        "vocab_length": 77,
        "has_output_weight": False,
    }


def test_a_tokenizer_of_300_000_strings_is_walked_but_not_kept(
    tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    # Some strings are longer than the pieces the reader reads in.
    tokens = [f"token {n}" if n % 50_000 else "x" * 200_000 for n in range(300_000)]
    writer = gguf_writer().key("general.architecture", "llama").key("tokenizer.ggml.tokens", tokens)
    writer.key("tokenizer.ggml.token_type", [1] * 300_000).key("last", 7)
    path = writer.tensor("w", F32, [1]).write(tmp_path / "x.gguf")
    tracemalloc.start()
    checkpoint = read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == GgufArray(item_type="str", length=300_000)
    assert checkpoint.metadata["tokenizer.ggml.token_type"] == GgufArray(item_type="i32", length=300_000)
    assert checkpoint.metadata["last"] == 7
    assert gguf_architecture(checkpoint)["vocab_length"] == 300_000
    assert peak < 2_000_000
    start = time.process_time()
    read_gguf(path)
    assert time.process_time() - start < 1.0


# --- split sets ----------------------------------------------------------------------------------


def part(writer: Writer, number: int, total: int, tensors: int, name: str | None = None) -> Writer:
    """Part `number` (from 1) with one tensor."""
    if number == 1:
        writer.key("general.architecture", "llama")
    writer.raw_key("split.no", 2, struct.pack("<H", number - 1))
    writer.raw_key("split.count", 2, struct.pack("<H", total))
    writer.key("split.tensors.count", tensors)
    return writer.tensor(name or f"blk.{number}.attn_q.weight", Q8_0, [32, 4])


def test_a_split_set_is_read_by_its_first_part(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    paths = [part(gguf_writer(), n, 3, 3).write(tmp_path / f"m-{n:05}-of-00003.gguf") for n in (1, 2, 3)]
    checkpoint = read_gguf(paths[0])
    assert checkpoint.files == 3
    assert checkpoint.stored_bytes == 3 * 4 * 34
    assert checkpoint.file_bytes == sum(path.stat().st_size for path in paths)
    assert [tensor.shard for tensor in checkpoint.tensors] == [path.name for path in paths]
    with pytest.raises(InputError, match="is part 2 of 3") as caught:
        read_gguf(paths[1])
    assert "m-00001-of-00003.gguf" in caught.value.hint
    paths[2].unlink()
    with pytest.raises(InputError, match="cannot be read") as caught:
        read_gguf(paths[0])
    assert "m-00003-of-00003.gguf" in caught.value.where


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ({"number": 2, "total": 2, "tensors": 2, "name": "blk.1.attn_q.weight"}, "earlier part"),
        ({"number": 1, "total": 2, "tensors": 2}, "calls itself part 0"),
        ({"number": 2, "total": 3, "tensors": 2}, "calls itself part 1 .from 0. of 3"),
        ({"number": 2, "total": 2, "tensors": 9}, ""),
    ],
)
def test_parts_that_are_not_of_one_set(
    second: dict[str, Any], problem: str, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    first = part(gguf_writer(), 1, 2, 2).write(tmp_path / "m-00001-of-00002.gguf")
    part(gguf_writer(), **second).write(tmp_path / "m-00002-of-00002.gguf")
    if problem:
        with pytest.raises(InputError, match=problem):
            read_gguf(first)
    else:  # only the first part's count is a promise
        assert read_gguf(first).files == 2


@pytest.mark.parametrize(
    ("name", "total", "tensors", "problem"),
    [
        ("m.gguf", 2, 1, "split.count is 2, the file's name says 1"),
        ("m-00001-of-00003.gguf", 2, 1, "split.count is 2, the file's name says 3"),
        ("m-00001-of-00001.gguf", 1, 5, "split.tensors.count is 5, the parts hold 1"),
        ("m-00001-of-00001.gguf", 0, 1, "split.count is 0"),
        ("m-00001-of-20000.gguf", 20000, 1, "has 20000 parts"),
    ],
)
def test_counts_of_a_split_set_that_lie(
    name: str, total: int, tensors: int, problem: str, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    with pytest.raises(InputError, match=problem):
        read_gguf(part(gguf_writer(), 1, total, tensors).write(tmp_path / name))


def test_a_name_of_a_split_set_without_its_keys_is_not_half_a_model(
    tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    path = gguf_writer().tensor("w", F32, [1]).write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(InputError, match=r"split.count is 1, the file's name says 2"):
        read_gguf(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_architecture_of_no_finite_numbers_is_refused(
    value: float, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    writer = gguf_writer().key("general.architecture", "x").key("x.rope.freq_base", value)
    checkpoint = read_gguf(writer.tensor("w", F32, [1]).write(tmp_path / "x.gguf"))
    with pytest.raises(InputError, match=r"x\.rope\.freq_base"):
        gguf_architecture(checkpoint)


def test_an_architecture_must_be_named(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    path = gguf_writer().tensor("w", F32, [1]).write(tmp_path / "x.gguf")
    with pytest.raises(InputError, match=r"general\.architecture"):
        gguf_architecture(read_gguf(path))
