"""The published configs of the shared data, against their parameter counts; skipped where it is absent."""

import csv
import json
import os
from pathlib import Path

import pytest

from capplan import catalog
from capplan.readers.hf_config import model_type_of, read_model
from capplan.specs import Model

DATA = Path(__file__).parents[2].parent / "shared" / "data"
TABLE = DATA / "oracles" / "params.csv"
# These rows count the vision tower in, against the table's own description.
WITH_TOWER = {
    "Qwen--Qwen3-VL-2B-Instruct", "Qwen--Qwen3-VL-30B-A3B-Instruct", "moonshotai--Kimi-K2.5",
    "nvidia--Gemma-4-31B-IT-NVFP4", "nvidia--Kimi-K2.5-NVFP4", "nvidia--Kimi-K2.6-NVFP4",
}  # fmt: skip

if not TABLE.exists() and not os.environ.get("CI"):
    pytest.skip("the shared data is not beside this repository", allow_module_level=True)

ROWS = list(csv.DictReader(TABLE.open()))


def read(path: Path) -> Model:
    config = json.loads(path.read_text())
    model_type = model_type_of(config)
    return read_model(
        config,
        where=str(path),
        name=path.stem,
        architecture=catalog.architecture(model_type) if model_type else None,
    )


@pytest.mark.parametrize("row", ROWS, ids=[row["model"] for row in ROWS])
def test_parameters_are_exact(row: dict[str, str]) -> None:
    own = row["config_source"].startswith("own")
    folder = DATA / "oracles" / "configs" if own else DATA / "hf_configs"
    model = read(folder / f"{row['model']}.json")
    beside = sum(tower.parameters for tower in model.towers if tower.role != "mtp")
    counted = model.parameters + (beside if row["model"] in WITH_TOWER else 0)
    assert counted == int(row["total_params"])


@pytest.mark.parametrize("path", sorted((DATA / "hf_configs").glob("*.json")), ids=lambda path: path.stem)
def test_every_published_config_is_read(path: Path) -> None:
    assert read(path).parameters > 10**8
