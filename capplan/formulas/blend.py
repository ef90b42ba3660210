"""Pieces that op costs are built from; they take plain floats and numpy arrays alike."""

from typing import Any, Final

Number = Any
"""A float or a numpy array of them."""

MICROSECOND: Final = 1e-6
NANOSECOND: Final = 1e-9


def soft_maximum(*, first: Number, second: Number, p: Number) -> Number:
    """The larger of two times, rounded where they meet.

        (aᵖ + bᵖ)^(1/p)         (p → ∞: the maximum; p = 1: the sum; p < 1: slower than the sum)

    Holds for: times of work that overlaps in part. Source: p-norm.
    Example: 3 s and 4 s with p = 2: 5 s.
    """
    # Scaled by the larger: microseconds to a high power would vanish.
    larger, less = 0.5 * (first + second + abs(first - second)), smaller(first, second)
    return larger * (1 + (less / divisor(larger)) ** p) ** (1 / p)


def smaller(first: Number, second: Number) -> Number:
    """The smaller of two, without a branch: (a + b − |a − b|) / 2."""
    return 0.5 * (first + second - abs(first - second))


def rounded_up(value: Number, unit: float) -> Number:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


def divisor(count: Number) -> Number:
    """`count`, or 1 where it is 0."""
    return count + (count == 0)


def read_bytes(*, moved: Number, cache_bytes: Number, reach: Number, speed: Number) -> Number:
    """Bytes of memory traffic that take as long as `moved` bytes of which a cache may hold some.

        moved · (1 − hit · (1 − 1/speed)),   hit = held⁶ / (held⁶ + moved⁶),   held = reach · cache

    Holds for: data that the call before left behind; cache 0: nothing is held. Rises with `moved`.
    Source: shape chosen to follow the step at the cache's size in measured kernels.
    Example: 1 MB with a cache of 100 MB that is 4 times as fast: 0.25 MB.
    """
    held = (reach * cache_bytes) ** 6
    # The one byte keeps nothing moved through no cache from being 0/0.
    hit = held / (held + moved**6 + 1)
    return moved * (1 - hit * (1 - 1 / speed))
