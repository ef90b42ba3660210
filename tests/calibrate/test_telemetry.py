"""The rules that void a point, on fake readings; the GPU itself is never touched."""

from typing import Any

import pytest

from capplan.calibrate.telemetry import CpuTelemetry, GpuTelemetry, State, summary, void_reason

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
    found = void_reason(QUIET, after)
    assert found is None if reason is None else found is not None and reason in found


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
    assert made["slowed_by"] == ["thermal slowdown", "power cap"]
    assert made["processes"] == 2
    assert "temperature_c" not in made


def test_cpu_state_is_its_load() -> None:
    load = CpuTelemetry().read().load
    assert load is None or load >= 0
