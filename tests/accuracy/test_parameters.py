"""Parameters of every published config: exact, by role."""

import re

import pytest

from tests.accuracy import oracles
from tests.accuracy.parameters import (
    FIGURES,
    ORACLE_GAPS,
    ParameterRow,
    active,
    by_role,
    parameter_rows,
    refused_configs,
)

pytestmark = pytest.mark.usefixtures("data")
# Rows whose total includes the vision tower although the data's README says towers are out.
WITH_TOWER = 6


@pytest.fixture(scope="module")
def measured() -> list[ParameterRow]:
    return parameter_rows()


@pytest.mark.parametrize("figure", FIGURES)
def test_every_row_is_exact(measured: list[ParameterRow], figure: str) -> None:
    wrong = {
        row.model: (row.got[figure], row.want[figure])
        for row in measured
        if figure in row.differing and (row.model, figure) not in ORACLE_GAPS
    }
    assert not wrong


def test_all_rows_are_measured(measured: list[ParameterRow]) -> None:
    assert len(measured) == len(oracles.rows("params")) >= 109
    assert sum(row.with_tower for row in measured) == WITH_TOWER


def test_a_listed_oracle_gap_is_still_one(measured: list[ParameterRow]) -> None:
    open_gaps = {(row.model, name) for row in measured for name in row.differing}
    assert open_gaps == ORACLE_GAPS


def test_roles_add_up_to_the_total(measured: list[ParameterRow]) -> None:
    for row in oracles.rows("params"):
        model = oracles.model_of(row)
        assert sum(by_role(model).values()) == model.parameters
        assert active(model) <= model.parameters


def test_every_hf_config_is_read() -> None:
    files = sorted(oracles.HF_CONFIGS.glob("*.json"))
    assert len(files) >= 144
    refused = refused_configs()
    for error in refused.values():
        # Right or refused: three lines that name a key.
        assert re.fullmatch(r"error: [\w.]+: .+\n  --> .+\n  = help: .+", str(error))
    assert not refused
    models = [oracles.model_at(file) for file in files]
    assert all(model.parameters > 0 and model.layers > 0 for model in models)
