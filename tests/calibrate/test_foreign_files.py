"""Profiles from strangers, cut short or edited by hand: each refused with one plain error, none crashes."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from capplan.calibrate.points import COLUMNS, MEASURED
from capplan.cli import run
from capplan.local_calibration import fit_hash

Change = Callable[[dict[str, Any]], object]
STEP = (*COLUMNS["step"], *MEASURED)


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return synthetic.data()


def steps(name: str, value: Any) -> Change:
    """A column of every step set to a value."""

    def change(data: dict[str, Any]) -> None:
        for row in data["points"]["step"]["rows"]:
            row[STEP.index(name)] = value

    return change


def fitted(place: str, value: Any) -> Change:
    """A number of the fit changed, and the hash with it."""

    def change(data: dict[str, Any]) -> None:
        *names, last = place.split(".")
        found = data["fit"]
        for name in names:
            found = found[name]
        found[last] = value
        data["hash"] = fit_hash(data["fit"])

    return change


CHANGES: dict[str, tuple[Change, str]] = {
    "an id that is a path": (lambda d: d.update(id="../../evil"), "no id"),
    "an empty id": (lambda d: d.update(id=""), "no id"),
    "a model that is a path": (lambda d: d["run"].update(model="../../etc/passwd"), "a path"),
    "a model with an escape": (lambda d: d["run"].update(model="\x1b[2J"), "no plain text"),
    "another model": (lambda d: d["run"].update(model="llama-3.1-8b"), "not those of"),
    "an unknown model": (lambda d: d["run"].update(model="nope-9b"), "unknown model"),
    "no run": (lambda d: d.pop("run"), "which model"),
    "a key of a run that names a user": (lambda d: d["run"].update(argv="/home/me"), "unknown key run."),
    "a GPU's clock on a CPU": (lambda d: d["run"].update(clock="cuda-graph-events"), "times no CPU"),
    "a number as a clock": (lambda d: d["run"].update(clock=5), "run.clock"),
    "no day": (lambda d: d["run"].update(started="yesterday"), "run.started"),
    "seconds that are words": (lambda d: d["run"].update(seconds="\x1b[2J"), "run.seconds"),
    "formats that are none": (lambda d: d["run"].update(formats=None), "run.formats"),
    "a state that is none": (lambda d: d.update(state=5), "state is no mapping"),
    "words where figures belong": (lambda d: d["state"].update(sm_mhz="fast"), "state.sm_mhz"),
    "figures where words belong": (lambda d: d["state"].update(slowed_by=5), "state.slowed_by"),
    "errors that are a list": (lambda d: d["error"].update(step=[1]), "error.step"),
    "a validity in words": (lambda d: d["validity"].update(m="all"), "validity.m"),
    "points that are a number": (lambda d: d["points"].update(step=5), "other columns"),
    "points without rows": (lambda d: d["points"]["step"].update(rows=None), "no rows"),
    "no points": (lambda d: d.pop("points"), "no step held out"),
    "times in words": (steps("us_p50", "fast"), "us_p50 is 'fast'"),
    "times below 0": (steps("us_p50", -5.0), "us_p50 is -5.0"),
    "times of 0": (steps("us_p50", 0.0), "us_p50 is 0.0"),
    "no number": (steps("us_p50", float("nan")), "us_p50 is nan"),
    "a batch below 1": (steps("batch", -1), "batch is -1"),
    "more layers than the model has": (steps("layers", 10**6), "not those of"),
    "an unknown format": (steps("precision", "int99"), "int99"),
    "a reason with an escape": (steps("void", "\x1b[2J"), "void is"),
    "a factor that overflows": (fitted("anchors.bf16.gemm", 1e300), "fit.anchors.bf16.gemm is 1e+300"),
    "a table that falls": (fitted("gemm.bf16.local.affine.weight_ns", [2, 1, 1]), "falls"),
    "no products": (fitted("gemm", {}), "no fit.gemm"),
    "no attention": (fitted("decode_attention", {}), "no fit.decode_attention"),
    "a fit changed by hand": (lambda d: d["fit"]["anchors"].clear(), "the hash differs"),
    "a key of another program": (lambda d: d.update(secret=1), "unknown key"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("action", ["verify", "import"])
def test_changed_file(
    data: dict[str, Any], action: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    change, message = CHANGES[name]
    changed = copy.deepcopy(data)
    change(changed)
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
    assert run(["profile", action, str(tmp_path / "p.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert message in lines[0]
    assert not list(tmp_path.rglob("data/*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "not a YAML mapping", id="empty"),
        pytest.param(bytes(range(256)) * 20, "broken YAML", id="no text"),
        pytest.param(b"- 1\n- 2\n", "not a YAML mapping", id="a list"),
        pytest.param(b"[" * 5000, "broken YAML", id="without an end"),
        pytest.param(b"schema: capplan.calibration/2\n", "is not capplan.calibration/1", id="a later schema"),
        pytest.param(b'!!python/object/apply:os.system ["echo hi"]\n', "broken YAML", id="a call"),
        pytest.param(b"#" * (17 << 20), "too large", id="17 MB"),
    ],
)
def test_what_is_no_profile(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_bytes(content)
    assert run(["profile", "verify", str(tmp_path / "p.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_file_cut_anywhere(data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half a copy is no profile, wherever it ends; as YAML or as JSON."""
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=4000)
    for whole in (text, json.dumps(data)):
        for share in (0.1, 0.5, 0.9, 0.999):
            (tmp_path / "p.yaml").write_text(whole[: int(share * len(whole))])
            assert run(["profile", "verify", str(tmp_path / "p.yaml")]) == 2
            assert "error:" in capsys.readouterr().err


def test_json_is_as_good(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(data))
    assert run(["profile", "verify", str(tmp_path / "p.json")]) == 0
