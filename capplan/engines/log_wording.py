"""Wordings: the phrases of an engine's log as data, and how their text becomes values."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from capplan.engines.log_record import FIELDS, SHOWN_CHARS, Line, Notes, Value, unit_of
from capplan.units import GIB, KIB, MIB

# Every engine divides by a power of two whatever letters it prints after the number: vLLM's "GB" before
# 0.8, SGLang's "GB", llama.cpp's old "MB" and TensorRT-LLM's "GB" are GiB, GiB, MiB and GiB.
_UNIT_BYTES = {
    **{"b": 1, "bytes": 1, "byte": 1, "kb": KIB, "kib": KIB, "mb": MIB, "mib": MIB},
    **{"gb": GIB, "gib": GIB, "tb": KIB * GIB, "tib": KIB * GIB},
}

Handler = Callable[[Notes, Line, re.Match[str]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """One phrase of an engine and what it carries.

    `tail` is matched right after `literal`. Its named groups are fields (or numbers of the refusal
    `reason`); a group `<field>_u` holds the printed unit, else `unit` is meant. `then` replaces that.
    """

    literal: str
    tail: re.Pattern[str]
    unit: str = "bytes"
    reason: str | None = None
    weak: bool = False
    add: bool = False
    least: bool = False
    engine_wide: bool = False
    then: Handler | None = None


def wording(
    literal: str,
    tail: str = "",
    *,
    unit: str = "bytes",
    reason: str | None = None,
    weak: bool = False,
    add: bool = False,
    least: bool = False,
    engine_wide: bool = False,
    then: Handler | None = None,
) -> Wording:
    """A wording from the text of its tail's pattern."""
    return Wording(
        literal=literal,
        tail=re.compile(tail, re.ASCII),
        unit=unit,
        reason=reason,
        weak=weak,
        add=add,
        least=least,
        engine_wide=engine_wide,
        then=then,
    )


def count(name: str) -> str:
    """A pattern for a number, thousands separators allowed, as the group `name`."""
    return rf"\s{{0,16}}(?P<{name}>-?\d[\d,]{{0,20}}(?:\.\d{{1,17}})?)"


def size(name: str) -> str:
    """A pattern for a number and its unit, as the groups `name` and `name`_u."""
    return count(name) + rf"\s{{0,4}}(?P<{name}_u>[KMGTkmgt]?[Ii]?[Bb](?:ytes)?)\b"


def apply(phrase: Wording, line: Line, notes: Notes) -> bool:
    """Whether the line has the wording; what it carries is noted."""
    at = line.text.find(phrase.literal)
    if at < 0:
        return False
    match = phrase.tail.match(line.text, at + len(phrase.literal))
    if match is None:
        return False
    if phrase.then is not None:
        phrase.then(notes, line, match)
        return True
    values = dict(values_of(match, phrase.unit))
    if phrase.reason is not None:
        notes.refuse(line, phrase.reason, values)
    where = replace(line, rank=None) if phrase.engine_wide else line
    for name, value in values.items():
        if name in FIELDS:
            notes.put(where, name, value, weak=phrase.weak, add=phrase.add, least=phrase.least)
    return True


def values_of(match: re.Match[str], unit: str = "bytes") -> Iterator[tuple[str, Value]]:
    """The named groups of a match as values; groups that did not take part are left out."""
    groups = match.groupdict()
    for name, text in groups.items():
        if text is None or name.endswith("_u"):
            continue
        value = parse(name, text, groups.get(f"{name}_u") or unit)
        if value is not None:
            yield name, value


def parse(name: str, text: str, unit: str = "bytes") -> Value | None:
    """The value of a field from its printed text; None for "None" and for what cannot be read."""
    text = text.strip().strip("'\"")
    if text in ("", "None", "null"):
        return None
    kind = unit_of(name)
    if kind == "str":
        return text[:SHOWN_CHARS]
    if kind == "bool":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    try:
        number = float(_plain_number(text.split(maxsplit=1)[0]))
    except ValueError:
        return None
    if number != number or abs(number) > 1e18:
        return None
    if kind == "bytes":
        return round(number * _UNIT_BYTES.get(unit.lower(), 1))
    return number if kind == "float" else round(number)


def _plain_number(text: str) -> str:
    """The number without thousands separators; "1900,00" is a decimal comma, "32,768" is not."""
    if len(text) > 40:
        raise ValueError("too long for a number")
    head, comma, last = text.rpartition(",")
    if comma and "." not in text and "," not in head and len(last) <= 2:
        return f"{head}.{last}"
    return text.replace(",", "")


def key_values(text: str) -> Iterator[tuple[str, str]]:
    """The top-level pairs of `a=1, b='x', c=C(d=2)` or `{'a': 1}`, with or without the outer brackets.

    Nested values come as their text. One pass over at most 64 KiB; whatever the text, it ends.
    """
    depth = start = 0
    quote = ""
    base = 1 if text.lstrip()[:1] in ("{", "(") else 0
    for at, char in enumerate(text):
        if quote:
            if char == quote and text[at - 1] != "\\":
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
            if depth <= base:
                start = at + 1
        elif char in ")]}":
            depth -= 1
            if depth < base:
                break
        elif char == "," and depth == base:
            yield from _pair(text[start:at])
            start = at + 1
    else:
        at = len(text)
    yield from _pair(text[start:at])


_PAIR = re.compile(
    r"\s{0,64}['\"]?(?P<key>[A-Za-z_]\w{0,60})['\"]?\s{0,4}[=:]\s{0,4}(?P<value>.*)", re.DOTALL
)


def _pair(text: str) -> Iterator[tuple[str, str]]:
    match = _PAIR.match(text)
    if match is not None:
        yield match["key"], match["value"].strip()
