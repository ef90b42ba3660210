"""What a file of logged requests is, read from its content.

| form      | file                                                                 | its clock             |
|-----------|----------------------------------------------------------------------|-----------------------|
| Azure LLM | CSV: TIMESTAMP, ContextTokens, GeneratedTokens                       | dates, 7 digits of s  |
| BurstGPT  | CSV: Timestamp, Model, Request tokens, Response tokens, Total tokens | s                     |
| Mooncake  | JSONL: timestamp, input_length, output_length, hash_ids              | ms                    |
| vllm runs | JSONL: arrival_time, input_toks, output_toks                         | s of the epoch        |
| plain     | CSV or JSONL: one column each of ARRIVAL, PROMPT and OUTPUT          | as its column says    |

BurstGPT's rows with 0 response tokens are requests that failed. Mooncake's hash_ids name the prompt's blocks
of 512 tokens, the last one cut; an id stands for a block and all before it.
"""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from capplan.errors import InputError, shown

# A column's name (lower case, _ for space and -) → how many of its units are a second (None: seconds or
# dates, as the first row has it), and whether its 0 is the simulation's or the first row is at 0.
ARRIVAL: Final[dict[str, tuple[int | None, bool]]] = {
    "arrival_s": (1, True),
    "arrival_time_s": (1, True),
    "arrived_at": (1, True),
    "arrival_ms": (1000, True),
    "arrival_time_ms": (1000, True),
    "arrival_us": (1_000_000, True),
    "arrival": (None, False),
    "arrival_time": (None, False),
    "time": (None, False),
    "time_s": (1, False),
    "timestamp": (None, False),
    "timestamp_s": (1, False),
    "timestamp_ms": (1000, False),
}
PROMPT: Final = tuple(
    "prompt_tokens input_tokens isl input_length input_len input_toks prompt_len prompt_length "
    "request_tokens context_tokens contexttokens num_prefill_tokens num_prompt_tokens".split()
)
OUTPUT: Final = tuple(
    "output_tokens osl output_length output_len output_toks response_tokens generated_tokens "
    "generatedtokens completion_tokens num_decode_tokens num_output_tokens".split()
)
NAMED: Final[dict[str, frozenset[str]]] = {
    "Azure LLM": frozenset(("timestamp", "contexttokens", "generatedtokens")),
    "BurstGPT": frozenset(("timestamp", "model", "request_tokens", "response_tokens", "total_tokens")),
}
MOONCAKE: Final = frozenset(("timestamp", "input_length", "output_length"))
VLLM_RUN: Final = frozenset(("arrival_time", "input_toks", "output_toks"))
MAX_LINE: Final = 1 << 20
EPOCH_S: Final = 1e8
"""Three years: a clock that begins later counts from some epoch, not from a simulation's beginning."""
FORMS_HINT: Final = (
    "a CSV with arrival_s, prompt_tokens, output_tokens; or the CSV of Azure LLM or BurstGPT, "
    "or the JSONL of Mooncake or vllm runs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a trace file is: its columns by their own names, and its clock."""

    name: str
    arrival: str
    prompt: str
    output: str
    per_s: int | None
    """Units of time in a second; None: dates."""
    own_clock: bool
    """Whether its 0 is the simulation's; the first row's time is otherwise."""
    delimiter: str | None
    """None: JSON lines."""
    blocks: str | None = None
    zero_output_is_failure: bool = False


def form_of(path: Path) -> Form:
    """What the file is, from its first two lines; InputError where it is no trace known here."""
    if path.exists() and not path.is_file() and not path.is_dir():
        hint = "save it to a file: it is read more than once"
        raise InputError("the trace is no file", where=str(path), hint=hint)
    with opened(path) as stream:
        first = _line(stream)
        if first.startswith("{"):
            return _json_form(first, path)
        if len(first) > MAX_LINE:
            hint = f"a header and a row a line; {FORMS_HINT}"
            raise InputError("the trace has no lines", where=str(path), hint=hint)
        delimiter = max(",;\t", key=first.count)
        stream.seek(0)
        reader = csv.reader(stream, delimiter=delimiter, skipinitialspace=True)
        head = filled(reader)
        sample = dict(zip(head, filled(reader), strict=False))
        return _form({_plain(name): name for name in head}, sample, path, delimiter)


def _json_form(first: str, path: Path) -> Form:
    try:
        entry = json.loads(first)
    except (ValueError, RecursionError):
        hint = f"every line is one JSON object; {FORMS_HINT}"
        raise InputError("no JSON lines", where=f"{path}, line 1", hint=hint) from None
    if entry.keys() >= MOONCAKE:
        return Form(
            name="Mooncake",
            arrival="timestamp",
            prompt="input_length",
            output="output_length",
            per_s=1000,
            own_clock=False,
            delimiter=None,
            blocks="hash_ids" if "hash_ids" in entry else None,
        )
    return _form({_plain(name): name for name in entry}, entry, path, None)


def _form(named: dict[str, str], sample: dict[str, Any], path: Path, delimiter: str | None) -> Form:
    """The form by its columns: `named` maps plain names to the file's own; `sample` is the first row."""
    name = next((name for name, columns in NAMED.items() if named.keys() >= columns), "plain")
    if delimiter is None and named.keys() >= VLLM_RUN:
        name = "vllm runs"
    arrival = _one(named, ARRIVAL, "arrival", path)
    per_s, own_clock = ARRIVAL[_plain(arrival)]
    first = _number(sample.get(arrival))
    if per_s is None and first is not None:
        per_s = 1
    return Form(
        name=name,
        arrival=arrival,
        prompt=_one(named, PROMPT, "prompt", path),
        output=_one(named, OUTPUT, "output", path),
        per_s=per_s,
        own_clock=own_clock and (first or 0) / (per_s or 1) < EPOCH_S,
        delimiter=delimiter,
        zero_output_is_failure=name == "BurstGPT",
    )


def _one(named: dict[str, str], spellings: Iterable[str], what: str, path: Path) -> str:
    """The file's name of the one column among `spellings`."""
    found = [named[name] for name in spellings if name in named]
    if len(found) > 1:
        hint = f"leave one of them; {FORMS_HINT}"
        raise InputError(f"more than one {what} column: {', '.join(found)}", where=str(path), hint=hint)
    if not found:
        has = shown(", ".join(named.values()) or "nothing")
        hint = f"{FORMS_HINT}; {what} columns known: {', '.join(spellings)}"
        raise InputError(f"no trace known here: no {what} column in {has}", where=str(path), hint=hint)
    return found[0]


def _line(stream: TextIO) -> str:
    """The next line that is not blank, empty at the end; cut after MAX_LINE + 1 characters."""
    while (line := stream.readline(MAX_LINE + 1)) and not line.strip():
        pass
    return line.strip()


def filled(reader: Iterator[list[str]]) -> list[str]:
    """The cells of the next row that has any; none at the end."""
    return next((cells for cells in reader if any(map(str.strip, cells))), [])


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _number(value: Any) -> float | None:
    """A finite number, None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file as text; what goes wrong with it as a whole becomes InputError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield stream
    except OSError as error:
        reason = f"the trace cannot be read: {error.strerror or error}"
        raise InputError(reason, where=str(path), hint="check the path") from None
    except UnicodeDecodeError:
        hint = f"unpack it if it is compressed; {FORMS_HINT}"
        raise InputError("the trace is no text in UTF-8", where=str(path), hint=hint) from None
    except csv.Error as error:
        raise InputError(f"the trace is no CSV: {error}", where=str(path), hint=FORMS_HINT) from None
