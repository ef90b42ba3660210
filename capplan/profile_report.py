"""What a profile found, as rows and as a terminal's view. Nothing prints here."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from capplan import catalog, step
from capplan.calibrate import local_fit, telemetry
from capplan.calibrate.points import Point
from capplan.calibrate.profile_file import model_of, points_of
from capplan.formulas import measured_cost
from capplan.local_calibration import LOCAL, LocalCalibration
from capplan.report import rows_view
from capplan.units import GIGA, TERA, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


BATCHES: Final = (1, 2, 4, 8, 16, 32)
"""Batches that speed-ups are told at."""


def achieved(local: LocalCalibration, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Best bytes and FLOP per second of each dtype's products, beside what the device can do."""
    made = []
    bits = {"bf16": 16.0, "w4a16": 4.25}
    for dtype in local.fit["gemm"]:
        own = [one for one in points if one.kind == "gemm" and one.void is None and one.dtype == dtype]
        if not own:
            continue
        read = max(one.n * one.k * bits.get(dtype, 8.0) / 8 / one.seconds for one in own)
        flop = max(2 * one.m * one.n * one.k / one.seconds for one in own)
        made.append(
            {
                "kernels": dtype,
                "GB/s": round(read / GIGA, 1),
                "of_memory": f"{read / local.gpu.memory_bandwidth_bytes_per_s:.0%}",
                "TFLOP/s": round(flop / TERA, 3),
                "of_peak": f"{flop / max(local.gpu.flop_per_s.values()):.0%}",
            }
        )
    return made


def speed_ups(local: LocalCalibration) -> list[dict[str, Any]]:
    """A layer's products in each dtype against bf16, by batch; and where bf16 is faster."""
    by_dtype = local.fit["gemm"]
    if "bf16" not in by_dtype:
        return []
    made: list[dict[str, Any]] = []
    timed = {
        m for found in by_dtype.values() for table in found[LOCAL]["shapes"].values() for m in table["m"]
    }
    sizes = [m for m in BATCHES if m in timed]
    for dtype, found in by_dtype.items():
        shapes = found[LOCAL]["shapes"]
        shared = [name for name in shapes if name in by_dtype["bf16"][LOCAL]["shapes"]]
        if dtype == "bf16" or not shared:
            continue
        row: dict[str, Any] = {"kernels": dtype}
        slower = None
        for m in sizes:
            if m > max(max(shapes[name]["m"]) for name in shared):
                row[f"m {m}"] = None
                continue
            base = sum(_us(by_dtype["bf16"][LOCAL]["shapes"][name], m) for name in shared)
            gain = base / sum(_us(shapes[name], m) for name in shared)
            row[f"m {m}"] = f"{gain:.2f}×"
            if gain < 1 and slower is None:
                slower = m
        row["bf16_faster_from"] = "–" if slower is None else f"m {slower}"
        made.append(row)
    return made


def _us(table: Mapping[str, Any], m: int) -> float:
    return measured_cost.on_line(x=m, xs=table["m"], ys=table["us"])


def paging(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Steps on blocks against the same on contiguous memory."""
    steps = {(one.key[:6], one.use): one for one in points if one.kind == "step" and one.void is None}
    made = []
    for (key, use), flat in steps.items():
        paged = steps.get((key, "held out"))
        if use == "contiguous" and paged is not None:
            made.append(
                {
                    "precision": flat.precision,
                    "batch": flat.batch,
                    "context": flat.context,
                    "paged": format_seconds(paged.seconds),
                    "contiguous": format_seconds(flat.seconds),
                    "paging_costs": f"{paged.seconds / flat.seconds - 1:+.1%}",
                }
            )
    return made


def energy(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Joules a token of the steps whose energy a GPU's counter told, and the power that this was."""
    made = []
    for one in points:
        if one.kind == "step" and one.void is None and one.joules_per_token:
            made.append(
                {
                    "precision": one.precision,
                    "kv": one.kv,
                    "batch": one.batch,
                    "context": one.context,
                    "layers": one.layers,
                    "joules_per_token": one.joules_per_token,
                    "tokens_per_joule": round(1 / one.joules_per_token, 4),
                    "power_w": round(one.joules_per_token * one.batch / one.seconds, 1),
                }
            )
    return made


def warnings(local: LocalCalibration, points: Sequence[Point]) -> list[str]:
    """What to know of a file before it is trusted: what slowed the GPU down, who shared it, void points."""
    made = telemetry.warnings(local.data.get("state", {}))
    reasons = Counter(_kind_of(one.void) for one in points if one.void)
    made += [
        f"{count} of {len(points)} points are void and not used: {reason}"
        for reason, count in reasons.most_common()
    ]
    return made


def _kind_of(reason: str) -> str:
    """A reason without its figures."""
    return re.sub(r"\s*(moved|from) .*", r" \1", reason).removesuffix(" from")


def held_out(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `verify`, for reading."""
    return [
        {
            "precision": row["precision"],
            "batch": row["batch"],
            "context": row["context"],
            "layers": row["layers"],
            "measured": format_seconds(row["measured_s"]),
            "predicted": format_seconds(row["predicted_s"]),
            "error_%": row["error_pct"],
            "noise_%": row["noise_pct"],
        }
        for row in rows
    ]


def compared(
    local: LocalCalibration, gpu_name: str, where: str, model_name: str | None = None
) -> list[dict[str, Any]]:
    """The steps held out, here and as estimated on a GPU of the catalog."""
    gpu = catalog.gpu(gpu_name)
    model = model_of(local, where, model_name)
    made = []
    for one in local_fit.together(points_of(local, where)):
        precision = None if one.precision == "bf16" else catalog.weight_format(one.precision)
        table = step.compile(local_fit.cut(model, one.layers), gpu, precision=precision)
        there = table.step_s(decode_sequences=one.batch, kv_tokens=one.batch * one.context)
        made.append(
            {
                "precision": one.precision,
                "batch": one.batch,
                "context": one.context,
                "here": format_seconds(one.seconds),
                gpu.id: format_seconds(there),
                "times_as_fast": round(one.seconds / there, 1),
            }
        )
    return made


def headline(local: LocalCalibration) -> list[str]:
    """Device, model, clock, errors: a line each."""
    data, run = local.data, local.data.get("run", {})
    lines = [
        f"{local.gpu.name}: {local.id}",
        f"{run.get('model')}, {', '.join(run.get('formats', {}))}; {run.get('clock')} clock, "
        f"{run.get('threads')} thread(s), {run.get('seconds')} s",
        f"memory {local.gpu.memory_bandwidth_bytes_per_s / GIGA:,.1f} GB/s, "
        + ", ".join(f"{name} {rate / TERA:.3g} TFLOP/s" for name, rate in local.gpu.flop_per_s.items()),
    ]
    for dtype, error in local.error.get("step", {}).items():
        noise = error.get("noise_floor_pct")
        lines.append(
            f"{dtype}: {error['rows']} steps held out, median error {error['median_pct']:.1f} %, P90 "
            f"{error['p90_pct']:.1f} %" + ("" if noise is None else f" (noise floor {noise:.1f} %)")
        )
    idle_w = data.get("state", {}).get("idle", {}).get("power_w")
    if idle_w is not None:
        lines.append(f"{idle_w:g} W at rest")
    return lines


def view(
    local: LocalCalibration,
    rows: Sequence[Mapping[str, Any]],
    where: str,
    compare_to: str | None = None,
    model_name: str | None = None,
) -> list["RenderableType"]:
    """The closing report."""
    from rich.text import Text

    points = points_of(local, where)
    made: list[RenderableType] = [Text(line) for line in headline(local)]
    made += [Text(f"warning: {line}", style="yellow") for line in warnings(local, points)]
    parts = [
        ("what products reached", achieved(local, points)),
        ("faster than bf16, a layer's products by batch", speed_ups(local)),
        ("what blocks cost", paging(points)),
        ("energy", energy(points)),
        ("steps held out, predicted from the file", held_out(rows)),
    ]
    if compare_to:
        parts.append((f"beside {compare_to}, kernels alone", compared(local, compare_to, where, model_name)))
    for title, table in parts:
        if table:
            made += [Text(""), Text(title, style="bold"), *rows_view(table)]
    return made


def compare_checked(name: str | None) -> None:
    """Refuse an unknown GPU before minutes are spent. Raises InputError."""
    if name is not None:
        catalog.gpu(name)
