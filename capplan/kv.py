"""KV cache and recurrent state of a model: what a sequence holds, on one rank.

The per-layer rules are the blocks' (`Cache`); the arithmetic is formulas/memory.
"""

from collections.abc import Container
from dataclasses import dataclass

from capplan.formulas import memory
from capplan.specs import Cache, CacheKind, Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheLayers:
    """The layers that keep the same kind of cache, on one rank.

    `entry_bytes` is what all these layers add for one kept entry; `state_bytes` what they hold once a
    sequence. Entries are made every `stride` tokens and kept for the last `window` tokens where given.
    """

    kind: CacheKind
    layers: int
    entry_bytes: float
    state_bytes: int = 0
    window: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvLayout:
    """All caches of a model on one rank, for one KV dtype."""

    groups: tuple[CacheLayers, ...]

    @property
    def bytes_per_token(self) -> float:
        """Growth per token while every cache still grows: the worst case."""
        return sum(group.entry_bytes / group.stride for group in self.groups)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, whatever its length."""
        return sum(group.state_bytes for group in self.groups)

    @property
    def pages(self) -> bool:
        """Whether anything is kept per token."""
        return any(group.entry_bytes for group in self.groups)

    def sequence_bytes(self, tokens: int) -> float:
        """What a sequence of `tokens` tokens holds, without the tail of its last blocks."""
        kept = sum(
            group.entry_bytes * memory.kept_tokens(context=tokens, window=group.window, stride=group.stride)
            for group in self.groups
        )
        return kept + self.state_bytes

    def paged_bytes(self, tokens: int, block_size: int) -> float:
        """What a sequence of `tokens` tokens occupies in blocks of `block_size` entries."""
        kept = sum(
            group.entry_bytes
            * block_size
            * memory.kv_blocks(
                tokens=memory.kept_tokens(context=tokens, window=group.window, stride=group.stride),
                block_size=block_size,
            )
            for group in self.groups
        )
        return kept + self.state_bytes

    def by_kind(self) -> dict[str, float]:
        """Bytes per token (states: per sequence) by kind of cache."""
        made: dict[str, float] = {}
        for group in self.groups:
            size = group.state_bytes if group.kind == "state" else group.entry_bytes / group.stride
            made[group.kind] = made.get(group.kind, 0) + size
        return made


def kv_layout(model: Model, *, kv_bits: float, tp: int = 1, layers: Container[int] | None = None) -> KvLayout:
    """The model's caches (of some layers) on one of `tp` ranks at `kv_bits` per element.

    KV heads are divided, or replicated once there are fewer than ranks; latents are whole on every rank.
    """
    groups: list[CacheLayers] = []
    for group in model.groups:
        count = len(group.indices) if layers is None else sum(index in layers for index in group.indices)
        for cache in group.layer.caches() if count else ():
            groups.append(_layers(cache, count, kv_bits, tp))
    merged: dict[tuple[CacheKind, int | None, int], CacheLayers] = {}
    for entry in groups:
        key = (entry.kind, entry.window, entry.stride)
        known = merged.get(key)
        merged[key] = CacheLayers(
            kind=entry.kind,
            layers=entry.layers + (known.layers if known else 0),
            entry_bytes=entry.entry_bytes + (known.entry_bytes if known else 0),
            state_bytes=entry.state_bytes + (known.state_bytes if known else 0),
            window=entry.window,
            stride=entry.stride,
        )
    return KvLayout(groups=tuple(merged.values()))


def _layers(cache: Cache, layers: int, kv_bits: float, tp: int) -> CacheLayers:
    if cache.kind == "state":
        # A state is cut by its heads, like the weights that make it.
        share = -(-cache.heads // tp) / cache.heads
        state = sum(
            memory.recurrent_state_bytes(elements=elements, element_bits=bits)
            for elements, bits in cache.state_elements
        )
        return CacheLayers(
            kind="state", layers=layers, entry_bytes=0, state_bytes=round(state * share) * layers
        )
    entry = memory.kv_entry_bytes(
        heads=-(-cache.heads // tp) if cache.splits else cache.heads,
        k_width=cache.k_width,
        v_width=cache.v_width,
        element_bits=kv_bits if cache.element_bits is None else cache.element_bits,
        extra_bytes=cache.entry_extra_bytes,
    )
    return CacheLayers(
        kind=cache.kind,
        layers=layers,
        entry_bytes=entry * layers,
        window=cache.window,
        stride=cache.stride,
    )
