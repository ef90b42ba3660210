"""What stands around a message: colours, JSON, progress bars, and the prefixes that name a process."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from capplan.engines.log_record import Line

_PIECES = 64
_COLOUR = re.compile(r"\x1b\[[0-9;?]{0,24}[A-Za-z]")
_JSON_KEYS = ("log", "message", "msg", "event", "text", "textPayload", "MESSAGE", "line")


def messages(text: str) -> Iterator[str]:
    """The messages of a physical line: without colours, split where a progress bar overwrote it."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    stripped = text.lstrip()
    if (stripped.startswith("{") and "\\" in stripped) or stripped.startswith('{"'):
        text = _unwrapped(stripped) or text
    pieces = re.split(r"[\r\n]+", text, maxsplit=_PIECES) if "\r" in text or "\n" in text else [text]
    yield from (piece for piece in pieces if piece)


def _unwrapped(text: str) -> str | None:
    """The message inside one JSON object, None where there is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("fields"), dict):
        record = {**record["fields"], **record}
    if not isinstance(record, dict):
        return None
    return next((record[key] for key in _JSON_KEYS if isinstance(record.get(key), str)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """Who printed a line, as its prefix says."""

    rank: str | None = None
    role: str | None = None
    pid: str | None = None


_VLLM_PROCESS = re.compile(
    r"\((?P<role>[A-Za-z]{3,30})(?P<index>(?:[_ ]?(?:DP|PP|TP|DCP|PCP|CP|EP|rank=)?\d{1,5}){0,6})"
    r" pid=(?P<pid>\d{1,10})",
    re.ASCII,
)
_SGLANG_PROCESS = re.compile(
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\s]{0,8}(?P<ranks>(?: [A-Z_]{2,12}\d{1,5}){1,8})\]", re.ASCII
)
_TRTLLM_PROCESS = re.compile(r"\[RANK (\d{1,5})\]|\bRank (\d{1,5}) uses", re.ASCII)
_TGI_PROCESS = re.compile(r" rank=(\d{1,5})\s{0,8}$", re.ASCII)
_AXIS = re.compile(r"(DP|PP|TP|DCP|PCP|CP|EP|rank=)?(\d{1,5})", re.ASCII)
_PREFIX_CHARS = 240


def _process(text: str) -> _Process:
    head = text[:_PREFIX_CHARS]
    if "pid=" in head and (match := _VLLM_PROCESS.search(head)) is not None:
        axes = _AXIS.findall(match["index"])
        named = " ".join(f"{axis}{index}" for axis, index in axes if axis not in ("EP", "rank=", ""))
        plain = next((index for axis, index in axes if axis in ("rank=", "")), None)
        rank = named or None
        if rank is None and plain is not None:
            rank = f"DP{plain}" if match["role"] == "EngineCore" else f"rank {plain}"
        if rank is None and match["role"] in ("VllmWorkerProcess", "RayWorkerWrapper", "RayWorkerVllm"):
            rank = f"pid {match['pid']}"
        return _Process(rank=rank, role=match["role"] + match["index"], pid=match["pid"])
    if "[" in head:
        if (match := _SGLANG_PROCESS.search(head)) is not None:
            return _Process(rank=match["ranks"].strip())
        if (match := _TRTLLM_PROCESS.search(head)) is not None:
            return _Process(rank=f"rank {match[1] or match[2]}")
    if (match := _TGI_PROCESS.search(text, max(0, len(text) - 40))) is not None:
        return _Process(rank=f"rank {match[1]}")
    return _Process()


def line_of(number: int, text: str, following: bytes) -> Line:
    process = _process(text)
    return Line(
        number=number,
        text=text,
        rank=process.rank,
        role=process.role,
        pid=process.pid,
        following=following.decode("utf-8", errors="replace"),
    )
