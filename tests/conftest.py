"""Writers of tiny (or sparse) checkpoint files, kept apart from the readers they test."""

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

SAFETENSORS_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


def _safetensors_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, int]:
    """Length prefix and header of `tensors` laid out in order, and the bytes of data to follow."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        bits = SAFETENSORS_BITS[dtype]
        for width in shape:
            bits *= width
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + bits // 8],
        }
        end += bits // 8
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw, end


def _write_safetensors(
    path: Path,
    tensors: Sequence[tuple[str, str, Sequence[int]]],
    metadata: dict[str, str] | None = None,
) -> Path:
    """A file of the true size whose data was never written: 16 GB of it take no disk."""
    header, data_bytes = _safetensors_header(tensors, metadata)
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + data_bytes)
    return path


class GgufWriter:
    """Builds GGUF bytes field by field; `values` and `tensors` may lie."""

    BLOCKS: ClassVar[dict[int, tuple[int, int]]] = {
        0: (1, 4),
        1: (1, 2),
        2: (32, 18),
        8: (32, 34),
        12: (256, 144),
        14: (256, 210),
        30: (1, 2),
    }

    def __init__(self, version: int = 3) -> None:
        self.version = version
        self.length = "<I" if version == 1 else "<Q"
        self.keys: list[bytes] = []
        self.records: list[bytes] = []
        self.end = 0
        self.alignment = 32
        self.data_bytes = 0
        self.blocks = dict(self.BLOCKS)

    def text(self, value: str | bytes) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return struct.pack(self.length, len(raw)) + raw

    def raw_key(self, key: str | bytes, type_number: int, payload: bytes) -> "GgufWriter":
        self.keys.append(self.text(key) + struct.pack("<I", type_number) + payload)
        return self

    def key(self, key: str, value: object) -> "GgufWriter":
        if isinstance(value, bool):
            return self.raw_key(key, 7, struct.pack("<B", value))
        if isinstance(value, int):
            return self.raw_key(key, 4, struct.pack("<I", value))
        if isinstance(value, float):
            return self.raw_key(key, 6, struct.pack("<f", value))
        if isinstance(value, str):
            return self.raw_key(key, 8, self.text(value))
        assert isinstance(value, list)
        if value and isinstance(value[0], str):
            items, number = b"".join(map(self.text, value)), 8
        else:
            items, number = struct.pack(f"<{len(value)}i", *value), 5
        return self.raw_key(key, 9, struct.pack("<I", number) + struct.pack(self.length, len(value)) + items)

    def tensor(
        self, name: str | bytes, type_number: int, widths: Sequence[int], offset: int | None = None
    ) -> "GgufWriter":
        """`widths` in GGUF's order, the row length first."""
        record = self.text(name) + struct.pack("<I", len(widths))
        record += b"".join(struct.pack(self.length, width) for width in widths)
        place = self.end if offset is None else offset
        self.records.append(record + struct.pack("<IQ", type_number, place))
        block, block_bytes = self.blocks.get(type_number, (1, 0))
        elements = 1
        for width in widths:
            elements *= width
        self.data_bytes = place + elements // block * block_bytes
        self.end = -(-self.data_bytes // self.alignment) * self.alignment
        return self

    def header(self, tensor_count: int | None = None, key_count: int | None = None) -> bytes:
        counts = (
            len(self.records) if tensor_count is None else tensor_count,
            len(self.keys) if key_count is None else key_count,
        )
        start = b"GGUF" + struct.pack("<I", self.version)
        start += b"".join(struct.pack(self.length, count) for count in counts)
        return start + b"".join(self.keys) + b"".join(self.records)

    def write(self, path: Path, **counts: int) -> Path:
        """The file in its true size, sparse."""
        header = self.header(**counts)
        start = -(-len(header) // self.alignment) * self.alignment
        with path.open("wb") as stream:
            stream.write(header)
            if self.records:
                stream.truncate(start + self.end)
        return path


@pytest.fixture(scope="session")
def write_safetensors() -> Callable[..., Path]:
    return _write_safetensors


@pytest.fixture(scope="session")
def safetensors_header() -> Callable[..., tuple[bytes, int]]:
    return _safetensors_header


@pytest.fixture(scope="session")
def gguf_writer() -> type[GgufWriter]:
    return GgufWriter


def _llama_8b_linears() -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers of one Llama-3-8B layer."""
    return {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
    }


def _llama_8b(
    linear: Callable[[str, int, int], list[tuple[str, str, Sequence[int]]]] | None = None,
) -> list[tuple[str, str, Sequence[int]]]:
    """Tensors of Llama-3-8B as published; `linear` (path, out, in) replaces the linear layers'."""
    made: list[tuple[str, str, Sequence[int]]] = [("model.embed_tokens.weight", "BF16", (128256, 4096))]
    for layer in range(32):
        prefix = f"model.layers.{layer}."
        made.append((prefix + "input_layernorm.weight", "BF16", (4096,)))
        made.append((prefix + "post_attention_layernorm.weight", "BF16", (4096,)))
        for path, (out, width) in _llama_8b_linears().items():
            if linear is None:
                made.append((f"{prefix}{path}.weight", "BF16", (out, width)))
            else:
                made += linear(prefix + path, out, width)
    made.append(("model.norm.weight", "BF16", (4096,)))
    made.append(("lm_head.weight", "BF16", (128256, 4096)))
    return made


@pytest.fixture(scope="session")
def llama_8b() -> Callable[..., list[tuple[str, str, Sequence[int]]]]:
    return _llama_8b
