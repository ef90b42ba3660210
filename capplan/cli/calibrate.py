"""`capplan calibrate`: op costs fitted from measured tables."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.errors import ExitStatus, InputError, shown


def calibrate(
    action: Annotated[str, typer.Argument(help="What to do: fit.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of measured kernel or layer tables.")],
    out: Annotated[Path, typer.Option(help="Folder that the calibrations are written to, one YAML a GPU.")],
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """Fit the times of operations to measured tables, and say how wrong the fits are.

    The errors are of rows held out: whole (n, k) pairs, (batch, heads) groups, expert shapes, message sizes.
    p10 and p90 are measured over predicted; inside_pct is how much of a held-out part the rest's band holds.

    Example: capplan calibrate fit measured/kernels --out calibrations
    """
    if action != "fit":
        raise InputError(
            f"no action {shown(action)}", where="capplan calibrate", hint="the one there is: fit"
        )
    from capplan.calibrate.write import calibrate as fit_folders

    rows, paths = fit_folders(folders, out)
    for path in paths:
        print(f"written: {path}", file=sys.stderr)
    if output is OutputFormat.JSON:
        write_json({"schema": "capplan.calibrate/1", "errors": rows, "files": [path.name for path in paths]})
        return int(ExitStatus.OK)
    from capplan.report import to_csv, to_markdown

    if output is OutputFormat.CSV:
        write(to_csv(rows))
    elif output is OutputFormat.MD:
        write(to_markdown(rows))
    else:
        _render(rows)
    return int(ExitStatus.OK)


def _render(rows: list[dict[str, Any]]) -> None:
    """One table a GPU: their names are long. Bands are in the other formats."""
    from rich.text import Text

    from capplan.report import rows_view

    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        own = [
            {
                **{name: row[name] for name in ("operation", "dtype", "engine", "rows")},
                "median": f"{row['median_pct']:.1f} %",
                "mean": f"{row['mean_pct']:.1f} %",
            }
            for row in rows
            if row["gpu"] == gpu
        ]
        render([Text(gpu, style="bold"), *rows_view(own), Text("")])
