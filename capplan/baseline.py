"""The baseline file: figures of an earlier check that `within: 5% of baseline` and `diff` compare with."""

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan.check import CheckReport, Status
from capplan.errors import InputError

SCHEMA: Final = "capplan.baseline/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A baseline file; scenarios go by their path relative to it, so that any folder may be worked from."""

    path: str

    def identity(self, file: str) -> str:
        """The name of a scenario in the file."""
        return os.path.relpath(file, os.path.dirname(self.path) or ".").replace(os.sep, "/")

    def entries(self) -> dict[str, Any]:
        """Scenario → its entry; InputError for another kind of file."""
        hint = "capplan check PATHS --baseline FILE --update-baseline writes one"
        try:
            data = json.loads(Path(self.path).read_bytes())
            if data["schema"] != SCHEMA:
                raise ValueError
            return {str(name): dict(entry) for name, entry in data["scenarios"].items()}
        except OSError as error:
            raise InputError(f"no baseline: {error.strerror}", where=self.path, hint=hint) from None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError("not a baseline file", where=self.path, hint=hint) from None

    def read(self) -> dict[str, Mapping[str, Any]]:
        """Scenario → figure of each expectation."""
        return {name: entry.get("figures", {}) for name, entry in self.entries().items()}

    def update(self, report: CheckReport) -> None:
        """Write the figures of a check; those of other scenarios stay while their file is there.

        Errors: InputError where a scenario cannot be used.
        """
        broken = [scenario for scenario in report.scenarios if scenario.status is Status.UNUSABLE]
        if broken or report.stopped:
            raise InputError(
                f"not written: {broken[0].results[0].got if broken else 'stopped early'}",
                where=str(broken[0].results[0].place) if broken else "--fail-fast",
                hint="mend the file first" if broken else "leave --fail-fast out",
            )
        old = self.entries() if os.path.exists(self.path) else {}
        folder = os.path.dirname(self.path)
        kept = {
            name: entry
            for name, entry in old.items()
            if os.path.exists(os.path.join(folder, name.partition("[")[0]))
        }
        checked = {self.identity(scenario.file) for scenario in report.scenarios}
        kept = {name: entry for name, entry in kept.items() if name.partition("[")[0] not in checked}
        for scenario in report.scenarios:
            kept[self.identity(scenario.file) + scenario.variant] = {
                "figures": scenario.figures,
                **(scenario.snapshot.to_dict() if scenario.snapshot else {}),
            }
        data = {"schema": SCHEMA, "scenarios": dict(sorted(kept.items()))}
        write_file(self.path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def asked(path: str | None, *, update: bool) -> Baseline | None:
    """The baseline asked for; InputError for an update of none."""
    if path is None and update:
        raise InputError("no file to update", where="--update-baseline", hint="add --baseline FILE")
    return None if path is None else Baseline(path=path)


def write_file(path: str, text: str) -> None:
    """Text to a file, whole or not at all; InputError where it cannot be written."""
    folder = os.path.dirname(path) or "."
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".capplan-")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=path, hint="check the path") from None
