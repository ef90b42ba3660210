"""What every block with a fixed state has: its tensors' role, and the cache of one sequence."""

from capplan.specs import Cache, Tensor


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
