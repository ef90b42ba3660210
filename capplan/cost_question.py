"""The question of `capplan cost`, and what of it cannot be: slips of units above all."""

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from capplan.errors import InputError, did_you_mean, shown
from capplan.latency_question import DEFAULT_ISL, DEFAULT_OSL, MAX_TOKENS
from capplan.prices import MAX_USD_PER_GPU_HOUR
from capplan.specs import Parallelism, Term
from capplan.units import MONTH_HOURS

Way = Term | Literal["owned"]
WAYS: Final[tuple[Way, ...]] = (*get_args(Term), "owned")
MAX_MONTH_HOURS: Final = 744.0
MAX_GPUS: Final = 1_000_000
MIN_USD_PER_MILLION: Final = 0.001
MAX_USD_PER_MILLION: Final = 10_000.0
"""Prices of a million tokens outside these are prices of one token, or of a thousand."""
ASSUMED_SPOT_RESERVE: Final = 0.1
"""Spare spot capacity where none is asked: an assumption, no public figure is behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostQuestion:
    """What is asked.

    `gpus` is the whole fleet, and so are `concurrency`, `request_per_s` and `output_token_per_s`. With a
    model, speed is estimated under the load given, or with every replica full where none is given;
    `output_token_per_s` is a measured speed instead. `hours` of a month, a weekly `schedule`, or `diurnal`:
    the load in each hour of the day as a share of its peak. `utilization` is the part of that time with work.
    Prices of tokens are per million. Without `gpu`, `profile` is a file that brings its device.
    """

    gpu: str = ""
    gpus: int | None = None
    model: str | None = None
    precision: str = "auto"
    kv_dtype: str = "auto"
    isl: int | None = None
    osl: int | None = None
    concurrency: int | None = None
    request_per_s: float | None = None
    slo: str | None = None
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
    profile: str = "auto"
    online: bool = False
    output_token_per_s: float | None = None
    price_usd_per_gpu_hour: float | None = None
    term: Way = "on-demand"
    cloud: str | None = None
    region: str | None = None
    hours: float | None = None
    schedule: str | None = None
    diurnal: str | None = None
    utilization: float = 1.0
    spot_reserve: float = ASSUMED_SPOT_RESERVE
    own: Mapping[str, float] = field(default_factory=dict)
    watts: float | None = None
    grid_gco2_per_kwh: float | None = None
    api_price_input: float | None = None
    api_price_output: float | None = None
    users: int | None = None
    requests_per_user_day: float | None = None
    today: datetime.date | None = None

    @property
    def parallel(self) -> Parallelism:
        """How a replica is spread."""
        return Parallelism(tp=self.tp, pp=self.pp, dp=self.dp, ep=self.ep)

    @property
    def fleet_gpus(self) -> int:
        """GPUs of the fleet; one replica where the question does not say."""
        return self.parallel.gpus if self.gpus is None else self.gpus

    @property
    def replicas(self) -> int:
        """Replicas of the fleet."""
        return max(1, self.fleet_gpus // self.parallel.gpus)

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Prompt and output tokens of a request; None where nothing says."""
        if self.model is None and self.isl is None and self.osl is None:
            return None
        return self.isl or DEFAULT_ISL, self.osl or DEFAULT_OSL

    @property
    def day(self) -> datetime.date:
        """The day from which ages of prices are counted."""
        return self.today or datetime.date.today()


# Option, field, least, most, and what to write.
_RANGES: Final[tuple[tuple[str, str, float, float, str], ...]] = (
    ("--gpus", "gpus", 1, MAX_GPUS, "a whole number of GPUs"),
    ("--isl", "isl", 1, MAX_TOKENS, "prompt tokens of a request"),
    ("--osl", "osl", 1, MAX_TOKENS, "output tokens of a request"),
    ("--concurrency", "concurrency", 1, MAX_GPUS * 1000, "users of the fleet at once"),
    ("--request-rate", "request_per_s", 1e-9, 1e6, "requests per second of the fleet, above 0"),
    ("--output-token-per-s", "output_token_per_s", 1e-6, 1e12, "tokens per second of the fleet, above 0"),
    ("--price", "price_usd_per_gpu_hour", 1e-4, MAX_USD_PER_GPU_HOUR, "USD per GPU and hour, such as 2.49"),
    ("--hours", "hours", 1e-6, MAX_MONTH_HOURS, f"hours of a month, at most {MAX_MONTH_HOURS:g}"),
    ("--utilization", "utilization", 1e-6, 1, "the part of the time with work: 0.4 is 40 %"),
    ("--spot-reserve", "spot_reserve", 0, 10, "spare capacity as a fraction: 0.1 is 10 %"),
    ("--watts", "watts", 1, 1e5, "watts of one GPU under this load"),
    ("--grid-gco2-per-kwh", "grid_gco2_per_kwh", 0, 3000, "grams of CO2e per kWh"),
    ("--users", "users", 1, 10**12, "users of the fleet, at work or not"),
    ("--requests-per-user-day", "requests_per_user_day", 1e-9, 1e9, "requests a user makes a day"),
)
_PER_MILLION: Final = (
    ("--api-price-input", "api_price_input"),
    ("--api-price-output", "api_price_output"),
)


def check(question: CostQuestion) -> None:
    """Refuse values outside their range and options that contradict each other; InputError names them."""
    for option, name, low, high, hint in _RANGES:
        _within(option, getattr(question, name), low, high, hint)
    for option, name in _PER_MILLION:
        _per_million(option, getattr(question, name))
    if question.term not in WAYS:
        raise InputError(
            f"unknown term {shown(question.term)}",
            where="--term",
            hint=did_you_mean(str(question.term), WAYS, ", ".join(WAYS)),
        )
    given = [
        option
        for option, value in (
            ("--hours", question.hours),
            ("--schedule", question.schedule),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise InputError("hours given twice", where=", ".join(given), hint="give one of them")
    if question.price_usd_per_gpu_hour is not None and (question.cloud or question.region):
        raise InputError(
            "a price and a place to look one up", where="--price, --cloud, --region", hint="give one"
        )
    if question.term == "owned" and (question.price_usd_per_gpu_hour or question.cloud or question.region):
        raise InputError(
            "GPUs that are bought have no hourly price",
            where="--term owned",
            hint="--own purchase_usd_per_gpu=30000 sets what one costs",
        )
    if question.fleet_gpus % question.parallel.gpus:
        raise InputError(
            f"{question.fleet_gpus} GPUs are no whole number of replicas of {question.parallel.gpus}",
            where="--gpus, --tp, --pp, --dp",
            hint=f"a multiple of {question.parallel.gpus}",
        )
    _check_speed(question)


def _check_speed(question: CostQuestion) -> None:
    """One source of the speed, and what needs a speed."""
    speeds = {
        "--concurrency": question.concurrency,
        "--request-rate": question.request_per_s,
        "--output-token-per-s": question.output_token_per_s,
    }
    given = [option for option, value in speeds.items() if value is not None]
    if len(given) > 1:
        raise InputError("more than one load", where=", ".join(given), hint="give one of them")
    if question.request_per_s is not None and question.utilization != 1.0:
        raise InputError(
            "a request rate says how busy the fleet is",
            where="--request-rate, --utilization",
            hint="give one of them; --schedule or --diurnal say when",
        )
    if question.model is None:
        needs = [
            option
            for option, value in (
                ("--concurrency", question.concurrency),
                ("--request-rate", question.request_per_s),
                ("--slo", question.slo),
            )
            if value is not None
        ]
        if question.gpu and question.profile != "auto":
            raise InputError(
                "a calibration of step times, and no model whose steps they are",
                where="--profile, --gpu",
                hint="add --model; or leave --gpu out, and the profile's own device is priced",
            )
        if needs:
            raise InputError("a load without a model", where=", ".join(needs), hint="add --model")
    if question.output_token_per_s is not None and question.slo is not None:
        raise InputError(
            "limits on an estimate, and a measured speed",
            where="--output-token-per-s, --slo",
            hint="give one of them",
        )
    has_speed = question.model is not None or question.output_token_per_s is not None
    for option, value in (
        ("--api-price-input", question.api_price_input),
        ("--api-price-output", question.api_price_output),
        ("--requests-per-user-day", question.requests_per_user_day),
    ):
        if value is not None and not has_speed:
            raise InputError(
                f"{option} needs a speed", where=option, hint="add --model, or --output-token-per-s"
            )
    if question.lengths is None:
        for option, value in (
            ("--api-price-input", question.api_price_input),
            ("--requests-per-user-day", question.requests_per_user_day),
        ):
            if value is not None:
                raise InputError(
                    f"{option} needs the lengths of a request", where=option, hint="add --isl and --osl"
                )
    if question.api_price_input is not None and question.api_price_output is None:
        raise InputError(
            "an API's price of prompts alone", where="--api-price-input", hint="add --api-price-output"
        )


def _within(option: str, value: Any, low: float, high: float, hint: str) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InputError(f"{value:g} cannot be", where=option, hint=hint)


def _per_million(option: str, value: float | None) -> None:
    """Prices of tokens are per million: a tiny one is per token, and a factor of a million off."""
    if value is None or MIN_USD_PER_MILLION <= value <= MAX_USD_PER_MILLION:
        return
    hint = "USD per million tokens, such as 0.60"
    if 0 < value < MIN_USD_PER_MILLION:
        hint = f"USD per million tokens: {value:g} a token is {value * 1e6:g} a million"
    raise InputError(f"{value:g} USD per million tokens", where=option, hint=hint)


def billed_hours(question: CostQuestion) -> float:
    """Hours of a month in which the GPUs are wanted."""
    if question.schedule is not None:
        from capplan.schedule import month_hours

        return month_hours(question.schedule)
    return MONTH_HOURS if question.hours is None else question.hours
