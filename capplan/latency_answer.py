"""The answer of `capplan latency` as records: figures with bounds and bands, the sweep, other choices."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from capplan import slo, step
from capplan.engine_speed import Behaviour
from capplan.formulas import serving
from capplan.latency_question import LatencyQuestion
from capplan.small_batch_speed import Fractions
from capplan.specs import Format, Gpu, Model

if TYPE_CHECKING:
    from capplan.engines.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What physics allows, the estimate, and its P10–P90. None: undefined, or no estimate asked."""

    bound: float | None
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    provenance: str = "bound"

    def to_dict(self) -> dict[str, Any]:
        """JSON of the figure."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The bounds of the four figures; seconds and tokens a second."""

    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_token_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """What each of `users` sees, and what all get together. `limit`: what bounds how many are served."""

    users: int
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_token_per_s: float
    request_per_s: float
    limit: str
    meets: bool | None

    def to_dict(self) -> dict[str, Any]:
        """JSON of the point."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Another choice, and the figures with it."""

    change: str
    flag: str
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    output_token_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON of the change."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LatencyEstimate:
    """The answer of `capplan latency`; times in seconds, rates of the whole replica (all its GPUs)."""

    question: LatencyQuestion
    model: Model
    gpu: Gpu
    precision: Format | None
    kv_format: Format
    kv_reason: str
    fits: bool | None
    plan: "EnginePlan | None"
    ttft: Figure
    tpot: Figure
    e2e: Figure
    throughput: Figure
    bound: serving.Served
    served: serving.Served | None
    behaviour: Behaviour
    scheduling: serving.Scheduling
    fractions: Fractions | None
    decode_ops: tuple[step.OpTime, ...]
    prefill_ops: tuple[step.OpTime, ...]
    regime: Mapping[str, str | None]
    limits: Mapping[str, float]
    bottleneck: str | None
    slo: slo.Slo | None
    meets: bool | None
    sweep: tuple[SweepPoint, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """False where the model does not fit, or a limit lies below the bound."""
        return self.fits is not False and not self.below_bound

    @property
    def load(self) -> serving.Served:
        """How the replica is loaded: as estimated, else at the bound."""
        return self.served or self.bound

    @property
    def knee_distance(self) -> float:
        """The stable rate over the load's: 1 at the knee, below 1 where there is no steady state."""
        return 1 / self.load.utilization

    @property
    def goodput_request_per_s(self) -> float:
        """Requests per second within the limits asked for; all of them where there are none."""
        load = self.load
        if self.slo is None:
            return load.request_per_s if load.steady else 0.0
        ttft_s, tpot_s = (
            math.inf if limit is None else limit for limit in (self.slo.ttft_s, self.slo.tpot_s)
        )
        return load.goodput_request_per_s(ttft_s=ttft_s, tpot_s=tpot_s)

    @property
    def below_bound(self) -> bool:
        """Whether a limit asked for is shorter than physics allows."""
        if self.slo is None:
            return False
        pairs = ((self.slo.ttft_s, self.ttft.bound), (self.slo.tpot_s, self.tpot.bound))
        return any(limit is not None and bound is not None and limit < bound for limit, bound in pairs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `capplan latency` (schema capplan.latency/1)."""
        from capplan.latency_json import to_dict

        return to_dict(self)

    def _repr_html_(self) -> str:
        """Notebook view: the four figures as a small table."""
        rows = [("TTFT", self.ttft), ("TPOT", self.tpot), ("E2E", self.e2e)]
        cells = "".join(
            f"<tr><td>{name}</td><td>{(figure.estimate or figure.bound or 0) * 1e3:,.1f} ms</td></tr>"
            for name, figure in rows
        )
        return f"<table>{cells}</table>"
