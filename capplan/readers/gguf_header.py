"""The header of one GGUF file, versions 1 to 3, little endian.

A file is magic, version, counts, typed key-value pairs, one record a tensor (name, dimensions,
type, offset) and the data, which is never read. Every length and count is checked against what is
left of the file before anything is allocated for it; arrays longer than MAX_KEPT_ITEMS (tokenizers
have 260,000 strings) are walked but not kept.

Source: ggml/docs/gguf.md.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final, NoReturn

from capplan.errors import InputError, shown
from capplan.readers.ggml_types import GGML_TYPES, REMOVED_TYPES
from capplan.readers.stored_tensor import (
    MAX_ELEMENTS,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    StoredTensor,
    name_problem,
)

MAX_DIMENSIONS: Final = 4
MAX_KEYS: Final = 65_536
MAX_KEPT_ITEMS: Final = 4096
MAX_STRING_BYTES: Final = 1 << 24
MAX_ARRAY_ITEMS: Final = 1 << 22
"""Array items that are kept, or walked one by one, in a file: seconds of work at most."""
MAX_NESTING: Final = 4
_SCALARS: Final[Mapping[int, tuple[str, str]]] = {
    0: ("u8", "<B"),
    1: ("i8", "<b"),
    2: ("u16", "<H"),
    3: ("i16", "<h"),
    4: ("u32", "<I"),
    5: ("i32", "<i"),
    6: ("f32", "<f"),
    7: ("bool", "<B"),
    10: ("u64", "<Q"),
    11: ("i64", "<q"),
    12: ("f64", "<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_OLD_MAGICS: Final = (b"lmgg", b"fmgg", b"tjgg")
BROKEN: Final = "download the file again, or convert the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """An array of the metadata that was too long to keep: its item type and length."""

    item_type: str
    length: int


class GgufHeader:
    """Reads a GGUF header forward, in pieces; no length is believed before it is checked."""

    def __init__(self, stream: BinaryIO, size: int, where: str) -> None:
        self.size = size
        self._stream = stream
        self._where = where
        self._limit = min(size, MAX_HEADER_BYTES)
        self._piece = b""
        self._piece_start = 0
        self._at = 0
        self._items = 0
        self._length = struct.Struct("<Q")

    @property
    def offset(self) -> int:
        """Bytes of the file read so far."""
        return self._piece_start + self._at

    def fail(self, problem: str, hint: str = BROKEN) -> NoReturn:
        """Raise an InputError about the place reached."""
        raise InputError(f"{problem} (read to byte {self.offset:,})", where=self._where, hint=hint)

    def start(self) -> tuple[int, int]:
        """Read magic, version and the counts of tensors and keys."""
        magic = self._take(4, "magic")
        if magic != b"GGUF":
            if magic in _OLD_MAGICS:
                self.fail("is a GGML file from before GGUF", "convert the model to GGUF")
            if magic == b"vers":
                self.fail("is a Git LFS pointer, not the weights", "fetch it with git lfs pull")
            self.fail(f"does not start with GGUF but {magic!r}", "give a .gguf file")
        version = self._scalar("<I", "version")
        if version & 0xFFFF == 0 and version:
            self.fail("is a big-endian GGUF", "convert the model for a little-endian machine")
        if version not in (1, 2, 3):
            self.fail(f"is GGUF version {version}; 1, 2 and 3 are understood")
        if version == 1:
            self._length = struct.Struct("<I")
        width = self._length.size
        # The shortest record has an empty name and no dimensions, the shortest pair a byte.
        tensors = self._count("tensors", MAX_TENSORS, width + 4 + 4 + 8)
        return tensors, self._count("keys", MAX_KEYS, width + 4 + 1)

    def name(self, what: str) -> str:
        """A key's or tensor's name."""
        raw = self._string(what + " name")
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what} name {shown(raw)} is not UTF-8")
        problem = name_problem(name)
        if problem:
            self.fail(f"{what} name {shown(name)} {problem}")
        return name

    def value(self, key: str) -> object:
        """The typed value of `key`; a long array as GgufArray."""
        return self._typed(self._scalar("<I", key), key, 0)

    def tensor(self, shard: str) -> tuple[int, StoredTensor]:
        """One tensor record: offset in the data, and the tensor."""
        name = self.name("tensor")
        dimensions = self._scalar("<I", name)
        if dimensions > MAX_DIMENSIONS:
            self.fail(f"tensor {shown(name)} has {dimensions} dimensions, GGUF allows 4")
        widths = [self._scalar(self._length.format, name) for _ in range(dimensions)]
        number = self._scalar("<I", name)
        offset = self._scalar("<Q", name)
        if number not in GGML_TYPES:
            if number in REMOVED_TYPES:
                self.fail(
                    f"tensor {shown(name)} is of type {REMOVED_TYPES[number]}, which llama.cpp has removed",
                    "quantize the model again (Q4_0 and IQ4_NL are now repacked when loaded)",
                )
            self.fail(
                f"tensor {shown(name)} is of the unknown type {number}",
                "a type newer than this program, or a broken file",
            )
        dtype, block, block_bytes = GGML_TYPES[number]
        elements = math.prod(widths)
        if max(widths, default=0) > MAX_ELEMENTS or elements > MAX_ELEMENTS // block_bytes:
            self.fail(f"tensor {shown(name)} of shape {shown(widths)} is larger than 2^63 bytes")
        if (widths[0] if widths else 1) % block:
            self.fail(
                f"tensor {shown(name)}: rows of {widths[0] if widths else 1} are no whole {dtype} "
                f"blocks of {block}"
            )
        return offset, StoredTensor(
            name=name,
            dtype=dtype,
            shape=tuple(reversed(widths)),
            stored_bytes=elements // block * block_bytes,
            shard=shard,
        )

    def _typed(self, number: int, key: str, depth: int) -> object:
        if number == _STRING:
            # Replacing keeps a value that is only ever shown printable.
            return self._string(key).decode(errors="replace")
        if number == _ARRAY:
            return self._array(key, depth + 1)
        if number not in _SCALARS:
            self.fail(f"key {shown(key)} is of the unknown type {number}")
        name, layout = _SCALARS[number]
        value = struct.unpack(layout, self._take(struct.calcsize(layout), key))[0]
        if name != "bool":
            return value
        if value > 1:
            self.fail(f"key {shown(key)}: {value} is no bool")
        return bool(value)

    def _array(self, key: str, depth: int) -> object:
        if depth > MAX_NESTING:
            self.fail(f"key {shown(key)}: arrays nested more than {MAX_NESTING} deep")
        number = self._scalar("<I", key)
        known = _SCALARS.get(number)
        if known is not None:
            name, layout = known
            width = struct.calcsize(layout)
        elif number in (_STRING, _ARRAY):
            name, width = ("str", self._length.size) if number == _STRING else ("array", 4 + 4)
        else:
            self.fail(f"key {shown(key)} is an array of the unknown type {number}")
        length = self._count(f"items in {shown(key)}", MAX_ELEMENTS, width)
        kept = length <= MAX_KEPT_ITEMS
        if kept or known is None:
            # Walking an array costs about eight strings; no known file nests them.
            self._items += length * (8 if number == _ARRAY else 1)
            if self._items > MAX_ARRAY_ITEMS:
                self.fail(f"key {shown(key)}: more than {MAX_ARRAY_ITEMS:,} array items to read")
        if kept:
            return tuple(self._typed(number, key, depth) for _ in range(length))
        if known is not None:
            self._skip(length * width, key)
        elif number == _STRING:
            self._skip_strings(length, key)
        else:
            for _ in range(length):
                self._array(key, depth + 1)
        return GgufArray(item_type=name, length=length)

    def _count(self, what: str, highest: int, item_bytes: int) -> int:
        """A count of things of at least `item_bytes` each, of which the file must have room for."""
        count = self._scalar(self._length.format, what)
        if count > highest or count * item_bytes > self.size - self.offset:
            self.fail(f"claims {count:,} {what}; the file is too small or the limit {highest:,}")
        return count

    def _string(self, what: str) -> bytes:
        length = self._scalar(self._length.format, what)
        if length > MAX_STRING_BYTES:
            self.fail(f"{what}: a string of {length:,} bytes, {MAX_STRING_BYTES:,} are allowed")
        return self._take(length, what)

    def _skip_strings(self, count: int, key: str) -> None:
        """Walk over strings; the loop is the one hot place of the reader."""
        width, unpack = self._length.size, self._length.unpack_from
        while count:
            piece, at = self._piece, self._at
            last = len(piece) - width
            while count and at <= last:
                after = at + width + unpack(piece, at)[0]
                if after > len(piece):
                    break
                at = after
                count -= 1
            self._at = at
            if count:  # one that reaches beyond the piece
                self._string(key)
                count -= 1

    def _scalar(self, layout: str, what: str) -> int:
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout), what))[0]
        return value

    def _skip(self, count: int, what: str) -> None:
        """Move forward without reading."""
        self._check_room(count, what)
        target = self.offset + count
        self._piece, self._piece_start, self._at = b"", target, 0
        self._stream.seek(target)

    def _take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        at = self._at
        if at + count > len(self._piece):
            self._check_room(count, what)
            rest = self._piece[at:]
            more = self._stream.read(max(count, 1 << 16) - len(rest))
            self._piece_start += at
            self._piece, self._at, at = rest + more, 0, 0
            if count > len(self._piece):
                self.fail(f"{what}: the file ends early", "the download is not complete")
        self._at = at + count
        return self._piece[at : self._at]

    def _check_room(self, count: int, what: str) -> None:
        if self.offset + count > self._limit:
            self.fail(
                f"{what}: needs {count:,} bytes, {self._limit - self.offset:,} are left"
                + (" of the largest header allowed" if self._limit < self.size else ""),
                "the download is not complete, or the header is broken",
            )
