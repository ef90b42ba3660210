"""The need under an engine: its terms instead of a rule of thumb, its budget instead of the whole memory."""

from collections.abc import Sequence
from dataclasses import replace

from capplan import catalog
from capplan.capacity import Target
from capplan.engine_need import need_under, verdict_under
from capplan.engines import plan as engines
from capplan.engines.plan import Advice, EngineFlags, EnginePlan
from capplan.errors import InputError
from capplan.question import VramQuestion
from capplan.ranks import RankNeed
from capplan.specs import Format, Model
from capplan.units import format_gib


def under_engine(
    question: VramQuestion,
    ranks: Sequence[RankNeed],
    *,
    model: Model | None,
    stored: Format | None,
    targets: Sequence[Target],
    kv_bits: float,
) -> tuple[RankNeed, ...]:
    """The ranks with the engine's terms in their need, their verdict against its budget, and its plan.

    `targets` are the ranks' GPUs, one each.

    The verdict is True where the engine starts and the users' full contexts are in its KV pool, over the
    whole band; None where the band straddles either. Capacities and the pool are the estimate's.
    Errors: InputError without a model, and the engine's own.
    """
    flags = question.engine_flags or EngineFlags()
    if model is None:
        raise InputError("an engine needs a model's layers", where="--engine", hint="give --model")
    longest = flags.max_model_len
    if longest is not None and question.context > longest:
        raise InputError(
            f"users of {question.context:,} tokens, and the engine admits {longest:,}",
            where="--context, --max-model-len",
            hint="lower the context, or raise the longest request",
        )
    asked = replace(
        flags,
        kv_bits=kv_bits,
        tp=question.tp,
        pp=question.pp,
        ep=question.ep,
        dp=question.dp,
        block_size=None if question.block_size == 16 else question.block_size,
    )
    name = engines.engine_id(question.engine or "")
    if name == "llama.cpp":
        from capplan.offload import on_gpus

        return tuple(
            on_gpus(rank, model, asked, stored=stored, target=target, calibration=question.calibration)
            for rank, target in zip(ranks, targets, strict=True)
        )
    if asked.gpu_layers is not None:
        raise InputError(
            f"{name} keeps all layers on GPUs", where="--gpu-layers", hint="it goes with --engine llama.cpp"
        )
    return tuple(
        _planned(name, rank, model, asked, target, question)
        for rank, target in zip(ranks, targets, strict=True)
    )


def _planned(
    name: str, rank: RankNeed, model: Model, flags: EngineFlags, target: Target, question: VramQuestion
) -> RankNeed:
    need, demand = rank.need, rank.demand
    if rank.stage is not None:
        flags = replace(flags, stage=rank.stage.layers)
    if rank.draft is not None:
        flags = replace(flags, draft=rank.draft.model)
    whole = target.whole_bytes or target.usable_bytes
    charged = _charged(name, flags, target, whole)

    def made(extra_bytes: int) -> EnginePlan:
        return engines.plan(
            name,
            model,
            weights_bytes=need.weights_bytes,
            extra_bytes=extra_bytes + charged,
            total_bytes=whole if name == "vllm" else _free_total(target, whole),
            gpu=catalog.load_gpu(target.gpu_id) if target.gpu_id else None,
            flags=flags,
        )

    if name == "sglang" and flags.gpu_memory_utilization is None and target.free_bytes is not None:
        # Its default fraction follows the whole memory, what it is a fraction of is what is free.
        whole_plan = engines.plan(
            name, model, weights_bytes=need.weights_bytes, total_bytes=whole, flags=flags
        )
        flags = replace(flags, gpu_memory_utilization=float(whole_plan.flag("mem_fraction_static").value))
    plan = made(need.extra_bytes)
    rule = f"{plan.engine} {plan.version}'s own terms"
    if question.calibration is not None:
        from capplan import memory_calibration

        found = memory_calibration.read(question.calibration)
        plan = memory_calibration.with_measured(plan, found, made, need.extra_bytes)
        rule = f"measured: {found.label}"
    if target.free_bytes is not None and not charged:
        plan = _with_free(plan, target.free_bytes)
    if charged:
        plan = replace(plan, terms=_told_apart(plan, charged, need.extra_bytes))
    plan = replace(plan, notes=(*plan.notes, *_waiting(plan, demand.users * demand.samples)))
    own = need_under(need, plan, rule)
    return replace(
        rank,
        need=own,
        plan=plan,
        verdict=verdict_under(
            demand, own, plan, target, fits=_fits(plan, (need.kv_bytes or 0) + need.tail_bytes)
        ),
    )


def _waiting(plan: EnginePlan, sequences: int) -> tuple[str, ...]:
    """What to say where more sequences are asked for than the engine runs at once."""
    for flag in plan.flags:
        if flag.name == "max_num_seqs" and sequences > float(flag.value):
            return (f"{sequences:,} sequences, and max_num_seqs {flag.value}: the others wait",)
    return ()


def _free_total(target: Target, whole: int) -> int:
    """What an engine finds, as a driver would report it of a GPU with that much memory."""
    from capplan.engines.vllm_terms import visible_bytes

    if target.free_bytes is None:
        return whole
    return min(whole, target.free_bytes + whole - visible_bytes(whole))


def _charged(name: str, flags: EngineFlags, target: Target, whole: int) -> int:
    """What others hold, where the engine's version counts it as its own."""
    if name != "vllm" or target.free_bytes is None:
        return 0
    from capplan.engines.vllm_defaults import UNKNOWN, facts, number
    from capplan.engines.vllm_terms import visible_bytes

    named = flags.version is not None and flags.version != UNKNOWN
    version = number(str(flags.version) if named else str(facts()["newest"]))
    spans = facts()["neighbours_charged"]
    if not any(number(span["since"]) <= version < number(span["before"]) for span in spans):
        return 0
    return max(0, visible_bytes(whole) - target.free_bytes)


def _told_apart(plan: EnginePlan, charged: int, extra: int) -> dict[str, int]:
    """The terms with what others hold under its own name."""
    made: dict[str, int] = {}
    for name, size in plan.terms.items():
        if name == "extra":
            made |= {"extra": extra, "others": charged}
        else:
            made[name] = size
    return made


def _with_free(plan: EnginePlan, free_bytes: int) -> EnginePlan:
    """The plan on a GPU of which others hold a part: vLLM refuses where less than its budget is free.

    It looks once its process has its own context.
    """
    budget = plan.terms.get("budget")
    if plan.engine != "vllm" or budget is None:
        return plan
    from capplan.engines.vllm_defaults import calibration

    ready = max(0, free_bytes - int(calibration()["process_bytes"]))
    if budget <= ready:
        return plan
    fraction = ready * 100 // plan.terms["total"] / 100
    advice = Advice(
        change=f"no more than the {format_gib(ready)} that is free then; or free the rest",
        flag=f"--gpu-memory-utilization {fraction:g}",
    )
    reason = f"{format_gib(free_bytes)} is free, less than the budget of {format_gib(budget)}"
    if budget <= free_bytes:
        reason += f" and the {format_gib(free_bytes - ready)} of its process"
    return replace(plan, starts=False, reason=reason, advice=(advice,) if fraction > 0 else ())


def _fits(plan: EnginePlan, users_bytes: int) -> bool | None:
    """Whether it starts and the pool holds the users, over the whole band."""
    if plan.starts is False or users_bytes > plan.kv_pool.high:
        return False
    return True if plan.starts and users_bytes <= plan.kv_pool.low else None
