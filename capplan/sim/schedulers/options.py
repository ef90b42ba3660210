"""A scheduler's options as they are spelled: `tgi:waiting_served_ratio=1.2,max_waiting_tokens=10`."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from capplan.errors import InputError, did_you_mean, shown
from capplan.sim import spelled

WHERE: Final = "--scheduler"
MAX_STEPS: Final = 1_000_000
MAX_FACTOR: Final = 1000.0

Option = Callable[[str, str], Any]
"""(the option's name, its text) → its value; InputError for another text."""


def factor(name: str, text: str) -> float:
    """A number from 0 up."""
    value = spelled.finite(text, name, WHERE, f"{name}=0.5")
    if value > MAX_FACTOR:
        raise InputError(f"{name} is {value:g}", where=WHERE, hint=f"0 to {MAX_FACTOR:g}")
    return value


def steps(name: str, text: str) -> int:
    """A count of engine steps."""
    return spelled.whole(text, name, WHERE, f"{name}=20", low=0, high=MAX_STEPS)


def on_off(name: str, text: str) -> bool:
    """true or false."""
    word: str = one_of("true", "false")(name, text)
    return word == "true"


def one_of(*words: str) -> Option:
    """One of some words."""

    def read_word(name: str, text: str) -> str:
        if text.lower() not in words:
            raise InputError(f"{name} is {shown(text)}", where=WHERE, hint=f"one of {', '.join(words)}")
        return text.lower()

    return read_word


def read(rest: str, known: Mapping[str, Option], scheduler: str) -> dict[str, Any]:
    """The options that `rest` spells; InputError for one unknown to the scheduler, or given twice."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        name, equals, text = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise InputError(f"{shown(part)} is not option=value", where=WHERE, hint=_hint(known, scheduler))
        if name not in known:
            hint = did_you_mean(name, known, _hint(known, scheduler))
            raise InputError(f"{scheduler} has no option {shown(name)}", where=WHERE, hint=hint)
        if name in found:
            raise InputError(f"{name} is given twice", where=WHERE, hint="give it once")
        found[name] = known[name](name, text)
    return found


def _hint(known: Mapping[str, Option], scheduler: str) -> str:
    return f"{scheduler}:{'=…,'.join(known)}=…" if known else f"{scheduler} has no options"
