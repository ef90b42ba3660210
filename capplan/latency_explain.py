"""`capplan latency --explain`: the formulas with this run's numbers in them."""

from typing import TYPE_CHECKING

from capplan.units import GIB, format_seconds

if TYPE_CHECKING:
    from capplan.latency_estimate import LatencyEstimate


def explain_latency(made: "LatencyEstimate") -> tuple[str, ...]:
    """One line a step, from bytes to what users see."""
    question, gpu = made.question, made.gpu
    served = made.served or made.bound
    moved = sum(op.bytes for op in made.decode_ops if op.kind != "collective")
    flop = sum(op.flop for op in made.decode_ops)
    bound = sum(op.bound_s for op in made.decode_ops)
    found = [
        f"decode step of batch {served.batch:,.1f}: {moved / GIB:,.2f} GiB read and written on one GPU / "
        f"{gpu.memory_bandwidth_bytes_per_s / 1e9:,.0f} GB/s = "
        f"{format_seconds(moved / gpu.memory_bandwidth_bytes_per_s)}",
        f"its {flop / 1e9:,.0f} GFLOP and collectives included, no operation below its bound: "
        f"{format_seconds(bound)}",
    ]
    if made.served is not None:
        total = sum(op.time_s for op in made.decode_ops)
        found.append(f"by the measured kernels and the engine's own time: {format_seconds(total)}")
        found.append(
            f"each prompt of {question.isl - question.prefix_shared:,} new tokens adds "
            f"{format_seconds(served.prompt_s)} to the steps it passes through; prompts take "
            f"{served.prefill_share:.0%} of the engine's time"
        )
    if served.tpot_s is not None:
        found.append(
            f"TPOT = (E2E − TTFT) / (N − 1) = ({format_seconds(served.e2e_s)} − "
            f"{format_seconds(served.ttft_s)}) / {question.osl - 1:,} = {format_seconds(served.tpot_s)}"
        )
    else:
        found.append("TPOT is undefined for one output token")
    if served.steady:
        found.append(
            f"throughput = requests/s · tokens = {served.request_per_s:,.3g} · {question.osl:,} = "
            f"{served.output_token_per_s:,.0f} output tokens/s"
        )
    return tuple(found)
