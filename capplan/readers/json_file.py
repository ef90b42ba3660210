"""A JSON mapping from a file: bounded, each key once, every failure an InputError."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.checkpoint import opened

MAX_JSON_BYTES: Final = 8 << 20
"""Larger than any published config.json or adapter_config.json by a factor of ten."""


def read_json(file: Path) -> Mapping[str, object]:
    """The JSON object in `file`; InputError for anything else, with line and column."""
    with opened(file) as (stream, size):
        if size > MAX_JSON_BYTES:
            raise InputError(
                f"{size:,} bytes is too large for a config",
                where=str(file),
                hint=f"at most {MAX_JSON_BYTES:,} bytes; is this the right file?",
            )
        raw = stream.read(size)
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise InputError("not UTF-8 text", where=str(file), hint="is this a config.json?") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"broken JSON: {error.msg}",
            where=f"{file}:{error.lineno}:{error.colno}",
            hint="mend the file, or fetch it again",
        ) from None
    except _DuplicateKeyError as error:
        raise InputError(
            f"key {shown(error.args[0])} appears twice", where=str(file), hint="keep one"
        ) from None
    except (RecursionError, ValueError) as error:
        # Nesting, or an integer of thousands of digits.
        raise InputError(
            f"cannot be parsed: {shown(str(error))}", where=str(file), hint="is this a config.json?"
        ) from None
    if not isinstance(data, dict):
        raise InputError(
            f"a {type(data).__name__}, not a mapping",
            where=str(file),
            hint="is this a config.json?",
        )
    return data


class _DuplicateKeyError(Exception):
    """A JSON object with the same key twice: which one counts would be a guess."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise _DuplicateKeyError(key)
        made[key] = value
    return made
