"""A topic of `capplan explain`: a formula's text, taken from its docstring, and its numbers, computed."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_LABELS: Final = re.compile(r"(Holds for|Not for|Source|Example): ")


class Line(NamedTuple):
    """One line of a worked example; `unit` is "B", "s", "token/s", "USD", "1" for a ratio, …"""

    text: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One thing to explain.

    `functions` names the formula functions the example calls, as "memory.kv_cache_bytes"; `command` is the
    command that answers the question for a model of the user's, or "".
    """

    id: str
    title: str
    formula: str
    holds: str
    source: str
    functions: tuple[str, ...]
    compute: Callable[[], tuple[Line, ...]]
    aliases: tuple[str, ...] = ()
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON of the topic with its example computed."""
        return {
            "id": self.id,
            "title": self.title,
            "formula": self.formula,
            "holds": self.holds,
            "source": self.source,
            "functions": list(self.functions),
            "example": [line._asdict() for line in self.compute()],
            "aliases": list(self.aliases),
            "command": self.command,
        }


def topic(
    identity: str,
    title: str,
    functions: tuple[Callable[..., Any], ...],
    compute: Callable[[], tuple[Line, ...]],
    *,
    holds: str = "",
    aliases: tuple[str, ...] = (),
    command: str = "",
) -> Topic:
    """A topic whose formula, validity and source are those of its functions' docstrings.

    `holds` replaces what the first function says of itself.
    """
    texts = [_sections(function) for function in functions]
    sources = dict.fromkeys(text["Source"].rstrip(".") for text in texts)
    own = texts[0]["Holds for"]
    if texts[0]["Not for"]:
        own += f" Not for: {texts[0]['Not for']}"
    return Topic(
        id=identity,
        title=title,
        formula="\n".join(text["formula"] for text in texts),
        holds=holds or own,
        source="; ".join(source for source in sources if source),
        functions=tuple(
            f"{function.__module__.rpartition('.')[2]}.{function.__name__}" for function in functions
        ),
        compute=compute,
        aliases=aliases,
        command=command,
    )


def _sections(function: Callable[..., Any]) -> dict[str, str]:
    """Formula (the indented lines) and labelled sentences of a formula's docstring; "" where absent."""
    made = dict.fromkeys(("formula", "Holds for", "Not for", "Source", "Example"), "")
    # Python started with -OO has no docstrings; the numbers remain.
    lines = (inspect.getdoc(function) or "").splitlines()
    made["formula"] = "\n".join(
        _named(line.strip(), function.__name__) for line in lines if line.startswith("    ")
    )
    prose = " ".join(line for line in lines if not line.startswith("    "))
    parts = _LABELS.split(prose)
    for label, text in zip(parts[1::2], parts[2::2], strict=True):
        made[label] = text.strip()
    return made


def _named(formula: str, name: str) -> str:
    """The formula with what it gives on its left; a remark stands two spaces off on its right."""
    text, _, remark = formula.partition("   ")
    left = text if " = " in text else f"{name} = {text}"
    return f"{left}  {remark.strip()}" if remark else left
