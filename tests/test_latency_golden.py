"""Whole outputs of `capplan latency`, byte for byte at 80 columns.

`python -m tests.test_latency_golden` writes the files anew; the diff is then read before it is committed.
Those under PHYSICS do not move when a calibration is fitted anew.
"""

import os
from pathlib import Path

import pytest

from tests.test_golden import outcome

FOLDER = Path(__file__).parent / "golden" / "latency"
PHYSICS: dict[str, str] = {
    "bounds": "latency --model 70b --precision fp16 --gpu a100-sxm-80gb --bounds --no-user-data",
    "bounds-json": "latency --model 8b --gpu h100 --bounds --no-user-data -o json",
    "bounds-markdown": "latency --model 8b --gpu h100 --bounds --slo chat --no-user-data -o md",
    "bounds-csv": "latency --model 8b --gpu h100 --bounds --batch 8 --no-user-data -o csv",
    "bounds-explained": "latency --model 8b --gpu h100 --bounds --osl 1 --explain --no-user-data",
    "below-the-bound": "latency --model 8b --gpu l40s --bounds --slo tpot=1ms --no-user-data",
    "two-loads": "latency --model 8b --gpu h100 --batch 8 --concurrency 4",
    "too-long": "latency --model 8b --gpu h100 --isl 131000 --osl 1000",
    "over-the-node": "latency --model 70b --gpu h100 --tp 16",
    "huge": "latency --model 8b --gpu h100 --concurrency 100000000000",
    "other-gpu": "latency --model 8b --gpu h100 --profile l40s-48gb",
    "half-a-draft": "latency --model 8b --gpu h100 --speculative-tokens 3",
}
FITTED: dict[str, str] = {
    "answer": "latency --model 8b --gpu h100 --concurrency 32 --slo chat --explain --no-user-data",
    "emulated": "latency --model 8b --gpu a100-sxm-80gb --precision fp8 --no-user-data",
    "drafts": "latency --model deepseek-r1 --gpu h200 --tp 8 --speculative-tokens 1 --acceptance-rate 0.85"
    " --draft-model mtp --no-user-data",
    "above-the-stable-rate": "latency --model 8b --gpu h100 --request-rate 500 --no-user-data",
}
CASES = PHYSICS | FITTED


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_golden_one(name: str) -> None:
    assert outcome(CASES[name]) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}
    for case, line in CASES.items():
        (FOLDER / f"{case}.txt").write_text(outcome(line), encoding="utf-8")
