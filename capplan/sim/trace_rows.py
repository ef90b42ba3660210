"""Rows of a trace file, one at a time: line, time, prompt and output tokens, blocks."""

import csv
import datetime
import json
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from capplan.errors import shown
from capplan.sim.request import Segments
from capplan.sim.trace_forms import Form, filled, opened

Row = tuple[int, float, int, int, Any]
"""Line number, time in s, prompt tokens, output tokens, ids of the prompt's blocks (form.blocks)."""
Bad = Callable[[int, str, str], None]
"""(line number, what is wrong, what to do): raises, or counts the row as left out."""


def rows_of(path: Path, form: Form, bad: Bad) -> Iterator[Row]:
    """Every row of the file in its order; broken ones go to `bad`, blank ones nowhere."""
    time_of = dates() if form.per_s is None else _numbers(form.per_s)
    if form.delimiter is None:
        return _json_rows(path, form, time_of, bad)
    return _csv_rows(path, form, form.delimiter, time_of, bad)


def block_segments(ids: Any, prompt_tokens: int, block_tokens: int, copy: int) -> Segments | None:
    """The segments of a prompt by its blocks' ids: all full but the last; None where they do not add up.

    A later copy of a trace has its own identities: its prompts are new ones, as alike among each other.
    """
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        return None
    last = prompt_tokens - (len(ids) - 1) * block_tokens
    if not 0 < last <= block_tokens:
        return None
    keys = zip(repeat(copy), ids, strict=False) if copy else ids
    blocks = tuple(zip(keys, repeat(block_tokens), strict=False))
    return blocks if last == block_tokens else (*blocks[:-1], (blocks[-1][0], last))


def dates() -> Callable[[str], float]:
    """Times written as dates → s since midnight of the first one's day; without a zone they are UTC.

    A minute is parsed once and the seconds in it read as a number: 7 digits are kept, and it is quick.
    The function raises ValueError where a text is no date.
    """
    midnight: datetime.datetime | None = None
    minute, minute_s = "", 0.0

    def parsed(text: str) -> float:
        nonlocal midnight
        moment = datetime.datetime.fromisoformat(text.strip())
        moment = moment.astimezone(datetime.UTC) if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        if midnight is None:
            midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
        return (moment - midnight).total_seconds()

    def time_of(text: str) -> float:
        nonlocal minute, minute_s
        if text[:17] != minute:
            if text[16:17] != ":":
                return parsed(text)
            minute, minute_s = text[:17], parsed(text[:16])
        try:
            seconds = float(text[17:])
        except ValueError:
            return parsed(text)  # a zone follows
        if not 0 <= seconds < 61:
            raise ValueError(text)
        return minute_s + seconds

    return time_of


def _numbers(per_s: int) -> Callable[[Any], float]:
    return float if per_s == 1 else lambda value: float(value) / per_s


def _csv_rows(
    path: Path, form: Form, delimiter: str, time_of: Callable[[Any], float], bad: Bad
) -> Iterator[Row]:
    with opened(path) as stream:
        reader = csv.reader(stream, delimiter=delimiter, skipinitialspace=True)
        head = filled(reader)
        arrival, prompt, output = (head.index(name) for name in (form.arrival, form.prompt, form.output))
        for cells in reader:
            try:
                row = reader.line_num, time_of(cells[arrival]), int(cells[prompt]), int(cells[output]), None
            except (ValueError, IndexError, OverflowError):
                if not any(map(str.strip, cells)):
                    continue
                try:
                    tokens = _whole(cells[prompt]), _whole(cells[output])
                    row = reader.line_num, time_of(cells[arrival]), *tokens, None
                except (ValueError, IndexError, OverflowError):
                    bad(reader.line_num, *_broken(form, dict(zip(head, cells, strict=False))))
                    continue
            yield row


def _json_rows(path: Path, form: Form, time_of: Callable[[Any], float], bad: Bad) -> Iterator[Row]:
    arrival, prompt, output, blocks = form.arrival, form.prompt, form.output, form.blocks
    loads = json.JSONDecoder().decode
    with opened(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            try:
                entry = loads(line)
            except (ValueError, RecursionError):
                bad(number, f"{shown(line.strip())} is no JSON", "every line is one JSON object")
                continue
            try:
                ids = None if blocks is None else entry.get(blocks)
                row = number, time_of(entry[arrival]), _whole(entry[prompt]), _whole(entry[output]), ids
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                bad(number, *_broken(form, entry if isinstance(entry, dict) else {}))
                continue
            yield row


def _whole(value: Any) -> int:
    """A whole number, be it written 374, 374.0 or "374"; ValueError otherwise."""
    if type(value) is int:
        return value
    number = float(value)
    if isinstance(value, bool) or not number.is_integer():
        raise ValueError(value)
    return int(number)


def _broken(form: Form, row: dict[str, Any]) -> tuple[str, str]:
    """What is wrong with a row, and what to do."""
    columns = form.arrival, form.prompt, form.output
    missing = [name for name in columns if row.get(name) in (None, "")]
    if missing:
        return f"a row without {', '.join(missing)}", "complete or remove the row, or give --skip-bad-rows"
    told = ", ".join(f"{name} {shown(row[name])}" for name in columns)
    return f"a row that cannot be read: {told}", "a time and two whole numbers; or give --skip-bad-rows"
