"""The largest number for which a condition holds that only turns false once."""

from collections.abc import Callable


def largest(holds: Callable[[int], bool], *, limit: int, guess: int) -> int:
    """The largest n in [0, limit] for which `holds` is true; 0 is never tried, and stands for none.

    Gallops away from `guess` in steps that double, then halves what is left: a guess that is off by d takes
    about 2 · log2(d) trials, where halving from the start takes log2(limit).
    Holds for: conditions that are false for every n above one for which they are false.
    Example: n² ≤ 50, up to 2**40, guess 6: tries 6, 7, 9, 8: 7.
    """
    guess = min(max(guess, 1), limit)
    low, high, step = 0, limit + 1, 1
    if limit >= 1 and holds(guess):
        low = guess
        while low + step < high:
            if not holds(low + step):
                high = low + step
                break
            low, step = low + step, step * 2
    else:
        high = max(guess, 1)
        while high - step > 0:
            if holds(high - step):
                low = high - step
                break
            high, step = high - step, step * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
