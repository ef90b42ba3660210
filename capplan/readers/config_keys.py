"""Strict access to a JSON or YAML mapping: typed, bounded, and every key accounted for."""

import math
from collections.abc import Mapping
from typing import Final

from capplan.errors import InputError, shown

MAX_WIDTH: Final = 1 << 31
MAX_LAYERS: Final = 4096
# The key by which a config made from a GGUF can be told from a publisher's.
GGUF_MARK: Final = "general.architecture"


class Keys:
    """A mapping read key by key; what nobody asked for can be listed afterwards.

    `where` is the file; `path` the mapping's place in it, so that errors name both; `defaults` are the
    values an architecture's class has for keys that its published files leave out.
    """

    def __init__(
        self,
        data: Mapping[str, object],
        *,
        where: str,
        path: str = "",
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self.data = data
        self.defaults = defaults or {}
        self.where = where
        self.path = path
        self.used: set[str] = set()
        # Nested mappings that were read, so that what they hold is accounted for too.
        self.children: dict[str, Keys] = {}

    def fail(self, key: str, problem: str, hint: str) -> InputError:
        """An error about one key, with its place."""
        name = f"{self.path}{key}"
        if not name.isprintable() or len(name) > 200:
            name = shown(name, 200)
        return InputError(f"{name}: {problem}", where=self.where, hint=hint)

    def present(self, *names: str) -> str | None:
        """The first of `names` that is there and not null; all of them count as read.

        A key written as null is an answer (none), so the architecture's default does not replace it.
        """
        self.used.update(names)
        for name in names:
            if self.data.get(name) is not None:
                return name
        if any(name in self.data for name in names):
            return None
        return next((name for name in names if self.defaults.get(name) is not None), None)

    def value(self, name: str) -> object:
        """The raw value of a key that is present, or its default."""
        return self.data[name] if self.data.get(name) is not None else self.defaults[name]

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_WIDTH) -> int:
        """An integer in [low, high]; without a default the key must be there."""
        value = self.optional_integer(*names, low=low, high=high)
        if value is not None:
            return value
        if default is None:
            raise self.fail(
                names[0],
                "missing",
                "the memory of this model cannot be computed without it; add "
                f"{names[0] if names[0].isprintable() else 'it'} to the file",
            )
        return default

    def optional_integer(self, *names: str, low: int = 1, high: int = MAX_WIDTH) -> int | None:
        """An integer in [low, high], or None when absent or null."""
        name = self.present(*names)
        if name is None:
            return None
        value = self.value(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"{shown(value)} is not a whole number", "write a plain integer")
        if not low <= value <= high:
            raise self.fail(name, f"{shown(value)} is outside {low} to {high}", "check the value in the file")
        return value

    def per_layer(
        self,
        index: int,
        *names: str,
        default: int | None = None,
        low: int = 1,
        high: int = MAX_WIDTH,
    ) -> int:
        """An integer that is the same in every layer, or the entry `index` of a list with one a layer."""
        name = self.present(*names)
        if name is None or not isinstance(self.value(name), list):
            return self.integer(*names, default=default, low=low, high=high)
        values = self.integers(name, low=low, high=high) or []
        if index >= len(values):
            raise self.fail(
                name, f"has {len(values)} entries, none for layer {index}", "give one for each layer"
            )
        return values[index]

    def number(self, *names: str, default: float | None = None) -> float | None:
        """A finite number, or the default."""
        name = self.present(*names)
        if name is None:
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, f"{shown(value)} is not a number", "write a plain number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            raise self.fail(name, f"{shown(value)} is not finite", "check the value in the file")
        return result

    def flag(self, *names: str, default: bool = False) -> bool:
        """A boolean, or the default when absent or null."""
        name = self.present(*names)
        if name is None:
            return default
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.fail(name, f"{shown(value)} is not true or false", "write true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str | None:
        """A string, or the default when absent or null."""
        name = self.present(*names)
        if name is None:
            return default
        value = self.value(name)
        if not isinstance(value, str):
            raise self.fail(name, f"{shown(value)} is not text", "write a string")
        return value

    def items(self, *names: str, high: int = MAX_LAYERS * 64) -> list[object] | None:
        """A list of bounded length, or None when absent or null."""
        name = self.present(*names)
        if name is None:
            return None
        value = self.value(name)
        if not isinstance(value, list):
            raise self.fail(name, f"{shown(value)} is not a list", "write a list")
        if len(value) > high:
            raise self.fail(name, f"{len(value)} entries are too many", f"at most {high}")
        return list(value)

    def integers(self, *names: str, low: int = 0, high: int = MAX_WIDTH) -> list[int] | None:
        """A list of integers in [low, high]."""
        values = self.items(*names)
        if values is None:
            return None
        made: list[int] = []
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise self.fail(
                    names[0],
                    f"{shown(value)} is not a whole number from {low} to {high}",
                    "check the list in the file",
                )
            made.append(value)
        return made

    def texts(self, *names: str) -> list[str] | None:
        """A list of strings."""
        values = self.items(*names)
        if values is None:
            return None
        for value in values:
            if not isinstance(value, str):
                raise self.fail(names[0], f"{shown(value)} is not text", "write a list of strings")
        return [str(value) for value in values]

    def child(self, *names: str) -> "Keys | None":
        """A nested mapping, or None when absent or null."""
        name = self.present(*names)
        if name is None:
            return None
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise self.fail(name, f"{shown(value)} is not a mapping", "write key: value pairs")
        if name not in self.children:
            self.children[name] = Keys(value, where=self.where, path=f"{self.path}{name}.")
        return self.children[name]

    def unused(self) -> list[str]:
        """Keys nobody asked for, in file order."""
        return [key for key in self.data if key not in self.used]
