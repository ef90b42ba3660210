"""The device under test with its clock, its canary and its telemetry: what a point is timed with."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from capplan.calibrate import telemetry
from capplan.calibrate.clock import CANARY_LIMIT, Canary, Clock

if TYPE_CHECKING:
    import torch

RETRIES: Final = 2
"""A point that is void is timed again so many times."""
COLD: Final = 3
"""Data that an operation rotates over, in last-level caches: less would be found there from the last time."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which a point was timed: why it does not count (None: it does), the clock and power meanwhile."""

    void: str | None = None
    sm_mhz: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """What a run times with. `every_s`: how often the state is read during a point; None: around it only."""

    device: "torch.device"
    clock: Clock
    threads: int
    canary: Canary
    read_state: Callable[[], telemetry.State]
    read_bytes_per_s: float
    cache_bytes: int
    every_s: float | None = None
    states: list[telemetry.State] = field(default_factory=list)

    @property
    def cold_bytes(self) -> int:
        """Bytes that rotated buffers have in all, at least."""
        return COLD * self.cache_bytes

    def watched(self, timing: Callable[[], Made], *, until: float) -> tuple[Made, Conditions]:
        """Time between two canaries, watched; again where that is void, before `until` (perf_counter)."""
        for _ in range(1 + RETRIES):
            made, conditions = self._once(timing)
            if conditions.void is None or time.perf_counter() > until:
                break
        return made, conditions

    def _once(self, timing: Callable[[], Made]) -> tuple[Made, Conditions]:
        before = self.canary.moved()
        with telemetry.Watch(self.read_state, self.every_s) as watch:
            made = timing()
        moved = max(before, self.canary.moved())
        self.states.extend(watch.states)
        canary = f"canary moved {moved:.0%}" if moved > CANARY_LIMIT else None
        return made, Conditions(
            void=canary or telemetry.void_reason(watch.states),
            sm_mhz=watch.median("sm_mhz"),
            power_w=watch.median("power_w"),
        )
