"""The question of `capplan latency`, and what of it contradicts itself."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from capplan.errors import InputError, did_you_mean, shown
from capplan.formulas import speculative
from capplan.specs import Gpu, Model, Parallelism

MAX_TOKENS: Final = 1 << 26
MAX_REQUESTS: Final = 1 << 24
MAX_RANKS: Final = 1024
MIN_RATE: Final = 1e-6
MAX_RATE: Final = 1e6
"""Requests per second: from one in eleven days."""
DEFAULT_ISL: Final = 1024
DEFAULT_OSL: Final = 256
MAX_DRAFTED: Final = 64
MAX_SKEW: Final = 1.2
"""The most uneven routing that the kernel tables measured."""

Lengths = Literal["varied", "equal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuestion:
    """What is asked.

    Of the four loads one is given: `concurrency` (users that each send their next request when the last is
    answered), `request_per_s` (Poisson arrivals), `requests` (all at once, each joining as soon as there is
    room), `batch` (one batch from start to end); else one user. `lengths`: whether `isl` and `osl` are means
    of requests that differ, or every request's own, so that users move in step.

    `speculative_tokens` are guessed a step, by `draft_model` ("mtp": the model's own layers; None: n-grams
    of the text), and each is accepted by `acceptance_rate`, given those before it. `expert_skew`: 0 routes
    tokens evenly over experts; 1.01 and 1.2 are the routings that kernel tables call so, whose tokens per
    expert are drawn from a power law with that exponent.
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
    max_model_len: int | None = None
    block_size: int | None = None
    prefix_shared: int = 0
    lengths: Lengths = "varied"
    speculative_tokens: int | None = None
    acceptance_rate: float | None = None
    draft_model: str | None = None
    expert_skew: float = 0.0
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
    def tokens_per_step(self) -> float:
        """Tokens a step adds to a sequence: more than one where drafts are accepted."""
        if self.speculative_tokens is None or self.acceptance_rate is None:
            return 1.0
        return speculative.tokens_per_step(
            drafted=self.speculative_tokens, acceptance_rate=self.acceptance_rate
        )

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
        raise InputError("more than one load at once", where=", ".join(given), hint="give one of them")
    for name, value, most in (
        ("--isl", question.isl, MAX_TOKENS),
        ("--osl", question.osl, MAX_TOKENS),
        ("--concurrency", question.concurrency, MAX_REQUESTS),
        ("--requests", question.requests, MAX_REQUESTS),
        ("--batch", question.batch, MAX_REQUESTS),
        ("--tp", question.tp, MAX_RANKS),
        ("--pp", question.pp, MAX_RANKS),
        ("--dp", question.dp, MAX_RANKS),
        ("--ep", question.ep, MAX_RANKS),
    ):
        if value is not None and not 1 <= value <= most:
            raise InputError(
                f"{value:,} is outside 1 to {most:,}", where=name, hint="give a whole number there"
            )
    rate = question.request_per_s
    if rate is not None and not MIN_RATE <= rate <= MAX_RATE:
        raise InputError(
            f"{f'{rate:,.0f}' if rate >= 1 else f'{rate:g}'} requests/s",
            where="--request-rate",
            hint=f"{MIN_RATE:f} to {MAX_RATE:,.0f}; --requests N for all at once",
        )
    if not 0 <= question.prefix_shared < question.isl:
        raise InputError(
            f"{question.prefix_shared:,} shared tokens of a prompt of {question.isl:,}",
            where="--prefix-shared",
            hint="0 or more, fewer than --isl: the last token is always computed",
        )
    if not 0 <= question.network_s < 3600:
        raise InputError(
            f"a network delay of {1e3 * question.network_s:,.10g} ms",
            where="--network-ms",
            hint="0 to 3,600,000 milliseconds",
        )
    if question.lengths not in get_args(Lengths):
        raise InputError(
            f"unknown lengths {shown(question.lengths)}",
            where="--lengths",
            hint=did_you_mean(question.lengths, get_args(Lengths), "varied or equal"),
        )
    _check_speculation(question)
    if not 0 <= question.expert_skew <= MAX_SKEW:
        raise InputError(
            f"a skew of {question.expert_skew:g}",
            where="--expert-skew",
            hint=f"0 (even) to {MAX_SKEW:g}, the most uneven routing that was measured",
        )


def _check_speculation(question: LatencyQuestion) -> None:
    """Speculative decoding is asked for whole: how many tokens, and how many of them are accepted."""
    drafted, rate = question.speculative_tokens, question.acceptance_rate
    if drafted is None:
        for name, value in (("--acceptance-rate", rate), ("--draft-model", question.draft_model)):
            if value is not None:
                raise InputError(
                    "how many tokens are drafted a step?", where=name, hint="add --speculative-tokens 3"
                )
        return
    if not 1 <= drafted <= MAX_DRAFTED:
        raise InputError(
            f"{drafted:,} drafted tokens",
            where="--speculative-tokens",
            hint=f"1 to {MAX_DRAFTED} a step",
        )
    if rate is None:
        raise InputError(
            "how many of the drafted tokens are accepted?",
            where="--speculative-tokens",
            hint="add --acceptance-rate 0.7: the chance of each, given those before it",
        )
    if not 0 <= rate <= 1:
        raise InputError(f"a chance of {rate:g}", where="--acceptance-rate", hint="0 to 1, such as 0.7")
    if question.pp > 1:
        raise InputError(
            "drafts over pipeline stages are not modelled",
            where="--speculative-tokens, --pp",
            hint="--tp shares each layer instead",
        )


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
