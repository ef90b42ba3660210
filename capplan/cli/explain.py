"""`capplan explain`: a formula, where it holds, and its worked number."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.errors import InputError


def explain(
    topic: Annotated[str | None, typer.Argument(help="Topic, for example kv-cache.")] = None,
    list_topics: Annotated[bool, typer.Option("--list", help="All topics.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """A formula with its worked number; --list shows all topics.

    Example: capplan explain kv-cache
    """
    from capplan import explain as topics
    from capplan import report

    if list_topics or topic is None:
        if topic is not None:
            raise InputError("a topic and --list", where="capplan explain", hint="give one of them")
        rows = [{"topic": entry.id, "title": entry.title} for entry in topics.topics()]
        report_rows(rows, output, "capplan.explain/1")
        return 0
    entry = topics.find(topic)
    if output is OutputFormat.TABLE:
        render(report.topic_view(entry))
    else:
        report_rows([entry.to_dict()], output, "capplan.explain/1")
    return 0


def report_rows(
    rows: Sequence[Mapping[str, Any]], output: OutputFormat, schema: str, *, short: bool = False
) -> None:
    """Rows in any format; `short` rounds them on the terminal."""
    from capplan import report

    if output is OutputFormat.JSON:
        write_json({"schema": schema, "rows": rows})
    elif output is OutputFormat.CSV:
        write(report.to_csv(rows))
    elif output is OutputFormat.MD:
        write(report.to_markdown(rows))
    else:
        render(report.rows_view(rows, short=short))
