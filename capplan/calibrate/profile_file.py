"""The calibration file of a local profile: made of points, written whole or not at all, merged, verified."""

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capplan import __version__, local_calibration, model_source
from capplan.calibrate import collectives_bench, local_fit
from capplan.calibrate.loop import loop_shape
from capplan.calibrate.points import Point, from_tables, tables, unwritable
from capplan.errors import InputError
from capplan.local_calibration import LocalCalibration, checked, fit_hash
from capplan.specs import Model


def software(torch: Any) -> dict[str, str]:
    """Versions that a time depends on."""
    made = {"capplan": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda:
        made["cuda"] = str(torch.version.cuda)
    try:
        import triton

        made["triton"] = str(triton.__version__)
    except ImportError:
        pass
    return made


def document(
    points: Sequence[Point],
    model: Model,
    *,
    hardware: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of a file; `about` is what is said beside the fit: software, run, state, ceilings, checks.

    Raises InputError where too few points count.
    """
    device = local_calibration.device(hardware, "this run")
    steps = [each for each in points if each.kind == "step" and each.void is None]
    fit = local_fit.fit(points, loop_shape(model), device) | collectives_bench.fit(points, device)
    whole = [each for each in steps if each.use == "anchor"]
    held_out = local_fit.together(steps)
    base: dict[str, Any] = {
        "schema": local_calibration.SCHEMA,
        "id": "this-run",
        "origin": local_calibration.LOCAL,
        "hardware": dict(hardware),
        **about,
        "points": tables(iter(points)),
        "fit": fit,
        "error": {},
        "validity": _validity(points),
        "hash": fit_hash(fit),
    }
    fit["anchors"] = local_fit.anchors(checked(base, "this run"), model, whole)
    base["hash"] = fit_hash(fit)
    local = checked(base, "this run")
    base["error"] = {"step": local_fit.step_error(local, model, held_out)}
    prompts = [each for each in steps if each.use == "prompt"]
    if "prefill_attention" in fit:
        base["error"]["prompt"] = local_fit.step_error(local, model, prompts)
    noise = [each.noise for each in held_out if each.noise is not None]
    base["noise_floor_pct"] = round(100 * float(np.median(noise)), 2) if noise else None
    base["id"] = f"{hardware['key']}_{str(about['run']['started'])[:10]}_{base['hash'][:6]}"
    return base


def _validity(points: Iterable[Point]) -> dict[str, list[float]]:
    """Least and most of what was timed; beyond it predictions are drawn on along a line."""
    found: dict[str, list[float]] = {}
    for each in points:
        if each.void is None:
            names = {"gemm": ("m",), "attention": ("batch", "context"), "prefill": ("tokens",)}.get(
                each.kind, ()
            )
            for name in names:
                found.setdefault(name, []).append(getattr(each, name))
    return {name: [min(values), max(values)] for name, values in sorted(found.items())}


def save(data: Mapping[str, Any], path: Path) -> None:
    """One YAML file, replaced as a whole. Raises InputError where it cannot be written."""
    import yaml

    head = "# Measured by `capplan profile`. Times in µs and ns, rates in bytes and FLOP per second.\n"
    body = yaml.safe_dump(
        dict(data), sort_keys=False, default_flow_style=None, width=4000, allow_unicode=True
    )
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(head + body, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def points_of(local: LocalCalibration, where: str) -> list[Point]:
    """The points that a file was made of."""
    return from_tables(local.data.get("points", {}), where)


def _run(local: LocalCalibration, key: str) -> Any:
    return local.data.get("run", {}).get(key)


def model_of(local: LocalCalibration, where: str, given: str | None = None) -> Model:
    """The model whose steps a file holds; `given` where the catalog has no such name."""
    name = given or local.data.get("run", {}).get("model")
    if not isinstance(name, str):
        raise InputError("it does not say which model was profiled", where=where, hint="profile again")
    return model_source.load(name)


def verify(path: Path, model_name: str | None = None) -> list[dict[str, Any]]:
    """Every step held out: measured, and predicted anew from the file. Raises InputError for a bad file."""
    local = local_calibration.read(path)
    where = str(path)
    model = model_of(local, where, model_name)
    rows = []
    steps = local_fit.together(points_of(local, where))
    _same_model(local, model, steps, where)
    for each in steps:
        made = local_fit.predicted_s(local, model, each)
        rows.append(
            {
                "precision": each.precision,
                "kv": each.kv,
                "batch": each.batch,
                "context": each.context,
                "layers": each.layers,
                "measured_s": each.seconds,
                "predicted_s": made,
                "error_pct": round(100 * (made / each.seconds - 1), 2),
                "noise_pct": None if each.noise is None else round(100 * each.noise, 2),
            }
        )
    if not rows:
        raise InputError("it has no step held out", where=where, hint="profile again, with a larger --budget")
    return rows


def _same_model(local: LocalCalibration, model: Model, steps: Sequence[Point], where: str) -> None:
    """Refuse steps that are not the model's: more layers than it has, or products of other shapes."""
    shape = loop_shape(model)
    wanted = {f"{n} x {k}" for n, k in shape.linears.values()}
    for each in steps:
        timed = local.fit["gemm"].get(each.dtype, {}).get(local_calibration.LOCAL, {}).get("shapes", {})
        if each.layers > shape.layers or not wanted <= set(timed):
            raise InputError(
                f"its steps are not those of {model.name}",
                where=where,
                hint="--model NAME, the model that was profiled",
            )


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """One file of several runs on one kind of device with one model: all their points, fitted together.

    Raises InputError for another device, model, clock or thread count.
    """
    first, *others = [local_calibration.read(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        for name, mine, theirs in (
            ("hardware", first.hardware_key, other.hardware_key),
            *((key, _run(first, key), _run(other, key)) for key in ("model", "clock", "threads")),
        ):
            if mine != theirs:
                raise InputError(
                    f"its {name} is {theirs}, the first file's {mine}",
                    where=str(path),
                    hint="merge like files",
                )
    if first.data.get("run") is None:
        raise InputError("it does not say how it was measured", where=str(paths[0]), hint="profile again")
    points: list[Point] = []
    for path, each in zip(paths, (first, *others), strict=True):
        points += points_of(each, str(path))
    about = {
        name: first.data[name]
        for name in ("software", "run", "state", "ceilings", "checks")
        if name in first.data
    }
    return document(points, model_of(first, str(paths[0])), hardware=first.data["hardware"], about=about)
