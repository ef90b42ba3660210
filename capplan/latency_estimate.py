"""A question about speed → its answer: TTFT, TPOT and throughput, as bound by physics and as estimated.

`latency(...)` is what `capplan latency` prints and what scripts call. Step times are step.py's, the way from
steps to users is formulas/serving.py's, what the engine adds is engine_speed.py's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from capplan import bottleneck, latency_notes, step
from capplan.errors import InputError
from capplan.formulas import queueing, serving
from capplan.latency_answer import Change, Figure, LatencyEstimate, Least, SweepPoint
from capplan.latency_question import LatencyQuestion, check
from capplan.latency_setup import Setup, weight_bits
from capplan.lone_step import LoneTable

SWEEP: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Users of the batch sweep."""


def latency(model: str, *, gpu: str = "", figures_alone: bool = False, **fields: Any) -> LatencyEstimate:
    """TTFT, TPOT and throughput of a model on a GPU under a load; the fields are LatencyQuestion's.

    Without `gpu`, `profile` is a file and brings its device.
    `figures_alone`: without the sweep over users and what other choices would change.
    Raises InputError for a question that cannot be answered.
    Example: latency("8b", gpu="h100", concurrency=16).tpot.estimate
    """
    question = LatencyQuestion(model=model, gpu=gpu, **fields)
    return figures(question) if figures_alone else answer(question)


def answer(question: LatencyQuestion) -> LatencyEstimate:
    """The answer, with the sweep over users and what other choices would change."""
    check(question)
    setup = Setup(question)
    made = _estimate(setup)
    if made.served is None:
        return made
    return replace(made, sweep=sweep(setup), changes=changes(question, made))


def figures(question: LatencyQuestion) -> LatencyEstimate:
    """The answer without sweep and changes, for callers that read its figures alone."""
    check(question)
    return _estimate(Setup(question))


def _estimate(setup: Setup) -> LatencyEstimate:
    """The figures of one load."""
    question, plan = setup.question, setup.plan
    ideal = replace(
        serving.Scheduling(wait_steps=0.0, bursts=0.0),
        max_num_seqs=setup.scheduling.max_num_seqs,
        max_num_batched_tokens=setup.scheduling.max_num_batched_tokens,
        tokens_per_step=setup.question.tokens_per_step,
    )
    bound = setup.serve(setup.physics, ideal)
    fits = None if plan is None else plan.starts
    if (fits is None and setup.memory.fits is False) or setup.on_host or not setup.batch_fits:
        fits = False
    served = None if question.bounds or fits is False else setup.serve(setup.table, setup.scheduling)
    least = _least(setup, bound, bound.batch if served is None else min(bound.batch, served.batch))
    shown, table = (bound, setup.physics) if served is None else (served, setup.table)
    decodes = question.osl > 1
    decode = table.ops(_decode_load(setup.traffic, shown)) if decodes else ()
    prefill = table.ops(_prefill_load(setup.traffic, setup.scheduling))
    far = latency_notes.outside(decode, prefill)
    made = _figures(setup, least, served, doubt=setup.doubt or bool(far))
    limits = bottleneck.shares(decode or prefill, setup.costs.rates)
    return LatencyEstimate(
        question=question,
        model=setup.model,
        gpu=setup.gpu,
        precision=setup.precision,
        kv_format=setup.memory.kv_format,
        kv_reason=setup.memory.kv_reason,
        fits=fits,
        plan=plan,
        ttft=made["ttft"],
        tpot=made["tpot"],
        e2e=made["e2e"],
        throughput=made["throughput"],
        bound=bound,
        served=served,
        behaviour=setup.behaviour,
        scheduling=setup.scheduling,
        fractions=setup.table.fractions if isinstance(setup.table, LoneTable) else None,
        decode_ops=decode,
        prefill_ops=prefill,
        regime={
            "prefill": bottleneck.regime(prefill, setup.costs.rates),
            "decode": bottleneck.regime(decode, setup.costs.rates) if decodes else None,
        },
        limits=limits,
        bottleneck=_bottleneck(served, limits),
        slo=setup.slo,
        meets=None if served is None else _meets(setup, served),
        notes=(*latency_notes.notes(setup, served), *far),
    )


def _least(setup: Setup, bound: serving.Served, batch: float) -> Least:
    """What no schedule can beat with as many requests under way, `batch` of them decoding.

    TTFT ≥ network + one prompt alone; TPOT ≥ a step that only decodes, over the tokens it adds;
    tokens/s ≤ n · N / E2E
    """
    question, running, batch = setup.question, max(1.0, bound.running), max(1.0, batch)
    new, cached = setup.traffic.new_tokens, setup.traffic.cached
    pairs = queueing.prompt_pairs(new_tokens=new, past_tokens=cached)
    first = question.network_s + setup.physics.step_s(
        decode_sequences=0, kv_tokens=0, prompt_tokens=new, prompt_pairs=pairs
    )
    tpot = None
    if question.osl > 1:
        held = batch * setup.traffic.held_tokens
        tpot = setup.physics.step_s(decode_sequences=batch, kv_tokens=held) / setup.question.tokens_per_step
    whole = first + (question.osl - 1) * (tpot or 0.0)
    rate = running / whole
    if question.request_per_s is not None and bound.steady:
        rate = question.request_per_s
    return Least(ttft_s=first, tpot_s=tpot, e2e_s=whole, output_token_per_s=rate * question.osl)


def _figures(setup: Setup, least: Least, served: serving.Served | None, *, doubt: bool) -> dict[str, Figure]:
    """TTFT, TPOT, E2E and throughput, each with its bound; without estimates where nothing was served."""
    bounds = {
        "ttft": least.ttft_s,
        "tpot": least.tpot_s,
        "e2e": least.e2e_s,
        "throughput": least.output_token_per_s,
    }
    if served is None:
        return {name: Figure(bound=bound) for name, bound in bounds.items()}
    values = {
        "ttft": served.ttft_s,
        "tpot": served.tpot_s,
        "e2e": served.e2e_s,
        "throughput": served.output_token_per_s,
    }
    return {
        name: _figure(setup, name, bound, values[name], served, doubt=doubt) for name, bound in bounds.items()
    }


def _figure(
    setup: Setup, name: str, bound: float | None, value: float | None, served: serving.Served, *, doubt: bool
) -> Figure:
    """A figure with the band of runs held out, wider in doubt, and never beyond what physics allows."""
    if value is None or not math.isfinite(value):
        return Figure(bound=bound)
    band = setup.behaviour.band(name, doubt)
    low, high = value * band.low, value * band.high
    if name == "throughput" and setup.question.request_per_s is not None and served.steady:
        # The rate is given: less is made only where the stable rate proves to be lower than that.
        low, high = min(value, served.stable_request_per_s * setup.question.osl * band.low), value
    elif bound is not None and name == "throughput":
        high = max(value, min(high, bound))
    elif bound is not None:
        low = min(value, max(low, bound))
    return Figure(
        bound=bound,
        estimate=value,
        low=low,
        high=high,
        provenance=setup.costs.provenance,
    )


def _meets(setup: Setup, served: serving.Served) -> bool | None:
    """Whether the estimate is within the limits; None without limits."""
    if setup.slo is None:
        return None
    pairs = ((setup.slo.ttft_s, served.ttft_s), (setup.slo.tpot_s, served.tpot_s))
    return all(limit is None or value is None or value <= limit for limit, value in pairs)


def sweep(setup: Setup) -> tuple[SweepPoint, ...]:
    """Closed loops of more and more users, up to twice what runs at once."""
    most, _ = serving.running_limit(
        traffic=setup.traffic, scheduling=setup.scheduling, kv_pool_tokens=setup.pool_tokens
    )
    made: list[SweepPoint] = []
    for users in SWEEP:
        if made and users > 2 * most:
            break
        served = setup.serve(setup.table, setup.scheduling, users)
        made.append(
            SweepPoint(
                users=users,
                ttft_s=served.ttft_s,
                tpot_s=served.tpot_s,
                e2e_s=served.e2e_s,
                output_token_per_s=served.output_token_per_s,
                request_per_s=served.request_per_s,
                limit=served.limit,
                meets=_meets(setup, served),
            )
        )
    return tuple(made)


def changes(question: LatencyQuestion, made: LatencyEstimate) -> tuple[Change, ...]:
    """Other choices, one at a time, the shortest wait first; those that cannot be are left out."""
    found: list[Change] = []
    for change, flag, fields in _tries(question, made):
        try:
            after = _estimate(Setup(replace(question, **fields)))
        except InputError:
            continue  # this model, GPU or engine does not take the change
        if after.served is None or not after.served.steady:
            continue
        found.append(
            Change(
                change=change,
                flag=flag,
                ttft_s=after.served.ttft_s,
                tpot_s=after.served.tpot_s,
                e2e_s=after.served.e2e_s,
                output_token_per_s=after.served.output_token_per_s,
            )
        )
    return tuple(sorted(found, key=lambda change: change.e2e_s))


def _tries(question: LatencyQuestion, made: LatencyEstimate) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Choices that may help: in words, as a flag, as fields of the question."""
    held = weight_bits(made.model, made.precision)
    if held > 8:
        yield "weights in FP8", "--precision fp8", {"precision": "fp8"}
    if held > 4:
        yield "weights in 4 bits", "--precision int4", {"precision": "int4"}
    if made.kv_format.effective_bits > 8:
        yield "KV cache in FP8", "--kv-dtype fp8", {"kv_dtype": "fp8"}
    yield f"{question.tp * 2} GPUs a layer", f"--tp {question.tp * 2}", {"tp": question.tp * 2}
    users = question.concurrency or 0
    if users > 1:
        yield "half the users", f"--concurrency {users // 2}", {"concurrency": users // 2}
    if question.speculative_tokens is not None:
        without = {"speculative_tokens": None, "acceptance_rate": None, "draft_model": None}
        yield "no drafts", "without --speculative-tokens", without


def _decode_load(traffic: serving.Traffic, served: serving.Served) -> step.Load:
    """The mean step without prompts."""
    batch = max(1.0, served.batch)
    return step.Load(decode_sequences=batch, kv_tokens=batch * traffic.held_tokens)


def _prefill_load(traffic: serving.Traffic, scheduling: serving.Scheduling) -> step.Load:
    """One prompt's first chunk."""
    tokens = min(traffic.new_tokens, float(scheduling.max_num_batched_tokens))
    pairs = queueing.prompt_pairs(new_tokens=tokens, past_tokens=traffic.cached)
    return step.Load(prompt_sequences=1, prompt_tokens=tokens, prompt_pairs=pairs)


def _bottleneck(served: serving.Served | None, limits: Mapping[str, float]) -> str | None:
    """What to change first: memory where requests wait for it, else what the mean step waits for."""
    if served is not None and served.limit == "kv" and served.queue_s > 0:
        return bottleneck.KV
    return max(limits, key=lambda name: limits[name]) if any(limits.values()) else None


__all__ = ["LatencyEstimate", "answer", "figures", "latency"]
