"""PyTorch's out-of-memory messages, common to the engines built on it, and the CUDA runtime's own.

Wordings: PyTorch 1.13-2.0 ("(GPU 0; 23.69 GiB total capacity; ...)"), 2.1 on ("GPU 0 has a total
capacity of ..."; 2.1 itself wrote "capacty"), CUDA, ROCm and XPU builds.
Source: public issue threads of vLLM, SGLang and TGI, read 2026-11.
"""

import re

from capplan.engines.log_record import Line, Notes
from capplan.engines.log_wording import size, values_of, wording

_PARTS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"Tried to allocate{size('oom_tried_bytes')}",
        r"GPU (?P<oom_device>\d{1,4})\b",
        rf"total capaci?ty of{size('oom_total_bytes')}",
        rf"of which{size('oom_free_bytes')} is free",
        rf"this process has{size('oom_process_bytes')} memory in use",
        rf"Process \d{{1,10}} has{size('oom_other_process_bytes')} memory in use",
        rf"Of the allocated memory{size('oom_torch_bytes')} is allocated by PyTorch",
        rf"with{size('oom_graph_pool_bytes')} allocated in private pools",
        rf"and{size('oom_unallocated_bytes')} is reserved by PyTorch but unallocated",
        rf";{size('oom_total_bytes')} total capacity",
        rf";{size('oom_torch_bytes')} already allocated",
        rf";{size('oom_free_bytes')} free",
    )
)
_MESSAGE_CHARS = 1200


def _out_of_memory(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """One failed allocation with what the message says of the device; later repeats add nothing."""
    message = line.text[match.start() : match.start() + _MESSAGE_CHARS]
    numbers = {}
    for part in _PARTS:
        found = part.search(message)
        if found is not None:
            numbers.update(dict(values_of(found)))
    fail(notes, line, numbers)


def fail(notes: Notes, line: Line, numbers: dict[str, int | float | str | bool]) -> None:
    """Note an allocation that failed: a refusal before the server was up, else a warning."""
    first = not notes.oom
    notes.oom = notes.loaded = True
    if first:
        for name, value in numbers.items():
            notes.put(line, name, value)
    if notes.started_line is None:
        notes.refuse(line, "out_of_memory", numbers)
    elif first:
        notes.warn(f"line {line.number}: ran out of memory while serving, after it had started")


WORDINGS = (
    wording("CUDA out of memory. ", r"(?=Tried)", then=_out_of_memory),
    wording("HIP out of memory. ", r"(?=Tried)", then=_out_of_memory),
    wording("XPU out of memory. ", r"(?=Tried)", then=_out_of_memory),
    wording("CUDA error: out of memory", then=_out_of_memory),
    wording("HIP error: out of memory", then=_out_of_memory),
    wording("CUDA driver error: out of memory", then=_out_of_memory),
    wording("CUDA runtime error in ", r".{0,300}?: out of memory", then=_out_of_memory),
    wording("GPU 0: ", r"(?P<gpu_name>(?:NVIDIA|AMD|Tesla) [\w \-]{2,60})", weak=True, engine_wide=True),
    wording(
        "GPU 0-", r"\d{1,3}: (?P<gpu_name>(?:NVIDIA|AMD|Tesla) [\w \-]{2,60})", weak=True, engine_wide=True
    ),
    wording(
        "device_name=",
        r"(?P<gpu_name>[A-Za-z0-9][\w\-]{2,60}?)(?:,|\.json)",
        weak=True,
        engine_wide=True,
    ),
    wording("Checkpoint size: ", size("checkpoint_bytes"), weak=True, engine_wide=True),
)
