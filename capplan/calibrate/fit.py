"""Numbers of a measured table, and how wrong they are on rows that they have not seen."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from capplan import catalog
from capplan.calibrate import forms, search
from capplan.calibrate.tables import Table

Array = Any
FOLDS: Final = 4
# Fewer measurements than this say nothing that a like GPU's would not say better.
LEAST_ROWS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """A table, the numbers fitted to all of its rows, and predictions by numbers that saw other rows only."""

    table: Table
    numbers: Mapping[str, float]
    held_out_s: Array
    folds: Array

    @property
    def ratios(self) -> Array:
        """Measured over predicted, held out."""
        return self.table.seconds / self.held_out_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How wrong predictions are: quantiles of measured over predicted, and the error in percent.

    `inside_pct`: rows inside the P10–P90 of the other folds, in percent.
    """

    p10: float
    p50: float
    p90: float
    median_pct: float
    mean_pct: float
    inside_pct: float
    rows: int

    def to_dict(self) -> dict[str, float]:
        return {
            "p10": rounded(self.p10),
            "p50": rounded(self.p50),
            "p90": rounded(self.p90),
            "median_pct": round(self.median_pct, 1),
            "mean_pct": round(self.mean_pct, 1),
            "inside_pct": round(self.inside_pct, 1),
            "rows": self.rows,
        }


def rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def fold_of(groups: Sequence[str], folds: int = FOLDS) -> Array:
    """A fold for every row; rows of one group share it, the groups are dealt by a hash of their name."""
    order = sorted(set(groups), key=lambda name: (zlib.crc32(name.encode()), name))
    place = {name: number % folds for number, name in enumerate(order)}
    return np.array([place[name] for name in groups])


def fit_table(table: Table) -> Fitted:
    """Fit all rows; and each fold's rows by a fit of the others."""
    gpu = catalog.load_gpu(table.gpu_id)
    choices = forms.variants(table)
    folds = fold_of(table.groups)
    held_out = np.full(len(table.seconds), np.nan)
    for fold in sorted(set(folds.tolist())):
        seen, unseen = table.only(folds != fold), table.only(folds == fold)
        numbers = search.chosen(forms.form(seen, gpu), choices, seen.seconds)
        held_out[folds == fold] = forms.form(unseen, gpu)(numbers)
    numbers = search.chosen(forms.form(table, gpu), choices, table.seconds)
    return Fitted(
        table=table,
        numbers={name: rounded(value) for name, value in numbers.items()},
        held_out_s=held_out,
        folds=folds,
    )


def band(ratios: Array) -> tuple[float, float]:
    """P10 and P90 of ratios, as the next of their kind will have them: n values split a line into n + 1."""
    beyond = max(0.0, 1 - 0.9 * (len(ratios) + 1) / len(ratios))
    low, high = np.quantile(ratios, (beyond, 1 - beyond))
    return float(low), float(high)


def enough(table: Table) -> bool:
    """Whether a table can be fitted and checked on itself."""
    return len(table.seconds) >= LEAST_ROWS and len(set(table.groups)) >= 2


def errors(parts: Sequence[Fitted]) -> Errors:
    """Errors of one table, or of several taken together."""
    ratios = np.concatenate([part.ratios for part in parts])
    folds = np.concatenate([part.folds for part in parts])
    off = 100 * np.abs(1 / ratios - 1)
    p10, p90 = band(ratios)
    inside = np.zeros(len(ratios), dtype=bool)
    for fold in set(folds.tolist()):
        own = folds == fold
        low, high = band(ratios[~own])
        inside[own] = (ratios[own] >= low) & (ratios[own] <= high)
    return Errors(
        p10=p10,
        p50=float(np.median(ratios)),
        p90=p90,
        median_pct=float(np.median(off)),
        mean_pct=float(np.mean(off)),
        inside_pct=float(100 * np.mean(inside)),
        rows=len(ratios),
    )
