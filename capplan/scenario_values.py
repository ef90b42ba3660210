"""Scalars of a scenario → values, by the kind their key has, and the same kinds as JSON Schema.

Each kind says once what is allowed: `read` turns a node into a value, `schema` is its JSON Schema, and the
two accept the same. Numbers may be spelled 64, 1e3 or 1.5e6; spellings that YAML readers disagree on (`no`,
`017`, `1_000`, `1:30`, `0x10`) are refused with the spelling that all agree on.
"""

import datetime
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from capplan.errors import InputError, did_you_mean, shown
from capplan.scenario_yaml import Node, Scalar, Sequence
from capplan.units import GB, GIB, KIB, MIB, TERA

LARGEST: Final = 1 << 53
"""Whole numbers beyond this are not exact in JSON."""
TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SIZE_UNITS: Final = {
    "KB": 10**3, "MB": 10**6, "GB": GB, "TB": TERA,
    "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40,
}  # fmt: skip
# As vLLM reads --max-model-len: k is a thousand, K is 1,024.
TOKEN_UNITS: Final = {"k": 10**3, "m": 10**6, "K": KIB, "M": MIB, "Ki": KIB, "Mi": MIB}
COUNT_UNITS: Final = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}

_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_AMOUNT: Final = r"(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,6})?"
_BOOLEANS_1_1: Final = frozenset("y yes n no on off".split())
_WORD_HINTS: Final = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}


class Kind(Protocol):
    """What a key's value may be."""

    def read(self, node: Node, name: str) -> Any:
        """The value; InputError at the node otherwise."""

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the same."""


def pitfall(scalar: Scalar) -> str | None:
    """What a plain scalar would be to some YAML reader although it looks otherwise; None where all agree."""
    text = scalar.text
    if not scalar.plain:
        return None
    if text.lower() in _BOOLEANS_1_1:
        return "a boolean to YAML 1.1 readers and text to others"
    if re.fullmatch(r"[-+]?0[0-9_]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", text, re.ASCII):
        return "a number with leading zeros: octal to some YAML readers, decimal to others"
    if re.fullmatch(r"[-+]?0[xob][0-9A-Fa-f_]+", text, re.ASCII):
        return "a number in another base"
    if re.fullmatch(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?", text, re.ASCII):
        return "a number with underscores to some YAML readers, text to others"
    if re.fullmatch(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", text, re.ASCII):
        return "a number in base 60 to some YAML readers, text to others"
    if re.fullmatch(r"[-+]?\.(inf|nan)", text, re.ASCII | re.IGNORECASE):
        return "no finite number"
    return None


def spelled(scalar: Scalar) -> str:
    """What a scalar is to a YAML 1.2 reader: text, number, boolean, null or date."""
    text = scalar.text
    if not scalar.plain:
        return "text"
    if text in ("", "~", "null", "Null", "NULL"):
        return "null"
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return "boolean"
    if _NUMBER.fullmatch(text):
        return "number"
    return "date" if re.fullmatch(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*", text, re.ASCII) else "text"


def scalar_of(node: Node, name: str, wanted: str) -> Scalar:
    """The node as a scalar that all YAML readers read alike."""
    if not isinstance(node, Scalar):
        what = "a list" if isinstance(node, Sequence) else "a mapping"
        raise node.mark.error(f"{name} is {what}", f"write {wanted}")
    trap = pitfall(node)
    if trap is not None:
        raise node.mark.error(f"{name}: {node.text} is {trap}", _unambiguous(node.text, wanted))
    if spelled(node) == "null":
        raise node.mark.error(f"{name} has no value", f"write {wanted}, or leave the key out")
    return node


def _unambiguous(text: str, wanted: str) -> str:
    word = _WORD_HINTS.get(text.lower())
    digits = text.replace("_", "").lstrip("+-").lstrip("0") or "0"
    number = digits if digits.replace(".", "", 1).isdigit() else None
    if wanted == "true or false" and word:
        return f"write {word}"
    if wanted.startswith("text"):
        return f'write "{text}" for the text' + (f", {word} for a boolean" if word else "")
    return f"write {number}" if number else f"write {wanted}"


def number_of(scalar: Scalar) -> float | int | None:
    """The number a scalar spells; whole ones as int. None where it is no number."""
    if spelled(scalar) != "number":
        return None
    text = scalar.text
    if re.fullmatch(r"[-+]?[0-9]+", text, re.ASCII):
        return int(text) if len(text) < 20 else float(text)
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= LARGEST else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text that is not empty; one of `choices` where there are any; none of `refused`, in any case."""

    example: str = "a name"
    choices: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    why: str = ""

    def read(self, node: Node, name: str) -> str:
        scalar = scalar_of(node, name, f"text, such as {self.example}")
        kind = spelled(scalar)
        if kind != "text":
            raise scalar.mark.error(
                f"{name} is a {kind} to YAML: {scalar.text}", f'write "{scalar.text}" with quotes'
            )
        if not scalar.text.strip():
            raise scalar.mark.error(f"{name} is empty", f"write {self.example}, or leave the key out")
        if any(ord(char) < 32 or char in "\x7f\x85\u2028\u2029" for char in scalar.text):
            raise scalar.mark.error(f"{name} has line breaks or control characters", "write one line")
        if scalar.text.lower() in self.refused:
            raise scalar.mark.error(f"{name}: {shown(scalar.text)} is not allowed here", self.why)
        if self.choices and scalar.text not in self.choices:
            hint = did_you_mean(scalar.text, self.choices, f"one of {', '.join(self.choices)}")
            raise scalar.mark.error(f"{name}: {shown(scalar.text)} is not known", hint)
        return scalar.text

    def schema(self) -> dict[str, Any]:
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        words = ["".join(f"[{char.lower()}{char.upper()}]" for char in word) for word in self.refused]
        more = [{"not": {"pattern": f"^(?:{'|'.join(words)})$"}}] if words else []
        return {
            "type": "string",
            "pattern": "^[^\\u0000-\\u001f\\u007f\\u0085\\u2028\\u2029]*$",
            "allOf": [{"pattern": "[^\\s]"}, *more],
            "examples": [self.example],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """true or false."""

    def read(self, node: Node, name: str) -> bool:
        scalar = scalar_of(node, name, "true or false")
        if spelled(scalar) != "boolean":
            raise scalar.mark.error(f"{name}: {shown(scalar.text)} is no boolean", "write true or false")
        return scalar.text.lower() == "true"

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number from `low` (or above it) to `high`; `whole` ones only, and `word` where it is allowed too."""

    low: float = 0
    high: float = LARGEST
    above: bool = False
    whole: bool = False
    word: str | None = None

    def read(self, node: Node, name: str) -> float | int | str:
        what = "a whole number" if self.whole else "a number"
        wanted = f"{what} such as {self._example():g}" + (f", or {self.word}" if self.word else "")
        scalar = scalar_of(node, name, wanted)
        if self.word and scalar.text == self.word:
            return self.word
        value = number_of(scalar)
        if value is None or (self.whole and not isinstance(value, int)):
            raise scalar.mark.error(f"{name}: {shown(scalar.text)} is not {what}", f"write {wanted}")
        return self.in_range(value, scalar, name)

    def _example(self) -> float:
        return self.high if self.high <= 1 else max(self.low, 1)

    def in_range(self, value: float | int, scalar: Scalar, name: str) -> float | int:
        """The value; InputError outside the range."""
        below = value <= self.low if self.above else value < self.low
        if below or not value <= self.high:
            least = f"above {self.low:g}" if self.above else f"from {self.low:g}"
            most = f" to {self.high:,}" if self.high != LARGEST else ""
            raise scalar.mark.error(f"{name}: {scalar.text} is out of range", f"{least}{most}")
        return value

    def schema(self) -> dict[str, Any]:
        made: dict[str, Any] = {"type": "integer" if self.whole else "number", "maximum": self.high}
        made["exclusiveMinimum" if self.above else "minimum"] = self.low
        return {"anyOf": [made, {"const": self.word}]} if self.word else made


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Text of a number and a unit, and what it is in SI; `whole` amounts are integers.

    `bare` is what a number without a unit may be; None: it has no meaning and is refused.
    """

    units: dict[str, float] | dict[str, int]
    example: str
    whole: bool = False
    bare: Number | None = None
    suffixed: str = ""

    @property
    def pattern(self) -> str:
        units = "|".join(self.units)
        # Whole amounts: decimals only of what a thousand makes whole again.
        if self.whole:
            decimal = "|".join(unit for unit, factor in self.units.items() if factor % 1000 == 0)
            binary = "|".join(unit for unit, factor in self.units.items() if factor % 1000)
            parts = [f"[1-9][0-9]{{0,5}}(?:\\.[0-9]{{1,3}})?(?:{decimal})"] if decimal else []
            parts += [f"[1-9][0-9]{{0,5}}(?:{binary})"] if binary else []
            return f"^(?:{'|'.join(parts)})$"
        return f"^{_AMOUNT} ?(?:{units})$"

    def read(self, node: Node, name: str) -> float | int:
        wanted = self.example
        scalar = scalar_of(node, name, wanted)
        value = number_of(scalar)
        if value is not None:
            if self.bare is None:
                raise scalar.mark.error(
                    f"{name}: {scalar.text} has no unit", f"write {wanted}{self.suffixed}"
                )
            return Number.read(self.bare, node, name)  # type: ignore[return-value]
        amount = parse_amount(scalar.text, self)
        if amount is None:
            hint = did_you_mean(_unit_of(scalar.text), self.units, f"write {wanted}")
            hint = f"write {wanted} (units: {', '.join(self.units)})" if hint.startswith("did") else hint
            raise scalar.mark.error(f"{name}: {shown(scalar.text)} is not understood", hint)
        return amount

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "pattern": self.pattern, "examples": [self.example]}
        return {"anyOf": [self.bare.schema(), text]} if self.bare else text


def scaled(value: float | int, factor: float) -> float | int:
    """value · factor, as exact as decimals are: 4e5 µs are 0.4 s, not 0.39999999999999997."""
    return value / round(1 / factor) if factor < 1 else value * factor


def parse_amount(text: str, kind: Amount) -> float | int | None:
    """SI of "500ms", "24GiB", "8k"; None where the text is none of the kind."""
    if re.fullmatch(kind.pattern[1:-1], text, re.ASCII) is None:
        return None
    unit = _unit_of(text)
    digits, factor = text.removesuffix(unit).strip(), kind.units[unit]
    if not kind.whole:
        # Bytes come whole.
        amount = scaled(float(digits), factor)
        return round(amount) if isinstance(factor, int) else amount
    # In integers: 1.001k is 1,001, not 1,000.9999.
    head, _, tail = digits.partition(".")
    return int(head) * int(factor) + (int(tail) * int(factor) // 10 ** len(tail) if tail else 0)


def _unit_of(text: str) -> str:
    match = re.search(r"[A-Za-z]+$", text, re.ASCII)
    return match.group() if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Text of one form, and how it is read."""

    pattern: str
    example: str
    parse: Callable[[str], Any]
    plain: tuple[str, ...] = ("text",)

    def read(self, node: Node, name: str) -> Any:
        scalar = scalar_of(node, name, self.example)
        if (
            spelled(scalar) not in self.plain
            or re.fullmatch(self.pattern[1:-1], scalar.text, re.ASCII) is None
        ):
            raise scalar.mark.error(
                f"{name}: {shown(scalar.text)} is not understood", f"write {self.example}"
            )
        try:
            return self.parse(scalar.text)
        except ValueError:
            raise scalar.mark.error(
                f"{name}: {shown(scalar.text)} does not exist", f"write {self.example}"
            ) from None

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": self.pattern, "examples": [self.example]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Either:
    """The first of several kinds that reads the value; the last one's error otherwise."""

    kinds: tuple[Kind, ...]

    def read(self, node: Node, name: str) -> Any:
        for kind in self.kinds[:-1]:
            try:
                return kind.read(node, name)
            except InputError:
                continue
        return self.kinds[-1].read(node, name)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [kind.schema() for kind in self.kinds]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """A list of one kind, not empty; as a tuple."""

    of: Kind

    def read(self, node: Node, name: str) -> tuple[Any, ...]:
        if not isinstance(node, Sequence):
            raise node.mark.error(f"{name} is no list", f"write {name}: [ … ]")
        if not node.items:
            raise node.mark.error(f"{name} is empty", "leave the key out")
        return tuple(self.of.read(item, name) for item in node.items)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "minItems": 1, "items": self.of.schema()}


WHOLE: Final = Number(low=1, whole=True)
FROM_ZERO: Final = Number(whole=True)
TOKENS: Final = Amount(units=TOKEN_UNITS, example="8192, 8k (8,000) or 8K (8,192)", whole=True, bare=WHOLE)
COUNT: Final = Amount(units=COUNT_UNITS, example="70b", whole=True, bare=WHOLE)
TIME: Final = Amount(units=TIME_UNITS, example="500ms")
SIZE: Final = Amount(units=SIZE_UNITS, example="24GiB")
# Quoted: YAML 1.1 readers make a date of it, others text.
DAY: Final = Pattern(
    pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$", example='"2026-01-31"', parse=datetime.date.fromisoformat
)
