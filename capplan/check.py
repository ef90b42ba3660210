"""Scenario files → whether their expectations hold.

What cannot be evaluated fails. The same files give the same report on every machine and with any number of
processes.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

from capplan import scenario_questions as questions
from capplan.answers import Answers
from capplan.errors import CapplanError, ExitStatus, InputError
from capplan.expectation import Expectation, NotEvaluatedError, find, judge, wanted
from capplan.scenario import Disk, Files, Scenario, load_scenarios
from capplan.scenario_keys import KEYS, SPELLINGS
from capplan.snapshot import Snapshot, take
from capplan.units import format_bytes

SUFFIXES: Final = (".yaml", ".yml")


class Status(str, Enum):
    """What came of an expectation, a scenario or a file."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_EVALUATED = "not evaluated"
    UNUSABLE = "unusable"


_EXIT: Final = {
    Status.HOLDS: ExitStatus.OK,
    Status.FAILS: ExitStatus.EXPECTATION,
    Status.NOT_EVALUATED: ExitStatus.EXPECTATION,
    Status.UNUSABLE: ExitStatus.INPUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a line of a report points: a file, line and column, from 1."""

    file: str
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def to_dict(self) -> dict[str, Any]:
        """JSON of the place."""
        return {"file": self.file, "line": self.line, "column": self.column}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One expectation: what was wanted, what came, and the figure in SI."""

    key: str
    status: Status
    place: Place
    want: str = ""
    got: str = ""
    taken: str = ""
    value: Any = None
    hint: str = ""

    @property
    def message(self) -> str:
        """The result in one line."""
        if self.status is Status.UNUSABLE:
            return self.got
        if self.status is Status.NOT_EVALUATED:
            return f"{self.key}, expected {self.want}, could not be evaluated: {self.got}"
        taken = f" ({self.taken})" if self.taken else ""
        return f"{self.key} is {self.got}{taken}, expected {self.want}"

    def to_dict(self) -> dict[str, Any]:
        """JSON of the result."""
        return {
            "key": self.key,
            "status": self.status.value,
            "expected": self.want,
            "got": self.got,
            "taken": self.taken or None,
            "value": self.value,
            "hint": self.hint or None,
            **self.place.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioReport:
    """One scenario's results; a file that cannot be used is one with a single unusable result."""

    file: str
    title: str
    variant: str = ""
    results: tuple[Result, ...] = ()
    notes: tuple[str, ...] = ()
    origins: Mapping[str, str] | None = None
    snapshot: Snapshot | None = None

    @property
    def status(self) -> Status:
        """The worst of its results."""
        worst = (Status.UNUSABLE, Status.NOT_EVALUATED, Status.FAILS)
        have = {result.status for result in self.results}
        return next((status for status in worst if status in have), Status.HOLDS)

    @property
    def identity(self) -> str:
        """File and variant."""
        return self.file + self.variant

    @property
    def figures(self) -> dict[str, Any]:
        """The figure of each expectation that was evaluated, in SI."""
        return {result.key: result.value for result in self.results if result.value is not None}

    def to_dict(self) -> dict[str, Any]:
        """JSON of the scenario."""
        return {
            "file": self.file,
            "name": self.title,
            "variant": self.variant or None,
            "status": self.status.value,
            "expectations": [result.to_dict() for result in self.results],
            "origins": dict(self.origins or {}),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The answer of `capplan check`."""

    scenarios: tuple[ScenarioReport, ...]
    stopped: bool = False

    @property
    def exit_status(self) -> ExitStatus:
        """The worst of 2 > 3 > 0."""
        statuses = {_EXIT[scenario.status] for scenario in self.scenarios}
        worst = (ExitStatus.INPUT, ExitStatus.EXPECTATION)
        return next((status for status in worst if status in statuses), ExitStatus.OK)

    def count(self, status: Status) -> int:
        """Scenarios of this status."""
        return sum(scenario.status is status for scenario in self.scenarios)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `capplan check` (schema capplan.check/1)."""
        return {
            "schema": "capplan.check/1",
            "status": int(self.exit_status),
            "counts": {status.value: self.count(status) for status in Status},
            "stopped_at_first_failure": self.stopped,
            "scenarios": [scenario.to_dict() for scenario in self.scenarios],
        }


def scenario_files(paths: Sequence[str]) -> list[str]:
    """The files of paths in order: files as given; of folders all YAML below, sorted.

    In folders, names that start with . or _ are left out: _base.yaml is there to be extended.
    Errors: InputError for a path that is not there, and where nothing is found.
    """
    made: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            made.update(dict.fromkeys(_walk(path)))
        elif os.path.exists(path):
            made[_slashes(path)] = None
        else:
            raise InputError("no such file or folder", where=path, hint="give scenario files or folders")
    if not made:
        raise InputError(
            "no scenario files", where=", ".join(paths) or "capplan check", hint="`capplan init` writes one"
        )
    return list(made)


def _walk(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for name in sorted(names):
            if name[0] not in "._" and name.endswith(SUFFIXES):
                yield _slashes(posixpath.normpath(os.path.join(root, name)))


def _slashes(path: str) -> str:
    return path.replace("\\", "/") if os.sep == "\\" else path


def check_paths(
    paths: Sequence[str],
    *,
    baseline: "Mapping[str, Mapping[str, Any]] | None" = None,
    identity: Callable[[str], str] = str,
    jobs: int = 1,
    fail_fast: bool = False,
    origins: bool = False,
    snapshots: bool = False,
) -> CheckReport:
    """Check the scenarios of files and folders.

    `baseline` are the figures of an earlier check by `identity(file)` + variant. `origins`: with hashes of
    what the answers rest on; `snapshots`: with what `diff` compares.
    """
    files = scenario_files(paths)
    work = partial(check_file, baseline=baseline, identity=identity, origins=origins, snapshots=snapshots)
    made: list[ScenarioReport] = []
    for reports in _each(work, files, jobs):
        for report in reports:
            made.append(report)
            if fail_fast and report.status is not Status.HOLDS:
                return CheckReport(scenarios=tuple(made), stopped=True)
    return CheckReport(scenarios=tuple(made))


def _each(
    work: Callable[[str], list[ScenarioReport]], files: list[str], jobs: int
) -> Iterator[list[ScenarioReport]]:
    """The files' reports in the files' order."""
    if jobs <= 1 or len(files) == 1:
        yield from map(work, files)
        return
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(max_workers=min(jobs, len(files)))
    try:
        yield from pool.map(work, files, chunksize=max(1, min(8, len(files) // (jobs * 4))))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def check_file(
    file: str,
    *,
    baseline: "Mapping[str, Mapping[str, Any]] | None" = None,
    identity: Callable[[str], str] = str,
    origins: bool = False,
    snapshots: bool = False,
    files: Files | None = None,
) -> list[ScenarioReport]:
    """The reports of one file's scenarios."""
    try:
        scenarios = load_scenarios(file, files or Disk())
    except CapplanError as error:
        return [ScenarioReport(file=file, title=file, results=(_unusable(error, Place(file=file)),))]
    made = []
    for scenario in scenarios:
        known = None if baseline is None else baseline.get(identity(file) + scenario.chosen, {})
        report = check_scenario(scenario, known, origins=origins)
        usable = snapshots and report.status is not Status.UNUSABLE
        made.append(replace(report, snapshot=take(scenario)) if usable else report)
    return made


def check_scenario(
    scenario: Scenario, baseline: Mapping[str, Any] | None = None, *, origins: bool = False
) -> ScenarioReport:
    """One scenario's report; `baseline` are its earlier figures by expectation."""
    answers = Answers(scenario)
    # One bad value spoils every answer that reads it: it is told once.
    results = list(
        dict.fromkeys(_result(scenario, answers, entry, baseline) for entry in scenario.expectations)
    )
    if not results:
        results = [
            Result(
                key="expect",
                status=Status.NOT_EVALUATED,
                place=Place(file=scenario.file),
                want="at least one expectation",
                got="nothing is expected, so nothing was checked",
                hint="add expect:, or start the file's name with _ to leave it out",
            )
        ]
    notes = list(dict.fromkeys(answers.notes))
    if unused := questions.unused(scenario):
        notes.append(f"in the file, and in none of these answers: {', '.join(unused)}")
    found: Mapping[str, str] | None = None
    if origins:
        from capplan.origins import origins_of

        found = origins_of(scenario, answers)
    return ScenarioReport(
        file=scenario.file,
        title=scenario.title,
        variant=scenario.chosen,
        results=tuple(results),
        notes=tuple(notes),
        origins=found,
    )


def _result(
    scenario: Scenario, answers: Answers, entry: Expectation, baseline: Mapping[str, Any] | None
) -> Result:
    place = Place(file=entry.mark.file, line=entry.mark.line, column=entry.mark.column)
    made = Result(key=entry.key, status=Status.NOT_EVALUATED, place=place, want=wanted(entry))
    try:
        answer = answers.get(entry.answer)
        found = find(answer, entry)
        verdict = judge(entry, found, None if baseline is None else baseline.get(entry.key))
    except NotEvaluatedError as error:
        return replace(made, got=str(error))
    except CapplanError as error:
        if error.exit_status is not ExitStatus.INPUT:
            return replace(made, got=error.message, hint=error.hint)
        return _unusable(error, asked_place(scenario, error, place))
    status = {True: Status.HOLDS, False: Status.FAILS, None: Status.NOT_EVALUATED}[verdict.holds]
    return replace(
        made,
        status=status,
        want=verdict.want,
        got=verdict.got,
        taken=found.taken,
        value=found.value,
        hint="" if verdict.holds else _arithmetic(entry, answer),
    )


def _arithmetic(entry: Expectation, answer: Mapping[str, Any]) -> str:
    """Why it does not fit: the need and the memory of one GPU, or the engine's own reason."""
    if entry.key != "vram.fits" or not answer["gpu"]:
        return ""
    reason = (answer.get("engine") or {}).get("reason")
    need, there = answer["per_gpu"]["total"]["bytes"], answer["gpu"]["usable_bytes"]
    sums = f"{format_bytes(need)} needed on a GPU, {format_bytes(there)} there"
    room = answer["max_users"]
    return f"{reason or sums}; room for {room:,} users" if room else str(reason or sums)


def _unusable(error: CapplanError, place: Place) -> Result:
    match = re.fullmatch(r"(.+):(\d+):(\d+)", error.where)
    if match:
        place = Place(file=match.group(1), line=int(match.group(2)), column=int(match.group(3)))
    return Result(key="file", status=Status.UNUSABLE, place=place, got=error.message, hint=error.hint)


def asked_place(scenario: Scenario, error: CapplanError, otherwise: Place) -> Place:
    """The line of the key that an option in an error stands for: --users is workload.users."""
    for option in re.findall(r"--([a-z0-9-]+)", error.where):
        for spelling in SPELLINGS.values():
            known = KEYS[spelling.key].option or spelling.key.rpartition(".")[2].replace("_", "-")
            if known == option and spelling.name in scenario.marks:
                mark = scenario.marks[spelling.name]
                return Place(file=mark.file, line=mark.line, column=mark.column)
    return otherwise
