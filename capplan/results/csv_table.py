"""A measured table (CSV) row by row: columns checked, cells as text, a row that cannot be used says why."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from capplan.errors import InputError, did_you_mean, shown

Run = TypeVar("Run")


class BadRowError(Exception):
    """Why a row is not used."""


def read_rows(
    path: Path, columns: Sequence[str], run_of: Callable[[Mapping[str, str], int], Run]
) -> tuple[tuple[Run, ...], dict[int, str]]:
    """What `run_of` makes of each row (cells by column, line), and line → reason of those it refuses.

    `run_of` raises BadRowError for a row it cannot use.
    Errors: InputError for a file that is no such table; never for a row.
    """
    runs: list[Run] = []
    rejected: dict[int, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            _check_columns(reader.fieldnames or (), columns, path)
            for row in reader:
                try:
                    runs.append(run_of(_cells(row), reader.line_num))
                except BadRowError as error:
                    rejected[reader.line_num] = str(error)
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(path), hint="name a CSV file"
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"no CSV text: {error}", where=str(path), hint="save it as UTF-8 CSV") from None
    return tuple(runs), rejected


def _check_columns(found: object, columns: Sequence[str], path: Path) -> None:
    names = [str(name) for name in found] if isinstance(found, list | tuple) else []
    missing = [name for name in columns if name not in names]
    if missing:
        raise InputError(
            f"column {missing[0]} is missing", where=str(path), hint=f"a table has {', '.join(columns)}"
        )
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise InputError(
            f"unknown column {shown(unknown[0])}",
            where=str(path),
            hint=did_you_mean(unknown[0], columns, "remove it"),
        )


def _cells(row: Mapping[str | None, object]) -> dict[str, str]:
    if None in row or any(value is None for value in row.values()):
        raise BadRowError("another number of cells than columns")
    return {str(name): str(value).strip() for name, value in row.items()}
