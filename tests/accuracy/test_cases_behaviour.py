"""Field cases without a number to reproduce: imports, the network, JSON, KV dtypes, paths."""

import json
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

import pytest

from capplan.cli import run
from capplan.errors import ExitStatus
from capplan.estimate import VramQuestion, answer
from tests.accuracy import oracles, shapes
from tests.accuracy.cases import FieldCase, field_case

HEAVY = ("torch", "triton", "numpy", "pandas", "transformers")


def imported(code: str) -> set[str]:
    """Which heavy modules a fresh interpreter holds after `code`."""
    script = f"import sys\n{code}\nprint(*(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=oracles.ROOT,
        timeout=60,
    )
    return set(done.stderr.split())


def test_heavy_imports_are_seen() -> None:
    assert imported("import numpy") == {"numpy"}


@field_case("bc-161", "talmolab/dreem#168")
def test_bc_161_help_imports_nothing_heavy(case: FieldCase) -> None:
    assert imported("from capplan.cli import run; run(['--help'])") == set()


@field_case("bc-162", "czbiohub-sf/biahub#116")
def test_bc_162_one_command_does_not_load_the_others_dependencies(case: FieldCase) -> None:
    assert imported("from capplan.cli import run; run(['list', '--help'])") == set()


@field_case("bc-163", "pytorch/torchchat#1347")
def test_bc_163_sizing_needs_no_tensors(case: FieldCase) -> None:
    code = "from capplan.cli import run; run(['vram', '--model', '8b', '-o', 'json'])"
    assert imported(code) == set()


@field_case("bc-165", "OpenRAL/openral#11")
def test_bc_165_a_plain_install_pulls_no_cuda(case: FieldCase) -> None:
    project = tomllib.loads((oracles.ROOT / "pyproject.toml").read_text())["project"]
    names = {name.split(">")[0].split("[")[0].lower() for name in project["dependencies"]}
    assert names == {"typer", "rich", "pyyaml", "numpy", "joblib"}


@field_case("bc-169", "alvarobartt/hf-mem#54", {"kv_bytes_per_element": 2})
def test_bc_169_no_kv_scheme_means_16_bit(case: FieldCase, tmp_path: Path) -> None:
    config = {**shapes.LLAMA_3_8B, "quantization_config": shapes.FP8_DYNAMIC}
    assert shapes.FP8_DYNAMIC["kv_cache_scheme"] is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    estimate = answer(VramQuestion(model=str(tmp_path)))
    case.check("kv_bytes_per_element", estimate.kv_bits / 8)
    assert "16-bit by default" in estimate.kv_reason


@field_case("bc-170", "unslothai/unsloth#7591")
def test_bc_170_no_network_at_all(
    case: FieldCase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    assert run(["vram", "--model", "8b", "--gpu", "h100"]) == ExitStatus.OK
    assert run(["vram", "--model", "no-such-org/no-such-model"]) == ExitStatus.INPUT


@field_case("bc-172", "huggingface/trl#3604")
def test_bc_172_a_missing_folder_is_not_called_a_bad_id(
    case: FieldCase, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("/no/such/folder", "./no-such-folder", "~/no-such-folder/config.json"):
        assert run(["vram", "--model", path]) == ExitStatus.INPUT
        error = capsys.readouterr().err
        assert "No such file or directory" in error, error
        assert "no" in error.splitlines()[1]
        assert "such-folder" in error or "/no/such/folder" in error


@field_case("bc-173", "playtron-os/gameos#293")
def test_bc_173_unknown_is_null(case: FieldCase, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(name: str) -> NoReturn:
        raise AssertionError(f"{name} is no JSON")

    assert run(["vram", "--params", "70b", "-o", "json"]) == 0
    read = json.loads(capsys.readouterr().out, parse_constant=refused)
    assert read["fits"] is None
    assert read["headroom_bytes"] is None
    assert read["kv_cache"] is None
    assert read["per_gpu"]["kv_pool"] == {"bytes": None, "tokens": None}


@field_case("bc-174", "AlexsJones/llmfit#235")
def test_bc_174_text_and_json_hold_the_same_parts(
    case: FieldCase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shapes.QWEN25_VL_72B))
    question = ["vram", "--model", str(config), "--gpu", "h200", "--tp", "4"]
    assert run([*question, "-o", "json"]) == ExitStatus.OK
    read = json.loads(capsys.readouterr().out)
    parts = {
        "weights": read["per_gpu"]["weights"]["bytes"],
        **{part["name"]: part["bytes"] for part in read["per_gpu"]["extra"]},
        "KV cache": read["per_gpu"]["kv_cache"]["bytes"],
        "overhead": read["per_gpu"]["overhead"]["bytes"],
        "total": read["per_gpu"]["total"]["bytes"],
    }
    assert run([*question, "-o", "md"]) == ExitStatus.OK
    text = capsys.readouterr().out
    assert set(parts) > {"vision tower", "projector"}
    for name, size in parts.items():
        assert size > 0, name
        assert f"{size / 2**30:,.2f}" in text, f"{name}: {size} is not in the text\n{text}"
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
