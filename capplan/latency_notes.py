"""What to know of an answer about speed beside its figures: whose numbers they are, what was left out."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from capplan import catalog, latency_profile
from capplan.engine_speed import family_of
from capplan.formulas import serving
from capplan.latency_setup import Setup
from capplan.local_costs import LocalCosts
from capplan.step import OpTime
from capplan.units import format_seconds

CHUNK: Final = 2048
"""Prompt tokens of the step that shows what a format costs."""
TOLD: Final = 0.25
"""From which part of a step on operations outside their measured range widen the band."""
_PROMPT: Final[dict[str, Any]] = {"decode_sequences": 0, "kv_tokens": 0, "prompt_tokens": CHUNK}


def notes(setup: Setup, served: serving.Served | None) -> Iterator[str]:
    """One line each; `served` None: bounds alone."""
    if isinstance(setup.costs, LocalCosts) and setup.local is not None:
        yield from latency_profile.notes(setup.local, setup.costs)
    if setup.plan is not None and setup.plan.starts is False:
        yield f"{setup.plan.engine} refuses to start: {setup.plan.reason}"
    if not setup.batch_fits:
        each = setup.question.isl + setup.question.osl
        yield (
            f"a batch of {setup.question.batch:,} with {each:,} tokens each does not fit the KV pool of "
            f"{setup.pool_tokens:,.0f} tokens: at most --batch {setup.largest_batch:,}"
        )
    if setup.on_host:
        yield f"{setup.on_host} layers stay on the host, whose speed was not measured: bounds only"
    if setup.local is None:
        yield from _emulated(setup, served)
    yield from _speculation(setup)
    if setup.question.expert_skew:
        yield "the bound counts the experts that one token reads: uneven routing may touch no more"
    if served is not None:
        yield from _doubts(setup, served)
        yield from _load(setup, served)


def outside(*steps: Sequence[OpTime]) -> tuple[str, ...]:
    """Operations far outside of what was measured, where they are a good part of a step."""
    found: dict[str, None] = {}
    for ops in steps:
        far = [op for op in ops if op.outside]
        if sum(op.time_s for op in far) >= TOLD * sum(op.time_s for op in ops):
            longest = max(far, key=lambda op: op.time_s, default=None)
            if longest is not None:
                found[f"{longest.kind} {longest.name}: {longest.outside}"] = None
    return tuple(f"outside what was measured, a wider band: {text}" for text in found)


def _emulated(setup: Setup, served: serving.Served | None) -> Iterator[str]:
    """A format that the GPU has no arithmetic for, and what that costs beside 16-bit weights."""
    dtypes = [shape.dtype for shape in setup.work.gemms] + [shape.dtype for shape in setup.work.experts]
    runs = {dtype: setup.costs.rates.runs(dtype) for dtype in dtypes}
    widened = [dtype for dtype, kernel in runs.items() if kernel != dtype and kernel.endswith("a16")]
    if not widened or setup.lone:
        return
    how = (
        f"{setup.gpu.name} multiplies no {widened[0]}: its weights are widened to 16 bits in the kernel "
        f"({runs[widened[0]]})"
    )
    if served is None:
        yield how
        return
    half = catalog.load_format("bf16")
    own, plain = (
        [step_s(decode_sequences=1, kv_tokens=setup.question.isl), step_s(**_PROMPT)]
        for step_s in (setup.plain_table(stored).step_s for stored in (setup.precision, half))
    )
    yield (
        f"{how}; a step of one sequence takes {format_seconds(own[0])}, of a prompt of {CHUNK:,} tokens "
        f"{format_seconds(own[1])}, against {format_seconds(plain[0])} and {format_seconds(plain[1])} with "
        f"16-bit weights"
    )


def _speculation(setup: Setup) -> Iterator[str]:
    """What drafting adds, and what of it is not modelled."""
    question = setup.question
    if question.speculative_tokens is None:
        return
    drafted = f"{question.speculative_tokens} drafted a step"
    if question.draft_model is None:
        by = "by n-grams of the text, whose look-up on the host is not counted"
    else:
        by = f"by {question.draft_model}, its passes inside the step"
    yield (
        f"{drafted} {by}; at acceptance {question.acceptance_rate:g} a step adds "
        f"{setup.question.tokens_per_step:.3g} tokens"
    )
    yield (
        "not modelled: trees of drafts, rejection sampling, acceptance that differs between requests; "
        "no runs with drafts were fitted: a wider band"
    )


def _doubts(setup: Setup, served: serving.Served) -> Iterator[str]:
    """Why the band is wider than that of runs held out."""
    if setup.lenders:
        yield f"kernels as measured on {', '.join(setup.lenders)}, at this GPU's rates: a wider band"
    if not setup.behaviour.measured:
        yield f"no public runs of {setup.engine} on {family_of(setup.gpu)} were fitted: a wider band"
    if not setup.behaviour.covered and setup.plan is not None:
        yield (
            f"runs of {setup.engine} {setup.behaviour.verified} were fitted, not of {setup.plan.version}: "
            f"a wider band"
        )
    if setup.costs.sms_gpu.id != setup.gpu.id:
        yield (
            f"the multiprocessors of {setup.gpu.name} are not known: the {setup.costs.sms_gpu.sm_count} of "
            f"{setup.costs.sms_gpu.name} stand for them"
        )
    if setup.question.tp > 1 and setup.gpu.vendor == "nvidia" and not setup.gpu.nvlink_bytes_per_s:
        yield (
            "all-reduces as measured where PCIe cards reach each other's memory; where they cannot, as on "
            "many desktops, expect a third fewer tokens (docs/latency.md)"
        )
    if setup.lone and served.batch > 1.5:
        yield f"{setup.engine} was measured with one sequence at a time: this is beyond it"


def _load(setup: Setup, served: serving.Served) -> Iterator[str]:
    """Where requests wait, or for ever."""
    if not served.steady:
        yield (
            f"{setup.question.request_per_s:g} requests/s is above the stable "
            f"{served.stable_request_per_s:.3g}: no steady state, the queue grows without end"
        )
    if served.limit == "kv":
        yield f"the KV pool holds {served.running:,.0f} of these requests at once: the others wait"
    elif served.limit == "max_num_seqs":
        yield f"max_num_seqs {setup.scheduling.max_num_seqs:,}: the others wait"
