"""Where `latency` and `simulate` must agree: one user, more users, and quiet open loads; within 10 %."""

import pytest

from tests.accuracy import closed_form
from tests.accuracy.closed_form import Case, Pair


def case(load: closed_form.Load, lengths: closed_form.Lengths = "equal", isl: int = 1024) -> Case:
    return Case(model="8b", gpu="h100", tp=1, isl=isl, osl=256, lengths=lengths, load=load)


@pytest.mark.parametrize("isl", [128, 1024, 6000])
def test_one_user_sees_the_same(isl: int) -> None:
    errors = {pair.figure: pair.error for pair in closed_form.pairs(case(("users", 1), isl=isl))}
    assert set(errors) == set(closed_form.FIGURES)
    # The closed form counts one decoding sequence beside the prompt, its own of a moment ago.
    assert 0 <= errors.pop("TTFT") < closed_form.WITHIN, errors
    assert all(abs(error) < 0.03 for error in errors.values()), errors


@pytest.mark.parametrize("lengths", ["equal", "varied"])
@pytest.mark.parametrize("load", [("users", 8), ("users", 32), ("utilisation", 0.3)])
def test_loops_agree_on_whole_requests_and_throughput(
    load: closed_form.Load, lengths: closed_form.Lengths
) -> None:
    errors = {pair.figure: pair.error for pair in closed_form.pairs(case(load, lengths))}
    assert abs(errors["E2E"]) < closed_form.WITHIN, errors
    assert abs(errors["tokens/s"]) < closed_form.WITHIN, errors


def test_exponential_lengths_have_their_mean() -> None:
    shares = [part.split(":") for part in closed_form.exponential(256).removeprefix("hist:").split(",")]
    lengths = [int(value) for value, _ in shares]
    assert sum(float(share) for _, share in shares) == pytest.approx(1)
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(256, rel=0.01)
    deviation = (sum((value - mean) ** 2 for value in lengths) / len(lengths)) ** 0.5
    assert deviation / mean == pytest.approx(1, abs=0.06)


def test_the_table_counts_what_is_near() -> None:
    pairs = [
        Pair(case=case(("users", 8)), figure=figure, closed=closed, simulated=1.0)
        for figure in closed_form.FIGURES
        for closed in (1.05, 1.2)
    ]
    assert closed_form.lines(pairs)[-1] == "| 8 users | equal |" + " +12 %, 1 of 2 |" * 4
