"""The local GPU through a fake NVML: every report of a figure that was missing, wrong or doubled."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from capplan.device import LocalDevice, local_devices
from capplan.device.cuda import cuda_devices
from capplan.errors import ExitStatus, ExtraMissingError, InputError
from capplan.units import GIB, KIB, MIB
from tests.fake_nvml import (
    ALL_ONES,
    Answer,
    DriverNotLoaded,
    FakeNvml,
    GpuIsLost,
    LibraryMismatch,
    LibraryNotFound,
    LibRmVersionMismatch,
    Machine,
    NoPermission,
    NotSupported,
    NVMLError,
    device,
    machine_of,
    process,
    seen_by_cuda,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Sets up a machine."""
    return machine_of(monkeypatch, tmp_path)


def only(devices: tuple[LocalDevice, ...]) -> LocalDevice:
    assert len(devices) == 1
    return devices[0]


def ids(*places: int) -> list[SimpleNamespace]:
    return [device(uuid=f"GPU-{place:08x}-0000-0000-0000-000000000000") for place in places]


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
        (DriverNotLoaded("Driver Not Loaded"), "no NVIDIA driver is loaded here"),
        (NoPermission("Insufficient Permissions"), "no permission"),
        (NVMLError("Unknown Error"), "does not answer"),
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


def test_a_discrete_gpu_whose_memory_cannot_be_read_is_not_the_systems(machine: Machine) -> None:
    """A terabyte of RAM beside a GPU that fails to answer is not that GPU's memory."""
    uuid = "GPU-dddddddd-0000-0000-0000-000000000004"
    meminfo = {"MemTotal": 1 << 30, "MemAvailable": 1 << 29}
    machine(device(uuid=uuid, memory=GpuIsLost("GPU is lost")), meminfo=meminfo)
    got = only(local_devices())
    assert (got.memory, got.total_bytes, got.free_bytes) == ("dedicated", None, None)
    cuda = seen_by_cuda(uuid, 79 * GIB)
    machine(device(uuid=uuid, memory=NotSupported("memory")), meminfo=meminfo, cuda=cuda)
    got = only(local_devices())
    assert (got.memory, got.total_bytes, got.free_bytes) == ("dedicated", None, None)
    assert got.capacity_bytes == 79 * GIB


def test_processes_hidden_from_a_container_are_unknown(machine: Machine) -> None:
    machine(device(total=80 * GIB, used=60 * GIB))
    got = only(local_devices())
    assert (got.processes, got.processes_bytes, got.used_bytes) == (None, None, 60 * GIB)
    assert "60.00 GiB is used by processes that are not listed here" in got.notes
    machine(device(total=80 * GIB, used=300 * MIB))
    assert only(local_devices()).processes == 0


def test_windows_lists_processes_without_their_memory(machine: Machine) -> None:
    machine(device(total=24 * GIB, used=9 * GIB, compute=NotSupported("WDDM"), graphics=[process(3, None)]))
    got = only(local_devices())
    assert (got.processes, got.processes_bytes, got.used_bytes) == (1, None, 9 * GIB)


def test_a_driver_older_than_the_binding(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The binding's own error is none of NVML's; older drivers have the query's second version."""
    old = LibraryMismatch("Unversioned function called")
    machine(device(total=24 * GIB, used=9 * GIB, compute=old, graphics=old))
    got = only(local_devices())
    assert (got.processes, got.processes_bytes, got.used_bytes) == (None, None, 9 * GIB)

    def second(self: FakeNvml, handle: object) -> list[object]:
        return [process(7, 8 * GIB)]

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetComputeRunningProcesses_v2", second, raising=False)
    machine(device(total=24 * GIB, used=9 * GIB, compute=old, graphics=old))
    got = only(local_devices())
    assert (got.processes, got.processes_bytes) == (1, 8 * GIB)


def test_a_virtual_gpu_has_its_own_framebuffer(machine: Machine) -> None:
    """A vGPU answers little: no process list, no second version of the memory query."""
    gone = NotSupported("vGPU")
    machine(device(name="GRID T4-8Q", total=8 * GIB, reserved=None, compute=gone, graphics=gone))
    got = only(local_devices())
    assert (got.memory, got.total_bytes, got.reserved_bytes) == ("dedicated", 8 * GIB, None)
    assert (got.processes, got.processes_bytes) == (None, None)


def test_two_gpus_keep_their_own_memory(machine: Machine) -> None:
    first, second = ids(10, 11)
    second.total, second.free = 24 * GIB, 20 * GIB
    machine(first, second)
    assert [entry.total_bytes for entry in local_devices()] == [80 * GIB, 24 * GIB]


def test_devices_without_an_id_are_told_apart_by_bus(machine: Machine) -> None:
    gone = NotSupported("id")
    places = (b"00000000:3B:00.0", b"00000000:3B:00.0", "00000000:5E:00.0")
    machine(*(device(uuid=gone, bus=bus) for bus in places))
    assert [entry.index for entry in local_devices()] == [0, 2]


def test_cuda_without_nvml_in_a_container(machine: Machine) -> None:
    machine(
        init=LibraryNotFound("NVML Shared Library Not Found"),
        cuda=seen_by_cuda("x", 79 * GIB),
        meminfo={"MemTotal": 1 << 30, "MemAvailable": 1 << 29},
    )
    got = only(local_devices())
    assert (got.memory, got.capacity_bytes, got.free_bytes) == ("dedicated", 79 * GIB, None)
    assert (got.total_bytes, got.processes, got.used_bytes) == (None, None, None)


def test_every_gpu_lost_is_said(machine: Machine) -> None:
    machine(GpuIsLost("GPU is lost"), GpuIsLost("GPU is lost"))
    with pytest.raises(InputError, match=r"GPU 0 does not answer \(GPU is lost\); GPU 1 does not"):
        local_devices()


def test_a_count_that_fails_is_not_zero_gpus(machine: Machine) -> None:
    nvml = machine(device())
    nvml.count = NoPermission("Insufficient Permissions")
    with pytest.raises(InputError, match="the GPU driver failed: Insufficient Permissions"):
        local_devices()
    assert nvml.open == 0


@pytest.mark.parametrize("sentinel", [0, ALL_ONES, (1 << 63) - 1])
def test_a_total_cuda_cannot_mean(machine: Machine, sentinel: int) -> None:
    uuid = "GPU-eeeeeeee-0000-0000-0000-000000000005"
    machine(device(uuid=uuid, total=80 * GIB, reserved=GIB), cuda=seen_by_cuda(uuid, sentinel))
    got = only(local_devices())
    assert (got.cuda_total_bytes, got.capacity_bytes) == (None, 79 * GIB)
