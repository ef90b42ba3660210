"""When GPUs run: a weekly schedule in words, or the share of a fleet that runs in each hour of the day."""

import math
import re
from typing import Final

from capplan.errors import InputError, shown
from capplan.formulas import cost

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_LONG: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_NAMES: Final = {name: at for names in (DAYS, _LONG) for at, name in enumerate(names)}
_GROUPS: Final = {"weekdays": DAYS[:5], "weekends": DAYS[5:], "daily": DAYS, "always": DAYS}
_PART: Final = re.compile(r"([a-z]+)(?:-([a-z]+))?(?:\s+(\d{1,2})(?::00)?-(\d{1,2})(?::00)?)?", re.ASCII)
_HINT: Final = '"weekdays 8-20", "mon-fri 9-18, sat 10-14", "daily 22-6" or "always"'


def week_hours(text: str) -> set[tuple[int, int]]:
    """The (day, hour) pairs of a week in which GPUs run; InputError for what is no schedule.

    A range of hours ends before its last hour; one that ends before it begins runs into the next day.
    """
    made: set[tuple[int, int]] = set()
    for part in text.lower().split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise _no_schedule(text)
        first, last, begin, end = match.groups()
        start, stop = (0, 24) if begin is None else (int(begin), int(end))
        if start > 23 or stop > 24 or start == stop:
            raise _no_schedule(text)
        if stop < start:
            stop += 24
        for day in _days(first, last, text):
            for hour in range(start, stop):
                made.add(((day + hour // 24) % 7, hour % 24))
    return made


def _days(first: str, last: str | None, text: str) -> list[int]:
    if last is None and first in _GROUPS:
        return [DAYS.index(day) for day in _GROUPS[first]]
    found = [_NAMES.get(name) for name in (first, last or first)]
    if None in found:
        raise _no_schedule(text)
    begin, end = (at for at in found if at is not None)
    return [at % 7 for at in range(begin, (end if end >= begin else end + 7) + 1)]


def _no_schedule(text: str) -> InputError:
    return InputError(f"{shown(text)} is no schedule", where="--schedule", hint=_HINT)


def month_hours(text: str) -> float:
    """Hours of a month that a schedule runs."""
    return cost.month_hours(week_hours=len(week_hours(text)))


def parse_diurnal(text: str) -> tuple[float, ...]:
    """24 shares of the fleet, hour by hour from midnight; InputError for anything else."""
    try:
        made = tuple(float(part) for part in text.replace(";", ",").split(","))
    except ValueError:
        made = ()
    if len(made) != 24 or not all(0 <= share <= 1 for share in made) or not any(made):
        raise InputError(
            f"{shown(text)} is no day",
            where="--diurnal",
            hint="24 numbers from 0 to 1, from midnight on: the share of the peak load in each hour",
        )
    return made


def running_share(diurnal: tuple[float, ...], replicas: int) -> float:
    """The part of the fleet that runs on average, in whole replicas, where each hour follows its load."""
    running = sum(math.ceil(share * replicas - 1e-9) for share in diurnal)
    return running / (replicas * len(diurnal))
