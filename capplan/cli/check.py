"""`capplan check`: whether the expectations of scenario files hold."""

import sys
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.output import render, write

if TYPE_CHECKING:
    from capplan.check import CheckReport


class CheckFormat(str, Enum):
    """Formats of --format."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    GITHUB = "github"


def check(
    paths: Annotated[list[str], typer.Argument(help="Scenario files, and folders of them.")],
    output: Annotated[CheckFormat, typer.Option("--format", "-o", "--output")] = CheckFormat.TABLE,
    baseline: Annotated[str | None, typer.Option(help="Figures that `within: 5% of baseline` means.")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="Write them anew.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 1,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first that fails.")] = False,
    report: Annotated[list[str] | None, typer.Option(help="Also write FORMAT=FILE; repeatable.")] = None,
) -> int:
    """Whether the expectations of scenario files hold: exit code 0 if all do, 3 if not, 2 for a broken file.

    What cannot be evaluated fails. In folders, names that start with _ are left out.

    Example: capplan check scenarios/ --format github
    """
    from capplan import baseline as baselines
    from capplan.check import check_paths

    asked = [_report(text) for text in report or ()]
    kept = baselines.asked(baseline, update=update_baseline)
    run = partial(
        check_paths,
        paths,
        identity=str if kept is None else kept.identity,
        jobs=jobs or _cores(),
        fail_fast=fail_fast,
        origins=CheckFormat.JSON in (output, *(name for name, _ in asked)),
    )
    if update_baseline and kept is not None:
        kept.update(run(snapshots=True))
        print(f"wrote {kept.path}", file=sys.stderr)
    made = run(baseline=None if kept is None else kept.read())
    for name, path in asked:
        baselines.write_file(path, text_of(made, name))
    if output is CheckFormat.TABLE:
        from capplan.check_report import view

        render(view(made))
    else:
        write(text_of(made, output))
    return int(made.exit_status)


def _cores() -> int:
    import os

    return os.cpu_count() or 1


def _report(text: str) -> tuple[CheckFormat, str]:
    """FORMAT=FILE; InputError otherwise."""
    from capplan.errors import InputError, did_you_mean, shown

    name, _, path = text.partition("=")
    known = [entry.value for entry in CheckFormat if entry is not CheckFormat.TABLE]
    if name not in known or not path:
        hint = did_you_mean(name, known, "write junit=report.xml") if path else "write junit=report.xml"
        raise InputError(f"{shown(text)} is no FORMAT=FILE", where="--report", hint=hint)
    return CheckFormat(name), path


def text_of(report: "CheckReport", output: CheckFormat) -> str:
    """The report in a format that is plain text."""
    from capplan import check_report
    from capplan.report import to_csv

    if output is CheckFormat.JSON:
        return check_report.as_json(report)
    if output is CheckFormat.CSV:
        return to_csv(check_report.rows(report))
    if output is CheckFormat.JUNIT:
        return check_report.junit(report)
    if output is CheckFormat.GITHUB:
        return check_report.github(report)
    return check_report.markdown(report)
