"""The rules that void a point, on fake readings; the GPU itself is never touched."""

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from capplan.calibrate.telemetry import (
    CpuTelemetry,
    GpuTelemetry,
    State,
    Watch,
    gpu_telemetry,
    idle,
    summary,
    void_reason,
    warnings,
)

QUIET = State(sm_mhz=1980, reasons=0, processes=1)


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        pytest.param(QUIET, None, id="nothing happened"),
        pytest.param(State(sm_mhz=1800, processes=1), None, id="9 % slower"),
        pytest.param(State(sm_mhz=1700, processes=1), "SM clock fell", id="14 % slower"),
        pytest.param(State(sm_mhz=1980, reasons=0x20, processes=1), "thermal", id="thermal"),
        pytest.param(State(sm_mhz=1980, reasons=0x8, processes=1), "hardware", id="hardware"),
        pytest.param(State(sm_mhz=1980, reasons=0x4, processes=1), None, id="power cap: said, not void"),
        pytest.param(State(sm_mhz=1980, processes=2), "1 other process", id="a second process"),
        pytest.param(State(), None, id="nothing can be read"),
    ],
)
def test_void_reason(after: State, reason: str | None) -> None:
    found = void_reason([QUIET, after])
    assert found is None if reason is None else found is not None and reason in found


@pytest.mark.parametrize(
    ("clocks", "void"),
    [
        pytest.param([345, 1200, 1980, 1980], False, id="woken from idle"),
        pytest.param([1980, 1700, 1980], True, id="slow in the middle, as fast again at the end"),
        pytest.param([345, 1980, 1750], True, id="woken, then slowed"),
        pytest.param([1980, 1783, 1980], False, id="a tenth slower is not further"),
    ],
)
def test_clock_during_a_point(clocks: list[int], void: bool) -> None:
    found = void_reason([State(sm_mhz=clock) for clock in clocks])
    assert (found is not None) == void


def test_throttling_between_two_good_readings_voids_a_point() -> None:
    """What readings before and after alone would have missed."""
    readings = iter([QUIET, State(sm_mhz=1980, reasons=0x40, processes=1, power_w=400)])

    def read() -> State:
        return next(readings, QUIET)

    with Watch(read, every_s=0.001) as watch:
        time.sleep(0.02)
    assert watch.states[0] == watch.states[-1] == QUIET
    assert void_reason([watch.states[0], watch.states[-1]]) is None
    assert void_reason(watch.states) == "thermal slowdown"
    assert watch.median("sm_mhz") == 1980
    assert watch.median("temperature_c") is None


def test_watch_ends_with_its_block_and_reads_a_cpu_only_around_it() -> None:
    with Watch(lambda: QUIET) as watch:
        time.sleep(0.01)
    assert len(watch.states) == 2
    count = [0]

    def read() -> State:
        count[0] += 1
        return QUIET

    with pytest.raises(KeyError), Watch(read, every_s=0.001):
        raise KeyError
    seen = count[0]
    time.sleep(0.02)
    assert count[0] == seen


def test_idle_power_by_the_counter() -> None:
    """60 J in 2 s are 30 W, whatever the moment's reading says."""
    states: Iterator[State] = iter(
        State(sm_mhz=345, power_w=70, energy_j=joules) for joules in (100.0, 130.0, 160.0)
    )
    slept: list[float] = []
    assert idle(lambda: next(states), slept.append, seconds=2) == {"power_w": 30.0, "sm_mhz": 345}
    assert sum(slept) == 2
    assert idle(lambda: State(power_w=71), slept.append, seconds=2) == {"power_w": 71}
    assert idle(State, slept.append, seconds=2) == {}


class Nvml:
    """A driver that answers little: clocks and power; the rest is not supported."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:  # noqa: N802
        return {1: 1500, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:  # noqa: N802
        return 512_000

    def nvmlDeviceGetTemperature(self, handle: object, kind: int) -> int:  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object) -> int:  # noqa: N802
        return 0x4

    def __getattr__(self, name: str) -> Any:
        # Nothing may ever be set, and queries of newer drivers do not exist.
        assert "Set" not in name
        assert "Reset" not in name
        raise AttributeError(name)


def test_reading_a_driver_that_knows_little() -> None:
    state = GpuTelemetry(Nvml(), object()).read()
    assert (state.sm_mhz, state.memory_mhz, state.power_w) == (1500, 2619, 512)
    assert (state.temperature_c, state.processes, state.reasons) == (None, None, 4)


def test_summary_says_what_slowed_the_gpu() -> None:
    made = summary([QUIET, State(sm_mhz=1700, power_w=690, reasons=0x4 | 0x20, processes=2)])
    assert made["sm_mhz"] == [1700, 1980, 1980]
    assert made["slowed_by"] == ["thermal slowdown"]
    assert made["power_capped"] == 0.5
    assert made["processes"] == 2
    assert "temperature_c" not in made
    assert warnings(made | {"limit_w": [700, 700, 700]}) == [
        "the GPU was slowed down: thermal slowdown",
        "the power cap of 700 W held the clock down in 50% of the readings",
        "the GPU was shared: up to 1 other process",
    ]
    assert warnings(summary([QUIET, QUIET])) == []


def binding(error: Exception | None = None) -> SimpleNamespace:
    """A pynvml that fails to start, or one whose driver is known by CUDA's UUID only."""

    def start() -> None:
        if error is not None:
            raise error

    return SimpleNamespace(
        NVMLError=Nvml.NVMLError,
        nvmlInit=start,
        nvmlDeviceGetHandleByUUID=lambda uuid: ("handle", uuid),
        nvmlSystemGetDriverVersion=lambda: b"580.159.04",
    )


def test_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's order of the GPUs is not NVML's."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "pynvml", binding())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="aa-bb"))
    found = gpu_telemetry(1)
    assert isinstance(found, GpuTelemetry)
    assert found.handle == ("handle", "GPU-aa-bb")
    assert found.driver() == "580.159.04"


@pytest.mark.parametrize(
    ("module", "why"),
    [
        pytest.param(None, "nvidia-ml-py is not installed", id="no binding"),
        pytest.param(
            binding(Nvml.NVMLError("Driver/library version mismatch")),
            "NVML does not answer (Driver/library version mismatch)",
            id="a driver that was updated under a running kernel",
        ),
        pytest.param(binding(OSError("")), "NVML does not answer (OSError)", id="an error without words"),
    ],
)
def test_without_telemetry_it_says_why(monkeypatch: pytest.MonkeyPatch, module: Any, why: str) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert gpu_telemetry(0) == why


def test_cpu_state_is_its_load() -> None:
    load = CpuTelemetry().read().load
    assert load is None or load >= 0
