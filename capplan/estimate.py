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
    Overhead,
    Paging,
    Target,
    Verdict,
)
from capplan.errors import InputError
from capplan.formulas import memory
from capplan.kv import KvLayout, kv_layout
from capplan.parts import parts_of
from capplan.specs import Format, Model
from capplan.targets import targets_of
from capplan.units import GB, GIB
from capplan.weights import WeightBudget, check_split, weight_budget

if TYPE_CHECKING:
    from capplan.remedies import Remedy

DEFAULT_USERS: Final = 16
DEFAULT_CONTEXT: Final = 4096
OVERHEAD_LOW: Final = 0.15
OVERHEAD_HIGH: Final = 0.20


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

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract `capplan.vram/1`."""
        first = self.verdicts[0] if self.named else None
        return {
            "schema": "capplan.vram/1",
            "question": {
                "users": self.question.users,
                "context": self.question.context,
                "tp": self.question.tp,
                "block_size": self.question.block_size,
                "prefix_shared": self.question.prefix_shared,
            },
            "model": {
                "asked": self.question.model,
                "name": self.name,
                "parameters": self.parameters,
                "architecture": self.model.architecture if self.model else None,
                "max_context": self.kv_model.max_context if self.kv_model else None,
                "kv_from": self.kv_model.name if self.kv_model else None,
                "source": self.model.source if self.model else "asked: --params",
            },
            "weights": self._weights_dict(),
            "kv_cache": self._kv_dict(),
            "draft_kv_cache": self._draft_dict(),
            "overhead": {
                "bytes": self.need.overhead.high_bytes,
                "low_bytes": self.need.overhead.low_bytes,
                "high_bytes": self.need.overhead.high_bytes,
                "rule": self.need.overhead.rule,
                "parts": self.need.overhead.parts(),
            },
            "extra": [{"name": name, "bytes": size} for name, size in self.extra.items()],
            "total": {"bytes": self.need.total_bytes, "low_bytes": self.need.low_bytes},
            "gpu": None if first is None else first.to_dict(),
            "fits": self.fits,
            "headroom_bytes": first.headroom_bytes if first else None,
            "max_users": first.max_users if first else None,
            "max_context": first.max_context if first else None,
            "per_gpu": self._per_gpu_dict(first),
            "gpus": [verdict.to_dict() for verdict in self.verdicts] if self.named else [],
            "fit_table": [] if self.named else [verdict.to_dict() for verdict in self.verdicts],
            "paging": self.paging.to_dict() if self.paging else None,
            "remedies": [remedy.to_dict() for remedy in self.remedies],
            "lesson": self.lesson,
            "notes": list(self.notes),
        }

    def _weights_dict(self) -> dict[str, Any]:
        headline = self.nominal_bits
        roles = self.weights.roles if self.weights else ()
        return {
            "bytes": self.weights_bytes,
            "precision": self.precision.id if self.precision else "auto",
            "formats": list(self.weights.formats) if self.weights else [],
            "bits_per_parameter": round(self.bits_per_parameter, 6),
            "stored": self._stored_dict(),
            "headline_bytes": round(memory.weight_bytes(parameters=self.parameters, bits=headline)),
            "roles": [
                {"role": part.role, "parameters": part.parameters, "bytes": part.bytes} for part in roles
            ],
        }

    def _stored_dict(self) -> dict[str, Any] | None:
        held = self.model.stored if self.model and not self.precision else None
        if held is None:
            return None
        return {"format": held.format, "files": held.files, "bytes_by_type": dict(held.by_dtype)}

    def _kv_dict(self) -> dict[str, Any] | None:
        layout = self.whole_layout
        if layout is None:
            return None
        return {
            "bytes": self.kv_bytes,
            "tail_bytes": self.tail_bytes,
            "bytes_per_token": _whole(layout.bytes_per_token),
            "bytes_by_kind": {kind: _whole(size) for kind, size in layout.by_kind().items()},
            "state_bytes_per_sequence": layout.state_bytes,
            "dtype": self.kv_format.id,
            "dtype_reason": self.kv_reason,
        }

    def _draft_dict(self) -> dict[str, Any] | None:
        if self.draft_layout is None:
            return None
        return {
            "bytes": self.draft_kv_bytes,
            "bytes_per_token": _whole(self.draft_layout.bytes_per_token),
        }

    def _per_gpu_dict(self, first: Verdict | None) -> dict[str, Any]:
        both = self.need.kv_bytes
        own = None if both is None else both - self.draft_rank_kv_bytes
        kv = None if both is None else both + self.need.tail_bytes
        tokens = None if kv is None else self.question.users * self.question.context
        concurrency = None if kv is None else float(self.question.users)
        if first is not None:
            kv, tokens, concurrency = first.pool_bytes, first.pool_tokens, first.max_concurrency
        return {
            "weights": {"bytes": self.need.weights_bytes},
            "kv_cache": {"bytes": own},
            "kv_pool": {"bytes": kv, "tokens": tokens},
            "max_concurrency": concurrency,
            "total": {"bytes": self.need.total_bytes},
        }

    def _repr_html_(self) -> str:
        """Notebook view: the budget as a small table."""
        from html import escape

        rows = [("weights", self.need.weights_bytes), ("KV cache", self.need.kv_bytes or 0)]
        rows += [("overhead", self.need.overhead.high_bytes), ("total", self.need.total_bytes)]
        cells = "".join(
            f"<tr><td>{escape(name)}</td><td>{size / GIB:,.2f} GiB</td></tr>" for name, size in rows
        )
        return f"<table><caption>{escape(self.name)}</caption>{cells}</table>"


def _whole(value: float) -> int | float:
    return int(value) if float(value).is_integer() else value


def vram(model: str | None = None, **fields: Any) -> VramEstimate:
    """Memory need of serving a model, whether GPUs hold it, and what would make it fit.

    `model` is a catalog name or the path of a config; `params` plans from a parameter count alone, with the
    KV cache of `kv_from`. Every user holds a full `context` (the worst case). `gpus` are catalog names or
    ("all",), or `gpu_memory_bytes` is given. The fields are those of VramQuestion.
    Raises InputError for a question that cannot be answered.
    Example: vram("8b", precision="int4", users=64).need.total_bytes
    """
    question = VramQuestion(model=model, **fields)
    estimate = answer(question)
    if estimate.named and len(estimate.verdicts) == 1 and estimate.fits is not True:
        from capplan.remedies import find_remedies

        estimate = replace(estimate, remedies=find_remedies(question, estimate, answer))
    return estimate


def answer(question: VramQuestion) -> VramEstimate:
    """The estimate without remedies."""
    _check(question)
    spec = _model(question.model, question)
    kv_model = _model(question.kv_from, question) or spec
    named_format = question.precision not in (None, "auto")
    stored = catalog.weight_format(question.precision or "") if named_format else None
    kv_format, kv_reason = _kv_format(question.kv_dtype, kv_model)
    _check_context(question, kv_model)
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
        overhead=_overhead(rank_bytes, question),
    )
    own_rank_kv, _ = _demand(question, rank, kv_model).kv_bytes(question.users, question.context)
    targets, named = targets_of(question.gpus, question.gpu_memory_bytes)
    verdicts = tuple(demand.verdict(target, need) for target in targets)
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
        lesson=_lesson(question, need, targets if named else ()),
    )


def _model(name: str | None, question: VramQuestion) -> Model | None:
    return None if name is None else model_source.load(name, online=question.online)


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
    if question.kv_from is not None and question.params is None:
        raise InputError("only goes with --params", where="--kv-from", hint="--model brings its own KV cache")
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


def _check_context(question: VramQuestion, model: Model | None) -> None:
    limit = model.max_context if model else None
    if model is not None and limit is not None and question.context > limit:
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


def _overhead(weights: int, question: VramQuestion) -> Overhead:
    if question.overhead_bytes is not None:
        size = question.overhead_bytes
        return Overhead(low_bytes=size, high_bytes=size, rule="given")
    low, high, rule = OVERHEAD_LOW, OVERHEAD_HIGH, "rule of thumb, 15–20 % of weights"
    if question.overhead_fraction is not None:
        low = high = question.overhead_fraction
        rule = f"given, {low:.3g} × weights"
    return Overhead(
        low_bytes=round(memory.overhead_bytes(weight_bytes=weights, fraction=low)),
        high_bytes=round(memory.overhead_bytes(weight_bytes=weights, fraction=high)),
        rule=rule,
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
    if kv_model is None:
        made.append("KV cache not counted: a parameter count has no layers; give --kv-from MODEL")
    return tuple(made)


def _lesson(question: VramQuestion, need: Need, targets: tuple[Target, ...]) -> dict[str, Any] | None:
    """The lesson's own arithmetic: weights and overhead in GB, KV in GiB, added as one unit."""
    if question.params is None or need.kv_bytes is None or question.tp != 1:
        return None
    weights_gb = need.weights_bytes / GB
    kv_gib = (need.kv_bytes + need.tail_bytes) / GIB
    overhead_gb = need.overhead.high_bytes / GB
    total = weights_gb + kv_gib + overhead_gb
    memory_gb = targets[0].usable_bytes / GB if len(targets) == 1 else None
    return {
        "weights_gb": weights_gb,
        "kv_cache_gib": kv_gib,
        "overhead_gb": overhead_gb,
        "total_mixed": total,
        "headroom_mixed": None if memory_gb is None else memory_gb - total,
        "note": "GB and GiB added as the lesson does; the bytes are exact",
    }
