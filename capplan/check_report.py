"""The report of `capplan check` in the formats of terminals and CI systems. Nothing is judged here."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from capplan.check import CheckReport, Result, ScenarioReport, Status

if TYPE_CHECKING:
    from rich.console import RenderableType

MARKER: Final = "<!-- capplan check -->"
"""First line of the Markdown: a bot finds its own comment by it."""
MAX_MARKDOWN: Final = 60_000
"""GitHub takes comments of up to 65,536 characters."""
_WORDS: Final = {
    Status.HOLDS: "ok",
    Status.FAILS: "FAIL",
    Status.NOT_EVALUATED: "FAIL",
    Status.UNUSABLE: "ERROR",
}


def summary(report: CheckReport) -> str:
    """The counts in one line."""
    total = len(report.scenarios)
    held = "scenario holds" if total == 1 else "scenarios hold"
    parts = [f"{report.count(Status.HOLDS)} of {total} {held}"]
    failed = report.count(Status.FAILS)
    parts += [f"{failed} failed"] if failed else []
    unknown = report.count(Status.NOT_EVALUATED)
    parts += [f"{unknown} could not be evaluated"] if unknown else []
    unusable = report.count(Status.UNUSABLE)
    parts += [f"{unusable} cannot be used"] if unusable else []
    return ", ".join(parts) + ("; stopped at the first failure" if report.stopped else "")


def summary_of(scenarios: Sequence[ScenarioReport]) -> str:
    """The summary of some scenarios, and the first thing that does not hold."""
    report = CheckReport(scenarios=tuple(scenarios))
    bad = [result for entry in scenarios for result in entry.results if result.status is not Status.HOLDS]
    told = [part for result in bad[:1] for part in (result.message, result.hint) if part]
    return "\n".join([summary(report), *told])


def as_json(report: CheckReport) -> str:
    """The JSON contract `capplan.check/1`."""
    return json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def view(report: CheckReport) -> list["RenderableType"]:
    """The report on a terminal: each scenario, its expectations, and what failed in full."""
    from rich.padding import Padding
    from rich.text import Text

    made: list[RenderableType] = []
    for scenario in report.scenarios:
        holds = scenario.status is Status.HOLDS
        head = Text(f"{_WORDS[scenario.status]:5} ", style="green" if holds else "red")
        head.append(f"{scenario.file}{scenario.variant}", style="default")
        count = f"{len(scenario.results)} expectation{'' if len(scenario.results) == 1 else 's'}"
        head.append(f"  {count}" if holds else "", style="dim")
        made.append(head)
        for result in scenario.results:
            if result.status is not Status.HOLDS:
                made.append(Padding(Text(result.message), (0, 0, 0, 6)))
                made.append(Padding(Text(f"--> {result.place}", style="dim"), (0, 0, 0, 8)))
                if result.hint:
                    made.append(Padding(Text(f"= help: {result.hint}", style="dim"), (0, 0, 0, 8)))
        if not holds:
            made += [Padding(Text(f"note: {note}", style="dim"), (0, 0, 0, 6)) for note in scenario.notes]
    return [*made, Text(""), Text(summary(report))]


def rows(report: CheckReport) -> list[dict[str, Any]]:
    """One row an expectation, for CSV."""
    return [
        {
            "file": result.place.file,
            "line": result.place.line,
            "scenario": scenario.title,
            "key": result.key,
            "status": result.status.value,
            "expected": result.want,
            "got": result.got,
            "taken": result.taken,
            "value": result.value,
        }
        for scenario in report.scenarios
        for result in scenario.results
    ]


def github(report: CheckReport) -> str:
    """GitHub's workflow commands: an annotation on the line of each failing expectation."""
    lines = []
    for scenario in report.scenarios:
        for result in scenario.results:
            if result.status is Status.HOLDS:
                continue
            place = result.place
            title = _property(f"capplan: {scenario.title}")
            text = result.message + (f". {result.hint}" if result.hint else "")
            lines.append(
                f"::error file={_property(place.file)},line={place.line},col={place.column},"
                f"title={title}::{_data(text)}"
            )
    return "\n".join([*lines, summary(report)]) + "\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def junit(report: CheckReport) -> str:
    """JUnit XML as GitLab and Jenkins read it: a suite a scenario, a case an expectation."""
    from xml.sax.saxutils import quoteattr

    def attributes(**values: object) -> str:
        return "".join(f" {name}={quoteattr(_printable(str(value)))}" for name, value in values.items())

    failed = (Status.FAILS, Status.NOT_EVALUATED)
    everything = [result for scenario in report.scenarios for result in scenario.results]
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f"<testsuites{attributes(name='capplan check', **_counts(everything))}>")
    for scenario in report.scenarios:
        named = attributes(name=scenario.title, file=scenario.file, **_counts(scenario.results))
        lines.append(f"  <testsuite{named}>")
        for result in scenario.results:
            case = attributes(
                classname=scenario.title,
                name=f"{result.key} {result.want}".strip(),
                file=result.place.file,
                line=result.place.line,
                time=0,
            )
            if result.status is Status.HOLDS:
                lines.append(f"    <testcase{case}/>")
                continue
            kind = "failure" if result.status in failed else "error"
            body = _xml_text(f"{result.message}\n{result.place}\n{result.hint}".strip())
            lines.append(f"    <testcase{case}>")
            message = attributes(message=result.message, type=result.status.value)
            lines.append(f"      <{kind}{message}>{body}</{kind}>")
            lines.append("    </testcase>")
        lines.append("  </testsuite>")
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def _counts(results: "tuple[Result, ...] | list[Result]") -> dict[str, object]:
    failures = sum(result.status in (Status.FAILS, Status.NOT_EVALUATED) for result in results)
    errors = sum(result.status is Status.UNUSABLE for result in results)
    return {"tests": len(results), "failures": failures, "errors": errors, "skipped": 0, "time": 0}


def _printable(text: str) -> str:
    """Without the characters that XML 1.0 has no place for."""
    return "".join(char if char >= " " or char in "\t\n\r" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _xml_text(text: str) -> str:
    from xml.sax.saxutils import escape

    return escape(_printable(text))


def markdown(report: CheckReport) -> str:
    """A comment for a pull request: what fails in a table, the rest folded."""
    sign = "✅" if report.exit_status == 0 else "❌"
    lines = [MARKER, f"### {sign} capplan: {summary(report)}", ""]
    bad = [scenario for scenario in report.scenarios if scenario.status is not Status.HOLDS]
    good = [scenario for scenario in report.scenarios if scenario.status is Status.HOLDS]
    if bad:
        lines += ["| scenario | expected | got | where |", "| --- | --- | --- | --- |"]
        lines += [line for scenario in bad for line in _bad_lines(scenario)]
        lines.append("")
    if good:
        lines += [f"<details><summary>{len(good)} hold</summary>", ""]
        lines += ["| scenario | expected | got |", "| --- | --- | --- |"]
        lines += [line for scenario in good for line in _good_lines(scenario)]
        lines += ["", "</details>"]
    text = "\n".join(lines) + "\n"
    if len(text) <= MAX_MARKDOWN:
        return text
    kept: list[str] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > MAX_MARKDOWN:
            break
        kept.append(line)
    folded = "<details>" in "".join(kept)
    end = ["", "</details>"] if folded else []
    return "\n".join([*kept, *end, "", "… shortened: `capplan check` shows the rest"]) + "\n"


def _bad_lines(scenario: ScenarioReport) -> Iterator[str]:
    for result in scenario.results:
        if result.status is Status.HOLDS:
            continue
        want = "" if result.status is Status.UNUSABLE else f"`{result.key}` {_cell(result.want)}"
        got = f"**{_cell(result.got)}**" + (f", {_cell(result.taken)}" if result.taken else "")
        got += f"<br>{_cell(result.hint)}" if result.hint else ""
        place = f"{result.place.file}:{result.place.line}"
        yield f"| {_cell(scenario.title)} | {want} | {got} | {_cell(place)} |"


def _good_lines(scenario: ScenarioReport) -> Iterator[str]:
    for result in scenario.results:
        got = f"{result.got}, {result.taken}" if result.taken else result.got
        yield f"| {_cell(scenario.title)} | `{result.key}` {_cell(result.want)} | {_cell(got)} |"


def _cell(text: str) -> str:
    """Text that stays inside a table's cell and says what it says."""
    made = " ".join(text.split())
    for char in "\\|*_`<>[]":
        made = made.replace(char, {"<": "&lt;", ">": "&gt;"}.get(char, f"\\{char}"))
    return made
