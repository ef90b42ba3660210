"""The serving accuracy tables of the README: `python -m tests.accuracy.serving_tables` prints them.

Errors are |predicted / measured − 1|; a cell is (engine, GPU, model) with at least five rows. Everything is
counted anew from the data; what is wrong or left is printed, not dropped.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from statistics import mean, median, quantiles
from typing import Final

from capplan import engine_speed
from tests.accuracy import serving
from tests.accuracy.serving import Compared, Row

FIGURES: Final = ("TPOT", "TTFT", "throughput")
TARGETS: Final = {
    ("TPOT", False): "≤ 9 / 15 %",
    ("TPOT", True): "≤ 15 / 25 %",
    ("TTFT", False): "≤ 25 %",
    ("TTFT", True): "≤ 25 %",
    ("throughput", False): "≤ 15 %",
    ("throughput", True): "≤ 15 %",
}
BUCKETS: Final = (4, 16, 64, 256)


@cache
def figures() -> tuple[tuple[Compared, ...], Counter[str], dict[int, str]]:
    """Every figure predicted; why others are not; flawed rows."""
    rows, _ = serving.rows()
    made, left = serving.answers(rows)
    wrong = serving.flawed(row for row in rows if row.scored)
    return tuple(made), left, wrong


@cache
def held_out() -> tuple[Compared, ...]:
    """The figures that count, each predicted by numbers fitted on the other half of the groups."""
    rows, _ = serving.rows()
    _, _, wrong = figures()
    return tuple(one for one in serving.held_out(rows) if one.row.scored and one.row.run.line not in wrong)


def scored() -> list[Compared]:
    """The figures that count: of the engines and GPUs the targets are for, without flawed rows."""
    made, _, wrong = figures()
    return [one for one in made if one.row.scored and one.row.run.line not in wrong]


def inside() -> dict[tuple[str, bool], float]:
    """Share of figures inside P10–P90 of the errors of the other half of the groups, by (figure, MoE).

    Neither the prediction nor the band has seen a figure's group. What ships is the wider of the two bands.
    """
    rows, _ = serving.rows()
    first = {row.run.line for row in serving.halves(rows)[0]}
    found: dict[tuple[str, bool], float] = {}
    for figure in FIGURES:
        for moe in (False, True):
            own = [one for one in held_out() if one.figure == figure and one.row.moe == moe]
            parts = [
                [1 / one.ratio for one in own if (one.row.run.line in first) == side]
                for side in (True, False)
            ]
            hits = 0
            for band, seen in (parts, reversed(parts)):
                tenths = quantiles(band, n=10, method="inclusive")
                hits += sum(tenths[0] <= value <= tenths[8] for value in seen)
            found[figure, moe] = hits / len(own)
    return found


def shipped_band() -> dict[tuple[str, bool], float]:
    """Share of figures, predicted by numbers that have not seen their group, inside the shipped band."""
    found: dict[tuple[str, bool], float] = {}
    for figure in FIGURES:
        for moe in (False, True):
            own = [one for one in held_out() if one.figure == figure and one.row.moe == moe]
            hits = 0
            for one in own:
                run = one.row.run
                bands = engine_speed.behaviour(run.engine, one.row.subject.gpu, experts=moe).bands
                band = bands[figure.lower()]
                hits += band.low <= 1 / one.ratio <= band.high
            found[figure, moe] = hits / len(own)
    return found


def bucket(row: Row) -> str:
    """Users at once, in words."""
    users = row.run.concurrency
    if users is None:
        return "not stated"
    low = 1
    for high in BUCKETS:
        if users <= high:
            return f"{low}–{high}"
        low = high + 1
    return f"> {BUCKETS[-1]}"


def family(row: Row) -> str:
    """A model's architecture."""
    return row.subject.model.architecture


def medians(some: Iterable[Compared]) -> tuple[int, float, float]:
    """Cells, and the median over cells and over rows, of the errors."""
    cells: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in some:
        cells[one.row.cell].append(one.error)
    large = [median(errors) for errors in cells.values() if len(errors) >= serving.LEAST_ROWS]
    every = [error for errors in cells.values() for error in errors]
    return len(large), median(large) if large else float("nan"), median(every)


def _percent(value: float) -> str:
    return "–" if value != value else f"{100 * value:.1f} %"


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *map(line, rows)]


def _summary(some: list[Compared]) -> Iterable[tuple[object, ...]]:
    for figure in FIGURES:
        for moe in (False, True):
            own = [one for one in some if one.figure == figure and one.row.moe == moe]
            if own:
                cells, by_cell, by_row = medians(own)
                yield (
                    f"{figure}, {'MoE' if moe else 'dense'}",
                    len(own),
                    _percent(by_row),
                    _percent(mean(one.error for one in own)),
                    cells,
                    _percent(by_cell),
                    TARGETS[figure, moe],
                )


_HEAD: Final = ("figure", "rows", "median", "mean", "cells", "median of cells", "target")


def _by(some: list[Compared], name: str, key: Callable[[Row], str]) -> list[str]:
    """Median error and bias by some property of the row."""
    groups: dict[str, dict[str, list[Compared]]] = defaultdict(lambda: defaultdict(list))
    for one in some:
        groups[key(one.row)][one.figure].append(one)

    def cells(own: dict[str, list[Compared]]) -> Iterable[str]:
        for figure in FIGURES:
            found = own.get(figure, [])
            if not found:
                yield "–"
                continue
            bias = median(one.ratio for one in found)
            yield f"{100 * median(one.error for one in found):.0f} % (× {bias:.2f}, {len(found)})"

    return _table((name, *FIGURES), [(group, *cells(groups[group])) for group in sorted(groups)])


def markdown() -> str:
    """All tables."""
    rows, excluded = serving.rows()
    made, left, wrong = figures()
    good = scored()
    lines = ["**Serving** (published runs), predicted against measured:", ""]
    lines += ["All groups:", "", *_table(_HEAD, _summary(good)), ""]
    lines += ["By numbers fitted on the other half of the groups:", ""]
    lines += [*_table(_HEAD, _summary(list(held_out()))), ""]
    lines += ["Of these, inside P10–P90 of the other half's errors, and inside the wider of the two:", ""]
    shipped = shipped_band()
    shares = [
        (f"{figure}, {'MoE' if moe else 'dense'}", _percent(share), _percent(shipped[figure, moe]))
        for (figure, moe), share in inside().items()
    ]
    lines += [*_table(("figure", "inside the other half's", "inside the shipped band"), shares), ""]
    whole = [one for one in made if one.row.scored]
    lines += ["With the flawed rows:", "", *_table(_HEAD, _summary(whole)), ""]
    lines += ["Median error (× predicted / measured, figures):", ""]
    for name, key in (
        ("engine", lambda row: row.run.engine),
        ("GPU", lambda row: row.subject.gpu.id),
        ("model family", family),
        ("users", bucket),
    ):
        lines += [*_by(good, name, key), ""]
    shown = [one for one in made if not one.row.scored]
    lines += ["Shown, not scored:", "", *_by(shown, "mode, engine", _mode), ""]
    answered = len({one.row.run.line for one in made})
    lines += [f"- {answered:,} of {len(rows):,} rows of known model, GPU and format are answered."]
    lines += [f"- Not answered: {count:,} rows, {why}." for why, count in sorted(left.items())]
    lines += [f"- Left out: {count:,} rows, {why}." for why, count in sorted(excluded.items())]
    reasons = Counter(wrong.values())
    lines += [f"- Flawed, not scored: {count:,} rows, {why}." for why, count in sorted(reasons.items())]
    lines += _failures(good)
    return "\n".join(lines) + "\n"


def _mode(row: Row) -> str:
    return f"{row.run.mode}, {row.run.engine}"


def _failures(some: list[Compared]) -> Iterable[str]:
    """Cells that miss by twice the target."""
    cells: dict[tuple[str, tuple[str, str, str]], list[Compared]] = defaultdict(list)
    for one in some:
        if one.figure in FIGURES:
            cells[one.figure, one.row.cell].append(one)
    limits = {"TPOT": 0.3, "TTFT": 0.5, "throughput": 0.3}
    far = [
        (median(one.error for one in own), figure, cell, median(one.ratio for one in own), len(own))
        for (figure, cell), own in cells.items()
        if len(own) >= serving.LEAST_ROWS and median(one.error for one in own) > limits[figure]
    ]
    for error, figure, cell, bias, count in sorted(far, reverse=True):
        yield f"- Far off: {figure} of {', '.join(cell)}: {100 * error:.0f} % (× {bias:.2f}), {count} rows."


if __name__ == "__main__":
    print(markdown(), end="")
