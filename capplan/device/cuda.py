"""What the CUDA driver library says of the devices, asked through ctypes and without a context.

`cuInit` and the attribute queries allocate nothing on the device. CUDA_VISIBLE_DEVICES hides devices
from it as from any CUDA program.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
_HOST_PAGE_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A device by CUDA's index: the total CUDA allocates from, and whose memory that is."""

    index: int
    name: str
    total_bytes: int
    integrated: bool
    host_page_tables: bool


def cuda_devices() -> Mapping[str, CudaDevice]:
    """The devices CUDA sees, by their id in hexadecimal with dashes; empty without a working driver."""
    library = _library()
    if library is None or library.cuInit(0) != 0:
        return {}
    count = ctypes.c_int(0)
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return {}
    found: dict[str, CudaDevice] = {}
    for index in range(count.value):
        handle = ctypes.c_int(0)
        if library.cuDeviceGet(ctypes.byref(handle), index) == 0:
            found[_uuid(library, handle) or f"index {index}"] = _device(library, handle, index)
    return found


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _device(library: ctypes.CDLL, handle: ctypes.c_int, index: int) -> CudaDevice:
    name = ctypes.create_string_buffer(256)
    total = ctypes.c_size_t(0)
    library.cuDeviceGetName(name, len(name), handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    return CudaDevice(
        index=index,
        name=name.value.decode(errors="replace") or "unknown GPU",
        total_bytes=total.value,
        integrated=_attribute(library, _INTEGRATED, handle) == 1,
        host_page_tables=_attribute(library, _HOST_PAGE_TABLES, handle) == 1,
    )


def _attribute(library: ctypes.CDLL, attribute: int, handle: ctypes.c_int) -> int | None:
    value = ctypes.c_int(0)
    status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return value.value if status == 0 else None


def _uuid(library: ctypes.CDLL, handle: ctypes.c_int) -> str | None:
    """The id of a device, or of its slice where it is one (version 2, CUDA 11.4 on)."""
    raw = (ctypes.c_ubyte * 16)()
    for query in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
        if hasattr(library, query) and getattr(library, query)(ctypes.byref(raw), handle) == 0:
            text = bytes(raw).hex()
            return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    return None
