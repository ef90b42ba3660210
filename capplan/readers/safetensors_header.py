"""The header of one safetensors file: every claim checked against the others and the file's size.

A file is 8 bytes of header length (little endian), a JSON object {name: {dtype, shape,
data_offsets}} and the data, which is never read. The rules are those of the safetensors library (no
holes, no overlaps, no duplicate names, whole bytes per tensor), with bounds on everything that
costs time or memory.

Source: the safetensors README ("Format") and library 0.8.0; dtypes are the ones it knows.
"""

import json
import struct
from operator import itemgetter
from pathlib import Path
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.checkpoint import opened
from capplan.readers.stored_tensor import (
    MAX_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    StoredTensor,
    name_problem,
)

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
_KEYS: Final = frozenset(("dtype", "shape", "data_offsets"))
MAX_DIMENSIONS: Final = 8
# An entry has three brackets and about six commas; far more than that only serves to fill memory.
_MAX_BRACKETS: Final = 4 * MAX_TENSORS
_MAX_COMMAS: Final = 8 * MAX_TENSORS
BROKEN: Final = "download the file again, or export the checkpoint again"


def read_file(path: Path, shard: str) -> tuple[list[StoredTensor], dict[str, str], int]:
    """Tensors in file order, __metadata__ and size in bytes of one file."""
    where = str(path)
    with opened(path) as (stream, size):
        start = stream.read(9)
        if len(start) < 9:
            raise InputError(f"ends after {size} bytes", where=where, hint=BROKEN)
        (length,) = struct.unpack("<Q", start[:8])
        problem = _start_problem(start, length, size)
        if problem:
            raise InputError(f"header at byte 0: {problem}", where=where, hint=BROKEN)
        stream.seek(8)
        raw = stream.read(length)
    header = parse_object(raw, where)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        is_text(key) and is_text(value) for key, value in metadata.items()
    ):
        raise InputError("__metadata__ maps no strings to strings", where=where, hint=BROKEN)
    if len(header) > MAX_TENSORS:
        raise InputError(f"has {len(header):,} tensors", where=where, hint=BROKEN)
    placed = [_entry(name, info, shard, where) for name, info in header.items()]
    placed.sort(key=itemgetter(0, 1))
    end = 0
    for begin, stop, tensor in placed:
        if begin != end:
            raise _invalid(tensor.name, f"starts at byte {begin:,} of the data, not at {end:,}", where)
        end = stop
    if end != size - 8 - length:
        raise InputError(
            f"the header describes {end:,} bytes of data, the file has {size - 8 - length:,}",
            where=where,
            hint="the download is not complete"
            if end > size - 8 - length
            else "the file holds more than its header says: " + BROKEN,
        )
    return [tensor for _, _, tensor in placed], metadata, size


def _start_problem(start: bytes, length: int, size: int) -> str | None:
    if start.startswith(b"version "):
        return "this is a Git LFS pointer, not the weights (git lfs pull fetches them)"
    if start.startswith(b"GGUF"):
        return "this is a GGUF file under a .safetensors name"
    if length > MAX_HEADER_BYTES:
        return f"claims {length:,} bytes; at most {MAX_HEADER_BYTES:,} are allowed"
    if length > size - 8:
        return f"claims {length:,} bytes, the file has {size - 8:,} more"
    if start[8:] != b"{":
        return f"is no JSON object, it starts with {start[8:]!r}"
    return None


def _entry(name: str, info: object, shard: str, where: str) -> tuple[int, int, StoredTensor]:
    """One tensor of a header with its place in the data, checked by itself."""
    problem = name_problem(name)
    if problem:
        raise InputError(f"tensor name {shown(name)} {problem}", where=where, hint=BROKEN)
    if not isinstance(info, dict) or info.keys() != _KEYS:
        raise _invalid(name, "does not have exactly dtype, shape and data_offsets", where)
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _invalid(name, f"has the unknown dtype {shown(dtype)}", where)
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(name, f"has no shape of at most {MAX_DIMENSIONS} dimensions", where)
    elements = 1
    for width in shape:
        # bool is an int to isinstance, not here
        if type(width) is not int or not 0 <= width <= MAX_ELEMENTS:
            raise _invalid(name, f"has the dimension {shown(width)}", where)
        elements *= width
    if elements * bits > 8 * MAX_ELEMENTS:
        raise _invalid(name, f"of shape {shown(shape)} is larger than 2^63 bytes", where)
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or type(offsets[0]) is not int
        or type(offsets[1]) is not int
        or not 0 <= offsets[0] <= offsets[1] <= MAX_ELEMENTS
    ):
        raise _invalid(name, f"has the data_offsets {shown(offsets)}", where)
    size, rest = divmod(elements * bits, 8)
    if rest:
        raise _invalid(name, f"{dtype} {shape} does not end at a whole byte", where)
    if offsets[1] - offsets[0] != size:
        raise _invalid(
            name,
            f"{dtype} {shape} takes {size:,} bytes, its data_offsets {offsets} say "
            f"{offsets[1] - offsets[0]:,}",
            where,
        )
    tensor = StoredTensor(name=name, dtype=dtype, shape=tuple(shape), stored_bytes=size, shard=shard)
    return offsets[0], offsets[1], tensor


def parse_object(raw: bytes, where: str) -> dict[str, object]:
    """A JSON object of bounded size and without duplicate keys."""
    if raw.count(b"{") + raw.count(b"[") > _MAX_BRACKETS or raw.count(b",") > _MAX_COMMAS:
        raise InputError(f"describes more than {MAX_TENSORS:,} tensors", where=where, hint=BROKEN)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise InputError("JSON nested too deeply", where=where, hint=BROKEN) from error
    except ValueError as error:  # not UTF-8, not JSON, a number of thousands of digits
        raise InputError(f"not valid JSON: {error}", where=where, hint=BROKEN) from error
    if not isinstance(value, dict):
        raise InputError("is no JSON object", where=where, hint=BROKEN)
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is there twice")
            seen.add(key)
    return made


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON value")


def is_text(value: object) -> bool:
    """A string without lone surrogates, which no output could encode."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _invalid(name: str, problem: str, where: str) -> InputError:
    return InputError(f"tensor {shown(name)} {problem}", where=where, hint=BROKEN)
