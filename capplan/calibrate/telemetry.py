"""The state of the device while it is measured: read, never set. What cannot be read is left out.

On a GPU through NVML, before, during and after a point; on a CPU the load average. Rules void a point that
was measured on a device that slowed down, was slowed down, or was shared.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

CLOCK_DROP: Final = 0.10
"""A point is void where the SM clock fell further below its highest."""
# NVML's clocks-event reasons that slow a GPU down against its will (nvml.h).
SLOWDOWNS: Final = {
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "thermal slowdown",
    0x80: "power brake",
}
POWER_CAP: Final = 0x4


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One reading. Clocks in MHz, power in watts, energy in joules since the driver was loaded."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    limit_w: float | None = None
    temperature_c: float | None = None
    reasons: int = 0
    processes: int | None = None
    energy_j: float | None = None
    load: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def void_reason(before: State, after: State, *, own_processes: int = 1) -> str | None:
    """Why a point between two readings does not count; None where it does."""
    if before.sm_mhz and after.sm_mhz and after.sm_mhz < before.sm_mhz * (1 - CLOCK_DROP):
        return f"SM clock fell from {before.sm_mhz:.0f} to {after.sm_mhz:.0f} MHz"
    for bit, name in SLOWDOWNS.items():
        if (before.reasons | after.reasons) & bit:
            return name
    others = max(state.processes or 0 for state in (before, after)) - own_processes
    if others > 0:
        return f"{others} other processes on the GPU"
    return None


class CpuTelemetry:
    """The load average, for the record: the canary decides."""

    def read(self) -> State:
        """The load over the last minute."""
        try:
            return State(load=round(os.getloadavg()[0], 2))
        except OSError:
            return State()


class GpuTelemetry:
    """NVML's figures of one GPU; a driver that does not answer a query leaves it out."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self) -> State:
        """All of them, now."""
        nvml = self.nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        listed = self._ask("nvmlDeviceGetComputeRunningProcesses")
        ecc = self._ask("nvmlDeviceGetEccMode")
        return State(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_SM", 1)),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", getattr(nvml, "NVML_CLOCK_MEM", 2)),
            power_w=_thousandth(self._ask("nvmlDeviceGetPowerUsage")),
            limit_w=_thousandth(self._ask("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_c=self._ask("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
            reasons=int(reasons or 0),
            processes=None if listed is None else len(listed),
            energy_j=_thousandth(self._ask("nvmlDeviceGetTotalEnergyConsumption")),
            more={} if ecc is None else {"ecc": bool(ecc[0])},
        )

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, name)(self.handle, *arguments)
        except (self.nvml.NVMLError, AttributeError, TypeError, ValueError):
            return None


def _thousandth(value: Any) -> float | None:
    return None if value is None else float(value) / 1e3


def gpu_telemetry(index: int) -> GpuTelemetry | None:
    """Telemetry of a GPU by CUDA's index; None without nvidia-ml-py or where it does not answer."""
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        handle = (
            pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            if uuid
            else pynvml.nvmlDeviceGetHandleByIndex(index)
        )
    except Exception:  # a binding or driver that fails in whatever way: the profile goes on without
        return None
    return GpuTelemetry(pynvml, handle)


def summary(states: list[State]) -> dict[str, Any]:
    """What the calibration file keeps: least, middle and most of every figure that was read."""
    made: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "power_w", "limit_w", "temperature_c", "load"):
        values = sorted(value for state in states if (value := getattr(state, name)) is not None)
        if values:
            made[name] = [values[0], values[len(values) // 2], values[-1]]
    reasons = 0
    for state in states:
        reasons |= state.reasons
        made.update(state.more)
    if any(state.sm_mhz is not None for state in states):
        slowed = sorted({name for bit, name in SLOWDOWNS.items() if reasons & bit})
        made["slowed_by"] = slowed + (["power cap"] if reasons & POWER_CAP else [])
        made["processes"] = max((state.processes or 0) for state in states)
    return made
