"""A question about real traffic → its answer: a discrete-event simulation of one replica.

`simulate(...)` is what `capplan simulate` prints and what scripts call. Step times are step.py's, memory is
the engine's plan, schedulers are sim/schedulers', the closed form beside them is formulas/serving.py's.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from capplan import latency_notes, price_cache, price_choice, simulate_run
from capplan.errors import InputError
from capplan.price_choice import Quote
from capplan.prices import PriceBook
from capplan.sim.sessions import SessionWorkload
from capplan.sim.summary import Summary
from capplan.sim.traces import TraceWorkload
from capplan.simulate_answer import Simulation, pooled
from capplan.simulate_load import ClosedForm, closed_form
from capplan.simulate_question import SimulateQuestion, question_of
from capplan.simulate_run import Logs, Told
from capplan.simulate_setup import Subject


def simulate(model: str, *, gpu: str = "", **fields: Any) -> Simulation:
    """A replica under real traffic: percentiles of latency, KV usage, goodput, cost.

    The fields are SimulateQuestion's and those of its workload (sim.workload.WorkloadSpec), `concurrency`
    its users; lengths are 1024 and 256 tokens where nothing says. Without `gpu`, `profile` is a file and
    brings its device. Raises InputError for a question that cannot be answered, DoesNotFitError where the
    engine would not start.
    Example: simulate("8b", gpu="h100", request_per_s=8, requests=2000).summary.spreads["ttft_s"].p99
    """
    return answer(question_of(model, gpu=gpu, **fields))


def answer(
    question: SimulateQuestion,
    *,
    prices: PriceBook | None = None,
    told: Told | None = None,
    files: Logs | None = None,
) -> Simulation:
    """The answer; `told` hears of the progress now and then. A KeyboardInterrupt ends it early: `partial`."""
    files = files or Logs()
    if question.repeat > 1 and (files.requests or files.steps):
        raise InputError(
            "logs of several runs", where="--request-log, --step-log, --repeat", hint="leave --repeat out"
        )
    if question.kv_link_bytes_per_s is not None and files.steps:
        raise InputError(
            "steps of two replicas in one log",
            where="--step-log, --kv-link-gbps",
            hint="leave one of them out",
        )
    subject = Subject(question)
    price = _price(subject, prices)
    if question.repeat > 1:
        runs, partial = simulate_run.repeated(subject, told)
    else:
        made, partial = simulate_run.once(subject, question.workload.seed, told, files)
        runs = [made]
    return _answer(subject, tuple(runs), price, partial)


def _price(subject: Subject, book: PriceBook | None) -> Quote | None:
    """The price asked for or known; None where nobody asked and none is known."""
    question, gpu = subject.question, subject.setup.gpu
    if question.price_usd_per_gpu_hour is not None:
        return price_choice.given(question.price_usd_per_gpu_hour, question.term)
    book = book or price_cache.load()
    asked = question.cloud or question.region or question.term != "on-demand"
    found = price_choice.choose(
        book,
        gpu.id,
        term=question.term,
        today=question.day,
        cloud=question.cloud,
        region=question.region,
        gpus=question.gpus,
    )
    if found is None and asked:
        raise price_choice.missing(
            book, gpu.id, term=question.term, cloud=question.cloud, region=question.region
        )
    return found


def _answer(subject: Subject, runs: tuple[Summary, ...], price: Quote | None, partial: bool) -> Simulation:
    setup, summary = subject.setup, pooled(runs)
    load = closed_form(subject, summary)
    bounds = subject.question.bounds
    names = ("ttft", "tpot", "e2e", "throughput")
    return Simulation(
        question=subject.question,
        model=setup.model,
        gpu=setup.gpu,
        precision=setup.precision,
        kv_format=setup.memory.kv_format,
        plan=setup.plan,
        limits=subject.limits,
        policy=subject.policy,
        workload=subject.workload.describe(),
        load=load,
        link=subject.link,
        summary=summary,
        runs=runs,
        slo=setup.slo,
        provenance="bound" if bounds else setup.costs.provenance,
        bands={} if bounds else {name: setup.behaviour.band(name, setup.doubt) for name in names},
        price=price,
        partial=partial,
        notes=tuple(_notes(subject, summary, load, price)),
    )


def _notes(subject: Subject, summary: Summary, load: ClosedForm, price: Quote | None) -> Iterator[str]:
    """What to know beside the figures, a line each."""
    question, limits, setup = subject.question, subject.limits, subject.setup
    pool_tokens = round(subject.pool_tokens)
    if not load.steady:
        yield (
            f"unstable: {load.offered_request_per_s:.3g} requests/s come and {load.stable_request_per_s:.3g} "
            f"can be served; the queue grows without end (from {summary.queue[0]:,.0f} waiting to "
            f"{summary.queue[1]:,.0f}), and latencies with the length of the run"
        )
    elif not summary.window.steady:
        yield "no steady state was seen: a longer run (--requests), or --warm-up SECONDS"
    if summary.rejected:
        yield (
            f"{summary.rejected:,} requests rejected: no room in max_model_len "
            f"{limits.max_model_len or 0:,}, or in the KV pool of {pool_tokens:,} tokens"
        )
    if summary.truncated:
        yield f"{summary.truncated:,} answers cut short at max_model_len {limits.max_model_len or 0:,}"
    if subject.policy.engine is None:
        yield f"the stable rate is of continuous batching, not of {subject.policy.name}"
    if subject.policy.verified is None:
        yield f"the scheduler {subject.policy.name} is unverified: no log of it was compared"
    if summary.unfinished:
        yield f"{summary.unfinished:,} requests were still under way"
    if question.max_model_len is None:
        asked = " with what clients ask at most" if question.max_new_tokens else ""
        yield f"max_model_len {limits.max_model_len or 0:,}: the longest request of the workload{asked}"
    if setup.lone:
        yield slots_note(subject)
    if isinstance(subject.workload, SessionWorkload) and subject.workload.cut_sessions:
        yield f"{subject.workload.cut_sessions:,} sessions ended early: their next turn would not fit"
    if subject.link is not None:
        yield (
            "prompts apart: batch, ITL and KV usage are of the replica that decodes; the first token is "
            "there at the prompt's end, the KV's way counts in TPOT and E2E and not in ITL; unverified: no "
            "run of it was compared"
        )
    if isinstance(subject.workload, TraceWorkload):
        yield from _left_out(subject.workload)
    if question.dp > 1:
        yield f"{question.dp} data-parallel ranks are scheduled as one, with the limits of all"
    # What latency says of the same replica; its load is said here.
    served = (
        None
        if question.bounds or subject.link is not None
        else replace(load.served, steady=True, limit="users")
    )
    yield from latency_notes.notes(setup, served)
    if price is None:
        yield f"no price of {setup.gpu.id} is known: --price USD per GPU and hour"
    else:
        yield from price.warnings


def _left_out(trace: TraceWorkload) -> Iterator[str]:
    """Rows of the trace that were not played."""
    if trace.skipped:
        yield f"{trace.skipped:,} bad rows of the trace left out; {trace.first_skipped}"
    if trace.failed:
        yield f"{trace.failed:,} requests of the trace left out that had failed when they were logged"


def slots_note(subject: Subject) -> str:
    """llama.cpp's slots and context: the server's command line, and whose choice the slots were."""
    slots, users = subject.limits.max_num_seqs, subject.question.workload.users
    if subject.question.max_num_seqs is not None:
        whose = "as asked"
    elif users is not None:
        whose = "a slot a user"
    else:
        whose = "the slots of a server without --parallel, which would share the model's own longest context"
    return f"--parallel {slots} --ctx-size {round(subject.pool_tokens)}, a part a slot: {whose}"


__all__ = ["Simulation", "answer", "simulate"]
