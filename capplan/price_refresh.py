"""Fresh prices through gpuhunt: each provider in its own thread with its own time limit.

The library reads its catalogs without a time limit and all of them together; here one that hangs or fails
leaves the others alone. What came is written to the user's cache, never to the shipped files.
"""

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan.errors import ExtraMissingError, InputError, did_you_mean
from capplan.price_cache import write_rows
from capplan.price_import import Imported
from capplan.prices import PriceBook
from capplan.specs import PriceKind

LIMIT_S: Final = 60.0
"""Seconds a provider gets."""
ORIGIN: Final = "gpuhunt"

Fetch = Callable[[str], tuple[str | None, Iterable[Any]]]
"""Provider → the day its prices are of (None: today) and gpuhunt's items. Raises whatever goes wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """What became of one provider: rows written, or why not."""

    provider: str
    cloud: str
    rows: int = 0
    gpus: int = 0
    unknown_gpus: tuple[str, ...] = ()
    seconds: float = 0.0
    read_on: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON of the outcome."""
        return {
            "provider": self.provider,
            "cloud": self.cloud,
            "rows": self.rows,
            "gpus": self.gpus,
            "unknown_gpus": list(self.unknown_gpus),
            "seconds": round(self.seconds, 2),
            "read_on": self.read_on,
            "error": self.error,
        }


class _Job:
    """A provider being fetched; the thread is a daemon, so one that hangs does not hold up the program."""

    def __init__(self, provider: str, fetch: Fetch) -> None:
        self.provider = provider
        self.started = time.monotonic()
        self.ended: float | None = None
        self.result: tuple[str | None, list[Any]] | None = None
        self.error: str | None = None
        self.thread = threading.Thread(target=self._work, args=(fetch,), daemon=True)
        self.thread.start()

    def _work(self, fetch: Fetch) -> None:
        try:
            day, items = fetch(self.provider)
            self.result = day, list(items)
        except Exception as error:  # whatever a provider's reader raises is that provider's failure
            self.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        self.ended = time.monotonic()


def refresh(
    folder: Path,
    *,
    book: PriceBook,
    fetch: Fetch,
    providers: Sequence[str],
    today: datetime.date,
    limit_s: float = LIMIT_S,
) -> list[Refreshed]:
    """Fetch the providers side by side and write each that came to `folder`."""
    jobs = [_Job(provider, fetch) for provider in providers]
    made = []
    for job in jobs:
        job.thread.join(max(0.0, job.started + limit_s - time.monotonic()))
        made.append(_outcome(job, folder, book, today, limit_s))
    return made


def _outcome(job: _Job, folder: Path, book: PriceBook, today: datetime.date, limit_s: float) -> Refreshed:
    cloud = book.cloud_id(job.provider)
    seconds = (job.ended or time.monotonic()) - job.started
    error = job.error
    if job.result is None and error is None:
        error = f"no answer within {limit_s:g} s"
    if job.result is None:
        return Refreshed(provider=job.provider, cloud=cloud, seconds=seconds, error=error)
    day, items = job.result
    kind: PriceKind = "marketplace" if book.provider(cloud).provider_class == "marketplace" else "instance"
    found = _items(items, cloud, day or today.isoformat(), kind)
    rows = found.by_cloud().get(cloud, [])
    if not rows:
        return Refreshed(provider=job.provider, cloud=cloud, seconds=seconds, error="no usable price")
    write_rows(folder, origin=ORIGIN, cloud=cloud, rows=rows)
    return Refreshed(
        provider=job.provider,
        cloud=cloud,
        rows=len(rows),
        gpus=len({row.gpu_id for row in rows}),
        unknown_gpus=tuple(sorted(found.unknown_gpus)),
        seconds=seconds,
        read_on=rows[0].read_on,
    )


def _items(items: Iterable[Any], cloud: str, read_on: str, kind: PriceKind) -> Imported:
    """gpuhunt's CatalogItems as price rows."""
    made = Imported(layout=ORIGIN)
    for item in items:
        if not item.gpu_count or not item.gpu_name:
            made.skipped["without a GPU"] += 1
            continue
        made.add(
            item.gpu_name,
            int(item.gpu_count),
            item.gpu_memory,
            cloud=cloud,
            instance=item.instance_name,
            region=item.location,
            term="spot" if item.spot else "on-demand",
            usd_per_hour=float(item.price),
            read_on=read_on,
            source="gpuhunt",
            kind=kind,
        )
    return made


def gpuhunt_fetch(mirror: str | None = None) -> tuple[Fetch, list[str]]:
    """A fetch through gpuhunt, and the providers it has: published catalogs first, then live ones.

    `mirror` is the address of a copy of its catalogs (https:// or file://); without one, the library's own,
    or that of its GPUHUNT_CATALOG_URL. Raises ExtraMissingError where gpuhunt is not installed.
    """
    try:
        import gpuhunt
        from gpuhunt._internal import catalog as published
        from gpuhunt._internal import default
    except ImportError as error:
        raise ExtraMissingError(
            f"gpuhunt is needed to fetch prices: {error}",
            where="capplan prices refresh",
            hint="pip install 'capplan[prices]'; without a network: `capplan prices import FILE`",
        ) from None
    live = {name.rpartition(".")[2]: (name, kind) for name, kind in default.ONLINE_PROVIDER_MODULES}
    base = (mirror or published._get_base_url()).rstrip("/")

    def fetch(provider: str) -> tuple[str | None, Iterable[Any]]:
        catalog = gpuhunt.Catalog(balance_resources=False, auto_reload=False)
        if provider in published.OFFLINE_PROVIDERS:
            found = catalog._load_provider(base, provider, None)
            return _version_day(found.version), found.items
        import importlib

        module, kind = live[provider]
        catalog.add_provider(getattr(importlib.import_module(module), kind).from_env())
        return None, catalog.query(provider=[provider])

    return fetch, [*published.OFFLINE_PROVIDERS, *(name for name in live)]


def _version_day(version: str) -> str | None:
    """The day in a catalog's version such as 20261101-1234; None where there is none."""
    try:
        return datetime.datetime.strptime(version[:8], "%Y%m%d").date().isoformat()
    except ValueError:
        return None


def rows(done: Sequence[Refreshed], *, full: bool) -> list[dict[str, Any]]:
    """One row a provider; `full` keeps the lists."""
    if full:
        return [entry.to_dict() for entry in done]
    return [
        {
            "provider": entry.provider,
            "prices": entry.rows,
            "gpus": entry.gpus,
            "not_known": len(entry.unknown_gpus),
            "seconds": round(entry.seconds, 1),
            "of": entry.read_on,
            "failed": entry.error,
        }
        for entry in done
    ]


def check_providers(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """The providers asked for, or all; InputError for one that gpuhunt does not have."""
    for name in asked:
        if name not in known:
            raise InputError(
                f"gpuhunt has no provider {name!r}",
                where="--provider",
                hint=did_you_mean(name, known, ", ".join(known)),
            )
    return list(asked) or list(known)
