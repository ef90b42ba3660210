"""Engines beside each other, and one engine on several GPUs."""

import csv
import io
import json

import pytest

from capplan import estimate
from capplan.cli import run
from capplan.engines.plan import ENGINES, EngineFlags
from capplan.errors import InputError


def out_of(capfd: pytest.CaptureFixture[str], options: str, code: int) -> str:
    assert run(["vram", *options.split()]) == code
    return capfd.readouterr().out


def test_every_engine_has_a_row_and_its_own_plan(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--gpu h100 --users 2 --max-model-len 8192 -o json"
    found = json.loads(out_of(capfd, f"--model 8b --engine all {flags}", 0))
    assert [row["name"] for row in found["engines"]] == list(ENGINES)
    for row in found["engines"]:
        alone = json.loads(out_of(capfd, f"--model 8b --engine {row['name']} {flags}", 0))
        assert row["plan"] == alone["engine"]
        assert row["fits"] == alone["fits"]
    assert found["fits"] is True


def test_an_engine_that_cannot_says_why_in_its_row(capfd: pytest.CaptureFixture[str]) -> None:
    # 28 heads: only llama.cpp, which gives whole layers to each GPU, takes 8 of them.
    found = estimate.vram("qwen2.5-7b", gpus=("h100",), tp=8, engine="all", users=1)
    errors = {row.engine: row.error for row in found.rows}
    assert errors.pop("llama.cpp") is None
    assert all(error and "28 attention heads" in error for error in errors.values())
    text = out_of(capfd, "--model qwen2.5-7b --gpu h100 --tp 8 --engine all --users 1", 0)
    assert "vllm: 28 attention heads cannot be split over 8 GPUs" in " ".join(text.split())


def test_where_no_engine_can_the_reason_is_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("vram --params 8b --gpu h100 --engine all".split()) == 2
    assert "an engine needs a model's layers" in capfd.readouterr().err


def test_no_engine_that_holds_it_is_no_fit(capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out_of(capfd, "--model 70b --gpu l4 --engine all -o json", 4))
    assert found["fits"] is False
    assert not any(row["fits"] for row in found["engines"])


def test_one_engine_on_several_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    options = "--model 8b --engine vllm --users 4 --max-model-len 8192 --gpu l4 --gpu h100"
    found = json.loads(out_of(capfd, f"{options} -o json", 0))
    assert [row["gpu"]["id"] for row in found["engines"]] == ["l4-24gb", "h100-sxm-80gb"]
    assert [gpu["id"] for gpu in found["gpus"]] == ["l4-24gb", "h100-sxm-80gb"]
    rows = list(csv.DictReader(io.StringIO(out_of(capfd, f"{options} -o csv", 0))))
    assert [int(row["kv_tokens"]) for row in rows] == [row["plan"]["kv_tokens"] for row in found["engines"]]
    table, page = out_of(capfd, options, 0), out_of(capfd, f"{options} -o md", 0)
    for text in (table, page):
        assert "l4-24gb" in text
        assert f"{found['engines'][1]['plan']['kv_tokens']:,}" in text


def test_every_gpu_of_the_catalog(capfd: pytest.CaptureFixture[str]) -> None:
    found = json.loads(out_of(capfd, "--model 8b --engine vllm --gpu all --max-model-len 4096 -o json", 0))
    assert len(found["engines"]) > 50
    assert {row["fits"] for row in found["engines"]} >= {True, False}


def test_tables_stay_within_80_columns(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for options in (
        "--model 70b --gpu h100 --gpu b200-sxm --gpu mi300x --tp 4 --engine all --max-model-len 8192",
        "--model 70b --gpu h100 --pp 3 --engine vllm --max-model-len 8192",
    ):
        run(["vram", *options.split()])
        assert max(len(line) for line in capfd.readouterr().out.splitlines()) <= 80


def test_flags_of_one_engine_need_its_name() -> None:
    for flags in (EngineFlags(version="0.24"), EngineFlags(gpu_layers=8)):
        with pytest.raises(InputError, match="one engine's"):
            estimate.vram("8b", gpus=("h100",), engine="all", engine_flags=flags)
