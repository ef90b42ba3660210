"""The closed forms of `capplan latency` against the simulation of the same replica under the same load.

    python -m tests.accuracy.closed_form          (a table; --all: every case; minutes)

Both read one step table, so that what differs is the queue, the batch and the prompts between decode steps.
Closed loops start with all users at once and make ten requests a user, as `latency` takes them to, on average
over enough runs. Lengths are equal, or outputs are exponential, the law that `latency` has in mind.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

from capplan import latency_estimate
from capplan.formulas.serving import Served
from capplan.latency_question import LatencyQuestion
from capplan.sim.summary import Spread
from capplan.simulate_estimate import simulate

WITHIN: Final = 0.10
FIGURES: Final = ("TPOT", "TTFT", "E2E", "tokens/s")
REPLICAS: Final = (("8b", "h100", 1), ("8b", "l40s", 1), ("70b", "h100", 4), ("qwen3-30b-a3b", "h100", 1))
"""Model, GPU, tensor parallelism."""
SHAPES: Final = ((128, 128), (1024, 256), (6000, 120), (256, 1000))
"""Prompt and output tokens."""
USERS: Final = (1, 8, 32, 128)
UTILIZATIONS: Final = (0.3, 0.6, 0.85)
BURSTS: Final = (64, 1024)
REQUESTS_PER_USER: Final = 10
OPEN_REQUESTS: Final = 1500
OPEN_RUNS: Final = 3
MOST_REQUESTS: Final = 8000
WINDOWS: Final = 40
"""Times that a request takes, in an open load."""
LEAST_REQUESTS: Final = 600
"""Of all runs of a case together."""
QUANTILES: Final = 40
"""Lengths that stand for an exponential law, all as likely."""
LONGEST: Final = 16384

Lengths = Literal["equal", "varied"]
Load = tuple[str, float]
"""("users", 8), ("utilisation", 0.6) or ("at once", 64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A replica under a load."""

    model: str
    gpu: str
    tp: int
    isl: int
    osl: int
    lengths: Lengths
    load: Load

    @property
    def name(self) -> str:
        """Short, for a line."""
        kind, amount = self.load
        return (
            f"{self.model} on {self.tp} × {self.gpu}, {self.isl}/{self.osl} {self.lengths}, {amount:g} {kind}"
        )

    @property
    def replica(self) -> dict[str, Any]:
        """The fields that both commands know."""
        return {"model": self.model, "gpu": self.gpu, "tp": self.tp, "max_model_len": LONGEST}


def cases(replicas: Iterable[tuple[str, str, int]] = REPLICAS) -> Iterator[Case]:
    """The grid."""
    loads: list[Load] = [("users", users) for users in USERS]
    loads += [("utilisation", use) for use in UTILIZATIONS]
    loads += [("at once", requests) for requests in BURSTS]
    kinds: tuple[Lengths, Lengths] = ("equal", "varied")
    for model, gpu, tp in replicas:
        for isl, osl in SHAPES:
            for lengths in kinds:
                for load in loads:
                    yield Case(model=model, gpu=gpu, tp=tp, isl=isl, osl=osl, lengths=lengths, load=load)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A figure of a case: in closed form and simulated."""

    case: Case
    figure: str
    closed: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error of the closed form, with its sign."""
        return self.closed / self.simulated - 1


def served(case: Case) -> tuple[Served, float | None]:
    """What `latency` says, and the rate of an open load."""
    common: dict[str, Any] = {**case.replica, "isl": case.isl, "osl": case.osl, "lengths": case.lengths}
    kind, amount = case.load
    rate = None
    if kind == "users":
        question = LatencyQuestion(**common, concurrency=int(amount))
    elif kind == "at once":
        question = LatencyQuestion(**common, requests=int(amount))
    else:
        idle = latency_estimate.figures(LatencyQuestion(**common, request_per_s=1e-3)).served
        assert idle is not None
        rate = amount * idle.stable_request_per_s
        question = LatencyQuestion(**common, request_per_s=rate)
    made = latency_estimate.figures(question).served
    assert made is not None
    return made, rate


def pairs(case: Case) -> list[Pair]:
    """Every figure that both have."""
    closed, rate = served(case)
    kind, amount = case.load
    enough = min(round(WINDOWS * (rate or 0.0) * closed.e2e_s), MOST_REQUESTS)
    load: dict[str, Any] = {
        "request_per_s": rate,
        "requests": max(OPEN_REQUESTS, enough),
        # A tenth of it.
        "warm_up_s": max(OPEN_REQUESTS, enough) / 10 / (rate or 1.0),
    }
    if kind == "users":
        load = {"concurrency": int(amount), "requests": int(amount) * REQUESTS_PER_USER, "warm_up_s": 0.0}
    elif kind == "at once":
        load = {"request_per_s": math.inf, "requests": int(amount), "warm_up_s": 0.0}
    osl = exponential(case.osl) if case.lengths == "varied" else case.osl
    few = -(-LEAST_REQUESTS // load["requests"])
    runs = [
        simulate(**case.replica, **load, isl=case.isl, osl=osl, seed=seed).summary
        for seed in range(max(OPEN_RUNS if kind == "utilisation" else 1, few))
    ]
    means = {name: _mean(run.spreads[name] for run in runs) for name in ("tpot_s", "ttft_s", "e2e_s")}
    # A burst is over with its last answer; a loop is measured until its last request comes.
    made = [run.output_tokens / run.end_s if kind == "at once" else run.output_token_per_s for run in runs]
    rate_of_tokens = sum(made) / len(made)
    values = {
        "TPOT": (closed.tpot_s, means.get("tpot_s")),
        "TTFT": (closed.ttft_s, means.get("ttft_s")),
        "E2E": (closed.e2e_s, means.get("e2e_s")),
        "tokens/s": (closed.output_token_per_s, rate_of_tokens),
    }
    return [
        Pair(case=case, figure=figure, closed=ours, simulated=theirs)
        for figure, (ours, theirs) in values.items()
        if ours is not None and theirs is not None
    ]


def _mean(spreads: Iterable[Spread | None]) -> float | None:
    means = [spread.mean for spread in spreads if spread is not None]
    return sum(means) / len(means) if means else None


def exponential(mean: float) -> str:
    """Lengths of an exponential law, spelled as a histogram of equal shares."""
    values = [-math.log(1 - (place + 0.5) / QUANTILES) for place in range(QUANTILES)]
    scale = mean * QUANTILES / sum(values)
    return "hist:" + ",".join(f"{max(1, round(value * scale))}:{1 / QUANTILES}" for value in values)


def lines(found: Iterable[Pair]) -> list[str]:
    """The README's table: by load and lengths, the median error and how many are within 10 %."""
    groups: dict[tuple[Load, str], dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in found:
        groups[pair.case.load, pair.case.lengths][pair.figure].append(pair)
    made = [
        "**Closed form against simulation** of the same replica and step times; median error, within 10 %:",
        "",
        "| load | lengths | " + " | ".join(FIGURES) + " |",
        "| --- | --- |" + " --- |" * len(FIGURES),
    ]
    for ((kind, amount), lengths), by_figure in groups.items():
        cells = []
        for figure in FIGURES:
            own = by_figure[figure]
            near = sum(abs(pair.error) <= WITHIN for pair in own)
            cells.append(f"{100 * median(pair.error for pair in own):+.0f} %, {near} of {len(own)}")
        made.append(f"| {amount:g} {kind} | {lengths} | " + " | ".join(cells) + " |")
    return made


def main(everything: bool) -> None:
    """Print the table, and every case where asked."""
    found: list[Pair] = []
    for case in cases():
        own = pairs(case)
        found += own
        if everything:
            errors = ", ".join(f"{pair.figure} {100 * pair.error:+.1f} %" for pair in own)
            print(f"{case.name}: {errors}", file=sys.stderr, flush=True)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main("--all" in sys.argv)
