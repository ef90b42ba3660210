"""Dated price rows of GPUs: profiles/prices/ (one file a provider) and what a user fetched or imported.

Each row is one instance under one term. The newest row of an instance, region and term wins. Ages are counted
from a day the caller gives, so that the same question has the same answer on every day.
"""

import datetime
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from capplan import catalog
from capplan.errors import InputError, did_you_mean, shown
from capplan.readers.config_keys import Keys
from capplan.specs import Price, PriceKind, Term

TERMS: Final[tuple[Term, ...]] = get_args(Term)
KINDS: Final[tuple[PriceKind, ...]] = get_args(PriceKind)
ProviderClass = Literal["hyperscaler", "neocloud", "marketplace"]

WARN_DAYS: Final[dict[ProviderClass, int]] = {"hyperscaler": 120, "neocloud": 60, "marketplace": 60}
"""Days after which a price is called old."""
RECENT_DAYS: Final = max(WARN_DAYS.values())
"""Days for which a price is taken before older ones, whoever sells."""
STALE_DAYS: Final = 365
"""Days after which a price is used only where there is no other."""
OUTLIER_FACTOR: Final = 5.0
"""A price this many times above or below the median of its GPU on demand is an outlier."""
SPOT_FACTOR: Final = 3.0
"""Spot prices lie this much lower before they count as outliers."""
MAX_USD_PER_GPU_HOUR: Final = 1000.0
"""No accelerator costs more by the hour: more is a slip of units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Who sells: `areas` gives the part of the world of regions whose name does not say it."""

    id: str
    name: str
    provider_class: ProviderClass = "neocloud"
    aliases: tuple[str, ...] = ()
    areas: Mapping[str, str]
    sources: Mapping[str, str]

    @property
    def warn_days(self) -> int:
        """Days after which its prices are called old."""
        return WARN_DAYS[self.provider_class]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Prices of a GPU per hour over providers, without averages, outliers and years-old rows."""

    low: float
    median: float
    high: float
    rows: int
    clouds: int

    def to_dict(self) -> dict[str, float | int]:
        """JSON of the spread."""
        return {
            "low": self.low,
            "median": self.median,
            "high": self.high,
            "rows": self.rows,
            "clouds": self.clouds,
        }


class PriceBook:
    """All price rows known, and who sells."""

    def __init__(self, rows: Iterable[Price], providers: Mapping[str, Provider]) -> None:
        newest: dict[tuple[object, ...], Price] = {}
        for row in rows:
            key = row_key(row)
            if key not in newest or row.read_on >= newest[key].read_on:
                newest[key] = row
        self.rows: tuple[Price, ...] = tuple(sorted(newest.values(), key=_order))
        self.providers = dict(providers)
        self._by_gpu: dict[str, list[Price]] = {}
        for row in self.rows:
            self._by_gpu.setdefault(row.gpu_id, []).append(row)
        self._medians = {gpu: _median(rows) for gpu, rows in self._by_gpu.items()}

    def of_gpu(self, gpu_id: str) -> list[Price]:
        """The rows of one GPU."""
        return self._by_gpu.get(gpu_id, [])

    def gpu_ids(self) -> list[str]:
        """GPUs with a price, sorted."""
        return sorted(self._by_gpu)

    def provider(self, cloud: str) -> Provider:
        """Who sells under this id; one known only from fetched or imported rows is a neocloud."""
        known = self.providers.get(cloud)
        return known or Provider(id=cloud, name=cloud, areas={}, sources={})

    def resolve_cloud(self, name: str) -> str:
        """The provider id that `name` declares itself to be; InputError with the nearest names."""
        wanted = catalog.normalised(name)
        ids = sorted({row.cloud for row in self.rows} | self.providers.keys())
        for identity in ids:
            provider = self.provider(identity)
            if wanted in map(catalog.normalised, (identity, provider.name, *provider.aliases)):
                return identity
        raise InputError(
            f"unknown cloud {shown(name)}",
            where="--cloud",
            hint=did_you_mean(
                name,
                [
                    *ids,
                    *(alias for entry in self.providers.values() for alias in (entry.name, *entry.aliases)),
                ],
                "`capplan prices list -o json` and `capplan prices show GPU` name those known",
            ),
        )

    def cloud_id(self, name: str) -> str:
        """As `resolve_cloud`, but a name nobody has is the id of a provider of its own."""
        try:
            return self.resolve_cloud(name)
        except InputError:
            return "-".join(_words(name)) or "unnamed"

    def is_outlier(self, row: Price) -> bool:
        """Whether a price lies far from the median of its GPU on demand: a slip, a teaser, a host machine."""
        median = self._medians.get(row.gpu_id)
        if median is None:
            return False
        below = OUTLIER_FACTOR * (SPOT_FACTOR if row.term == "spot" else 1.0)
        price = row.usd_per_gpu_hour
        return price > median * OUTLIER_FACTOR or price < median / below

    def spread(self, gpu_id: str, term: Term, today: datetime.date) -> Spread | None:
        """How far prices of a GPU lie apart; None where there is none."""
        rows = [
            row
            for row in self.of_gpu(gpu_id)
            if row.term == term and row.kind != "average" and not self.is_outlier(row)
        ]
        rows = [row for row in rows if age_days(row.read_on, today) <= STALE_DAYS] or rows
        if not rows:
            return None
        prices = [row.usd_per_gpu_hour for row in rows]
        return Spread(
            low=min(prices),
            median=statistics.median(prices),
            high=max(prices),
            rows=len(rows),
            clouds=len({row.cloud for row in rows}),
        )

    def in_region(self, row: Price, region: str) -> bool:
        """Whether a row's region is the one asked for, or lies in the area asked for ("us", "eu")."""
        wanted = _words(region)
        have = _words(row.region)
        if have[: len(wanted)] == wanted or have[-len(wanted) :] == wanted:
            return True
        return self.provider(row.cloud).areas.get(row.region) == region.strip().lower()


def checked_term(name: str) -> Term:
    """A term by its name; InputError with the nearest one otherwise."""
    for term in TERMS:
        if name == term:
            return term
    raise InputError(
        f"unknown term {shown(name)}", where="--term", hint=did_you_mean(name, TERMS, ", ".join(TERMS))
    )


def row_key(row: Price) -> tuple[object, ...]:
    """What one price is of."""
    return (row.cloud, row.region, row.instance, row.gpu_id, row.gpu_count, row.term)


def _order(row: Price) -> tuple[object, ...]:
    return (row.gpu_id, row.term, row.usd_per_gpu_hour, row.cloud, row.region, row.instance)


def _median(rows: Iterable[Price]) -> float | None:
    prices = [row.usd_per_gpu_hour for row in rows if row.term == "on-demand"]
    return statistics.median(prices) if prices else None


def _words(region: str) -> list[str]:
    """A region's name as words: us-east-1 → us, east, 1; "Texas, US" → texas, us."""
    return "".join(char if char.isalnum() else " " for char in region.lower()).split()


def age_days(read_on: str, today: datetime.date) -> int:
    """Days since a price was read; 0 where the day lies ahead (see `read_ahead`)."""
    return max(0, (today - datetime.date.fromisoformat(read_on)).days)


def read_ahead(read_on: str, today: datetime.date) -> bool:
    """Whether a price was read after the day of the question: a clock or a date is wrong."""
    return datetime.date.fromisoformat(read_on) > today


@cache
def shipped() -> tuple[tuple[Price, ...], Mapping[str, Provider]]:
    """Rows and providers of profiles/prices/."""
    rows: list[Price] = []
    providers: dict[str, Provider] = {}
    for path in sorted((catalog.PROFILES / "prices").glob("*.yaml")):
        provider, of_provider = read_provider(path)
        providers[provider.id] = provider
        rows.extend(of_provider)
    return tuple(rows), providers


def read_provider(path: Path) -> tuple[Provider, list[Price]]:
    """One provider's file: strict keys, every price with its day and a declared source."""
    keys = Keys(catalog.read_yaml(path), where=str(path))
    identity = keys.text("id") or ""
    provider_class = keys.text("class") or ""
    if provider_class not in WARN_DAYS:
        raise keys.fail("class", f"{shown(provider_class)} is not understood", ", ".join(WARN_DAYS))
    provider = Provider(
        id=identity,
        name=keys.text("name") or identity,
        provider_class=provider_class,
        aliases=tuple(keys.texts("aliases") or ()),
        areas=_texts(keys, "areas"),
        sources=_texts(keys, "sources"),
    )
    entries = keys.items("prices") or []
    rows = [row for entry in entries for row in _entry(entry, provider, keys)]
    for key in keys.unused():
        raise keys.fail(key, "unknown key", did_you_mean(key, keys.used, "see an existing file"))
    return provider, rows


def _texts(keys: Keys, name: str) -> dict[str, str]:
    child = keys.child(name)
    return {} if child is None else {str(key): str(value) for key, value in child.data.items()}


def _entry(entry: object, provider: Provider, keys: Keys) -> Iterable[Price]:
    """One line of a provider's file: a price for each term."""
    if not isinstance(entry, dict):
        raise keys.fail("prices", f"{shown(entry)} is no mapping", "gpu, count, usd_per_hour, …")
    inner = Keys(entry, where=keys.where, path="prices.")
    common: dict[str, Any] = {
        "gpu_id": inner.text("gpu"),
        "cloud": provider.id,
        "instance": inner.text("instance") or "",
        "gpu_count": inner.integer("count"),
        "region": inner.text("region") or "",
        "kind": inner.text("kind"),
        "read_on": _day(inner),
        "source": inner.text("source"),
        "dated": inner.text("dated", default="exact"),
        "notes": inner.text("notes", default="") or "",
    }
    if common["kind"] not in KINDS:
        raise inner.fail("kind", f"{shown(common['kind'])} is not understood", ", ".join(KINDS))
    if common["source"] not in provider.sources:
        raise inner.fail("source", f"{shown(common['source'])} is not declared", "add it to sources")
    usd = inner.child("usd_per_hour")
    if usd is None or not usd.data:
        raise inner.fail("usd_per_hour", "no price", "on-demand, spot, 1yr or 3yr: USD per hour")
    for term in usd.data:
        if term not in TERMS:
            raise usd.fail(str(term), "is no term", did_you_mean(str(term), TERMS, ", ".join(TERMS)))
        price = usd.number(str(term)) or 0.0
        if not 0 < price <= MAX_USD_PER_GPU_HOUR * common["gpu_count"]:
            raise usd.fail(str(term), f"{price:g} USD per hour", "a price above 0")
        yield Price(**common, term=term, usd_per_hour=price)
    for key in inner.unused():
        raise inner.fail(key, "unknown key", did_you_mean(key, inner.used, "see an existing file"))


def _day(keys: Keys) -> str:
    """The day of a price; YAML reads 2026-11-09 as a date."""
    keys.used.add("read_on")
    value = keys.data.get("read_on")
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise keys.fail("read_on", f"{shown(value)} is no day", "YYYY-MM-DD") from None
