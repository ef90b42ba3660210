"""Every field case has a test or a reason; figures restated in tests are those of the case file."""

from typing import Any

import pytest
import yaml

from tests.accuracy import oracles
from tests.accuracy.cases import FieldCase, cases_in
from tests.accuracy.cases_left import LEFT, PARTLY
from tests.accuracy.tables import covered

COVERED = covered()
# Kinds that this must express now: all that is about memory and devices.
NOW = ("weights_size", "calculator_error", "kv_capacity", "oom_start", "nvml")


@pytest.fixture(scope="module")
def files(data: None) -> dict[str, dict[str, Any]]:
    """The case files, by id."""
    made = {}
    for path in sorted(oracles.CASES.glob("bc-*.yaml")):
        read = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        made[read["id"]] = read
    return made


def test_no_case_is_both_covered_and_left() -> None:
    assert not COVERED.keys() & LEFT.keys()
    assert PARTLY.keys() <= COVERED.keys()


def test_every_case_is_covered_or_left_with_a_reason(files: dict[str, dict[str, Any]]) -> None:
    assert len(files) >= 122
    assert COVERED.keys() | LEFT.keys() == files.keys()


def test_cases_about_memory_and_devices_are_covered(files: dict[str, dict[str, Any]]) -> None:
    """Left: figures of one machine whose model is not named, and an encoder without a decoder."""
    assert {name for name in LEFT if files[name]["kind"] in NOW} == {"bc-022", "bc-101"}


@pytest.mark.parametrize("identity", sorted(COVERED))
def test_restated_figures_are_the_files(files: dict[str, dict[str, Any]], identity: str) -> None:
    case, read = COVERED[identity], files[identity]
    assert case.source == read["source"].get("ref", read["source"].get("page"))
    values = read.get("expected", {}).get("values", [])
    left = PARTLY.get(identity, {})
    assert {value["name"] for value in values} == case.figures.keys() | left.keys()
    assert not case.figures.keys() & left.keys()
    for value in values:
        if value["name"] in left:
            continue
        tolerance = value.get("rel_tol")
        restated = case.figures[value["name"]]
        want = (value["value"], tolerance) if tolerance else value["value"]
        assert restated == want, value["name"]


def test_a_wrong_figure_fails() -> None:
    case = FieldCase(id="bc-000", source="none", figures={"exact": 3, "near": (100, 0.01)})
    case.check("near", 101)
    with pytest.raises(AssertionError):
        case.check("near", 101.1)
    with pytest.raises(AssertionError):
        case.check("exact", 3.0000001)
    assert case.checked == {"near"}


def test_two_tests_of_one_case_are_noticed() -> None:
    class Doubled:
        field_case = FieldCase(id="bc-000", source="none", figures={})

    module: Any = type(oracles)("doubled")
    module.one, module.two = Doubled, Doubled
    with pytest.raises(AssertionError, match="bc-000"):
        cases_in(module)
