"""What an engine adds to its kernels and how it builds steps: fitted on public serving runs, kernels first.

The numbers stand in profiles/calibrations/serving.yaml by engine and GPU family, with what the fit left over.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from capplan import catalog
from capplan.formulas.serving import Scheduling
from capplan.specs import Gpu
from capplan.step import Host

_VERSION: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})", re.ASCII)
FILE: Final = catalog.PROFILES / "calibrations" / "serving.yaml"
SIMULATED: Final = catalog.PROFILES / "calibrations" / "simulator.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Measured over predicted, on runs held out: the 10th, 50th and 90th percentile, and how many runs."""

    low: float
    middle: float
    high: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """An engine on a GPU family. `measured`: whether runs of both were fitted; `family` is whose are used.

    `verified`: the oldest to the newest version that was fitted, "" where the figures do not go by it;
    `covered`: whether the version asked is among them.
    """

    engine: str
    family: str
    measured: bool
    host: Host
    scheduling: Scheduling
    bands: Mapping[str, Band]
    doubted: float
    verified: str = ""
    covered: bool = True

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
    attention_ranks: int = 1,
    data: Mapping[str, Any] | None = None,
) -> Behaviour:
    """How `engine` runs on `gpu`; the family's numbers, else those of all families.

    `version` None: the newest; before `overlapped_since` an engine schedules while the GPU waits. `experts`:
    whether the model has routed experts, whose errors are kept apart. Data-parallel
    `attention_ranks` wait for the slowest of them in every layer. `data` stands in for the shipped file.
    """
    data = _data() if data is None else data
    by_family = data["engines"].get(engine) or data["engines"]["vllm"]
    own = family_of(gpu)
    family = own if own in by_family["families"] else "other"
    fitted = by_family["families"][family]
    kind = "experts" if experts else "dense"
    waits = version is not None and older(version, by_family.get("overlapped_since", ""))
    alone = by_family["alone"] if waits else {"step_us": 0, "sequence_us": 0}
    # Of another engine's numbers no version is in question; fits under way have no range yet.
    verified = by_family.get("verified", "") if engine in data["engines"] else ""
    return Behaviour(
        engine=engine,
        family=family,
        measured=engine in data["engines"] and family == own,
        host=Host(
            step_s=(fitted["step_us"] + alone["step_us"]) * 1e-6,
            sequence_s=(fitted["sequence_us"] + alone["sequence_us"]) * 1e-6,
            fused=fitted["fused"] * (1 + fitted["uneven"] * (1 - 1 / attention_ranks)),
            prompts=fitted["prompts"],
        ),
        scheduling=Scheduling(
            prefill_first=by_family["prefill_first"],
            reserved=by_family["reserved"],
            together=by_family["together"],
            first_token_s=fitted["first_token_ms"] * 1e-3,
            alone_s=first_token_s(engine if engine in data["engines"] else "vllm", experts=experts),
        ),
        bands={
            name: Band(low=entry["p10"], middle=entry["p50"], high=entry["p90"], runs=entry["runs"])
            for name, entry in data["error"][kind].items()
        },
        doubted=float(data["error"]["doubted"]),
        verified=verified,
        covered=version is None or not verified or within(version, verified),
    )


@cache
def around_steps() -> Mapping[str, Any]:
    """What lies around an engine's steps once its queues are simulated, by engine: simulator.yaml."""
    engines: Mapping[str, Any] = catalog.read_yaml(SIMULATED)["engines"]
    return engines


def first_token_s(engine: str, *, experts: bool) -> float:
    """From a client to `engine` and back with the first token, beside all queues; infinite: not fitted."""
    fitted = around_steps().get(engine)
    return math.inf if fitted is None else fitted["first_token_ms"]["experts" if experts else "dense"] * 1e-3


def family_of(gpu: Gpu) -> str:
    """A GPU's family: chips of one architecture and compute capability run the same kernels.

    Example: a B200 is "Blackwell 10.0", an RTX PRO 6000 "Blackwell 12.0".
    """
    return f"{gpu.architecture} {gpu.compute_capability or ''}".strip()


def within(version: str, verified: str) -> bool:
    """Whether a version is in a range as "0.9–0.19", both ends included; False where it is no version."""
    first, _, last = verified.partition("–")
    known = _VERSION.match(version.strip()) is not None
    return known and not older(version, first) and not older(last or first, version)


def older(version: str, since: str) -> bool:
    """Whether a version is before another; False where either is no version."""
    found = [_VERSION.match(text.strip()) for text in (version, since)]
    if found[0] is None or found[1] is None:
        return False
    first, second = ([int(part) for part in match.groups()] for match in found if match is not None)
    return first < second
