"""What an engine adds to its kernels and how it builds steps: fitted on public serving runs, kernels first.

The numbers stand in profiles/calibrations/serving.yaml by engine and GPU family, with what the fit left over.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capplan import catalog
from capplan.formulas.serving import Scheduling
from capplan.specs import Gpu
from capplan.step import Host

FILE: Final = catalog.PROFILES / "calibrations" / "serving.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Measured over predicted, on runs held out: the 10th, 50th and 90th percentile, and how many runs."""

    low: float
    middle: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """An engine on a GPU family. `measured`: whether runs of both were fitted; `family` is whose are used."""

    engine: str
    family: str
    measured: bool
    host: Host
    scheduling: Scheduling
    bands: Mapping[str, Band]
    doubted: float

    def band(self, name: str, doubt: bool) -> Band:
        """The band of a figure ("ttft", "tpot", "e2e", "throughput"); wider by `doubted` in doubt."""
        found = self.bands[name]
        if not doubt:
            return found
        return Band(
            low=min(1.0, found.low) ** self.doubted,
            middle=found.middle,
            high=max(1.0, found.high) ** self.doubted,
            runs=found.runs,
        )


@cache
def _data() -> Mapping[str, Any]:
    return catalog.read_yaml(FILE)


def behaviour(
    engine: str,
    gpu: Gpu,
    *,
    version: str | None = None,
    experts: bool = False,
    data: Mapping[str, Any] | None = None,
) -> Behaviour:
    """How `engine` runs on `gpu`; the family's numbers, else those of all families.

    `version` None: the newest; before `overlapped_since` an engine schedules while the GPU waits. `experts`:
    whether the model has routed experts, whose errors are kept apart. `data` stands in for the shipped file.
    """
    data = _data() if data is None else data
    by_family = data["engines"].get(engine) or data["engines"]["vllm"]
    family = gpu.architecture if gpu.architecture in by_family["families"] else "other"
    fitted = by_family["families"][family]
    kind = "experts" if experts else "dense"
    waits = version is not None and older(version, by_family.get("overlapped_since", ""))
    alone = by_family["alone"] if waits else {"step_us": 0, "sequence_us": 0}
    return Behaviour(
        engine=engine,
        family=family,
        measured=engine in data["engines"] and family == gpu.architecture,
        host=Host(
            step_s=(fitted["step_us"] + alone["step_us"]) * 1e-6,
            sequence_s=(fitted["sequence_us"] + alone["sequence_us"]) * 1e-6,
            fused=fitted["fused"],
        ),
        scheduling=Scheduling(
            prefill_first=by_family["prefill_first"],
            reserved=by_family["reserved"],
            wait_steps=by_family["wait_steps"],
            bursts=by_family["bursts"],
            poll_steps=fitted["poll_steps"],
            first_token_s=fitted["first_token_ms"] * 1e-3,
        ),
        bands={
            name: Band(low=entry["p10"], middle=entry["p50"], high=entry["p90"], runs=entry["runs"])
            for name, entry in data["error"][kind].items()
        },
        doubted=float(data["error"]["doubted"]),
    )


def older(version: str, since: str) -> bool:
    """Whether a version is before another; False where either is no version."""
    found = [re.match(r"v?(\d{1,4})\.(\d{1,4})", text.strip(), re.ASCII) for text in (version, since)]
    if found[0] is None or found[1] is None:
        return False
    first, second = ([int(part) for part in match.groups()] for match in found if match is not None)
    return first < second
