"""What an answer rests on, as content hashes: the scenario, catalog entries, calibrations, the program.

Two results with the same origins are the same; where they differ, the names that changed say why.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capplan import __version__, catalog
from capplan.scenario import Scenario

if TYPE_CHECKING:
    from capplan.answers import Answers

PROGRAM: Final = "program"
SCENARIO: Final = "scenario"


def origins_of(
    scenario: Scenario, answers: "Answers", names: tuple[str, ...] | None = None
) -> dict[str, str]:
    """Name → hash, sorted: scenario, program, catalog/KIND/ID, calibration/ID, file/PATH.

    `names` are the answers meant: those that are expected something of where it is not given.
    """
    made = {SCENARIO: scenario.content_hash[:16], PROGRAM: __version__}
    asked = set(names or (expectation.answer for expectation in scenario.expectations))
    found = {name: known for name in sorted(asked) if (known := answers.known(name)) is not None}
    for kind, name in _entries(scenario, found):
        made |= _entry(kind, name)
    if "latency" in found or (found.get("cost") or {}).get("throughput"):
        for path in sorted((catalog.PROFILES / "calibrations").glob("*.yaml")):
            made[f"calibration/{path.stem}"] = _file(path)
    if "vram" in found and "engine" in found["vram"]:
        path = catalog.PROFILES / "calibrations" / "memory-vllm.yaml"
        made[f"calibration/{path.stem}"] = _file(path)
    if "cost" in found:
        made["catalog/prices"] = _folder(catalog.PROFILES / "prices")
    own = scenario.values.get("calibration", "shipped")
    if own != "shipped" and Path(own).is_file():
        made["calibration/own"] = _hash(Path(own))
    return dict(sorted(made.items()))


def _entries(scenario: Scenario, found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Kind and name of the catalog entries that the answers used."""
    values = scenario.values
    made = [("models", values[key]) for key in ("model", "kv_from", "draft_model") if key in values]
    if "fleet.gpu" in values:
        made.append(("gpus", values["fleet.gpu"]))
    made += [
        ("formats", values[key]) for key in ("precision", "kv_dtype") if values.get(key, "auto") != "auto"
    ]
    vram = found.get("vram")
    if vram is not None:
        made.append(("formats", (vram["kv_cache"] or {}).get("dtype") or ""))
        made.append(("architectures", vram["model"]["architecture"] or ""))
    engines = [
        found[name]["engine"] for name in ("vram", "latency") if name in found and "engine" in found[name]
    ]
    made += [("engines", entry["name"]) for entry in engines if entry]
    return made


def _entry(kind: str, name: str) -> dict[str, str]:
    """The hash of one entry; of a file of the user's, that of its bytes."""
    if kind == "engines":
        path = catalog.PROFILES / "engines" / f"{name}.yaml"
        return {f"catalog/engines/{name}": _file(path)} if path.is_file() else {}
    found = catalog.index(kind).get(catalog.normalised(name)) if name.strip() else None
    if found is not None:
        stem = found.partition("#")[0]
        return {f"catalog/{kind}/{stem}": _file(catalog.PROFILES / kind / f"{stem}.yaml")}
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    # Weight files are too long to hash: their size stands for them.
    if path.is_file() and kind == "models":
        small = path.stat().st_size < 1 << 24
        return {f"file/{path.name}": _hash(path) if small else f"{path.stat().st_size} bytes"}
    return {}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@cache
def _file(path: Path) -> str:
    """The hash of a shipped file, which does not change while the program runs."""
    return _hash(path)


@cache
def _folder(folder: Path) -> str:
    together = "".join(_file(path) for path in sorted(folder.glob("*.yaml")))
    return hashlib.sha256(together.encode()).hexdigest()[:16]
