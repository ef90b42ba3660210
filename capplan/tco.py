"""What owning costs, typical figures with low and high: profiles/tco.yaml, strictly read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capplan import catalog
from capplan.errors import did_you_mean, shown
from capplan.readers.config_keys import Keys

SCHEMA: Final = "capplan.tco/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A typical value between low and high; `status` is read, partly-read or recall (remembered)."""

    low: float
    typical: float
    high: float
    status: str = "given"
    dated: str = ""
    sources: tuple[str, ...] = ()
    notes: str = ""
    gpus: int = 1

    def to_dict(self) -> dict[str, Any]:
        """JSON of the figure."""
        return {
            "low": self.low,
            "typical": self.typical,
            "high": self.high,
            "status": self.status,
            "dated": self.dated,
            "sources": list(self.sources),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tco:
    """All figures: general ones by name, and those of a GPU by its id."""

    figures: Mapping[str, Figure]
    purchase_usd_per_gpu: Mapping[str, Figure]
    node_usd: Mapping[str, Figure]
    node_max_watts: Mapping[str, Figure]
    sources: Mapping[str, str]
    read_on: str


@cache
def load() -> Tco:
    """The shipped figures."""
    path = catalog.PROFILES / "tco.yaml"
    keys = Keys(catalog.read_yaml(path), where=str(path))
    if keys.text("schema") != SCHEMA:
        raise keys.fail("schema", "is another's", SCHEMA)
    sources = keys.child("sources")
    declared = {} if sources is None else {str(key): str(text) for key, text in sources.data.items()}
    made = Tco(
        figures=_figures(keys, "figures", declared),
        purchase_usd_per_gpu=_figures(keys, "purchase_usd_per_gpu", declared),
        node_usd=_figures(keys, "node_usd", declared),
        node_max_watts=_figures(keys, "node_max_watts", declared),
        sources=declared,
        read_on=str(keys.data.get("read_on", "")),
    )
    keys.used.add("read_on")
    _refuse(keys)
    return made


def _figures(keys: Keys, name: str, declared: Mapping[str, str]) -> dict[str, Figure]:
    child = keys.child(name)
    made: dict[str, Figure] = {}
    for key in () if child is None else child.data:
        inner = child.child(key) if child is not None else None
        if inner is None:
            raise keys.fail(name, f"{shown(key)} is no mapping", "low, typical, high, status, sources")
        made[str(key)] = _figure(inner, declared)
    return made


def _figure(inner: Keys, declared: Mapping[str, str]) -> Figure:
    made = Figure(
        low=inner.number("low") or 0.0,
        typical=inner.number("typical") or 0.0,
        high=inner.number("high") or 0.0,
        status=inner.text("status") or "",
        dated=inner.text("dated") or "",
        sources=tuple(inner.texts("sources") or ()),
        notes=inner.text("notes", default="") or "",
        gpus=inner.integer("gpus", default=1),
    )
    if not 0 < made.low <= made.typical <= made.high:
        raise inner.fail("typical", f"{made.low:g}, {made.typical:g}, {made.high:g}", "low ≤ typical ≤ high")
    for source in made.sources:
        if source not in declared:
            raise inner.fail("sources", f"{shown(source)} is not declared", "add it to sources")
    _refuse(inner)
    return made


def _refuse(keys: Keys) -> None:
    for key in keys.unused():
        raise keys.fail(key, "unknown key", did_you_mean(key, keys.used, "see the file's other entries"))
