"""`capplan latency --explain`: the formulas with this run's numbers in them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from capplan.latency_lines import fitted
from capplan.units import GIB, format_seconds

if TYPE_CHECKING:
    from capplan.latency_estimate import LatencyEstimate


def explain_latency(made: "LatencyEstimate") -> tuple[str, ...]:
    """One line a step, from bytes to what users see."""
    return (*_decode_step(made), *_engine(made), *_users(made))


def _decode_step(made: "LatencyEstimate") -> Iterator[str]:
    """The mean step that only decodes: bytes, FLOP, kernels, the engine's own time."""
    ops = made.decode_ops
    if not ops:
        return
    rate = made.gpu.memory_bandwidth_bytes_per_s
    moved = sum(op.bytes for op in ops if op.kind != "collective")
    yield (
        f"decode step of batch {made.load.batch:,.1f}: {moved / GIB:,.2f} GiB read and written on one GPU / "
        f"{rate / 1e9:,.0f} GB/s = {format_seconds(moved / rate)}"
    )
    yield (
        f"its {sum(op.flop for op in ops) / 1e9:,.0f} GFLOP and collectives included, no operation below its "
        f"bound: {format_seconds(sum(op.bound_s for op in ops))}"
    )
    if made.served is not None:
        total = sum(op.time_s for op in ops)
        host = sum(op.time_s for op in ops if op.kind == "host")
        yield (
            f"by the measured kernels {format_seconds(total - host)}, and {format_seconds(host)} of the "
            f"engine's own: {format_seconds(total)}"
        )


def _engine(made: "LatencyEstimate") -> Iterator[str]:
    """The engine's numbers, tokens a step, what prompts add."""
    question, served = made.question, made.served
    if served is None:
        return
    yield f"the engine's numbers, fitted after the kernels: {fitted(made)}"
    if question.speculative_tokens is not None and served.tpot_s is not None:
        tokens = f"{question.tokens_per_step:.4g}"
        yield (
            f"tokens a step adds = Σ pⁱ for i = 0…{question.speculative_tokens}, p = "
            f"{question.acceptance_rate:g}: {tokens}; TPOT without prompts = "
            f"{format_seconds(served.decode_step_s)} / {tokens} = "
            f"{format_seconds(served.decode_step_s / question.tokens_per_step)}"
        )
    yield (
        f"each prompt of {question.isl - question.prefix_shared:,} new tokens adds "
        f"{format_seconds(served.prompt_s)} to the steps it passes through; prompts take "
        f"{served.prefill_share:.0%} of the engine's time"
    )


def _users(made: "LatencyEstimate") -> Iterator[str]:
    """TPOT, utilisation and throughput."""
    question, load = made.question, made.load
    if load.tpot_s is None:
        yield "TPOT is undefined for one output token"
    elif load.steady:
        yield (
            f"TPOT = (E2E − TTFT) / (N − 1) = ({format_seconds(load.e2e_s)} − "
            f"{format_seconds(load.ttft_s)}) / {question.osl - 1:,} = {format_seconds(load.tpot_s)}"
        )
    if made.served is not None:
        asked = question.request_per_s if question.request_per_s is not None else load.request_per_s
        yield (
            f"utilisation = {asked:,.3g} / {load.stable_request_per_s:,.3g} requests/s = "
            f"{load.utilization:.0%}: the stable rate is that of as many requests under way as fit"
        )
    if load.steady:
        yield (
            f"throughput = requests/s · tokens = {load.request_per_s:,.3g} · {question.osl:,} = "
            f"{load.output_token_per_s:,.0f} output tokens/s"
        )
