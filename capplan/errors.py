"""Errors a user can act on, and the process's exit codes."""

from collections.abc import Iterable
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar


class ExitStatus(IntEnum):
    """What the process exit code means; stable, scripts depend on it."""

    OK = 0
    CRASH = 1
    INPUT = 2
    EXPECTATION = 3
    DOES_NOT_FIT = 4
    EXTRA_MISSING = 5
    NETWORK = 6
    INTERRUPTED = 130


class CapplanError(Exception):
    """An error in three lines: what is wrong, where it stands, what to do."""

    exit_status: ClassVar[ExitStatus] = ExitStatus.INPUT

    def __init__(self, message: str, *, where: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """How pickle makes it again, as on its way out of a worker process: with its keywords."""
        return partial(type(self), where=self.where, hint=self.hint), (self.message,)

    def __str__(self) -> str:
        return f"error: {self.message}\n  --> {self.where}\n  = help: {self.hint}"


class InputError(CapplanError):
    """The input cannot be used: unknown name or key, bad value, broken file."""


class DoesNotFitError(CapplanError):
    """No feasible plan exists where one had to be found."""

    exit_status = ExitStatus.DOES_NOT_FIT


class ExtraMissingError(CapplanError):
    """An optional dependency is not installed."""

    exit_status = ExitStatus.EXTRA_MISSING


class NetworkError(CapplanError):
    """Something over the network could not be reached."""

    exit_status = ExitStatus.NETWORK


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint that names the nearest known names, or `otherwise` when none is near."""
    import difflib  # 4 ms; only an error needs it

    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), list(lowered), n=3, cutoff=0.6)
    if not near:
        return otherwise
    return "did you mean " + " or ".join(lowered[match] for match in near) + "?"


def shown(value: object, limit: int = 60) -> str:
    """`value` as it may stand in a one-line message: escaped and shortened."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
