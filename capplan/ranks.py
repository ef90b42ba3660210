"""The fullest rank of each pipeline stage: what it holds, what its users ask of it, which stage decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from capplan.capacity import Demand, Need, Target, Verdict, all_hold
from capplan.kv import KvLayout, kv_layout
from capplan.overhead import overhead_of
from capplan.parts import parts_of
from capplan.question import VramQuestion
from capplan.specs import Format, Model
from capplan.split import (
    Rank,
    Split,
    Stage,
    check_engine,
    check_experts,
    check_stages,
    experts_of,
    stages_of,
)
from capplan.weights import check_split, weight_budget

if TYPE_CHECKING:
    from capplan.draft import Draft
    from capplan.engines.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankNeed:
    """What one rank holds; `layout` are its own caches, `demand` has a draft's beside them.

    `verdict` and `plan` are those of the memory told, where one is named.
    """

    stage: Stage | None
    layout: KvLayout | None
    demand: Demand
    need: Need
    extra: Mapping[str, int]
    notes: tuple[str, ...]
    draft: "Draft | None" = None
    verdict: Verdict | None = None
    plan: "EnginePlan | None" = None

    @property
    def own_kv_bytes(self) -> int:
        """KV cache without the draft's."""
        return replace(self.demand, layout=self.layout).kv_bytes(self.demand.users, self.demand.context)[0]

    def to_dict(self, *, decides: bool, named: bool) -> dict[str, Any]:
        """JSON of a pipeline stage; its pool where a GPU is named."""
        layers = self.stage.layers if self.stage else range(0)
        verdict, plan = self.verdict if named else None, self.plan
        return {
            "layers": len(layers),
            "first_layer": layers.start,
            "gpu": verdict.gpu_id if verdict else None,
            "weights": {"bytes": self.need.weights_bytes},
            "kv_cache": {"bytes": self.need.kv_bytes},
            "total": {"bytes": self.need.total_bytes, "low_bytes": self.need.low_bytes},
            "kv_pool": {
                "bytes": verdict.pool_bytes if verdict else None,
                "tokens": verdict.pool_tokens if verdict else None,
            },
            "starts": plan.starts if plan else None,
            "decides": decides,
        }


def split_of(question: VramQuestion, model: Model | None, engine: str | None) -> Split:
    """The split asked for; InputError where the model or the engine does not allow it.

    llama.cpp has no ranks: its GPUs share the layers by its own rule, which its plan knows.
    """
    check_engine(engine, pp=question.pp, ep=question.ep, dp=question.dp)
    if engine == "llama.cpp":
        return Split()
    if model is not None and (question.ep > 1 or question.dp > 1):
        check_experts(model, engine, tp=question.tp, ep=question.ep, dp=question.dp)
    stages: tuple[Stage, ...] = ()
    if question.pp > 1 and model is not None:
        check_stages(model, question.pp, question.pp_layers)
        stages = stages_of(question.pp_layers or _stage_sizes(model.layers, question.pp, engine))
    split = Split(
        tp=question.tp, ep=question.ep, dp=question.dp, stages=stages, own_replicas=engine == "sglang"
    )
    if model is not None and not split.ranks()[0].whole:
        check_split(model, split.tp, expert_tp=split.expert_tp)
    return split


def _stage_sizes(layers: int, pp: int, engine: str | None) -> tuple[int, ...]:
    """Layers of each stage as the engine cuts them; as vLLM does where none is asked for.

    Of the layers left over SGLang gives the last stages one more each (get_pp_indices), TensorRT-LLM the
    first (Mapping.pp_layers), vLLM those before the last (kv_groups.stage_layers). Read 2026-11-29.
    Example: 80 over 3: 26, 27, 27 in SGLang, 27, 27, 26 in the others.
    """
    each, left = divmod(layers, pp)
    if engine == "sglang":
        return (each,) * (pp - left) + (each + 1,) * left
    if engine == "tensorrt-llm":
        return (each + 1,) * left + (each,) * (pp - left)
    from capplan.engines.kv_groups import stage_layers  # pipelines only

    return tuple(len(part) for part in stage_layers(layers, pp))


def split_notes(split: Split, model: Model | None) -> tuple[str, ...]:
    """What to say of a split: uneven stages, heads held several times, experts that do not divide."""
    made = []
    if split.uneven:
        sizes = ", ".join(f"{len(stage.layers)}" for stage in split.stages)
        made.append(f"uneven pipeline stages: {sizes} layers")
    if model is None:
        return tuple(made)
    heads = {
        cache.heads
        for group in model.groups
        for cache in group.layer.caches()
        if cache.splits and cache.kind != "state" and cache.heads < split.tp
    }
    for count in sorted(heads):
        made.append(
            f"{count} KV heads over {split.tp} GPUs: each is kept {split.tp // count} times, so more of them "
            "do not make the KV cache of one GPU smaller"
        )
    experts = experts_of(model)
    if split.ep > 1 and experts % split.ep:
        made.append(
            f"{experts} experts over {split.ep} ranks: the first {experts % split.ep} hold one more "
            f"({-(-experts // split.ep)})"
        )
    return tuple(made)


def demand_of(question: VramQuestion, layout: KvLayout | None, model: Model | None) -> Demand:
    """What the users of one replica ask of a cache of this layout."""
    return Demand(
        layout=layout,
        users=question.users_per_replica,
        context=question.context,
        block_size=question.block_size,
        prefix_shared=question.prefix_shared,
        max_context=model.max_context if model else None,
        samples=question.n,
        prompt=question.prompt,
        replicas=question.dp,
    )


def replicas_kv_bytes(
    question: VramQuestion, layout: KvLayout | None, model: Model | None
) -> tuple[int, int]:
    """KV cache and block tails of all users, each replica with its own."""
    few, more = divmod(question.users, question.dp)
    demand = demand_of(question, layout, model)
    exact = tail = 0
    for users, replicas in ((few + 1, more), (few, question.dp - more)):
        if users and replicas:
            kv, rest = demand.kv_bytes(users, question.context)
            exact, tail = exact + kv * replicas, tail + rest * replicas
    return exact, tail


def engine_name(name: str) -> str:
    """The engine a name means; InputError otherwise."""
    from capplan.engines.plan import engine_id

    return engine_id(name)


def rank_need(
    rank: Rank,
    question: VramQuestion,
    *,
    model: Model | None,
    kv_model: Model | None,
    stored: Format | None,
    kv_bits: float,
    weights_bytes: int,
) -> RankNeed:
    """What `rank` holds; `weights_bytes` are the model's, taken whole where it is a parameter count."""
    if model is None:
        weights = -(-weights_bytes // rank.tp)
    else:
        weights = weights_bytes if rank.whole else weight_budget(model, stored, rank=rank).bytes
    parts = parts_of(
        model,
        stored,
        kv_bits=kv_bits,
        tp=rank.tp,
        stage=rank.stage,
        lora=question.lora,
        lora_slots=question.lora_slots,
        draft_model=question.draft_model,
        online=question.online,
    )
    layout = None
    if kv_model is not None:
        layers = rank.stage.layers if rank.stage else None
        layout = kv_layout(kv_model, kv_bits=kv_bits, tp=rank.tp, layers=layers)
    both = layout
    if parts.draft is not None and layout is not None:
        from capplan.draft import combined

        both = combined(layout, parts.draft.layout)
    demand = demand_of(question, both, kv_model)
    overhead = overhead_of(
        weights,
        overhead_bytes=question.overhead_bytes,
        overhead_fraction=question.overhead_fraction,
        calibration=question.calibration,
    )
    return RankNeed(
        stage=rank.stage,
        layout=layout,
        demand=demand,
        need=demand.need(weights=weights, extra=sum(parts.sizes.values()), overhead=overhead),
        extra=parts.sizes,
        notes=parts.notes,
        draft=parts.draft,
    )


def against(ranks: Sequence[RankNeed], targets: Sequence[Target]) -> tuple[RankNeed, ...]:
    """The ranks, each with its verdict against its own memory."""
    return tuple(
        replace(rank, verdict=rank.demand.verdict(target, rank.need))
        for rank, target in zip(ranks, targets, strict=True)
    )


def fullest(ranks: Sequence[RankNeed]) -> int:
    """Which rank decides: where a plan does not start or has the fewest tokens, else the least headroom."""

    def key(rank: RankNeed) -> tuple[int, float, int]:
        plan, verdict = rank.plan, rank.verdict
        if plan is None:
            return 0, 0, verdict.headroom_bytes if verdict else -rank.need.total_bytes
        order = {False: 0, None: 1, True: 2}[plan.starts]
        tokens = plan.kv_tokens or plan.kv_pool.value
        return order, tokens, -rank.need.total_bytes

    return min(range(len(ranks)), key=lambda number: key(ranks[number]))


def binding(ranks: Sequence[RankNeed]) -> Verdict | None:
    """The verdict of the rank that decides, with the least capacity of any."""
    verdict = ranks[fullest(ranks)].verdict
    if verdict is None or len(ranks) == 1:
        return verdict
    every = [rank.verdict for rank in ranks if rank.verdict is not None]

    def least(values: list[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return min(known) if known else None

    return replace(
        verdict,
        fits=all_hold([one.fits for one in every]),
        max_users=least([one.max_users for one in every]),
        max_context=least([one.max_context for one in every]),
        pool_tokens=least([one.pool_tokens for one in every]),
        max_concurrency=min(
            (one.max_concurrency for one in every if one.max_concurrency is not None), default=None
        ),
    )
