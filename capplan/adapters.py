"""Bytes of LoRA adapters: one as it is stored, and the slots a server keeps for any of them.

An adapter puts two matrices beside a linear layer of out × in: A, rank × in, and B, out × rank.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.readers.lora import FUSED_MODULES, LITERAL, RENAMED_MODULES, Adapter
from capplan.specs import Model, Tensor
from capplan.split import Stage
from capplan.weights import model_tensors, rank_shape

# Adapters are served at the model's own 16 bits.
ELEMENT_BYTES: Final = 2
# What vLLM's max_lora_rank may be: a slot is as large as the next of these.
SLOT_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """What one adapter holds, in bytes: its matrices, and copies of the modules it replaces whole.

    `unmatched` are targets and saved modules that the decoder does not have.
    """

    matrix_bytes: int
    saved_bytes: int
    modules: int
    unmatched: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.matrix_bytes + self.saved_bytes


def lora_elements(*, rank: int, inputs: int, outputs: int) -> int:
    """Elements of A and B beside one linear layer.

        rank · (inputs + outputs)

    Example: rank 16 beside a 4096 × 4096 matrix: 131,072.
    """
    return rank * (inputs + outputs)


def adapter_size(model: Model, adapter: Adapter) -> AdapterSize:
    """One adapter at 16 bits beside a whole model: every targeted layer, every expert of it.

    Errors: InputError where no target names a module of the model.
    Example: Llama-3.1-8B, rank 16 on q_proj and v_proj: 32 · 16 · (8192 + 5120) · 2 B = 13,631,488 B.
    """
    chosen = _Targets(adapter)
    elements = modules = 0
    for path, layer, tensor in _linear_modules(model):
        part = chosen.part(path, layer, head=tensor.role == "lm_head")
        if part is None:
            continue
        out, width = tensor.shape
        # The parts of a fused module share its one A; the first part brings it.
        inputs = width if part == 0 else 0
        one = lora_elements(rank=chosen.rank(path), inputs=inputs, outputs=out)
        elements += (one + (out if adapter.dora else 0)) * tensor.copies
        modules += tensor.copies
    if not modules:
        known = sorted({path.rpartition(".")[2] for path, _, _ in _linear_modules(model)})
        asked = adapter.pattern or "+".join(adapter.targets)
        raise InputError(
            f"the targets {shown(asked)} name no linear layer of {model.name}",
            where=adapter.source,
            hint=did_you_mean(asked, known, f"it has {', '.join(known)}"),
        )
    saved = sum(
        tensor.parameters * layers
        for path, tensor, layers in model_tensors(model, by_path=False)
        if chosen.saves(path)
    )
    return AdapterSize(
        matrix_bytes=elements * ELEMENT_BYTES,
        saved_bytes=saved * ELEMENT_BYTES,
        modules=modules,
        unmatched=chosen.unmatched(),
    )


def slot_rank(rank: int) -> int:
    """The smallest max_lora_rank of vLLM that holds `rank`; `rank` itself past the largest."""
    return next((allowed for allowed in SLOT_RANKS if allowed >= rank), rank)


def slots_bytes(model: Model, *, rank: int, slots: int, tp: int = 1, stage: Stage | None = None) -> int:
    """What vLLM allocates for `slots` adapters of up to `rank`, on one of `tp` ranks, whatever they target.

        slots · Σ over all linear layers of the decoder, every expert: slot_rank · (in + out) · 2 B

    A layer cut along its outputs has the whole A and its part of B on each rank, one cut along its inputs
    the reverse. The head and the embedding are left out: few classes adapt them.
    Source: vLLM, lora/layers/base_linear.py and fused_moe.py: max_loras × max_lora_rank, made at start.
    Example: Llama-3.1-8B, one slot of rank 16: 32 · 16 · 81,920 · 2 B = 83,886,080 B.
    """
    total = 0
    for _, tensor, layers in model_tensors(model, by_path=False, stage=stage):
        if tensor.linear and len(tensor.shape) == 2 and tensor.role != "lm_head":
            out, width = rank_shape(tensor, tp)
            one = lora_elements(rank=slot_rank(rank), inputs=width, outputs=out)
            total += one * tensor.copies * layers
    return total * ELEMENT_BYTES * slots


def _linear_modules(model: Model) -> Iterator[tuple[str, int, Tensor]]:
    """Every linear layer with its module path and its layer's index; -1 outside the layers."""
    for group in model.groups:
        for tensor in group.layer.tensors():
            if tensor.linear and len(tensor.shape) == 2:
                for index in group.indices:
                    yield f"{group.prefix}.{index}.{tensor.name}", index, tensor
    for tensor in model.outside:
        if len(tensor.shape) == 2 and tensor.role in ("lm_head", "embedding", "other"):
            yield tensor.name, -1, tensor


class _Targets:
    """Which modules an adapter names, and with which rank."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.layers = frozenset(adapter.layers)
        self.seen: set[str] = set()
        # One entry a name a module may go by here: the name asked for, and its place in a fused module.
        self.parts: dict[str, tuple[str, int]] = {}
        for name in adapter.targets:
            names = FUSED_MODULES.get(name) or RENAMED_MODULES.get(name) or ()
            for place, own in enumerate(names):
                self.parts.setdefault(own, (name, place if name in FUSED_MODULES else 0))
        for name in adapter.targets:
            self.parts[name.rpartition(".")[2]] = (name, 0)
        self.exact = {name: rank for name, rank in adapter.ranks if LITERAL.fullmatch(name)}
        self.patterns = [
            (_matcher(name), rank) for name, rank in adapter.ranks if not LITERAL.fullmatch(name)
        ]
        self.target = _matcher(adapter.pattern) if adapter.pattern else None
        self.excluded = [_matcher(name[3:]) for name in adapter.excluded if name.startswith("re:")]

    def part(self, path: str, layer: int, *, head: bool) -> int | None:
        """Place of a module in the fused module that is targeted (0 alone); None where it is not."""
        if (self.layers and layer not in self.layers) or self._is_excluded(path):
            return None
        if self.target is not None:
            return 0 if self.target(path) else None
        if not self.adapter.targets:
            return None if head or layer < 0 else 0
        found = self.parts.get(path.rpartition(".")[2])
        if found is None:
            return None
        name, place = found
        if "." in name and not f".{path}".endswith(f".{name}"):
            return None
        self.seen.add(name)
        return place

    def _is_excluded(self, path: str) -> bool:
        names = self.adapter.excluded
        return any(_ends(path, name) for name in names) or any(match(path) for match in self.excluded)

    def rank(self, path: str) -> int:
        """The module's own rank, else the adapter's."""
        if self.exact:
            end = path
            while end:
                if end in self.exact:
                    return self.exact[end]
                end = end.partition(".")[2]
        return next((rank for match, rank in self.patterns if match(path)), self.adapter.rank)

    def saves(self, path: str) -> bool:
        """Whether the adapter holds its own copy of the module."""
        found = [name for name in self.adapter.saved if name in path.split(".") or _ends(path, name)]
        self.seen.update(found)
        return bool(found)

    def unmatched(self) -> tuple[str, ...]:
        """Named modules that the model did not have."""
        return tuple(name for name in (*self.adapter.targets, *self.adapter.saved) if name not in self.seen)


def _ends(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")


def _matcher(pattern: str) -> Callable[[str], bool]:
    """A pattern on whole module paths, as PEFT matches; layers differ in numbers, so answers are kept."""
    compiled = re.compile(rf"(?:.*\.)?(?:{pattern})")

    @lru_cache(maxsize=65536)
    def matches(path: str) -> bool:
        return compiled.fullmatch(path) is not None

    return matches
