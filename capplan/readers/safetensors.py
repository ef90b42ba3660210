"""safetensors checkpoints by their headers: one file, a sharded index, or a folder.

Only headers are read (safetensors_header.py); an index and its shards must agree tensor by tensor,
and a set of shards must be complete, so that no weight is missed or counted twice.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.checkpoint import Checkpoint, opened
from capplan.readers.safetensors_header import BROKEN, is_text, parse_object, read_file
from capplan.readers.stored_tensor import (
    MAX_FILES,
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    StoredTensor,
    name_problem,
)

INDEX_NAME: Final = "model.safetensors.index.json"
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


def read_safetensors(path: Path, *, quantization_config: Mapping[str, object] | None = None) -> Checkpoint:
    """Read the headers of a .safetensors file, a *.safetensors.index.json or a folder.

    A folder means its index; without one `model.safetensors`; without that all its .safetensors
    files, which must be a complete set where their names say "-00001-of-00004".
    `quantization_config` is the one of config.json; only `Checkpoint.parameters` looks at it.

    Errors: InputError naming file, tensor and offset for anything missing, broken or contradictory.
    """
    if os.path.isdir(path):  # Path.is_dir raises on names the system refuses
        names = _names(path)
        index = _index_among(names, path)
        if index is None:
            return _read_files(path, path, _shards_among(names, path), quantization_config)
        path = path / index
    if path.suffix == ".json":
        return _read_index(path, quantization_config)
    match = _SHARD.fullmatch(path.name)
    if match and match[3] != "00001":
        raise InputError(
            f"is shard {int(match[2])} of {int(match[3])}, not a whole checkpoint",
            where=str(path),
            hint=f"give the folder or its {INDEX_NAME}",
        )
    return _read_files(path, path.parent, (path.name,), quantization_config)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise InputError(
            f"cannot be listed: {error.strerror}", where=str(folder), hint="check its permissions"
        ) from error


def _index_among(names: list[str], folder: Path) -> str | None:
    found = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX_NAME in found:
        return INDEX_NAME
    if len(found) > 1:
        raise InputError(
            f"has {len(found)} indexes: {shown(found)}",
            where=str(folder),
            hint="give the one that is meant",
        )
    return found[0] if found else None


def _shards_among(names: list[str], folder: Path) -> tuple[str, ...]:
    """Weight files of a folder without an index."""
    found = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in found:
        return ("model.safetensors",)  # what transformers loads, whatever lies beside it
    if not found:
        raise InputError(
            "has no .safetensors file", where=str(folder), hint="give a folder with weights in it"
        )
    matches = [match for name in found if (match := _SHARD.fullmatch(name))]
    if not matches:
        return tuple(found)
    stem, total = matches[0][1], matches[0][3]
    if int(total) > MAX_FILES:
        raise _too_many_files(folder)
    wanted = [f"{stem}-{number:05}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    missing, strange = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if strange:
        # Often the same weights twice, under other names: adding them up would be wrong.
        raise InputError(
            f"has {shown(matches[0][0])} and {shown(strange[0])}: more than one checkpoint",
            where=str(folder),
            hint=f"add the {INDEX_NAME}, or move the files that are not meant away",
        )
    if missing:
        raise InputError(
            f"{len(missing)} of {int(total)} shards are missing, the first is {missing[0]}",
            where=str(folder),
            hint="finish the download",
        )
    return tuple(wanted)


def _read_files(
    path: Path,
    folder: Path,
    shards: tuple[str, ...],
    quantization_config: Mapping[str, object] | None,
    expected: Mapping[str, str] | None = None,
    metadata: Mapping[str, object] | None = None,
) -> Checkpoint:
    """Read `shards` of `folder`; `expected` maps each tensor to the shard an index puts it in."""
    if len(shards) > MAX_FILES:
        raise _too_many_files(folder)
    tensors: dict[str, StoredTensor] = {}
    merged: dict[str, object] = {}
    file_bytes = header_bytes = 0
    for shard in shards:
        found, own, size = read_file(folder / shard, shard)
        file_bytes += size
        header_bytes += size - sum(tensor.stored_bytes for tensor in found)
        if len(tensors) + len(found) > MAX_TENSORS or header_bytes > 2 * MAX_HEADER_BYTES:
            raise InputError(
                f"has over {MAX_TENSORS:,} tensors or {2 * MAX_HEADER_BYTES:,} bytes of headers",
                where=str(path),
                hint="no published model comes near; " + BROKEN,
            )
        for tensor in found:
            if tensor.name in tensors:
                raise InputError(
                    f"tensor {shown(tensor.name)} is in {shown(tensors[tensor.name].shard)} "
                    f"and in {shown(shard)}",
                    where=str(path),
                    hint="keep one copy of the weights in the folder",
                )
            if expected is not None and expected.get(tensor.name) != shard:
                raise InputError(
                    f"tensor {shown(tensor.name)} is in {shown(shard)}, the index puts it in "
                    f"{shown(expected.get(tensor.name))}",
                    where=str(path),
                    hint="index and shards are of different versions: download all of them again",
                )
            tensors[tensor.name] = tensor
        for key, value in own.items():
            merged.setdefault(key, value)
    if expected is not None and len(expected) != len(tensors):
        missing = next(name for name in expected if name not in tensors)
        raise InputError(
            f"tensor {shown(missing)} is not in {shown(expected[missing])} as the index says",
            where=str(path),
            hint="index and shards are of different versions: download all of them again",
        )
    if not tensors:
        raise InputError("holds no tensors", where=str(path), hint="give a file with weights")
    return Checkpoint(
        path=path,
        format="safetensors",
        tensors=tuple(tensors.values()),
        metadata={**merged, **(metadata or {})},
        files=len(shards),
        file_bytes=file_bytes,
        quantization_config=quantization_config,
    )


def _read_index(path: Path, quantization_config: Mapping[str, object] | None) -> Checkpoint:
    """Read a sharded checkpoint through its index; the index and the shards must agree exactly."""
    with opened(path) as (stream, size):
        if size > MAX_HEADER_BYTES:
            raise InputError(
                f"is {size:,} bytes; an index has at most {MAX_HEADER_BYTES:,}",
                where=str(path),
                hint=BROKEN,
            )
        raw = stream.read(size)
    index = parse_object(raw, str(path))
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise InputError(
            "is no safetensors index: it has no weight_map of tensors to files",
            where=str(path),
            hint=f"give a {INDEX_NAME}, a .safetensors file or a folder",
        )
    shards: dict[str, None] = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in shards:
            continue
        problem = _shard_problem(shard, path)
        if problem:
            raise InputError(
                f"tensor {shown(name)}: file {shown(shard)} {problem}",
                where=str(path),
                hint="a weight_map names .safetensors files in the index's own folder",
            )
        shards[shard] = None
        if len(shards) > MAX_FILES:
            raise _too_many_files(path)
    scalars = {
        key: value
        for key, value in metadata.items()
        if is_text(key) and (is_text(value) or isinstance(value, int))
    }
    return _read_files(path, path.parent, tuple(sorted(shards)), quantization_config, weight_map, scalars)


def _shard_problem(shard: object, index: Path) -> str | None:
    """Why a weight_map may not name this file; None when it may."""
    if not isinstance(shard, str):
        return "is not a string"
    if shard == index.name:
        return "is the index itself"
    if name_problem(shard):
        return name_problem(shard)
    # Textual, before any link is followed: the folder is all an index may speak of.
    if "\\" in shard or ":" in shard or any(part in ("", ".", "..") for part in shard.split("/")):
        return "leaves the folder of the index"
    return None if shard.endswith(".safetensors") else "is no .safetensors file"


def _too_many_files(path: Path) -> InputError:
    return InputError(f"names more than {MAX_FILES:,} files", where=str(path), hint="give one checkpoint")
