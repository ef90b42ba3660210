"""A start-up log beside capplan's plan of the same start: term by term, what differs, which flag to turn."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Literal

from capplan import refusals
from capplan.engines.log_reader import EngineLog, read_log
from capplan.engines.plan import EnginePlan
from capplan.errors import CapplanError
from capplan.log_plan import planned, tried
from capplan.log_subject import Subject, subject_of
from capplan.log_terms import RESULTS, Term, settings, terms_of, value_of
from capplan.refusals import Fix
from capplan.units import format_gib

SCHEMA: Final = "capplan.doctor/1"
Outcome = Literal["started", "refused", "ran out of memory", "not said"]

# Below this share of the GPU a difference is the rounding of what engines print.
NOTABLE: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diagnosis:
    """What a log says, what capplan plans for the same start, and what follows.

    `plan` is None where the model or GPU is not known or the engine has no rules; `missing` says why.
    `startable`: whether a single change of a flag makes a failed start succeed; None where it did start, or
    where it cannot be told.
    """

    log: EngineLog
    subject: Subject
    plan: EnginePlan | None
    terms: tuple[Term, ...]
    explained: tuple[str, ...]
    cause: str | None
    fixes: tuple[Fix, ...]
    startable: bool | None
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def outcome(self) -> Outcome:
        """How the start ended, by the log."""
        if self.log.started_line is None and self.log.refusal is not None:
            return "ran out of memory" if self.log.oom else "refused"
        if self.log.started_line is not None:
            return "started"
        pool = self.log.number("kv_tokens") or self.log.number("kv_blocks")
        return "ran out of memory" if self.log.oom else "started" if pool else "not said"

    @property
    def widest(self) -> Term | None:
        """The term that differs most among those that are not results of others; None where none does."""
        total = self.subject.total_bytes or 0
        found = [
            term
            for term in self.terms
            if term.unit == "bytes" and term.difference is not None and term.field not in RESULTS
        ]
        found = [term for term in found if abs(term.difference or 0) > NOTABLE * total]
        # The sum counts only where the log does not tell its parts apart.
        told = any(term.field == "activation_bytes" and term.difference is not None for term in self.terms)
        parts = [term for term in found if term.field != "beside" or not told]
        return max(parts, key=lambda term: abs(term.difference or 0), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract `capplan.doctor/1`."""
        refusal, subject, widest = self.log.refusal, self.subject, self.widest
        return {
            "schema": SCHEMA,
            "engine": {"name": self.log.engine, "version": value_of(self.log, "version")},
            "outcome": self.outcome,
            "model": {
                "in_log": value_of(self.log, "model") or value_of(self.log, "model_name"),
                "name": subject.model.name if subject.model else None,
            },
            "gpu": {
                "in_log": value_of(self.log, "gpu_name"),
                "id": subject.gpu.id if subject.gpu else None,
                "total_bytes": subject.total_bytes,
            },
            "settings": [
                {"setting": name, "value": reading.value, "line": reading.line}
                for name, reading in settings(self.log)
            ],
            "terms": [term.to_dict() for term in self.terms],
            "refusal": None
            if refusal is None
            else {
                "reason": refusal.reason,
                "line": refusal.line,
                "text": refusal.text,
                "numbers": dict(refusal.numbers),
            },
            "explained": list(self.explained),
            "widest": widest.to_dict() if widest else None,
            "cause": self.cause,
            "fixes": [fix.to_dict() for fix in self.fixes],
            "startable": self.startable,
            "plan": self.plan.to_dict() if self.plan else None,
            "starts_in_log": self.log.starts,
            "missing": list(self.missing),
            "warnings": list(self.log.warnings),
            "notes": list(self.notes),
        }


def diagnose(
    source: str | Path | IO[str] | IO[bytes],
    *,
    model: str | None = None,
    gpu: str | None = None,
    online: bool = False,
) -> Diagnosis:
    """The log at a path or in a stream beside the plan of the same start.

    `model` and `gpu` replace what the log calls them.
    Errors: InputError for what is no engine's log, and for a model or GPU of the user's that is not known.
    """
    log = read_log(source)
    subject = subject_of(log, model=model, gpu=gpu, online=online)
    notes, missing = list(subject.notes), list(subject.missing)
    made: EnginePlan | None = None
    if not missing:
        try:
            made = planned(log, subject, notes)
        except CapplanError as error:
            missing.append(f"a plan: {error.message} ({error.hint})")
    if log.starts > 1:
        notes.append(f"{log.starts} starts in this log: the last one is read")
    terms = tuple(terms_of(log, made))
    bare = Diagnosis(
        log=log,
        subject=subject,
        plan=made,
        terms=terms,
        explained=refusals.explanation(log),
        cause=None,
        fixes=(),
        startable=None,
        notes=tuple(notes),
        missing=tuple(missing),
    )
    failed = bare.outcome in ("refused", "ran out of memory")
    own = refusals.fixes(log, vocab=subject.model.vocab if subject.model else None)
    planned_fixes = tuple(tried(log, subject, made)) if made is not None else ()
    found = _merged(own, planned_fixes)
    return replace(
        bare,
        cause=_cause(bare),
        fixes=found,
        startable=_startable(failed, own, planned_fixes),
    )


def _startable(failed: bool, own: tuple[Fix, ...], tried: tuple[Fix, ...]) -> bool | None:
    """Whether one flag makes it start; False only where changes were worked out and none does."""
    answers = [fix.starts for fix in (*own, *tried)]
    if not failed or not answers:
        return None
    return True if True in answers else None if None in answers else False


_CAUSES: Final[Mapping[str, tuple[str, str | None]]] = {
    "gpu_total_bytes": ("another GPU, a MIG slice, or memory the driver keeps: check --gpu", None),
    "budget_bytes": ("the memory fraction in force is another", "gpu_memory_utilization"),
    "weights_bytes": ("another weight format, or parts beside the decoder: check --model", None),
    "activation_bytes": ("the profiling run's batch", "max_num_batched_tokens"),
    "non_torch_bytes": ("CUDA context, NCCL buffers, or another process starting meanwhile", None),
    "cuda_graph_bytes": ("the batch sizes captured", "enforce_eager"),
    "compute_bytes": ("the micro-batch and flash attention", "max_num_batched_tokens"),
    "beside": ("activations, graphs and non-torch memory together", "max_num_batched_tokens"),
}


def _cause(diagnosis: Diagnosis) -> str | None:
    """The term that differs most, what it depends on, and what the difference is worth in KV tokens."""
    term = diagnosis.widest
    if term is None or term.difference is None:
        return None
    more = "more" if term.difference > 0 else "less"
    text = f"{term.name}: {format_gib(abs(term.difference))} {more} than planned"
    made = diagnosis.plan
    if made is not None and made.kv_tokens and made.kv_pool.value > 0 and made.engine != "llama.cpp":
        tokens = abs(term.difference) * made.kv_tokens / made.kv_pool.value
        text += f", worth {tokens:,.0f} KV tokens"
    what, flag = _CAUSES.get(term.field, ("", None))
    if what:
        text += f"; it follows {what}" if flag else f"; {what}"
    spelled = (refusals.spelled(diagnosis.log.engine, flag) or "").strip() if flag else ""
    return f"{text} ({spelled})" if spelled else text


def _merged(own: tuple[Fix, ...], tried: tuple[Fix, ...]) -> tuple[Fix, ...]:
    """The log's own fixes first; of the planned ones those that start, of one flag the first that does."""
    made: list[Fix] = [fix for fix in own if fix.starts is not False]
    seen = {fix.flag.split()[0] for fix in made if fix.starts}
    for fix in tried:
        name = fix.flag.split()[0]
        if fix.starts and name not in seen:
            made = [other for other in made if other.starts or other.flag.split()[0] != name]
            made.append(fix)
            seen.add(name)
    return tuple(made)
