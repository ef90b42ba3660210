"""Calibrations from folders of measured tables, and the files they are kept in."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan.calibrate import forms, kernel_tables, layer_tables
from capplan.calibrate.fit import Errors, Fitted, enough, errors, fit_table
from capplan.calibrate.tables import FileCount, Measured
from capplan.errors import InputError

SCHEMA: Final = "capplan.calibration/1"
# Not a property of the call that was timed, but of how it was timed.
_NOT_A_SHAPE: Final = ("copies",)


def read(folders: Sequence[Path]) -> Measured:
    """All measured tables of some folders and of those directly inside them.

    Kernel tables come first: where they have a GPU, layer timings add only what they lack.
    """
    measured = Measured()
    inside: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise InputError("no such folder", where=str(folder), hint="give a folder of measured tables")
        inside += [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found = [kernel_tables.read(folder, measured) for folder in inside]
    known = frozenset(gpu_id for gpu_id, op, _, _ in measured.rows if op == "gemm")
    found += [layer_tables.read(folder, measured, elementwise_only=known) for folder in inside]
    if not any(found):
        raise InputError(
            "no measured table in it",
            where=", ".join(map(str, folders)),
            hint="gemm.csv, attention_decode.csv and the like, or a layer profile with meta.yaml",
        )
    return measured


def fit_all(measured: Measured) -> list[Fitted]:
    """Every table that has rows enough, fitted."""
    return [fit_table(table) for table in measured.tables() if enough(table)]


def _alike(found: Sequence[Fitted]) -> dict[tuple[str, str, str, str], list[Fitted]]:
    """Fits whose errors are taken together: rank counts of a collective are few rows each."""
    made: dict[tuple[str, str, str, str], list[Fitted]] = defaultdict(list)
    for part in found:
        gpu_id, op, dtype, engine = part.table.key
        made[(gpu_id, op, "" if op in forms.COLLECTIVES else dtype, engine)].append(part)
    return made


def _place(part: Fitted) -> tuple[Any, ...]:
    """Where a fit stands in the file: operation, dtype, engine; a collective's rank count comes last."""
    _, op, dtype, engine = part.table.key
    return (op, engine, int(dtype)) if op in forms.COLLECTIVES else (op, dtype, engine)


def _put(tree: dict[Any, Any], place: tuple[Any, ...], value: Mapping[str, Any]) -> None:
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    tree[place[-1]] = dict(value)


def fit_hash(fit: Mapping[str, Any]) -> str:
    """Hash of what predictions read."""
    return hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()


def document(gpu_id: str, found: Sequence[Fitted], counts: Iterable[FileCount]) -> dict[str, Any]:
    """The content of one GPU's calibration file."""
    fit: dict[Any, Any] = {}
    error: dict[Any, Any] = {}
    validity: dict[Any, Any] = {}
    for group in _alike(found).values():
        shared = errors(group)
        for part in group:
            place = _place(part)
            _put(fit, place, part.numbers)
            own = {**shared.to_dict(), "rows": len(part.table.seconds)}
            _put(error, place, own)
            _put(validity, place, _ranges(part))
    return {
        "schema": SCHEMA,
        "id": gpu_id,
        "origin": "public",
        "hardware": {"key": gpu_id, "architecture": catalog.load_gpu(gpu_id).architecture},
        "sources": [_source(count) for count in counts],
        "fit": fit,
        "error": error,
        "validity": validity,
        "hash": fit_hash(fit),
    }


def _ranges(part: Fitted) -> dict[str, list[float]]:
    """Least and most of every shape that was measured."""
    made = {}
    for name, column in part.table.columns.items():
        if name not in _NOT_A_SHAPE:
            made[name] = [_plain(float(column.min())), _plain(float(column.max()))]
    return made


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value


def _source(count: FileCount) -> dict[str, Any]:
    source = count.source
    made: dict[str, Any] = {
        "what": source.what,
        "source": source.source,
        "licence": source.licence,
        "date": source.date,
        "rows": count.rows,
    }
    if count.excluded:
        made["excluded"] = dict(sorted(count.excluded.items()))
    return made


def save(document: Mapping[str, Any], folder: Path) -> Path:
    """One YAML file, named by its GPU."""
    import yaml

    path = folder / f"{document['id']}.yaml"
    head = (
        "# Fitted, not read: written by `capplan calibrate fit`. Times in µs or ns, the rest without unit.\n"
    )
    body = yaml.safe_dump(
        dict(document), sort_keys=False, default_flow_style=None, width=110, allow_unicode=True
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(head + body, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error}", where=str(path), hint="give another --out") from error
    return path


def calibrate(folders: Sequence[Path], out: Path) -> tuple[list[dict[str, Any]], list[Path]]:
    """Fit everything that folders hold; the error rows, and the files written."""
    measured = read(folders)
    found = fit_all(measured)
    paths = []
    for gpu_id in sorted({part.table.gpu_id for part in found}):
        counts = [count for (own, _), count in sorted(measured.counts.items()) if own == gpu_id]
        own = [part for part in found if part.table.gpu_id == gpu_id]
        paths.append(save(document(gpu_id, own, counts), out))
    return rows(found), paths


def rows(found: Sequence[Fitted]) -> list[dict[str, Any]]:
    """Held-out errors, one row a GPU, operation, dtype and engine."""
    return [
        {"gpu": gpu_id, "operation": op, "dtype": dtype or None, "engine": engine, **_row(errors(group))}
        for (gpu_id, op, dtype, engine), group in _alike(found).items()
    ]


def _row(found: Errors) -> dict[str, Any]:
    made = found.to_dict()
    return {name: made[name] for name in ("rows", "median_pct", "mean_pct", "inside_pct", "p10", "p90")}
