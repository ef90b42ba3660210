"""What a profile says of its device: enough to plan for it, nothing that names the machine or its user."""

import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from capplan import catalog
from capplan.calibrate.clock import quantile
from capplan.errors import InputError
from capplan.local_calibration import SAME_SIZE

CPUINFO: Final = Path("/proc/cpuinfo")
CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
ASSUMED_CACHE_BYTES: Final = 32 << 20
"""A last-level cache where the system tells none, as large as most."""
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def cpu_threads() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """The processor as its maker calls it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    name = found.group(1) if found else platform.processor() or platform.machine()
    return " ".join(name.replace("(R)", "").replace("(TM)", "").split()) or "unknown CPU"


def last_level_cache_bytes(caches: Path = CACHES) -> int | None:
    """Of the caches that the first CPU has, the largest; None where the system tells none."""
    sizes = []
    for path in caches.glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in _UNITS:
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes, default=None)


def memory_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """Memory that a process here can have: the machine's, or its container's limit."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in limits:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and 0 < int(text) < whole:
            return int(text)
    return whole


def slug(name: str) -> str:
    """A name as a part of an id."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_hardware(threads: int, rates: Mapping[str, float]) -> dict[str, Any]:
    """The hardware block of a CPU's profile; `rates` are `ceilings` of this very run."""
    import torch

    name = cpu_name()
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    flop = {"bf16": rates["bf16_flop_per_s"], "fp32": rates["fp32_flop_per_s"]}
    if "int8_flop_per_s" in rates:
        flop["int8"] = rates["int8_flop_per_s"]
    words = name.lower().split()
    vendor = next((one for one in ("AMD", "Intel", "Apple", "Ampere") if one.lower() in words), "CPU")
    return {
        "key": f"cpu-{slug(name)}-{slug(instructions)}-{threads}t",
        "kind": "cpu",
        "name": f"{name} ({threads} thread{'s' if threads > 1 else ''})",
        "vendor": vendor,
        "architecture": "CPU",
        "instructions": instructions,
        "memory_bytes": memory_bytes(),
        "bandwidth_bytes_per_s": rates["read_bytes_per_s"],
        "flop_per_s": flop,
        "cache_bytes": last_level_cache_bytes() or ASSUMED_CACHE_BYTES,
        "units": threads,
    }


def refuse_slice(name: str, index: int) -> None:
    """Raises InputError for a slice of a GPU (MIG), whose times are no whole GPU's."""
    if "MIG" in name.split():
        raise InputError(
            f"{name} is a slice of a GPU",
            where=f"--device cuda:{index}",
            hint="profile a whole GPU: a slice shares its memory's bandwidth with the others",
        )


def _catalog_id(name: str, memory_bytes: int) -> str | None:
    """The catalog's GPU of that name and size: one name may be sold with two sizes of memory."""
    found = catalog.index("gpus").get(catalog.normalised(name))
    if found is None or abs(memory_bytes / catalog.load_gpu(found).usable_bytes - 1) > SAME_SIZE:
        return None
    return found


def gpu_cache_bytes(properties: Any) -> int | None:
    """The last-level cache by torch's properties of a GPU; None where they tell none."""
    return int(getattr(properties, "L2_cache_size", 0)) or None


def gpu_hardware(index: int, rates: Mapping[str, float]) -> dict[str, Any]:
    """The hardware block of a GPU's profile: the catalog's id where it has one."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    identity = _catalog_id(properties.name, int(properties.total_memory))
    capability = f"{properties.major}.{properties.minor}"
    flop = {name[: -len("_flop_per_s")]: rate for name, rate in rates.items() if name.endswith("_flop_per_s")}
    return {
        "key": identity or slug(properties.name),
        "kind": "gpu",
        "name": properties.name,
        "vendor": "AMD" if torch.version.hip else "NVIDIA",
        "architecture": f"sm {capability}",
        "instructions": capability,
        "memory_bytes": int(properties.total_memory),
        "bandwidth_bytes_per_s": rates["read_bytes_per_s"],
        "flop_per_s": flop,
        "cache_bytes": gpu_cache_bytes(properties) or ASSUMED_CACHE_BYTES,
        "units": int(properties.multi_processor_count),
    }


def arithmetic(device: Any) -> frozenset[str]:
    """What the device multiplies itself, beside 16 and 32 bits: int8, fp8."""
    import torch

    if device.type == "cpu":
        return frozenset({"int8"} if torch.cpu._is_vnni_supported() else ())
    capability = torch.cuda.get_device_capability(device)
    return frozenset({"int8", "fp8"} if capability >= (8, 9) else {"int8"})


def _squared(a: Any, number: int) -> object:
    return a @ a


def ceilings(
    device: Any, timed: Callable[[Callable[[int], object], float], Sequence[float]], cache_bytes: int
) -> dict[str, float]:
    """Bytes and FLOP per second that nothing else here can exceed, of this run; medians.

    `timed` runs a call for some seconds and gives its samples. Reads: the best of a sum, a product with one
    row and a copy (its reads and writes) over buffers of several times the last-level cache.
    """
    import torch

    on_cpu = device.type == "cpu"
    rows = max(1 << 13, 3 * cache_bytes // (2 * 4096)) if on_cpu else 1 << 16
    buffers = [torch.ones(rows, 4096, dtype=torch.bfloat16, device=device) for _ in range(2)]
    one = torch.ones(4096, dtype=torch.float32, device=device)
    wide = buffers[0].view(torch.float32)
    target = torch.empty_like(wide)
    size = wide.numel() * 4

    def rate(work: float, call: Callable[[int], object]) -> float:
        return work / quantile(timed(call, 0.3), 0.5)

    found = {
        "read_bytes_per_s": max(
            rate(size, lambda i: buffers[i % 2].view(torch.float32).sum()),
            rate(size, lambda i: buffers[i % 2].view(torch.float32) @ one[:2048]),
            rate(2 * size, lambda i: target.copy_(buffers[i % 2].view(torch.float32))),
        ),
        "copy_bytes_per_s": rate(2 * size, lambda i: target.copy_(buffers[i % 2].view(torch.float32))),
    }
    edge = 512 if on_cpu else 8192
    flop = 2.0 * edge**3
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a = torch.randn(edge, edge, device=device).to(dtype)
        found[f"{name}_flop_per_s"] = rate(flop, partial(_squared, a))
    if on_cpu:
        # Products of bf16 may run faster widened: what the device can do is the better of the two.
        found["bf16_flop_per_s"] = max(found["bf16_flop_per_s"], found["fp32_flop_per_s"])
    own = arithmetic(device)
    if "int8" in own:
        codes = torch.randint(-127, 127, (edge, edge), dtype=torch.int8, device=device)
        found["int8_flop_per_s"] = rate(flop, lambda i: torch._int_mm(codes, codes.T))
    if "fp8" in own:
        narrow = torch.randn(edge, edge, device=device).to(torch.float8_e4m3fn)
        scale = torch.ones((), device=device)
        found["fp8_flop_per_s"] = rate(
            flop,
            lambda i: torch._scaled_mm(
                narrow, narrow.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
            ),
        )
    return found
