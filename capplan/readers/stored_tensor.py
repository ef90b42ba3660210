"""One tensor as a checkpoint stores it, and the bounds every header reader obeys."""

from dataclasses import dataclass
from typing import Final

MAX_HEADER_BYTES: Final = 100_000_000
"""The safetensors library's own limit; GGUF headers with the largest tokenizers are near 20 MB."""
MAX_TENSORS: Final = 1_000_000
"""Kimi-K3, the largest so far: 93 × 896 × 3 packed matrices of up to three tensors each."""
MAX_FILES: Final = 10_000
MAX_NAME_BYTES: Final = 512
MAX_ELEMENTS: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a checkpoint's header; its data is never read.

    `dtype` is the format's own name ("BF16", "I32", "Q4_K"). `shape` is row-major with the output
    dimension first, in both formats (GGUF writes the reverse). `stored_bytes` is what the file
    holds: scales inside a GGML block count, padding between tensors does not. `shard` is the file's
    name relative to the checkpoint's folder.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int
    shard: str

    @property
    def elements(self) -> int:
        """Elements of `dtype`; for packed words not the number of weights (see packing.py)."""
        product = 1
        for width in self.shape:
            product *= width
        return product


def name_problem(name: str) -> str | None:
    """Why `name` cannot be a tensor's or key's name; None when it can.

    Unprintable characters are refused: a name reaches terminals and JSON, where a control character
    or a lone surrogate does harm.
    """
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_BYTES:
        return f"is longer than {MAX_NAME_BYTES} characters"
    if not name.isprintable():
        return "has unprintable characters"
    return None
