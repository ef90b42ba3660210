"""The header of a GGUF file: types, values, bounds, and every way it can lie."""

import os
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.readers.ggml_types import GGML_TYPES, REMOVED_TYPES
from capplan.readers.gguf import read_gguf
from capplan.readers.gguf_header import GgufArray

Writer = Any  # conftest.GgufWriter; test modules cannot import from conftest
F32, F16, Q4_0, BF16 = 0, 1, 2, 30


@pytest.mark.parametrize("number", sorted(GGML_TYPES))
def test_every_type_takes_its_blocks(number: int, tmp_path: Path, gguf_writer: type[Writer]) -> None:
    name, block, block_bytes = GGML_TYPES[number]
    writer = gguf_writer()
    writer.tensor("w", number, [block * 2, 3])
    content = writer.header()
    padding = -len(content) % 32
    path = tmp_path / "x.gguf"
    path.write_bytes(content + bytes(padding + 6 * block_bytes))
    (tensor,) = read_gguf(path).tensors
    assert (tensor.dtype, tensor.shape, tensor.stored_bytes) == (
        name,
        (3, block * 2),
        6 * block_bytes,
    )


def test_every_kind_of_value(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    writer = gguf_writer()
    for number, layout, value in (
        (0, "<B", 255),
        (1, "<b", -128),
        (2, "<H", 65535),
        (3, "<h", -2),
        (4, "<I", 4294967295),
        (5, "<i", -7),
        (6, "<f", 0.25),
        (7, "<B", 1),
        (10, "<Q", (1 << 64) - 1),
        (11, "<q", -(1 << 63)),
        (12, "<d", 1e300),
    ):
        writer.raw_key(f"k{number}", number, struct.pack(layout, value))
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<II", 1, 2)
    writer.raw_key("nested", 9, struct.pack("<IQ", 9, 2) + inner + inner)
    writer.raw_key("text", 8, writer.text(b"caf\xc3\xa9 \xff"))
    writer.raw_key("empty", 9, struct.pack("<IQ", 8, 0))
    path = writer.tensor("w", F32, [1]).write(tmp_path / "x.gguf")
    assert read_gguf(path).metadata == {
        "k0": 255,
        "k1": -128,
        "k2": 65535,
        "k3": -2,
        "k4": 4294967295,
        "k5": -7,
        "k6": 0.25,
        "k7": True,
        "k10": (1 << 64) - 1,
        "k11": -(1 << 63),
        "k12": 1e300,
        "nested": ((1, 2), (1, 2)),
        "text": "café �",
        "empty": (),
    }


def test_strings_that_end_anywhere_near_the_end_of_a_piece(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    for before in range(40):
        writer = gguf_writer().key("before", "x" * before)
        # Half a piece of 64 KiB, then strings of 24 bytes with their lengths over its end.
        writer.key("strings", ["y" * 40_000] + ["z" * 16] * 5_000).key("last", before)
        path = writer.tensor("w", F32, [1]).write(tmp_path / "x.gguf")
        metadata = read_gguf(path).metadata
        assert metadata["strings"] == GgufArray(item_type="str", length=5_001)
        assert metadata["last"] == before


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "magic: needs 4 bytes, 0 are left"),
        (b"GGUF", "version: needs 4 bytes, 0 are left"),
        (b"GGUF\x03\0\0\0\x01", "tensors: needs 8 bytes, 1 are left"),
        (b"GGUF" + struct.pack(">IQQ", 3, 1, 1), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "version 0"),
        (b"tjgg" + bytes(40), "before GGUF"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS"),
        (b"\x7fELF" + bytes(40), "does not start with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1,152,921,504,606,846,976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "1,152,921,504,606,846,976 keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 5, 0), "claims 5 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds no tensors"),
    ],
)
def test_a_file_that_is_no_gguf(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem) as caught:
        read_gguf(path)
    assert caught.value.where == str(path)
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) == 3


def array_of(number: int, length: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", number, length) + payload


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.raw_key("k", 13, b"0" * 40), "'k' is of the unknown type 13"),
        (lambda w: w.raw_key("k", 7, b"\x02"), "2 is no bool"),
        (lambda w: w.raw_key("k", 8, struct.pack("<Q", 1 << 60)), "string of 1,152,921,504"),
        (lambda w: w.raw_key("k", 8, struct.pack("<Q", 1 << 20)), "needs 1,048,576 bytes"),
        (lambda w: w.raw_key("k", 9, array_of(4, 1 << 62)), "items in 'k'"),
        (lambda w: w.raw_key("k", 9, array_of(8, 1 << 62)), "items in 'k'"),
        (lambda w: w.raw_key("k", 9, array_of(9, 1 << 62)), "items in 'k'"),
        (lambda w: w.raw_key("k", 9, array_of(77, 1)), "array of the unknown type 77"),
        (lambda w: w.raw_key("k", 9, array_of(9, 1) * 50), "nested more than 4 deep"),
        (lambda w: w.raw_key("", 0, b"\0"), "key name '' is empty"),
        (lambda w: w.raw_key(b"\xff", 0, b"\0"), "is not UTF-8"),
        (lambda w: w.raw_key("a\x1b[31m", 0, b"\0"), "unprintable"),
        (lambda w: w.raw_key("k", 0, b"\0").raw_key("k", 0, b"\0"), "'k' is there twice"),
        (lambda w: w.key("general.alignment", 33), "not a power of two"),
        (lambda w: w.key("general.alignment", 0), "not a power of two"),
        (lambda w: w.key("general.alignment", "32"), "not a power of two"),
        (lambda w: w.key("general.alignment", 1 << 30), "not a power of two"),
        (lambda w: w.tensor("w", F32, [1]), "'w' is there twice"),
        (lambda w: w.tensor("", F32, [1]), "tensor name '' is empty"),
        (lambda w: w.tensor("n" * 600, F32, [1]), "longer than 512"),
        (lambda w: w.tensor("v", F32, [1] * 5), "has 5 dimensions"),
        (lambda w: w.tensor("v", Q4_0, [33]), "no whole Q4_0 blocks of 32"),
        (lambda w: w.tensor("v", Q4_0, [16, 2]), "no whole Q4_0 blocks of 32"),
        (lambda w: w.tensor("v", Q4_0, []), "no whole Q4_0 blocks of 32"),
        (lambda w: w.tensor("v", 99, [1]), "unknown type 99"),
        (lambda w: w.tensor("v", F32, [4], offset=64), "starts at byte 64 of the data, not at 32"),
        (lambda w: w.tensor("v", F32, [4], offset=0), "starts at byte 0 of the data, not at 32"),
        (lambda w: w.tensor("v", F32, [4], offset=36), "starts at byte 36 of the data, not at 32"),
        (lambda w: w.tensor("v", F32, [1 << 62, 1 << 62], offset=32), "larger than 2\\^63"),
        (lambda w: w.tensor("v", F32, [(1 << 64) - 1], offset=32), "larger than 2\\^63"),
    ],
)  # fmt: skip
def test_a_broken_header_is_an_error_that_says_where(
    change: Callable[[Writer], Writer], problem: str, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    writer = gguf_writer().key("general.architecture", "llama").tensor("w", F32, [4])
    change(writer)
    path = tmp_path / "x.gguf"
    path.write_bytes(writer.header() + bytes(400))
    with pytest.raises(InputError, match=problem) as caught:
        read_gguf(path)
    assert "read to byte" in caught.value.message
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("number", sorted(REMOVED_TYPES))
def test_removed_types_are_named(number: int, tmp_path: Path, gguf_writer: type[Writer]) -> None:
    path = gguf_writer().tensor("w", number, [256]).write(tmp_path / "x.gguf")
    with pytest.raises(InputError, match=f"of type {REMOVED_TYPES[number]}, which llama.cpp has"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (-33, "not complete"),
        (-28, ""),
        (0, ""),
        (1, "more than its header says"),
        (4096, "more than its header says"),
    ],
)
def test_the_file_ends_where_the_tensors_do_give_or_take_the_padding(
    more: int, problem: str, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    writer = gguf_writer().tensor("a", F32, [8]).tensor("b", F32, [1])
    path = writer.write(tmp_path / "x.gguf")
    os.truncate(path, path.stat().st_size + more)
    if problem:
        with pytest.raises(InputError) as caught:
            read_gguf(path)
        assert problem in caught.value.hint
    else:
        assert read_gguf(path).stored_bytes == 36


def test_other_alignments(tmp_path: Path, gguf_writer: type[Writer]) -> None:
    writer = gguf_writer().key("general.alignment", 256)
    writer.alignment = 256
    writer.tensor("a", F32, [1]).tensor("b", F32, [1])
    assert read_gguf(writer.write(tmp_path / "x.gguf")).stored_bytes == 8


def sparse(path: Path, start: bytes, size: int) -> Path:
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)
    return path


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        pytest.param(array_of(8, 50_000_000), "array items", id="strings"),
        pytest.param(array_of(9, 50_000_000), "array items", id="arrays"),
        pytest.param(array_of(10, 10_000_000_000), "largest header allowed", id="numbers"),
    ],
)
def test_a_header_as_large_as_a_model_is_refused_at_once(
    key: bytes, problem: str, tmp_path: Path, gguf_writer: type[Writer]
) -> None:
    header = gguf_writer().raw_key("k", 9, key).header()
    path = sparse(tmp_path / "x.gguf", header, 200_000_000_000)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(InputError, match=problem):
        read_gguf(path)
    assert time.process_time() - start < 2.0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_folders_pipes_and_missing_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, problem in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe.gguf", "not a regular file"),
        (tmp_path / "none.gguf", "cannot be read"),
    ):
        with pytest.raises(InputError, match=problem):
            read_gguf(path)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40).filter(
    str.isprintable
)
VALUES: st.SearchStrategy[object] = (
    st.booleans()
    | st.integers(0, 2**32 - 1)
    | st.floats(width=32, allow_nan=False)
    | st.text(max_size=20)
    | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
    | st.lists(st.text(max_size=5), min_size=1, max_size=5)
)


@settings(max_examples=150, deadline=None)
@given(
    version=st.sampled_from([1, 2, 3]),
    keys=st.dictionaries(NAMES.map("k.".__add__), VALUES, max_size=5),
    tensors=st.dictionaries(
        NAMES,
        st.tuples(st.sampled_from([F32, F16, BF16]), st.lists(st.integers(0, 5), max_size=4)),
        min_size=1,
        max_size=8,
    ),
)
def test_what_was_written_is_read_back(
    version: int,
    keys: dict[str, object],
    tensors: dict[str, tuple[int, Sequence[int]]],
    tmp_path_factory: pytest.TempPathFactory,
    gguf_writer: type[Writer],
) -> None:
    writer = gguf_writer(version)
    for key, value in keys.items():
        writer.key(key, value)
    for name, (number, widths) in tensors.items():
        writer.tensor(name, number, widths)
    checkpoint = read_gguf(writer.write(tmp_path_factory.mktemp("t") / "x.gguf"))
    assert checkpoint.metadata == {
        key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()
    }
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in checkpoint.tensors} == {
        name: (GGML_TYPES[number][0], tuple(reversed(widths))) for name, (number, widths) in tensors.items()
    }
    assert sum(checkpoint.bytes_by_dtype.values()) == checkpoint.stored_bytes
    assert sum(checkpoint.bytes_by_role.values()) == checkpoint.stored_bytes
