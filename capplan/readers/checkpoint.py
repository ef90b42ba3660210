"""A checkpoint as its files' headers describe it, and how those files are opened."""

import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from capplan.errors import InputError
from capplan.readers.packing import logical_parameters
from capplan.readers.stored_tensor import StoredTensor
from capplan.readers.tensor_roles import mtp_layers, role_of
from capplan.specs import Role

__all__ = ["Checkpoint", "StoredTensor", "opened", "role_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Every tensor of a checkpoint: what is stored, not what a config promises.

    `metadata` is the file's own (safetensors: __metadata__ and the index's; GGUF: all keys, long
    arrays as GgufArray). `files` is the number of weight files and `file_bytes` their total size,
    headers and padding included. `quantization_config` is only used to unpack what shapes do not
    tell.
    """

    path: Path
    format: Literal["safetensors", "gguf"]
    tensors: tuple[StoredTensor, ...]
    metadata: Mapping[str, object]
    files: int
    file_bytes: int | None = None
    quantization_config: Mapping[str, object] | None = None
    _mtp: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = (tensor.name for tensor in self.tensors)
        object.__setattr__(self, "_mtp", mtp_layers(names))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors, without headers and padding."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @property
    def parameters(self) -> int:
        """Logical parameters of everything stored, vision towers and MTP layers included.

        Packed weights count unpacked; scales, zero points and buffers not at all.
        Errors: InputError where a tensor's packing cannot be told (see packing.py).
        """
        return sum(self._logical())

    @property
    def parameters_by_role(self) -> dict[Role, int]:
        """`parameters`, split by role; roles without parameters are left out."""
        totals: dict[Role, int] = {}
        for tensor, count in zip(self.tensors, self._logical(), strict=True):
            if count:
                role = self.role_of(tensor.name)
                totals[role] = totals.get(role, 0) + count
        return totals

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """`stored_bytes`, split by the format's dtype names."""
        totals: dict[str, int] = {}
        for tensor in self.tensors:
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.stored_bytes
        return totals

    @property
    def bytes_by_role(self) -> dict[Role, int]:
        """`stored_bytes`, split by role; scales go with their weight."""
        totals: dict[Role, int] = {}
        for tensor in self.tensors:
            role = self.role_of(tensor.name)
            totals[role] = totals.get(role, 0) + tensor.stored_bytes
        return totals

    def role_of(self, name: str) -> Role:
        """Role of a tensor of this checkpoint; knows which numbered layers are MTP modules."""
        role = role_of(name)
        if role != "mtp" and self._mtp and name.startswith(self._mtp):
            return "mtp"
        return role

    def _logical(self) -> tuple[int, ...]:
        return logical_parameters(
            self.tensors, where=str(self.path), quantization_config=self.quantization_config
        )


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The regular file at `path`, open for reading, and its size in bytes.

    Links are followed (model caches are made of them). Anything but a regular file is refused
    before it is opened: a pipe would block. Errors: InputError for whatever the operating system
    says.
    """
    try:
        try:
            status = path.stat()
        except ValueError as error:  # a NUL in the path
            raise OSError(str(error)) from error
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                "not a regular file", where=str(path), hint="give a weight file or a folder of them"
            )
        with path.open("rb") as stream:
            yield stream, status.st_size
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            hint="check the path; a partial download leaves links to nothing",
        ) from error
