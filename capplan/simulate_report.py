"""The answer of `capplan simulate` as text: terminal view, Markdown, CSV rows. Nothing prints here."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from capplan.report import to_markdown
from capplan.sim.summary import METRICS, STATISTICS
from capplan.simulate_json import rounded
from capplan.units import format_count, format_seconds, format_unit_price, format_usd

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from capplan.simulate_answer import Simulation

LEVELS: Final = "▁▂▃▄▅▆▇█"
TITLES: Final = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E", "queue_s": "queue"}


def title(made: "Simulation") -> str:
    """Model, GPUs, formats, engine."""
    asked, name = made.question.model, made.model.name
    alias = f' ("{asked}")' if asked != name and len(asked) < 24 else ""
    count = made.question.parallel.gpus
    gpus = f"{count} × {made.gpu.name}" if count > 1 else made.gpu.name
    if made.link is not None:
        gpus = f"{gpus} for prompts and as many to decode"
    weights = made.precision.id if made.precision else "the checkpoint's own"
    if made.precision is None and made.model.quantization is None:
        weights = "16-bit"
    engine = "" if made.plan is None else f", {made.plan.engine} {made.plan.version}"
    return (
        f"{name}{alias}, {format_count(made.model.parameters)} parameters, {weights} weights, "
        f"{made.kv_format.id} KV cache, on {gpus}{engine} ({made.policy.title})"
    )


def load_line(made: "Simulation") -> str:
    """How loaded the replica is, before any percentile."""
    load = made.load
    stable = f"stable {load.stable_request_per_s:.3g} requests/s (closed form)"
    if load.parts:
        each = ", ".join(f"{name} {rate:.3g}" for name, rate in load.parts.items())
        stable = f"stable {load.stable_request_per_s:.3g} requests/s (closed form; {each})"
    if load.offered_request_per_s is None:
        return f"utilisation {load.utilization:.0%} of the {stable}"
    offered = f"{load.offered_request_per_s:.3g} requests/s offered"
    line = f"{offered}: utilisation {load.utilization:.0%} of the {stable}"
    if not made.steady:
        return f"{line}: unstable"
    return f"{line}, {_count(made.knee_distance)} × below the knee"


def _count(number: float) -> str:
    """A number as people read it: "1,234", "12.3", "0.0123", "2.5e+10"."""
    return f"{number:,.0f}" if 100 <= number < 1e9 or number == 0 else f"{number:.3g}"


def lines(made: "Simulation") -> list[str]:
    """Everything but the tables, a line each."""
    return [
        *_served(made),
        *_apart(made),
        *_memory(made),
        *_money(made),
        *(f"note: {note}" for note in made.notes),
    ]


def _served(made: "Simulation") -> Iterator[str]:
    """Requests, rates, limits."""
    summary, window = made.summary, made.summary.window
    runs = f" in {len(made.runs)} runs" if len(made.runs) > 1 else ""
    first = "of the first: " if runs else ""
    left = f", {summary.rejected:,} rejected" if summary.rejected else ""
    left += f", {summary.truncated:,} truncated" if summary.truncated else ""
    yield (
        f"{summary.requests:,} requests{runs}{left} over {format_seconds(summary.end_s)}; measured: "
        f"{summary.measured:,} from {format_seconds(window.start_s)} on ({first}{window.rule})"
    )
    yield (
        f"served {_count(summary.request_per_s)} requests/s, {_count(summary.output_token_per_s)} output "
        f"tokens/s, mean batch {summary.batch:,.1f}, busy {summary.busy:.0%}"
    )
    if made.slo is not None and summary.met is not None:
        limits = [
            f"{name} ≤ {format_seconds(value)}"
            for name, value in (("TTFT", made.slo.ttft_s), ("TPOT", made.slo.tpot_s))
            if value is not None
        ]
        yield (
            f"{made.slo.name} ({', '.join(limits)}): met by {summary.met:.1%}; goodput "
            f"{summary.goodput_request_per_s or 0:.3g} requests/s"
        )


def _apart(made: "Simulation") -> Iterator[str]:
    """The replica of prompts, and the way of the KV cache."""
    apart, link = made.summary.apart, made.link
    if apart is None or link is None:
        return
    moved = apart.transfer_s
    way = f"KV over {link.bytes_per_s * 8 / 1e9:,.4g} Gbit/s, busy {apart.link_busy:.0%}"
    if moved is not None:
        way += (
            f": {format_seconds(moved.mean)} a request, P50 {format_seconds(moved.p50)}, P99 "
            f"{format_seconds(moved.p99)}, {apart.transfer_share:.1%} of E2E"
        )
    yield way
    usage = apart.prefill_kv_usage
    yield (
        f"the replica of prompts: busy {apart.prefill_busy:.0%}, KV usage {usage.mean:.1%} on average, "
        f"at most {usage.max:.1%}"
    )


def _memory(made: "Simulation") -> Iterator[str]:
    """KV cache, preemptions, slots."""
    summary, usage, limits = made.summary, made.summary.kv_usage, made.limits
    yield (
        f"KV usage {usage.mean:.1%} on average, P95 {usage.p95:.1%}, at most {usage.max:.1%} of "
        f"{limits.kv_blocks:,} blocks of {limits.block_size} tokens; full {usage.full:.1%} of the time"
    )
    parts = []
    if summary.unfilled is not None:
        parts.append(f"unfilled in blocks {summary.unfilled:.1%}")
    parts.append(f"prefix hit rate {summary.prefix_hit_rate:.1%}")
    parts.append(f"preemptions {summary.preemptions:,}")
    if summary.preemptions:
        parts[-1] += f" ({summary.recomputed_tokens:,} tokens computed again)"
    parts.append(f"slots idle while requests wait {summary.idle_slots:.1%}")
    yield ", ".join(parts)


def _money(made: "Simulation") -> Iterator[str]:
    if made.price is None or made.fleet_usd is None:
        return
    token = made.usd_per_million_output_token
    per_token = "" if token is None else f", ${format_usd(token)} per million output tokens"
    yield (
        f"${format_usd(made.fleet_usd)} for the run{per_token}, all of the bill on them "
        f"(${format_unit_price(made.price.usd_per_gpu_hour)} per GPU and hour, {made.price.source})"
    )


def view(made: "Simulation") -> list["RenderableType"]:
    """The terminal's answer."""
    from rich.text import Text

    parts: list[RenderableType] = []
    if made.partial:
        parts.append(Text("partial: interrupted before its end", style="bold red"))
    parts += [Text(title(made), style="bold"), Text(made.workload), Text("")]
    parts += [Text(load_line(made), style="" if made.steady else "bold red"), Text("")]
    parts += [_table(made), Text(band_line(made), style="dim"), Text("")]
    parts += [Text(line) for line in lines(made)]
    return [*parts, Text(""), Text("the run", style="bold"), Timeline(made)]


def _table(made: "Simulation") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for name in STATISTICS:
        table.add_column(name.upper() if name != "mean" else name, justify="right")
    table.add_column("± 95 %", justify="right")
    for name in METRICS:
        table.add_row(TITLES[name], *_cells(made, name))
    return table


def _cells(made: "Simulation", name: str) -> list[str]:
    spread = made.summary.spreads[name]
    if spread is None:
        return ["–"] * (len(STATISTICS) + 1)
    half = made.half_width(name)
    cells = [format_seconds(getattr(spread, statistic)) for statistic in STATISTICS]
    return [*cells, "–" if half is None else format_seconds(half)]


def band_line(made: "Simulation") -> str:
    """Whose step times these are, and how far means of measured runs lay from such figures."""
    if not made.bands:
        return "step times: physics alone"
    parts = (
        f"{name.upper()} {made.bands[name].low:.2f}–{made.bands[name].high:.2f} ×"
        for name in ("ttft", "tpot", "e2e")
    )
    return f"step times: {made.provenance}; P10–P90 of measured over predicted: {', '.join(parts)}"


class Timeline:
    """Running, waiting and KV usage over the run, a character a part of the time, as there is room."""

    def __init__(self, made: "Simulation") -> None:
        series = made.summary.series
        self.end = format_seconds(made.summary.end_s)
        self.rows: list[tuple[str, Sequence[float], float, str]] = []
        for name, values in (("running", series.running), ("waiting", series.waiting)):
            most = max(values, default=0.0)
            self.rows.append((name, values, max(1.0, most), f"≤ {_count(math.ceil(most))}"))
        usage = max(series.kv_usage, default=0.0)
        self.rows.append(("KV", series.kv_usage, 1.0, f"≤ {math.ceil(100 * usage)}%"))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        labels = max(len(label) for *_, label in self.rows)
        room = max(8, options.max_width - len(f"  running    {'':{labels}}"))
        for name, values, most, label in self.rows:
            line = sparkline(narrowed(values, room), most)
            yield Text(f"  {name:7}  {line}  {label:>{labels}}", no_wrap=True)
        width = min(room, len(self.rows[0][1]))
        yield Text(f"  {'':7}  0{self.end:>{width - 1}}", no_wrap=True)


def narrowed(values: Sequence[float], parts: int) -> list[float]:
    """Means of at most so many equal parts."""
    if len(values) <= parts:
        return list(values)
    edges = [round(part * len(values) / parts) for part in range(parts + 1)]
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def sparkline(values: Sequence[float], most: float) -> str:
    """A character a value, the highest level at `most`; blank at zero."""
    if most <= 0:
        return " " * len(values)
    top = len(LEVELS) - 1
    return "".join(
        " " if value <= 0 else LEVELS[min(top, int(value / most * len(LEVELS)))] for value in values
    )


def rows(made: "Simulation") -> list[dict[str, Any]]:
    """CSV: a row a latency with its percentiles, and the run's rates beside them."""
    summary = made.summary
    found: list[dict[str, Any]] = [
        {
            "model": made.model.name,
            "gpu": made.gpu.id,
            "gpus": made.question.gpus,
            "engine": made.question.engine,
            "metric": name,
            **{statistic: None if spread is None else getattr(spread, statistic) for statistic in STATISTICS},
            "half_width": made.half_width(name),
            "request_per_s": summary.request_per_s,
            "output_token_per_s": summary.output_token_per_s,
            "goodput_request_per_s": summary.goodput_request_per_s,
            "stable_request_per_s": made.load.stable_request_per_s,
            "utilization": made.load.utilization,
            "partial": made.partial,
        }
        for name in METRICS
        for spread in (summary.spreads[name],)
    ]
    return [rounded(row) for row in found]


def markdown(made: "Simulation") -> str:
    """The percentiles as a Markdown table, then the lines."""
    head = (*(name.upper() if name != "mean" else name for name in STATISTICS), "± 95 %")
    table = to_markdown(
        [{"": TITLES[name], **dict(zip(head, _cells(made, name), strict=True))} for name in METRICS]
    )
    partial = "**partial: interrupted before its end**\n\n" if made.partial else ""
    return (
        f"{partial}**{title(made)}**\n\n{made.workload}\n\n{load_line(made)}\n\n{table}\n{band_line(made)}\n\n"
        + "".join(f"- {line}\n" for line in lines(made))
    )


def explain(made: "Simulation") -> tuple[str, ...]:
    """The lines of --explain: how the figures come about, with this run's numbers."""
    summary, load = made.summary, made.load.served
    found = [
        f"a step without prompts takes {format_seconds(load.decode_step_s)} in the mean, a prompt adds "
        f"{format_seconds(load.prompt_s)}: the step table of `capplan latency`",
        f"the simulator filled {summary.steps:,} steps by {made.policy.name}'s rules, at most "
        f"{made.limits.max_num_seqs:,} sequences and {made.limits.max_num_batched_tokens:,} tokens each",
        "TTFT = first token − arrival + what lies around the engine; queue = first scheduled − arrival; "
        "TPOT = (E2E − TTFT) / (output tokens − 1); ITL = every gap between two tokens",
    ]
    if made.link is None:
        found.append(
            "stable rate = most requests under way / their time in the engine = "
            f"{load.stable_request_per_s:.3g} requests/s; utilisation = load / stable rate"
        )
    else:
        found.append(
            "stable rate = min(1 / prompt, link / KV bytes of a prompt, most that decode / (steps · step)) = "
            f"min({', '.join(f'{rate:.3g}' for rate in made.load.parts.values())}) requests/s"
        )
    if made.steady and load.tpot_s is not None and made.link is None:
        found.append(
            f"the closed form of this load: TTFT {format_seconds(load.ttft_s)}, TPOT "
            f"{format_seconds(load.tpot_s)}, E2E {format_seconds(load.e2e_s)} (means)"
        )
    token = made.usd_per_million_output_token
    if token is not None and made.usd_per_hour is not None:
        found.append(
            f"$ per million output tokens = {format_unit_price(made.usd_per_hour)} / 3600 / "
            f"{summary.output_token_per_s:,.0f} · 10⁶ = {format_usd(token)}"
        )
    return tuple(found)
