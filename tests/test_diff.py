"""`capplan diff`: figures before and after, and what moved them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from capplan import catalog
from capplan.cli import run
from capplan.diff import Change, DiffReport, Move, diff, signed, signed_percent
from capplan.errors import InputError

TEXT = (
    "capplan: 1\nmodel: 8b\nprecision: int4\nfleet: {gpu: l40s}\nworkload: {users: 64}\n"
    "expect: {vram.fits: true}\n"
)
KV = 64 * 4096 * 131072


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.yaml").write_text(TEXT)
    return tmp_path


def move(change: Change, name: str) -> Move:
    return next(entry for entry in change.moves if entry.name == name)


def test_the_same_files_are_the_same(folder: Path) -> None:
    report = diff("old", "new")
    assert [change.kind for change in report.changes] == ["same"]
    assert report.changes[0].causes == ()


def test_a_scenario_that_asks_more_moves_memory_by_that_much(folder: Path) -> None:
    (folder / "new" / "a.yaml").write_text(TEXT.replace("64", "70"))
    (change,) = diff("old", "new").changes
    vram = move(change, "VRAM")
    assert vram.change == KV // 64 * 6
    assert signed(vram) == "+3.00 GiB"
    # 3.00 of 38.37 GiB.
    assert signed_percent(vram) == "+7.8 %"
    assert move(change, "max users").moved is False
    assert change.causes == ("scenario: workload.users 64 → 70",)


def test_a_rewritten_file_that_asks_the_same_is_the_same(folder: Path) -> None:
    (folder / "new" / "a.yaml").write_text("# moved around\n" + TEXT.replace("64", "64.0"))
    assert diff("old", "new").changes[0].causes == ()


def test_added_and_removed(folder: Path) -> None:
    (folder / "new" / "b.yaml").write_text(TEXT)
    (folder / "old" / "c.yaml").write_text(TEXT)
    report = diff("old", "new")
    assert {change.identity: change.kind for change in report.changes} == {
        "a.yaml": "same",
        "b.yaml": "added",
        "c.yaml": "removed",
    }
    assert move(report.of_kind("removed")[0], "VRAM").after is None


def test_two_files_of_other_names_are_compared(folder: Path) -> None:
    (folder / "new" / "b.yaml").write_text(TEXT.replace("64", "70"))
    (change,) = diff("old/a.yaml", "new/b.yaml").changes
    assert (change.identity, change.kind) == ("b.yaml", "moved")


def test_variants_of_a_matrix_are_compared_one_by_one(folder: Path) -> None:
    for side, users in (("old", "[1, 2]"), ("new", "[2, 3]")):
        text = TEXT.replace("workload: {users: 64}", f"matrix: {{workload.users: {users}}}")
        (folder / side / "a.yaml").write_text(text)
    kinds = {change.identity: change.kind for change in diff("old", "new").changes}
    assert kinds == {"a.yaml[users=1]": "removed", "a.yaml[users=2]": "same", "a.yaml[users=3]": "added"}


def git(*arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True
    )


@pytest.fixture
def repository(folder: Path) -> Path:
    """A repository whose main branch has 64 users, its folder 70; the files extend one, and bring a model."""
    shutil.rmtree(folder / "old")
    shutil.rmtree(folder / "new")
    scenarios = folder / "scenarios"
    scenarios.mkdir()
    (scenarios / "_base.yaml").write_text(TEXT.replace("model: 8b", "model: ./config.json"))
    (scenarios / "a.yaml").write_text("capplan: 1\nextends: _base.yaml\n")
    config = dict(catalog.read_yaml(catalog.PROFILES / "models" / "llama-3.1-8b.yaml")["config"])
    (scenarios / "config.json").write_text(json.dumps(config))
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (scenarios / "_base.yaml").write_text(
        TEXT.replace("model: 8b", "model: ./config.json").replace("64", "70")
    )
    return folder


def test_a_git_revision_is_read_without_a_checkout(repository: Path) -> None:
    for old in ("main:scenarios/", "main:scenarios", "HEAD:scenarios/a.yaml"):
        (change,) = diff(old, "scenarios/").changes
        assert (change.identity, change.kind) == ("a.yaml", "moved")
        assert move(change, "VRAM").change == KV // 64 * 6
        assert change.causes == ("scenario: workload.users 64 → 70",)
    status = subprocess.run(
        ["git", "status", "--porcelain"], capture_output=True, text=True, check=True
    ).stdout
    assert status == " M scenarios/_base.yaml\n"


def test_a_revision_reads_the_files_of_its_own_commit(repository: Path) -> None:
    config = json.loads((repository / "scenarios" / "config.json").read_text())
    (repository / "scenarios" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 16}))
    (change,) = diff("main:scenarios/", "scenarios/").changes
    assert (move(change, "VRAM").change or 0) < 0
    assert change.causes == ("scenario: workload.users 64 → 70", "file: config.json")


@pytest.mark.parametrize(
    ("old", "says"),
    [
        ("nothing", "no such file"),
        ("nosuch:scenarios/", "Needed a single revision"),
        ("main:nosuch/", "no scenario files"),
        ("--output=x:scenarios/", ""),
    ],
)
def test_a_side_that_is_not_there(
    repository: Path, old: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError) as caught:
        diff(old, "scenarios/")
    assert says in caught.value.message


def test_a_broken_file_of_a_revision_is_named(repository: Path) -> None:
    (repository / "scenarios" / "a.yaml").write_text("capplan: 1\nmodle: x\n")
    git("commit", "-q", "-a", "-m", "broken")
    with pytest.raises(InputError) as caught:
        diff("main:scenarios/", "main~1:scenarios/")
    assert caught.value.where == "scenarios/a.yaml:2:1"


def test_a_baseline_tells_scenario_catalog_calibration_and_program_apart(folder: Path) -> None:
    assert run(["check", "old", "--baseline", "base.json", "--update-baseline"]) == 0
    assert [change.kind for change in diff("base.json", "old").changes] == ["same"]
    data = json.loads((folder / "base.json").read_text())
    entry = data["scenarios"]["old/a.yaml"]
    entry["watched"]["VRAM"] -= 1 << 30
    entry["origins"] |= {
        "catalog/gpus/l40s-48gb": "another",
        "calibration/memory-vllm": "another",
        "program": "0.0.1",
    }
    (folder / "base.json").write_text(json.dumps(data))
    (change,) = diff("base.json", "old").changes
    assert change.kind == "moved"
    assert change.causes[0] == "catalog: gpus/l40s-48gb"
    assert change.causes[-1].startswith("capplan: 0.0.1 → ")


def test_a_json_that_is_no_baseline(folder: Path) -> None:
    (folder / "x.json").write_text('{"schema": "capplan.check/1"}')
    with pytest.raises(InputError, match="not a baseline"):
        diff("x.json", "new")


@pytest.mark.parametrize(
    ("before", "after", "change", "percent"),
    [
        (2.0, 3.0, "+1.00 s", "+50.0 %"),
        (3.0, 2.0, "−1.00 s", "−33.3 %"),
        (0.0, 2.0, "+2.00 s", ""),
        (None, 2.0, "", ""),
        (1.0, 4.0, "+3.00 s", "+300 %"),
    ],
)
def test_signs_and_percent(before: float | None, after: float | None, change: str, percent: str) -> None:
    made = Move(name="TTFT", key="latency.ttft_s.estimate", before=before, after=after)
    assert (signed(made), signed_percent(made)) == (change, percent)


def test_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "new" / "a.yaml").write_text(TEXT.replace("64", "70"))
    assert run(["diff", "old", "new"]) == 0
    out = capsys.readouterr().out
    assert "38.37 GiB  41.37 GiB  +3.00 GiB" in out
    assert "moved by scenario: workload.users 64 → 70" in out
    assert max(map(len, out.splitlines())) <= 80
    assert run(["diff", "old", "new", "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"moved": 1, "same": 0, "added": 0, "removed": 0}
    run(["diff", "old", "new", "-o", "md"])
    assert "| VRAM | 38.37 GiB | 41.37 GiB | +3.00 GiB | +7.8 % |" in capsys.readouterr().out
    run(["diff", "old", "new", "-o", "csv"])
    assert capsys.readouterr().out.startswith("scenario,kind,figure,before,after,change,percent,causes\n")


def test_an_empty_report() -> None:
    assert DiffReport(old="a", new="b", changes=()).to_dict()["scenarios"] == []
