"""llama.cpp's buffers beside the sizes it printed: memory_llamacpp.csv, every distinct configuration."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

import pytest

from capplan.engines.llama_cpp import compute_rule
from tests.accuracy.llamacpp import FILE, Figure, build_of, figures, fit, fitted, starts, starts_by_plan


@pytest.fixture(autouse=True)
def _table(data: None) -> None:
    if not FILE.exists():
        pytest.skip("no memory_llamacpp.csv beside the repository")


def planned(kind: str) -> list[Figure]:
    """The figures of a kind that were planned."""
    return [figure for figure in figures() if figure.kind == kind and figure.planned is not None]


def summary(kind: str, chosen: Sequence[Figure]) -> str:
    """One line of the report."""
    errors = sorted(abs(figure.error) for figure in chosen)
    return (
        f"{kind}: {len(errors)} configurations, median {median(errors):.2%}, "
        f"P90 {errors[int(0.9 * (len(errors) - 1))]:.2%}, worst {errors[-1]:.2%}"
    )


def report(kind: str, limit: float) -> list[Figure]:
    """Print a kind's summary and its failures; return them."""
    chosen = planned(kind)
    print(summary(kind, chosen))
    failures = [figure for figure in chosen if abs(figure.error) > limit]
    for figure in failures:
        print(f"  {figure.name}: {figure.planned:,.2f} planned, {figure.printed:,.2f} printed MiB")
    return failures


@pytest.mark.parametrize("kind", ["model", "model part", "embedding"])
def test_model_buffers(kind: str) -> None:
    """Files of one recipe: within 0.5 %, each GPU's part too."""
    assert len(planned(kind)) >= {"model": 10, "model part": 13, "embedding": 5}[kind]
    assert not report(kind, 0.005)


def test_kv_buffers() -> None:
    """Within 0.5 % where the cache's type is stated, but for one row of mixed types and one of two loads."""
    failures = report("kv", 0.005)
    assert not [figure for figure in failures if not figure.fork]
    ratios = sorted(round(figure.printed / (figure.planned or 1), 3) for figure in failures)
    # 1.441: keys q8_0 (8.5 bits) and values f16, (8.5 + 16) / 17; 2: two loads in one row.
    assert ratios == [1.441, 2.0]


def test_compute_buffers() -> None:
    """Median within 15 %: all configurations, the fork's alone, the half not used for fitting."""
    report("compute", 0.15)
    chosen = planned("compute")
    fork = [figure for figure in chosen if figure.fork]
    held = [figure for figure in chosen if not fitted(figure)]
    print(summary("compute, the fork's alone", fork), summary("compute, the half not fitted", held), sep="\n")
    for part in (chosen, fork, held):
        assert median(abs(figure.error) for figure in part) <= 0.15
    assert all(abs(figure.error) <= 0.005 for figure in chosen if not figure.fork)


@pytest.mark.parametrize("build", [1691, 2843])
def test_compute_rule_is_what_half_of_the_rows_say(build: int) -> None:
    """The profile's whole numbers are among the best for one half; the other half is within 0.5 % by them."""
    rule, _ = compute_rule(build)
    chosen = [
        figure
        for figure in planned("compute")
        if not figure.fork and compute_rule(build_of(figure.row))[0] == rule
    ]
    half = [figure for figure in chosen if fitted(figure)]
    other = [figure for figure in chosen if not fitted(figure)]
    best = fit(half, rule)
    print(f"b{build}: {len(best)} rules tie on {len(half)} rows, the profile's among them: {rule in best}")
    print(summary(f"b{build}, the other half", other))
    assert rule in best
    assert all(abs(figure.error) <= 0.005 for figure in other)


def test_host_compute_buffers() -> None:
    """Within 0.5 % where all layers are on GPUs."""
    assert len(planned("host compute")) >= 4
    assert not report("host compute", 0.005)


def test_what_is_left_is_counted() -> None:
    """Figures that were not planned, by reason."""
    left = Counter((figure.kind, figure.left) for figure in figures() if figure.left)
    for (kind, reason), count in sorted(left.items()):
        print(f"{count} {kind}: {reason}")
    assert not [figure for figure in figures() if figure.left and not figure.fork]


def test_starts_or_refuses() -> None:
    """Rows that ran and that ran out of memory, on GPUs the catalog knows: 90 % right, each class 80 %."""
    counts: Counter[tuple[bool, bool | None]] = Counter()
    for row in starts():
        planned_start = starts_by_plan(row)
        counts["OOM" not in row["notes"], planned_start] += 1
        if planned_start is not ("OOM" not in row["notes"]):
            print(f"  {row['model']} {row['quant']} on {row['n_gpu']} {row['gpu']}: {row['notes']}")
    print(dict(counts))
    for ran in (True, False):
        assert counts[ran, ran] >= 0.8 * sum(count for (was, _), count in counts.items() if was is ran)
    right = counts[True, True] + counts[False, False]
    assert right >= 0.9 * counts.total()
