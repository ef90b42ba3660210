"""What a simulation's output is worth: where its start ends, and how far a mean may be off."""

import math
from collections.abc import Sequence
from typing import Any, Final

BATCH: Final = 5
"""Observations of one batch of MSER-5."""

# t of 97.5 % for 1 to 30 degrees of freedom.
_T: Final = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z: Final = 1.959964


def student_t(*, degrees: int) -> float:
    """Student's t such that 95 % lie within ± t.

        z + (z³ + z) / (4 · n) + (5 · z⁵ + 16 · z³ + 3 · z) / (96 · n²)      (beyond 30 degrees of freedom)

    Holds for: one degree at least. Source: tables; Abramowitz and Stegun, 26.7.5.
    Example: 19 degrees of freedom: 2.093; 60: 2.0003.
    """
    if degrees <= len(_T):
        return _T[degrees - 1]
    first, second = (_Z**3 + _Z) / 4, (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / 96
    return _Z + first / degrees + second / degrees**2


def half_width(*, means: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval around the mean of independent means; None for less than two.

        t(n − 1) · s / √n

    Holds for: means of runs with seeds of their own, or of long batches of one run.
    Source: Law, "Simulation Modeling and Analysis", batch means and replications.
    Example: 1, 2, 3: s = 1, t = 4.303, 4.303 / √3 = 2.484.
    """
    count = len(means)
    if count < 2:
        return None
    mean = math.fsum(means) / count
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1)
    return student_t(degrees=count - 1) * math.sqrt(variance / count)


def warm_up_observations(*, values: Any) -> int | None:
    """How many observations at the beginning are not yet typical, by MSER-5; None where it finds no end.

        d = argmin_{d ≤ n / 2} Σ_{i ≥ d} (Y_i − Ȳ_d)² / (n − d)²      (Y: n means of 5 observations each)

    `values` are in order: a numpy array, or a list. A least value at the very half means no end was seen.
    Holds for: one steady state after the start. Source: White, Cobb and Spratt, "A comparison of five
    steady-state truncation heuristics for simulation", 2000.
    Example: ten fives of 100, then ninety of around 1: the first fifty observations.
    """
    import numpy as np

    count = len(values) // BATCH
    if count < 4:
        return None
    means = np.asarray(values[: count * BATCH], dtype=np.float64).reshape(count, BATCH).mean(axis=1)
    # Around the last half's mean, lest squares cancel.
    means = means - means[count // 2 :].mean()
    left = count - np.arange(count)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left**2.0
    half = count // 2
    best = int(np.argmin(errors[: half + 1]))
    return None if best == half else best * BATCH
