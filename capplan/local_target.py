"""`--gpu local`: the GPUs of this machine as memories to fit into, with what others hold of them."""

from collections.abc import Mapping
from typing import Any, Final

from capplan import catalog
from capplan.capacity import Target
from capplan.device import LocalDevice, local_devices
from capplan.errors import InputError
from capplan.units import format_gib

LOCAL: Final = "local"
_SAME_SIZE: Final = 0.1
"""Drivers, ECC and the system's own share move a GPU's size by less than this part."""


def local_targets(visible: str | None = None) -> tuple[Target, ...]:
    """One target a kind of GPU here: of equal ones that with the least free memory, which binds.

    `visible` is the text of CUDA_VISIBLE_DEVICES. A plain need is put against what is free now; an engine's
    fraction is of the whole.
    Errors: ExtraMissingError without nvidia-ml-py; InputError without a driver, a GPU, or a readable size.
    """
    devices = local_devices(visible=visible)
    kinds: dict[tuple[str, int | None], list[LocalDevice]] = {}
    for device in devices:
        kinds.setdefault((device.name, device.capacity_bytes), []).append(device)
    return tuple(_target(min(alike, key=_free), len(alike)) for alike in kinds.values())


def _free(device: LocalDevice) -> int:
    """Unknown sorts last: a known smaller figure binds."""
    return 1 << 62 if device.free_bytes is None else device.free_bytes


def _target(device: LocalDevice, count: int) -> Target:
    capacity = device.capacity_bytes
    if capacity is None:
        raise InputError(
            f"the memory of {device.name} cannot be read here",
            where="--gpu local",
            hint="give its size: --gpu-memory 64GiB",
        )
    free = None if device.free_bytes is None else min(device.free_bytes, capacity)
    gpu_id = _catalog_id(device)
    return Target(
        name=f"local: {device.name}",
        gpu_id=gpu_id,
        usable_bytes=capacity if free is None else free,
        reading="what CUDA sees here" if free is None else "free here now",
        note=_note(device, count, free),
        whole_bytes=device.total_bytes or capacity,
        free_bytes=free,
        device=_dict(device, count),
    )


def _catalog_id(device: LocalDevice) -> str | None:
    """The catalog's entry of that name and size: slices, shares and other sizes of a name have none."""
    gpu_id = catalog.index("gpus").get(catalog.normalised(device.name))
    if gpu_id is None or device.mig_profile is not None:
        return None
    size = device.total_bytes or device.cuda_total_bytes
    usual = catalog.load_gpu(gpu_id).usable_bytes
    return gpu_id if size is not None and abs(size / usual - 1) <= _SAME_SIZE else None


def _note(device: LocalDevice, count: int, free: int | None) -> str:
    parts = [f"{device.name}" + (f", the fullest of {count}" if count > 1 else "")]
    if device.total_bytes is not None:
        parts.append(f"{format_gib(device.total_bytes)} by the driver")
    if device.cuda_total_bytes is not None:
        parts.append(f"{format_gib(device.cuda_total_bytes)} as CUDA sees it")
    parts.append("how much is free is not known" if free is None else f"{format_gib(free)} free now")
    if device.processes_bytes:
        parts.append(f"{device.processes} other processes hold {format_gib(device.processes_bytes)}")
    elif device.processes:
        parts.append(f"{device.processes} other processes hold an unknown part")
    return "; ".join((", ".join(parts), *device.notes))


def _dict(device: LocalDevice, count: int) -> Mapping[str, Any]:
    """JSON of a local GPU; no id of it is given out."""
    return {
        "name": device.name,
        "count": count,
        "memory": device.memory,
        "total_bytes": device.total_bytes,
        "reserved_bytes": device.reserved_bytes,
        "cuda_total_bytes": device.cuda_total_bytes,
        "free_bytes": device.free_bytes,
        "processes": device.processes,
        "processes_bytes": device.processes_bytes,
        "mig_profile": device.mig_profile,
    }
