"""The question of `capplan simulate`, and what of it contradicts itself."""

import datetime
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from capplan.errors import InputError
from capplan.latency_question import DEFAULT_ISL, DEFAULT_OSL
from capplan.prices import MAX_USD_PER_GPU_HOUR
from capplan.sim.workload import WorkloadSpec
from capplan.specs import Parallelism, Term
from capplan.units import GIB

DEFAULT_REQUESTS: Final = 2000
REQUESTS_PER_USER: Final = 10
MAX_REPEAT: Final = 1000
MAX_SIMULATED: Final = 100_000_000
"""Requests of one run."""
GBPS: Final = 1e9 / 8
"""Bytes per second of a gigabit per second."""
SECONDS_PER_REQUEST: Final = 4e-5
BYTES_PER_REQUEST: Final = 350
"""As measured, roughly: for the estimate that refuses absurd sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateQuestion:
    """What is asked: a replica as latency's, drafts included, under a workload.

    `kv_blocks` replaces the pool that the engine's plan finds. Requests that arrived before `warm_up_s` are
    left out; None: by a rule (see docs/simulate.md). `repeat` runs with seeds of their own, from the
    workload's on. The price is `price_usd_per_gpu_hour`, else the known one of `term`, `cloud`, `region`.
    """

    model: str
    gpu: str = ""
    workload: WorkloadSpec
    precision: str = "auto"
    kv_dtype: str = "auto"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    engine: str = "vllm"
    engine_version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    prefix_caching: bool = True
    scheduler: str | None = None
    """As sim.schedulers.scheduler_of takes it; None: the engine's own."""
    max_new_tokens: int | None = None
    """What clients ask at most; None: as many as they get."""
    speculative_tokens: int | None = None
    acceptance_rate: float | None = None
    draft_model: str | None = None
    kv_link_bytes_per_s: float | None = None
    """Prompts have a replica of their own, alike, and their KV moves over this link; None: one does both."""
    kv_link_s: float = 0.0
    network_s: float = 0.0
    slo: str | None = None
    profile: str = "auto"
    bounds: bool = False
    online: bool = False
    warm_up_s: float | None = None
    repeat: int = 1
    price_usd_per_gpu_hour: float | None = None
    term: Term = "on-demand"
    cloud: str | None = None
    region: str | None = None
    today: datetime.date | None = None

    @property
    def parallel(self) -> Parallelism:
        """How a replica is spread."""
        return Parallelism(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.parallel.gpus * (1 if self.kv_link_bytes_per_s is None else 2)

    @property
    def day(self) -> datetime.date:
        """The day from which the price's age is counted."""
        return self.today or datetime.date.today()


_WORKLOAD: Final = frozenset(field.name for field in fields(WorkloadSpec))


def question_of(model: str, **given: Any) -> SimulateQuestion:
    """The question of flat fields: WorkloadSpec's among SimulateQuestion's; `concurrency` are its users.

    Lengths are 1024 and 256 tokens where nothing says; requests without a rate or users come all at once.
    """
    if "concurrency" in given:
        given["users"] = given.pop("concurrency")
    asked = {name: given.pop(name) for name in list(given) if name in _WORKLOAD}
    return SimulateQuestion(model=model, workload=_whole(WorkloadSpec(**asked)), **given)


def _whole(spec: WorkloadSpec) -> WorkloadSpec:
    """A workload with lengths and an end."""
    if spec.trace is not None:
        return spec
    spec = replace(
        spec,
        isl=DEFAULT_ISL if spec.isl is None else spec.isl,
        osl=DEFAULT_OSL if spec.osl is None else spec.osl,
    )
    if spec.request_per_s is None and spec.users is None:
        if spec.requests is None:
            raise InputError(
                "no load",
                where="--request-rate, --concurrency, --requests, --trace",
                hint="--request-rate 8, --concurrency 32, --requests 500 (all at once) or --trace FILE",
            )
        return replace(spec, request_per_s=math.inf)
    if spec.requests is None and spec.duration_s is None and spec.request_per_s != math.inf:
        return replace(spec, requests=max(DEFAULT_REQUESTS, REQUESTS_PER_USER * (spec.users or 0)))
    return spec


def check(question: SimulateQuestion) -> None:
    """Refuse values outside their range, and sizes beyond reason; InputError names the option."""
    spec = question.workload
    ranges: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("--repeat", question.repeat, 1, MAX_REPEAT, "independent runs"),
        ("--kv-blocks", question.kv_blocks, 2, 1 << 40, "blocks of the KV pool"),
        ("--block-size", question.block_size, 1, 1 << 16, "tokens of a block"),
        ("--max-model-len", question.max_model_len, 1, 1 << 30, "tokens of the longest request"),
        ("--max-new-tokens", question.max_new_tokens, 1, 1 << 26, "tokens that clients ask at most"),
        ("--warm-up", question.warm_up_s, 0, 1e9, "seconds, or auto"),
        ("--network-ms", 1e3 * question.network_s, 0, 3.6e6, "milliseconds"),
        ("--price", question.price_usd_per_gpu_hour, 1e-4, MAX_USD_PER_GPU_HOUR, "USD per GPU and hour"),
    )
    gbps = None if question.kv_link_bytes_per_s is None else question.kv_link_bytes_per_s / GBPS
    ranges += (
        ("--kv-link-gbps", gbps, 1e-3, 1e5, "Gbit/s between the replicas"),
        ("--kv-link-ms", 1e3 * question.kv_link_s, 0, 1e4, "milliseconds"),
    )
    if question.kv_link_s and gbps is None:
        raise InputError("a delay of no link", where="--kv-link-ms", hint="add --kv-link-gbps 400")
    for option, value, low, high, what in ranges:
        if value is not None and not low <= value <= high:
            raise InputError(
                f"{value:,.10g} is out of range", where=option, hint=f"{what}, {low:g} to {high:,.10g}"
            )
    if question.repeat > 1 and spec.trace is not None:
        raise InputError(
            "a trace is the same every time",
            where="--repeat, --trace",
            hint="leave --repeat out; --trace-repeat N plays the trace N times over",
        )
    expected = spec.requests or 0.0
    if spec.requests is None and spec.duration_s is not None and spec.request_per_s is not None:
        expected = spec.request_per_s * spec.duration_s
    check_size(expected, "--requests, --duration, --request-rate")


def check_size(requests: float, where: str) -> None:
    """Refuse more requests than a run should have, with the time and memory that they would take."""
    if requests <= MAX_SIMULATED:
        return
    hours, memory = requests * SECONDS_PER_REQUEST / 3600, requests * BYTES_PER_REQUEST / GIB
    raise InputError(
        f"{_large(requests)} requests would take about {_large(hours)} hours and {_large(memory)} GiB",
        where=where,
        hint=f"at most {MAX_SIMULATED:,} a run; percentiles settle long before that",
    )


def _large(number: float) -> str:
    return f"{number:,.0f}" if number < 1e12 else f"{number:.3g}"
