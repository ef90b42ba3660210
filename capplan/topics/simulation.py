"""Topics on a simulation's figures: their intervals, and the start that is left out."""

from typing import Final

from capplan.formulas import confidence
from capplan.topics.topic import Line, Topic, topic


def _interval() -> tuple[Line, ...]:
    runs = (1.92, 2.10, 1.98, 2.04, 1.96)
    return (
        Line("five runs, mean TTFT 1.92, 2.10, 1.98, 2.04 and 1.96 s: ±", _half(runs), "s"),
        Line("t of four degrees of freedom", confidence.student_t(degrees=4), "1"),
        Line("the first two alone: ±", _half(runs[:2]), "s"),
    )


def _half(means: tuple[float, ...]) -> float:
    return confidence.half_width(means=means) or 0.0


def _warm_up() -> tuple[Line, ...]:
    cold = [100.0] * 50 + [1.0, 1.1] * 225
    return (
        Line("50 times of 100 s, then 450 of around 1 s: left out", _left_out(cold), "request"),
        Line("500 times alike: left out", _left_out([1.0] * 500), "request"),
    )


def _left_out(values: list[float]) -> int:
    return confidence.warm_up_observations(values=values) or 0


_COMMAND: Final = "capplan simulate --model 8b --gpu h100 --request-rate 8"
SIMULATION: Final[tuple[Topic, ...]] = (
    topic(
        "confidence-interval",
        "How far another seed's mean may lie",
        (confidence.half_width, confidence.student_t),
        _interval,
        aliases=("confidence", "batch-means", "student-t"),
        command=f"{_COMMAND} --repeat 5",
    ),
    topic(
        "warm-up",
        "The start of a simulation that is not typical yet",
        (confidence.warm_up_observations,),
        _warm_up,
        aliases=("mser-5", "transient"),
        command=_COMMAND,
    ),
)
