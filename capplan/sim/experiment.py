"""A claim, the sweep it was tried over, and where in it the claim holds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from capplan.sim.trial import Subject

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a lesson says, and `column`: the one that is true in the rows where it holds."""

    text: str
    column: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Claims against a sweep. `variables` are the columns swept; `holds` says for each claim where."""

    name: str
    source: str
    claims: tuple[Claim, ...]
    variables: tuple[str, ...]
    measure: str
    """The column that the claims are about."""
    rows: tuple[Row, ...]
    model: str
    gpu: str
    notes: tuple[str, ...] = ()

    def where(self, claim: Claim) -> dict[str, dict[str, tuple[int, int]]]:
        """For each variable and each of its values: in how many rows the claim holds, of how many."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for variable in self.variables:
            counts = found.setdefault(variable, {})
            for row in self.rows:
                holding, rows = counts.get(str(row[variable]), (0, 0))
                counts[str(row[variable])] = holding + bool(row[claim.column]), rows + 1
        return found

    @property
    def holds(self) -> tuple[str, ...]:
        """Each claim in one sentence: in how many workloads it holds, and for which values."""
        return tuple(self._sentence(claim) for claim in self.claims)

    def _sentence(self, claim: Claim) -> str:
        holding = [row for row in self.rows if row[claim.column]]
        if not holding or len(holding) == len(self.rows):
            return f"{claim.text}: holds in {'all' if holding else 'none'} of {len(self.rows)} workloads"
        parts = []
        for variable, counts in self.where(claim).items():
            if len(counts) > 1:
                told = ", ".join(f"{value} {held}/{rows}" for value, (held, rows) in counts.items())
                parts.append(f"{variable.replace('_', ' ')}: {told}")
        return f"{claim.text}: holds in {len(holding)} of {len(self.rows)} workloads ({'; '.join(parts)})"

    @property
    def span(self) -> tuple[float, float]:
        """Smallest and largest value of the measure."""
        values = [row[self.measure] for row in self.rows if row[self.measure] is not None]
        return min(values), max(values)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the experiment."""
        low, high = self.span
        return {
            "name": self.name,
            "source": self.source,
            "model": self.model,
            "gpu": self.gpu,
            "measure": {"name": self.measure, "min": low, "max": high},
            "claims": [
                {
                    "text": claim.text,
                    "column": claim.column,
                    "holds": sum(bool(row[claim.column]) for row in self.rows),
                    "workloads": len(self.rows),
                    "where": {
                        variable: {
                            value: {"holds": held, "workloads": rows}
                            for value, (held, rows) in counts.items()
                        }
                        for variable, counts in self.where(claim).items()
                    },
                }
                for claim in self.claims
            ],
            "variables": list(self.variables),
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How an experiment is made: its points, a row of each, and what only all rows together tell."""

    source: str
    claims: tuple[Claim, ...]
    variables: tuple[str, ...]
    measure: str
    points: Callable[[], Iterator[Row]]
    row: Callable[[Row, Subject, int], Row]
    together: Callable[[list[Row]], list[Row]] = list
    notes: tuple[str, ...] = ()
