"""CPU time of `capplan check`: one scenario against the start-up of `capplan vram`, and 200 scenarios.

    python tests/benchmarks/scenarios.py [runs]

Prints medians of user + system seconds of whole processes, run in turn so that a drifting machine hits all
alike. A benchmark, not a test: the targets (2 × for one, 5 s for 200) are of a machine left alone.
"""

import statistics
import sys
import tempfile
from pathlib import Path

from startup import cpu_seconds

SCENARIOS = Path(__file__).parent.parent.parent / "scenarios"
MANY = 200
MEMORY = (
    "capplan: 1\nmodel: 8b\nprecision: int4\nfleet: {gpu: l40s}\nworkload: {users: 64}\n"
    "expect: {vram.fits: true}\n"
)


def copies(folder: Path) -> None:
    """`MANY` scenarios, the shipped ones over and over, each with a context of its own."""
    files = sorted(path for path in SCENARIOS.glob("*.yaml") if not path.name.startswith("_"))
    (folder / "_base.yaml").write_text((SCENARIOS / "_base.yaml").read_text())
    for number in range(MANY):
        file = files[number % len(files)]
        (folder / f"{number:03}-{file.name}").write_text(file.read_text())


def main(runs: int) -> None:
    """Time each command `runs` times and print medians and ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "one.yaml").write_text(MEMORY)
        (folder / "many").mkdir()
        copies(folder / "many")
        capplan = [sys.executable, "-m", "capplan"]
        vram = [
            "vram",
            "--model",
            "8b",
            "--precision",
            "int4",
            "--users",
            "64",
            "--gpu",
            "l40s",
            "-o",
            "json",
        ]
        commands = {
            "vram -o json": [*capplan, *vram],
            "check, one of memory": [*capplan, "check", str(folder / "one.yaml"), "-o", "json"],
            "check, 8B chat": [*capplan, "check", str(SCENARIOS / "llama-8b-chat.yaml"), "-o", "json"],
            f"check, {MANY} as shipped": [*capplan, "check", str(folder / "many"), "-o", "json"],
        }
        times: dict[str, list[float]] = {label: [] for label in commands}
        for run in range(runs + 1):
            for label, command in commands.items():
                seconds = cpu_seconds(command)
                if run:  # the first round warms the caches
                    times[label].append(seconds)
    base = statistics.median(times["vram -o json"])
    for label, values in times.items():
        median = statistics.median(values)
        print(f"{label:26} {median:6.3f} s CPU   × {median / base:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
