"""How right the shipped op costs are: `python -m tests.accuracy.kernels` prints the table of held-out errors.

With folders of measured tables, the shipped numbers are put to them instead, as they are:
`python -m tests.accuracy.kernels FOLDER …`.
"""

import csv
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from capplan import catalog
from capplan.calibrate import forms, write
from capplan.calibrate.tables import DTYPES, Table
from capplan.formulas import op_cost
from capplan.op_costs import Rates
from tests.accuracy import oracles

FOLDERS: Final = (oracles.DATA / "kernels", oracles.DATA / "kernels_layerwise")
OUTSIDE: Final = oracles.DATA / "measured" / "kernel_gemm.csv"
CALIBRATIONS: Final = catalog.PROFILES / "calibrations"

Key = tuple[str, str, str, str]
"""GPU, operation, dtype, engine; a collective's dtype is empty, its rank counts are taken together."""


def target(operation: str, dtype: str) -> tuple[float, float]:
    """Median and mean error in percent that are aimed at; where only a median is, any mean will do."""
    if operation == "gemm":
        return (7, 12) if dtype == "bf16" else (10, 18)
    medians = {"experts": 20, **dict.fromkeys(forms.COLLECTIVES, 15), "elementwise": 20}
    return (medians.get(operation, 10), float("inf"))


@functools.cache
def documents() -> Mapping[str, Mapping[str, Any]]:
    """The shipped calibrations of GPUs, by GPU."""
    gpus = set(catalog.ids("gpus"))
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted(CALIBRATIONS.glob("*.yaml"))
        if path.stem in gpus
    }


@functools.cache
def shipped_errors() -> Mapping[Key, Mapping[str, float]]:
    """Held-out errors as the shipped files state them."""
    made: dict[Key, Mapping[str, float]] = {}
    for gpu, document in documents().items():
        for op, inner in document["error"].items():
            for first, by_second in inner.items():
                for second, error in by_second.items():
                    if op in forms.COLLECTIVES:
                        rows = made.get((gpu, op, "", first), {}).get("rows", 0) + error["rows"]
                        made[(gpu, op, "", first)] = {**error, "rows": rows}
                    else:
                        made[(gpu, op, first, second)] = error
    return made


def numbers(table: Table) -> Mapping[str, float] | None:
    """The shipped numbers for a measured table; None where there are none."""
    fit = documents()[table.gpu_id]["fit"].get(table.op, {})
    if table.op in forms.COLLECTIVES:
        found = fit.get(table.engine, {}).get(int(table.dtype))
    else:
        found = fit.get(table.dtype, {}).get(table.engine)
    return found if isinstance(found, dict) else None


def put_to(folders: Sequence[Path]) -> Mapping[Key, Mapping[str, float]]:
    """Errors of the shipped numbers on the tables of some folders, and the share inside the shipped bands."""
    ratios: dict[Key, list[Any]] = defaultdict(list)
    for table in write.read(folders).tables():
        found = numbers(table)
        if found is not None:
            gpu_id, op, dtype, engine = table.key
            key = (gpu_id, op, "" if op in forms.COLLECTIVES else dtype, engine)
            predicted = forms.form(table, catalog.load_gpu(gpu_id))(found)
            ratios[key].append(table.seconds / predicted)
    return {key: _errors(np.concatenate(parts), shipped_errors()[key]) for key, parts in ratios.items()}


def _errors(ratio: Any, band: Mapping[str, float]) -> dict[str, float]:
    off = 100 * np.abs(1 / ratio - 1)
    inside = (ratio >= band["p10"]) & (ratio <= band["p90"])
    return {
        "rows": len(ratio),
        "median_pct": float(np.median(off)),
        "mean_pct": float(np.mean(off)),
        "inside_pct": float(100 * np.mean(inside)),
    }


def missed(errors: Mapping[Key, Mapping[str, float]]) -> dict[Key, str]:
    """What is not as right as it should be."""
    made = {}
    for key, error in errors.items():
        median, mean = target(key[1], key[2])
        if error["median_pct"] > median or error["mean_pct"] > mean:
            made[key] = f"{error['median_pct']:.1f} / {error['mean_pct']:.1f} %"
    return made


def outside() -> list[tuple[str, str, int, float, float]]:
    """GEMMs other people measured: source, dtype, rows, median error, median measured / predicted.

    fp8 by cuBLASLt has no quantisation of activations inside, as the fitted one has.
    """
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    with OUTSIDE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            gpu = catalog.gpu("h100-sxm") if "H100" in row["gpu"] else None
            dtype = DTYPES.get({"bf16": "bfloat16"}.get(row["dtype"], row["dtype"]))
            if gpu is None or dtype is None:
                continue
            by_engine = documents()[gpu.id]["fit"]["gemm"].get(dtype[0], {})
            fit = by_engine.get("vllm") or by_engine.get("trtllm")
            rates = Rates(gpu)
            predicted = op_cost.gemm_s(
                m=int(row["m"]),
                n=int(row["n"]),
                k=int(row["k"]),
                weight_bits=dtype[1],
                flop_per_s=rates.flop_per_s(dtype[0]),
                bytes_per_s=rates.bytes_per_s,
                sms=rates.sms,
                fit=fit,
            )
            groups[(row["framework"], dtype[0])].append(float(row["latency_us"]) * 1e-6 / float(predicted))
    return [
        (source, dtype, len(found), *_medians(np.array(found)))
        for (source, dtype), found in sorted(groups.items())
    ]


def _medians(ratio: Any) -> tuple[float, float]:
    return float(np.median(100 * np.abs(1 / ratio - 1))), float(np.median(ratio))


def markdown(errors: Mapping[Key, Mapping[str, float]]) -> str:
    """The table, and what misses its target."""
    lines = ["| GPU | operation | dtype | engine | rows | median | mean | in band |", "|" + " --- |" * 8]
    for (gpu, op, dtype, engine), error in sorted(errors.items()):
        figures = (
            f"{error['median_pct']:.1f} %",
            f"{error['mean_pct']:.1f} %",
            f"{error['inside_pct']:.0f} %",
        )
        cells: Iterable[object] = (gpu, op, dtype, engine, f"{error['rows']:,}", *figures)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [""] + [
        f"- Missed: {', '.join(filter(None, key))}: {why}." for key, why in missed(errors).items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    asked = [Path(name) for name in sys.argv[1:]]
    print(markdown(put_to(asked) if asked else shipped_errors()), end="")
    if not asked and OUTSIDE.exists():
        for source, kind, count, median, ratio in outside():
            off = f"{median:.0f} % off, measured / predicted {ratio:.2f}"
            print(f"- Outside: {source}, {kind}, {count} GEMMs: {off}.")
