"""A profile brings its device: vram, latency, cost and check on it, without --gpu."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "calibrate"))
import synthetic

from capplan.calibrate import profile_file
from capplan.cli import run

SCENARIO = """
capplan: 1
model: llama-3.2-1b
calibration: {file}
fleet: {{price: {{usd_per_gpu_hour: 0.25}}}}
workload: {{users: {users}, isl: 256, osl: 64}}
expect:
  vram.fits: {fits}
  {more}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profiles")
    profile_file.save(synthetic.data(), made / "cpu.yaml")
    profile_file.save(synthetic.data(memory_bytes=2 << 30), made / "small.yaml")
    profile_file.save(synthetic.data(key="h100-sxm-80gb", kind="gpu"), made / "h100.yaml")
    return made


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    status = run([*words, "-o", "json"])
    out = capsys.readouterr()
    assert status in (0, 4), out.err
    return json.loads(out.out) | {"status": status}


@pytest.mark.parametrize(("file", "fits", "status"), [("cpu.yaml", True, 0), ("small.yaml", False, 4)])
def test_vram_fits_into_the_device_of_the_profile(
    capsys: pytest.CaptureFixture[str], file: str, fits: bool, status: int
) -> None:
    made = told(capsys, "vram", "--model", "llama-3.2-1b", "--profile", file)
    assert (made["fits"], made["status"]) == (fits, status)
    assert made["gpu"]["name"] == "Test CPU (2 threads)"
    assert made["gpu"]["usable_bytes"] == (64 << 30 if fits else 2 << 30)


def test_vram_of_a_profiled_gpu_is_that_of_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    own = told(capsys, "vram", "--model", "8b", "--profile", "h100.yaml")
    assert own["gpu"] == told(capsys, "vram", "--model", "8b", "--gpu", "h100-sxm-80gb")["gpu"]
    assert told(capsys, "vram", "--model", "8b", "--profile", "h100.yaml", "--gpu", "h100")["fits"] is True


def test_cost_of_the_device_of_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    made = told(capsys, "cost", "--model", "llama-3.2-1b", "--profile", "cpu.yaml", "--price", "0.25")
    assert made["gpu"]["id"] == "cpu-test-avx2-2t"
    assert made["usd_per_month"] == pytest.approx(0.25 * 730)
    assert made["throughput"]["provenance"] == "calibrated"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["vram", "--model", "8b", "--gpu", "h100"], "the profile is of cpu-test", id="vram"),
        pytest.param(["cost", "--model", "8b", "--gpu", "h100"], "the profile is of cpu-test", id="cost"),
        pytest.param(["vram", "--model", "8b", "--gpu-memory", "24GB"], "brings its device", id="a size"),
        pytest.param(["vram", "--model", "8b", "--gpu", "l4", "--gpu", "t4"], "brings its device", id="two"),
        pytest.param(
            ["vram", "--model", "8b", "--pp", "2", "--stage-gpu", "l4", "--stage-gpu", "l4"],
            "GPUs are given twice", id="unequal stages",
        ),
        pytest.param(["cost", "--model", "llama-3.2-1b"], "it is unpriced, not free", id="no price"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_a_profile(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--profile", "cpu.yaml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "= help:" in error


@pytest.mark.parametrize("command", ["vram", "cost", "latency"])
def test_file_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--model", "8b", "--profile", "none.yaml"]) == 2
    assert "no file 'none.yaml'" in capsys.readouterr().err


def test_the_engine_schedules_around_a_profiled_cpu_and_adds_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fits = [
        told(capsys, "latency", "--model", "llama-3.2-1b", "--no-user-data", *words)["engine_fit"]
        for words in (["--profile", "cpu.yaml"], ["--gpu", "h100"])
    ]
    own, shipped = (fit["scheduling"] for fit in fits)
    assert own["first_token_s"] == 0 < shipped["first_token_s"]
    assert own["together"] == shipped["together"]


def test_cost_without_any_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cost", "--model", "8b"]) == 2
    assert "on which GPU?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "users", "fits", "more", "status"),
    [
        pytest.param("cpu.yaml", 2, "true", "latency.tpot_ms: {at_most: 1000}", 0, id="all hold"),
        pytest.param("cpu.yaml", 2, "true", "cost.usd_per_month: {at_most: 200}", 0, id="its cost"),
        pytest.param("cpu.yaml", 2, "true", "latency.tpot_ms: {at_most: 0.001}", 3, id="too slow"),
        pytest.param("small.yaml", 64, "false", "cost.usd_per_month: {at_most: 200}", 0, id="the bill alone"),
    ],
)
def test_check_on_the_device_of_the_profile(
    folder: Path, file: str, users: int, fits: str, more: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "asked.yaml").write_text(SCENARIO.format(file=file, users=users, fits=fits, more=more))
    assert run(["check", "asked.yaml"]) == status, capsys.readouterr()


def test_check_finds_the_profile_beside_the_scenario(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = SCENARIO.format(file="cpu.yaml", users=2, fits="true", more="vram.max_users: {at_least: 1}")
    (folder / "asked.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(["check", str(folder / "asked.yaml")]) == 0
