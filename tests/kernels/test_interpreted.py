"""Every Triton kernel in Triton's interpreter against float64, in a process where it is switched on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels' references run on torch")
pytest.importorskip("triton", reason="the kernels need triton: pip install 'capplan[profile]'")

CHECKS = Path(__file__).with_name("interpreted.py")
LIMIT = 1e-2  # bf16 has 8 bits; the worst row of the worst case was seen at 6e-3


def case_names() -> list[str]:
    spec = importlib.util.spec_from_file_location("interpreted_kernels", CHECKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # imports no kernel: each case does so itself
    return list(module.CASES)


@pytest.fixture(scope="module")
def results() -> dict[str, float | str]:
    """Case → relative error or traceback, all from one process."""
    child = subprocess.run(
        [sys.executable, str(CHECKS)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    answer: dict[str, float | str] = json.loads(child.stdout)
    return answer


@pytest.mark.parametrize("name", case_names())
def test_kernel_equals_float64(name: str, results: dict[str, float | str]) -> None:
    error = results[name]
    assert isinstance(error, float), error
    assert error <= LIMIT
