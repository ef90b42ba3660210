"""The figures of a start-up log beside those of a plan, term by term."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from capplan.engines.log_record import EngineLog, Reading
from capplan.engines.plan import EnginePlan
from capplan.memory_calibration import beside, budget_of

# A term of the log → the terms of a plan it is compared with, in the order they are shown.
_TERMS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu_total_bytes": ("total",),
    "budget_bytes": ("budget",),
    "weights_bytes": ("weights", "extra"),
    "activation_bytes": ("activation",),
    "non_torch_bytes": ("non_torch",),
    "cuda_graph_bytes": ("cuda_graphs",),
    "compute_bytes": ("compute",),
    "state_bytes": ("state", "states"),
    "output_bytes": ("output",),
    "runtime_buffer_bytes": ("runtime_buffers",),
    "decoder_bytes": ("decoder",),
}
_NAMES: Final[Mapping[str, str]] = {
    "gpu_total_bytes": "GPU as seen",
    "budget_bytes": "budget",
    "weights_bytes": "weights",
    "activation_bytes": "activations",
    "non_torch_bytes": "non-torch",
    "cuda_graph_bytes": "CUDA graphs",
    "compute_bytes": "compute buffers",
    "state_bytes": "states",
    "output_bytes": "output buffer",
    "runtime_buffer_bytes": "runtime buffers",
    "decoder_bytes": "decoder",
    "beside": "beside weights and KV",
    "kv_pool_bytes": "KV pool",
    "kv_blocks": "KV blocks",
    "kv_tokens": "KV tokens",
    "max_concurrency": "max concurrency",
}
_NOT_BESIDE: Final = frozenset(("total", "budget", "weights", "extra", "kv_cache", "left_free"))
# What the terms follow from: no term differs "most" because another one does.
RESULTS: Final = frozenset(("kv_pool_bytes", "kv_blocks", "kv_tokens", "max_concurrency"))
SETTINGS: Final = (
    "version model model_name gpu_name dtype quantization kv_cache_dtype tp pp dp ep max_model_len"
    " max_num_batched_tokens micro_batch_tokens max_num_seqs block_size gpu_memory_utilization"
    " mem_fraction_static free_gpu_memory_fraction cuda_memory_fraction enforce_eager gpu_layers layers"
    " context_tokens kv_unified flash_attention"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One figure of the log beside the plan's; either may be missing. `line` is where the log says it."""

    name: str
    field: str
    unit: str
    log: float | None
    plan: float | None
    line: int | None = None
    text: str = ""
    derived: str | None = None

    @property
    def difference(self) -> float | None:
        """The log's figure less the plan's."""
        return None if self.log is None or self.plan is None else self.log - self.plan

    def to_dict(self) -> dict[str, Any]:
        """JSON of one term."""
        return {
            "term": self.field,
            "unit": self.unit,
            "log": self.log,
            "line": self.line,
            "text": self.text,
            "derived": self.derived,
            "plan": self.plan,
            "difference": self.difference,
        }


def value_of(log: EngineLog, name: str) -> Any:
    """A field of the log, None where it does not say."""
    reading = log.fields.get(name)
    return None if reading is None else reading.value


def settings(log: EngineLog) -> Iterator[tuple[str, Reading]]:
    """What the engine was asked for or settled on, as the log says it."""
    for name in SETTINGS:
        if name in log.fields:
            yield name, log.fields[name]


def terms_of(log: EngineLog, made: EnginePlan | None) -> Iterator[Term]:
    """Every figure that the log or the plan has: what comes out of the budget, then what follows from it."""
    terms: Mapping[str, int] = made.terms if made is not None else {}
    used: set[str] = set()
    for field, names in _TERMS.items():
        present = [found for name in names for found in (name, f"{name}_outside") if found in terms]
        used.update(present)
        value = sum(terms[name] for name in present) if present else None
        term = _term(log, field, value)
        if field == "budget_bytes" and term is not None and term.log is None:
            term = replace(term, log=_float(budget_of(log)), derived="fraction × total")
        if term is not None:
            yield term
    inside = [name for name in terms if name not in _NOT_BESIDE and not name.endswith("_outside")]
    for name in inside:
        if name not in used:
            shown = name.replace("_", " ")
            yield Term(name=shown, field=f"{name}_bytes", unit="bytes", log=None, plan=terms[name])
    rest = beside(log)
    if log.engine == "vllm" and (rest is not None or made is not None):
        yield Term(
            name=_NAMES["beside"],
            field="beside",
            unit="bytes",
            log=_float(rest),
            plan=float(sum(terms[name] for name in inside)) if made is not None else None,
            derived=None if rest is None else "budget less weights and KV pool",
        )
    results: tuple[tuple[str, float | None], ...] = (
        ("kv_pool_bytes", made.kv_pool.value if made else None),
        ("kv_blocks", made.kv.num_blocks if made and made.kv else None),
        ("kv_tokens", made.kv_tokens if made else None),
        ("max_concurrency", made.max_concurrency if made else None),
    )
    for field, planned in results:
        term = _term(log, field, planned)
        if term is not None:
            yield term
    known = {*_TERMS, *(field for field, _ in results)}
    for name, reading in log.fields.items():
        if name not in known and name not in SETTINGS and reading.unit != "str":
            other = _term(log, name, None)
            if other is not None:
                yield other


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _term(log: EngineLog, field: str, value: float | None) -> Term | None:
    reading = log.fields.get(field)
    said = log.number(field)
    if said is None and not value:
        return None
    unit = reading.unit if reading is not None else "bytes" if field.endswith("_bytes") else "int"
    return Term(
        name=_NAMES.get(field, field.removesuffix("_bytes").replace("_", " ")),
        field=field,
        unit="float" if field == "max_concurrency" else unit,
        log=said,
        plan=value,
        line=reading.line if reading is not None else None,
        text=reading.text if reading is not None else "",
        derived=reading.derived if reading is not None else None,
    )
