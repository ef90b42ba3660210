"""Where the measured data lies, its rows, and the models they are about.

The data is not part of this repository: it lies beside it, and tests that need it are skipped without it.
"""

import csv
import functools
from pathlib import Path

from capplan import model_source
from capplan.specs import Model

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
ORACLES = DATA / "oracles"
HF_CONFIGS = DATA / "hf_configs"
CASES = DATA / "cases"
FILES = tuple(
    ORACLES / f"{name}.csv"
    for name in (
        "params", "kv", "weights_by_tp", "tp_rejected", "checkpoints", "quant_bits",
        "gguf_quantize_random_702M",
    )
)  # fmt: skip

Row = dict[str, str]


def missing() -> list[str]:
    """What is not there, as paths relative to the data folder."""
    wanted = (*FILES, ORACLES / "configs", HF_CONFIGS, CASES)
    return [str(path.relative_to(DATA)) for path in wanted if not path.exists()]


@functools.cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of one oracle file."""
    with (ORACLES / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
        return tuple(csv.DictReader(stream))


def config_path(row: Row) -> Path:
    """The config.json a row's figures were computed from, by its `config_source` column."""
    own = row["config_source"].startswith("own")
    return (ORACLES / "configs" if own else HF_CONFIGS) / f"{row['model']}.json"


@functools.cache
def model_at(path: Path) -> Model:
    """The model of a config file."""
    return model_source.load_path(path)


def model_of(row: Row) -> Model:
    """The model a row is about."""
    return model_at(config_path(row))
