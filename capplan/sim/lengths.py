"""Prompt and output lengths, in tokens: constant, uniform, lognormal, histogram; and how they are spelled."""

import math
import random
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, Protocol

from capplan.errors import InputError, shown
from capplan.latency_question import MAX_TOKENS
from capplan.sim.spelled import finite, key_values, split_kind, whole

FORMS: Final[Mapping[str, str]] = {
    "constant": "constant:1024",
    "uniform": "uniform:100-2000",
    "lognormal": "lognormal:mean=1000,cv=1.2,max=8192",
    "hist": "hist:128:0.7,2048:0.3 or hist:FILE",
}
MAX_BINS: Final = 1_000_000


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, all at least 1."""

    @property
    def mean_tokens(self) -> float:
        """Mean of what is drawn, clipping included."""
        ...

    @property
    def max_tokens(self) -> int:
        """No draw is longer."""
        ...

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        """A function that draws one length from `rng`'s stream."""
        ...

    def describe(self) -> str:
        """The distribution in words, with what clipping does to it."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Every length the same."""

    tokens: int

    @property
    def mean_tokens(self) -> float:
        return float(self.tokens)

    @property
    def max_tokens(self) -> int:
        return self.tokens

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        tokens = self.tokens
        return lambda: tokens

    def describe(self) -> str:
        return f"{self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from low to high, both included, equally likely."""

    low: int
    high: int

    @property
    def mean_tokens(self) -> float:
        return (self.low + self.high) / 2

    @property
    def max_tokens(self) -> int:
        return self.high

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        draw, low, choices = rng.random, self.low, self.high - self.low + 1
        return lambda: low + int(draw() * choices)

    def describe(self) -> str:
        return f"uniform, {self.low} to {self.high} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """exp(N(mu, sigma²)), rounded; clipped, not redrawn: below `low` it is `low`, above `high` `high`."""

    mu: float
    sigma: float
    low: int = 1
    high: int = MAX_TOKENS

    @property
    def mean_tokens(self) -> float:
        """Mean after clipping.

            low·P(X < low) + exp(mu + sigma²/2)·(Φ(b − sigma) − Φ(a − sigma)) + high·P(X > high)
            a = (ln low − mu) / sigma,  b = (ln high − mu) / sigma

        Rounding to whole tokens is left out: it is even.
        """
        a = (math.log(self.low) - self.mu) / self.sigma
        b = (math.log(self.high) - self.mu) / self.sigma
        between = _normal_cdf(b - self.sigma) - _normal_cdf(a - self.sigma)
        return self.low * _normal_cdf(a) + self.unclipped_mean * between + self.high * _normal_cdf(-b)

    @property
    def unclipped_mean(self) -> float:
        """exp(mu + sigma²/2)"""
        return math.exp(self.mu + self.sigma**2 / 2)

    @property
    def max_tokens(self) -> int:
        return self.high

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        draw, mu, sigma = rng.normalvariate, self.mu, self.sigma
        # Clipped before exp: a far tail must not overflow it.
        low, high, highest = self.low, self.high, math.log(self.high)

        def sample() -> int:
            exponent = draw(mu, sigma)
            if exponent >= highest:
                return high
            tokens = int(math.exp(exponent) + 0.5)
            return tokens if tokens > low else low

        return sample

    def describe(self) -> str:
        cv = math.sqrt(math.expm1(self.sigma**2))
        return (
            f"lognormal, mean {self.unclipped_mean:.6g}, p50 {math.exp(self.mu):.6g}, cv {cv:.3g}, "
            f"clipped to {self.low}..{self.high} tokens (mean {self.mean_tokens:.6g} after clipping)"
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """Given values with given weights (of any sum)."""

    values: tuple[int, ...]
    weights: tuple[float, ...]
    source: str = "given inline"

    @property
    def mean_tokens(self) -> float:
        weighted = math.fsum(value * weight for value, weight in zip(self.values, self.weights, strict=True))
        return weighted / math.fsum(self.weights)

    @property
    def max_tokens(self) -> int:
        return max(value for value, weight in zip(self.values, self.weights, strict=True) if weight)

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        draw, values = rng.random, self.values
        upto = list(accumulate(self.weights))
        # A draw may round up to the total: it belongs to the last value that has a weight.
        last = bisect(upto, math.nextafter(upto[-1], 0))
        total = upto[-1]
        return lambda: values[min(bisect(upto, draw() * total), last)]

    def describe(self) -> str:
        return f"histogram of {len(self.values)} values ({self.source}), mean {self.mean_tokens:.6g} tokens"


def parse_lengths(text: str | int, *, where: str) -> Lengths:
    """A distribution from its spelling; `where` names the option or key for an error.

    `1024`, `constant:1024`, `uniform:100-2000`, `lognormal:mean=1000,cv=1.2` or `lognormal:mean=1000,p50=700`
    (with min= and max=, at which it is clipped), `hist:128:0.7,2048:0.3`, `hist:FILE` (a line a value:
    `tokens` or `tokens,weight`).
    """
    spelling = str(text).strip()
    if spelling[:1].isdigit() or spelling[:1] in ("-", "+", "."):
        return Constant(_tokens(spelling, "the length", where, "1024"))
    kind, rest = split_kind(spelling, FORMS, where)
    example = FORMS[kind]
    if kind == "constant":
        return Constant(_tokens(rest, "the length", where, example))
    if kind == "uniform":
        low_text, dash, high_text = rest.partition("-")
        if not dash:
            raise InputError(f"{shown(rest)} is no range", where=where, hint=f"as in {example}")
        low, high = (_tokens(part, "an end of the range", where, example) for part in (low_text, high_text))
        if low > high:
            raise InputError(f"the range {low}-{high} runs backwards", where=where, hint=f"as in {example}")
        return Uniform(low, high)
    if kind == "lognormal":
        return _lognormal(key_values(rest, ("mean", "p50", "cv", "min", "max"), where, example), where)
    return _histogram(rest, where)


def lognormal_of_cv(*, mean: float, cv: float, low: int = 1, high: int = MAX_TOKENS) -> LogNormal:
    """sigma² = ln(1 + cv²), mu = ln(mean) − sigma²/2; mean 1000, cv 1.2: sigma 0.945, median 640."""
    sigma_squared = math.log1p(cv**2)
    return LogNormal(
        mu=math.log(mean) - sigma_squared / 2, sigma=math.sqrt(sigma_squared), low=low, high=high
    )


def lognormal_of_p50(*, mean: float, p50: float, low: int = 1, high: int = MAX_TOKENS) -> LogNormal:
    """mu = ln(p50), sigma² = 2·ln(mean / p50); the mean lies above the median."""
    return LogNormal(mu=math.log(p50), sigma=math.sqrt(2 * math.log(mean / p50)), low=low, high=high)


def _lognormal(values: dict[str, float], where: str) -> LogNormal:
    example = FORMS["lognormal"]
    low = _tokens(str(values.get("min", 1)), "min", where, example)
    high = _tokens(str(values.get("max", MAX_TOKENS)), "max", where, example)
    mean, p50, cv = values.get("mean"), values.get("p50"), values.get("cv")
    if mean is None or (p50 is None) == (cv is None):
        raise InputError(
            "a lognormal is given by its mean and one of p50 and cv", where=where, hint=f"as in {example}"
        )
    if low > high:
        raise InputError(f"min {low} is above max {high}", where=where, hint=f"as in {example}")
    if not 1 <= mean <= MAX_TOKENS:
        raise InputError(f"mean {mean:g} is not in 1..{MAX_TOKENS:,}", where=where, hint=f"as in {example}")
    if cv is not None:
        if not 0 < cv <= 100:
            hint = f"a constant is spelled {mean:g}; otherwise as in {example}"
            raise InputError(f"cv {cv:g} is not above 0 and at most 100", where=where, hint=hint)
        return lognormal_of_cv(mean=mean, cv=cv, low=low, high=high)
    assert p50 is not None
    if not 0 < p50 < mean:
        hint = f"a lognormal's median lies below its mean; a constant is spelled {mean:g}"
        raise InputError(f"p50 {p50:g} is not between 0 and mean {mean:g}", where=where, hint=hint)
    return lognormal_of_p50(mean=mean, p50=p50, low=low, high=high)


def _histogram(rest: str, where: str) -> Histogram:
    parts = [part.partition(":") for part in rest.split(",")]
    if all(colon and value.strip().isdigit() for value, colon, _ in parts):
        rows = [(value, weight, where) for value, _, weight in parts]
        return _histogram_of(rows, where, "given inline")
    if not rest:
        raise InputError("a histogram of nothing", where=where, hint=f"as in {FORMS['hist']}")
    path = Path(rest)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text in UTF-8"
        hint = f"a file with a line a value, `tokens` or `tokens,weight`; or inline, as in {FORMS['hist']}"
        raise InputError(f"{shown(rest)} cannot be read: {reason}", where=where, hint=hint) from None
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        value, _, weight = line.partition(",")
        if not line or (number == 1 and value.strip().isidentifier()):
            continue  # a blank, a comment or the header
        rows.append((value, weight.strip() or "1", f"{path}, line {number}"))
    return _histogram_of(rows, str(path), path.name)


def _histogram_of(rows: list[tuple[str, str, str]], where: str, source: str) -> Histogram:
    example = FORMS["hist"]
    if len(rows) > MAX_BINS:
        hint = f"at most {MAX_BINS:,}: bin the values"
        raise InputError(f"a histogram of {len(rows):,} values", where=where, hint=hint)
    values = tuple(_tokens(value, "a value", at, example) for value, _, at in rows)
    weights = tuple(finite(weight, "a weight", at, example) for _, weight, at in rows)
    if not 0 < sum(weights) < math.inf:
        hint = f"one weight above 0 at least, as in {example}"
        raise InputError("a histogram without weight", where=where, hint=hint)
    return Histogram(values, weights, source)


def _tokens(text: str, name: str, where: str, example: str) -> int:
    return whole(text, name, where, example, low=1, high=MAX_TOKENS)


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
