"""`capplan diff`: scenarios before and after."""

from typing import Annotated

import typer

from capplan.cli.output import OutputFormat, render, write, write_json

_SIDE = "A file, a folder, REVISION:PATH (main:scenarios/), or a baseline file."


def diff(
    old: Annotated[str, typer.Argument(help=_SIDE)],
    new: Annotated[str, typer.Argument(help="The same, after the change.")],
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """What moved between two versions of scenarios: memory, users, latency, money; and what moved it.

    Example: capplan diff main:scenarios/ scenarios/
    """
    from capplan.diff import diff as compare

    report = compare(old, new)
    if output is OutputFormat.JSON:
        write_json(report.to_dict())
        return 0
    from capplan import diff_report

    if output is OutputFormat.CSV:
        from capplan.report import to_csv

        write(to_csv(diff_report.rows(report)))
    elif output is OutputFormat.MD:
        write(diff_report.markdown(report))
    else:
        render(diff_report.view(report))
    return 0
