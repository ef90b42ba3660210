"""Measured points: what was timed, how long it took, and why it does not count where it does not.

Points are kept one JSON object a line while a profile runs, each written through to the disk: a run that is
killed loses at most the point in flight. A bad point is never dropped, it carries the reason.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from capplan.calibrate.clock import Timing
from capplan.errors import InputError

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
MEASURED: Final = ("us_p10", "us_p50", "us_p90", "cpu_us", "joules_per_token", "repeats", "noise", "void")

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One operation's time in microseconds; `void` says why it does not count, None where it does.

    `noise`: how far a second measurement, right after, was from the first, as a share.
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


def point(kind: str, key: Key, timing: Timing, void: str | None = None) -> Point:
    """A timed point; a tenth of a microsecond is as far as a clock can be trusted."""

    def rounded(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * MICRO, 1)

    return Point(
        kind=kind,
        key=key,
        us_p10=rounded(timing.p10_s),
        us_p50=rounded(timing.p50_s),
        us_p90=rounded(timing.p90_s),
        cpu_us=rounded(timing.cpu_s),
        repeats=len(timing.samples),
        void=void,
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
        if kind not in COLUMNS or table.get("cols") != columns:
            raise InputError(
                f"points of {kind} with other columns", where=where, hint="profile again with this version"
            )
        for row in table["rows"]:
            if not isinstance(row, list) or len(row) != len(columns):
                raise InputError(f"a row of {kind} is not complete", where=where, hint="profile again")
            count = len(COLUMNS[kind])
            made.append(
                Point(kind=kind, key=tuple(row[:count]), **dict(zip(MEASURED, row[count:], strict=True)))
            )
    return made


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
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: IO[str] = path.open("w", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from None
        self._write(dict(header))
        for each in self.points.values():
            self._write(_line(each))

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
