"""The memories a need is put against: catalog GPUs, a size that was given, or the common sizes."""

from dataclasses import replace
from typing import Final

from capplan import catalog, local_calibration
from capplan.capacity import Target
from capplan.errors import InputError
from capplan.specs import Gpu
from capplan.units import GB, GIB

FIT_TABLE_GB: Final = (24, 40, 48, 80, 141, 192)


def targets_of(
    names: tuple[str, ...],
    memory_bytes: int | None,
    *,
    visible: str | None = None,
    profile: str | None = None,
) -> tuple[tuple[Target, ...], bool]:
    """What to fit into, and whether the user named it: GPUs, one size of memory, or the common sizes.

    "local" are the GPUs here, of those that `visible` (CUDA_VISIBLE_DEVICES) leaves; `profile` is a file that
    brings its device, the only one then.
    Raises InputError for an unknown GPU, or a GPU and a size; see local_target for what local adds.
    """
    if profile is not None:
        return (_profiled(profile, names, memory_bytes),), True
    if names and memory_bytes is not None:
        raise InputError("both a GPU and a memory size", where="--gpu, --gpu-memory", hint="give one of them")
    if memory_bytes is not None:
        if not 1 <= memory_bytes <= 1 << 50:
            raise InputError(f"{memory_bytes} bytes", where="--gpu-memory", hint="give a size such as 24GB")
        in_gb = memory_bytes % (GB // 100) == 0
        label = f"{memory_bytes / GB:g} GB" if in_gb else f"{memory_bytes / GIB:.5g} GiB"
        return (Target(name=label, gpu_id=None, usable_bytes=memory_bytes, reading="given"),), True
    if any(name.lower() == "all" for name in names):
        gpus = [catalog.load_gpu(identity) for identity in catalog.ids("gpus")]
        gpus.sort(key=lambda gpu: (gpu.usable_bytes, gpu.id))
        return tuple(target_of(gpu) for gpu in gpus), True
    if names:
        return tuple(target for name in names for target in _named(name, visible)), True
    sold = "decimal GB as sold"
    return (
        tuple(
            Target(name=f"{size} GB", gpu_id=None, usable_bytes=size * GB, reading=sold)
            for size in FIT_TABLE_GB
        ),
        False,
    )


def stage_targets(names: tuple[str, ...]) -> tuple[Target, ...]:
    """The GPU of each pipeline stage."""
    return tuple(target_of(catalog.gpu(name), name) for name in names)


def _named(name: str, visible: str | None) -> tuple[Target, ...]:
    if name.lower() == "local":
        from capplan.local_target import local_targets  # asks the driver

        return local_targets(visible)
    return (target_of(catalog.gpu(name), name),)


def _profiled(profile: str, names: tuple[str, ...], memory_bytes: int | None) -> Target:
    """The device of a profile. Raises InputError where another one, several, or a size are asked about."""
    if memory_bytes is not None or len(names) > 1:
        raise InputError(
            "a profile brings its device and its memory",
            where="--profile, --gpu, --gpu-memory",
            hint="leave the others out",
        )
    gpu = local_calibration.of_device(profile, names[0] if names else None).gpu
    target = target_of(gpu)
    if gpu.id in catalog.ids("gpus"):
        return target
    return replace(target, gpu_id=None, reading="as profiled")


def target_of(gpu: Gpu, asked: str | None = None) -> Target:
    """A catalog GPU as a memory to fit into; says what an ambiguous name took."""
    reading = "decimal GB as sold"
    if gpu.memory_driver_bytes:
        reading = "driver" if gpu.memory_reading == "observed" else "driver, inferred"
    note = ""
    if asked is not None:
        ambiguous = {catalog.normalised(key): text for key, text in gpu.ambiguous_aliases.items()}
        said = ambiguous.get(catalog.normalised(asked))
        if said:
            note = f"{asked} is ambiguous ({said}): {gpu.id}"
    return Target(name=gpu.name, gpu_id=gpu.id, usable_bytes=gpu.usable_bytes, reading=reading, note=note)
