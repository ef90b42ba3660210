"""What the readers of one config produce between them: layers, outside tensors, towers."""

from collections.abc import Sequence
from dataclasses import dataclass

from capplan.specs import Layer, LayerGroup, Tensor, Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """The parts of a Model that its layers decide."""

    hidden: int
    heads: int
    groups: tuple[LayerGroup, ...]
    outside: tuple[Tensor, ...]
    towers: tuple[Tower, ...]


def grouped(layers: Sequence[Layer], prefix: str) -> tuple[LayerGroup, ...]:
    """Equal layers together, in order of first appearance."""
    found: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        found.setdefault(layer, []).append(index)
    return tuple(
        LayerGroup(layer=layer, indices=tuple(indices), prefix=prefix) for layer, indices in found.items()
    )
