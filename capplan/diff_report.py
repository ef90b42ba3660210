"""The report of `capplan diff`: terminal, Markdown, CSV. Nothing is compared here."""

from typing import TYPE_CHECKING, Any, Final

from capplan.diff import Change, DiffReport, Move, signed, signed_percent
from capplan.expectation import told
from capplan.report import to_markdown

if TYPE_CHECKING:
    from rich.console import RenderableType

MARKER: Final = "<!-- capplan diff -->"
_SIGNS: Final = {"moved": "~", "added": "+", "removed": "-", "same": " "}


def _side(move: Move, value: float | None) -> str:
    return "–" if value is None else told(value, move.dimension)


def summary(report: DiffReport) -> str:
    """The counts in one line."""
    total = len(report.changes)
    parts = [f"{len(report.of_kind(kind))} {word}" for kind, word in _WORDS if report.of_kind(kind)]
    return f"{total} scenario{'' if total == 1 else 's'}: {', '.join(parts)}"


_WORDS: Final = (("moved", "moved"), ("same", "the same"), ("added", "added"), ("removed", "removed"))


def cause(change: Change) -> str:
    """Why the figures moved."""
    return "; ".join(change.causes) or "nothing that is recorded"


def view(report: DiffReport) -> list["RenderableType"]:
    """Each scenario that differs, its figures before and after, and why."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    made: list[RenderableType] = []
    for change in report.of_kind("moved", "added", "removed"):
        made.append(Text(f"{_SIGNS[change.kind]} {change.identity}", style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        for _ in range(4):
            table.add_column(justify="right", no_wrap=True)
        for move in change.moves:
            if change.kind == "moved" and not move.moved:
                continue
            sides = [_side(move, move.before), _side(move, move.after)]
            table.add_row(f"    {move.name}", *sides, signed(move), signed_percent(move))
        made.append(table)
        if change.kind == "moved":
            made.append(Padding(Text(f"moved by {cause(change)}", style="dim"), (0, 0, 0, 4)))
    return [*made, *([Text("")] if made else []), Text(summary(report))]


def rows(report: DiffReport) -> list[dict[str, Any]]:
    """One row a figure, for CSV."""
    return [
        {
            "scenario": change.identity,
            "kind": change.kind,
            "figure": move.name,
            "before": move.before,
            "after": move.after,
            "change": move.change,
            "percent": move.percent,
            "causes": "; ".join(change.causes),
        }
        for change in report.changes
        for move in change.moves
    ]


def markdown(report: DiffReport) -> str:
    """A comment for a pull request."""
    lines = [MARKER, f"### capplan diff: {summary(report)}", ""]
    for change in report.of_kind("moved", "added", "removed"):
        lines += [f"**{change.identity}** ({change.kind})", ""]
        table = [
            {
                "figure": move.name,
                "before": _side(move, move.before),
                "after": _side(move, move.after),
                "change": signed(move),
                "%": signed_percent(move),
            }
            for move in change.moves
            if change.kind != "moved" or move.moved
        ]
        lines += [to_markdown(table)]
        lines += [f"Moved by {cause(change)}.", ""] if change.kind == "moved" else []
    return "\n".join(lines).rstrip("\n") + "\n"
