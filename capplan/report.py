"""Answers as text: terminal tables (rich), Markdown, CSV. Nothing here prints or computes a figure."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from capplan.units import KIB, format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from capplan.topics import Topic


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a header; empty cells for None."""
    import csv
    import io

    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; empty cells for None."""
    if not rows:
        return ""

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    head = list(rows[0])
    body = [line(["" if row[key] is None else str(row[key]) for key in head]) for row in rows]
    return "\n".join([line(head), line(["---"] * len(head)), *body]) + "\n"


def grid() -> "Table":
    from rich.table import Table

    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def step_view(steps: tuple[str, ...]) -> list["RenderableType"]:
    """The lines of --explain."""
    from rich.text import Text

    if not steps:
        return []
    return [Text(""), Text("how the numbers come about", style="bold"), *map(Text, steps)]


def topic_view(topic: "Topic") -> list["RenderableType"]:
    """A topic on the terminal: formula, where it holds, worked numbers, source."""
    from rich.text import Text

    made = [Text(topic.title, style="bold"), Text("")]
    made += [Text(f"  {line}") for line in topic.formula.splitlines()]
    if topic.holds:
        made += [Text(""), Text(topic.holds)]
    made += [Text(""), Text("worked:")]
    made += [Text(f"  {line.text} = {_figure(line.value, line.unit)}") for line in topic.compute()]
    if topic.command:
        made += [Text(""), Text(f"for a model of yours: {topic.command}")]
    return [*made, Text(""), Text(f"source: {topic.source}", style="dim")]


def _figure(value: float, unit: str) -> str:
    """A worked number with its unit; bytes also in the unit they are thought in."""
    text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.6g}"
    unit = "" if unit == "1" else unit
    if unit in ("B", "bytes") and abs(value) >= KIB:
        return f"{text} {unit} ({format_bytes(value)})"
    return f"{text} {unit}".rstrip()


def rows_view(rows: Sequence[Mapping[str, Any]], *, short: bool = False) -> list["RenderableType"]:
    """Flat rows as a terminal table; numbers to the right. `short` rounds them, for long lists."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1 if short else 2, 0, 0), header_style="bold")
    keys = [key for key in (rows[0] if rows else {}) if any(row[key] is not None for row in rows)]
    for key in keys:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        table.add_column(
            key.replace("_", " "),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=short and key == "id",
        )
    for row in rows:
        table.add_row(*(_short(key, row[key]) if short else _human(key, row[key]) for key in keys))
    return [table]


def _short(key: str, value: Any) -> str:
    """A value rounded to what a list is read for."""
    if isinstance(value, int) and key == "parameters":
        return format_count(value)
    if isinstance(value, int | float) and "bytes" in key:
        return format_bytes(value)
    return _human(key, value)


def thing_view(found: dict[str, Any]) -> list["RenderableType"]:
    """One thing: scalars as lines, lists of records as tables."""
    from rich.text import Text

    made: list[RenderableType] = [Text(str(found["name"]), style="bold")]
    lines = grid()
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    tables: list[tuple[str, list[dict[str, Any]]]] = []
    for key, value in found.items():
        if key in ("schema", "name") or value in (None, [], {}, ""):
            continue
        if isinstance(value, list) and isinstance(value[0], dict):
            tables.append((key, value))
        else:
            lines.add_row(f"  {key.replace('_', ' ')}", _human(key, value))
    made.append(lines)
    for key, rows in tables:
        made += [Text(""), Text(key.replace("_", " "), style="bold"), *rows_view(rows)]
    return made


def _human(key: str, value: Any) -> str:
    """A value by the unit its key ends in, the exact figure kept where it is a count."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(_human(key, inner) for inner in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_human(key, inner)}" for name, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:,.6g} GB/s"
    if key.endswith("flop_per_s"):
        return f"{value / 1e12:,.6g} T"
    if key.endswith("_hz"):
        return f"{value / 1e6:,.0f} MHz"
    if "bytes" in key and value >= KIB:
        return f"{value:,.0f} ({format_bytes(value)})"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def flat_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One thing as key, value rows, for CSV and Markdown."""
    return [
        {"key": key, "value": value if isinstance(value, str) else _human("", value)}
        for key, value in found.items()
    ]
