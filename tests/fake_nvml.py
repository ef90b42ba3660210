"""A stand-in for the pynvml module: devices, slices and the errors it raises; and a machine of them."""

# ruff: noqa: N802, N818  (the fake has pynvml's names)

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capplan.device import local
from capplan.device.cuda import CudaDevice
from capplan.units import GIB, MIB

ALL_ONES = (1 << 64) - 1


class NVMLError(Exception):
    """The base of NVML's errors, as pynvml has it."""


class LibraryMismatch(Exception):
    """NVMLLibraryMismatchError: the binding's own, of no kind with NVML's."""


class NotSupported(NVMLError):
    """NVML_ERROR_NOT_SUPPORTED."""


class NotFound(NVMLError):
    """NVML_ERROR_NOT_FOUND."""


class GpuIsLost(NVMLError):
    """NVML_ERROR_GPU_IS_LOST."""


class NoPermission(NVMLError):
    """NVML_ERROR_NO_PERMISSION."""


class LibraryNotFound(NVMLError):
    """NVML_ERROR_LIBRARY_NOT_FOUND."""


class DriverNotLoaded(NVMLError):
    """NVML_ERROR_DRIVER_NOT_LOADED."""


class LibRmVersionMismatch(NVMLError):
    """NVML_ERROR_LIB_RM_VERSION_MISMATCH."""


Answer = Any  # a value, or an error to raise


def device(
    *,
    name: Answer = "NVIDIA H100 80GB HBM3",
    uuid: Answer = "GPU-aaaaaaaa-0000-0000-0000-000000000001",
    total: int = 80 * GIB,
    used: int = 0,
    free: int | None = None,
    reserved: int | None = 500 * MIB,
    memory: Answer = None,
    compute: Answer = (),
    graphics: Answer = (),
    slices: Answer = None,
    profile: Answer = None,
    bus: Answer = None,
    instance: int | None = None,
) -> SimpleNamespace:
    """A device of the fake: `slices` puts it in MIG mode; `reserved` None is a driver without version 2.

    `instance` is the GPU instance that a slice belongs to, `bus` the PCI address.
    """
    return SimpleNamespace(
        name=name,
        uuid=uuid,
        total=total,
        used=used,
        free=total - used - (reserved or 0) if free is None else free,
        reserved=reserved,
        memory=memory,
        compute=compute,
        graphics=graphics,
        slices=slices,
        profile=profile or NotSupported("attributes"),
        bus=bus or NotSupported("PCI info"),
        instance=NotSupported("instance") if instance is None else instance,
    )


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def given(answer: Answer) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


class FakeNvml:
    """A stand-in for the pynvml module."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = LibraryMismatch
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x2000028  # noqa: N815

    def __init__(self, *devices: Answer, init: Exception | None = None) -> None:
        self.devices = devices
        self.init = init
        self.count: Exception | None = None
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        given(self.count)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return given(self.devices[index])

    def nvmlDeviceGetName(self, handle: Any) -> Any:
        return given(handle.name)

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return given(handle.uuid)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        if handle.memory is not None:
            return given(handle.memory)
        if version is None:
            # Version 1 counts the driver's reserve as used.
            return SimpleNamespace(
                total=handle.total, free=handle.free, used=handle.used + (handle.reserved or 0)
            )
        if handle.reserved is None:
            raise NotSupported("version 2")
        return SimpleNamespace(
            total=handle.total, free=handle.free, used=handle.used, reserved=handle.reserved
        )

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return given(handle.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> Any:
        return given(handle.graphics)

    def nvmlDeviceGetMigMode(self, handle: Any) -> Any:
        return [0, 0] if handle.slices is None else [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index >= len(handle.slices):
            raise NotFound("no slice here")
        return handle.slices[index]

    def nvmlDeviceGetAttributes(self, handle: Any) -> Any:
        return given(handle.profile)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=given(handle.bus))

    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> Any:
        return given(handle.instance)


Machine = Callable[..., FakeNvml]


def machine_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Machine:
    """Sets up a machine: its devices, what CUDA says of them, and its /proc/meminfo in kB."""

    def set_up(
        *devices: Answer,
        cuda: Mapping[str, CudaDevice] | None = None,
        meminfo: Mapping[str, int] | None = None,
        init: Exception | None = None,
    ) -> FakeNvml:
        nvml = FakeNvml(*devices, init=init)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(local, "cuda_devices", lambda: cuda or {})
        path = folder / "meminfo"
        path.unlink(missing_ok=True)
        if meminfo is not None:
            path.write_text("".join(f"{name}: {kilo:>12} kB\n" for name, kilo in meminfo.items()))
        monkeypatch.setattr(local, "MEMINFO", path)
        return nvml

    return set_up


def seen_by_cuda(
    uuid: str, total: int, *, index: int = 0, integrated: bool = False, host_page_tables: bool = False
) -> dict[str, CudaDevice]:
    """One device as CUDA says it, by the id it has there."""
    return {
        uuid.lower().removeprefix("gpu-").removeprefix("mig-"): CudaDevice(
            index=index,
            name="a GPU",
            total_bytes=total,
            integrated=integrated,
            host_page_tables=host_page_tables,
        )
    }
