"""Expectations: where a figure is found, which side of a band is taken, and what holds."""

from typing import Any

import pytest

from capplan.errors import InputError
from capplan.expectation import Expectation, NotEvaluatedError, Verdict, find, judge, read_expectation
from capplan.scenario_yaml import Mark, read_tree

ANSWER: dict[str, Any] = {
    "fits": True,
    "total": {"bytes": 40 << 30, "low_bytes": 38 << 30},
    "max_users": 77,
    "headroom_bytes": -(5 << 30),
    "nothing": None,
    "precision": "int4",
    "ttft_s": {"bound": 0.1, "estimate": 0.4, "low": 0.2, "high": 0.9, "provenance": "estimate"},
    "output_token_per_s": {"bound": 9e2, "estimate": 500.0, "low": 300.0, "high": 700.0, "provenance": ""},
    "tpot_s": {"bound": 0.1, "estimate": None, "low": None, "high": None, "provenance": "bound"},
    "e2e_s": {"bound": 1.0, "estimate": 2.0, "low": None, "high": None, "provenance": "estimate"},
    "kv_pool": {"bytes": 10, "low_bytes": 8, "high_bytes": 12},
    "parts": [{"name": "activation", "bytes": 3 << 20}, {"name": "graphs", "bytes": 5}],
    "usd": 2.5,
    "usd_band": {"low": 2.0, "high": 4.0},
}  # fmt: skip


def expectation(line: str) -> Expectation:
    tree = read_tree(line.encode(), "f.yaml")
    ((key, node),) = tree.items.items()
    return read_expectation(key, node, tree.keys[key])


def verdict(line: str, baseline: Any = None) -> Verdict:
    read = expectation(line)
    return judge(read, find(ANSWER, read), baseline)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("vram.fits: true", True),
        ("vram.total.bytes: 1", 40 << 30),
        ("vram.total.gib: 1", 40 << 30),
        ("vram.parts.graphs.bytes: 1", 5),
        ("vram.parts.0.mib: 1", 3 << 20),
        ("latency.ttft_ms: 1", 0.4),
        ("latency.ttft_s.bound: 1", 0.1),
        ("latency.ttft_s: {at_most: 1, confidence: p90}", 0.9),
        ("latency.ttft_s: {at_most: 1, confidence: p50}", 0.4),
        ("latency.ttft_s: {at_most: 1, confidence: p10}", 0.2),
        ("latency.output_token_per_s: {at_least: 1, confidence: p90}", 300.0),
        ("latency.output_token_per_s: {at_least: 1, confidence: p10}", 700.0),
        ("vram.total.bytes: {at_most: 1, confidence: p90}", 40 << 30),
        ("vram.total.bytes: {at_most: 1, confidence: p10}", 38 << 30),
        ("vram.kv_pool.bytes: {at_least: 1, confidence: p90}", 8),
        ("vram.kv_pool.bytes: {at_least: 1, confidence: p10}", 12),
        ("cost.usd: {at_most: 1, confidence: p90}", 4.0),
        ("cost.usd: {at_most: 1, confidence: p10}", 2.0),
    ],
)
def test_the_figure_and_its_side(line: str, value: object) -> None:
    assert find(ANSWER, expectation(line)).value == value


def test_the_pessimistic_side_is_said() -> None:
    taken = find(ANSWER, expectation("latency.output_token_per_s: {at_least: 1, confidence: p90}")).taken
    assert taken == "p90, the pessimistic side: the low end of the band"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("vram.nothing: 1", "null"),
        ("vram.nothing.more: 1", "vram.nothing is not known"),
        ("latency.tpot_ms: {at_most: 1}", "bound but no estimate"),
        ("latency.e2e_s: {at_most: 1, confidence: p90}", "no band"),
        ("vram.max_users: {at_least: 1, confidence: p90}", "no band"),
    ],
)
def test_what_is_not_known_is_not_evaluated(line: str, says: str) -> None:
    with pytest.raises(NotEvaluatedError, match=says):
        find(ANSWER, expectation(line))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("vram.fitz: true", "did you mean fits"),
        ("vram.total: 1", "bytes"),
        ("vram.parts: 1", "0, 1"),
        ("vram.parts.7.bytes: 1", "activation"),
        ("vram.parts.activatoin.bytes: 1", "did you mean activation"),
        ("vram.fits: {at_most: 3}", "equals"),
    ],
)
def test_a_wrong_path_is_an_error_with_the_nearest(line: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        verdict(line)
    assert hint in caught.value.hint
    assert caught.value.where == "f.yaml:1:1"


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ("vram.fits: true", True),
        ("vram.fits: false", False),
        ("vram.fits: 1", False),  # true is no number
        ("vram.precision: int4", True),
        ("vram.precision: fp8", False),
        ("vram.max_users: 77", True),
        ("vram.max_users: {at_least: 77}", True),
        ("vram.max_users: {at_least: 78}", False),
        ("vram.max_users: {at_most: 77}", True),
        ("vram.max_users: {at_most: 76}", False),
        ("vram.max_users: {between: [77, 80]}", True),
        ("vram.max_users: {between: [70, 77]}", True),
        ("vram.max_users: {between: [78, 80]}", False),
        ("vram.max_users: {at_least: 1, at_most: 70}", False),
        ("vram.max_users: {within: 10% of 70}", True),
        ("vram.max_users: {within: 9% of 70}", False),
        ("vram.total.gib: {at_most: 40}", True),
        ("vram.total.gib: {at_most: 39.9}", False),
        ("vram.total.bytes: {at_most: 40GiB}", True),
        ("vram.total.gib: {at_most: 40GB}", False),
        ("vram.total.bytes: {within: 1% of 40.2GiB}", True),
        ("vram.total.gib: {within: 1% of 40.2}", True),
        ("vram.total.gib: {within: 1% of 42}", False),
        ("latency.ttft_ms: {at_most: 400}", True),
        ("latency.ttft_ms: {at_most: 399}", False),
        ("latency.ttft_ms: {at_most: 0.4s}", True),
        ("latency.ttft_us: {at_most: 4e5}", True),
        ("vram.headroom_bytes: {at_least: -6442450944}", True),
    ],
)
def test_operators(line: str, holds: bool) -> None:
    assert verdict(line).holds is holds


@pytest.mark.parametrize(
    ("baseline", "holds"), [(77, True), (74, True), (73, False), (81, True), (82, False), (None, None)]
)
def test_within_of_the_baseline(baseline: int | None, holds: bool | None) -> None:
    """5 % of 74 is 3.7, and 77 is 3 away; of 73 it is 3.65, and 77 is 4 away."""
    assert verdict("vram.max_users: {within: 5% of baseline}", baseline).holds is holds


def test_words() -> None:
    told = verdict("vram.total.gib: {at_most: 39, at_least: 1GiB}")
    assert (told.want, told.got) == ("at most 39.00 GiB and at least 1.00 GiB", "40.00 GiB")
    told = verdict("latency.ttft_ms: {between: [500, 600]}")
    assert (told.want, told.got) == ("between 500 ms and 600 ms", "400 ms")
    told = verdict("cost.usd: {at_most: 2}")
    assert (told.want, told.got) == ("at most $2", "$2.5")
    told = verdict("vram.max_users: {within: 5% of baseline}", 70)
    assert told.want == "within 5 % of the baseline (70)"


def test_a_difference_that_rounding_hides_is_shown() -> None:
    told = verdict("vram.total.bytes: {at_most: 42949672959}")
    assert told.want == "at most 40.00 GiB"
    assert told.got == "40.00 GiB (42949672960)"


def test_marks_are_the_keys() -> None:
    assert expectation("vram.fits: true").mark == Mark(file="f.yaml", line=1, column=1)
