"""Price rows as lists: what each GPU costs and where, the cheapest of each, and those without a price."""

import datetime
from collections.abc import Sequence
from typing import Any

from capplan import catalog
from capplan.errors import InputError, did_you_mean, shown
from capplan.price_choice import Quote, choose
from capplan.prices import PriceBook, age_days
from capplan.specs import Price, Term


def overview(book: PriceBook, today: datetime.date, *, everything: bool = False) -> list[dict[str, Any]]:
    """One row a GPU with a price, USD per GPU and hour; `everything`: those without one too."""
    made = []
    for gpu_id in [*book.gpu_ids(), *(unpriced(book) if everything else ())]:
        rows = book.of_gpu(gpu_id)
        demand, spot = (book.spread(gpu_id, term, today) for term in ("on-demand", "spot"))
        made.append(
            {
                "id": gpu_id,
                "clouds": len({row.cloud for row in rows}),
                "prices": len(rows),
                "low": demand and demand.low,
                "median": demand and demand.median,
                "high": demand and demand.high,
                "spot_low": spot and spot.low,
                "read_on": max((row.read_on for row in rows), default=None),
                "outliers": sum(map(book.is_outlier, rows)) or None,
            }
        )
    return made


def unpriced(book: PriceBook) -> list[str]:
    """GPUs that are known and have no price."""
    priced = set(book.gpu_ids())
    return [identity for identity in catalog.ids("gpus") if identity not in priced]


def of_gpu_or_cloud(
    book: PriceBook,
    name: str,
    *,
    today: datetime.date,
    term: Term | None = None,
    cloud: str | None = None,
    region: str | None = None,
) -> list[dict[str, Any]]:
    """The prices of a GPU, or of a provider, the cheapest first.

    Raises InputError for a name nobody has, and where there is no price.
    """
    gpu_id = catalog.index("gpus").get(catalog.normalised(name))
    if gpu_id is None and cloud is None and book.cloud_id(name) in {row.cloud for row in book.rows}:
        cloud, rows = name, list(book.rows)
    elif gpu_id is None:
        known = [*catalog.known_names("gpus"), *sorted({row.cloud for row in book.rows})]
        raise InputError(
            f"no GPU and no provider is called {shown(name)}",
            where="capplan prices show",
            hint=did_you_mean(name, known, "`capplan prices list` shows what has a price"),
        )
    else:
        rows = book.of_gpu(gpu_id)
    identity = None if cloud is None else book.resolve_cloud(cloud)
    found = [
        row
        for row in rows
        if (term is None or row.term == term)
        and (identity is None or row.cloud == identity)
        and (region is None or book.in_region(row, region))
    ]
    if not found:
        asked = [value for value in (term, cloud, region) if value]
        raise InputError(
            f"no price of {gpu_id or name}"
            + (f" for {', '.join(asked)}" if asked else "")
            + ": unpriced, not free",
            where="capplan prices show",
            hint="`capplan prices import FILE`, or --price with `capplan cost`",
        )
    return [_row(book, row, today, with_gpu=gpu_id is None) for row in sorted(found, key=_by_price)]


def _by_price(row: Price) -> tuple[Any, ...]:
    return (row.usd_per_gpu_hour, row.cloud, row.region, row.instance, row.term)


def _row(book: PriceBook, row: Price, today: datetime.date, *, with_gpu: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"gpu": row.gpu_id} if with_gpu else {"cloud": row.cloud}
    return made | {
        "instance": row.instance,
        "region": row.region,
        "gpus": row.gpu_count,
        "term": row.term,
        "usd_per_gpu_hour": row.usd_per_gpu_hour,
        "kind": row.kind + (" (outlier)" if book.is_outlier(row) else ""),
        "read_on": row.read_on,
        "age_days": age_days(row.read_on, today),
        "source": row.source,
        "notes": row.notes or None,
    }


def cheapest(
    book: PriceBook,
    gpu_ids: Sequence[str],
    *,
    today: datetime.date,
    term: Term = "on-demand",
    cloud: str | None = None,
    region: str | None = None,
    gpus: int = 1,
) -> list[dict[str, Any]]:
    """What `capplan cost` would take for each GPU; price None where there is none."""
    made = []
    for gpu_id in gpu_ids:
        quote = choose(book, gpu_id, term=term, today=today, cloud=cloud, region=region, gpus=gpus)
        made.append({"id": gpu_id, **_quoted(quote)})
    return sorted(made, key=lambda row: (row["usd_per_gpu_hour"] is None, row["usd_per_gpu_hour"], row["id"]))


def _quoted(quote: Quote | None) -> dict[str, Any]:
    row = quote.row if quote is not None else None
    return {
        "usd_per_gpu_hour": None if quote is None else quote.usd_per_gpu_hour,
        "cloud": row.cloud if row else "no price",
        "instance": row.instance if row else None,
        "region": row.region if row else None,
        "gpus": row.gpu_count if row else None,
        "kind": row.kind if row else None,
        "read_on": row.read_on if row else None,
        "age_days": quote.age_days if quote is not None else None,
        "old": ("yes" if any("days old" in text for text in quote.warnings) else None) if quote else None,
    }


def short(rows: Sequence[dict[str, Any]], *, wide: bool) -> list[dict[str, Any]]:
    """Rows for the terminal: money rounded, short heads, and what does not fit left to the other formats."""
    hidden: tuple[str, ...] = () if wide else ("source", "notes", "kind", "read_on", "old", "outliers")
    if not wide and rows and "cloud" in rows[0] and "id" in rows[0]:
        hidden += ("instance",)  # one row a GPU: where it is cheapest, and how old that is
    heads = {"usd_per_gpu_hour": "usd/gpu_h", "age_days": "days", "spot_low": "spot"}
    return [
        {
            heads.get(key, key): round(value, 3) if isinstance(value, float) else value
            for key, value in row.items()
            if key not in hidden
        }
        for row in rows
    ]
