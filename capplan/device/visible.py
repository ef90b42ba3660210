"""Which devices a value of CUDA_VISIBLE_DEVICES leaves, as CUDA reads it.

    indices, GPU- ids and MIG- ids, or the starts of ids, by commas; the first that is unknown ends the list

MIG ids are MIG-<id>, or MIG-GPU-<id>/<GPU instance>/<compute instance> with drivers before 470. An empty
value, -1 and words leave nothing.
Source: CUDA programming guide, environment variables; MIG user guide. Read 2026-11.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from capplan.device.cuda import CudaDevice
from capplan.device.record import LocalDevice

_LONGEST_INDEX = 6
_BY_BUS = (
    "taken by PCI bus: CUDA numbers unlike GPUs by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; an id is surer"
)


def bare(uuid: str) -> str:
    """An id without its GPU- or MIG- prefix, as CUDA has it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def selected(
    devices: tuple[LocalDevice, ...], visible: str, cuda: Mapping[str, CudaDevice]
) -> tuple[LocalDevice, ...]:
    """The devices `visible` names, in its order, each once.

    `cuda` is what CUDA sees under the same variable: where it sees as many, its answer is taken, since it
    may number them otherwise than the driver does.
    """
    entries = [part.strip() for part in visible.split(",")]
    chosen: list[LocalDevice] = []
    for entry in entries:
        named = _named(devices, entry)
        if named is None:
            break
        if named not in chosen:
            chosen.append(named)
    if not any(_is_index(entry) for entry in entries):
        return tuple(chosen)
    seen = _as_cuda(devices, cuda)
    if len(seen) == len(chosen):
        return seen
    if len({device.name for device in devices}) > 1:
        return tuple(replace(device, notes=(*device.notes, _BY_BUS)) for device in chosen)
    return tuple(chosen)


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdigit() and len(entry) <= _LONGEST_INDEX


def _named(devices: Iterable[LocalDevice], entry: str) -> LocalDevice | None:
    """The device an entry means; None where it means none, or several."""
    if _is_index(entry):
        # An index of a GPU in MIG mode means its first slice.
        return next((device for device in devices if device.index == int(entry)), None)
    if not entry.upper().startswith(("GPU-", "MIG-")):
        return None
    named = [device for device in devices if device.uuid and device.uuid.lower().startswith(entry.lower())]
    return named[0] if len(named) == 1 else None


def _as_cuda(devices: tuple[LocalDevice, ...], cuda: Mapping[str, CudaDevice]) -> tuple[LocalDevice, ...]:
    by_id = {bare(device.uuid): device for device in devices if device.uuid}
    ordered = sorted(cuda, key=lambda uuid: cuda[uuid].index)
    return tuple(by_id[uuid] for uuid in ordered if uuid in by_id)
