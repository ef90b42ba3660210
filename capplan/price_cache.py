"""Price rows in the user's cache: one JSON file a provider and origin, replaced whole or not at all.

`load` joins them to the shipped rows.
"""

import datetime
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError, shown
from capplan.prices import KINDS, MAX_USD_PER_GPU_HOUR, TERMS, PriceBook, shipped
from capplan.specs import Price

SCHEMA: Final = "capplan.prices/1"


def load(folder: Path | None = None) -> PriceBook:
    """The shipped rows, and those a user fetched or imported into `folder`."""
    rows, providers = shipped()
    return PriceBook((*rows, *(read_rows(folder) if folder is not None else ())), providers)


def read_rows(folder: Path) -> list[Price]:
    """All rows of a cache folder; none where it does not exist."""
    if not folder.is_dir():
        return []
    return [row for path in sorted(folder.glob("*.json")) for row in _file(path)]


def _file(path: Path) -> Iterator[Price]:
    hint = "delete the file, then fetch or import the prices again"
    try:
        data: Any = json.loads(path.read_bytes())
        rows = [Price(**row) for row in data["rows"]] if data["schema"] == SCHEMA else None
    except (OSError, ValueError, TypeError, KeyError):
        rows = None
    if rows is None or not all(map(_sound, rows)):
        raise InputError("no price file of this program", where=str(path), hint=hint)
    yield from rows


def _sound(row: Price) -> bool:
    """Whether a row read from JSON has what every shipped row has."""
    try:
        datetime.date.fromisoformat(row.read_on)
        return (
            row.term in TERMS
            and row.kind in KINDS
            and isinstance(row.gpu_count, int)
            and row.gpu_count >= 1
            and 0 < float(row.usd_per_hour) <= MAX_USD_PER_GPU_HOUR * row.gpu_count
            and all(isinstance(text, str) for text in (row.cloud, row.gpu_id, row.region, row.instance))
        )
    except (TypeError, ValueError):
        return False


def write_rows(folder: Path, *, origin: str, cloud: str, rows: Sequence[Price]) -> Path:
    """Replace what `origin` said of `cloud`; a crash leaves the old file. Returns the file's path."""
    path = folder / f"{cloud}.{origin}.json"
    text = json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}, indent=0) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise _unwritable(folder, error) from None
    return path


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"the price cache cannot be written: {shown(error.strerror or str(error))}",
        where=str(folder),
        hint="make the folder writable, or set XDG_CACHE_HOME",
    )
