"""The GPUs of this machine: memory as the driver and as CUDA see it, and who holds it.

NVML (the `pynvml` module of nvidia-ml-py, extra `[profile]`) lists devices, slices and processes; the
CUDA driver library, asked without making a context, says what CUDA sees and whether the memory is the
system's own. What cannot be known is None, never 0: drivers answer "not supported" with zeros, and WSL
with all bits set.

Sources: leptonai/gpud#1170, XuehaiPan/nvitop#208, unslothai/unsloth#11208, vllm-project/vllm#35356,
#41776 and #48140, wookayin/gpustat#141, Syllo/nvtop#432, signerless/llm-checker#76; NVML's and CUDA's
own references. Read 2026-11.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from capplan.device.cuda import CudaDevice, cuda_devices
from capplan.device.record import MEMINFO, LocalDevice, coherent, shared, system_memory
from capplan.errors import ExtraMissingError, InputError

_HINT = "name the GPU instead, e.g. --gpu h100-sxm"
_WHERE = "--gpu local"
# NVML's NVML_VALUE_NOT_AVAILABLE is all bits set; some bindings pass on 32 of them.
_SENTINELS = frozenset({(1 << 64) - 1, (1 << 63) - 1, (1 << 32) - 1, -1})
_LARGEST_BYTES = 1 << 47  # 128 TiB


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
        # Jetson has the CUDA driver but no NVML.
        devices = tuple(_from_cuda(device, system) for device in cuda.values())
        if not devices:
            raise _no_driver(error) from None
        return devices
    try:
        found = tuple(_deduplicated(_listed(nvml, cuda, system)))
    except nvml.NVMLError as error:
        raise InputError(f"the GPU driver failed: {error}", where=_WHERE, hint=_HINT) from None
    finally:
        _ask(nvml, nvml.nvmlShutdown)
    if not found:
        raise InputError("the driver sees no GPU", where=_WHERE, hint=_HINT)
    chosen = found if visible is None else tuple(_selected(found, visible))
    if not chosen:
        raise InputError(
            f"CUDA_VISIBLE_DEVICES={visible} leaves none of the {len(found)} GPUs here",
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
    return InputError(f"no NVIDIA driver is loaded here ({error})", where=_WHERE, hint=_HINT)


def _ask(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a query, None where driver or binding cannot answer it."""
    try:
        return call(*arguments)
    except (nvml.NVMLError, AttributeError, TypeError, ValueError):
        return None


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
    total: int | None = None
    reserved: int | None = None
    used: int | None = None
    free: int | None = None


def _memory(nvml: Any, handle: Any) -> _Memory:
    """The driver's figures. Version 2 keeps its reserve apart from what is used; version 1 adds it in."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    answer = None if version is None else _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, version)
    second = answer is not None
    if answer is None:
        answer = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    total = _known(getattr(answer, "total", None))
    if not total:  # an error status with zeros, on unified memory
        return _Memory()
    return _Memory(
        total=total,
        reserved=_known(getattr(answer, "reserved", None), total) if second else None,
        used=_known(getattr(answer, "used", None), total),
        free=_known(getattr(answer, "free", None), total),
    )


def _processes(nvml: Any, handle: Any, total: int | None) -> tuple[int | None, int | None]:
    """How many processes hold memory, and how much in all; a process in both lists counts once."""
    held: dict[int, int | None] = {}
    answered = False
    for query in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        listed = _ask(nvml, getattr(nvml, query, None) or _unanswerable, handle)
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


def _listed(nvml: Any, cuda: Mapping[str, CudaDevice], system: Mapping[str, int]) -> Iterator[LocalDevice]:
    for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
        handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        mode = _ask(nvml, getattr(nvml, "nvmlDeviceGetMigMode", _unanswerable), handle)
        if mode is not None and mode[0] == getattr(nvml, "NVML_DEVICE_MIG_ENABLE", 1):
            yield from _slices(nvml, handle, index, cuda)
        else:
            yield _device(nvml, handle, index, cuda, system)


def _slices(nvml: Any, parent: Any, index: int, cuda: Mapping[str, CudaDevice]) -> Iterator[LocalDevice]:
    """The slices of a GPU in MIG mode; the GPU itself cannot be used then, nor its memory."""
    parent_name = _text(_ask(nvml, nvml.nvmlDeviceGetName, parent)) or "unknown GPU"
    for place in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
        handle = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, place)
        if handle is None:
            continue
        made = _device(nvml, handle, index, cuda, {})
        attributes = _ask(nvml, getattr(nvml, "nvmlDeviceGetAttributes", _unanswerable), handle)
        profile = made.name.partition(" MIG ")[2] or _profile(attributes)
        yield replace(
            made,
            name=f"{parent_name} MIG {profile}" if profile else f"{parent_name} MIG",
            mig_profile=profile,
            notes=(f"a slice of {parent_name}: sizes are the slice's", *made.notes),
        )


def _profile(attributes: Any) -> str | None:
    """ "3g.20gb" from a slice's attributes, where the name does not say."""
    slices = _known(getattr(attributes, "gpuInstanceSliceCount", None))
    megabytes = _known(getattr(attributes, "memorySizeMB", None))
    return f"{slices}g.{-(-megabytes // 1024)}gb" if slices and megabytes else None


def _device(
    nvml: Any,
    handle: Any,
    index: int,
    cuda: Mapping[str, CudaDevice],
    system: Mapping[str, int],
) -> LocalDevice:
    uuid = _text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle))
    seen = cuda.get(_bare(uuid)) if uuid else None
    memory = _memory(nvml, handle)
    processes, processes_bytes = _processes(nvml, handle, memory.total or system.get("MemTotal"))
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
    if (seen is not None and seen.integrated) or memory.total is None:
        return shared(made, system)
    if seen is not None and seen.host_page_tables:
        return coherent(made, system)
    return made


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


def _bare(uuid: str) -> str:
    """An id without its GPU- or MIG- prefix, as CUDA has it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _deduplicated(devices: Iterable[LocalDevice]) -> Iterator[LocalDevice]:
    """Each physical device or slice once; without an id a device cannot be told from another."""
    seen: set[str] = set()
    for device in devices:
        if device.uuid is None or device.uuid not in seen:
            yield device
        if device.uuid is not None:
            seen.add(device.uuid)


def _selected(devices: tuple[LocalDevice, ...], visible: str) -> Iterator[LocalDevice]:
    """The devices a value of CUDA_VISIBLE_DEVICES names, in its order; CUDA stops at the first unknown."""
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            named = [device for device in devices if device.index == int(entry)]
        elif entry.upper().startswith(("GPU-", "MIG-")):
            named = [
                device for device in devices if device.uuid and device.uuid.lower().startswith(entry.lower())
            ]
        else:
            return
        if not named:
            return
        # An index of a GPU in MIG mode means its first slice.
        yield named[0]
