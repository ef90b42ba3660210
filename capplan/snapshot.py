"""What a scenario asks and the figures people watch, with what they rest on: what `diff` compares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.answers import Answers
from capplan.origins import origins_of
from capplan.scenario import Scenario

# Name → answer and path of a figure; its dimension is that of dimension_of(key).
WATCHED: Final[dict[str, str]] = {
    "VRAM": "vram.total.bytes",
    "max users": "vram.max_users",
    "TTFT": "latency.ttft_s.estimate",
    "TPOT": "latency.tpot_s.estimate",
    "tokens/s": "latency.output_token_per_s.estimate",
    "$/month": "cost.usd_per_month",
    "$/1M output": "cost.usd_per_million_output_token",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One scenario as it is answered now; a figure is None where it is not known."""

    title: str
    asked: Mapping[str, Any]
    watched: Mapping[str, float | None]
    origins: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON of the snapshot."""
        return {
            "title": self.title,
            "asked": dict(self.asked),
            "watched": dict(self.watched),
            "origins": dict(self.origins),
        }


def take(scenario: Scenario) -> Snapshot:
    """The snapshot of a scenario; InputError where its memory cannot be asked for."""
    answers = Answers(scenario)
    watched = {name: _figure(answers, key) for name, key in WATCHED.items()}
    return Snapshot(
        title=scenario.title,
        asked=scenario.asked,
        watched=watched,
        origins=origins_of(scenario, answers, ("vram", "latency", "cost")),
    )


def read(entry: Mapping[str, Any]) -> Snapshot:
    """The snapshot of a baseline's entry; KeyError where it has none."""
    return Snapshot(
        title=str(entry["title"]),
        asked=dict(entry["asked"]),
        watched={name: entry["watched"].get(name) for name in WATCHED},
        origins=dict(entry["origins"]),
    )


def _figure(answers: Answers, key: str) -> float | None:
    name, *path = key.split(".")
    here: Any = answers.known(name)
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
    return here if isinstance(here, int | float) else None
