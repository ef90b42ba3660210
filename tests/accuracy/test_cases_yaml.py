"""Field cases about how YAML reads numbers and booleans."""

from pathlib import Path

import pytest

from capplan.errors import InputError
from capplan.scenario import Scenario, load_scenario
from tests.accuracy.cases import FieldCase, field_case


def scenario(folder: Path, lines: str) -> Scenario:
    path = folder / "case.yaml"
    path.write_text(f"capplan: 1\nmodel: 8b\n{lines}\n")
    return load_scenario(path)


@field_case("bc-177", "calliope-project/calliope#57", {"value": 1000.0})
def test_bc_177_1e3_is_a_number(case: FieldCase, tmp_path: Path) -> None:
    """In a number's place, 1e3 and 1.5e6 are numbers; whole where a whole one is asked for."""
    made = scenario(tmp_path, "workload: {request_per_s: 1e3, users: 1e3}\nblock_size: 1.5e6")
    case.check("value", made.values["workload.request_per_s"])
    assert made.values["workload.users"] == 1000
    assert isinstance(made.values["workload.users"], int)
    assert made.values["block_size"] == 1_500_000
    with pytest.raises(InputError, match="not a whole number"):
        scenario(tmp_path, "block_size: 1.5e0")


@field_case("bc-178", "yaml/pyyaml#173", {"value_all": 10000000000.0})
def test_bc_178_every_exponent_is_the_same_number(case: FieldCase, tmp_path: Path) -> None:
    """The key decides, not the loader's rule for dots and signs."""
    for text in ("1e+10", "1.e+10", "1.0e10", "1e10", "1E10", "10000000000"):
        made = scenario(tmp_path, f"workload: {{request_per_s: {text}}}")
        case.check("value_all", made.values["workload.request_per_s"])


@field_case("bc-180", "wireviz/WireViz#213", {"octal_value": 86053248, "intended": "0510210600 as text"})
def test_bc_180_leading_zeros_are_refused(case: FieldCase, tmp_path: Path) -> None:
    """As a number it would be octal to some; the hint gives the quotes that make it text."""
    for key in ("name", "block_size"):
        with pytest.raises(InputError, match="leading zeros") as caught:
            scenario(tmp_path, f"{key}: 0510210600")
        assert caught.value.where.endswith(f"case.yaml:3:{len(key) + 3}")
    case.check("octal_value", int("0510210600", 8))
    with pytest.raises(InputError) as caught:
        scenario(tmp_path, "name: 0510210600")
    assert '"0510210600"' in caught.value.hint
    made = scenario(tmp_path, 'name: "0510210600"')
    case.check("intended", f"{made.values['name']} as text")


@field_case("bc-182", "tomasz-c/nft-blackhole#4")
def test_bc_182_no_is_not_false(case: FieldCase, tmp_path: Path) -> None:
    """A name that YAML 1.1 reads as a boolean: an error with the quoted form, never a name or a false."""
    for word in ("no", "No", "NO", "off", "y", "true", "null", "~", "1.20"):
        with pytest.raises(InputError) as caught:
            scenario(tmp_path, f"fleet:\n  price: {{region: {word}}}")
        assert caught.value.where.endswith("case.yaml:4:19")
        assert f'"{word}"' in caught.value.hint or word in ("null", "~")
    made = scenario(tmp_path, 'fleet:\n  price: {region: "no"}')
    assert made.values["fleet.price.region"] == "no"
    for word in ("no", "off"):
        with pytest.raises(InputError) as caught:
            scenario(tmp_path, f"engine: {{enforce_eager: {word}}}")
        assert caught.value.hint == "write false"
