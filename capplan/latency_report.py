"""The answer of `capplan latency` as tables: terminal view, Markdown, CSV rows. Nothing prints here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from capplan.latency_lines import lines, title, workload
from capplan.report import grid, to_markdown
from capplan.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from capplan.latency_answer import Change, Figure, LatencyEstimate, SweepPoint
    from capplan.step import OpTime

OPS_SHOWN: Final = 8
BAR_CELLS: Final = 24


def figure_rows(made: "LatencyEstimate") -> list[tuple[str, "Figure", str]]:
    """The four answers with the unit they are printed in."""
    return [
        ("TTFT", made.ttft, "s"),
        ("TPOT", made.tpot, "s"),
        ("E2E", made.e2e, "s"),
        ("output", made.throughput, "tokens/s"),
    ]


def _cell(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return format_seconds(value)
    return f"{value:,.0f}/s" if value >= 10 else f"{value:,.2f}/s"


def view(made: "LatencyEstimate") -> list["RenderableType"]:
    """The terminal's answer."""
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(title(made), style="bold"), Text(workload(made)), Text("")]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in ("bound", "estimate", "P10", "P90"):
        table.add_column(name, justify="right")
    table.add_column("from")
    for name, figure, unit in figure_rows(made):
        cells = [_cell(value, unit) for value in (figure.bound, figure.estimate, figure.low, figure.high)]
        table.add_row(name, *cells, figure.provenance)
    parts += [table, Text("")]
    parts += [Text(line) for line in lines(made)]
    for name, ops in (("decode step", made.decode_ops), ("prefill chunk", made.prefill_ops)):
        if not ops:
            continue
        parts += [Text(""), Text(f"the mean {name}", style="bold"), _ops_table(ops)]
    if made.sweep:
        parts += [Text(""), Text("users at once", style="bold"), _sweep_table(made)]
    if made.changes:
        parts += [Text(""), Text("what would change it", style="bold"), _changes_table(made)]
    return parts


def _grid(*kinds: str) -> "Table":
    """A table without lines; in a narrow terminal words "fold", and figures, names and bars stay whole."""
    table = grid()
    for kind in kinds:
        if kind == "fold":
            table.add_column(overflow="fold")
        elif kind == "right":
            table.add_column(justify="right", no_wrap=True)
        else:
            table.add_column(no_wrap=True, overflow="crop")
    return table


def _ops_table(ops: Sequence["OpTime"]) -> "Table":
    """The longest operations; the others together."""
    total = sum(op.time_s for op in ops) or 1.0
    ordered = sorted(ops, key=lambda op: -op.time_s)
    table = _grid("fold", "fold", "right", "right", "right")
    for op in ordered[:OPS_SHOWN]:
        light = f"{min(1.0, op.bound_s / op.time_s):.0%} of light" if op.bound_s else ""
        name = f"{op.name}" + (f" ({op.dtype})" if op.dtype else "")
        table.add_row(f"  {op.kind}", name, format_seconds(op.time_s), f"{op.time_s / total:.0%}", light)
    rest = ordered[OPS_SHOWN:]
    if rest:
        time = sum(op.time_s for op in rest)
        table.add_row("  other", f"{len(rest)} kinds", format_seconds(time), f"{time / total:.0%}", "")
    table.add_row("  in all", "", format_seconds(total), "", "")
    return table


def _sweep_table(made: "LatencyEstimate") -> "Table":
    """Users against what each sees; the bar is TPOT, with the limit marked."""
    from rich.text import Text

    decodes = any(point.tpot_s for point in made.sweep)
    limit = made.slo.tpot_s if made.slo is not None and decodes else None
    longest = max([point.tpot_s or 0.0 for point in made.sweep] + [limit or 0.0]) or 1.0
    table = _grid("right", "right", "right", "right", "bar")
    table.add_row("  users", "TTFT", "TPOT", "tokens/s", _bar_head(limit))
    for point in made.sweep:
        tpot = point.tpot_s
        bar = bar_text(tpot or 0.0, longest, limit)
        style = {True: "green", False: "red", None: ""}[point.meets]
        table.add_row(
            f"  {point.users:,}",
            format_seconds(point.ttft_s),
            "–" if tpot is None else format_seconds(tpot),
            f"{point.output_token_per_s:,.0f}",
            Text(bar, style=style),
        )
    return table


def _bar_head(limit: float | None) -> "Text":
    from rich.text import Text

    return Text("" if limit is None else f"TPOT; | is {format_seconds(limit)}")


def bar_text(value: float, longest: float, limit: float | None) -> str:
    """A bar of BAR_CELLS cells for the longest value, with a mark at the limit."""
    filled = round(value / longest * BAR_CELLS)
    cells = ["█" if at < filled else " " for at in range(BAR_CELLS + 1)]
    if limit is not None:
        cells[min(BAR_CELLS, round(limit / longest * BAR_CELLS))] = "|"
    return "".join(cells).rstrip()


def _changes_table(made: "LatencyEstimate") -> "Table":
    table = _grid("name", "fold", "right", "right", "right")
    table.add_row("", "", "TTFT", "TPOT", "tokens/s")
    for change in made.changes:
        table.add_row(
            f"  {change.flag}",
            change.change,
            format_seconds(change.ttft_s),
            _cell(change.tpot_s, "s"),
            f"{change.output_token_per_s:,.0f}",
        )
    return table


def rows(made: "LatencyEstimate") -> list[dict[str, Any]]:
    """CSV: the load asked about (bound, estimate, p10, p90), then the sweep's points and the changes."""
    figures = {name: figure for name, figure, _ in figure_rows(made)}
    kinds = [("bound", "bound")]
    if made.served is not None:
        kinds += [("estimate", "estimate"), ("low", "p10"), ("high", "p90")]
    found = [
        _row(
            made,
            kind,
            users=max(1, round(made.load.running)),
            ttft_s=getattr(figures["TTFT"], which),
            tpot_s=getattr(figures["TPOT"], which),
            e2e_s=getattr(figures["E2E"], which),
            output_token_per_s=getattr(figures["output"], which),
            meets=made.meets if kind == "estimate" else None,
        )
        for which, kind in kinds
    ]
    for point in made.sweep:
        found.append(_row(made, "sweep", users=point.users, meets=point.meets, **_seen(point)))
    for change in made.changes:
        found.append(_row(made, f"change: {change.flag}", users=None, meets=None, **_seen(change)))
    return found


def _row(made: "LatencyEstimate", kind: str, **values: Any) -> dict[str, Any]:
    question = made.question
    return {
        "model": made.model.name,
        "gpu": made.gpu.id,
        "gpus": question.parallel.gpus,
        "engine": question.engine,
        "isl": question.isl,
        "osl": question.osl,
        "kind": kind,
        **values,
    }


def _seen(point: "SweepPoint | Change") -> dict[str, float | None]:
    """What users see at a point, and what all get together."""
    return {
        "ttft_s": point.ttft_s,
        "tpot_s": point.tpot_s,
        "e2e_s": point.e2e_s,
        "output_token_per_s": point.output_token_per_s,
    }


def markdown(made: "LatencyEstimate") -> str:
    """The answers as a Markdown table, the lines, the sweep, and what would change it."""
    table = to_markdown(
        [
            {
                "": name,
                "bound": _cell(figure.bound, unit),
                "estimate": _cell(figure.estimate, unit),
                "P10": _cell(figure.low, unit),
                "P90": _cell(figure.high, unit),
                "from": figure.provenance,
            }
            for name, figure, unit in figure_rows(made)
        ]
    )
    parts = [f"**{title(made)}**", workload(made), table, "".join(f"- {line}\n" for line in lines(made))]
    if made.sweep:
        parts.append(to_markdown([{"users": f"{point.users:,}", **_texts(point)} for point in made.sweep]))
    if made.changes:
        parts.append(
            to_markdown(
                [{"change": c.change, "flag": f"`{c.flag}`", **_texts(c)} for c in made.changes],
            )
        )
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _texts(point: "SweepPoint | Change") -> dict[str, str]:
    """The same in words."""
    return {
        "TTFT": _cell(point.ttft_s, "s"),
        "TPOT": _cell(point.tpot_s, "s"),
        "E2E": _cell(point.e2e_s, "s"),
        "output": _cell(point.output_token_per_s, "tokens/s"),
    }
