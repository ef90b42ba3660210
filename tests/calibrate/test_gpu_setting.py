"""How a GPU is set up to be timed: slices, unified memory, drivers; torch and NVML are stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from capplan.calibrate import profile, telemetry
from capplan.calibrate.hardware import ASSUMED_CACHE_BYTES, gpu_hardware, refuse_slice
from capplan.errors import InputError

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="profiling runs on torch")

RATES = {"read_bytes_per_s": 3e12, "bf16_flop_per_s": 7e14}


def properties(**changed: Any) -> SimpleNamespace:
    found = {
        "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": 85_028_175_872,
        "L2_cache_size": 50 << 20, "multi_processor_count": 132, "is_integrated": 0, "uuid": "aa",
    }  # fmt: skip
    return SimpleNamespace(**(found | changed))


class Nvml:
    """A driver that answers everything asked here; nothing may be set."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159.04"

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 71_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 345

    def __getattr__(self, name: str) -> Any:
        assert "Set" not in name
        raise AttributeError(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a GPU of given properties, and a driver; → its setting."""

    def setting(nvml: Any = None, **changed: Any) -> profile.Setting:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(**changed))
        monkeypatch.setitem(sys.modules, "pynvml", nvml or Nvml())
        return profile.gpu_setting(torch.device("cuda", 0), torch, sleep=lambda _: None)

    return setting


def test_whole_gpu(gpu: Any) -> None:
    made = gpu()
    assert made.clock.name == "cuda-graph-events"
    assert made.cache_bytes == 50 << 20
    assert made.every_s == telemetry.EVERY_S
    assert made.idle == {"power_w": 71, "sm_mhz": 345}
    assert made.software == {"driver": "580.159.04"}
    assert made.warnings == ()


def test_slice_is_refused_before_anything_is_timed(gpu: Any) -> None:
    with pytest.raises(InputError, match="slice of a GPU") as caught:
        gpu(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    assert caught.value.where == "--device cuda:0"
    refuse_slice("NVIDIA GeForce RTX 4090", 0)


def test_unified_memory_is_told(gpu: Any) -> None:
    """GB10, Jetson and the like: the GPU has no memory of its own, and torch may know no L2."""
    made = gpu(name="NVIDIA GB10", is_integrated=1, L2_cache_size=0)
    assert made.warnings == ("the GPU's memory is the system's own: what the CPU does slows it down",)
    assert made.cache_bytes is None
    assert made.larger_than_bytes == ASSUMED_CACHE_BYTES


def test_driver_that_does_not_go_with_its_library(gpu: Any) -> None:
    class Mismatch(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise self.NVMLError("Driver/library version mismatch")

    made = gpu(Mismatch())
    assert "Driver/library version mismatch" in made.warnings[0]
    assert made.every_s is None
    assert made.read() == telemetry.State()


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        pytest.param({}, "h100-sxm-80gb", id="one of the catalog"),
        pytest.param({"total_memory": 40 << 30}, "nvidia-h100-80gb-hbm3", id="that name, another size"),
        pytest.param({"name": "NVIDIA Foo 9000"}, "nvidia-foo-9000", id="one that no catalog knows"),
    ],
)
def test_hardware_block(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], key: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(**changed))
    made = gpu_hardware(0, RATES)
    assert made["key"] == key
    assert made["flop_per_s"] == {"bf16": 7e14}
    assert (made["instructions"], made["units"]) == ("9.0", 132)
    assert "aa" not in str(made).replace("NVIDIA", "")  # no id of the very GPU
