"""A question about memory → its answer.

`vram(...)` is what `capplan vram` prints and what scripts call; the figures are formulas/memory over the
weights (weights.py) and caches (kv.py) of the model.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from capplan import catalog, model_source
from capplan.capacity import (
    MAX_CONTEXT,
    MAX_USERS,
    Demand,
    Need,
    Paging,
    Verdict,
)
from capplan.errors import InputError
from capplan.formulas import memory
from capplan.kv import KvLayout, kv_layout
from capplan.lesson import lesson_sum
from capplan.overhead import overhead_of
from capplan.parts import parts_of
from capplan.specs import Format, Model
from capplan.targets import targets_of
from capplan.units import GIB
from capplan.weights import WeightBudget, check_split, weight_budget

if TYPE_CHECKING:
    from capplan.engines.plan import EngineFlags, EnginePlan
    from capplan.remedies import Remedy

DEFAULT_USERS: Final = 16
DEFAULT_CONTEXT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class VramQuestion:
    """What is asked; see `vram` for the fields."""

    model: str | None = None
    params: int | None = None
    kv_from: str | None = None
    precision: str | None = None
    kv_dtype: str = "auto"
    users: int = DEFAULT_USERS
    context: int = DEFAULT_CONTEXT
    default_context: bool = False
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None
    tp: int = 1
    block_size: int = 16
    overhead_bytes: int | None = None
    overhead_fraction: float | None = None
    prefix_shared: int = 0
    lora: tuple[str, ...] = ()
    lora_slots: int | None = None
    draft_model: str | None = None
    online: bool = False
    engine: str | None = None
    engine_flags: "EngineFlags | None" = None
    calibration: str | None = None
    visible_devices: str | None = None


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
    if estimate.named and len(estimate.verdicts) == 1 and estimate.fits is not True and not unknown:
        from capplan.remedies import find_remedies

        estimate = replace(estimate, remedies=find_remedies(estimate.question, estimate, answer))
    return estimate


def answer(question: VramQuestion) -> VramEstimate:
    """The estimate without remedies."""
    _check(question)
    spec = _model(question.model, question)
    kv_model = _kv_model(question, spec)
    named_format = question.precision not in (None, "auto")
    stored = catalog.weight_format(question.precision or "") if named_format else None
    kv_format, kv_reason = _kv_format(question.kv_dtype, kv_model)
    question = _fitted(question, kv_model)
    if kv_model is not None and question.tp > 1:
        check_split(kv_model, question.tp)
    budget, rank_bytes, whole_bytes, parameters = _weights(spec, question, stored)
    bits = kv_format.effective_bits
    parts = parts_of(
        spec,
        stored,
        kv_bits=bits,
        tp=question.tp,
        lora=question.lora,
        lora_slots=question.lora_slots,
        draft_model=question.draft_model,
        online=question.online,
    )
    draft = parts.draft
    whole = None if kv_model is None else kv_layout(kv_model, kv_bits=bits)
    rank = whole if question.tp == 1 or kv_model is None else kv_layout(
        kv_model, kv_bits=bits, tp=question.tp
    )  # fmt: skip
    both = rank
    if draft is not None and rank is not None:
        from capplan.draft import combined

        both = combined(rank, draft.layout)
    demand = _demand(question, both, kv_model)
    need = demand.need(
        weights=rank_bytes,
        extra=sum(parts.sizes.values()),
        overhead=overhead_of(
            rank_bytes,
            overhead_bytes=question.overhead_bytes,
            overhead_fraction=question.overhead_fraction,
            calibration=question.calibration,
        ),
    )
    own_rank_kv, _ = _demand(question, rank, kv_model).kv_bytes(question.users, question.context)
    targets, named = targets_of(question.gpus, question.gpu_memory_bytes, visible=question.visible_devices)
    verdicts = tuple(demand.verdict(target, need) for target in targets)
    if spec is not None and spec.uncounted:
        # A part of unknown size is missing from the need: no "yes" can be given.
        verdicts = tuple(replace(v, fits=None) if v.fits else v for v in verdicts)
    engine = None
    if question.engine is not None:
        from capplan.engine_answer import under_engine

        need, verdict, engine = under_engine(
            question.engine,
            question.engine_flags,
            model=spec,
            demand=demand,
            need=need,
            targets=targets if named else (),
            kv_bits=bits,
            tp=question.tp,
            calibration=question.calibration,
        )
        verdicts = (verdict,)
    asks_sum = question.params is not None and question.tp == 1
    lesson = lesson_sum(need, targets if named else ()) if asks_sum else None
    pool = verdicts[0].pool_bytes if named and len(verdicts) == 1 else None
    kv_bytes, tail = _demand(question, whole, kv_model).kv_bytes(question.users, question.context)
    draft_whole = None if draft is None else draft.whole_layout
    draft_kv, _ = _demand(question, draft_whole, None).kv_bytes(question.users, question.context)
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
        extra=parts.sizes,
        layout=rank,
        whole_layout=whole,
        draft_layout=draft_whole,
        need=need,
        kv_bytes=None if whole is None else kv_bytes,
        tail_bytes=tail,
        draft_kv_bytes=draft_kv,
        draft_rank_kv_bytes=(need.kv_bytes or 0) - own_rank_kv,
        verdicts=verdicts,
        named=named,
        paging=demand.paging(pool),
        notes=(*_notes(question, spec, kv_model, stored), *parts.notes),
        lesson=lesson,
        engine=engine,
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
    if spec is not None and not known and (question.tp > 1 or question.precision not in (None, "auto")):
        raise InputError(
            "the layers of these weights are not known",
            where="--tp, --precision",
            hint="put the model's config.json beside the file",
        )
    return _model(question.kv_from, question) or (spec if known else None)


def _check(question: VramQuestion) -> None:
    limits = {
        "users": (1, MAX_USERS),
        "context": (1, MAX_CONTEXT),
        "tp": (1, 1024),
        "block_size": (1, 1 << 20),
        "prefix_shared": (0, MAX_CONTEXT),
    }
    for name, (low, high) in limits.items():
        value = getattr(question, name)
        if not low <= value <= high:
            raise InputError(
                f"{value} is outside {low} to {high:,}",
                where=f"--{name.replace('_', '-')}",
                hint="give a number in that range",
            )
    if (question.model is None) == (question.params is None):
        both = question.model is not None
        raise InputError(
            "both a model and a parameter count" if both else "no model",
            where="--model, --params",
            hint="give one of them: --model 8b, or --params 70b",
        )
    if question.prefix_shared > question.context:
        raise InputError(
            f"{question.prefix_shared} shared tokens of {question.context}",
            where="--prefix-shared",
            hint="give at most the context",
        )
    if question.overhead_bytes is not None and not 0 <= question.overhead_bytes <= 1 << 50:
        raise InputError(f"{question.overhead_bytes} bytes", where="--overhead", hint="give 1.5GB or 15%")
    if question.overhead_fraction is not None and not 0 <= question.overhead_fraction <= 10:
        raise InputError(
            f"{question.overhead_fraction:.3g} times the weights",
            where="--overhead",
            hint="give 1.5GB or 15%",
        )


def _kv_format(name: str, model: Model | None) -> tuple[Format, str]:
    """The KV dtype and why: asked, the checkpoint's own scheme, or 16-bit."""
    if name != "auto":
        chosen = catalog.weight_format(name)
        if not chosen.kv:
            raise InputError(
                f"{chosen.id} is a weight format, not a KV cache dtype",
                where="--kv-dtype",
                hint="use bf16, fp16, fp8 or int8",
            )
        return chosen, "asked"
    scheme = model.quantization.kv_format if model and model.quantization else None
    if scheme is not None:
        return catalog.load_format(scheme), "the checkpoint's own KV scheme"
    return catalog.load_format("bf16"), "16-bit by default"


def _fitted(question: VramQuestion, model: Model | None) -> VramQuestion:
    """The question, its context within the model's own; only a default one may be cut to it."""
    limit = model.max_context if model else None
    if model is None or limit is None or question.context <= limit:
        return question
    if question.default_context:
        return replace(question, context=limit, prefix_shared=min(question.prefix_shared, limit))
    raise InputError(
        f"{question.context:,} tokens are more than {model.name} can hold ({limit:,})",
        where="--context",
        hint=f"give at most {limit}",
    )


def _weights(
    spec: Model | None, question: VramQuestion, stored: Format | None
) -> tuple[WeightBudget | None, int, int, int]:
    """Budget, bytes of one rank, bytes of the whole model, parameters."""
    if spec is not None:
        whole = weight_budget(spec, stored)
        rank = whole if question.tp == 1 else weight_budget(spec, stored, tp=question.tp)
        return whole, rank.bytes, whole.bytes, whole.parameters
    parameters = question.params or 0
    if not 1 <= parameters <= 10**15:
        raise InputError(f"{parameters} parameters", where="--params", hint="give a count such as 70b")
    bits = stored.element_bits if stored is not None else 16
    size = round(memory.weight_bytes(parameters=parameters, bits=bits))
    return None, -(-size // question.tp), size, parameters


def _demand(question: VramQuestion, layout: KvLayout | None, model: Model | None) -> Demand:
    return Demand(
        layout=layout,
        users=question.users,
        context=question.context,
        block_size=question.block_size,
        prefix_shared=question.prefix_shared,
        max_context=model.max_context if model else None,
    )


def _notes(
    question: VramQuestion, spec: Model | None, kv_model: Model | None, stored: Format | None
) -> tuple[str, ...]:
    made: list[str] = []
    if spec is not None:
        made += spec.assumptions
        own = spec.quantization.method if spec.quantization else spec.stored and spec.stored.format
        if stored is not None and own:
            made.append(f"the checkpoint's own {own} format is replaced by {stored.id}")
        elif spec.stored is not None and question.tp > 1:
            made.append("a rank's weights are the files' bytes by role, shared as the shapes are")
    if kv_model is None and spec is None:
        made.append("KV cache not counted: a parameter count has no layers; give --kv-from MODEL")
    return tuple(made)
