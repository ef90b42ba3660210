"""`capplan cost` and `capplan prices` as a user sees them, byte for byte, and what they refuse.

`python -m tests.test_cost_commands` writes the files anew; the diff is then read before it is committed.
"""

import json
import os
from pathlib import Path

import pytest

from capplan.cli import run
from tests.test_docs import blocks, current, refreshed
from tests.test_golden import outcome

PAGE = Path(__file__).parent.parent / "docs" / "cost.md"
FOLDER = Path(__file__).parent / "golden" / "cost"
DAY = "--today 2026-11-30 --no-user-data"
CASES: dict[str, str] = {
    "fleet": f"cost --gpu h100 --gpus 4 {DAY}",
    "lesson-fleet": f"cost --gpu h100 --gpus 8 --price 3 {DAY}",
    "idle-gpu": f"cost --gpu a100-80gb --price 3 --output-token-per-s 15 {DAY}",
    "utilization": f"cost --gpu h100 --gpus 4 --output-token-per-s 5000 --isl 1024 --osl 256"
    f" --utilization 0.4 --api-price-input 0.3 --api-price-output 0.6 --grid-gco2-per-kwh 400 {DAY}",
    "node": f"cost --gpu h200 --gpus 4 --cloud aws --region us {DAY}",
    "spot": f"cost --gpu h100 --gpus 4 --term spot --schedule always {DAY}",
    "owned": f"cost --gpu h100 --gpus 8 --term owned {DAY}",
    "explained": f"cost --gpu l4 --gpus 2 --price 0.7 --output-token-per-s 900 {DAY} --explain",
    "json": f"cost --gpu h100 --gpus 2 --cloud lambda --output-token-per-s 2000 {DAY} -o json",
    "csv": f"cost --gpu h100 --gpus 2 --term owned {DAY} -o csv",
    "markdown": f"cost --gpu h100 --gpus 2 --price 2.49 --output-token-per-s 2000 {DAY} -o md",
    "unpriced-term": f"cost --gpu h100 --term 1yr {DAY}",
    "unpriced-gpu": f"cost --gpu rtx-2060 {DAY}",
    "unknown-cloud": f"cost --gpu h100 --cloud lamda {DAY}",
    "price-per-token": f"cost --gpu h100 --output-token-per-s 100 --api-price-output 0.000008 {DAY}",
    "prices-list": f"prices list {DAY}",
    "prices-show": f"prices show mi300x {DAY}",
    "prices-cheapest": f"prices cheapest --term spot {DAY}",
    "prices-unpriced": f"prices cheapest rtx-2060 {DAY}",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """80 columns, and no prices of the user who runs the tests."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_golden_one(name: str) -> None:
    assert outcome(CASES[name]) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_output_fits_80_columns(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    if " -o " in text.splitlines()[0]:
        return
    answer = text.partition("--- ")[0].splitlines()[1:]
    assert max(map(len, answer), default=0) <= 80


def test_lists_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "prices", "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema"] == "capplan.prices.list/1"
    h100 = next(row for row in listed["rows"] if row["id"] == "h100-sxm-80gb")
    assert h100["low"] <= h100["median"] <= h100["high"]
    # A GPU without a price is listed, without one.
    old = next(row for row in listed["rows"] if row["id"] == "rtx-2060-6gb")
    assert (old["prices"], old["low"]) == (0, None)
    assert run(["prices", "show", "h100", "--cloud", "aws", "-o", "json", *DAY.split()]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["cloud"] for row in rows} == {"aws"}
    assert all(row["source"] and row["read_on"] and row["age_days"] >= 0 for row in rows)
    assert run(["prices", "show", "lambda", "-o", "json"]) == 0
    assert len({row["gpu"] for row in json.loads(capsys.readouterr().out)["rows"]}) > 3


def test_import_then_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.csv").write_text("cloud,gpu,usd_per_gpu_hour,region\nOur DC,h100,0.99,fra-1\n")
    command = ["prices", "import", str(tmp_path / "own.csv")]
    assert run(command) == 2
    assert "--read-on" in capsys.readouterr().err
    assert run([*command, "--read-on", "2026-11-01"]) == 0
    assert "plain: prices of our-dc" in capsys.readouterr().out
    asked = ["cost", "--gpu", "h100", "--cloud", "our dc", "--today", "2026-11-30", "-o", "json"]
    assert run(asked) == 0
    price = json.loads(capsys.readouterr().out)["price"]
    assert (price["usd_per_gpu_hour"], price["read_on"], price["age_days"]) == (0.99, "2026-11-01", 29)
    assert run([*asked, "--no-user-data"]) == 2


@pytest.mark.parametrize(
    "line",
    [
        "prices show",
        "prices import",
        "prices show h1000",
        "prices show t4 --term 3yr",
        "prices show t4 --term weekly",
        "prices cheapest h1000",
        "prices cheapest h100 --cloud nobody",
        "prices list --today tomorrow",
        "prices import none.csv",
        "prices burn",
        "cost",
        "cost --gpu h1000",
        "cost --gpu h100 --price free",
        "cost --gpu h100 --price 1e9",
        "cost --gpu h100 --today 30.11.2026",
        "cost --gpu h100 --own pue=hot",
    ],
)
def test_bad_input_is_three_lines_and_exit_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [text for text in err.splitlines() if "without a price" not in text]
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("  --> ")
    assert lines[2].startswith("  = help: ")
    assert len(lines) == 3


@pytest.mark.parametrize("number", range(len(blocks(PAGE.read_text(encoding="utf-8")))))
def test_the_page_shows_current_output(number: int) -> None:
    block = blocks(PAGE.read_text(encoding="utf-8"))[number]
    assert current(block) == block, "run `python -m tests.test_cost_commands`"


def test_the_page_names_every_key_and_assumption() -> None:
    text = PAGE.read_text(encoding="utf-8")
    from capplan.ownership import ASSUMPTIONS

    for name in ASSUMPTIONS:
        assert name in text
    for action in ("list", "show", "cheapest", "refresh", "import"):
        assert f"`{action} " in text or f"`{action}`" in text


def test_same_question_same_bytes() -> None:
    assert outcome(CASES["json"]) == outcome(CASES["json"])


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    for case, line in CASES.items():
        (FOLDER / f"{case}.txt").write_text(outcome(line), encoding="utf-8")
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
