"""An engine's plan as lines of text, for every output that shows one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from capplan.units import format_gib

if TYPE_CHECKING:
    from capplan.engines.plan import EnginePlan, Flag

TERMS = {
    "activation": "activation peak",
    "non_torch": "outside torch",
    "cuda_graphs": "CUDA graphs",
}


def term_name(name: str) -> str:
    """A term as it is printed."""
    return TERMS.get(name, name.replace("_", " "))


def term_lines(terms: Mapping[str, int], rule: str) -> list[tuple[str, int, str]]:
    """The parts of the overhead: name, bytes, how they come about (said once)."""
    return [
        (term_name(name), size, "" if number else rule) for number, (name, size) in enumerate(terms.items())
    ]


def engine_lines(plan: "EnginePlan | None") -> list[str]:
    """What the engine would log, in order; the first line is the verdict. Nothing without an engine."""
    if plan is None:
        return []
    name = f"{plan.engine} {plan.version}"
    word = {True: "starts", False: "refuses", None: "may start or refuse"}[plan.starts]
    why = ": " if plan.starts is False else "; by the estimate "
    made = [f"{name} {word}" + (f"{why}{plan.reason}" if plan.reason else "")]
    made.append("flags: " + ", ".join(_flag(flag) for flag in plan.flags))
    pool = plan.kv_pool
    text = f"KV pool {format_gib(pool.value)}"
    if pool.low < pool.high:
        text += f" ({format_gib(pool.low)} to {format_gib(pool.high)})"
    if plan.kv_tokens is not None:
        text += f" = {plan.kv_tokens:,} tokens"
    if plan.max_concurrency is not None:
        text += f", maximum concurrency {plan.max_concurrency:.2f}x for the longest request"
    made.append(text)
    limits = []
    if plan.longest_model_len is not None:
        limits.append(f"longest max_model_len that starts {plan.longest_model_len:,}")
    if plan.safe_max_num_seqs is not None:
        limits.append(f"max_num_seqs safe up to {plan.safe_max_num_seqs:,}")
    fraction = plan.more.get("safe_gpu_memory_utilization")
    if fraction is not None:
        limits.append(f"gpu_memory_utilization up to {fraction:g}")
    if limits:
        made.append("; ".join(limits))
    return made + [f"change {advice.flag}: {advice.change}" for advice in plan.advice]


def _flag(flag: "Flag") -> str:
    value = f"{flag.value:g}" if isinstance(flag.value, float) else str(flag.value)
    return f"{flag.name} {value}" + ("" if flag.source == "asked" else " (default)")
