"""Whole outputs, byte for byte: what a user sees at 80 columns, and what a script reads.

`python tests/test_golden.py` writes the files anew; the diff is then read by a person before it is committed.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from capplan.cli import run

FOLDER = Path(__file__).parent / "golden"
CASES: dict[str, str] = {
    "main-job": "vram --model 8b --precision int4 --users 64",
    "main-job-json": "vram --model 8b --precision int4 --users 64 -o json",
    "main-job-csv": "vram --model 8b --precision int4 --users 64 -o csv",
    "main-job-markdown": "vram --model 8b --precision int4 --users 64 -o md",
    "fits-json": "vram --model 8b --precision awq --users 32 --gpu l40s -o json",
    "does-not-fit": "vram --model 70b --gpu h100",
    "borderline": "vram --model llama-3-8b --users 1 --context 8192 --gpu-memory-gib 18.5",
    "tensor-parallel": "vram --model 70b --gpu h100-sxm --tp 4 --users 64",
    "pipeline": "vram --model 70b --gpu h100-sxm --tp 2 --pp 3 --users 64",
    "samples": "vram --model 8b --n 4 --isl 3000 --osl 1000 --users 8 --gpu l40s",
    "lesson": "vram --params 8b --kv-from llama-3-8b --precision int4 --overhead 1.5GB --gpu-memory 24GB",
    "lesson-json": "vram --params 8b --kv-from llama-3-8b --precision int4 --overhead 1.5GB"
    " --gpu-memory 24GB -o json",
    "params-alone": "vram --params 70b --gpu h100",
    "shared-prefix": "vram --model 8b --users 64 --prefix-shared 2048 --gpu h100-sxm",
    "odd-context": "vram --model 8b --users 7 --context 1001 --block-size 32 --gpu l4",
    "latent-attention": "vram --model deepseek-v3 --users 64 --gpu h200 --tp 8",
    "sliding-window": "vram --model gemma-2-9b --users 8 --context 8192 --gpu l40s",
    "mixture-of-experts": "vram --model mixtral-8x7b --precision awq --gpu a100-80gb",
    "several-gpus": "vram --model 32b --precision fp8 --gpu l40s --gpu h100-sxm --gpu mi300x",
    "explained": "vram --model 8b --users 4 --gpu l4 --explain",
    "list-formats": "list formats",
    "show-model": "show llama-3.1-8b",
    "show-gpu": "show h100-sxm",
    "explain-topic": "explain kv-cache",
    "simulate-csv": "simulate --model 8b --gpu h100 --request-rate 20 --requests 500 --bounds --price 2.5"
    " --slo ttft=60ms,tpot=12ms --no-user-data -o csv",
    "simulate-json": "simulate --model 8b --gpu h100 --requests 60 --isl uniform:10-900 --osl uniform:20-600"
    " --kv-blocks 600 --max-model-len 1200 --seed 7 --bounds --price 2.5 --no-user-data -o json",
    "simulate-markdown": "simulate --model 8b --gpu h100 --concurrency 8 --think-time 1 --requests 200"
    " --turns 4 --isl 100 --osl 50 --bounds --price 2.5 --no-user-data -o md",
    "unknown-model": "vram --model lama-3.1-8b",
    "unknown-gpu": "vram --model 8b --gpu h1000",
    "unknown-format": "vram --model 8b --precision int5",
    "size-without-unit": "vram --model 8b --gpu-memory 24",
    "exponent": "vram --model 8b --users 1e3",
    "too-long": "vram --model llama-3-8b --context 9000",
    "bad-split": "vram --model 8b --tp 3",
    "nothing-asked": "vram",
}


def outcome(arguments: str) -> str:
    """stdout, stderr and exit code of one command line at 80 columns."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments.split())
    text = f"$ capplan {arguments}\n{out.getvalue()}"
    if err.getvalue():
        text += f"--- stderr\n{err.getvalue()}"
    return text + f"--- exit {code}\n"


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
