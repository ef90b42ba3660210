"""What a scenario expects of an answer, and whether it holds.

    expect:
      vram.fits: true
      latency.ttft_ms: {at_most: 800, confidence: p90}
      vram.total.bytes: {within: 5% of baseline}

A key is a command and the path of a figure in its JSON; the unit may be another of the same kind (ttft_ms for
ttft_s, total.gib for total.bytes). p90 is the pessimistic side of an estimate's band: the high end of times,
sizes and money, the low end of throughput and room; p10 is the other, p50 (default) the estimate itself.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import did_you_mean, shown
from capplan.scenario_keys import ANSWERS
from capplan.scenario_values import (
    SIZE,
    SIZE_UNITS,
    TIME,
    TIME_UNITS,
    Amount,
    Either,
    Flag,
    Many,
    Number,
    Pattern,
    Text,
    number_of,
    scaled,
)
from capplan.scenario_yaml import Mapping as Tree
from capplan.scenario_yaml import Mark, Node, Scalar
from capplan.units import format_bytes, format_seconds

CONFIDENCES: Final = ("p10", "p50", "p90")
OPERATORS: Final = {
    "at_most": "The largest value that holds.",
    "at_least": "The smallest value that holds.",
    "between": "Smallest and largest: [a, b].",
    "equals": "The one value that holds.",
    "within": "5% of baseline, or 5% of a value.",
}
_PART: Final = r"(?:\.[A-Za-z0-9_][A-Za-z0-9_-]*)"
PATH: Final = rf"(?:{'|'.join(ANSWERS)}){_PART}+"
_TIME_KEYS: Final = {f"_{unit}": float(TIME_UNITS[unit]) for unit in ("us", "ms", "s")}
_SIZE_KEYS: Final = {"bytes": 1.0, **{unit.lower(): float(factor) for unit, factor in SIZE_UNITS.items()}}
# Keys of a time (a rate per second is none), of a size, and all others.
_WORD: Final = "[A-Za-z0-9][A-Za-z0-9_-]*"
TIME_PATH: Final = rf"^(?!.*_per_s$)(?:{'|'.join(ANSWERS)}){_PART}*\.{_WORD}(?:{'|'.join(_TIME_KEYS)})$"
SIZE_PATH: Final = rf"^(?:{'|'.join(ANSWERS)}){_PART}*\.(?:{_WORD}_)?(?:{'|'.join(_SIZE_KEYS)})$"
OTHER_PATH: Final = rf"^(?!{TIME_PATH[1:]})(?!{SIZE_PATH[1:]}){PATH}$"
NUMBER: Final = Number(low=-1e15, high=1e15)
_WITHIN: Final = r"(?:0|[1-9][0-9]{0,3})(?:\.[0-9]{1,3})?%"
_PLAIN: Final = r"(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """What a key measures: the units its value may have, and what a plain number is in SI."""

    name: str
    amount: Amount | None
    factor: float = 1.0
    suffix: str = ""

    @property
    def number(self) -> Number | Either:
        """A bound of it."""
        return NUMBER if self.amount is None else Either(kinds=(NUMBER, self.amount))

    @property
    def scalar(self) -> Either:
        """Any value of it; booleans and text only where it is no quantity."""
        if self.amount is not None:
            return Either(kinds=(NUMBER, self.amount))
        return Either(kinds=(NUMBER, Flag(), Text(example="a value")))

    @property
    def within(self) -> Pattern:
        """A share of the baseline or of a value."""
        units = f"(?: ?(?:{'|'.join(self.amount.units)}))?" if self.amount else ""
        return Pattern(
            pattern=f"^{_WITHIN} of (?:baseline|{_PLAIN}{units})$", example="5% of baseline", parse=str
        )


def dimension_of(key: str) -> Dimension:
    """The dimension a key's last unit says."""
    if re.fullmatch(TIME_PATH, key, re.ASCII):
        suffix = max((s for s in _TIME_KEYS if key.endswith(s)), key=len)
        return Dimension(name="time", amount=TIME, factor=_TIME_KEYS[suffix], suffix=suffix)
    if re.fullmatch(SIZE_PATH, key, re.ASCII):
        suffix = re.split(r"[._]", key)[-1]
        return Dimension(name="size", amount=SIZE, factor=_SIZE_KEYS[suffix], suffix=suffix)
    return Dimension(name="money" if "usd" in key.rpartition(".")[2] else "number", amount=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One operator with its values in SI; `of_baseline`: a share of the baseline, which is not known yet."""

    operator: str
    values: tuple[Any, ...]
    of_baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One line under `expect:`."""

    key: str
    mark: Mark
    dimension: Dimension
    checks: tuple[Check, ...]
    confidence: str | None = None

    @property
    def answer(self) -> str:
        """The command whose output it is about."""
        return self.key.partition(".")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """Where the figure stands in that output."""
        return tuple(self.key.split(".")[1:])

    @property
    def needs_baseline(self) -> bool:
        """Whether it compares with a baseline."""
        return any(check.of_baseline for check in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A figure as an answer has it: SI value, and what was taken (the estimate, an end of its band)."""

    value: Any
    taken: str = ""


class NotEvaluatedError(Exception):
    """Why a figure cannot be told: the expectation fails."""


def read_expectation(key: str, node: Node, mark: Mark) -> Expectation:
    """One expectation of a file; InputError where it is not understood."""
    head = key.partition(".")[0]
    if re.fullmatch(PATH, key, re.ASCII) is None:
        hint = f"write ANSWER.figure, with {', '.join(ANSWERS)}"
        known = head not in ANSWERS and did_you_mean(head, ANSWERS, hint)
        raise mark.error(f"{shown(key)} names no figure", known or hint)
    dimension = dimension_of(key)
    if not isinstance(node, Tree):
        value = dimension.scalar.read(node, key)
        return _made(key, mark, dimension, (Check(operator="equals", values=(_si(value, node, dimension),)),))
    checks: list[Check] = []
    confidence: str | None = None
    for name, inner in node.items.items():
        if name == "confidence":
            confidence = Text(choices=CONFIDENCES).read(inner, name)
        elif name in OPERATORS:
            checks.append(_check(name, inner, dimension))
        else:
            hint = did_you_mean(
                name, (*OPERATORS, "confidence"), f"one of {', '.join(OPERATORS)}, confidence"
            )
            raise node.keys[name].error(f"unknown key {shown(name)}", hint)
    if not checks:
        raise node.mark.error(f"{key} expects nothing", f"add one of {', '.join(OPERATORS)}")
    return _made(key, mark, dimension, tuple(checks), confidence)


def _made(
    key: str, mark: Mark, dimension: Dimension, checks: tuple[Check, ...], confidence: str | None = None
) -> Expectation:
    return Expectation(key=key, mark=mark, dimension=dimension, checks=checks, confidence=confidence)


def _check(operator: str, node: Node, dimension: Dimension) -> Check:
    if operator == "between":
        read = Many(of=dimension.number).read(node, operator)
        values = tuple(_si(value, item, dimension) for value, item in zip(read, node.items, strict=True))  # type: ignore[union-attr]
        if len(values) != 2 or values[0] > values[1]:
            raise node.mark.error("between needs the smallest and the largest", "write [100, 200]")
        return Check(operator=operator, values=values)
    if operator == "within":
        share, _, reference = dimension.within.read(node, operator).partition("% of ")
        if reference == "baseline":
            return Check(operator=operator, values=(float(share) / 100,), of_baseline=True)
        scalar = Scalar(text=reference, plain=True, mark=node.mark)
        value = _si(dimension.number.read(scalar, operator), scalar, dimension)
        return Check(operator=operator, values=(float(share) / 100, value))
    kind = dimension.scalar if operator == "equals" else dimension.number
    return Check(operator=operator, values=(_si(kind.read(node, operator), node, dimension),))


def _si(value: Any, node: Node, dimension: Dimension) -> Any:
    """A plain number has the key's unit; what had a unit of its own is in SI already."""
    plain = isinstance(node, Scalar) and number_of(node) is not None and not isinstance(value, str)
    return scaled(value, dimension.factor) if plain and dimension.factor != 1 else value


def find(answer: Mapping[str, Any], expectation: Expectation) -> Found:
    """The figure an expectation is about.

    Errors: InputError for a path the answer does not have; NotEvaluatedError for a figure that is not
    known, or a confidence of one that has no band.
    """
    holder, value = _walk(answer, expectation)
    if isinstance(value, Mapping) and "estimate" in value:
        if value["estimate"] is None and answer.get("fits") is False:
            raise NotEvaluatedError("the model does not fit, so there is no estimate")
        return _figure(value, expectation)
    if isinstance(value, Mapping | list | tuple):
        inner = sorted(value) if isinstance(value, Mapping) else [str(place) for place in range(len(value))]
        raise expectation.mark.error(
            f"{expectation.key} is not one figure", f"add one of its parts: {', '.join(inner[:8])}"
        )
    if value is None:
        raise NotEvaluatedError(f"{expectation.answer} does not know it (null)")
    if expectation.confidence in (None, "p50"):
        return Found(value=value)
    return _band(holder, value, expectation)


def _walk(answer: Mapping[str, Any], expectation: Expectation) -> tuple[Any, Any]:
    """The mapping that holds the figure, and the figure."""
    here: Any = answer
    holder: Any = answer
    parts = expectation.path
    for place, part in enumerate(parts):
        last = place == len(parts) - 1
        if here is None:
            raise NotEvaluatedError(f"{'.'.join((expectation.answer, *parts[:place]))} is not known (null)")
        name = _named(here, part)
        if name is None and last:
            name = _in_si(here, part, expectation.dimension)
        if name is None:
            raise expectation.mark.error(
                f"{expectation.answer} has no figure {'.'.join(parts)}",
                did_you_mean(part, _names(here), f"there are {', '.join(_names(here)[:8])}"),
            )
        holder, here = here, here[name]
    return holder, here


def _names(here: Any) -> list[str]:
    if isinstance(here, Mapping):
        return [name for name in here if name != "schema"]
    if isinstance(here, list | tuple):
        return [str(entry["name"]) for entry in here if isinstance(entry, Mapping) and "name" in entry]
    return []


def _named(here: Any, part: str) -> Any:
    """The key or index that a part of a path means; list entries go by number or by their name."""
    if isinstance(here, Mapping):
        return part if part in here else None
    if isinstance(here, list | tuple):
        if part.isdigit():
            return int(part) if int(part) < len(here) else None
        for place, entry in enumerate(here):
            if isinstance(entry, Mapping) and entry.get("name") == part:
                return place
    return None


def _in_si(here: Any, part: str, dimension: Dimension) -> str | None:
    """The name in SI of a figure asked for in another unit: ttft_ms → ttft_s, gib → bytes."""
    if not isinstance(here, Mapping) or dimension.amount is None:
        return None
    name = part.removesuffix(dimension.suffix) + ("_s" if dimension.name == "time" else "bytes")
    return name if name in here else None


def more_is_better(key: str) -> bool:
    """Whether a large figure is the good one: throughput, capacity and room; not times, needs and money."""
    last = key.split(".")
    rate = last[-1].endswith("_per_s")
    room = any(part.startswith(("max_", "headroom", "kv_pool", "goodput", "kv_tokens")) for part in last)
    return rate or room


def _figure(value: Mapping[str, Any], expectation: Expectation) -> Found:
    """An estimate, or the end of its P10–P90 band that the confidence asks for."""
    if value["estimate"] is None:
        raise NotEvaluatedError("there is a physical bound but no estimate")
    if expectation.confidence in (None, "p50"):
        return Found(value=value["estimate"], taken="the estimate (p50)")
    pessimistic_low = more_is_better(expectation.key)
    end = "low" if (expectation.confidence == "p90") == pessimistic_low else "high"
    if value.get(end) is None:
        raise NotEvaluatedError("the estimate has no band: leave confidence out")
    return Found(value=value[end], taken=_side(expectation.confidence or "", end))


def _side(confidence: str, end: str) -> str:
    side = "pessimistic" if confidence == "p90" else "optimistic"
    return f"{confidence}, the {side} side: the {end} end of the band"


def _band(holder: Any, value: Any, expectation: Expectation) -> Found:
    """The end of a band beside its figure: low_bytes and high_bytes beside bytes, X_band beside X."""
    pessimistic_low = more_is_better(expectation.key)
    end = "low" if (expectation.confidence == "p90") == pessimistic_low else "high"
    beside = holder.get(f"{expectation.path[-1]}_band") if isinstance(holder, Mapping) else None
    if isinstance(beside, Mapping) and beside.get(end) is not None:
        return Found(value=beside[end], taken=_side(expectation.confidence or "", end))
    name = f"{end}_bytes"
    if isinstance(holder, Mapping) and "low_bytes" in holder and name in {*holder, "high_bytes"}:
        return Found(value=holder.get(name, value), taken=_side(expectation.confidence or "", end))
    raise NotEvaluatedError("it has no band: leave confidence out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an expectation holds, `want` and `got` in words; None: not evaluated, which is a failure."""

    holds: bool | None
    want: str
    got: str


def judge(expectation: Expectation, found: Found, baseline: Any = None) -> Verdict:
    """Whether the figure meets every operator; `baseline` is the figure of the baseline file, in SI."""
    dimension, value = expectation.dimension, found.value
    if expectation.needs_baseline and baseline is None:
        return Verdict(holds=None, want=wanted(expectation), got="no baseline of it: give --baseline FILE")
    holds = True
    for check in expectation.checks:
        if check.operator != "equals" and not _is_number(value):
            raise expectation.mark.error(
                f"{expectation.key} is {shown(value)}, no number", "use equals, or write the value alone"
            )
        holds = holds and _meets(check, value, baseline)
    got = told(value, dimension)
    if not holds:
        # Where rounding hides the difference, all digits.
        bounds = {told(bound, dimension) for check in expectation.checks for bound in check.values}
        got = f"{got} ({value!r})" if got in bounds and _is_number(value) else got
    return Verdict(holds=holds, want=wanted(expectation, baseline), got=got)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _meets(check: Check, value: Any, baseline: Any) -> bool:
    low = high = check.values[0]
    if check.operator == "equals":
        same_kind = isinstance(value, bool) == isinstance(low, bool)
        return bool(same_kind and value == low)
    if check.operator == "at_most":
        return bool(value <= high)
    if check.operator == "at_least":
        return bool(value >= low)
    if check.operator == "between":
        return bool(low <= value <= check.values[1])
    reference = baseline if check.of_baseline else check.values[1]
    return bool(abs(value - reference) <= check.values[0] * abs(reference))


def wanted(expectation: Expectation, baseline: Any = None) -> str:
    """The expectation in words."""
    dimension = expectation.dimension
    parts = []
    for check in expectation.checks:
        first = check.values[0]
        if check.operator == "between":
            parts.append(f"between {told(first, dimension)} and {told(check.values[1], dimension)}")
        elif check.operator == "within":
            known = baseline if check.of_baseline else check.values[1]
            reference = "the baseline" if check.of_baseline else told(known, dimension)
            if check.of_baseline and known is not None:
                reference += f" ({told(known, dimension)})"
            parts.append(f"within {first * 100:g} % of {reference}")
        else:
            word = {"equals": "", "at_most": "at most ", "at_least": "at least "}[check.operator]
            parts.append(f"{word}{told(first, dimension)}")
    return " and ".join(parts)


def told(value: Any, dimension: Dimension) -> str:
    """A value as people read it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, int | float):
        return str(value)
    if dimension.name == "time":
        return format_seconds(value)
    if dimension.name == "size":
        return format_bytes(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return f"${text}" if dimension.name == "money" else text
