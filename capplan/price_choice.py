"""Which price a question gets, and what must be said about it: its age, its kind, its spread."""

import datetime
import math
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import InputError, shown
from capplan.prices import RECENT_DAYS, STALE_DAYS, PriceBook, Spread, age_days, read_ahead
from capplan.specs import Price, PriceKind, Term

_RANK: Final[dict[PriceKind, int]] = {
    "instance": 0,
    "per-gpu": 0,
    "per-chip": 0,
    "gpu-only": 1,
    "capacity-block": 1,
    "broker": 1,
    "marketplace": 1,
    "average": 2,
}
"""Listed prices come before offers that may be gone, and those before averages nobody sells at."""
GIVEN: Final = "given with the question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """One price in use: USD per GPU and hour, where it is from, and what to say about it.

    `row` is None for a price the user gave; then day and age are None too.
    """

    usd_per_gpu_hour: float
    term: Term
    source: str
    row: Price | None = None
    age_days: int | None = None
    spread: Spread | None = None
    warnings: tuple[str, ...] = ()

    @property
    def node_gpus(self) -> int:
        """GPUs that are only sold together."""
        return 1 if self.row is None else self.row.gpu_count

    def billed_gpus(self, gpus: int) -> int:
        """GPUs that are paid: whole nodes."""
        return -(-gpus // self.node_gpus) * self.node_gpus

    def to_dict(self) -> dict[str, Any]:
        """JSON of the price."""
        row = self.row
        return {
            "usd_per_gpu_hour": self.usd_per_gpu_hour,
            "term": self.term,
            "read_on": row.read_on if row else None,
            "dated": row.dated if row else None,
            "source": self.source,
            "age_days": self.age_days,
            "cloud": row.cloud if row else None,
            "region": row.region if row else None,
            "instance": row.instance if row else None,
            "instance_gpus": row.gpu_count if row else None,
            "instance_usd_per_hour": row.usd_per_hour if row else None,
            "kind": row.kind if row else None,
            "notes": row.notes if row else "",
            "spread_usd_per_gpu_hour": self.spread.to_dict() if self.spread else None,
        }


def given(usd_per_gpu_hour: float, term: Term) -> Quote:
    """A price the user gave."""
    return Quote(usd_per_gpu_hour=usd_per_gpu_hour, term=term, source=GIVEN)


def choose(
    book: PriceBook,
    gpu_id: str,
    *,
    term: Term,
    today: datetime.date,
    cloud: str | None = None,
    region: str | None = None,
    gpus: int = 1,
) -> Quote | None:
    """The price of `gpus` of a GPU: the cheapest of those that can be trusted most; None where there is none.

    Prices read within a year come first, then listed prices before marketplaces, brokers and averages, then
    those of the last 120 days; of these the one that costs least, the node's unused GPUs included.
    """
    identity = book.resolve_cloud(cloud) if cloud is not None else None
    rows = [
        row
        for row in book.of_gpu(gpu_id)
        if row.term == term
        and (identity is None or row.cloud == identity)
        and (region is None or book.in_region(row, region))
        # A price far from all others is taken only from the provider asked for.
        and (identity is not None or not book.is_outlier(row))
    ]
    if not rows:
        return None

    def key(row: Price) -> tuple[object, ...]:
        age = age_days(row.read_on, today)
        return (
            book.is_outlier(row),
            age > STALE_DAYS,
            _RANK[row.kind],
            age > RECENT_DAYS,
            row.usd_per_hour * math.ceil(gpus / row.gpu_count) / gpus,
            row.cloud,
            row.region,
            row.instance,
        )

    return quote(book, min(rows, key=key), today)


def quote(book: PriceBook, row: Price, today: datetime.date) -> Quote:
    """A row with its age and warnings."""
    provider = book.provider(row.cloud)
    return Quote(
        usd_per_gpu_hour=row.usd_per_gpu_hour,
        term=row.term,
        source=provider.sources.get(row.source, row.source),
        row=row,
        age_days=age_days(row.read_on, today),
        spread=book.spread(row.gpu_id, row.term, today),
        warnings=tuple(_warnings(book, row, today)),
    )


def _warnings(book: PriceBook, row: Price, today: datetime.date) -> list[str]:
    provider = book.provider(row.cloud)
    age = age_days(row.read_on, today)
    made = []
    if read_ahead(row.read_on, today):
        made.append(f"the price was read on {row.read_on}, after {today}: is the clock right?")
    if age > provider.warn_days:
        made.append(
            f"the price is {age:,} days old, past the {provider.warn_days} days after which a "
            f"{provider.provider_class}'s price may have moved: `capplan prices refresh`, or --price"
        )
    if row.kind not in ("instance", "per-gpu", "per-chip"):
        what = {
            "average": "an average, not an offer",
            "capacity-block": "of a capacity block, booked ahead",
            "gpu-only": "of the GPU alone: the machine's CPU and memory are billed on top",
        }
        made.append(f"the price is {what.get(row.kind, f'that of a {row.kind} offer, no list price')}")
    if book.is_outlier(row):
        made.append("the price lies far from what others ask for this GPU")
    if row.source == "recall":
        made.append("the price was remembered, not read")
    return made


def missing(book: PriceBook, gpu_id: str, *, term: Term, cloud: str | None, region: str | None) -> InputError:
    """The error for a price that was asked for by name and is not known."""
    rows = book.of_gpu(gpu_id)
    what = f"{term} price of {gpu_id}"
    what += f" from {shown(cloud)}" if cloud else ""
    what += f" in {shown(region)}" if region else ""
    where = ", ".join(
        name
        for name, value in (("--gpu", gpu_id), ("--term", term), ("--cloud", cloud), ("--region", region))
        if value
    )
    same_term = [row for row in rows if row.term == term]
    if not rows:
        hint = "--price USD per GPU and hour, or `capplan prices import FILE`"
    elif not same_term:
        terms = sorted({row.term for row in rows})
        hint = f"known terms: {', '.join(terms)}; or --price USD per GPU and hour"
    else:
        clouds = sorted({row.cloud for row in same_term})
        hint = f"sold by {', '.join(clouds[:12])}; or --price USD per GPU and hour"
        if not cloud and not region:
            hint = f"only dated or outlying listings: --cloud {clouds[0]} takes one; or --price USD"
    return InputError(f"no {what}: it is unpriced, not free", where=where, hint=hint)
