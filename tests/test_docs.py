"""The README is tested: every console block is current output, every command and formula is documented."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = (
    *("vram", "latency", "simulate", "cost", "prices", "check", "diff", "init", "schema", "calibrate"),
    *("profile", "list", "show", "explain", "doctor", "compare"),
)


def blocks(text: str) -> list[str]:
    """The console blocks of a page."""
    return [match.group(1) for match in BLOCK.finditer(text)]


def current(block: str) -> str:
    """A block with the output its commands give now, at 80 columns, without colour."""
    made: list[str] = []
    for line in block.splitlines():
        if not line.startswith("$ "):
            continue
        made.append(line)
        words = line[2:].replace("capplan", f"{sys.executable} -m capplan", 1)
        done = subprocess.run(
            words,
            shell=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
        )
        made += (done.stdout + done.stderr).rstrip("\n").splitlines()
    return "\n".join(made) + "\n"


def refreshed(text: str) -> str:
    """A page with every console block brought up to date."""
    return BLOCK.sub(lambda match: f"```console\n{current(match.group(1))}```", text)


def test_readme_has_console_blocks() -> None:
    assert len(blocks(README.read_text())) >= 4


@pytest.mark.parametrize("number", range(len(blocks(README.read_text()))))
def test_readme_block_is_current_output(number: int) -> None:
    block = blocks(README.read_text())[number]
    assert current(block) == block, "run `python tests/test_docs.py` to refresh the README"


def test_every_command_is_documented() -> None:
    text = README.read_text()
    for command in COMMANDS:
        assert f"capplan {command}" in text
    from capplan import cli

    assert set(cli.COMMANDS) == set(COMMANDS), "a new command: document it and name it here"


def test_every_option_of_vram_is_documented() -> None:
    source = ast.parse((ROOT / "capplan/cli/vram.py").read_text())
    function = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "vram")
    text = README.read_text()
    for argument in function.args.args:
        assert f"--{argument.arg.rstrip('_').replace('_', '-')}" in text, argument.arg


def test_set_up_is_two_commands() -> None:
    commands = re.findall(r"^```bash\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    assert "capplan vram --model 8b --precision int4 --users 64" in commands[0]
    assert "pytest" in commands[1]


def test_nothing_names_this_machine() -> None:
    for folder in ("capplan", "kernels", "profiles", "tests", "docs", ".ci", "scenarios"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".json", ".md", "") and path.is_file():
                assert str(ROOT) not in path.read_text(errors="ignore"), path


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text()))
