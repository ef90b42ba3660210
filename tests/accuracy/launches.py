"""How measured runs were launched: limits and client from the scripts that their publishers keep.

launches.yaml lists them; a run that none matches is launched with its engine's defaults.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from tests.accuracy.serving import Row

FILE: Final = Path(__file__).with_name("launches.yaml")
MATCHED: Final = ("origin", "engine", "model", "weights", "gpu", "tp")
CONDITIONS: Final = ("versions", "before", "since", "least_concurrency")
SAID: Final = ("client", "max_num_seqs", "max_num_batched_tokens", "poll_steps", "mixed_chunk")
LIMIT: Final = ("more", "multiple", "least")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What is known of a run's launch; None: the engine's default. `client`: whose client sent requests."""

    client: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    poll_steps: int = 1
    mixed_chunk: bool = False


def launch_of(row: Row) -> Launch:
    """The run's launch by the first entry that matches it."""
    origin = row.run.notes.origin
    for entry in _entries():
        if _matches(entry, row):
            return Launch(
                client=entry.get("client", origin),
                max_num_seqs=_sequences(entry.get("max_num_seqs"), row),
                max_num_batched_tokens=_tokens(entry.get("max_num_batched_tokens"), row),
                poll_steps=entry.get("poll_steps", 1),
                mixed_chunk=entry.get("mixed_chunk", False),
            )
    return Launch(client=origin)


@cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    entries = tuple(catalog.read_yaml(FILE)["launches"])
    for entry in entries:
        unknown = entry.keys() - {*MATCHED, *CONDITIONS, *SAID}
        assert not unknown, f"{FILE.name}: {unknown}"
    return entries


def _matches(entry: Mapping[str, Any], row: Row) -> bool:
    run = row.run
    found = {
        "origin": run.notes.origin,
        "engine": run.engine,
        "model": run.model,
        "weights": run.weight_dtype,
        "gpu": row.subject.gpu.id,
        "tp": run.tp,
    }
    if any(entry[name] != found[name] for name in MATCHED if name in entry):
        return False
    if "versions" in entry and run.engine_version not in [str(version) for version in entry["versions"]]:
        return False
    if run.concurrency is None or run.concurrency < entry.get("least_concurrency", 0):
        return False
    day = _day(row)
    return not ("before" in entry and (day is None or day >= str(entry["before"]))) and not (
        "since" in entry and (day is None or day < str(entry["since"]))
    )


def _day(row: Row) -> str | None:
    found = re.search(r"\bmeasured=(\d{4}-\d{2}-\d{2})", row.run.notes.text)
    return None if found is None else found[1]


def _sequences(said: int | str | None, row: Row) -> int | None:
    if said != "concurrency":
        return None if said is None else int(said)
    assert row.run.concurrency is not None
    return round(row.run.concurrency)


def _tokens(said: int | Mapping[str, int] | None, row: Row) -> int | None:
    """max(least, isl + concurrency + more, rounded up)."""
    if said is None or isinstance(said, int):
        return said
    assert not said.keys() - set(LIMIT)
    assert row.run.isl is not None
    assert row.run.concurrency is not None
    multiple = said.get("multiple", 1)
    tokens = round(row.run.isl + row.run.concurrency) + said["more"]
    return max(said.get("least", 0), -(-tokens // multiple) * multiple)
