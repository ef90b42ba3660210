"""Where answers go: stdout carries the answer, in the format asked; stderr everything else."""

import json
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


class OutputFormat(str, Enum):
    """Formats of -o/--output."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    MD = "md"


def write(text: str) -> None:
    """Text to stdout as UTF-8, whatever the locale."""
    sys.stdout.flush()
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(text)
    else:
        stream.write(text.encode())
        stream.flush()


def write_json(data: dict[str, Any]) -> None:
    """JSON to stdout; a NaN or infinity is a bug and raises ValueError."""
    write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def console_width() -> int:
    """Columns of the terminal; 80 where there is none."""
    import shutil

    return max(40, shutil.get_terminal_size((80, 24)).columns)


def render(parts: list["RenderableType"]) -> None:
    """Rich renderables to stdout; colour only on a terminal without NO_COLOR."""
    import io

    from rich.console import Console

    terminal = sys.stdout.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=console_width(),
        force_terminal=terminal,
        color_system="auto" if terminal else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    write("\n".join(lines) + "\n")
