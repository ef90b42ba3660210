"""The answer of `capplan latency` as text: terminal view, Markdown, CSV rows. Nothing prints here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from capplan.report import grid, to_markdown
from capplan.units import format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from capplan.latency_answer import Figure, LatencyEstimate
    from capplan.step import OpTime

OPS_SHOWN: Final = 8
BAR_CELLS: Final = 24


def title(made: "LatencyEstimate") -> str:
    """Model, GPUs, formats, engine."""
    asked, name = made.question.model, made.model.name
    alias = f' ("{asked}")' if asked != name and len(asked) < 24 else ""
    count = made.question.parallel.gpus
    gpus = f"{count} × {made.gpu.name}" if count > 1 else made.gpu.name
    weights = made.precision.id if made.precision else "the checkpoint's own"
    if made.precision is None and made.model.quantization is None:
        weights = "16-bit"
    engine = "" if made.plan is None else f", {made.plan.engine} {made.plan.version}"
    return (
        f"{name}{alias}, {format_count(made.model.parameters)} parameters, {weights} weights, "
        f"{made.kv_format.id} KV cache, on {gpus}{engine}"
    )


def workload(made: "LatencyEstimate") -> str:
    """Load and lengths."""
    question = made.question
    shared = f" ({question.prefix_shared:,} of them cached)" if question.prefix_shared else ""
    return f"{question.load}; {question.isl:,} tokens in{shared}, {question.osl:,} out"


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


def lines(made: "LatencyEstimate") -> list[str]:
    """Everything but the tables, a line each."""
    served = made.served or made.bound
    found = []
    if made.served is not None and served.steady:
        found.append(
            "TTFT = "
            + " + ".join(
                f"{format_seconds(time)} {name}"
                for name, time in (
                    ("around the engine", served.around_s),
                    ("queue", served.queue_s),
                    ("start burst", served.start_s),
                    ("wait for a step", served.wait_s),
                    ("prefill", served.prefill_s),
                )
                if time or name == "prefill"
            )
        )
    found.append(
        f"decode is {made.regime['decode']} (mean batch {served.batch:,.1f}), "
        f"prefill is {made.regime['prefill']}"
    )
    if made.bottleneck is not None:
        parts = sorted(made.limits.items(), key=lambda entry: -entry[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        found.append(f"bottleneck: {made.bottleneck}; a decode step waits for {shares}")
    if made.served is not None:
        distance = served.stable_request_per_s / served.request_per_s if served.request_per_s else 0
        found.append(
            f"utilisation {served.utilization:.0%} of the stable {served.stable_request_per_s:.3g} requests/s"
            + (f" ({distance:.2f} × below the knee)" if served.utilization < 1 else "")
        )
    if made.slo is not None:
        limits = [
            f"{name} ≤ {format_seconds(value)}"
            for name, value in (("TTFT", made.slo.ttft_s), ("TPOT", made.slo.tpot_s))
            if value is not None
        ]
        verdict = {True: "met", False: "missed", None: "not evaluated"}[made.meets]
        if made.below_bound:
            verdict = "impossible: below what physics allows"
        found.append(f"{made.slo.name} ({', '.join(limits)}): {verdict}{_goodput(made)}")
        if made.slo.tpot_s is not None and made.tpot.estimate:
            found.append(f"{made.slo.tpot_s / made.tpot.estimate:.1f} × the speed asked for")
    return found + [f"note: {note}" for note in made.notes]


def _goodput(made: "LatencyEstimate") -> str:
    """Requests a second within the limits, where there are any."""
    if made.served is None or made.slo is None or not made.served.steady:
        return ""
    ttft, tpot = made.slo.ttft_s or float("inf"), made.slo.tpot_s or float("inf")
    rate = made.served.goodput_request_per_s(ttft_s=ttft, tpot_s=tpot)
    return f"; goodput {rate:.3g} of {made.served.request_per_s:.3g} requests/s"


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
        parts += [Text(""), Text(f"the mean {name}", style="bold"), _ops_table(ops)]
    if made.sweep:
        parts += [Text(""), Text("users at once", style="bold"), _sweep_table(made)]
    if made.changes:
        parts += [Text(""), Text("what would change it", style="bold"), _changes_table(made)]
    return parts


def _ops_table(ops: Sequence["OpTime"]) -> "Table":
    """The longest operations; the others together."""
    total = sum(op.time_s for op in ops) or 1.0
    ordered = sorted(ops, key=lambda op: -op.time_s)
    table = grid()
    for _ in range(2):
        table.add_column()
    for _ in range(3):
        table.add_column(justify="right")
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

    limit = made.slo.tpot_s if made.slo is not None else None
    longest = max([point.tpot_s or 0.0 for point in made.sweep] + [limit or 0.0]) or 1.0
    table = grid()
    for _ in range(4):
        table.add_column(justify="right")
    table.add_column()
    table.add_row("  users", "TTFT", "TPOT", "tokens/s", _bar_head(limit, longest))
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


def _bar_head(limit: float | None, longest: float) -> "Text":
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
    table = grid()
    for _ in range(2):
        table.add_column()
    for _ in range(3):
        table.add_column(justify="right")
    for change in made.changes:
        table.add_row(
            f"  {change.flag}",
            change.change,
            f"TTFT {format_seconds(change.ttft_s)}",
            "" if change.tpot_s is None else f"TPOT {format_seconds(change.tpot_s)}",
            f"{change.output_token_per_s:,.0f}/s",
        )
    return table


def rows(made: "LatencyEstimate") -> list[dict[str, Any]]:
    """CSV: the sweep's points, else the one answer."""
    base = {
        "model": made.model.name,
        "gpu": made.gpu.id,
        "gpus": made.question.parallel.gpus,
        "engine": made.question.engine,
        "isl": made.question.isl,
        "osl": made.question.osl,
    }
    asked = made.served or made.bound
    found = [
        {
            **base,
            "users": round(asked.running),
            "ttft_s": made.ttft.estimate if made.served else made.ttft.bound,
            "tpot_s": made.tpot.estimate if made.served else made.tpot.bound,
            "output_token_per_s": made.throughput.estimate if made.served else made.throughput.bound,
            "kind": "asked" if made.served else "bound",
        }
    ]
    for point in made.sweep:
        found.append(
            {
                **base,
                "users": point.users,
                "ttft_s": point.ttft_s,
                "tpot_s": point.tpot_s,
                "output_token_per_s": point.output_token_per_s,
                "kind": "sweep",
            }
        )
    return found


def markdown(made: "LatencyEstimate") -> str:
    """The answers as a Markdown table, then the lines."""
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
    return f"**{title(made)}**\n\n{workload(made)}\n\n{table}\n" + "".join(
        f"- {line}\n" for line in lines(made)
    )
