"""`capplan prices`: dated prices, listed, fetched and imported."""

import datetime
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from capplan.cli.cost import parse_day
from capplan.cli.explain import report_rows
from capplan.cli.output import OutputFormat, console_width
from capplan.cli.user_folders import price_folder
from capplan.errors import ExitStatus, InputError, NetworkError

WIDE = 140


class Action(str, Enum):
    """What to do with prices."""

    LIST = "list"
    SHOW = "show"
    CHEAPEST = "cheapest"
    REFRESH = "refresh"
    IMPORT = "import"


def prices(
    action: Annotated[Action, typer.Argument(help="list, show, cheapest, refresh or import.")],
    name: Annotated[str | None, typer.Argument(help="show: GPU or provider; import: a CSV.")] = None,
    term: Annotated[str | None, typer.Option(help="on-demand, spot, 1yr, 3yr.")] = None,
    cloud: Annotated[str | None, typer.Option(help="Provider; import: of a table without one.")] = None,
    region: Annotated[str | None, typer.Option(help="Region, or us, eu, ap.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="cheapest: GPUs that are wanted.")] = 1,
    provider: Annotated[str | None, typer.Option(help="refresh: of gpuhunt, by commas (all).")] = None,
    limit: Annotated[float, typer.Option(min=0.1, help="refresh: seconds for each provider.")] = 60.0,
    mirror: Annotated[str | None, typer.Option(help="refresh: https:// or file:// of a copy.")] = None,
    read_on: Annotated[str | None, typer.Option(help="import: day of a table without one.")] = None,
    today: Annotated[str | None, typer.Option(help="Day from which ages count.")] = None,
    no_user_data: Annotated[bool, typer.Option("--no-user-data", help="Shipped prices only.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """Prices of GPUs with their day and source; fetch or import newer ones.

    Example: capplan prices cheapest h100
    """
    day = parse_day(today, "--today") or datetime.date.today()
    if action is Action.REFRESH:
        return _refresh(provider, limit, mirror, day, output)
    if action is Action.IMPORT:
        return _import(name, parse_day(read_on, "--read-on"), cloud, output)
    from capplan import catalog, price_cache, price_choice, price_listing
    from capplan import prices as rows_of

    book = price_cache.load(None if no_user_data else price_folder())
    place: dict[str, Any] = {"cloud": cloud, "region": region}
    if action is Action.LIST:
        rows = price_listing.overview(book, day, everything=output is not OutputFormat.TABLE)
        without = price_listing.unpriced(book)
        print(f"{len(without)} GPUs without a price: `capplan list gpus` has them", file=sys.stderr)
    elif action is Action.SHOW:
        rows = price_listing.of_gpu_or_cloud(
            book, _named(name, action), today=day, term=rows_of.checked_term(term) if term else None, **place
        )
    else:
        ids = book.gpu_ids() if name is None else [catalog.resolve("gpus", name, "gpu")]
        way = rows_of.checked_term(term or "on-demand")
        rows = price_listing.cheapest(book, ids, today=day, term=way, gpus=gpus, **place)
        if name is not None and rows[0]["usd_per_gpu_hour"] is None:
            raise price_choice.missing(book, ids[0], term=way, **place)
    _report(rows, output, f"capplan.prices.{action.value}/1")
    return 0


def _named(name: str | None, action: Action) -> str:
    if name is None:
        raise InputError(
            f"{action.value} what?",
            where=f"capplan prices {action.value}",
            hint="a GPU or provider" if action is Action.SHOW else "the path of a CSV",
        )
    return name


def _report(rows: list[dict[str, Any]], output: OutputFormat, schema: str) -> None:
    if output is OutputFormat.TABLE:
        from capplan import price_listing

        rows = price_listing.short(rows, wide=console_width() >= WIDE)
    report_rows(rows, output, schema, short=True)


def _refresh(
    provider: str | None, limit: float, mirror: str | None, today: datetime.date, output: OutputFormat
) -> int:
    """Fetch prices; exit 6 where nothing came, or not all that was asked for by name."""
    from capplan import price_cache, price_refresh

    folder = price_folder()
    fetch, known = price_refresh.gpuhunt_fetch(mirror)
    asked = [name.strip() for name in (provider or "").split(",") if name.strip()]
    chosen = price_refresh.check_providers(asked, known)
    done = price_refresh.refresh(
        folder, book=price_cache.load(), fetch=fetch, providers=chosen, today=today, limit_s=limit
    )
    report_rows(
        price_refresh.rows(done, full=output is OutputFormat.JSON), output, "capplan.prices.refresh/1"
    )
    failed = [entry.provider for entry in done if entry.error is not None]
    if failed and (asked or len(failed) == len(done)):
        raise NetworkError(
            f"no new prices of {', '.join(failed)}",
            where="capplan prices refresh",
            hint="those known before stay; --limit gives more time; `prices import FILE` needs no network",
        )
    print(f"written to {folder}", file=sys.stderr)
    return int(ExitStatus.OK)


def _import(name: str | None, read_on: datetime.date | None, cloud: str | None, output: OutputFormat) -> int:
    from capplan import price_cache, price_import

    made = price_import.read_prices(Path(_named(name, Action.IMPORT)), read_on=read_on, cloud=cloud)
    book = price_cache.load()
    files = price_import.store(price_folder(), made, book)
    report_rows(price_import.summary(made, book), output, "capplan.prices.import/1")
    for path in files:
        print(f"written to {path}", file=sys.stderr)
    return int(ExitStatus.OK)
