"""The need under an engine: its terms instead of a rule of thumb, its budget instead of the whole memory."""

from dataclasses import replace

from capplan import catalog
from capplan.capacity import Demand, Need, Overhead, Target, Verdict
from capplan.engines import plan as engines
from capplan.engines.plan import Advice, EngineFlags, EnginePlan
from capplan.errors import InputError
from capplan.specs import Model
from capplan.units import format_gib

BESIDE = ("total", "budget", "weights", "extra", "kv_cache")
"""Terms that are no overhead."""


def under_engine(
    name: str,
    flags: EngineFlags | None,
    *,
    model: Model | None,
    demand: Demand,
    need: Need,
    targets: tuple[Target, ...],
    kv_bits: float,
    tp: int,
    calibration: str | None = None,
) -> tuple[Need, Verdict, EnginePlan]:
    """The need with the engine's terms, the verdict against its budget, and its plan, on one rank.

    The verdict is True where the engine starts and the users' full contexts are in its KV pool, over the
    whole band; None where the band straddles either. Capacities and the pool are the estimate's.
    Errors: InputError without a model or without exactly one GPU, and the engine's own.
    """
    if model is None:
        raise InputError("an engine needs a model's layers", where="--engine", hint="give --model")
    if len(targets) != 1:
        raise InputError(
            "an engine's plan is for one GPU" if targets else "an engine's plan needs a GPU",
            where="--engine, --gpu",
            hint="give one --gpu NAME, or --gpu-memory SIZE",
        )
    target = targets[0]
    longest = flags.max_model_len if flags else None
    if longest is not None and demand.context > longest:
        raise InputError(
            f"users of {demand.context:,} tokens, and the engine admits {longest:,}",
            where="--context, --max-model-len",
            hint="lower the context, or raise the longest request",
        )
    asked = replace(
        flags or EngineFlags(),
        kv_bits=kv_bits,
        tp=tp,
        block_size=None if demand.block_size == 16 else demand.block_size,
    )

    def made(extra_bytes: int) -> EnginePlan:
        return engines.plan(
            name,
            model,
            weights_bytes=need.weights_bytes,
            extra_bytes=extra_bytes,
            total_bytes=target.whole_bytes or target.usable_bytes,
            gpu=catalog.load_gpu(target.gpu_id) if target.gpu_id else None,
            flags=asked,
        )

    plan = made(need.extra_bytes)
    rule = f"{plan.engine} {plan.version}'s own terms"
    if calibration is not None:
        from capplan import memory_calibration

        found = memory_calibration.read(calibration)
        plan = memory_calibration.with_measured(plan, found, made, need.extra_bytes)
        rule = f"measured: {found.label}"
    if target.free_bytes is not None:
        plan = _with_free(plan, target.free_bytes)
    plan = replace(plan, notes=(*plan.notes, *_waiting(plan, demand.users)))
    own = need_under(need, plan, rule)
    fixed = own.weights_bytes + own.extra_bytes + own.overhead.high_bytes
    held = replace(
        target,
        # Whatever an engine's fraction is of: what it holds beside the KV cache, and its pool.
        usable_bytes=max(0, fixed + plan.kv_pool.value),
        reading=f"what {plan.engine} takes of the {format_gib(plan.terms['total'])} it sees",
    )
    verdict = demand.verdict(held, own)
    return (
        own,
        replace(
            verdict,
            fits=_fits(plan, (need.kv_bytes or 0) + need.tail_bytes),
            pool_bytes=max(0, plan.kv_pool.value),
            pool_tokens=plan.kv_tokens,
            max_concurrency=plan.max_concurrency,
        ),
        plan,
    )


def _waiting(plan: EnginePlan, users: int) -> tuple[str, ...]:
    """What to say where more users are asked for than the engine runs at once."""
    for flag in plan.flags:
        if flag.name == "max_num_seqs" and users > float(flag.value):
            return (f"{users:,} users, and max_num_seqs {flag.value}: the others wait",)
    return ()


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


def _with_free(plan: EnginePlan, free_bytes: int) -> EnginePlan:
    """The plan on a GPU of which others hold a part: vLLM refuses where less than its budget is free."""
    budget = plan.terms.get("budget")
    if plan.engine != "vllm" or budget is None or budget <= free_bytes:
        return plan
    fraction = free_bytes * 100 // plan.terms["total"] / 100
    advice = Advice(
        change=f"no more than the {format_gib(free_bytes)} that is free; or free the rest",
        flag=f"--gpu-memory-utilization {fraction:g}",
    )
    return replace(
        plan,
        starts=False,
        reason=f"{format_gib(free_bytes)} is free, less than the budget of {format_gib(budget)}",
        advice=(advice,) if fraction > 0 else (),
    )


def _fits(plan: EnginePlan, users_bytes: int) -> bool | None:
    """Whether it starts and the pool holds the users, over the whole band."""
    if plan.starts is False or users_bytes > plan.kv_pool.high:
        return False
    return True if plan.starts and users_bytes <= plan.kv_pool.low else None
