"""Measured tables as columns, by operation, dtype and engine; rows left out are counted with the reason."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from capplan.errors import InputError, shown

Array = Any

# dtype of a measured kernel → our key and the bits of a weight, scales included.
DTYPES: Final[Mapping[str, tuple[str, float]]] = {
    "bfloat16": ("bf16", 16),
    "fp8": ("fp8", 8),
    "fp8_block": ("fp8_block", 8),
    "sq": ("int8", 8),
    "int8_wo": ("w8a16", 8),
    "int4_wo": ("w4a16", 4),
    "nvfp4": ("nvfp4", 4.5),
    "w4a16_mxfp4": ("w4a16_mxfp4", 4.25),
    "w4a8_mxfp4_mxfp8": ("w4a8_mxfp4_mxfp8", 4.25),
}
_BITS: Final = dict(DTYPES.values())


def weight_bits(dtype: str) -> float:
    """Bits of a weight under one of our dtype keys, scales included."""
    return _BITS[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Who measured what a file holds."""

    what: str
    source: str
    licence: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Measurements of one operation, dtype and engine on one GPU.

    `groups` names what may be held out, row by row: rows of one group are alike and go together. For a
    collective `dtype` is the rank count.
    """

    op: str
    gpu_id: str
    dtype: str
    engine: str
    columns: Mapping[str, Array]
    seconds: Array
    groups: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.gpu_id, self.op, self.dtype, self.engine)

    def only(self, rows: Array) -> "Table":
        """The rows where a mask is true."""
        kept = np.flatnonzero(rows)
        return Table(
            op=self.op,
            gpu_id=self.gpu_id,
            dtype=self.dtype,
            engine=self.engine,
            columns={name: column[kept] for name, column in self.columns.items()},
            seconds=self.seconds[kept],
            groups=tuple(self.groups[row] for row in kept),
        )


@dataclass(slots=True, kw_only=True)
class FileCount:
    """What was read of one source for one GPU."""

    source: Source
    rows: int = 0
    excluded: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement on its way into a table."""

    op: str
    dtype: str
    engine: str
    columns: Mapping[str, float]
    seconds: float
    group: str


class Measured:
    """Measurements of any number of files, collected by key."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
        self.counts: dict[tuple[str, str], FileCount] = {}

    def count(self, gpu_id: str, source: Source) -> FileCount:
        return self.counts.setdefault((gpu_id, source.what), FileCount(source=source))

    def add(self, gpu_id: str, source: Source, found: Row | str) -> None:
        """A row, or why it is left out."""
        count = self.count(gpu_id, source)
        count.rows += 1
        if isinstance(found, str):
            count.excluded[found] += 1
        else:
            self.rows[(gpu_id, found.op, found.dtype, found.engine)].append(found)

    def tables(self) -> list[Table]:
        """All rows as columns, in order of their keys."""
        made = []
        for (gpu_id, op, dtype, engine), rows in sorted(self.rows.items()):
            names = rows[0].columns
            made.append(
                Table(
                    op=op,
                    gpu_id=gpu_id,
                    dtype=dtype,
                    engine=engine,
                    columns={name: np.array([float(row.columns[name]) for row in rows]) for name in names},
                    seconds=np.array([row.seconds for row in rows]),
                    groups=tuple(row.group for row in rows),
                )
            )
        return made


class Cells:
    """One line of a CSV file; a cell that is missing or no number is an error with its place."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self.where = f"{path}:{line}"
        self.cells = cells

    def text(self, name: str) -> str:
        value = self.cells.get(name)
        if value is None or not value.strip():
            raise InputError(f"no {name}", where=self.where, hint="the table is cut off or another one's")
        return value.strip()

    def number(self, name: str) -> float:
        """A finite number that is not negative."""
        text = self.text(name)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise InputError(f"{name}: {shown(text)} is no such number", where=self.where, hint="repair it")
        return value

    def count(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self.number(name)
        if value < 1 or value != int(value):
            raise InputError(f"{name}: {value:g} is no count", where=self.where, hint="repair it")
        return int(value)

    def seconds(self, name: str, unit_s: float) -> float:
        """A time above zero."""
        value = self.number(name)
        if value <= 0:
            raise InputError(f"{name}: a time of 0", where=self.where, hint="leave the row out")
        return value * unit_s

    def dtype(self, name: str) -> str:
        """Our key of a measured dtype."""
        text = self.text(name)
        if text not in DTYPES:
            raise InputError(
                f"{name}: {shown(text)} is not known", where=self.where, hint="known: " + ", ".join(DTYPES)
            )
        return DTYPES[text][0]


def lines(path: Path) -> Iterator[Cells]:
    """The lines of a CSV file with a header."""
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            for number, cells in enumerate(csv.DictReader(stream), start=2):
                yield Cells(path, number, cells)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), hint="give a CSV table") from error
