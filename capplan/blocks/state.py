"""What every block with a fixed state has: its tensors' role, and the cache of one sequence."""

from capplan.specs import Cache, Mixing, Tensor


def recurrent_tensor(
    name: str,
    shape: tuple[int, ...],
    *,
    linear: bool = False,
    axis: int | None = None,
    units: int = 1,
    norm: bool = False,
) -> Tensor:
    """A tensor of a recurrent block, cut along `axis` in `units` whole pieces where given."""
    return Tensor(
        name=name,
        role="norm" if norm else "recurrent",
        shape=shape,
        linear=linear,
        split_axis=axis,
        split_units=units,
    )


def state_cache(heads: int, *elements: tuple[int, int]) -> tuple[Cache, ...]:
    """The state of one sequence: (elements, bits) of each part; ranks share it by heads."""
    return (Cache(kind="state", heads=heads, state_elements=elements),)


def state_mixings(caches: tuple[Cache, ...]) -> tuple[Mixing, ...]:
    """The work on fixed states: each is read and written once a step.

    A token updates every state element and reads it: 4 FLOP an element (outer product, decay, product).
    """
    elements = sum(count for cache in caches for count, _ in cache.state_elements)
    size = sum(count * bits / 8 for cache in caches for count, bits in cache.state_elements)
    return (
        Mixing(
            form="state",
            heads=max(cache.heads for cache in caches),
            state_bytes=2 * size,
            state_flop=4 * elements,
        ),
    )
