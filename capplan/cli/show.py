"""`capplan list` and `capplan show`: what is known, and one thing of it."""

from enum import Enum
from typing import Annotated

import typer

from capplan.cli.explain import report_rows
from capplan.cli.output import OutputFormat, console_width, render, write_json

WIDE = 120


class Kind(str, Enum):
    """What can be listed."""

    MODELS = "models"
    GPUS = "gpus"
    FORMATS = "formats"
    ARCHITECTURES = "architectures"
    PRICES = "prices"
    PROFILES = "profiles"


def list_things(
    kind: Annotated[Kind, typer.Argument(help="models, gpus, formats, architectures, prices, profiles.")],
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """Everything of a kind that capplan knows, with sources and dates.

    Example: capplan list gpus
    """
    from capplan import listing

    if kind is Kind.PRICES:
        # Prices have a day and the user's own beside them: one command knows both.
        from capplan.cli.prices import Action, prices

        return prices(Action.LIST, output=output)
    if kind is Kind.PROFILES:
        from capplan.cli.profile import list_profiles

        return list_profiles(output)
    rows = listing.rows(kind.value)
    if output is OutputFormat.TABLE and console_width() < WIDE:
        # The id names the thing; its long name is for wide terminals and the other formats.
        rows = [{key: value for key, value in row.items() if key != "name"} for row in rows]
    report_rows(rows, output, f"capplan.list.{kind.value}/1", short=True)
    return 0


def show(
    name: Annotated[str, typer.Argument(help="A model, GPU or format, or the path of a model.")],
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for it.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """One model, GPU or format with its figures, source and date.

    Example: capplan show llama-3.1-8b
    """
    from capplan import listing, report

    found = listing.find(name, online=online)
    if output is OutputFormat.JSON:
        write_json(found)
    elif output is OutputFormat.TABLE:
        render(report.thing_view(found))
    else:
        report_rows(report.flat_rows(found), output, found["schema"])
    return 0
