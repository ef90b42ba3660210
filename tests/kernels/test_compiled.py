"""Every kernel compiles for GPUs that are not there, without spills, within their memory, to tensor code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels' wrappers run on torch")
pytest.importorskip("triton", reason="the kernels need triton: pip install 'capplan[profile]'")

SCRIPT = Path(__file__).with_name("compiled.py")
KIB = 1024
# The most shared memory that one program may have: CUDA C++ programming guide, "Technical
# specifications per compute capability".
SHARED_LIMIT = {"sm_80": 163 * KIB, "sm_89": 99 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB}


def compile_in(folder: Path, *arguments: str, processes: int = 1) -> dict[str, Any]:
    """Case and chip, "… sm_90" → facts or a traceback; one process a shard."""
    children = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--shard", f"{shard}/{processes}", *arguments],
            env={**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_INTERPRET": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for shard in range(processes)
    ]
    results: dict[str, Any] = {}
    for child in children:
        out, err = child.communicate(timeout=1500)
        assert child.returncode == 0, err
        results.update(json.loads(out))
    return results


def faults(results: dict[str, Any]) -> Iterator[str]:
    """One line for each thing that must not be."""
    for name, found in results.items():
        chip = name.rsplit(" ", 1)[1]
        if isinstance(found, str):
            yield f"{name}: does not compile\n{found}"
            continue
        if found["spills"] or found["stack_bytes"]:
            yield f"{name}: {found['spills']} spills, {found['stack_bytes']} B of stack"
        if found["shared_bytes"] > SHARED_LIMIT[chip]:
            yield f"{name}: {found['shared_bytes']} B shared, the chip has {SHARED_LIMIT[chip]}"
        if found["wanted"] and not any(re.fullmatch(found["wanted"], each) for each in found["tensor"]):
            yield f"{name}: tensor instructions {found['tensor']}, wanted {found['wanted']}"


def test_one_configuration_of_each_kernel_for_hopper(tmp_path: Path) -> None:
    results = compile_in(tmp_path, "--core", processes=os.cpu_count() or 1)
    assert len(results) > 15
    assert not list(faults(results))


@pytest.mark.slow
def test_every_configuration_for_every_chip(tmp_path: Path) -> None:
    results = compile_in(tmp_path, processes=os.cpu_count() or 1)
    assert {name.rsplit(" ", 1)[1] for name in results} == set(SHARED_LIMIT)
    assert not list(faults(results)), "\n".join(faults(results))


def test_what_would_be_faults() -> None:
    good = {
        "spills": 0,
        "stack_bytes": 0,
        "registers": 100,
        "shared_bytes": 99 * KIB,
        "tensor": ["HMMA"],
        "wanted": "HMMA|HGMMA",
    }
    assert not list(faults({"a sm_89": good}))
    for change in (
        {"spills": 1},
        {"stack_bytes": 8},
        {"shared_bytes": 99 * KIB + 1},
        {"tensor": []},
        {"tensor": ["IMMA"]},
    ):
        assert len(list(faults({"a sm_89": {**good, **change}}))) == 1
    assert len(list(faults({"a sm_89": "Traceback"}))) == 1
