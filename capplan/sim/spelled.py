"""A distribution as one word on the command line: `kind`, `kind:value` or `kind:key=value,key=value`."""

import math
from collections.abc import Mapping

from capplan.errors import InputError, did_you_mean, shown


def split_kind(text: str, forms: Mapping[str, str], where: str) -> tuple[str, str]:
    """The kind (a key of `forms`) and what follows its colon; `forms` maps a kind to an example of it."""
    kind, _, rest = text.strip().partition(":")
    if kind not in forms:
        hint = did_you_mean(kind, forms, "one of: " + "  ".join(forms.values()))
        raise InputError(f"{shown(kind)} is no kind known here", where=where, hint=hint)
    return kind, rest.strip()


def key_values(rest: str, known: tuple[str, ...], where: str, example: str) -> dict[str, float]:
    """`key=value,…` as finite numbers; keys not in `known` and keys given twice are errors."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise InputError(f"{shown(part)} is not key=value", where=where, hint=f"as in {example}")
        if key not in known:
            hint = did_you_mean(key, known, f"keys: {', '.join(known)}; as in {example}")
            raise InputError(f"unknown key {shown(key)}", where=where, hint=hint)
        if key in found:
            raise InputError(f"{key} is given twice", where=where, hint="give it once")
        found[key] = finite(value, key, where, example)
    return found


def finite(text: str, name: str, where: str, example: str) -> float:
    """`text` as a finite number of at least zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise InputError(
            f"{name} is {shown(text)}, no number from 0 up", where=where, hint=f"as in {example}"
        )
    return value


def whole(text: str, name: str, where: str, example: str, *, low: int, high: int) -> int:
    """`text` as a whole number in low..high."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value.is_integer() and low <= value <= high):
        raise InputError(
            f"{name} is {shown(text)}, no whole number from {low} to {high:,}",
            where=where,
            hint=f"as in {example}",
        )
    return int(value)
