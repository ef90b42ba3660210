"""The answer of `capplan latency` in sentences: what was asked, how the figures come about, the load."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from capplan.engine_speed import family_of
from capplan.units import format_count, format_seconds

if TYPE_CHECKING:
    from capplan.latency_answer import LatencyEstimate

SHOWN_S: Final = 1e-6
"""Shorter terms of TTFT are not worth a word."""


def title(made: "LatencyEstimate") -> str:
    """Model, GPUs, formats, engine."""
    asked, name = made.question.model, made.model.name
    alias = f' ("{asked}")' if asked != name and len(asked) < 24 else ""
    count = made.question.parallel.gpus
    gpus = f"{count} × {made.gpu.name}" if count > 1 else made.gpu.name
    weights = made.precision.id if made.precision else "the checkpoint's own"
    if made.precision is None and made.model.quantization is None:
        weights = "16-bit"
    engine = "" if made.plan is None else f", {made.plan.engine} {made.plan.version}"
    return (
        f"{name}{alias}, {format_count(made.model.parameters)} parameters, {weights} weights, "
        f"{made.kv_format.id} KV cache ({made.kv_reason}), on {gpus}{engine}"
    )


def workload(made: "LatencyEstimate") -> str:
    """Load and lengths."""
    question = made.question
    shared = f" ({question.prefix_shared:,} of them cached)" if question.prefix_shared else ""
    equal = ", every request alike" if question.lengths == "equal" else ""
    return f"{question.load}; {question.isl:,} tokens in{shared}, {question.osl:,} out{equal}"


def lines(made: "LatencyEstimate") -> list[str]:
    """Everything but the tables, a line each."""
    return [
        *_ttft(made),
        *_step(made),
        *_load(made),
        *_goodput(made),
        *_limits(made),
        *(f"note: {note}" for note in made.notes),
        *_engine(made),
    ]


def _ttft(made: "LatencyEstimate") -> Iterator[str]:
    """The terms of TTFT, those that are none left out."""
    served = made.served
    if served is None or not served.steady:
        return
    terms = (
        ("around the engine", served.around_s),
        ("queue", served.queue_s),
        ("start burst", served.start_s),
        ("wait for a step", served.wait_s),
        ("prefill", served.prefill_s),
    )
    told = [f"{format_seconds(time)} {name}" for name, time in terms if time >= SHOWN_S or name == "prefill"]
    yield f"TTFT = {' + '.join(told)}"


def _step(made: "LatencyEstimate") -> Iterator[str]:
    """What bounds the mean steps."""
    prefill = f"prefill is {made.regime['prefill']}"
    if made.decode_ops:
        yield f"decode is {made.regime['decode']} (mean batch {made.load.batch:,.1f}), {prefill}"
    else:
        yield f"{prefill}; one output token: nothing decodes"
    if made.bottleneck is not None:
        parts = sorted(made.limits.items(), key=lambda entry: -entry[1])
        shares = ", ".join(f"{name} {share:.0%}" for name, share in parts if share >= 0.005)
        step = "a decode step" if made.decode_ops else "a prefill step"
        yield f"bottleneck: {made.bottleneck}; {step} waits for {shares}"


def _load(made: "LatencyEstimate") -> Iterator[str]:
    """How loaded the replica is, and where its knee lies."""
    served, stable = made.load, f"{made.load.stable_request_per_s:.3g} requests/s"
    rate = f"{served.request_per_s:.3g} requests/s"
    if made.served is None:
        yield f"at the bound at most {stable}"
    elif made.question.batch is not None:
        yield f"{rate} with one such batch after another: utilisation 100%, nothing joins a batch under way"
    elif made.question.requests is not None:
        yield f"{rate} until the last is answered: utilisation 100%, at the knee"
    elif not served.steady:
        yield (
            f"utilisation {served.utilization:.0%}: the stable rate is {stable}, "
            f"{made.knee_distance:.2g} × this load"
        )
    elif served.utilization < 1:
        yield (
            f"{rate}, utilisation {served.utilization:.0%}: the knee, a stable {stable}, lies at "
            f"{made.knee_distance:.3g} × this load"
        )
    else:
        yield f"{rate}, utilisation 100%: at the knee, no more can be served"


def _goodput(made: "LatencyEstimate") -> Iterator[str]:
    """Requests a second within the limits asked for."""
    if made.served is None:
        return
    within = "no limit asked: --slo chat" if made.slo is None else f"within {made.slo.name}"
    rate = made.load.request_per_s if made.load.steady else made.question.request_per_s or 0.0
    yield f"goodput {made.goodput_request_per_s:.3g} of {rate:.3g} requests/s ({within})"


def _limits(made: "LatencyEstimate") -> Iterator[str]:
    """Whether the limits are met, and how fast that is beside what is asked."""
    if made.slo is None:
        return
    pairs = (("TTFT", made.slo.ttft_s), ("TPOT", made.slo.tpot_s))
    limits = [f"{name} ≤ {format_seconds(value)}" for name, value in pairs if value is not None]
    verdict = {True: "met", False: "missed", None: "not below what physics allows"}[made.meets]
    if made.below_bound:
        verdict = "impossible: below what physics allows"
    pace = ""
    if made.slo.tpot_s is not None and made.tpot.estimate:
        asked = "reading speed" if made.slo.name == "reading" else "the speed asked for"
        pace = f"; {made.slo.tpot_s / made.tpot.estimate:.1f} × {asked}"
    yield f"{made.slo.name} ({', '.join(limits)}): {verdict}{pace}"


def _engine(made: "LatencyEstimate") -> Iterator[str]:
    """What was fitted of the engine, and how many runs stand behind the bands."""
    if made.served is None:
        return
    yield f"fitted: {fitted(made)}"


def fitted(made: "LatencyEstimate") -> str:
    """The engine's numbers in one sentence."""
    fit, plan = made.behaviour, made.scheduling
    runs = ", ".join(f"{fit.bands[name].runs:,} of {name.upper()}" for name in ("ttft", "tpot"))
    band = f"band from runs held out: {runs}"
    if made.fractions is not None:
        part = made.fractions
        return (
            f"{fit.engine} on {fit.family}, {part.runs:,} runs: {part.bandwidth:.0%} of the bandwidth, "
            f"{part.compute:.0%} of the arithmetic in decode, {part.prompt:.0%} of the peak in prompts; "
            f"{band}"
        )
    of = f"{fit.engine} on {family_of(made.gpu)}"
    if not fit.measured:
        of += " (no such runs: the numbers of other GPUs, or of vllm)"
    host = fit.host
    factors = f"kernels × {host.fused:g}" + (
        f", with prompts × {host.prompts:g}" if host.prompts != 1 else ""
    )
    order = "prompts go before decoding" if plan.prefill_first else "prompts ride in decode steps"
    return (
        f"{of}: {factors}; {1e6 * host.step_s:.3g} µs a step, "
        f"{1e6 * host.sequence_s:.3g} µs a sequence in it, {1e3 * plan.around_s(1):.3g} ms around the "
        f"first token of a lone request, {1e3 * plan.first_token_s:.3g} with many under way; {order}; "
        f"{plan.together:g} users with equal requests stay in one step; {band}"
    )
