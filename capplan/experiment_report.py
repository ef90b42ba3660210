"""A claim and the workloads it was tried over as text: terminal view, Markdown, CSV. Nothing prints here."""

from typing import TYPE_CHECKING, Any

from capplan import report
from capplan.sim.experiment import Experiment
from capplan.simulate_json import rounded

if TYPE_CHECKING:
    from rich.console import RenderableType


def lines(made: Experiment) -> list[str]:
    """What was claimed, and where it holds."""
    low, high = made.span
    return [
        f"{made.source}; {made.model} on {made.gpu}",
        *made.holds,
        f"{made.measure.replace('_', ' ')}: {low:.3g} to {high:.3g} over {len(made.rows)} workloads",
        *(f"note: {note}" for note in made.notes),
    ]


def view(made: Experiment) -> list["RenderableType"]:
    """The terminal's answer: the claims, then what each value of a variable gave."""
    from rich.text import Text

    title = Text(made.name.replace("-", " "), style="bold")
    told = [Text(line) for line in lines(made)]
    return [title, *told, Text(""), *report.rows_view(_shown(made), short=True)]


def _shown(made: Experiment) -> list[dict[str, Any]]:
    """A row a variable and value: workloads, the measure's range, and how many hold for each claim."""
    found: list[dict[str, Any]] = []
    for variable in made.variables:
        for value in dict.fromkeys(row[variable] for row in made.rows):
            rows = [row for row in made.rows if row[variable] == value]
            measured = [row[made.measure] for row in rows if row[made.measure] is not None]
            shown: dict[str, Any] = {
                "variable": variable.replace("_", " "),
                "value": str(value),
                "workloads": len(rows),
                "least": f"{min(measured):.3g}" if measured else "–",
                "most": f"{max(measured):.3g}" if measured else "–",
            }
            for number, claim in enumerate(made.claims, 1):
                shown[f"claim {number}"] = f"{sum(bool(row[claim.column]) for row in rows)}"
            found.append(shown)
    return found


def csv(made: Experiment) -> str:
    """A row a workload."""
    return report.to_csv([rounded(dict(row)) for row in made.rows])


def markdown(made: Experiment) -> str:
    """The claims, then the table of values."""
    return (
        f"**{made.name}**\n\n"
        + "".join(f"- {line}\n" for line in lines(made))
        + "\n"
        + report.to_markdown(_shown(made))
    )
