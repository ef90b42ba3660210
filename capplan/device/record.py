"""A local GPU, and the memory of those that share it with the CPU or with the kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from capplan.units import KIB

MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """One GPU, or one MIG slice of it.

    `memory` is "dedicated", "shared" (the system's own memory: GB10, Jetson, laptops' integrated parts)
    or "coherent" (its own, but the kernel may keep page cache in it: GH200). `total_bytes` is the
    driver's figure (nvidia-smi's), `reserved_bytes` what the driver keeps of it, `cuda_total_bytes` what
    CUDA sees. `free_bytes` counts page cache as free where the memory is shared or coherent.
    `processes_bytes` is held by running processes. `index` is NVML's (by PCI bus).
    """

    name: str
    index: int | None
    uuid: str | None
    memory: Literal["dedicated", "shared", "coherent"]
    total_bytes: int | None
    reserved_bytes: int | None
    cuda_total_bytes: int | None
    used_bytes: int | None
    free_bytes: int | None
    processes: int | None
    processes_bytes: int | None
    mig_profile: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def capacity_bytes(self) -> int | None:
        """What an engine takes its fraction of: CUDA's total, else the driver's less its reserve."""
        if self.cuda_total_bytes is not None:
            return self.cuda_total_bytes
        if self.total_bytes is None:
            return None
        return self.total_bytes - (self.reserved_bytes or 0)


def system_memory(path: Path) -> Mapping[str, int]:
    """MemTotal and MemAvailable in bytes. MemFree is no measure of what can be had: it excludes cache."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if name in ("MemTotal", "MemAvailable") and number and number[0].isdigit():
            found[name] = int(number[0]) * KIB
    return found


_SHARED = "memory is shared with the CPU; page cache counts as available"


def shared(device: LocalDevice, system: Mapping[str, int]) -> LocalDevice:
    """A GPU on the system's memory: a framebuffer size, where one is reported, is a carve-out."""
    total = system.get("MemTotal") or device.cuda_total_bytes
    free = system.get("MemAvailable")
    return replace(
        device,
        memory="shared",
        total_bytes=total,
        reserved_bytes=None,
        used_bytes=None if total is None or free is None else max(0, total - free),
        free_bytes=free,
        notes=(_SHARED,) if total is not None else (_SHARED, "its size cannot be read here"),
    )


def coherent(device: LocalDevice, system: Mapping[str, int]) -> LocalDevice:
    """A GPU whose own memory also serves the kernel: what is not a process's can be had back."""
    room, held, available = device.capacity_bytes, device.processes_bytes, system.get("MemAvailable")
    if room is None or held is None or available is None or device.free_bytes is None:
        return replace(device, memory="coherent")
    free = max(device.free_bytes, min(room - held, available))
    note = "the kernel may hold page cache in this memory; it counts as free here, engines may refuse it"
    return replace(device, memory="coherent", free_bytes=free, notes=(*device.notes, note))
