"""An engine's plan as the need and the verdict of a rank."""

from dataclasses import replace

from capplan.capacity import Demand, Need, Overhead, Target, Verdict
from capplan.engines.plan import EnginePlan
from capplan.units import format_gib

BESIDE = ("total", "budget", "weights", "extra", "kv_cache")
"""Terms that are no overhead."""


def need_under(need: Need, plan: EnginePlan, rule: str) -> Need:
    """The need with the engine's terms as its overhead."""
    terms = {
        name: size
        for name, size in plan.terms.items()
        if size and name not in BESIDE and not name.endswith("_outside")
    }
    size = sum(terms.values())
    overhead = Overhead(low_bytes=size, high_bytes=size, rule=rule, named=terms)
    return replace(need, overhead=overhead)


def verdict_under(
    demand: Demand, own: Need, plan: EnginePlan, target: Target, *, fits: bool | None
) -> Verdict:
    """The verdict against what the engine takes of the memory."""
    fixed = own.weights_bytes + own.extra_bytes + own.overhead.high_bytes
    held = replace(
        target,
        # Whatever an engine's fraction is of: what it holds beside the KV cache, and its pool.
        usable_bytes=max(0, fixed + plan.kv_pool.value),
        reading=f"what {plan.engine} takes of the {format_gib(plan.terms['total'])} it sees",
    )
    return replace(
        demand.verdict(held, own),
        fits=fits,
        pool_bytes=max(0, plan.kv_pool.value),
        pool_tokens=plan.kv_tokens,
        max_concurrency=plan.max_concurrency,
    )
