"""The header of a safetensors file: dtypes, bounds, and every way it can lie."""

import json
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.readers.safetensors import read_safetensors
from capplan.readers.safetensors_header import DTYPE_BITS

Tensors = list[tuple[str, str, Sequence[int]]]
Write = Callable[..., Path]


def raw_file(path: Path, header: bytes, data_bytes: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    return path


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_takes_its_bits(dtype: str, tmp_path: Path, write_safetensors: Write) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", [("w", dtype, (3, 8))])
    assert read_safetensors(path).stored_bytes == 3 * DTYPE_BITS[dtype]


@pytest.mark.parametrize(
    ("dtype", "shape", "data_bytes"),
    [("F4", [3], 2), ("F4", [3, 3], 5), ("F6_E2M3", [3], 3), ("F4", [], 1)],
)
def test_a_tensor_of_half_a_byte_is_refused_as_the_library_does(
    dtype: str, shape: list[int], data_bytes: int, tmp_path: Path
) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, data_bytes]}
    path = raw_file(tmp_path / "x.safetensors", json.dumps({"w": entry}).encode(), data_bytes)
    with pytest.raises(InputError, match="whole byte"):
        read_safetensors(path)


def test_odd_rows_of_half_bytes_are_packed_across_rows(tmp_path: Path, write_safetensors: Write) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", [("w", "F4", (2, 3))])
    assert read_safetensors(path).stored_bytes == 3


ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "data_bytes", "problem"),
    [
        pytest.param(b'{"a":' + ENTRY, 8, "not valid JSON", id="header cut off"),
        pytest.param(b"[" + ENTRY + b"]", 8, "starts with", id="list at the top"),
        pytest.param(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", 8, "'a' is there twice", id="twice"),
        pytest.param(b'{"a":' + ENTRY + b"}", 7, "describes 8 bytes", id="data cut off"),
        pytest.param(b'{"a":' + ENTRY + b"}", 9, "the file has 9", id="data too long"),
        pytest.param(b'{"a":' + ENTRY + b',"b":' + ENTRY + b"}", 8, "'b' starts at byte 0", id="overlap"),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
            12,
            "'a' starts at byte 4 of the data, not at 0",
            id="hole",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
            8,
            "takes 12 bytes",
            id="size",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,12]}}', 12, "say 12", id="too large"
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
            8,
            "data_offsets",
            id="reversed",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}',
            8,
            "data_offsets",
            id="one offset",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8.0]}}',
            8,
            "data_offsets",
            id="float",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
            8,
            "dimension -2",
            id="negative",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
            4,
            "dimension True",
            id="bool",
        ),
        pytest.param(b'{"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}}', 8, "no shape", id="no list"),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]}}',
            8,
            "at most 8 dimensions",
            id="nine dimensions",
        ),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[9223372036854775807,9223372036854775807],"data_offsets":[0,8]}}',
            8,
            "larger than 2\\^63",
            id="overflow",
        ),
        pytest.param(
            b'{"a":{"dtype":"Q4_K","shape":[2],"data_offsets":[0,8]}}',
            8,
            "unknown dtype 'Q4_K'",
            id="dtype",
        ),
        pytest.param(
            b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
            8,
            "unknown dtype",
            id="list",
        ),
        pytest.param(b'{"a":{"dtype":"F32","shape":[2]}}', 8, "exactly dtype", id="key missing"),
        pytest.param(
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}}',
            8,
            "exactly dtype",
            id="key too many",
        ),
        pytest.param(b'{"a":[]}', 8, "exactly dtype", id="no object"),
        pytest.param(b'{"":' + ENTRY + b"}", 8, "is empty", id="empty name"),
        pytest.param(b'{"' + b"a" * 513 + b'":' + ENTRY + b"}", 8, "longer than 512", id="long name"),
        pytest.param(b'{"a\\u001b[2J":' + ENTRY + b"}", 8, "unprintable", id="terminal escape"),
        pytest.param(b'{"a\\ud800":' + ENTRY + b"}", 8, "unprintable", id="lone surrogate"),
        pytest.param(b'{"__metadata__":{"a":1}}', 0, "__metadata__", id="metadata of numbers"),
        pytest.param(b'{"__metadata__":{"a":"\\udc00"}}', 0, "__metadata__", id="metadata surrogate"),
        pytest.param(b'{"a":NaN}', 0, "NaN is no JSON", id="NaN"),
        pytest.param(b'{"a":\xff}', 0, "not valid JSON", id="not UTF-8"),
        pytest.param(b'{"a":' + b"[" * 100_000, 0, "nested too deeply", id="nesting"),
        pytest.param(b'{"a":' + b"9" * 5000 + b"}", 0, "not valid JSON", id="a very long number"),
        pytest.param(b"{}", 0, "holds no tensors", id="empty"),
    ],
)
def test_a_broken_header_is_an_error_that_says_where(
    header: bytes, data_bytes: int, problem: str, tmp_path: Path
) -> None:
    path = raw_file(tmp_path / "x.safetensors", header, data_bytes)
    with pytest.raises(InputError, match=problem) as caught:
        read_safetensors(path)
    assert str(path) in caught.value.where
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "ends after 0 bytes"),
        (b"\x02\0\0\0\0\0\0", "ends after 7 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "claims 1,152,921,504,606,846,976 bytes"),
        (struct.pack("<Q", 100_000_001) + b"{}", "at most 100,000,000"),
        (struct.pack("<Q", 3) + b"{}", "the file has 2 more"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"GGUF\x03\0\0\0" + bytes(40), "GGUF file"),
        (struct.pack("<Q", 4) + b" {} ", "starts with b' '"),
    ],
)
def test_a_file_that_is_no_safetensors(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=problem):
        read_safetensors(path)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b'{"a":[' + b"[]," * 5_000_000 + b"1]}", id="five million lists"),
        pytest.param(b'{"a":[' + b"1," * 9_000_000 + b"1]}", id="nine million numbers"),
    ],
)
def test_a_header_cannot_blow_up_in_memory(header: bytes, tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", header)
    tracemalloc.start()
    with pytest.raises(InputError, match="more than 1,000,000 tensors"):
        read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * len(header)


def test_a_hundred_megabytes_of_zeros_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 99_000_000))
        stream.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(InputError, match="no JSON object"):
        read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40).filter(
    lambda name: name.isprintable() and name != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=6)


@settings(max_examples=150, deadline=None)
@given(
    tensors=st.dictionaries(
        NAMES, st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), min_size=1, max_size=8
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_what_was_written_is_read_back(
    tensors: dict[str, tuple[str, list[int]]],
    metadata: dict[str, str] | None,
    tmp_path_factory: pytest.TempPathFactory,
    write_safetensors: Write,
) -> None:
    # Sub-byte tensors must end at a whole byte: give those a dimension of 8.
    written: Tensors = [
        (name, dtype, (*shape, 8) if DTYPE_BITS[dtype] < 8 else tuple(shape))
        for name, (dtype, shape) in tensors.items()
    ]
    path = write_safetensors(tmp_path_factory.mktemp("t") / "x.safetensors", written, metadata)
    checkpoint = read_safetensors(path)
    assert sorted((t.name, t.dtype, t.shape) for t in checkpoint.tensors) == sorted(written)
    assert checkpoint.metadata == (metadata or {})
    assert checkpoint.file_bytes == path.stat().st_size
    assert 0 <= checkpoint.stored_bytes < path.stat().st_size
    assert sum(checkpoint.bytes_by_dtype.values()) == checkpoint.stored_bytes
    assert sum(checkpoint.bytes_by_role.values()) == checkpoint.stored_bytes


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        JSON_VALUES
        | st.fixed_dictionaries(
            {
                "dtype": JSON_VALUES | st.just("F32"),
                "shape": JSON_VALUES,
                "data_offsets": JSON_VALUES,
            }
        ),
    )
)
def test_any_json_is_read_or_refused(
    header: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = raw_file(tmp_path_factory.mktemp("t") / "x.safetensors", json.dumps(header).encode(), 8)
    try:
        checkpoint = read_safetensors(path)
    except InputError as error:
        assert len(str(error).splitlines()) == 3
    else:
        assert checkpoint.stored_bytes == 8
