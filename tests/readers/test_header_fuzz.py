"""Seeded mutation of valid checkpoints: whatever the bytes, an answer or an InputError, soon.

2,000 inputs run always, 100,000 with `-m slow`. A failure names its seed: `mutant(seed)` makes the
input again.
"""

import json
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capplan.errors import InputError
from capplan.readers.checkpoint import Checkpoint
from capplan.readers.gguf import gguf_architecture, read_gguf
from capplan.readers.safetensors import INDEX_NAME, read_safetensors

Writer = Any  # conftest.GgufWriter; test modules cannot import from conftest
INTERESTING = [
    *(0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 127, 128, 255, 256, 511, 512, 513, 4096, 4097, 65535, 65536),
    *((1 << bits) + step for bits in (16, 24, 31, 32, 53, 62, 63, 64) for step in (-1, 0, 1)),
    *(1_000_000, 1_000_001, 100_000_000, 100_000_001, 10**18, 10**30),
]
TOKENS = [
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"weight_map"', b'"metadata"'),
    *(
        b'"BF16"',
        b'"F4"',
        b'"I32"',
        b'"U8"',
        b'"F8_E8M0"',
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b'"',
    ),
    *(
        b"null",
        b"true",
        b"-1",
        b"1e3",
        b"NaN",
        b"[]",
        b"{}",
        b"\\u0000",
        b"\\ud800",
        b"\xff",
        b"\0",
    ),
    *(
        b"../",
        b"/",
        b".safetensors",
        INDEX_NAME.encode(),
        b"GGUF",
        b".qweight",
        b".scales",
        b".enorm",
    ),
    *(b"general.alignment", b"split.count", b"split.no", b"llama."),
]


class Fuzz:
    """Seeds of one format, and the reader that must survive their mutants."""

    def __init__(
        self,
        seeds: list[dict[str, bytes]],
        target: str,
        read: Callable[[Path], Checkpoint],
        folder: Path,
    ) -> None:
        self.seeds = seeds
        self.target = target
        self.read = read
        self.folder = folder
        self.on_disk: dict[str, bytes] = {}
        self.accepted = self.refused = 0

    def mutant(self, seed: int) -> dict[str, bytes]:
        """A set of files, one of them changed a few times."""
        chance = random.Random(seed)
        files = dict(chance.choice(self.seeds))
        name = chance.choice(sorted(files))
        raw = bytearray(files[name])
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            change(raw, chance)
        # Half the time the length is put right again, so that the change is reached.
        if name.endswith(".safetensors") and len(raw) > 8 and chance.random() < 0.5:
            end = raw.rfind(b"}") + 1
            raw[:8] = struct.pack("<Q", max(end - 8, 0))
        files[name] = bytes(raw)
        return files

    def write(self, files: dict[str, bytes]) -> None:
        """Bring the folder to these files, writing only what differs."""
        for name, raw in files.items():
            if self.on_disk.get(name) != raw:
                (self.folder / name).write_bytes(raw)
                self.on_disk[name] = raw

    def run(self, seed: int) -> None:
        """Read one mutant and use all of what was read."""
        files = self.mutant(seed)
        self.write(files)
        size = sum(map(len, files.values()))
        start = time.process_time()
        try:
            checkpoint = self.read(self.folder / self.target)
            self.check(checkpoint, size)
            self.accepted += 1
        except InputError as error:
            assert len(str(error).splitlines()) == 3, seed
            assert str(error).replace("\n", "").isprintable(), seed
            assert len(str(error)) < 2000, seed
            self.refused += 1
        except Exception as error:
            raise AssertionError(f"mutant({seed}) escapes with {error!r}") from error
        assert time.process_time() - start < 1.0, f"mutant({seed}) takes too long"

    def check(self, checkpoint: Checkpoint, size: int) -> None:
        assert 0 <= checkpoint.stored_bytes <= size
        assert checkpoint.file_bytes is not None
        assert checkpoint.file_bytes <= size
        assert sum(checkpoint.bytes_by_dtype.values()) == checkpoint.stored_bytes
        assert sum(checkpoint.bytes_by_role.values()) == checkpoint.stored_bytes
        if checkpoint.format == "gguf":
            gguf_architecture(checkpoint)
        # At most four weights in a byte (BitNet), and none is negative.
        assert 0 <= checkpoint.parameters <= 8 * size + 8 * 64


def change(raw: bytearray, chance: random.Random) -> None:
    """One change in place, of the kinds that broke readers of binary formats before."""
    at = chance.randrange(len(raw) + 1)
    kind = chance.randrange(9)
    if kind == 0 and raw:
        raw[at % len(raw)] ^= 1 << chance.randrange(8)
    elif kind == 1 and raw:
        raw[at % len(raw)] = chance.randrange(256)
    elif kind == 2:
        raw[at : at + chance.choice((1, 2, 4, 8))] = b""
    elif kind == 3:
        raw[at:at] = chance.randbytes(chance.choice((1, 2, 4, 8, 32)))
    elif kind == 4:
        del raw[at:]
    elif kind == 5:
        width, layout = chance.choice(((4, "<I"), (8, "<Q"), (8, ">Q")))
        value = chance.choice(INTERESTING) % (1 << (8 * width))
        raw[at : at + width] = struct.pack(layout, value)
    elif kind == 6:
        length = chance.choice((1, 4, 8, 40, 200))
        raw[at:at] = raw[chance.randrange(len(raw) + 1) :][:length]
    elif kind == 7:
        raw[at:at] = chance.choice(TOKENS)
    else:
        # A number of the JSON, or any run of digits in a name.
        digits = [place for place in range(len(raw)) if 48 <= raw[place] <= 57]
        if digits:
            begin = end = chance.choice(digits)
            while end < len(raw) and 48 <= raw[end] <= 57:
                end += 1
            raw[begin:end] = str(chance.choice(INTERESTING)).encode()


def safetensors_seeds(header_of: Callable[..., tuple[bytes, int]]) -> list[dict[str, bytes]]:
    def file(*tensors: tuple[str, str, tuple[int, ...]], **metadata: str) -> bytes:
        header, data = header_of(tensors, metadata or None)
        return header + bytes(data)

    plain = file(
        ("model.embed_tokens.weight", "BF16", (8, 4)),
        ("model.layers.0.mlp.gate.weight", "F32", (2, 4)),
        ("model.layers.1.enorm.weight", "BF16", (4,)),
        ("model.layers.1.self_attn.q_proj.weight", "F8_E4M3", (4, 4)),
        ("model.layers.1.self_attn.q_proj.weight_scale_inv", "F32", (1, 1)),
        format="pt",
    )
    packed = file(
        ("a.qweight", "I32", (16, 2)),
        ("a.qzeros", "I32", (1, 2)),
        ("a.scales", "F16", (1, 16)),
        ("b.qweight", "I32", (2, 16)),
        ("b.scales", "F16", (1, 16)),
        ("b.g_idx", "I32", (16,)),
        ("c.weight", "U8", (4, 8)),
        ("c.weight_scale", "F8_E4M3", (4, 1)),
        ("d.down_proj_blocks", "U8", (1, 2, 1, 16)),
        ("d.down_proj_scales", "U8", (1, 2, 1)),
        ("e.weight", "U8", (32, 1)),
        ("e.weight.absmax", "F32", (1,)),
        ("f.weight", "F4", (3, 8)),
    )
    index = {
        "metadata": {"total_size": 16},
        "weight_map": {"a": "one.safetensors", "b": "two.safetensors"},
    }
    one, two = file(("a", "F32", (2,))), file(("b", "F32", (2,)))
    sharded = {
        INDEX_NAME: json.dumps(index).encode(),
        "one.safetensors": one,
        "two.safetensors": two,
    }
    # All seeds are whole folders with the same files, so that none leaves something for the next.
    rest = {name: sharded[name] for name in ("one.safetensors", "two.safetensors")}
    single = {"weight_map": {"a": "one.safetensors"}}
    return [
        sharded,
        *(
            {**rest, "one.safetensors": content, INDEX_NAME: index_for(content)}
            for content in (plain, packed)
        ),
        {**rest, INDEX_NAME: json.dumps(single).encode()},
    ]


def index_for(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    names = json.loads(content[8 : 8 + length])
    names.pop("__metadata__", None)
    return json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")}).encode()


def gguf_seeds(writer_of: type[Writer]) -> list[dict[str, bytes]]:
    def file(writer: Writer) -> bytes:
        header: bytes = writer.header()
        padding = -len(header) % writer.alignment
        return header + bytes(padding + writer.end)

    made = []
    for version in (1, 2, 3):
        writer = writer_of(version)
        writer.key("general.architecture", "llama").key("llama.block_count", 2)
        writer.key("llama.rope.freq_base", 1e4).key("llama.heads", [1, 2, 3])
        writer.key("tokenizer.ggml.tokens", ["<s>", "a", "bc"]).key("flag", True)
        inner = struct.pack("<I", 4) + struct.pack(writer.length, 1) + struct.pack("<I", 5)
        writer.raw_key("nested", 9, struct.pack("<I", 9) + struct.pack(writer.length, 1) + inner)
        writer.tensor("token_embd.weight", 8, [32, 3]).tensor("blk.0.attn_q.weight", 12, [256, 2])
        writer.tensor("output_norm.weight", 0, [32])
        made.append(writer)
    aligned = writer_of()
    aligned.alignment = 64
    aligned.key("general.alignment", 64).tensor("w", 1, [3]).tensor("v", 30, [5, 2])
    parts = []
    for number in range(2):
        part = writer_of().raw_key("split.no", 2, struct.pack("<H", number))
        part.raw_key("split.count", 2, struct.pack("<H", 2)).key("split.tensors.count", 2)
        parts.append(part.tensor(f"blk.{number}.ffn_up.weight", 2, [32]))
    first, second = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
    split = {first: file(parts[0]), second: file(parts[1])}
    # The others carry the keys of a set of two as well, so that all go by one name.
    for writer in (*made, aligned):
        writer.raw_key("split.no", 2, struct.pack("<H", 0))
        writer.raw_key("split.count", 2, struct.pack("<H", 2))
    return [split, *({**split, first: file(writer)} for writer in (*made, aligned))]


@pytest.fixture
def fuzzers(
    tmp_path: Path, safetensors_header: Callable[..., tuple[bytes, int]], gguf_writer: type[Writer]
) -> list[Fuzz]:
    for name in ("s", "g"):
        (tmp_path / name).mkdir()
    return [
        Fuzz(safetensors_seeds(safetensors_header), INDEX_NAME, read_safetensors, tmp_path / "s"),
        Fuzz(gguf_seeds(gguf_writer), "m-00001-of-00002.gguf", read_gguf, tmp_path / "g"),
    ]


def fuzz(fuzzers: list[Fuzz], inputs: int) -> None:
    for fuzzer in fuzzers:
        for seed in fuzzer.seeds:
            fuzzer.write(seed)
            assert fuzzer.read(fuzzer.folder / fuzzer.target).stored_bytes > 0  # the seeds are valid
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(inputs):
        fuzzers[number % 2].run(number)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, f"{grown} KiB more memory than before"
    for fuzzer in fuzzers:
        # A fuzz that is only ever refused, or never, tests nothing.
        assert fuzzer.accepted > inputs // 100
        assert fuzzer.refused > inputs // 10


def test_2000_mutants(fuzzers: list[Fuzz]) -> None:
    fuzz(fuzzers, 2_000)


@pytest.mark.slow
def test_100_000_mutants(fuzzers: list[Fuzz]) -> None:
    fuzz(fuzzers, 100_000)
