"""CPU time of `capplan vram` as a ratio to an empty Typer app of the same version.

    python tests/benchmarks/startup.py [runs]

Prints the median CPU seconds (user + system, of the whole process) of each command, run in turn so that a
drifting machine hits all alike, and their ratios to the empty app. A benchmark, not a test: bounds are
issue targets (1.5 × and 1.8 ×, both under 0.2 s), the machine decides the seconds.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EMPTY_APP = """
from typing import Annotated
import typer
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

@app.command()
def one({options}) -> None:
    print("one")

@app.command()
def two() -> None:
    print("two")

app()
"""
OPTIONS = ", ".join(
    f"o{number}: Annotated[str | None, typer.Option(help='An option.')] = None" for number in range(20)
)
TARGETS = {"vram -o json": 1.5, "vram --gpu all -o json": 1.8}


# Byte code is cached as for any installed program, whatever the shell that runs the benchmark says: the
# round that is not counted writes it.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_seconds(command: list[str]) -> float:
    """User and system seconds of one finished process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{command} failed")
    return usage.ru_utime + usage.ru_stime


def main(runs: int) -> None:
    """Time every command `runs` times and print medians and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text(EMPTY_APP.format(options=OPTIONS))
        capplan = [sys.executable, "-m", "capplan"]
        question = ["vram", "--model", "8b", "--precision", "int4", "--users", "64", "-o", "json"]
        commands = {
            "empty Typer app": [sys.executable, str(empty), "one"],
            "vram -o json": [*capplan, *question],
            "vram --gpu all -o json": [*capplan, *question, "--gpu", "all"],
            "--help": [*capplan, "--help"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(runs + 1):
            for name, command in commands.items():
                seconds = cpu_seconds(command)
                if run:  # the first round warms the caches
                    times[name].append(seconds)
    base = statistics.median(times["empty Typer app"])
    for name, values in times.items():
        median = statistics.median(values)
        target = f"  (target {TARGETS[name]})" if name in TARGETS else ""
        print(f"{name:24} {median:6.3f} s CPU   × {median / base:.2f}{target}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
