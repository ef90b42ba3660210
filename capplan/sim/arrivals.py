"""When requests come: Poisson, gamma, constant, all at once, diurnal; and the time users think.

Times are whole nanoseconds, so that the last bit of a machine's log() does not reach a result.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, repeat
from typing import Final, Protocol

from capplan.errors import InputError
from capplan.latency_question import MAX_RATE, MIN_RATE
from capplan.sim.spelled import finite, key_values, split_kind
from capplan.units import HOUR_S

NS: Final = 1_000_000_000
DAY_HOURS: Final = 24
DAY_S: Final = DAY_HOURS * HOUR_S
MAX_THINK_S: Final = 1e6
"""Eleven days."""
FORMS: Final[Mapping[str, str]] = {
    "poisson": "poisson",
    "gamma": "gamma:burstiness=0.5",
    "constant": "constant",
    "at-once": "at-once",
    "diurnal": "diurnal:swing=0.8,period_s=86400",
    "hourly": "hourly:" + ",".join(["0.5"] * 8 + ["1"] * 4 + ["2"] * 8 + ["1"] * 4),
}
THINK_FORMS: Final[Mapping[str, str]] = {"constant": "constant:5", "exponential": "exponential:5"}


class Arrivals(Protocol):
    """A process of arrivals; endless."""

    @property
    def request_per_s(self) -> float:
        """Its mean rate; inf for all at once."""
        ...

    def times(self, rng: random.Random) -> Iterator[float]:
        """Moments in s, from 0 up, never backwards."""
        ...

    def describe(self) -> str:
        """The process in words."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean 1 / request_per_s."""

    request_per_s: float

    def times(self, rng: random.Random) -> Iterator[float]:
        draw, log, gap_ns, now_ns = rng.random, math.log, NS / self.request_per_s, 0
        while True:
            now_ns += int(0.5 - log(1.0 - draw()) * gap_ns)
            yield now_ns / NS

    def describe(self) -> str:
        return f"Poisson, {self.request_per_s:g} a second"


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps of mean 1 / request_per_s and shape `burstiness`: 1 is Poisson, below it bursts.

    The gaps' coefficient of variation is 1 / √burstiness. As `vllm bench serve --burstiness`, without its
    stretching of a finished draw to the exact mean rate.
    """

    request_per_s: float
    burstiness: float

    def times(self, rng: random.Random) -> Iterator[float]:
        draw, shape, now_ns = rng.gammavariate, self.burstiness, 0
        scale_ns = NS / (self.request_per_s * shape)
        while True:
            now_ns += int(draw(shape, scale_ns) + 0.5)
            yield now_ns / NS

    def describe(self) -> str:
        return f"gamma of burstiness {self.burstiness:g}, {self.request_per_s:g} a second"


@dataclass(frozen=True, slots=True)
class Evenly:
    """One request every 1 / request_per_s, the first at 0."""

    request_per_s: float

    def times(self, rng: random.Random) -> Iterator[float]:
        gap_ns = NS / self.request_per_s
        return (int(number * gap_ns + 0.5) / NS for number in count())

    def describe(self) -> str:
        return f"evenly, {self.request_per_s:g} a second"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Every request at 0: a rate of inf."""

    @property
    def request_per_s(self) -> float:
        return math.inf

    def times(self, rng: random.Random) -> Iterator[float]:
        return repeat(0.0)

    def describe(self) -> str:
        return "all at once"


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson arrivals whose rate swings: rate(t) = request_per_s · (1 − swing · cos(2π·t / period_s)).

    It starts at the trough; the mean over whole periods is request_per_s, the peak (1 + swing) times it.
    """

    request_per_s: float
    swing: float
    period_s: float = DAY_S

    def times(self, rng: random.Random) -> Iterator[float]:
        swing, turn_per_s = self.swing, 2 * math.pi / self.period_s
        return _thinned(
            rng, self.request_per_s, 1 + swing, lambda now_s: 1 - swing * math.cos(turn_per_s * now_s)
        )

    def describe(self) -> str:
        return (
            f"diurnal, {self.request_per_s:g} a second on average over {self.period_s:g} s, "
            f"from {self.request_per_s * (1 - self.swing):g} to {self.request_per_s * (1 + self.swing):g}"
        )


@dataclass(frozen=True, slots=True)
class Hourly:
    """Poisson arrivals at request_per_s × a factor for each hour of the day, from hour 0 at time 0.

    Factors are divided by their mean, so that request_per_s is the mean over a day.
    """

    request_per_s: float
    factors: tuple[float, ...]

    def times(self, rng: random.Random) -> Iterator[float]:
        mean = math.fsum(self.factors) / DAY_HOURS
        factors = [factor / mean for factor in self.factors]
        return _thinned(
            rng, self.request_per_s, max(factors), lambda now_s: factors[int(now_s / HOUR_S) % DAY_HOURS]
        )

    def describe(self) -> str:
        mean = math.fsum(self.factors) / DAY_HOURS
        low, high = (self.request_per_s * factor / mean for factor in (min(self.factors), max(self.factors)))
        return f"by hour, {self.request_per_s:g} a second on average over a day, from {low:g} to {high:g}"


def _thinned(
    rng: random.Random, request_per_s: float, highest: float, factor_at: Callable[[float], float]
) -> Iterator[float]:
    """A Poisson process of changing rate: candidates at the highest rate, kept with chance rate / highest.

    Source: Lewis and Shedler, "Simulation of nonhomogeneous Poisson processes by thinning", 1979.
    """
    draw = rng.random
    for now_s in Poisson(request_per_s * highest).times(rng):
        if draw() * highest < factor_at(now_s):
            yield now_s


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """The pause between an answer and a user's next request, in s: always the mean, or exponential."""

    mean_s: float
    exponential: bool = False

    def sampler(self, rng: random.Random) -> Callable[[], float]:
        """A function that draws one pause, in s."""
        if not self.exponential:
            return lambda: self.mean_s
        draw, log, mean_ns = rng.random, math.log, self.mean_s * NS
        return lambda: int(0.5 - log(1.0 - draw()) * mean_ns) / NS

    def describe(self) -> str:
        """The pause in words."""
        return f"{self.mean_s:g} s" + (" on average, exponential" if self.exponential else "")


def user_starts(users: int, ramp_up_s: float) -> Iterator[float]:
    """When each of `users` begins: spread evenly over `ramp_up_s`, the first at 0."""
    return (ramp_up_s * user / users for user in range(users))


def parse_arrivals(text: str, request_per_s: float, *, where: str) -> Arrivals:
    """The process that `text` spells (FORMS) at a mean rate; a rate of inf is all at once in any case."""
    kind, rest = split_kind(text, FORMS, where)
    example = FORMS[kind]
    if kind in ("poisson", "constant", "at-once") and rest:
        raise InputError(f"{kind} takes no options, got {rest!r}", where=where, hint=f"as in {example}")
    if kind == "at-once" or request_per_s == math.inf:
        return AtOnce()
    if not MIN_RATE <= request_per_s <= MAX_RATE:
        hint = f"from {MIN_RATE:g} to {MAX_RATE:,.0f}, or inf for all at once"
        raise InputError(f"{request_per_s:g} requests a second", where=where, hint=hint)
    if kind == "poisson":
        return Poisson(request_per_s)
    if kind == "constant":
        return Evenly(request_per_s)
    if kind == "gamma":
        values = key_values(rest, ("burstiness",), where, example)
        return Gamma(request_per_s, _in_range(values, "burstiness", 0.001, 1e6, where, example))
    if kind == "diurnal":
        values = {"period_s": float(DAY_S)} | key_values(rest, ("swing", "period_s"), where, example)
        swing = _in_range(values, "swing", 0, 1, where, example)
        return Diurnal(request_per_s, swing, _in_range(values, "period_s", 1e-3, 1e9, where, example))
    factors = tuple(finite(part, "a factor", where, example) for part in rest.split(","))
    if len(factors) != DAY_HOURS or not 0 < sum(factors) < math.inf:
        raise InputError(
            f"{len(factors)} factors of sum {sum(factors):g}, not {DAY_HOURS} of which one is above 0",
            where=where,
            hint=f"as in {example}",
        )
    return Hourly(request_per_s, factors)


def parse_think_time(text: str | float, *, where: str) -> ThinkTime:
    """A pause from its spelling: `5`, `constant:5`, `exponential:5` (seconds)."""
    spelling = str(text).strip()
    kind, rest = "constant", spelling
    if not spelling[:1].isdigit() and spelling[:1] not in ("-", "+", "."):
        kind, rest = split_kind(spelling, THINK_FORMS, where)
    seconds = finite(rest, "the pause", where, THINK_FORMS[kind])
    if seconds > MAX_THINK_S:
        raise InputError(f"a pause of {seconds:g} s", where=where, hint=f"at most {MAX_THINK_S:,.0f} s")
    return ThinkTime(seconds, exponential=kind == "exponential")


def _in_range(
    values: Mapping[str, float], key: str, low: float, high: float, where: str, example: str
) -> float:
    if key not in values:
        raise InputError(f"{key} is missing", where=where, hint=f"as in {example}")
    if not low <= values[key] <= high:
        hint = f"from {low:g} to {high:g}, as in {example}"
        raise InputError(f"{key} is {values[key]:g}", where=where, hint=hint)
    return values[key]
