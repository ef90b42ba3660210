"""Which format a module of a quantized checkpoint has, by the patterns of its config."""

import fnmatch
import re

from capplan.specs import Format, Quantization

_LAYER = re.compile(r"^.*?layers\.")


def _tail(path: str) -> str:
    """A module path from "layers." on: wrappers prefix it differently in config and model."""
    return _LAYER.sub("layers.", path) if "layers." in path else path.rsplit("model.", 1)[-1]


class FormatMatcher:
    """Which format a module path has, by the checkpoint's keep list and rules."""

    def __init__(self, quantization: Quantization) -> None:
        self.keep = _Patterns(quantization.keep)
        self.rules = [
            (_Patterns(patterns), stored, patterns == ("Linear",)) for patterns, stored in quantization.rules
        ]

    def find(self, path: str) -> Format | None:
        """The format, or None where the module stays at the model's dtype."""
        # One expert stands for all: no published list treats them apart.
        path = path.replace(".experts.*.", ".experts.0.")
        if self.keep.match(path):
            return None
        for patterns, stored, everything in self.rules:
            if everything or patterns.match(path):
                return stored
        return None


class _Patterns:
    """A list of module patterns (see Quantization), prepared for many paths."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.words = {p for p in patterns if "." not in p and "*" not in p and ":" not in p}
        self.literals = {_tail(p) for p in patterns if "." in p and "*" not in p and not p.startswith("re:")}
        self.regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
        globs = [p for p in patterns if "*" in p and not p.startswith("re:")]
        bodies = [f"(?:{fnmatch.translate(_tail(p))})" for p in globs]
        bodies += [f"(?:{fnmatch.translate(_tail(p) + '.*')})" for p in globs]
        self.globs = re.compile("|".join(bodies)) if bodies else None

    def match(self, path: str) -> bool:
        """Whether a pattern names this module or one that contains it."""
        segments = path.split(".")
        if not self.words.isdisjoint(segments):
            return True
        tail = _tail(path)
        if self.literals:
            parts = tail.split(".")
            if any(".".join(parts[:end]) in self.literals for end in range(1, len(parts) + 1)):
                return True
        if self.globs is not None and (self.globs.match(tail) or self.globs.match(path)):
            return True
        return any(regex.match(path) for regex in self.regexes)
