"""A machine without triton imports every kernel module, runs the CPU routes, and is told what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels' CPU routes run on torch")

KERNELS = sorted(path.stem for path in (Path(__file__).parents[2] / "kernels").glob("*.py"))
SCRIPT = """
import sys
sys.modules["triton"] = None  # any import of it fails
import importlib
modules = {name: importlib.import_module("capplan.kernels." + name) for name in sys.argv[1:]}
assert "torch" not in sys.modules, "importing a kernel loads torch"
import torch
from capplan.errors import ExtraMissingError
x = torch.tensor([[3.0, 4.0]])
print(modules["silu_mul"].silu_mul(x).shape)
try:
    modules["silu_mul"].launch_silu_mul(x)
except ExtraMissingError as error:
    print(error)
"""


def run(script: str, *arguments: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_kernels_without_triton() -> None:
    assert len(KERNELS) > 10
    assert run(SCRIPT, *KERNELS) == (
        "torch.Size([1, 1])\n"
        "error: triton is not installed\n"
        "  --> silu_mul\n"
        "  = help: run: pip install 'capplan[profile]'\n"
    )


def test_the_command_line_loads_no_kernel() -> None:
    heavy = ("torch", "triton", "capplan.kernels")
    assert run(f"import sys, capplan.cli; print([m for m in {heavy} if m in sys.modules])") == "[]\n"
