"""The README's tables on speed, from the errors of the shipped calibrations: what rows held out showed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from capplan import catalog
from tests.accuracy import kernels

NAMES: Final = {
    "gemm": "matrix product",
    "decode_attention": "decode attention",
    "prefill_attention": "prefill attention",
    "mla_decode": "latent attention, decode",
    "mla_prefill": "latent attention, prefill",
    "experts": "routed experts",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "elementwise": "small kernels",
}


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def kernel_lines() -> list[str]:
    """Operations and dtypes: the range of medians over GPUs and engines, and the mean over all rows."""
    found: dict[tuple[str, str], list[Mapping[str, float]]] = defaultdict(list)
    errors = kernels.shipped_errors()
    for (_, operation, dtype, _), error in errors.items():
        found[operation, dtype].append(error)
    rows = []
    for (operation, dtype), entries in sorted(found.items(), key=lambda item: _place(item[0])):
        count = sum(int(entry["rows"]) for entry in entries)
        medians = [entry["median_pct"] for entry in entries]
        mean = sum(entry["mean_pct"] * entry["rows"] for entry in entries) / count
        inside = sum(entry["inside_pct"] * entry["rows"] for entry in entries) / count
        low, high = min(medians), max(medians)
        spread = f"{low:.1f} %" if low == high else f"{low:.1f} to {high:.1f} %"
        rows.append((NAMES[operation], dtype, count, spread, f"{mean:.1f} %", f"{inside:.0f} %"))
    lines = ["**Kernels**, whole shapes held out, by GPU and engine:", ""]
    lines += _table(("operation", "dtype", "rows", "median error", "mean", "inside the band"), rows)
    missed = kernels.missed(errors)
    lines += ["", f"- {len(errors) - len(missed)} of {len(errors)} fits reach their targets. Missed:"]
    lines += [f"  - {' '.join(word for word in key if word)}: {why}" for key, why in sorted(missed.items())]
    return lines


def _place(key: tuple[str, str]) -> tuple[int, str]:
    return list(NAMES).index(key[0]), key[1]


def lone_lines() -> list[str]:
    """Batch 1 of llama.cpp and its kin, whole cards held out."""
    errors: Mapping[str, Any] = catalog.read_yaml(catalog.PROFILES / "calibrations" / "small-batch.yaml")[
        "error"
    ]
    lines = ["**One sequence alone** (llama.cpp and its kin), whole cards held out:", ""]
    rows = [
        (what, "all", entry["rows"], f"{entry['median_pct']:.1f} %", f"{entry['mean_pct']:.1f} %")
        for what, entry in (("generation", errors["decode"]["all"]), ("prompt", errors["prompt"]["all"]))
    ]
    for name, entry in sorted(errors["decode"]["backends"].items()):
        if " " not in name and entry["rows"] >= 5:
            rows.append(
                (
                    "generation",
                    name,
                    entry["rows"],
                    f"{entry['median_pct']:.1f} %",
                    f"{entry['mean_pct']:.1f} %",
                )
            )
    return lines + _table(("speed of", "backend", "runs", "median error", "mean"), rows)
