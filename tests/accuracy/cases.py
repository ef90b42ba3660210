"""Field cases: their figures restated beside the tests, and a list of those left with the reason.

A case is one public report by somebody who sizes LLM serving. `field_case` puts the figures a planner
should answer on a test; the test must compute and check every one of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

Figure = Any  # a value that must be equal, or (value, relative tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCase:
    """A report's id and source, and the figures a planner should answer."""

    id: str
    source: str
    figures: Mapping[str, Figure]
    checked: set[str] = field(default_factory=set)

    def check(self, name: str, got: object) -> None:
        """Compare one figure; equal, or within its relative tolerance."""
        want = self.figures[name]
        if isinstance(want, tuple):
            value, tolerance = want
            want = pytest.approx(value, rel=tolerance)
        assert got == want, f"{self.id} {name}: {got} instead of {self.figures[name]}"
        self.checked.add(name)


def field_case(
    identity: str, source: str, figures: Mapping[str, Figure] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Put a case on a test that takes the `case` fixture."""

    def put(test: Callable[..., None]) -> Callable[..., None]:
        made = FieldCase(id=identity, source=source, figures=figures or {})
        test.field_case = made  # type: ignore[attr-defined]
        return test

    return put


def cases_in(*modules: ModuleType) -> dict[str, FieldCase]:
    """Every case that has a test in these modules, by id."""
    made: dict[str, FieldCase] = {}
    for module in modules:
        for thing in vars(module).values():
            case = getattr(thing, "field_case", None)
            if isinstance(case, FieldCase):
                assert case.id not in made, case.id
                made[case.id] = case
    return made
