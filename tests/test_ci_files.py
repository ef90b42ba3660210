"""The GitHub Action, the GitLab job and the pre-commit hook: their steps are run as they stand."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOLDS = (
    "capplan: 1\nmodel: 8b\nprecision: int4\nfleet: {gpu: l40s}\nworkload: {users: 64}\n"
    "expect: {vram.fits: true}\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A user's repository with one scenario, and a folder where capplan is installed already."""
    made = tmp_path / "checkout"
    (made / "scenarios").mkdir(parents=True)
    (made / "scenarios" / "a.yaml").write_text(HOLDS)
    binaries = tmp_path / "temp" / "capplan" / "bin"
    binaries.mkdir(parents=True)
    command = binaries / "capplan"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m capplan "$@"\n')
    command.chmod(0o755)
    return made


def step(identity: str) -> dict[str, Any]:
    return next(entry for entry in ACTION["runs"]["steps"] if entry["id"] == identity)


def run_step(identity: str, checkout: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step as the runner does: inputs by way of its environment, bash with -e."""
    temp = checkout.parent / "temp"
    defaults = {name: str(entry.get("default", "")) for name, entry in ACTION["inputs"].items()}
    known = {f"inputs.{name}": value for name, value in (defaults | inputs).items()}
    known |= {"runner.temp": str(temp), "github.action_path": str(ROOT)}
    found = step(identity)
    values = {
        name: re.sub(r"\$\{\{ (.*?) \}\}", lambda match: known[match.group(1)], text)
        for name, text in found["env"].items()
    }
    values |= {
        "GITHUB_OUTPUT": str(checkout.parent / "output"),
        "GITHUB_STEP_SUMMARY": str(checkout.parent / "summary"),
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", found["run"]],
        cwd=checkout, env=os.environ | values, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_action_checks_annotates_and_summarises(checkout: Path) -> None:
    done = run_step("check", checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 of 1 scenario holds\n"
    outputs = dict(line.split("=", 1) for line in (checkout.parent / "output").read_text().splitlines())
    assert Path(outputs["junit"]).read_text().startswith("<?xml")
    assert "1 hold" in (checkout.parent / "summary").read_text()


def test_the_action_fails_with_the_check_and_keeps_its_summary(checkout: Path) -> None:
    (checkout / "scenarios" / "b.yaml").write_text(HOLDS.replace("64", "640"))
    done = run_step("check", checkout, paths="scenarios/a.yaml scenarios/b.yaml")
    assert done.returncode == 3
    assert done.stdout.startswith("::error file=scenarios/b.yaml,line=6,")
    assert "1 failed" in (checkout.parent / "summary").read_text()


def test_inputs_are_data_not_code(checkout: Path) -> None:
    done = run_step(
        "check", checkout, paths='scenarios/ $(touch hacked) "; touch hacked', baseline="$(touch hacked)"
    )
    assert done.returncode == 2
    assert not (checkout / "hacked").exists()
    for entry in ACTION["runs"]["steps"]:
        assert "${{" not in entry["run"]


def test_the_action_compares_with_a_revision(checkout: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], cwd=checkout, check=True)
    (checkout / "scenarios" / "a.yaml").write_text(HOLDS.replace("64", "70"))
    done = run_step("compare", checkout, **{"compare-with": "main"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "+3.00 GiB" in (checkout.parent / "summary").read_text()


@pytest.mark.slow
def test_the_action_installs_itself(checkout: Path) -> None:
    shadow = checkout.parent / "temp" / "capplan"
    (shadow / "bin" / "capplan").unlink()
    done = run_step("install", checkout)
    assert done.returncode == 0, done.stderr
    assert run_step("check", checkout).returncode == 0


def snippets() -> list[Any]:
    """The YAML blocks of the page, read."""
    text = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    return [
        yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]


def test_the_gitlab_job_runs_and_leaves_its_report(checkout: Path) -> None:
    (job,) = [block["capacity"] for block in snippets() if "capacity" in block]
    install, check = job["script"]
    assert install.endswith("pip install --quiet capplan")
    path = f"{checkout.parent / 'temp' / 'capplan' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", check], cwd=checkout, env=os.environ | {"PATH": path}, check=False)
    assert done.returncode == 0
    assert (checkout / job["artifacts"]["reports"]["junit"]).read_text().startswith("<?xml")


def test_the_pre_commit_hook_runs(checkout: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    program, *arguments = shlex.split(hook["entry"])
    assert program == "capplan"
    command = [sys.executable, "-m", program, *arguments, *hook["args"]]
    assert subprocess.run(command, cwd=checkout, check=False).returncode == 0
    (checkout / "scenarios" / "a.yaml").write_text(HOLDS.replace("64", "640"))
    assert subprocess.run(command, cwd=checkout, check=False).returncode == 3
    pattern = re.compile(hook["files"])
    assert pattern.search("scenarios/sub/_base.yml")
    assert not pattern.search("docs/scenarios.md")
    (used,) = [
        entry
        for block in snippets()
        if "repos" in block
        for repo in block["repos"]
        for entry in repo["hooks"]
    ]
    assert used["id"] == hook["id"]


def test_the_scenario_of_the_page_is_read(tmp_path: Path) -> None:
    from capplan.scenario import load_scenario

    text = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    block = re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "page.yaml").write_text(block)
    assert load_scenario(tmp_path / "page.yaml").values["workload.isl"] == 2000


def test_python_examples_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8")
    test = doctest.DocTestParser().get_doctest(text, {}, "scenarios.md", None, 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert test.examples
    assert runner.failures == 0
