"""Field cases about reading the device, through a fake NVML: what was missing, wrong, or counted twice."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from capplan.device import LocalDevice, local_devices
from capplan.errors import ExitStatus
from capplan.units import GIB, KIB, MIB
from tests.accuracy.cases import FieldCase, field_case
from tests.doctor_logs import cli
from tests.fake_nvml import (
    ALL_ONES,
    FakeNvml,
    LibraryNotFound,
    NotSupported,
    device,
    machine_of,
    process,
    seen_by_cuda,
)

LOCAL = ("vram", "--model", "8b", "--gpu", "local")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., FakeNvml]:
    """Sets up a machine."""
    return machine_of(monkeypatch, tmp_path)


def only() -> LocalDevice:
    found = local_devices()
    assert len(found) == 1
    return found[0]


@field_case("bc-044", "vllm-project/vllm#35356", {"needed_gib": (128.25, 0.001)})
def test_bc_044_page_cache_on_coherent_memory_is_free(
    case: FieldCase, machine: Callable[..., FakeNvml]
) -> None:
    """Compute capability 9.0 is an H100's as well: the device's attribute tells them apart."""
    uuid, total = "GPU-44444444-0000-0000-0000-000000000044", round(142.5 * GIB)
    for host_page_tables, free in ((True, total), (False, round(74.9 * GIB))):
        machine(
            device(uuid=uuid, total=total, reserved=0, free=round(74.9 * GIB), used=total - 80423263437),
            cuda=seen_by_cuda(uuid, total, host_page_tables=host_page_tables),
            meminfo={"MemTotal": 620 << 20, "MemAvailable": 560 << 20},
        )
        assert only().free_bytes == free
    case.check("needed_gib", 0.9 * (only().capacity_bytes or 0) / GIB)


@field_case("bc-175", "bytedance-iaas/sglang#683")
def test_bc_175_could_not_measure_is_no_success(
    case: FieldCase, machine: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(init=LibraryNotFound("NVML Shared Library Not Found"))
    code, out, err = cli(*LOCAL)
    assert (code, out) == (ExitStatus.INPUT, "")
    assert err.startswith("error: no NVIDIA driver is loaded here")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    code, out, err = cli(*LOCAL)
    assert (code, out) == (ExitStatus.EXTRA_MISSING, "")
    assert "nvidia-ml-py" in err


@field_case(
    "bc-184",
    "leptonai/gpud#1170",
    {"total_gib": (119.68, 0.001), "free_plus_used_gib": (13.86, 0.001)},
)
def test_bc_184_not_supported_is_the_systems_memory(
    case: FieldCase, machine: Callable[..., FakeNvml]
) -> None:
    free, used, available = 7976902656, 6910320640, 112 << 20
    meminfo = {"MemTotal": 128501256192 // KIB, "MemFree": free // KIB, "MemAvailable": available}
    machine(device(name="NVIDIA GB10", memory=NotSupported("memory")), meminfo=meminfo)
    got = only()
    case.check("total_gib", (got.total_bytes or 0) / GIB)
    case.check("free_plus_used_gib", (free + used) / GIB)
    assert (got.memory, got.free_bytes) == ("shared", available * KIB)
    assert (got.free_bytes or 0) + (got.used_bytes or 0) == got.total_bytes


@field_case(
    "bc-185",
    "XuehaiPan/nvitop#208",
    {"total_gib": (121.69, 0.001), "available_gib": (113.07, 0.001)},
)
def test_bc_185_zeros_with_either_status(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    zeros = SimpleNamespace(total=0, free=0, used=0, reserved=0)
    for memory in (NotSupported("memory"), zeros):
        machine(
            device(name="NVIDIA GB10", memory=memory),
            meminfo={"MemTotal": 127600748, "MemFree": 1, "MemAvailable": 118566368},
        )
        got = only()
        case.check("total_gib", (got.total_bytes or 0) / GIB)
        case.check("available_gib", (got.free_bytes or 0) / GIB)


@field_case(
    "bc-186",
    "unslothai/unsloth#11208",
    {"ratio": (5.72, 0.005), "cuda_total_gib": (45.39, 0.001)},
)
def test_bc_186_the_framebuffer_of_an_integrated_gpu(
    case: FieldCase, machine: Callable[..., FakeNvml]
) -> None:
    uuid = "GPU-86868686-0000-0000-0000-000000000086"
    cuda = seen_by_cuda(uuid, 46477 * MIB, integrated=True)
    machine(device(uuid=uuid, total=8128 * MIB, reserved=0), cuda=cuda)
    got = only()
    case.check("cuda_total_gib", (got.capacity_bytes or 0) / GIB)
    case.check("ratio", (got.total_bytes or 0) / (8128 * MIB))
    assert got.free_bytes is None


@field_case(
    "bc-188",
    "vllm-project/vllm#48140",
    {"needed_gib": (108.9, 0.001), "free_if_cache_counts_as_used_gib": (77, 0.1)},
)
def test_bc_188_weights_in_the_page_cache(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    cached = 40 << 20
    meminfo = {"MemTotal": 121 << 20, "MemAvailable": 119 << 20, "MemFree": (119 << 20) - cached}
    machine(device(name="NVIDIA GB10", memory=NotSupported("memory")), meminfo=meminfo)
    got = only()
    needed = 0.9 * (got.capacity_bytes or 0)
    case.check("needed_gib", needed / GIB)
    case.check("free_if_cache_counts_as_used_gib", ((got.free_bytes or 0) - cached * KIB) / GIB)
    assert (got.free_bytes or 0) - cached * KIB < needed < (got.free_bytes or 0)
    code, out, _ = cli(*LOCAL, "-o", "json")
    assert (code, json.loads(out)["fits"]) == (ExitStatus.OK, True)
    assert "page cache counts as available" in json.loads(out)["gpu"]["note"]


def halves() -> SimpleNamespace:
    slices = [
        device(
            name="NVIDIA A100-SXM4-40GB MIG 3g.20gb",
            uuid=f"MIG-{place:08x}-0000-0000-0000-000000000189",
            total=19968 * MIB,
            reserved=0,
            compute=NotSupported("processes"),
            graphics=NotSupported("processes"),
        )
        for place in (1, 2)
    ]
    return device(name="NVIDIA A100-SXM4-40GB", total=40960 * MIB, slices=slices)


@field_case("bc-189", "vllm-project/vllm#41776", {"total_gb": (20, 0.05), "overstatement": (2.0, 0.05)})
def test_bc_189_a_slice_is_not_its_parent(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    machine(halves())
    found = local_devices(visible="MIG-00000002-0000-0000-0000-000000000189")
    assert [slice_.mig_profile for slice_ in found] == ["3g.20gb"]
    case.check("total_gb", (found[0].capacity_bytes or 0) / 1e9)
    case.check("overstatement", 40960 * MIB / (found[0].capacity_bytes or 1))
    assert [only_one.index for only_one in local_devices(visible="0")] == [0]


@field_case("bc-192", "dask/distributed#8739")
def test_bc_192_unavailable_is_not_zero(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    slices = halves()
    unknown = SimpleNamespace(total=19968 * MIB, free=None, used=None, reserved=None)
    for entry in slices.slices:
        entry.memory = unknown
    machine(slices)
    found = local_devices()[0]
    assert (found.processes, found.processes_bytes, found.free_bytes) == (None, None, None)
    small = (*LOCAL, "--precision", "int4")
    code, out, _ = cli(*small, "-o", "json")
    assert code == ExitStatus.OK
    said = json.loads(out)["gpu"]["device"]
    assert (said["processes"], said["processes_bytes"], said["free_bytes"]) == (None, None, None)
    for output in ("table", "md"):
        text = " ".join(cli(*small, "-o", output)[1].split())
        assert "how much is free is not known" in text, output
        assert "0 other processes" not in text


@field_case("bc-193", "wookayin/gpustat#141", {"reserved_mb": (308, 0.05)})
def test_bc_193_the_drivers_reserve(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    machine(device(total=24 * GIB, reserved=308 * 10**6))
    got = only()
    case.check("reserved_mb", (got.reserved_bytes or 0) / 1e6)
    assert (got.used_bytes, got.processes, got.processes_bytes) == (0, 0, 0)
    assert got.capacity_bytes == 24 * GIB - 308 * 10**6


@field_case("bc-194", "Syllo/nvtop#432", {"sentinel_gib": 17179869184, "total_gib": (15.99, 0.001)})
def test_bc_194_all_ones_is_unknown(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    case.check("sentinel_gib", ALL_ONES / GIB)
    machine(device(total=16376 * MIB, used=2 * GIB, graphics=[process(7, ALL_ONES)]))
    got = only()
    case.check("total_gib", (got.total_bytes or 0) / GIB)
    assert (got.processes, got.processes_bytes) == (1, None)


@field_case("bc-197", "signerless/llm-checker#76", {"entries_after_dedup": 1, "true_vram_gb": 4})
def test_bc_197_one_device_under_six_names(case: FieldCase, machine: Callable[..., FakeNvml]) -> None:
    machine(*(device(total=4 * 10**9, reserved=0, name=f"name {place}") for place in range(6)))
    case.check("entries_after_dedup", len(local_devices()))
    case.check("true_vram_gb", sum(entry.total_bytes or 0 for entry in local_devices()) / 1e9)
