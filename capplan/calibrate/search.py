"""The numbers of a form that bring it nearest to measured times, in log error. Numpy only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

Array = Any
Numbers = Mapping[str, Any]
Form = Callable[[Numbers], Array]
"""Predicted times of all rows; numbers given as columns (k, 1) make k rows of predictions."""

# Errors below this count by their square, above by themselves: a bend for the search to hold on to.
_BEND: Final = 0.02
_STEP: Final = 1e-4
_LEAST_GAIN: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One fitted number: where the search starts and between which limits it stays (all positive)."""

    name: str
    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A form's knobs, what is held fixed beside them, and other starting points to try."""

    knobs: tuple[Knob, ...]
    fixed: Mapping[str, float] = field(default_factory=dict)
    starts: tuple[Mapping[str, float], ...] = ({},)


def fitted(form: Form, variant: Variant, measured: Array, *, rounds: int) -> tuple[dict[str, float], float]:
    """The numbers with the least mean absolute log error found from any start, and that error."""
    best: tuple[dict[str, float], float] | None = None
    for start in variant.starts:
        found = _from_start(form, variant, start, measured, rounds)
        if best is None or found[1] < best[1]:
            best = found
    if best is None:
        raise ValueError("a variant without a start")
    return best


def chosen(
    form: Form, variants: Sequence[Variant], measured: Array, *, trial_rounds: int = 10, rounds: int = 40
) -> dict[str, float]:
    """The numbers of the best variant: all are tried briefly, the best one is fitted to the end."""
    best = variants[0]
    if len(variants) > 1:
        tried = [fitted(form, _first_start(one), measured, rounds=trial_rounds)[1] for one in variants]
        best = variants[int(np.argmin(tried))]
    return fitted(form, best, measured, rounds=rounds)[0]


def _first_start(variant: Variant) -> Variant:
    return Variant(knobs=variant.knobs, fixed=variant.fixed, starts=variant.starts[:1])


def _from_start(
    form: Form, variant: Variant, start: Mapping[str, float], measured: Array, rounds: int
) -> tuple[dict[str, float], float]:
    """Levenberg–Marquardt on reweighted residuals, in the logarithm of every number."""
    knobs = variant.knobs
    low = np.log([knob.low for knob in knobs])
    high = np.log([knob.high for knob in knobs])
    at = np.clip(np.log([start.get(knob.name, knob.start) for knob in knobs]), low, high)
    target = np.log(measured)

    def residuals(points: Array) -> Array:
        numbers = np.exp(points)
        named = {knob.name: numbers[:, [place]] for place, knob in enumerate(knobs)}
        return np.log(form({**variant.fixed, **named})) - target

    left = residuals(at[None])[0]
    best = float(np.abs(left).mean())
    damping = 1e-2
    for _ in range(rounds):
        steps = np.where(at + _STEP <= high, _STEP, -_STEP)
        slope = ((residuals(at + np.diag(steps)) - left) / steps[:, None]).T
        weighted = slope / np.maximum(np.abs(left), _BEND)[:, None]
        normal, pull = weighted.T @ slope, weighted.T @ left
        gain = 0.0
        for _ in range(6):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            there = np.clip(at + np.clip(np.linalg.solve(damped, -pull), -1.0, 1.0), low, high)
            found = residuals(there[None])[0]
            error = float(np.abs(found).mean())
            if error < best:
                gain, at, left, best = best - error, there, found, error
                damping = max(damping / 5, 1e-6)
                break
            damping *= 5
        if gain < _LEAST_GAIN:
            break
    numbers = np.exp(at)
    named = {knob.name: float(numbers[place]) for place, knob in enumerate(knobs)}
    return {**named, **variant.fixed}, best
