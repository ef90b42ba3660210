"""A question about memory → its answer.

`vram(...)` is what `capplan vram` prints and what scripts call; the figures are formulas/memory over the
weights (weights.py) and caches (kv.py) of the model.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from capplan import catalog, model_source
from capplan.capacity import Need, Paging, Target, Verdict, all_hold
from capplan.engines.kv_dtype import kv_dtype
from capplan.errors import InputError
from capplan.formulas import memory
from capplan.kv import KvLayout, kv_layout
from capplan.lesson import lesson_sum
from capplan.question import DEFAULT_CONTEXT, DEFAULT_USERS, VramQuestion, checked, fitted
from capplan.ranks import (
    RankNeed,
    against,
    binding,
    engine_name,
    fullest,
    rank_need,
    replicas_kv_bytes,
    split_notes,
    split_of,
)
from capplan.specs import Format, Model
from capplan.targets import stage_targets, targets_of
from capplan.units import GIB
from capplan.weights import WeightBudget, weight_budget

if TYPE_CHECKING:
    from capplan.engines.plan import EnginePlan
    from capplan.remedies import Remedy
    from capplan.services import Service
    from capplan.side_by_side import EngineRow

__all__ = ["DEFAULT_CONTEXT", "DEFAULT_USERS", "VramEstimate", "VramQuestion", "answer", "answer_on", "vram"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class VramEstimate:
    """The answer of `capplan vram`. Sizes are bytes; `need` and `verdicts` are per GPU."""

    question: VramQuestion
    model: Model | None
    kv_model: Model | None
    parameters: int
    precision: Format | None
    kv_format: Format
    kv_reason: str
    weights: WeightBudget | None
    weights_bytes: int
    extra: dict[str, int]
    layout: KvLayout | None
    whole_layout: KvLayout | None
    draft_layout: KvLayout | None
    need: Need
    kv_bytes: int | None
    tail_bytes: int
    draft_kv_bytes: int
    draft_rank_kv_bytes: int
    verdicts: tuple[Verdict, ...]
    named: bool
    paging: Paging | None
    remedies: "tuple[Remedy, ...]" = ()
    notes: tuple[str, ...] = ()
    lesson: dict[str, Any] | None = None
    engine: "EnginePlan | None" = None
    ranks: tuple[RankNeed, ...] = ()
    rows: "tuple[EngineRow, ...]" = ()
    services: "tuple[Service, ...]" = ()

    @property
    def gpus(self) -> int:
        """GPUs in all: llama.cpp's share layers, others are tp · pp · dp ranks."""
        return self.question.tp * self.question.pp * self.question.dp

    @property
    def offloads(self) -> bool:
        """Whether layers are shared with the host, as llama.cpp does."""
        return self.engine is not None and "host" in self.engine.more

    @property
    def name(self) -> str:
        """The model's name, or the parameter count as asked."""
        return self.model.name if self.model else f"{self.parameters:,} parameters"

    @property
    def kv_bits(self) -> float:
        """Bits of one element of the KV cache."""
        return self.kv_format.effective_bits

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits a parameter takes on average, scales and unquantized tensors included."""
        return self.weights_bytes * 8 / self.parameters

    @property
    def nominal_bits(self) -> float:
        """Bits of the headline formula: of the format asked, else of most of the checkpoint's weights."""
        if self.precision is not None:
            return self.precision.element_bits
        held = self.model.stored if self.model else None
        if held is not None and held.format == "gguf":
            # The digits of the commonest type: Q4_K, BF16.
            return float("".join(c for c in next(iter(held.by_dtype)).split("_")[0] if c.isdigit()))
        own = self.model.quantization if self.model else None
        return own.rules[-1][1].element_bits if own is not None and own.rules else 16

    @property
    def asks_all(self) -> bool:
        """Whether the whole catalog was asked for."""
        return any(name.lower() == "all" for name in self.question.gpus)

    @property
    def fits(self) -> bool | None:
        """True, False, or None: no GPU named, KV unknown, or the overhead band straddles the memory.

        With several GPUs: True when one holds it.
        """
        if not self.named:
            return None
        if self.services:
            return all_hold([service.fits for service in self.services])
        answers = [verdict.fits for verdict in self.verdicts]
        return True if True in answers else None if None in answers else False

    @property
    def told(self) -> Verdict | None:
        """The verdict told first: of the first GPU that holds it, else of the first one asked."""
        if not self.named:
            return None
        holding = [verdict for verdict in self.verdicts if verdict.fits]
        return (holding or list(self.verdicts))[0]

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract `capplan.vram/1`."""
        from capplan.vram_json import vram_dict

        return vram_dict(self)

    def __repr__(self) -> str:
        return f"VramEstimate({self.name!r}, total_bytes={self.need.total_bytes}, fits={self.fits})"

    def _repr_html_(self) -> str:
        """Notebook view: the budget as a small table."""
        from html import escape

        rows = [("weights", self.need.weights_bytes), ("KV cache", self.need.kv_bytes or 0)]
        rows += [("overhead", self.need.overhead.high_bytes), ("total", self.need.total_bytes)]
        cells = "".join(
            f"<tr><td>{escape(name)}</td><td>{size / GIB:,.2f} GiB</td></tr>" for name, size in rows
        )
        return f"<table><caption>{escape(self.name)}</caption>{cells}</table>"


def vram(model: str | None = None, **fields: Any) -> VramEstimate:
    """Memory need of serving a model, whether GPUs hold it, and what would make it fit.

    `model` is a catalog name or the path of a config; `params` plans from a parameter count alone, with the
    KV cache of `kv_from`. Every user holds a full `context` (the worst case). `gpus` are catalog names or
    ("all",), or `gpu_memory_bytes` is given. The fields are those of VramQuestion.
    Raises InputError for a question that cannot be answered.
    Example: vram("8b", precision="int4", users=64).need.total_bytes
    """
    question = VramQuestion(model=model, default_context="context" not in fields, **fields)
    estimate = answer(question)
    unknown = estimate.layout is None and estimate.fits is None
    alone = len(estimate.verdicts) == 1 and not estimate.rows and not estimate.services
    if estimate.named and alone and estimate.fits is not True and not unknown:
        from capplan.remedies import find_remedies

        estimate = replace(estimate, remedies=find_remedies(estimate.question, estimate, answer))
    return estimate


def answer(question: VramQuestion) -> VramEstimate:
    """The estimate without remedies."""
    question = checked(question)
    targets, named = targets_of(
        question.gpus,
        question.gpu_memory_bytes,
        visible=question.visible_devices,
        profile=question.profile,
    )
    if question.stage_gpus:
        return answer_on(question, stage_targets(question.stage_gpus), own_gpus=True)
    if question.services:
        from capplan.services import with_services

        return with_services(question, targets if named else (), answer_on)
    if question.engine is not None:
        from capplan.side_by_side import asked_engines, compared

        engines = asked_engines(question)
        if not named:
            raise InputError(
                "an engine's plan needs a GPU",
                where="--engine, --gpu",
                hint="give --gpu NAME, or --gpu-memory SIZE",
            )
        if len(engines) > 1 or len(targets) > 1:
            return compared(question, engines, targets, answer_on)
    return answer_on(question, targets, named)


def answer_on(
    question: VramQuestion, targets: tuple[Target, ...], named: bool = True, *, own_gpus: bool = False
) -> VramEstimate:
    """The estimate against these memories; under an engine against the first.

    With `own_gpus` they are those of the pipeline stages, one each.
    """
    spec = _model(question.model, question)
    kv_model = _kv_model(question, spec)
    named_format = question.precision not in (None, "auto")
    stored = catalog.weight_format(question.precision or "") if named_format else None
    engine = None if question.engine is None else engine_name(question.engine)
    kv_format, kv_reason = kv_dtype(question.kv_dtype, kv_model, stored)
    question = fitted(question, kv_model)
    split = split_of(question, spec if spec is not None and spec.groups else kv_model, engine)
    budget, whole_bytes, parameters = _weights(spec, question, stored)
    bits = kv_format.effective_bits
    ranks = tuple(
        rank_need(
            rank,
            question,
            model=spec,
            kv_model=kv_model,
            stored=stored,
            kv_bits=bits,
            weights_bytes=whole_bytes,
        )
        for rank in split.ranks()
    )
    verdicts: tuple[Verdict, ...] = ()
    if engine is not None:
        from capplan.engine_answer import under_engine

        places = targets if own_gpus else targets[:1] * len(ranks)
        ranks = under_engine(question, ranks, model=spec, stored=stored, targets=places, kv_bits=bits)
    # Every memory the ranks are put against; the first one's verdicts stay with them.
    tried = [targets] if own_gpus else [(target,) * len(ranks) for target in targets]
    for places in reversed(tried if engine is None else tried[:1]):
        if engine is None:
            ranks = against(ranks, places)
        verdict = binding(ranks)
        verdicts = ((verdict,) if verdict is not None else ()) + verdicts
    if spec is not None and spec.uncounted:
        # A part of unknown size is missing from the need: no "yes" can be given.
        verdicts = tuple(replace(v, fits=None) if v.fits else v for v in verdicts)
    deciding = ranks[fullest(ranks)]
    need, demand = deciding.need, deciding.demand
    asks_sum = question.params is not None and question.tp == 1
    lesson = lesson_sum(need, targets if named else ()) if asks_sum else None
    pool = verdicts[0].pool_bytes if named and len(verdicts) == 1 else None
    whole = None if kv_model is None else kv_layout(kv_model, kv_bits=bits)
    kv_bytes, tail = replicas_kv_bytes(question, whole, kv_model)
    draft = ranks[-1].draft
    draft_whole = None if draft is None else draft.whole_layout
    draft_kv, _ = replicas_kv_bytes(question, draft_whole, None)
    return VramEstimate(
        question=question,
        model=spec,
        kv_model=kv_model,
        parameters=parameters,
        precision=stored,
        kv_format=kv_format,
        kv_reason=kv_reason,
        weights=budget,
        weights_bytes=whole_bytes,
        extra=dict(deciding.extra),
        layout=deciding.layout,
        whole_layout=whole,
        draft_layout=draft_whole,
        need=need,
        kv_bytes=None if whole is None else kv_bytes,
        tail_bytes=tail,
        draft_kv_bytes=draft_kv,
        draft_rank_kv_bytes=(need.kv_bytes or 0) - deciding.own_kv_bytes,
        verdicts=verdicts,
        named=named,
        paging=demand.paging(pool),
        notes=tuple(
            dict.fromkeys(
                (
                    *_notes(question, spec, kv_model, stored),
                    *split_notes(split, spec),
                    *(note for rank in ranks for note in rank.notes),
                )
            )
        ),
        lesson=lesson,
        engine=deciding.plan,
        ranks=ranks,
    )


def _model(name: str | None, question: VramQuestion) -> Model | None:
    return None if name is None else model_source.load(name, online=question.online)


def _kv_model(question: VramQuestion, spec: Model | None) -> Model | None:
    """The model whose KV cache is counted: the one given, else the planned one where its layers are known."""
    known = spec is not None and bool(spec.groups)
    if question.kv_from is not None and known:
        raise InputError(
            "only goes with --params or with weights alone",
            where="--kv-from",
            hint="--model brings its own KV cache",
        )
    cut = question.pp > 1 or question.ep > 1 or question.dp > 1
    if spec is not None and not known:
        if cut or question.tp > 1 or question.precision not in (None, "auto"):
            raise InputError(
                "the layers of these weights are not known",
                where="--tp, --pp, --ep, --dp, --precision",
                hint="put the model's config.json beside the file",
            )
    elif spec is None and cut:
        raise InputError(
            "a parameter count has no layers or experts to cut",
            where="--params, --pp, --ep, --dp",
            hint="give --model; --tp alone goes with --params",
        )
    return _model(question.kv_from, question) or (spec if known else None)


def _weights(
    spec: Model | None, question: VramQuestion, stored: Format | None
) -> tuple[WeightBudget | None, int, int]:
    """Budget, bytes and parameters of the whole model."""
    if spec is not None:
        whole = weight_budget(spec, stored)
        return whole, whole.bytes, whole.parameters
    parameters = question.params or 0
    if not 1 <= parameters <= 10**15:
        raise InputError(f"{parameters} parameters", where="--params", hint="give a count such as 70b")
    bits = stored.element_bits if stored is not None else 16
    return None, round(memory.weight_bytes(parameters=parameters, bits=bits)), parameters


def _notes(
    question: VramQuestion, spec: Model | None, kv_model: Model | None, stored: Format | None
) -> tuple[str, ...]:
    made: list[str] = []
    if spec is not None:
        made += spec.assumptions
        own = spec.quantization.method if spec.quantization else spec.stored and spec.stored.format
        if stored is not None and own:
            made.append(f"the checkpoint's own {own} format is replaced by {stored.id}")
        elif spec.stored is not None and (question.tp > 1 or question.pp > 1 or question.dp > 1):
            made.append("a rank's weights are the files' bytes by role, shared as the shapes are")
    if kv_model is None and spec is None:
        made.append("KV cache not counted: a parameter count has no layers; give --kv-from MODEL")
    return tuple(made)
