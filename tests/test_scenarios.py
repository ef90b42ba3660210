"""The scenario files hold: each expectation on memory is checked against the estimate."""

from pathlib import Path

import pytest

from capplan import catalog, vram

FOLDER = Path(__file__).parent.parent / "scenarios"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_there_are_scenarios() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_holds(path: Path) -> None:
    data = catalog.read_yaml(path)
    assert data["capplan"] == 1
    estimate = vram(
        data["model"],
        precision=data["precision"],
        kv_dtype=data["kv_dtype"],
        gpus=(data["fleet"]["gpu"],),
        tp=data["fleet"]["tp"],
        users=data["workload"]["users"],
        context=data["workload"]["context"],
    )
    answers = {"vram.fits": estimate.fits}
    assert data["expect"]
    for key, wanted in data["expect"].items():
        assert answers[key] == wanted, key
