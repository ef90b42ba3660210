"""`capplan init`: a file that is read, checked and never overwritten."""

from pathlib import Path

import pytest

from capplan.cli import run
from capplan.errors import ExitStatus
from capplan.scenario import load_scenario
from capplan.scenario_template import template
from capplan.schema import FILE_NAME, schema_text

FLAGS = ["--model", "8b", "--gpu", "h100", "--users", "64", "--precision", "fp8"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_file_holds_what_was_given_and_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--engine",
        "vllm",
        "--engine-version",
        "0.30",
        "--replicas",
        "2",
        "--isl",
        "1000",
        "--osl",
        "200",
    ]
    assert run(["init", "scenarios/chat.yaml", *FLAGS, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "wrote scenarios/chat.yaml and scenarios/scenario.schema.json" in captured.err
    assert "1 of 1 scenario holds" in captured.err
    values = load_scenario("scenarios/chat.yaml").values
    assert values["engine.version"] == "0.30"
    assert (values["fleet.gpu"], values["fleet.replicas"], values["workload.users"]) == ("h100", 2, 64)
    assert (folder / "scenarios" / FILE_NAME).read_text(encoding="utf-8") == schema_text()
    text = (folder / "scenarios" / "chat.yaml").read_text()
    assert text.count("\n#") >= 5
    # Of 64 users each of the two replicas serves 32.
    assert "vram.max_users: {at_least: 32}" in text
    assert run(["check", "scenarios/"]) == 0


def test_a_file_that_is_there_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.yaml").write_text("mine")
    assert run(["init", "a.yaml", *FLAGS]) == ExitStatus.INPUT
    assert (folder / "a.yaml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert run(["init", "a.yaml", *FLAGS, "--force"]) == 0
    assert (folder / "a.yaml").read_text() != "mine"


def test_nobody_is_asked_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "a.yaml"]) == ExitStatus.INPUT
    assert "--model" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_on_a_terminal_what_is_missing_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["70b", "h200", 8, 4096])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert run(["init", "a.yaml"]) == 0
    values = load_scenario("a.yaml").values
    assert (values["model"], values["fleet.gpu"], values["workload.users"]) == ("70b", "h200", 8)


def test_what_cannot_be_planned_is_not_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "sub/a.yaml", "--model", "nosuch", "--gpu", "h100"]) == ExitStatus.INPUT
    assert "unknown model" in capsys.readouterr().err
    assert not (folder / "sub").exists()


def test_what_does_not_fit_is_written_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "a.yaml", "--model", "70b", "--gpu", "l4"]) == 0
    assert "needed on a GPU" in capsys.readouterr().err


def test_a_model_s_path_is_relative_to_the_file(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert run(["init", "sub/a.yaml", "--model", "config.json"]) == ExitStatus.INPUT  # no config of a model
    assert "model: ../config.json" in template({"model": "../config.json"})


@pytest.mark.parametrize(
    "value", ["no", "1e3", "0.30", "a: b", "x # y", "- a", "'", '"', "null", "2026-01-31", "é"]
)
def test_every_text_survives(folder: Path, value: str) -> None:
    (folder / "a.yaml").write_text(template({"model": value, "engine.version": value}), encoding="utf-8")
    values = load_scenario("a.yaml").values
    assert (values["model"], values["engine.version"]) == (value, value)
