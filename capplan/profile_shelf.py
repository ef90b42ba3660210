"""The calibrations that a user measured or was given: listed, checked, taken in."""

from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from capplan import local_calibration
from capplan.errors import InputError
from capplan.local_calibration import LocalCalibration

ENDINGS = (".yaml", ".yml", ".json")


def worst_error(error: Mapping[str, Any]) -> float | None:
    """The largest of the formats' median errors of steps held out, in percent."""
    found = [each["median_pct"] for each in error.get("step", {}).values()]
    return max(found, default=None)


def rows(folder: Path, today: date) -> list[dict[str, Any]]:
    """One row a file, the least error first and the newest of equals; a broken file says why it is."""
    made = [_row(path, today) for path in sorted(folder.glob("*")) if path.suffix in ENDINGS]
    return sorted(
        made,
        key=lambda row: (
            row["error_pct"] is None,
            row["error_pct"] or 0.0,
            row["age_days"] if row["age_days"] is not None else 1 << 30,
        ),
    )


def _row(path: Path, today: date) -> dict[str, Any]:
    try:
        found = local_calibration.read(path)
    except InputError as refused:
        return _line(path.stem, problem=refused.message)
    run = found.data.get("run", {})
    return _line(
        path.stem,
        device=found.gpu.id,
        model=run.get("model"),
        formats=" ".join(run.get("formats", {})),
        error_pct=worst_error(found.error),
        age_days=_age(run.get("started"), today),
        clock=run.get("clock"),
    )


def _line(name: str, **found: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("device", "model", "formats", "error_pct", "age_days", "clock", "problem"))
    return {"id": name, **empty, **found}


def _age(started: Any, today: date) -> int | None:
    """Days since a run began; None where the file does not say when."""
    try:
        return max(0, (today - datetime.fromisoformat(str(started)).date()).days)
    except ValueError:
        return None


def newest(folder: Path, gpu_id: str) -> Path | None:
    """The newest sound profile of a device; None without one."""
    best: tuple[str, Path] | None = None
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        if path.suffix not in ENDINGS:
            continue
        try:
            found = local_calibration.read(path)
        except InputError:
            continue
        if found.gpu.id == gpu_id:
            began = (str(found.data.get("run", {}).get("started", "")), path)
            best = began if best is None else max(best, began)
    return None if best is None else best[1]


def place(folder: Path, found: LocalCalibration) -> Path:
    """Where a file taken in is kept: under its own id."""
    return folder / f"{found.id}.yaml"
