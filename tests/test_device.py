"""The local GPU through a fake NVML: every report of a figure that was missing, wrong or doubled."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capplan.device import LocalDevice, local, local_devices
from capplan.device.cuda import CudaDevice, cuda_devices
from capplan.errors import ExitStatus, ExtraMissingError, InputError
from capplan.units import GIB, KIB, MIB
from tests.fake_nvml import (
    ALL_ONES,
    Answer,
    FakeNvml,
    LibraryNotFound,
    LibRmVersionMismatch,
    NotSupported,
    NVMLError,
    device,
    process,
)

Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
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
        path = tmp_path / "meminfo"
        path.unlink(missing_ok=True)
        if meminfo is not None:
            path.write_text("".join(f"{name}: {kilo:>12} kB\n" for name, kilo in meminfo.items()))
        monkeypatch.setattr(local, "MEMINFO", path)
        return nvml

    return set_up


def seen_by_cuda(
    uuid: str, total: int, *, integrated: bool = False, host_page_tables: bool = False
) -> dict[str, CudaDevice]:
    return {
        uuid.lower().removeprefix("gpu-").removeprefix("mig-"): CudaDevice(
            index=0,
            name="a GPU",
            total_bytes=total,
            integrated=integrated,
            host_page_tables=host_page_tables,
        )
    }


def only(devices: tuple[LocalDevice, ...]) -> LocalDevice:
    assert len(devices) == 1
    return devices[0]


def test_a_discrete_gpu(machine: Machine) -> None:
    uuid = "GPU-AAAAAAAA-0000-0000-0000-000000000001"
    nvml = machine(
        device(
            name=b"NVIDIA H100 80GB HBM3",
            uuid=uuid.encode(),
            total=81559 * MIB,
            used=3000 * MIB,
            reserved=554 * MIB,
            compute=[process(10, 2000 * MIB), process(11, 500 * MIB)],
            graphics=[process(11, 600 * MIB)],
        ),
        cuda=seen_by_cuda(uuid, 81079 * MIB),
        meminfo={"MemTotal": 1 << 20, "MemAvailable": 1 << 19},
    )
    got = only(local_devices())
    assert (got.name, got.index, got.uuid, got.memory) == ("NVIDIA H100 80GB HBM3", 0, uuid, "dedicated")
    assert (got.total_bytes, got.reserved_bytes) == (81559 * MIB, 554 * MIB)
    assert (got.used_bytes, got.free_bytes) == (3000 * MIB, (81559 - 3000 - 554) * MIB)
    assert (got.processes, got.processes_bytes) == (2, 2600 * MIB)
    assert got.cuda_total_bytes == got.capacity_bytes == 81079 * MIB
    assert got.notes == ()
    assert nvml.open == 0


def test_without_cuda_its_total_is_unknown_and_the_reserve_comes_off(machine: Machine) -> None:
    machine(device(total=80 * GIB, reserved=GIB))
    got = only(local_devices())
    assert got.cuda_total_bytes is None
    assert got.capacity_bytes == 79 * GIB
    assert (got.processes, got.processes_bytes, got.used_bytes) == (0, 0, 0)  # known to be none


def test_coherent_memory_counts_page_cache_as_free(machine: Machine) -> None:
    """vllm-project/vllm#35356: a GH200 of 142.5 GiB shows 74.9 GiB free, the rest being page cache."""
    uuid = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
    total = round(142.5 * GIB)
    machine(
        device(uuid=uuid, total=total, reserved=0, free=round(74.9 * GIB), used=round(67.6 * GIB)),
        cuda=seen_by_cuda(uuid, total, host_page_tables=True),
        meminfo={"MemTotal": 620 << 20, "MemAvailable": 560 << 20},
    )
    got = only(local_devices())
    needed = 0.9 * (got.total_bytes or 0)
    assert needed == pytest.approx(128.25 * GIB, rel=0.001)
    assert got.memory == "coherent"
    assert got.free_bytes == total > needed
    assert any("page cache" in note for note in got.notes)


def test_coherent_memory_held_by_a_process_is_not_free(machine: Machine) -> None:
    uuid = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
    common: dict[str, Any] = {"uuid": uuid, "total": 142 * GIB, "reserved": 0, "free": 40 * GIB}
    cuda = seen_by_cuda(uuid, 142 * GIB, host_page_tables=True)
    meminfo = {"MemTotal": 620 << 20, "MemAvailable": 560 << 20}
    machine(device(**common, compute=[process(1, 60 * GIB)]), cuda=cuda, meminfo=meminfo)
    assert only(local_devices()).free_bytes == 82 * GIB
    machine(device(**common, compute=[process(1, None)]), cuda=cuda, meminfo=meminfo)
    assert only(local_devices()).free_bytes == 40 * GIB  # what a process holds is unknown: the least


def test_memory_not_supported_is_the_systems(machine: Machine) -> None:
    """leptonai/gpud#1170: a GB10 answers Not Supported to both versions; MemFree was 7.4 GiB."""
    machine(
        device(name="NVIDIA GB10", memory=NotSupported("memory")),
        meminfo={
            "MemTotal": 128501256192 // KIB,
            "MemFree": 7976902656 // KIB,
            "MemAvailable": 118 << 20 >> 1,
        },
    )
    got = only(local_devices())
    assert got.memory == "shared"
    assert got.total_bytes == pytest.approx(119.68 * GIB, rel=0.001)
    assert got.free_bytes == 59 * GIB
    assert got.free_bytes != 7976902656
    assert got.reserved_bytes is None
    assert "memory is shared with the CPU; page cache counts as available" in got.notes
    machine(device(name="NVIDIA GB10", memory=NotSupported("memory")))
    got = only(local_devices())  # no meminfo either, as on Windows
    assert (got.total_bytes, got.free_bytes, got.used_bytes, got.capacity_bytes) == (None, None, None, None)


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(NotSupported("memory"), id="an error status"),
        pytest.param(SimpleNamespace(total=0, free=0, used=0, reserved=0), id="success with zeros"),
    ],
)
def test_zeros_are_unknown(machine: Machine, memory: Answer) -> None:
    """XuehaiPan/nvitop#208: total, free and used of 0, on one driver with an error, on another without."""
    machine(
        device(name="NVIDIA GB10", memory=memory),
        meminfo={"MemTotal": 127600748, "MemFree": 1, "MemAvailable": 118566368},
    )
    got = only(local_devices())
    assert got.total_bytes == pytest.approx(121.69 * GIB, rel=0.001)
    assert got.free_bytes == pytest.approx(113.07 * GIB, rel=0.001)


def test_an_integrated_gpus_framebuffer_is_a_carve_out(machine: Machine) -> None:
    """unslothai/unsloth#11208: nvidia-smi says 8128 MiB, CUDA 46477 MiB; Windows has no meminfo."""
    uuid = "GPU-cccccccc-0000-0000-0000-000000000003"
    machine(
        device(uuid=uuid, total=8128 * MIB, reserved=100 * MIB, used=500 * MIB),
        cuda=seen_by_cuda(uuid, 46477 * MIB, integrated=True),
    )
    got = only(local_devices())
    assert got.memory == "shared"
    assert got.total_bytes == got.cuda_total_bytes == got.capacity_bytes == 46477 * MIB
    assert (got.total_bytes or 0) / GIB == pytest.approx(45.39, rel=0.001)
    assert (got.total_bytes or 0) / (8128 * MIB) == pytest.approx(5.72, rel=0.005)
    assert (got.free_bytes, got.used_bytes) == (None, None)  # unknown, not the carve-out's


def test_page_cache_of_weights_does_not_count_as_used(machine: Machine) -> None:
    """vllm-project/vllm#48140: 121 GiB, 40 GiB of them page cache; 0.9 of it is needed."""
    machine(
        device(name="NVIDIA GB10", memory=NotSupported("memory")),
        meminfo={"MemTotal": 121 << 20, "MemFree": 77 << 20, "MemAvailable": 117 << 20},
    )
    got = only(local_devices())
    needed = 0.9 * (got.total_bytes or 0)
    assert needed == pytest.approx(108.9 * GIB, rel=0.001)
    assert 77 * GIB < needed < (got.free_bytes or 0)


def sliced() -> SimpleNamespace:
    """An A100 40GB cut in two."""
    first = device(
        name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        uuid="MIG-11111111-0000-0000-0000-000000000001",
        total=19968 * MIB,
        reserved=0,
        compute=NotSupported("needs permission"),
        graphics=NotSupported("needs permission"),
    )
    second = device(
        name=NotSupported("an older driver names no slices"),
        uuid="MIG-22222222-0000-0000-0000-000000000002",
        total=19968 * MIB,
        reserved=0,
        profile=SimpleNamespace(gpuInstanceSliceCount=3, memorySizeMB=19968),
    )
    return device(
        name="NVIDIA A100-SXM4-40GB",
        uuid="GPU-99999999-0000-0000-0000-000000000009",
        total=40960 * MIB,
        slices=[first, second],
    )


def test_a_mig_slice_has_its_own_memory(machine: Machine) -> None:
    """vllm-project/vllm#41776: the parent's 40 GB were returned for a 20 GB slice."""
    machine(sliced(), meminfo={"MemTotal": 1 << 30, "MemAvailable": 1 << 29})
    got = local_devices()
    assert [slice_.mig_profile for slice_ in got] == ["3g.20gb", "3g.20gb"]
    assert {slice_.name for slice_ in got} == {"NVIDIA A100-SXM4-40GB MIG 3g.20gb"}
    for slice_ in got:
        assert (slice_.total_bytes or 0) / 1e9 == pytest.approx(20, rel=0.05)
        assert 40960 * MIB / (slice_.total_bytes or 1) == pytest.approx(2.0, rel=0.05)
        assert slice_.notes[0] == "a slice of NVIDIA A100-SXM4-40GB: sizes are the slice's"
    chosen = only(local_devices(visible="MIG-22222222-0000-0000-0000-000000000002"))
    assert chosen.uuid == "MIG-22222222-0000-0000-0000-000000000002"
    assert only(local_devices(visible="MIG-1111")).uuid == "MIG-11111111-0000-0000-0000-000000000001"


def test_what_a_slice_cannot_tell_is_not_zero(machine: Machine) -> None:
    """dask/distributed#8739: a flat 0 was drawn where the value does not exist."""
    machine(sliced())
    first, second = local_devices()
    assert (first.processes, first.processes_bytes) == (None, None)
    assert (second.processes, second.processes_bytes) == (0, 0)


def test_a_gpu_in_mig_mode_without_slices_is_none(machine: Machine) -> None:
    machine(device(slices=[]))
    with pytest.raises(InputError, match="sees no GPU"):
        local_devices()


def test_the_reserve_is_no_process(machine: Machine) -> None:
    """wookayin/gpustat#141: 308 MB "used" on an idle GPU."""
    machine(device(total=24 * GIB, reserved=308 * 10**6))
    got = only(local_devices())
    assert got.reserved_bytes == 308 * 10**6
    assert (got.used_bytes, got.processes_bytes) == (0, 0)
    assert got.capacity_bytes == 24 * GIB - 308 * 10**6


def test_a_driver_without_the_second_version(machine: Machine) -> None:
    machine(device(total=24 * GIB, reserved=None, used=308 * 10**6))
    got = only(local_devices())
    assert got.reserved_bytes is None
    assert (got.used_bytes, got.processes_bytes) == (308 * 10**6, 0)
    assert got.notes == ("this driver does not tell its own reserve from what is used",)


def test_a_binding_without_the_second_version(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = machine(device(total=24 * GIB, reserved=308 * 10**6))
    monkeypatch.delattr(FakeNvml, "nvmlMemory_v2")
    assert not hasattr(nvml, "nvmlMemory_v2")
    assert only(local_devices()).used_bytes == 308 * 10**6


@pytest.mark.parametrize("sentinel", [ALL_ONES, (1 << 32) - 1, None, 17179869184 * GIB, -1])
def test_sentinels_are_unknown(machine: Machine, sentinel: int | None) -> None:
    """Syllo/nvtop#432: (2^64 - 1) / 2^30 = 17179869184 "GiB" held by a process under WSL."""
    assert pytest.approx(17179869184, rel=1e-12) == ALL_ONES / GIB
    machine(
        device(
            name="NVIDIA GeForce RTX 4070 Ti SUPER",
            memory=SimpleNamespace(total=16376 * MIB, free=sentinel, used=sentinel, reserved=sentinel),
            compute=[process(7, sentinel), process(8, 100 * MIB)],
        )
    )
    got = only(local_devices())
    assert (got.total_bytes or 0) / GIB == pytest.approx(15.99, rel=0.001)
    assert (got.used_bytes, got.free_bytes, got.reserved_bytes) == (None, None, None)
    assert (got.processes, got.processes_bytes) == (2, None)
    assert got.capacity_bytes == 16376 * MIB


def test_figures_beyond_the_total_are_unknown(machine: Machine) -> None:
    machine(
        device(
            memory=SimpleNamespace(total=16 * GIB, free=17 * GIB, used=18 * GIB, reserved=19 * GIB),
            compute=[process(1, 20 * GIB)],
        )
    )
    got = only(local_devices())
    assert (got.used_bytes, got.free_bytes, got.processes_bytes) == (None, None, None)


def test_one_gpu_listed_six_times_is_one(machine: Machine) -> None:
    """signerless/llm-checker#76: six entries of 8 GB made 48 GB of one integrated GPU with 4."""
    machine(*(device(total=4 * 10**9, reserved=0, name=f"a name {place}") for place in range(6)))
    got = local_devices()
    assert len(got) == 1
    assert sum(entry.total_bytes or 0 for entry in got) == 4 * 10**9


def test_devices_without_an_id_are_kept_apart(machine: Machine) -> None:
    machine(device(uuid=NotSupported("id")), device(uuid=NotSupported("id")))
    assert [entry.uuid for entry in local_devices()] == [None, None]


def ids(*places: int) -> list[SimpleNamespace]:
    return [device(uuid=f"GPU-{place:08x}-0000-0000-0000-000000000000") for place in places]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        pytest.param(None, [0, 1, 2], id="all"),
        pytest.param("2,0", [2, 0], id="indices keep their order"),
        pytest.param("GPU-0000000b", [1], id="the start of an id"),
        pytest.param("gpu-0000000C-0000-0000-0000-000000000000, 0", [2, 0], id="an id and an index"),
        pytest.param("1,7,0", [1], id="CUDA stops at the first it does not know"),
    ],
)
def test_visible_devices(machine: Machine, visible: str | None, indices: list[int]) -> None:
    machine(*ids(10, 11, 12))
    assert [entry.index for entry in local_devices(visible=visible)] == indices


@pytest.mark.parametrize("visible", ["", "-1", "none", "9", "MIG-77", "GPU-ffff"])
def test_nothing_visible_is_said(machine: Machine, visible: str) -> None:
    machine(*ids(10, 11))
    with pytest.raises(InputError, match="leaves none of the 2 GPUs"):
        local_devices(visible=visible)


def test_a_lost_gpu_does_not_hide_the_others(machine: Machine) -> None:
    machine(NVMLError("GPU is lost"), *ids(11))
    assert [entry.index for entry in local_devices()] == [1]


def test_a_device_that_answers_nothing(machine: Machine) -> None:
    gone = NotSupported("anything")
    machine(device(name=gone, uuid=gone, memory=gone, compute=gone, graphics=gone))
    got = only(local_devices())
    assert got.name == "unknown GPU"
    assert {got.uuid, got.total_bytes, got.free_bytes, got.processes, got.processes_bytes} == {None}


def test_jetson_has_cuda_but_no_nvml(machine: Machine) -> None:
    machine(
        init=LibraryNotFound("NVML Shared Library Not Found"),
        cuda=seen_by_cuda("x", 61 * GIB, integrated=True),
        meminfo={"MemTotal": 62 << 20, "MemAvailable": 50 << 20},
    )
    got = only(local_devices())
    assert (got.memory, got.total_bytes, got.free_bytes) == ("shared", 62 * GIB, 50 * GIB)
    assert got.capacity_bytes == 61 * GIB


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LibraryNotFound("NVML Shared Library Not Found"), "no NVIDIA driver is loaded here"),
        (LibRmVersionMismatch("mismatch"), "updated but not reloaded"),
    ],
)
def test_no_driver(machine: Machine, error: Exception, message: str) -> None:
    machine(init=error)
    with pytest.raises(InputError, match=message) as caught:
        local_devices()
    assert "--gpu h100-sxm" in caught.value.hint


def test_no_gpu(machine: Machine) -> None:
    nvml = machine()
    with pytest.raises(InputError, match="sees no GPU"):
        local_devices()
    assert nvml.open == 0


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["absent", "another module of that name"])
def test_without_the_binding(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(ExtraMissingError, match="nvidia-ml-py") as caught:
        local_devices()
    assert caught.value.exit_status is ExitStatus.EXTRA_MISSING
    assert "capplan[profile]" in caught.value.hint


def test_the_cuda_driver_is_asked_safely() -> None:
    """Whatever machine this runs on: answers or nothing, and no error."""
    for found in cuda_devices().values():
        assert found.total_bytes > 0
        assert found.name
