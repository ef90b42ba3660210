"""The state of the device while it is measured: read, never set. What cannot be read is left out.

On a GPU through NVML, before, during and after a point; on a CPU the load average. Rules void a point that
was measured on a device that slowed down, was slowed down, or was shared.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

CLOCK_DROP: Final = 0.10
"""A point is void where the SM clock falls further below the highest it had in it."""
EVERY_S: Final = 0.1
"""How often a GPU is asked while a point is timed: its own figures change every 20 to 100 ms."""
IDLE_S: Final = 3.0
"""How long a GPU is left at rest for its idle power."""
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


def void_reason(states: Sequence[State], *, own_processes: int = 1) -> str | None:
    """Why a point with these readings, in their order, does not count; None where it does.

    A clock that rises (the GPU was idle before) is no fault, one that falls from where it was is.
    """
    highest = 0.0
    for state in states:
        for bit, name in SLOWDOWNS.items():
            if state.reasons & bit:
                return name
        highest = max(highest, state.sm_mhz or 0.0)
        if state.sm_mhz is not None and state.sm_mhz < highest * (1 - CLOCK_DROP):
            return f"SM clock fell from {highest:.0f} to {state.sm_mhz:.0f} MHz"
    others = max((state.processes or 0 for state in states), default=0) - own_processes
    if others > 0:
        return f"{others} other process{'es' if others > 1 else ''} on the GPU"
    return None


class Watch:
    """Readings before, during and after a point, in their order: `with Watch(read, every_s) as watch`.

    Without `every_s` only before and after: on a CPU a thread that reads would itself be what disturbs.
    """

    def __init__(self, read: Callable[[], State], every_s: float | None = None) -> None:
        self.read, self.every_s = read, every_s
        self.states: list[State] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self.states.append(self.read())
        if self.every_s is not None:
            self._thread = threading.Thread(target=self._during, args=(self.every_s,), daemon=True)
            self._thread.start()
        return self

    def _during(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            self.states.append(self.read())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.states.append(self.read())

    def median(self, name: str) -> float | None:
        """The middle one of a figure's readings; None where there is none."""
        return _middle(self.states, name)


def _middle(states: Sequence[State], name: str) -> float | None:
    values = sorted(value for state in states if (value := getattr(state, name)) is not None)
    return float(values[len(values) // 2]) if values else None


def idle(read: Callable[[], State], sleep: Callable[[float], None], *, seconds: float) -> dict[str, float]:
    """Power and SM clock of the device at rest; by the energy counter where it has one."""
    watch = Watch(read)
    with watch:
        sleep(seconds / 2)
        watch.states.append(read())
        sleep(seconds / 2)
    made = {name: found for name in ("power_w", "sm_mhz") if (found := watch.median(name)) is not None}
    first, last = watch.states[0].energy_j, watch.states[-1].energy_j
    if first is not None and last is not None and last > first:
        made["power_w"] = round((last - first) / seconds, 1)
    return made


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

    def driver(self) -> str | None:
        """The driver's version; None where it is not told."""
        try:
            found = self.nvml.nvmlSystemGetDriverVersion()
        except (self.nvml.NVMLError, AttributeError):
            return None
        return found.decode() if isinstance(found, bytes) else str(found)

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, name)(self.handle, *arguments)
        except (self.nvml.NVMLError, AttributeError, TypeError, ValueError):
            return None


def _thousandth(value: Any) -> float | None:
    return None if value is None else float(value) / 1e3


def gpu_telemetry(index: int) -> GpuTelemetry | str:
    """Telemetry of a GPU by CUDA's index; or why there is none."""
    try:
        import pynvml
        import torch
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
        handle = (
            pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            if uuid
            else pynvml.nvmlDeviceGetHandleByIndex(index)
        )
    except Exception as error:  # a binding or driver that fails in whatever way: the profile goes on without
        return f"NVML does not answer ({(str(error) or type(error).__name__).splitlines()[0][:120]})"
    return GpuTelemetry(pynvml, handle)


def summary(states: Sequence[State]) -> dict[str, Any]:
    """What the calibration file keeps: least, middle and most of every figure that was read.

    `slowed_by` names what slowed a GPU down; `power_capped` is the share of readings under the power cap.
    """
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
        made["slowed_by"] = sorted({name for bit, name in SLOWDOWNS.items() if reasons & bit})
        capped = sum(bool(state.reasons & POWER_CAP) for state in states)
        made["power_capped"] = round(capped / len(states), 3)
        made["processes"] = max((state.processes or 0) for state in states)
    return made


def warnings(state: Mapping[str, Any]) -> list[str]:
    """What to know of a profile whose file has this `state`."""
    made = [f"the GPU was slowed down: {name}" for name in state.get("slowed_by", ())]
    if state.get("power_capped"):
        limit = f" of {state['limit_w'][1]:g} W" if "limit_w" in state else ""
        share = f"{state['power_capped']:.0%}"
        made.append(f"the power cap{limit} held the clock down in {share} of the readings")
    others = state.get("processes", 1) - 1
    if others > 0:
        made.append(f"the GPU was shared: up to {others} other process{'es' if others > 1 else ''}")
    return made
