"""llama.cpp's share of a model on its GPUs: what the fullest holds of weights and cache."""

from dataclasses import replace

from capplan.capacity import Target
from capplan.engine_need import need_under, verdict_under
from capplan.engines import llama_cpp
from capplan.engines.plan import Advice, EngineFlags, EnginePlan, check_flags
from capplan.kv import kv_layout
from capplan.ranks import RankNeed
from capplan.specs import Format, Model
from capplan.units import format_gib


def on_gpus(
    rank: RankNeed,
    model: Model,
    flags: EngineFlags,
    *,
    stored: Format | None,
    target: Target,
    calibration: str | None = None,
) -> RankNeed:
    """The whole model's need as what its fullest GPU holds of it, with the plan and the verdict.

    Users are counted in the cells of the cache: all slots share them where it is unified, else each user
    has a slot's.
    """
    check_flags(flags)
    devices = flags.tp * flags.pp
    whole = target.whole_bytes or target.usable_bytes

    def made(extra_bytes: int) -> EnginePlan:
        return llama_cpp.plan(
            model,
            weights_bytes=-(-rank.need.weights_bytes // devices),
            extra_bytes=extra_bytes,
            total_bytes=whole if target.free_bytes is None else min(whole, target.free_bytes),
            flags=flags,
            precision=stored,
        )

    plan = made(rank.need.extra_bytes)
    rule = f"{plan.engine} {plan.version}'s own buffers"
    if calibration is not None:
        from capplan import memory_calibration

        found = memory_calibration.read(calibration)
        plan = memory_calibration.with_measured(plan, found, made, rank.need.extra_bytes)
        rule = f"measured: {found.label}"
    held = plan.more["gpus"][plan.more["fullest"]]
    first = held["first_layer"] or 0
    layout = kv_layout(model, kv_bits=flags.kv_bits, layers=range(first, first + held["layers"]))
    both = layout
    if rank.draft is not None:
        from capplan.draft import combined

        both = combined(layout, rank.draft.layout)
    demand = replace(rank.demand, layout=both)
    kv, tail = demand.kv_bytes(demand.users, demand.context)
    own = need_under(
        replace(
            rank.need,
            weights_bytes=plan.terms["weights"],
            extra_bytes=plan.terms["extra"],
            kv_bytes=kv,
            tail_bytes=tail,
        ),
        plan,
        rule,
    )
    users, context = demand.users * demand.samples, demand.context
    cells, slot, slots = _cells(plan)
    most = cells // context if slot == cells else (slots if context <= slot else 0)
    longest = cells // users if slot == cells else (slot if users <= slots else 0)
    limit = demand.max_context
    verdict = replace(
        verdict_under(demand, own, plan, target, fits=plan.starts if most >= users else False),
        max_users=most // demand.samples,
        max_context=longest if limit is None else min(longest, limit),
    )
    if most < users and plan.starts is not False:
        more = Advice(
            change=f"the cache of {cells:,} cells holds {most:,} of {users:,} full contexts",
            flag=f"--max-model-len {context} --max-num-seqs {users}",
        )
        plan = replace(plan, advice=(more, *plan.advice))
    if held["layers"] < model.layers and devices == 1:
        host = plan.more["host"]
        note = (
            f"{held['layers']} of {model.layers} layers on the GPU; host memory holds "
            f"{format_gib(host['weights'])} of weights and "
            f"{format_gib(host['kv_cache'] + host['states'])} of cache"
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(rank, layout=layout, demand=demand, need=own, plan=plan, verdict=verdict)


def _cells(plan: EnginePlan) -> tuple[int, int, int]:
    """Cells in all, cells of one slot, slots."""
    cells, slots = int(plan.flag("ctx_size").value), int(plan.flag("parallel").value)
    return cells, cells if plan.flag("kv_unified").value else cells // slots, slots
