"""How vLLM puts layers into groups that share block tables, and what a block and a request then take.

All groups draw blocks of one size from one pool: a block id belongs to one group at a time, and in every
layer of that group the block is one page. So groups get the same number of layers, the last of a kind
padded. Facts from vLLM's sources (see vllm_kv); no code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from capplan.engines.kv_layers import WHOLE, LayerCache, Placed, with_equal_pages
from capplan.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table: as many blocks a request in each; `caches` are the different ones."""

    members: tuple[Placed, ...]
    caches: tuple[LayerCache, ...]

    def page_bytes(self, layers: range) -> int:
        """What one block takes in the group's layers among `layers`."""
        return sum(entry.cache.page_bytes for entry in self.members if entry.layer in layers)

    def blocks(self, tokens: int, *, in_flight: int, encoder_tokens: int = 0) -> int:
        """Blocks a request of `tokens` tokens holds in this group."""
        return max(
            cache.blocks(tokens, in_flight=in_flight, encoder_tokens=encoder_tokens) for cache in self.caches
        )

    @property
    def block_size(self) -> int | None:
        """Tokens a block holds; None for states."""
        return self.caches[0].block_size or None

    @property
    def state_blocks(self) -> int:
        """Blocks a running sequence holds here for its state."""
        return self.caches[0].state_blocks


def _group(members: Sequence[Placed]) -> Group:
    return Group(members=tuple(members), caches=tuple(dict.fromkeys(entry.cache for entry in members)))


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, as vLLM cuts them.

    layers / stages each, and one more for as many stages as there are layers left over, counted from
    the last but one backwards.
    Example: 30 layers over 4 stages: 7, 8, 8, 7.
    """
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[-2 - extra] += 1
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def one_group(placed: Sequence[Placed], *, mixed_pages: bool) -> bool:
    """Whether all layers always need the same number of blocks: pages may then differ (`mixed_pages`).

    True for: all tokens kept by every layer (full, latents, indexer keys); the same window or chunk in
    every layer; states of one page size.
    """
    caches = {entry.cache for entry in placed}
    if len({cache.block_size for cache in caches}) > 1:
        return False
    if not mixed_pages and len({cache.page_bytes for cache in caches}) > 1:
        return False
    if all(cache.kind in WHOLE for cache in caches):
        return True
    first, *others = caches
    if first.kind == "state":
        return all(
            (cache.kind, cache.state_blocks, cache.page_bytes)
            == (first.kind, first.state_blocks, first.page_bytes)
            for cache in others
        )
    return all((cache.kind, cache.window) == (first.kind, first.window) for cache in others)


def group_layers(
    placed: Sequence[Placed], *, mixed_pages: bool, near_equal: float, stretch: bool, pad: bool
) -> tuple[Group, ...]:
    """Layers in groups, in the order in which the kinds first appear.

    One kind is one group. Else pages are made equal, and each kind of layer is dealt out over

        ceil(layers of the kind / size),   size = the smallest kind's number of layers

    groups, or with size = the largest kind's number where that is under `near_equal` × the smallest: padding
    a few layers costs less than a nearly empty group.
    Example: 22 sliding and 4 full layers: size 4, 6 + 1 groups; 13 and 12: size 13, 1 + 1 groups.
    """
    if one_group(placed, mixed_pages=mixed_pages):
        return (_group(placed),)
    kinds: dict[LayerCache, list[Placed]] = {}
    for entry in with_equal_pages(placed, stretch=stretch, pad=pad):
        kinds.setdefault(entry.cache, []).append(entry)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < near_equal * min(counts) else min(counts)
    groups: list[Group] = []
    for members in kinds.values():
        parts = -(-len(members) // size)
        # Every parts-th layer, so that pipeline stages get equal shares of each group.
        groups += [_group(members[part::parts]) for part in range(parts)]
    return tuple(groups)


def only_group(placed: Sequence[Placed], *, mixed_pages: bool) -> tuple[Group, ...]:
    """The one group there is where kinds of cache get no groups of their own.

    Errors: InputError where the layers need different numbers of blocks (states beside attention).
    """
    if one_group(placed, mixed_pages=mixed_pages):
        return (_group(placed),)
    pages = sorted({f"{entry.cache.kind} of {entry.cache.page_bytes:,} B" for entry in placed})
    raise InputError(
        f"without the hybrid KV cache manager vLLM cannot hold these pages together: {'; '.join(pages)}",
        where="--disable-hybrid-kv-cache-manager",
        hint="leave the manager on; it exists since 0.9.1",
    )
