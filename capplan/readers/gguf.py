"""GGUF checkpoints by their headers: one file or a split set, and what it says of the model.

The header itself is gguf_header.py's; here the tensors' places are checked against each other and
the file.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.checkpoint import Checkpoint, opened
from capplan.readers.gguf_header import BROKEN, GgufArray, GgufHeader
from capplan.readers.stored_tensor import MAX_FILES, MAX_TENSORS, StoredTensor

_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(path: Path) -> Checkpoint:
    """Read the header of a .gguf file, or of all files of a split set by its first.

    Errors: InputError naming file, tensor or key, and offset, for anything missing, broken or
    contradictory, for big-endian files, and for types that llama.cpp has removed.
    """
    metadata, tensors, size = _read_file(path)
    match = _SPLIT.fullmatch(path.name)
    total = metadata.get("split.count", 1)
    if type(total) is not int or total < 1:
        raise InputError(f"split.count is {shown(total)}", where=str(path), hint=BROKEN)
    named = int(match[3]) if match else 1
    if total != named:
        raise InputError(
            f"split.count is {total}, the file's name says {named}",
            where=str(path),
            hint="keep the names gguf-split gave: NAME-00001-of-00004.gguf",
        )
    if match is not None:
        if match[2] != "00001":
            raise InputError(
                f"is part {int(match[2])} of {total}",
                where=str(path),
                hint=f"give the first: {match[1]}-00001-of-{match[3]}.gguf",
            )
        size += _read_parts(path, match[1], total, metadata, tensors)
    if not tensors:
        raise InputError("holds no tensors", where=str(path), hint="a vocabulary-only GGUF has no weights")
    return Checkpoint(
        path=path,
        format="gguf",
        tensors=tuple(tensors),
        metadata=metadata,
        files=total,
        file_bytes=size,
    )


def gguf_architecture(checkpoint: Checkpoint) -> dict[str, object]:
    """What a GGUF says about its architecture, for building a model from it.

    The keys under "<architecture>." without that prefix ("block_count", "attention.head_count_kv",
    …), and "general.architecture"; "vocab_length": number of tokens, from the tokenizer, else the
    embedding's rows, else None; "has_output_weight": False where the output matrix is the
    embedding.

    Errors: InputError without general.architecture or with a number that is not finite.
    """
    metadata, where = checkpoint.metadata, str(checkpoint.path)
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise InputError("has no general.architecture", where=where, hint=BROKEN)
    found: dict[str, object] = {}
    for key, value in metadata.items():
        if key.startswith(name + "."):
            # Arrays may: Gemma 3n writes -inf for layers without activation sparsity.
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"key {key} is {shown(value)}, no finite number", where=where, hint=BROKEN)
            found[key[len(name) + 1 :]] = value
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab: int | None = None
    if isinstance(tokens, GgufArray):
        vocab = tokens.length
    elif isinstance(tokens, tuple):
        vocab = len(tokens)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors}
    embedding = shapes.get("token_embd.weight")
    if vocab is None and embedding:
        vocab = embedding[0]
    return {
        **found,
        "general.architecture": name,
        "vocab_length": vocab,
        "has_output_weight": "output.weight" in shapes,
    }


def _read_parts(
    first: Path, stem: str, total: int, metadata: Mapping[str, object], tensors: list[StoredTensor]
) -> int:
    """Append the tensors of parts 2 to `total` to `tensors`; their size in bytes."""
    if total > MAX_FILES:
        raise InputError(f"has {total} parts", where=str(first), hint=BROKEN)
    if total > 1 and metadata.get("split.no") != 0:
        raise InputError(
            f"split.no is {shown(metadata.get('split.no'))} in the first part",
            where=str(first),
            hint=BROKEN,
        )
    seen = {tensor.name for tensor in tensors}
    size_bytes = 0
    for number in range(2, total + 1):
        path = first.with_name(f"{stem}-{number:05}-of-{total:05}.gguf")
        own, more, size = _read_file(path)
        if own.get("split.no") != number - 1 or own.get("split.count") != total:
            raise InputError(
                f"calls itself part {shown(own.get('split.no'))} (from 0) of "
                f"{shown(own.get('split.count'))}, its name part {number} of {total}",
                where=str(path),
                hint="the parts are of different models: download them again",
            )
        for tensor in more:
            if tensor.name in seen:
                raise InputError(
                    f"tensor {shown(tensor.name)} is in an earlier part too",
                    where=str(path),
                    hint="the parts are of different models: download them again",
                )
            seen.add(tensor.name)
        tensors += more
        size_bytes += size
        if len(tensors) > MAX_TENSORS:
            raise InputError(f"has more than {MAX_TENSORS:,} tensors", where=str(first), hint=BROKEN)
    promised = metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise InputError(
            f"split.tensors.count is {shown(promised)}, the parts hold {len(tensors)}",
            where=str(first),
            hint=BROKEN,
        )
    return size_bytes


def _read_file(path: Path) -> tuple[dict[str, object], list[StoredTensor], int]:
    """Metadata, tensors in file order and size in bytes of one file."""
    with opened(path) as (stream, size):
        header = GgufHeader(stream, size, str(path))
        tensor_count, key_count = header.start()
        metadata: dict[str, object] = {}
        for _ in range(key_count):
            key = header.name("key")
            if key in metadata:
                header.fail(f"key {shown(key)} is there twice")
            metadata[key] = header.value(key)
        alignment = _alignment(header, metadata)
        records = [header.tensor(path.name) for _ in range(tensor_count)]
        if records:
            _check_places(records, header, alignment)
    return metadata, [tensor for _, tensor in records], size


def _alignment(header: GgufHeader, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        header.fail(f"general.alignment is {shown(value)}, not a power of two")
    return value


def _check_places(records: list[tuple[int, StoredTensor]], header: GgufHeader, alignment: int) -> None:
    """The data are the tensors one after the other, padded to `alignment`, and nothing else."""
    start = -(-header.offset // alignment) * alignment
    seen: set[str] = set()
    end = expected = 0
    for offset, tensor in sorted(records, key=lambda record: (record[0], record[1].stored_bytes)):
        if tensor.name in seen:
            header.fail(f"tensor {shown(tensor.name)} is there twice")
        seen.add(tensor.name)
        if offset != expected:
            header.fail(
                f"tensor {shown(tensor.name)} starts at byte {offset:,} of the data, not at {expected:,}"
            )
        end = offset + tensor.stored_bytes
        expected = -(-end // alignment) * alignment
    if start + end > header.size:
        header.fail(
            f"the tensors end at byte {start + end:,}, the file at {header.size:,}",
            hint="the download is not complete",
        )
    if header.size > start + expected:
        header.fail(
            f"the tensors end at byte {start + end:,}, the file at {header.size:,}",
            hint="the file holds more than its header says: " + BROKEN,
        )
