"""Measured points: what was timed, how long it took, and why it does not count where it does not.

Points are kept one JSON object a line while a profile runs, each written through to the disk: a run that is
killed loses at most the point in flight. A bad point is never dropped, it carries the reason.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from capplan.calibrate.bench import Conditions
from capplan.calibrate.clock import Timing
from capplan.errors import InputError, shown

MICRO: Final = 1e6
COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "gemm": ("dtype", "m", "n", "k", "context", "round"),
    "attention": ("kv", "batch", "context", "round"),
    "prefill": ("tokens", "dtype"),
    "small": ("name", "tokens", "bytes", "context", "round"),
    "step": ("precision", "dtype", "kv", "batch", "context", "layers", "use", "round"),
    "collective": ("op", "backend", "ranks", "bytes"),
}
"""Kind of point → what names it.

A step's `use`: anchor, held out, contiguous (its twin without blocks), prompt (one of `context` tokens).
"""
MEASURED: Final = (
    "us_p10", "us_p50", "us_p90", "cpu_us", "joules_per_token", "repeats", "noise", "sm_mhz", "power_w",
    "void",
)  # fmt: skip

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One operation's time in microseconds; `void` says why it does not count, None where it does.

    `noise`: how far a second measurement, right after, was from the first, as a share. `sm_mhz`, `power_w`:
    medians of what a GPU said meanwhile.
    """

    kind: str
    key: Key
    us_p10: float | None = None
    us_p50: float | None = None
    us_p90: float | None = None
    cpu_us: float | None = None
    joules_per_token: float | None = None
    repeats: int = 0
    noise: float | None = None
    sm_mhz: float | None = None
    power_w: float | None = None
    void: str | None = None

    @property
    def seconds(self) -> float:
        """The median."""
        return (self.us_p50 or 0.0) / MICRO

    def __getattr__(self, name: str) -> Any:
        """A part of the key by its column's name."""
        columns = COLUMNS[object.__getattribute__(self, "kind")]
        if name in columns:
            return self.key[columns.index(name)]
        raise AttributeError(name)

    def row(self) -> list[Any]:
        """The row of the calibration file's table."""
        return [*self.key, *(getattr(self, name) for name in MEASURED)]


def point(kind: str, key: Key, timing: Timing, conditions: Conditions | None = None) -> Point:
    """A timed point; a tenth of a microsecond is as far as a clock can be trusted."""

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else max(0.1, round(seconds * MICRO, 1))

    return Point(
        kind=kind,
        key=key,
        us_p10=rounded(timing.p10_s),
        us_p50=rounded(timing.p50_s),
        us_p90=rounded(timing.p90_s),
        cpu_us=rounded(timing.cpu_s),
        repeats=len(timing.samples),
        **({} if conditions is None else asdict(conditions)),
    )


def tables(points: Iterator[Point]) -> dict[str, Any]:
    """Points as the calibration file keeps them: {kind: {cols, rows}}."""
    made: dict[str, Any] = {}
    for each in points:
        table = made.setdefault(each.kind, {"cols": [*COLUMNS[each.kind], *MEASURED], "rows": []})
        table["rows"].append(each.row())
    return made


def from_tables(found: Mapping[str, Any], where: str) -> list[Point]:
    """The points of a calibration file. Raises InputError for tables of another form."""
    made = []
    for kind, table in found.items():
        columns = [*COLUMNS.get(kind, ()), *MEASURED]
        if kind not in COLUMNS or not isinstance(table, Mapping) or table.get("cols") != columns:
            raise InputError(
                f"points of {kind} with other columns", where=where, hint="profile again with this version"
            )
        for row in _rows(table, f"{where}, points.{kind}"):
            if not isinstance(row, list) or len(row) != len(columns):
                raise InputError(f"a row of {kind} is not complete", where=where, hint="profile again")
            for name, value in zip(columns, row, strict=True):
                _value(name, value, f"{where}, points.{kind}")
            count = len(COLUMNS[kind])
            made.append(
                Point(kind=kind, key=tuple(row[:count]), **dict(zip(MEASURED, row[count:], strict=True)))
            )
    return made


_WORDS: Final = ("dtype", "kv", "name", "precision", "use", "op", "backend")
_COUNTS: Final = ("round", "context", "repeats")


def _rows(table: Mapping[str, Any], where: str) -> list[Any]:
    rows = table.get("rows")
    if not isinstance(rows, list):
        raise InputError("no rows", where=where, hint="profile again")
    return rows


def _value(name: str, value: Any, where: str) -> None:
    """Refuse a value that its column cannot hold: words, counts from 0 or 1, times above 0."""
    if name in MEASURED and value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name in _WORDS or name == "void":
        fits = isinstance(value, str) and value.isprintable()
    elif name in MEASURED and name not in _COUNTS:
        fits = number and value >= 0 and (value > 0 or not name.startswith("us_"))
    else:
        fits = isinstance(value, int) and number and value >= (0 if name in _COUNTS else 1)
    if not fits:
        raise InputError(f"{name} is {shown(value)}", where=where, hint="profile again")


class Journal:
    """The points of a run under way, in a file beside the calibration that it will become."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool = False) -> None:
        """Raises InputError where `resume` finds points of another device, model or clock."""
        self.path = path
        self.points: dict[tuple[str, Key], Point] = {}
        lines: list[str] = []
        if resume and path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _parsed(line) is not None]
        if kept:
            self._same(_parsed(kept[0]) or {}, header)
            for line in kept[1:]:
                found = _parsed(line) or {}
                made = Point(**{**found, "key": tuple(found["key"])})
                self.points[(made.kind, made.key)] = made
        part = path.with_name(path.name + ".part")
        whole = [dict(header), *(_line(each) for each in self.points.values())]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Replaced as a whole: what is there is not lost where this is the moment of a kill.
            with part.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in whole)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            self.file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from None

    def _same(self, found: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        for name, value in header.items():
            if found.get(name) != value:
                raise InputError(
                    f"the points kept are of {name} {found.get(name)!r}, this run of {value!r}",
                    where=f"--resume, {self.path}",
                    hint="profile without --resume, or with the options of before",
                )

    def add(self, made: Point) -> None:
        """Keep a point, on the disk before the next is timed; one that counts is not lost to a void one."""
        before = self.points.get((made.kind, made.key))
        if before is not None and before.void is None and made.void is not None:
            return
        self.points[(made.kind, made.key)] = made
        self._write(_line(made))

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise unwritable(self.path, error) from None

    def of(self, kind: str) -> list[Point]:
        """Points of a kind that count."""
        return [each for each in self.points.values() if each.kind == kind and each.void is None]

    def done(self) -> None:
        """The calibration is written: its points are in it."""
        self.file.close()
        self.path.unlink(missing_ok=True)


def unwritable(path: Path, error: OSError) -> InputError:
    """A disk that is full, or a folder that may not be written."""
    return InputError(
        f"cannot be written: {error.strerror or error}", where=str(path), hint="give another --out"
    )


def _line(made: Point) -> dict[str, Any]:
    return {"kind": made.kind, "key": list(made.key)} | {name: getattr(made, name) for name in MEASURED}


def _parsed(line: str) -> dict[str, Any] | None:
    """A whole line; None for the one that a kill cut short."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
