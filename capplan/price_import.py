"""Price tables of other tools → price rows: gpuhunt and SkyPilot catalogs, and a plain CSV.

A catalog holds many rows that are of no use here (CPUs, GPUs this program does not know, spots without a
price): they are counted, not refused. A plain CSV is written by hand: its slips are errors with their line.
"""

import csv
import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan.errors import InputError, did_you_mean, shown
from capplan.price_cache import write_rows
from capplan.prices import MAX_USD_PER_GPU_HOUR, TERMS, PriceBook
from capplan.specs import Price, PriceKind, Term
from capplan.units import GB

MAX_ROWS: Final = 2_000_000
MAX_GPUS: Final = 4096
"""Of one instance: a pod of accelerators at most."""
MEMORY_SLACK: Final = 0.15
"""A GPU whose name fits is taken where its memory is this near: GB and GiB, reserves, rounding."""
GPUHUNT: Final = frozenset(("instance_name", "location", "price", "gpu_count", "gpu_name", "spot"))
SKYPILOT: Final = frozenset(("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"))
# A plain CSV's column → the names it may have.
PLAIN: Final[Mapping[str, tuple[str, ...]]] = {
    "cloud": ("cloud", "provider"),
    "gpu": ("gpu", "gpu_id"),
    "count": ("count", "gpu_count"),
    "instance": ("instance", "instance_type"),
    "region": ("region",),
    "term": ("term",),
    "usd_per_gpu_hour": ("usd_per_gpu_hour",),
    "usd_per_hour": ("usd_per_hour",),
    "read_on": ("read_on", "as_of"),
    "source": ("source",),
    "notes": ("notes",),
}


@dataclass(slots=True, kw_only=True)
class Imported:
    """Rows of a table, and how many others it had, by reason."""

    layout: str
    rows: list[Price] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    unknown_gpus: Counter[str] = field(default_factory=Counter)
    first_malformed: int | None = None

    def by_cloud(self) -> dict[str, list[Price]]:
        """Rows a provider, the cheapest of those that are one price."""
        best: dict[tuple[object, ...], Price] = {}
        for row in self.rows:
            key = (row.cloud, row.region, row.instance, row.gpu_id, row.gpu_count, row.term)
            if key not in best or row.usd_per_hour < best[key].usd_per_hour:
                best[key] = row
        made: dict[str, list[Price]] = {}
        for row in best.values():
            made.setdefault(row.cloud, []).append(row)
        return made

    def add(self, name: str, count: int, memory_gb: float | None, **values: Any) -> None:
        """A row of a GPU by the table's own name for it."""
        gpu_id = gpu_named(name, memory_gb)
        if gpu_id is None:
            self.unknown_gpus[name] += 1
        elif count > MAX_GPUS:
            self.skipped["too many GPUs"] += 1
        elif not 0 < values["usd_per_hour"] <= MAX_USD_PER_GPU_HOUR * count:
            self.skipped["no usable price"] += 1
        else:
            self.rows.append(Price(gpu_id=gpu_id, gpu_count=count, **values))


def read_prices(path: Path, *, read_on: datetime.date | None = None, cloud: str | None = None) -> Imported:
    """The prices of a CSV, whichever of the three layouts it has.

    `read_on` is the day of a table that does not say; `cloud` the provider of one that does not say
    (a catalog's file is named after its provider). Raises InputError for a file that cannot be used.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            head = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = head
            return _read(reader, set(head), path, read_on, cloud)
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), hint="give the path of a CSV") from None
    except OSError as error:
        reason = error.strerror or "an error"
        raise InputError(f"cannot be read: {reason}", where=str(path), hint="check the path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"no CSV in UTF-8: {error}", where=str(path), hint="save it as CSV") from None


def store(folder: Path, made: Imported, book: PriceBook) -> list[Path]:
    """Write imported rows to the cache, a file a provider, under the providers' ids; returns the files."""
    by_cloud: dict[str, list[Price]] = {}
    for name, rows in made.by_cloud().items():
        cloud = book.cloud_id(name)
        by_cloud.setdefault(cloud, []).extend(replace(row, cloud=cloud) for row in rows)
    return [
        write_rows(folder, origin="import", cloud=cloud, rows=rows)
        for cloud, rows in sorted(by_cloud.items())
    ]


def summary(made: Imported, book: PriceBook) -> list[dict[str, Any]]:
    """What a table held: prices a provider, and what was left out and why."""
    found: list[dict[str, Any]] = [
        {"what": f"{made.layout}: prices of {book.cloud_id(cloud)}", "rows": len(rows)}
        for cloud, rows in sorted(made.by_cloud().items())
    ]
    if made.unknown_gpus:
        names = ", ".join(name for name, _ in made.unknown_gpus.most_common(8))
        found.append({"what": f"left out, GPU not known: {names}", "rows": made.unknown_gpus.total()})
    for reason, count in sorted(made.skipped.items()):
        line = f", first in line {made.first_malformed}" if reason == "malformed" else ""
        found.append({"what": f"left out, {reason}{line}", "rows": count})
    return found


def _read(
    reader: "csv.DictReader[str]",
    head: set[str],
    path: Path,
    read_on: datetime.date | None,
    cloud: str | None,
) -> Imported:
    if head >= GPUHUNT or head >= SKYPILOT:
        day = _day_of(path, read_on).isoformat()
        # SkyPilot has one folder a provider: aws/vms.csv.
        named = (cloud or (path.absolute().parent.name if path.stem == "vms" else path.stem)).lower()
        gpuhunt = head >= GPUHUNT
        made = Imported(layout="gpuhunt" if gpuhunt else "skypilot")
        take = _gpuhunt if gpuhunt else _skypilot
        source = f"{made.layout} catalog, imported"
        for number, row in _rows(reader, path):
            try:
                take(made, row, {"cloud": named, "read_on": day, "source": source})
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
                made.skipped["malformed"] += 1
                made.first_malformed = made.first_malformed or number
    elif _column(head, "gpu") and (_column(head, "usd_per_gpu_hour") or _column(head, "usd_per_hour")):
        made = Imported(layout="plain")
        for number, row in _rows(reader, path):
            _plain(made, row, where=f"{path}, line {number}", head=head, read_on=read_on, cloud=cloud)
    else:
        raise InputError(
            f"columns not understood: {shown(', '.join(sorted(head)), 80)}",
            where=str(path),
            hint="cloud, gpu, usd_per_gpu_hour (and count, region, term, read_on), or a gpuhunt or SkyPilot "
            "catalog",
        )
    if not made.rows:
        unknown = ", ".join(list(made.unknown_gpus)[:5])
        what = f": GPUs not known: {unknown}" if unknown else ""
        raise InputError(f"no usable price{what}", where=str(path), hint="`capplan list gpus`")
    return made


def _rows(reader: "csv.DictReader[str]", path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    for count, row in enumerate(reader):
        if count >= MAX_ROWS:
            raise InputError(f"more than {MAX_ROWS:,} rows", where=str(path), hint="split the file")
        yield reader.line_num, row


def _day_of(path: Path, read_on: datetime.date | None) -> datetime.date:
    if read_on is None:
        raise InputError(
            "the table does not say of which day its prices are",
            where=str(path),
            hint="--read-on YYYY-MM-DD: the day the archive was made",
        )
    return read_on


def gpu_named(name: str, memory_gb: float | None = None) -> str | None:
    """The GPU a catalog means by a name, with its memory where that is needed (A100 of 40 or 80 GB).

    None where no declared name fits, or where the memory is another's.
    """
    index = catalog.index("gpus")
    names = [name]
    if memory_gb:
        names = [f"{name}-{memory_gb:.0f}gb", f"{name}-sxm-{memory_gb:.0f}gb", name]
    for candidate in names:
        found = index.get(catalog.normalised(candidate))
        if found is None:
            continue
        memory = catalog.load_gpu(found).memory_bytes / GB
        if memory_gb and abs(memory - memory_gb) > MEMORY_SLACK * memory:
            continue
        return found
    return None


def _gpuhunt(made: Imported, row: Mapping[str, str], common: Mapping[str, str]) -> None:
    """One line of gpuhunt's catalog: the price of the whole instance, on demand or spot."""
    count = int(row["gpu_count"])
    if count < 1 or not row["gpu_name"]:
        made.skipped["without a GPU"] += 1
        return
    spot = {"true": True, "false": False}[row["spot"].strip().lower()]
    memory = float(row["gpu_memory"]) if row.get("gpu_memory") else None
    made.add(
        row["gpu_name"],
        count,
        memory,
        **common,
        instance=row["instance_name"],
        region=row["location"],
        term="spot" if spot else "on-demand",
        usd_per_hour=float(row["price"]),
        kind=_kind_of(common["cloud"]),
    )


def _kind_of(cloud: str) -> PriceKind:
    """Whether a provider lists prices or passes on the offers of others."""
    return "marketplace" if cloud in ("vast", "vastai", "akash", "salad", "tensordock") else "instance"


def _skypilot(made: Imported, row: Mapping[str, str], common: Mapping[str, str]) -> None:
    """One line of SkyPilot's catalog: on-demand and spot price of the whole instance."""
    name = row["AcceleratorName"].strip()
    if not name:
        made.skipped["without a GPU"] += 1
        return
    count = float(row["AcceleratorCount"])
    if count < 1 or not count.is_integer():
        made.skipped["a part of a GPU"] += 1
        return
    terms: tuple[tuple[Term, str], ...] = (("on-demand", "Price"), ("spot", "SpotPrice"))
    for term, column in terms:
        text = (row.get(column) or "").strip()
        if text:
            made.add(
                name,
                int(count),
                None,  # the names tell sizes apart (A100, A100-80GB); GpuInfo's memory means several things
                **common,
                instance=row["InstanceType"],
                region=row["Region"],
                term=term,
                usd_per_hour=float(text),
                kind=_kind_of(common["cloud"]),
            )


def _column(head: set[str], name: str) -> str | None:
    return next((alias for alias in PLAIN[name] if alias in head), None)


def _plain(
    made: Imported,
    row: Mapping[str, str],
    *,
    where: str,
    head: set[str],
    read_on: datetime.date | None,
    cloud: str | None,
) -> None:
    """One line of a plain CSV; every slip is an error."""

    def text(name: str, default: str = "") -> str:
        column = _column(head, name)
        return ((row.get(column) or "").strip() if column else "") or default

    def fail(problem: str, hint: str) -> InputError:
        return InputError(problem, where=where, hint=hint)

    known = {alias for aliases in PLAIN.values() for alias in aliases}
    for column in head - known:
        raise fail(f"unknown column {shown(column)}", did_you_mean(column, known, ", ".join(PLAIN)))
    gpu = catalog.resolve("gpus", text("gpu"), "gpu")
    count = text("count", "1")
    if not count.isascii() or not count.isdigit() or len(count) > 4 or not 1 <= int(count) <= MAX_GPUS:
        raise fail(f"count {shown(count)}", f"a whole number of GPUs, 1 to {MAX_GPUS}")
    term = text("term", "on-demand")
    if term not in TERMS:
        raise fail(f"unknown term {shown(term)}", did_you_mean(term, TERMS, ", ".join(TERMS)))
    each, whole = text("usd_per_gpu_hour"), text("usd_per_hour")
    if bool(each) == bool(whole):
        raise fail("not one price", "usd_per_gpu_hour, or usd_per_hour of the whole instance")
    try:
        price = float(each or whole) * (int(count) if each else 1)
    except ValueError:
        price = float("nan")
    if not 0 < price <= MAX_USD_PER_GPU_HOUR * int(count):
        raise fail(f"price {shown(each or whole)}", "USD per hour, above 0")
    seller = text("cloud", cloud or "")
    if not seller:
        raise fail("no cloud", "a column cloud, or --cloud NAME")
    day = text("read_on")
    try:
        when = datetime.date.fromisoformat(day) if day else _day_of(Path(where), read_on)
    except ValueError:
        raise fail(f"read_on {shown(day)}", "YYYY-MM-DD") from None
    made.rows.append(
        Price(
            gpu_id=gpu,
            cloud=seller.lower(),
            instance=text("instance", f"{count}x"),
            gpu_count=int(count),
            region=text("region", "any"),
            term=term,
            usd_per_hour=price,
            read_on=when.isoformat(),
            source=text("source", "a CSV, imported"),
            notes=text("notes"),
        )
    )
