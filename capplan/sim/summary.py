"""From what was kept of one simulation to its figures: percentiles, rates, KV usage, intervals."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from capplan.errors import InputError
from capplan.formulas import confidence
from capplan.sim.metrics import REQUEST_COLUMNS, Metrics

PERCENTILES: Final = (50, 90, 95, 99)
METRICS: Final = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s")
STATISTICS: Final = ("p50", "p90", "p95", "p99", "mean")
BATCHES: Final = 20
"""Batch means of one run; fewer, and the interval is wide, more, and batches depend on each other."""
LEAST_OF_BATCH: Final = 10
FULL: Final = 0.99
"""A pool counts as full from here on."""
SERIES: Final = 60
"""Points of the series that answers show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles and mean of a figure; `confidence` is half of the mean's 95 % interval, None: unknown."""

    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    confidence: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """JSON of the spread."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """KV blocks in use as parts of all, over time; `full` is the part of the time above 99 %."""

    mean: float
    p95: float
    max: float
    full: float

    def to_dict(self) -> dict[str, float]:
        """JSON of the usage."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The engine over the whole run in equal parts of the time: means, and KV usage as a part of the pool."""

    width_s: float
    running: tuple[float, ...]
    waiting: tuple[float, ...]
    kv_usage: tuple[float, ...]
    output_token_per_s: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON of the series."""
        return {name: _listed(getattr(self, name)) for name in (field.name for field in fields(self))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was measured: requests that arrived from `start_s` on; rates from there until `end_s`.

    `rule` says where the start is from. `steady`: False where the rule saw no steady state.
    """

    start_s: float
    end_s: float
    rule: str
    steady: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What was seen between two replicas, and on the one of prompts.

    `transfer_s`: from a prompt's end until its KV is on the other replica, of the measured requests that had
    more than one token to make; `transfer_share` is their sum over the sum of all E2E times. `link_busy` and
    `prefill_busy` are parts of the run's time.
    """

    transfer_s: Spread | None
    transfer_share: float
    link_busy: float
    prefill_busy: float
    prefill_kv_usage: Usage
    prefill_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run's figures. Rates are of the window; `requests`, tokens and counts in words of the whole run.

    Times of requests are those of a client: `around_s` (HTTP, tokenisation, network) is in TTFT and E2E.
    `answer_tokens` is the mean length of an answer. With `apart` what is of an engine (steps, KV, batch,
    gaps) is of the replica that decodes. None: not defined, as TPOT of single tokens, or not seen.
    """

    window: Window
    spreads: Mapping[str, Spread | None]
    requests: int
    measured: int
    rejected: int
    truncated: int
    unfinished: int
    end_s: float
    offered_request_per_s: float | None
    request_per_s: float
    output_token_per_s: float
    prompt_token_per_s: float
    goodput_request_per_s: float | None
    met: float | None
    kv_usage: Usage
    unfilled: float | None
    preemptions: int
    recomputed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    answer_tokens: float
    prefix_hit_rate: float
    equal_lengths: bool
    batch: float
    busy: float
    idle_slots: float
    queue: tuple[float, float]
    steps: int
    series: Series
    apart: Apart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a run is read. `warm_up_s` None: by MSER-5 where `stationary`. Limits as an SLO's, in seconds."""

    around_s: float = 0.0
    warm_up_s: float | None = None
    stationary: bool = True
    ttft_s: float | None = None
    tpot_s: float | None = None
    uneven: bool = False
    """Whether blocks and tokens are not the same count: prompts share blocks, or windows let them go."""


def summarise(metrics: Metrics, rule: Rule, unfinished: int = 0) -> Summary:
    """The figures of a run. ValueError where no request was finished, InputError for too long a warm-up."""
    import numpy as np

    metrics.close()
    table = metrics.requests()
    if not len(table):
        raise ValueError("no request was finished")
    column = dict(zip(REQUEST_COLUMNS, table.T, strict=True))
    times = _times(column, rule.around_s)
    window = _window(column, times["e2e_s"], rule, metrics.end_s)
    measured = column["arrival_s"] >= window.start_s
    bins = metrics.timeline.bins_between(window.start_s, window.end_s)
    in_window = (column["done_s"] >= window.start_s) & (column["done_s"] <= window.end_s)
    length_s = max(window.end_s - window.start_s, 1e-12)
    rate = float(in_window.sum()) / length_s
    met = _met(times, rule)
    line = metrics.timeline
    busy_s = line.sum_of("busy_s", bins)
    binned_s = (bins.stop - bins.start) * line.width_s
    binned_s = min(binned_s, max(busy_s, metrics.end_s - bins.start * line.width_s))
    unfilled = _ratio(
        line.sum_of("unfilled_token_s", bins), line.sum_of("kv_block_s", bins) * line.block_size
    )
    typical = rule.stationary and window.steady and float(np.ptp(column["arrival_s"])) > 0
    spreads = {name: spread_of(values[measured], typical) for name, values in times.items()}
    spreads["itl_s"] = _gaps(metrics, bins)
    return Summary(
        window=window,
        spreads=spreads,
        requests=len(table),
        measured=int(measured.sum()),
        rejected=len(metrics.rejections),
        truncated=int(column["truncated"].sum()),
        unfinished=unfinished,
        end_s=metrics.end_s,
        offered_request_per_s=_rate(column["arrival_s"]),
        request_per_s=rate,
        output_token_per_s=_tokens(column, window, "output") / length_s,
        prompt_token_per_s=_tokens(column, window, "prompt") / length_s,
        goodput_request_per_s=None if met is None else rate * float(met[measured].mean()),
        met=None if met is None else float(met[measured].mean()),
        kv_usage=usage_of(metrics, bins, binned_s),
        unfilled=None if rule.uneven else unfilled,
        preemptions=metrics.preemptions,
        recomputed_tokens=metrics.recomputed_tokens,
        prompt_tokens=int(column["prompt_tokens"].sum()),
        cached_tokens=int(column["cached_tokens"].sum()),
        output_tokens=int((column["output_tokens"] * column["samples"]).sum()),
        answer_tokens=float(column["output_tokens"].mean()),
        prefix_hit_rate=float(column["cached_tokens"].sum() / column["prompt_tokens"].sum()),
        equal_lengths=_all_equal(column["prompt_tokens"]) and _all_equal(column["output_tokens"]),
        batch=_ratio(line.sum_of("decoded", bins), line.sum_of("steps", bins)),
        busy=min(1.0, busy_s / binned_s),
        idle_slots=_ratio(line.sum_of("idle_slot_s", bins), busy_s * line.slots),
        queue=_queue(metrics, line.bins_between(window.start_s, float(column["arrival_s"][-1]))),
        steps=metrics.steps_taken,
        series=_series(metrics),
    )


def _times(column: Mapping[str, Any], around_s: float) -> dict[str, Any]:
    """Seconds of every request by name; NaN where TPOT is undefined."""
    import numpy as np

    arrival, first, done = column["arrival_s"], column["first_token_s"], column["done_s"]
    gaps = column["output_tokens"] - 1
    tpot = np.full(len(arrival), np.nan)
    np.divide(done - first, gaps, out=tpot, where=gaps > 0)
    return {
        "ttft_s": first - arrival + around_s,
        "tpot_s": tpot,
        "e2e_s": done - arrival + around_s,
        "queue_s": np.maximum(column["first_scheduled_s"] - arrival, 0.0),
    }


def _window(column: Mapping[str, Any], e2e_s: Any, rule: Rule, end_s: float) -> Window:
    """From the end of the warm-up until the last request is let in: what follows is no typical load.

    Where all come at once, or less than half of them are through by then, everything counts.
    """
    arrivals = column["arrival_s"]
    first, last = float(arrivals[0]), float(arrivals[-1])
    stop = max(last, float(column["first_scheduled_s"].max()))
    if last == first or 2 * (column["done_s"] <= stop).sum() < len(arrivals):
        stop = end_s
    if rule.warm_up_s is not None:
        if rule.warm_up_s > last:
            raise InputError(
                f"a warm-up of {rule.warm_up_s:g} s leaves nothing: the last request comes at {last:.3g} s",
                where="--warm-up",
                hint="a shorter one, or more --requests",
            )
        return Window(start_s=rule.warm_up_s, end_s=max(stop, rule.warm_up_s), rule="as asked")
    if last == first:
        return Window(start_s=first, end_s=end_s, rule="all at once: nothing is left out")
    if not rule.stationary:
        return Window(start_s=first, end_s=stop, rule="a load that changes by itself: nothing is left out")
    cut = confidence.warm_up_observations(values=e2e_s)
    if cut:
        # All that came together with the last one, as users do at the start.
        cut = int((arrivals <= arrivals[cut - 1]).sum())
    if cut is None or 2 * cut > len(arrivals):
        return Window(
            start_s=first, end_s=stop, rule="MSER-5 sees no steady state: nothing is left out", steady=False
        )
    start = float(arrivals[cut])
    return Window(start_s=start, end_s=stop, rule=f"MSER-5: {cut or 'no'} requests left out")


def spread_of(values: Any, typical: bool = False) -> Spread | None:
    """Percentiles by linear interpolation; the mean's interval by batch means, where all times are alike."""
    import numpy as np

    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    half = None
    if typical and len(values) >= BATCHES * LEAST_OF_BATCH:
        means = [float(part.mean()) for part in np.array_split(values, BATCHES)]
        half = confidence.half_width(means=means)
    return Spread(p50=p50, p90=p90, p95=p95, p99=p99, mean=float(values.mean()), confidence=half)


def _gaps(metrics: Metrics, bins: slice) -> Spread | None:
    """Gaps between tokens; their mean is exact."""
    found = [metrics.timeline.gap_percentile_s(bins, percent) for percent in PERCENTILES]
    count = metrics.timeline.sum_of("gaps", bins)
    if any(value is None for value in found) or count <= 0:
        return None
    p50, p90, p95, p99 = (value or 0.0 for value in found)
    mean = metrics.timeline.sum_of("gap_s", bins) / count
    return Spread(p50=p50, p90=p90, p95=p95, p99=p99, mean=mean)


def _met(times: Mapping[str, Any], rule: Rule) -> Any:
    """Which requests met the limits; None without any. A single token has no TPOT to miss."""
    import numpy as np

    if rule.ttft_s is None and rule.tpot_s is None:
        return None
    met = np.ones(len(times["ttft_s"]), dtype=bool)
    if rule.ttft_s is not None:
        met &= times["ttft_s"] <= rule.ttft_s
    if rule.tpot_s is not None:
        met &= ~(times["tpot_s"] > rule.tpot_s)
    return met


def _rate(arrivals: Any) -> float | None:
    """Arrivals after the first by the time they took; None where all come at once."""
    span = float(arrivals[-1] - arrivals[0])
    return (len(arrivals) - 1) / span if span > 0 else None


def _tokens(column: Mapping[str, Any], window: Window, kind: str) -> float:
    """Tokens made (or prompt tokens computed) inside of the window: a request's come evenly over its time."""
    import numpy as np

    if kind == "prompt":
        begin, end = column["first_scheduled_s"], column["first_token_s"]
    else:
        begin, end = column["first_token_s"], column["done_s"]
    inside = np.minimum(end, window.end_s) - np.maximum(begin, window.start_s)
    share = np.clip(inside / np.maximum(end - begin, 1e-12), 0.0, 1.0)
    instant = (end <= begin) & (end >= window.start_s) & (end <= window.end_s)
    answers = 1 if kind == "prompt" else column["samples"]
    return float((np.where(instant, 1.0, share) * column[f"{kind}_tokens"] * answers).sum())


def usage_of(metrics: Metrics, bins: slice, length_s: float) -> Usage:
    """KV usage over time, idle time included as none."""
    import numpy as np

    seconds = metrics.timeline.usage_s(bins)
    seconds[0] += max(0.0, length_s - float(seconds.sum()))
    passed = np.cumsum(seconds)
    total, steps = metrics.timeline.kv_blocks, len(seconds) - 1
    mean = metrics.timeline.sum_of("kv_block_s", bins) / (max(length_s, 1e-12) * total)
    most = float(metrics.timeline.most_kv_blocks[bins].max(initial=0.0)) / total
    return Usage(
        mean=min(1.0, mean),
        p95=min(most, float(np.searchsorted(passed, 0.95 * passed[-1])) / steps),
        max=most,
        full=float(seconds[math.ceil(FULL * steps) :].sum() / passed[-1]),
    )


def _queue(metrics: Metrics, bins: slice) -> tuple[float, float]:
    """Requests that wait, on average in the first and the last fifth of some bins."""
    fifth = max(1, (bins.stop - bins.start) // 5)
    width = metrics.timeline.width_s * fifth
    first, last = slice(bins.start, bins.start + fifth), slice(bins.stop - fifth, bins.stop)
    return (
        metrics.timeline.sum_of("waiting_s", first) / width,
        metrics.timeline.sum_of("waiting_s", last) / width,
    )


def _series(metrics: Metrics) -> Series:
    """The whole run in SERIES parts at most."""
    import numpy as np

    line = metrics.timeline
    used = line.bins_between(0.0, metrics.end_s)
    bins = used.stop - used.start
    parts = min(SERIES, bins)
    edges = [round(bins * part / parts) for part in range(parts)]
    lengths = np.diff([*edges, bins]) * line.width_s
    lengths[-1] = max(metrics.end_s - edges[-1] * line.width_s, 1e-12)

    def means(name: str) -> tuple[float, ...]:
        summed = np.add.reduceat(line.sums[name][:bins], edges)
        return tuple(float(value) for value in summed / lengths)

    return Series(
        width_s=line.width_s * bins / parts,
        running=means("running_s"),
        waiting=means("waiting_s"),
        kv_usage=tuple(min(1.0, value / line.kv_blocks) for value in means("kv_block_s")),
        output_token_per_s=means("tokens"),
    )


def _all_equal(values: Any) -> bool:
    return bool((values == values[0]).all())


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
