"""Scenarios before and after: what moved, how far, and whether scenario, catalog or calibration moved it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan import snapshot
from capplan.diff_sides import side
from capplan.expectation import Dimension, dimension_of, told
from capplan.origins import PROGRAM, SCENARIO
from capplan.snapshot import WATCHED, Snapshot

_DIGITS: Final = 1e-9
"""Relative differences below this are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One figure before and after, in SI; None: not known."""

    name: str
    key: str
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """After less before."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def percent(self) -> float | None:
        """The change in percent of before; None where before is 0 or not known."""
        return None if self.change is None or not self.before else 100 * self.change / self.before

    @property
    def moved(self) -> bool:
        """Whether the figure is another one."""
        if self.before is None or self.after is None:
            return self.before is not self.after
        return abs(self.after - self.before) > _DIGITS * max(abs(self.before), abs(self.after))

    @property
    def dimension(self) -> Dimension:
        """What the figure measures."""
        return dimension_of(self.key.removesuffix(".estimate"))

    def to_dict(self) -> dict[str, Any]:
        """JSON of the figure."""
        return {
            "name": self.name,
            "key": self.key,
            "before": self.before,
            "after": self.after,
            "change": self.change,
            "percent": self.percent,
            "moved": self.moved,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One scenario on both sides; `before` or `after` None: it is only on one."""

    identity: str
    before: Snapshot | None
    after: Snapshot | None

    @property
    def kind(self) -> str:
        """added, removed, moved, or same: no figure is another one."""
        if self.before is None or self.after is None:
            return "added" if self.before is None else "removed"
        return "moved" if any(move.moved for move in self.moves) else "same"

    @property
    def moves(self) -> tuple[Move, ...]:
        """Every watched figure that either side knows."""
        made = []
        for name, key in WATCHED.items():
            before = None if self.before is None else self.before.watched[name]
            after = None if self.after is None else self.after.watched[name]
            if before is not None or after is not None:
                made.append(Move(name=name, key=key, before=before, after=after))
        return tuple(made)

    @property
    def causes(self) -> tuple[str, ...]:
        """What differs between the sides, in words: keys of the scenario, catalog, calibrations, program."""
        if self.before is None or self.after is None:
            return ()
        return tuple(_causes(self.before, self.after))

    def to_dict(self) -> dict[str, Any]:
        """JSON of the scenario."""
        return {
            "scenario": self.identity,
            "kind": self.kind,
            "figures": [move.to_dict() for move in self.moves],
            "causes": list(self.causes),
            "origins_before": dict(self.before.origins) if self.before else None,
            "origins_after": dict(self.after.origins) if self.after else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The answer of `capplan diff`."""

    old: str
    new: str
    changes: tuple[Change, ...]

    def of_kind(self, *kinds: str) -> list[Change]:
        """The scenarios of these kinds."""
        return [change for change in self.changes if change.kind in kinds]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `capplan diff` (schema capplan.diff/1)."""
        return {
            "schema": "capplan.diff/1",
            "old": self.old,
            "new": self.new,
            "counts": {kind: len(self.of_kind(kind)) for kind in ("moved", "same", "added", "removed")},
            "scenarios": [change.to_dict() for change in self.changes],
        }


def diff(old: str, new: str) -> DiffReport:
    """Compare two sides: files, folders, git revisions as main:scenarios/, or baseline files.

    Errors: InputError for a side that is not there, and for a scenario that cannot be read or planned.
    """
    before, after = side(old), side(new)
    if len(before) == len(after) == 1 and before.keys() != after.keys():
        # Two files by name: they are meant to be compared, whatever they are called.
        before = dict(zip(after, before.values(), strict=True))
    return DiffReport(
        old=old,
        new=new,
        changes=tuple(
            Change(identity=name, before=before.get(name), after=after.get(name))
            for name in sorted(before.keys() | after.keys())
        ),
    )


def _causes(before: Snapshot, after: Snapshot) -> Iterator[str]:
    if before.origins.get(SCENARIO) != after.origins.get(SCENARIO):
        keys = [
            key for key in {**before.asked, **after.asked} if before.asked.get(key) != after.asked.get(key)
        ]
        yield "scenario: " + ", ".join(_changed(key, before.asked, after.asked) for key in keys)
    names = sorted((before.origins.keys() | after.origins.keys()) - {SCENARIO, PROGRAM})
    both = [name for name in names if name in before.origins and name in after.origins]
    others = [name for name in both if before.origins[name] != after.origins[name]]
    for kind in ("catalog", "calibration", "file"):
        found = [name.partition("/")[2] for name in others if name.startswith(f"{kind}/")]
        if found:
            yield f"{kind}: {', '.join(found)}"
    if before.origins.get(PROGRAM) != after.origins.get(PROGRAM):
        yield f"capplan: {before.origins.get(PROGRAM)} → {after.origins.get(PROGRAM)}"


def _changed(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    def said(values: Mapping[str, Any]) -> str:
        return str(values[key]) if key in values else "none"

    return f"{key} {said(before)} → {said(after)}"


def signed(move: Move) -> str:
    """The change with its sign; "" where a side is not known."""
    if move.change is None:
        return ""
    sign = "+" if move.change >= 0 else "−"
    return sign + told(abs(move.change), move.dimension)


def signed_percent(move: Move) -> str:
    """The change in percent with its sign."""
    if move.percent is None:
        return ""
    sign = "+" if move.percent >= 0 else "−"
    digits = 1 if abs(move.percent) < 100 else 0
    return f"{sign}{abs(move.percent):,.{digits}f} %"


__all__ = ["Change", "DiffReport", "Move", "diff", "signed", "signed_percent", "snapshot"]
