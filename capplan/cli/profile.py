"""`capplan profile`: measure this device, and keep, check, merge and pass on what was measured."""

import os
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from capplan.cli.explain import report_rows
from capplan.cli.output import OutputFormat, console_width, render, write_json
from capplan.cli.user_folders import calibration_folder
from capplan.errors import ExitStatus, InputError, did_you_mean

QUICK_S = 165.0
ACTIONS = ("verify", "export", "import", "merge")


def profile(
    words: Annotated[list[str] | None, typer.Argument(help="verify|export|import|merge FILE…")] = None,
    model: Annotated[str | None, typer.Option(help="Dense model whose shapes are timed.")] = None,
    grid: Annotated[str | None, typer.Option(help="general: shapes of many models.")] = None,
    formats: Annotated[str, typer.Option(help="Weight formats, by commas.")] = "bf16,int8,int4",
    kv_dtypes: Annotated[str, typer.Option(help="KV cache dtypes, by commas: bf16, fp8.")] = "bf16",
    budget: Annotated[str, typer.Option(help="How long it may take: 90s, 3m.")] = "3m",
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, under 3 minutes.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda:0, or cpu.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Time collectives over so many, too.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    clock: Annotated[str, typer.Option(help="On a CPU: auto, wall or thread-cpu.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="File or folder; else the user data folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run was stopped.")] = False,
    compare_to: Annotated[str | None, typer.Option(help="A GPU to set beside it.")] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """Measure this device with the bundled kernels; every other command can then use the file.

    Example: capplan profile --device cpu --model llama-3.2-1b --quick
    """
    if words:
        return _file_action(words[0], [Path(word) for word in words[1:]], out, output, model)
    from capplan.calibrate.profile import profile as measure
    from capplan.calibrate.profile_question import ProfileQuestion
    from capplan.profile_report import compare_checked

    if grid not in (None, "general"):
        raise InputError(f"no grid {grid!r}", where="--grid", hint="general, or --model NAME")
    compare_checked(compare_to)
    question = ProfileQuestion(
        model=model or "llama-3.2-1b",
        formats=_list(formats, "--formats"),
        kv_dtypes=_list(kv_dtypes, "--kv-dtypes"),
        budget_s=QUICK_S if quick and budget == "3m" else _seconds(budget),
        quick=quick,
        general=grid == "general",
        device=device,
        ranks=gpus,
        threads=threads,
        clock=clock,
        launched="WORLD_SIZE" in os.environ,
    )
    if question.launched and os.environ.get("RANK", "0") != "0":
        from capplan.calibrate.collectives_bench import measure_here

        measure_here("cpu" if device == "cpu" else "cuda")
        return int(ExitStatus.OK)
    line = _Line()
    try:
        made = measure(question, path_of=lambda key: _path(out, key, question.model), resume=resume, say=line)
    except KeyboardInterrupt:
        line.close()
        print("what was timed is kept: the same command with --resume goes on", file=sys.stderr)
        raise
    line.close()
    for warning in made.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"written: {made.path}", file=sys.stderr)
    return _report(made.path, compare_to, output, question.model)


class _Line:
    """Progress on stderr: one line rewritten on a terminal, only the parts of a run elsewhere."""

    def __init__(self) -> None:
        self.live, self.open = sys.stderr.isatty(), False

    def __call__(self, text: str) -> None:
        if text.startswith("\r"):
            if self.live:
                width = console_width() - 1
                print("\r" + text[1:][:width].ljust(width), end="", file=sys.stderr, flush=True)
                self.open = True
            return
        self.close()
        print(text, file=sys.stderr)

    def close(self) -> None:
        """End the line that was being rewritten."""
        if self.open:
            print(file=sys.stderr)
            self.open = False


def _list(text: str, where: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise InputError("nothing named", where=where, hint="such as bf16,int4")
    return found


def _seconds(text: str) -> float:
    """A time such as 90s, 3m, 1h. Raises InputError."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        found = float(number) * units[unit]
    except ValueError:
        found = 0.0
    if not 10 <= found <= 86_400:
        raise InputError(f"no budget {text!r}", where="--budget", hint="10s to 24h, such as 90s or 3m")
    return found


def _path(out: Path | None, key: str, model: str) -> Path:
    """Where the file goes: --out where it is a file's name, else a folder and a name of its own."""
    if out is not None and out.suffix in (".yaml", ".yml"):
        return out
    name = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in Path(model).name)
    return (out or calibration_folder()) / f"{key}_{name.lower()}.yaml"


def _report(path: Path, compare_to: str | None, output: OutputFormat, model: str | None = None) -> int:
    """The closing report of a file."""
    from capplan import local_calibration, profile_report
    from capplan.calibrate.profile_file import points_of, verify

    rows = verify(path, model)
    local = local_calibration.read(path)
    if output is OutputFormat.JSON:
        points = points_of(local, str(path))
        write_json(
            {
                "schema": "capplan.profile/1",
                "id": local.id,
                "file": path.name,
                "hardware": dict(local.data["hardware"]),
                "run": dict(local.data.get("run", {})),
                "error": dict(local.error),
                "held_out": rows,
                "achieved": profile_report.achieved(local, points),
                "speed_up": profile_report.speed_ups(local),
                "paging": profile_report.paging(points),
                "energy": profile_report.energy(points),
                "idle_power_w": local.data.get("state", {}).get("idle", {}).get("power_w"),
                "warnings": profile_report.warnings(local, points),
            }
        )
    elif output is OutputFormat.TABLE:
        render(profile_report.view(local, rows, str(path), compare_to, model))
    else:
        report_rows(rows, output, "capplan.profile/1")
    return int(ExitStatus.OK)


def _file_action(
    action: str, files: list[Path], out: Path | None, output: OutputFormat, model: str | None
) -> int:
    """verify, export, import, merge."""
    if action not in ACTIONS:
        raise InputError(
            f"no action {action!r}",
            where="capplan profile",
            hint=did_you_mean(action, ACTIONS, f"{', '.join(ACTIONS)}, or options alone to measure"),
        )
    least = 2 if action == "merge" else 1
    if len(files) < least or (len(files) > 1 and action != "merge"):
        raise InputError(
            f"{action} takes {'two files or more' if least > 1 else 'one file'}",
            where=f"capplan profile {action}",
            hint=f"capplan profile {action} FILE{' FILE' if least > 1 else ''}",
        )
    if action == "verify":
        return _report(files[0], None, output, model)
    from capplan import local_calibration, profile_shelf
    from capplan.calibrate import profile_file

    data: dict[str, Any]
    if action == "merge":
        data = profile_file.merge(files)
    else:
        profile_file.verify(files[0], model)
        data = dict(local_calibration.read(files[0]).data)
    found = local_calibration.checked(data, str(files[0]))
    folder = calibration_folder() if action == "import" else Path()
    target = out if out is not None and out.suffix in (".yaml", ".yml") else None
    path = target or profile_shelf.place(out or folder, found)
    profile_file.save(data, path)
    print(f"written: {path}", file=sys.stderr)
    return _report(path, None, output) if action == "merge" else int(ExitStatus.OK)


def list_profiles(output: OutputFormat) -> int:
    """The user's calibrations, the least error first."""
    from capplan import profile_shelf

    rows = profile_shelf.rows(calibration_folder(), date.today())
    if not rows:
        print("no profiles yet: `capplan profile` measures this device", file=sys.stderr)
    report_rows(rows, output, "capplan.list.profiles/1", short=True)
    return int(ExitStatus.OK)
