"""The question of `capplan latency`, and what of it contradicts itself."""

from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError
from capplan.specs import Gpu, Model, Parallelism

MAX_TOKENS: Final = 1 << 26
MAX_REQUESTS: Final = 1 << 24
DEFAULT_ISL: Final = 1024
DEFAULT_OSL: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuestion:
    """What is asked.

    Of the four loads one is given: `concurrency` (users that each send their next request when the last is
    answered), `request_per_s` (Poisson arrivals), `requests` (all at once, each joining as soon as there is
    room), `batch` (one batch from start to end); else one user.
    """

    model: str
    gpu: str
    precision: str = "auto"
    kv_dtype: str = "auto"
    isl: int = DEFAULT_ISL
    osl: int = DEFAULT_OSL
    concurrency: int | None = None
    request_per_s: float | None = None
    requests: int | None = None
    batch: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    engine: str = "vllm"
    engine_version: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_shared: int = 0
    network_s: float = 0.0
    slo: str | None = None
    profile: str = "auto"
    bounds: bool = False
    online: bool = False

    @property
    def parallel(self) -> Parallelism:
        """How a replica is spread."""
        return Parallelism(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep)

    @property
    def load(self) -> str:
        """The load in words."""
        if self.request_per_s is not None:
            return f"{self.request_per_s:g} requests/s (Poisson)"
        if self.requests is not None:
            return f"{self.requests:,} requests at once"
        if self.batch is not None:
            return f"one batch of {self.batch:,}"
        users = self.concurrency or 1
        return f"{users:,} user{'s' if users > 1 else ''}, each with one request at a time"


def check(question: LatencyQuestion) -> None:
    """Refuse values outside their range and loads that contradict each other; InputError names the option."""
    given = [
        name
        for name, value in (
            ("--concurrency", question.concurrency),
            ("--request-rate", question.request_per_s),
            ("--requests", question.requests),
            ("--batch", question.batch),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InputError("more than one load", where=", ".join(given), hint="give one of them")
    for name, value, most in (
        ("--isl", question.isl, MAX_TOKENS),
        ("--osl", question.osl, MAX_TOKENS),
        ("--concurrency", question.concurrency, MAX_REQUESTS),
        ("--requests", question.requests, MAX_REQUESTS),
        ("--batch", question.batch, MAX_REQUESTS),
    ):
        if value is not None and not 1 <= value <= most:
            raise InputError(
                f"{value} is outside 1 to {most:,}", where=name, hint="give a whole number there"
            )
    rate = question.request_per_s
    if rate is not None and not 0 < rate <= 1e6:
        raise InputError(
            f"{rate:g} requests/s", where="--request-rate", hint="above 0; --requests N for all at once"
        )
    if not 0 <= question.prefix_shared < question.isl:
        raise InputError(
            f"{question.prefix_shared:,} shared tokens of a prompt of {question.isl:,}",
            where="--prefix-shared",
            hint="fewer than --isl: the last token is always computed",
        )
    if not 0 <= question.network_s < 3600:
        raise InputError("no network delay", where="--network-ms", hint="milliseconds, 0 or more")


def check_subject(question: LatencyQuestion, model: Model, gpu: Gpu) -> None:
    """Refuse contexts beyond the model's and layouts beyond the node's."""
    longest = model.max_context
    if longest is not None and question.isl + question.osl > longest:
        raise InputError(
            f"{question.isl:,} + {question.osl:,} tokens, and {model.name} takes {longest:,}",
            where="--isl, --osl",
            hint="shorten the prompt or the answer",
        )
    node = max(gpu.scaleup_domain or 0, gpu.max_gpus_per_node or 0) or None
    ranks = question.tp * question.dp
    if node is not None and ranks > node:
        raise InputError(
            f"{ranks} GPUs share each layer, and {gpu.name} joins at most {node} by its fast links",
            where="--tp, --dp",
            hint=f"tp × dp up to {node}, and --pp across nodes",
        )
    spread = question.tp * question.dp
    if question.ep > 1 and spread % question.ep:
        raise InputError(
            f"experts over {question.ep} groups of {spread} GPUs",
            where="--ep",
            hint=f"a divisor of tp × dp = {spread}",
        )
