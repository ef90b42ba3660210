"""The GPUs of this machine: memory as the driver and as CUDA see it, and who holds it.

NVML (the `pynvml` module of nvidia-ml-py, extra `[profile]`) lists devices, slices and processes; the
CUDA driver library, asked without making a context, says what CUDA sees and whether the memory is the
system's own. What cannot be known is None, never 0: drivers answer "not supported" with zeros, and WSL
with all bits set.

Sources: leptonai/gpud#1170, XuehaiPan/nvitop#208, unslothai/unsloth#11208, vllm-project/vllm#35356,
#41776 and #48140, wookayin/gpustat#141, Syllo/nvtop#432, signerless/llm-checker#76; NVML's and CUDA's
own references. Read 2026-11.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from capplan.device.cuda import CudaDevice, cuda_devices
from capplan.device.record import MEMINFO, LocalDevice, coherent, shared, system_memory
from capplan.device.visible import bare, selected
from capplan.errors import ExtraMissingError, InputError, shown
from capplan.units import MIB, format_gib

_HINT = "name the GPU instead, e.g. --gpu h100-sxm"
_WHERE = "--gpu local"
# NVML's NVML_VALUE_NOT_AVAILABLE is all bits set; some bindings pass on 32 of them.
_SENTINELS = frozenset({(1 << 64) - 1, (1 << 63) - 1, (1 << 32) - 1, -1})
_LARGEST_BYTES = 1 << 47  # 128 TiB
# Used by an idle GPU whose reserve is counted as used, or that a daemon keeps awake.
_IDLE_BYTES = 512 * MIB


def local_devices(*, visible: str | None = None) -> tuple[LocalDevice, ...]:
    """The GPUs here, each once, MIG slices in place of the GPU they are cut from.

    `visible` is the text of CUDA_VISIBLE_DEVICES (indices, GPU- or MIG- ids); None means no restriction.
    Raises ExtraMissingError without nvidia-ml-py, InputError without a driver or a GPU.
    """
    nvml = _nvml()
    cuda = cuda_devices()
    system = system_memory(MEMINFO)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # Jetson has the CUDA driver but no NVML, and so has a container without its utilities. CUDA
        # leaves out by itself what CUDA_VISIBLE_DEVICES hides.
        devices = tuple(_from_cuda(device, system) for device in cuda.values())
        if not devices:
            raise _no_driver(error) from None
        return devices
    absent: list[str] = []
    try:
        found = tuple(_listed(nvml, cuda, system, absent))
    except nvml.NVMLError as error:
        raise InputError(f"the GPU driver failed: {error}", where=_WHERE, hint=_HINT) from None
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    if not found:
        message = "; ".join(("the driver sees no GPU it can use", *absent[:4]))
        raise InputError(message, where=_WHERE, hint=_HINT)
    chosen = found if visible is None else selected(found, visible, cuda)
    if not chosen:
        raise InputError(
            f"CUDA_VISIBLE_DEVICES={shown(visible or '')} leaves none of the {len(found)} GPUs here",
            where="CUDA_VISIBLE_DEVICES",
            hint="unset it, or name an index or a GPU- or MIG- id that nvidia-smi -L lists",
        )
    return chosen


def _nvml() -> Any:
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        pynvml = None
    if pynvml is None or not hasattr(pynvml, "nvmlInit") or not hasattr(pynvml, "NVMLError"):
        raise ExtraMissingError(
            "reading the local GPU needs nvidia-ml-py",
            where=_WHERE,
            hint="pip install 'capplan[profile]', or name the GPU",
        )
    return pynvml


def _no_driver(error: Exception) -> InputError:
    kind = type(error).__name__
    if "LibRmVersionMismatch" in kind:
        message = "the NVIDIA driver was updated but not reloaded"
        return InputError(message, where=_WHERE, hint="reboot, or " + _HINT)
    if "NoPermission" in kind:
        return InputError("no permission to talk to the NVIDIA driver", where=_WHERE, hint=_HINT)
    if any(part in kind for part in ("LibraryNotFound", "DriverNotLoaded", "Uninitialized")):
        return InputError(f"no NVIDIA driver is loaded here ({error})", where=_WHERE, hint=_HINT)
    return InputError(f"the NVIDIA driver does not answer ({error})", where=_WHERE, hint=_HINT)


def _ask(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a query, None where driver or binding cannot answer it."""
    try:
        return call(*arguments)
    except _failures(nvml):
        return None


def _failures(nvml: Any) -> tuple[type[Exception], ...]:
    """NVML's errors, the binding's own for an older driver, and those of a binding without the query."""
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    return nvml.NVMLError, mismatch, AttributeError, TypeError, ValueError


def _known(value: object, at_most: int | None = None) -> int | None:
    """A size that can be one: not a sentinel, not beyond `at_most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value in _SENTINELS or value < 0:
        return None
    return value if value <= (_LARGEST_BYTES if at_most is None else at_most) else None


def _text(value: object) -> str | None:
    """Names are bytes in older bindings."""
    if isinstance(value, bytes):
        return value.decode(errors="replace") or None
    return value if isinstance(value, str) and value else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """`has_none`: the device answers that it has no memory of its own; other errors leave that open."""

    total: int | None = None
    reserved: int | None = None
    used: int | None = None
    free: int | None = None
    has_none: bool = False


def _memory(nvml: Any, handle: Any) -> _Memory:
    """The driver's figures. Version 2 keeps its reserve apart from what is used; version 1 adds it in."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    has_none = False
    for arguments in ((handle,) if version is None else (handle, version), (handle,)):
        try:
            answer = nvml.nvmlDeviceGetMemoryInfo(*arguments)
        except nvml.NVMLError as error:
            has_none = "NotSupported" in type(error).__name__
            continue
        except (AttributeError, TypeError, ValueError):
            continue
        if getattr(answer, "total", None) == 0:  # unified memory, on drivers that call it a success
            return _Memory(has_none=True)
        total = _known(getattr(answer, "total", None))
        if total is None:
            continue
        return _Memory(
            total=total,
            reserved=_known(getattr(answer, "reserved", None), total) if len(arguments) > 1 else None,
            used=_known(getattr(answer, "used", None), total),
            free=_known(getattr(answer, "free", None), total),
        )
    return _Memory(has_none=has_none)


def _processes(nvml: Any, handle: Any, total: int | None) -> tuple[int | None, int | None]:
    """How many processes hold memory, and how much in all; a process in both lists counts once."""
    held: dict[int, int | None] = {}
    answered = False
    for query in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        # Older drivers have the second version of the query only.
        tried = (_ask(nvml, getattr(nvml, query + end, _unanswerable), handle) for end in ("", "_v2"))
        listed = next((answer for answer in tried if answer is not None), None)
        if listed is None:
            continue
        answered = True
        for process in listed:
            size = _known(getattr(process, "usedGpuMemory", None), total)
            before = held.get(process.pid)
            held[process.pid] = size if before is None else max(before, size or 0)
    if not answered:
        return None, None
    sizes = [size for size in held.values() if size is not None]
    return len(held), sum(sizes) if len(sizes) == len(held) else None


def _unanswerable(*_: Any) -> None:
    raise AttributeError


def _listed(
    nvml: Any, cuda: Mapping[str, CudaDevice], system: Mapping[str, int], absent: list[str]
) -> Iterator[LocalDevice]:
    """Every device once, by id or PCI address; what cannot be used goes to `absent`, with the reason."""
    before: set[str] = set()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            absent.append(f"GPU {index} does not answer ({error})")
            continue
        same = _identity(nvml, handle)
        if same is not None and same in before:
            continue
        before.add(same or f"index {index}")
        mode = _ask(nvml, getattr(nvml, "nvmlDeviceGetMigMode", _unanswerable), handle)
        if mode is None or mode[0] != getattr(nvml, "NVML_DEVICE_MIG_ENABLE", 1):
            yield _device(nvml, handle, index, cuda, system)
            continue
        slices = tuple(_slices(nvml, handle, index, cuda))
        if not slices:
            absent.append(f"GPU {index} is in MIG mode without a slice that can be seen here")
        yield from slices


def _identity(nvml: Any, handle: Any) -> str | None:
    """What tells a device from another: its id, else where it is on the bus; never its name."""
    uuid = _text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle))
    if uuid is not None:
        return uuid
    bus = _ask(nvml, getattr(nvml, "nvmlDeviceGetPciInfo", _unanswerable), handle)
    return _text(getattr(bus, "busId", None))


def _slices(nvml: Any, parent: Any, index: int, cuda: Mapping[str, CudaDevice]) -> Iterator[LocalDevice]:
    """The slices of a GPU in MIG mode; the GPU itself cannot be used then, nor its memory.

    Compute instances of one GPU instance share its memory, which each of them reports.
    """
    parent_name = _text(_ask(nvml, nvml.nvmlDeviceGetName, parent)) or "unknown GPU"
    places = range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0)
    asked = [_ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, place) for place in places]
    handles = [handle for handle in asked if handle is not None]
    instance = getattr(nvml, "nvmlDeviceGetGpuInstanceId", _unanswerable)
    instances = [_ask(nvml, instance, handle) for handle in handles]
    sharing = Counter(number for number in instances if number is not None)
    before: set[str] = set()
    for handle, number in zip(handles, instances, strict=True):
        made = _device(nvml, handle, index, cuda, None)
        if made.uuid is not None and made.uuid in before:
            continue
        before.add(made.uuid or "")
        attributes = _ask(nvml, getattr(nvml, "nvmlDeviceGetAttributes", _unanswerable), handle)
        profile = made.name.partition(" MIG ")[2] or _profile(attributes)
        megabytes = _known(getattr(attributes, "memorySizeMB", None))
        notes = [f"a slice of {parent_name}: sizes are the slice's"]
        if sharing[number] > 1:
            notes.append(f"{sharing[number]} compute instances share this memory")
        yield replace(
            made,
            name=f"{parent_name} MIG {profile}" if profile else f"{parent_name} MIG",
            mig_profile=profile,
            total_bytes=made.total_bytes or (megabytes * MIB if megabytes else None),
            notes=(*notes, *made.notes),
        )


def _profile(attributes: Any) -> str | None:
    """ "3g.20gb", or "1c.3g.20gb" for a part of its compute, from attributes where the name does not say."""
    slices = _known(getattr(attributes, "gpuInstanceSliceCount", None))
    compute = _known(getattr(attributes, "computeInstanceSliceCount", None))
    megabytes = _known(getattr(attributes, "memorySizeMB", None))
    if not slices or not megabytes:
        return None
    part = f"{compute}c." if compute and compute < slices else ""
    return f"{part}{slices}g.{-(-megabytes // 1024)}gb"


def _device(
    nvml: Any,
    handle: Any,
    index: int,
    cuda: Mapping[str, CudaDevice],
    system: Mapping[str, int] | None,
) -> LocalDevice:
    """One device; `system` is the machine's memory, None for a slice, which is never that."""
    uuid = _text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle))
    seen = cuda.get(bare(uuid)) if uuid else None
    memory = _memory(nvml, handle)
    at_most = memory.total or (system or {}).get("MemTotal")
    processes, processes_bytes = _processes(nvml, handle, at_most)
    made = LocalDevice(
        name=_text(_ask(nvml, nvml.nvmlDeviceGetName, handle)) or "unknown GPU",
        index=index,
        uuid=uuid,
        memory="dedicated",
        total_bytes=memory.total,
        reserved_bytes=memory.reserved,
        cuda_total_bytes=None if seen is None else _known(seen.total_bytes) or None,
        used_bytes=memory.used,
        free_bytes=memory.free,
        processes=processes,
        processes_bytes=processes_bytes,
        notes=() if memory.reserved is not None or memory.total is None else (_NO_RESERVE,),
    )
    if system is not None and (seen.integrated if seen is not None else memory.has_none):
        return shared(made, system)
    if seen is not None and seen.host_page_tables:
        return coherent(made, system or {})
    return _with_hidden_processes(made)


def _with_hidden_processes(device: LocalDevice) -> LocalDevice:
    """No process is listed though memory is used: in containers and under WSL those of others are hidden."""
    if device.processes != 0 or (device.used_bytes or 0) <= _IDLE_BYTES:
        return device
    note = f"{format_gib(device.used_bytes or 0)} is used by processes that are not listed here"
    return replace(device, processes=None, processes_bytes=None, notes=(*device.notes, note))


_NO_RESERVE = "this driver does not tell its own reserve from what is used"


def _from_cuda(device: CudaDevice, system: Mapping[str, int]) -> LocalDevice:
    made = LocalDevice(
        name=device.name,
        index=device.index,
        uuid=None,
        memory="dedicated",
        total_bytes=None,
        reserved_bytes=None,
        cuda_total_bytes=_known(device.total_bytes) or None,
        used_bytes=None,
        free_bytes=None,
        processes=None,
        processes_bytes=None,
        notes=("NVML is absent here: only what CUDA says is known",),
    )
    return shared(made, system) if device.integrated else made
