"""What one start of an engine measured beside weights and KV cache, saved and read back.

A file of schema `capplan.calibration/1`, kind memory. `fit` is all that predictions read and its hash
covers it; `state` says what it was measured on. No host name, user or path is written.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from capplan import __version__, catalog
from capplan.engines.log_record import EngineLog
from capplan.engines.plan import EnginePlan
from capplan.errors import InputError, did_you_mean, shown
from capplan.readers.config_keys import Keys
from capplan.units import format_bytes

SCHEMA: Final = "capplan.calibration/1"
_KEPT: Final = ("total", "budget", "weights", "extra")
_CACHES: Final = ("kv_cache", "states", "left_free")
_FRACTION_OF_FREE: Final = ("sglang", "tensorrt-llm")
_LARGEST_BYTES: Final = 1 << 50
_LARGEST_FILE: Final = 1 << 20
# A term of a calibration → the field of a log that measures it.
_MEASURED: Final = {
    "activation": "activation_bytes",
    "non_torch": "non_torch_bytes",
    "cuda_graphs": "cuda_graph_bytes",
    "compute": "compute_bytes",
    "runtime_buffers": "runtime_buffer_bytes",
    "decoder": "decoder_bytes",
}
TERMS: Final = (*_MEASURED, "beside_weights_and_kv")
"""Names a term may have. `beside_weights_and_kv`: the budget less weights and KV pool, not told apart."""

SETTINGS: Final = (
    "tp",
    "pp",
    "max_model_len",
    "max_num_batched_tokens",
    "micro_batch_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "free_gpu_memory_fraction",
    "kv_cache_dtype",
    "enforce_eager",
)
"""Settings of the engine that are kept with the measurement."""

# A version, dtype or the like: nothing that could hold a path or an address.
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ()+._-]{0,79}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCalibration:
    """Overhead measured on one GPU (the worst rank) by one start of an engine; bytes.

    `terms` go by the names of TERMS. `graphs_in_budget` says whether CUDA graphs came out of the engine's
    fraction. `state` holds what it was measured on: model, settings, sizes.
    """

    engine: str
    version: str | None
    gpu_id: str | None
    gpu_total_bytes: int | None
    terms: Mapping[str, int]
    graphs_in_budget: bool | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def overhead_bytes(self) -> int:
        """All of it: what lies beside weights and KV cache."""
        return sum(self.terms.values())

    @property
    def label(self) -> str:
        """What was measured, for one line of output: "vllm 0.11.0 on h100-sxm-80gb"."""
        version = f" {self.version}" if self.version else ""
        where = self.gpu_id or (format_bytes(self.gpu_total_bytes) if self.gpu_total_bytes else "unknown GPU")
        return f"{self.engine}{version} on {where}"

    def fit(self) -> dict[str, Any]:
        """What predictions read, and what the hash covers."""
        return {"terms": dict(self.terms), "graphs_in_budget": self.graphs_in_budget}

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "schema": SCHEMA,
            "kind": "memory",
            "origin": "local",
            "engine": {"name": self.engine, "version": self.version},
            "gpu": {"id": self.gpu_id, "total_bytes": self.gpu_total_bytes},
            "software": {"capplan": __version__},
            "measurements": 1,
            "fit": self.fit(),
            "fit_sha256": _digest(self.fit()),
            "state": dict(self.state),
        }


def _digest(fit: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fit, sort_keys=True).encode()).hexdigest()


def from_log(log: EngineLog, *, model: str | None, gpu_id: str | None) -> MemoryCalibration:
    """The overhead that a start-up log measured.

    `model` is a catalog name, `gpu_id` a catalog id; what the log calls them is not kept, it may be a path.
    Errors: InputError where the log measures nothing beside weights and KV cache.
    """
    terms = measured_terms(log)
    if not terms:
        raise InputError(
            "nothing beside weights and KV cache is measured in this log",
            where=log.source,
            hint=_WHAT_IS_NEEDED.get(log.engine, "the engine has to print activations, buffers or graphs"),
        )
    total = log.number("gpu_total_bytes")
    graphs = log.fields.get("cuda_graph_in_budget")
    version = log.fields.get("version")
    state: dict[str, Any] = {} if model is None else {"model": model}
    for name in SETTINGS:
        reading = log.fields.get(name)
        if reading is not None and (not isinstance(reading.value, str) or _PLAIN.fullmatch(reading.value)):
            state[name] = reading.value
    for name in ("weights_bytes", "kv_pool_bytes"):
        size = log.number(name)
        if size is not None:
            state[name] = round(size)
    return MemoryCalibration(
        engine=log.engine,
        version=None if version is None else _plain(str(version.value)),
        gpu_id=gpu_id,
        gpu_total_bytes=None if total is None else round(total),
        terms=terms,
        graphs_in_budget=bool(graphs.value) if graphs is not None else None,
        state=state,
    )


_WHAT_IS_NEEDED: Final = {
    "vllm": "the log needs its account of memory, or else the memory fraction and the GPU's total",
    "sglang": "SGLang prints what is left after each stage, not what the stages take",
    "tgi": "TGI prints tokens and blocks only",
}


def _plain(text: str) -> str | None:
    return text if _PLAIN.fullmatch(text) else None


def measured_terms(log: EngineLog) -> dict[str, int]:
    """The terms a log measures beside weights and KV cache, by name; bytes.

    Where activations and non-torch memory are not told apart: the budget less weights and KV pool, and the
    CUDA graphs beside it only where they lie outside the fraction.
    """
    terms = {
        name: round(size)
        for name, source in _MEASURED.items()
        if (size := log.number(source)) is not None and size >= 0
    }
    rest = beside(log)
    if rest is not None and "activation" not in terms and "compute" not in terms:
        graphs = log.fields.get("cuda_graph_in_budget")
        outside = {} if graphs is not None and graphs.value else _only(terms, "cuda_graphs")
        return {"beside_weights_and_kv": rest, **outside}
    if not set(terms) - {"cuda_graphs"}:
        return {}
    return terms


def _only(terms: Mapping[str, int], name: str) -> dict[str, int]:
    return {name: terms[name]} if name in terms else {}


def beside(log: EngineLog) -> int | None:
    """vLLM's budget less weights and KV pool: all that is inside the fraction beside them."""
    budget = budget_of(log)
    weights, pool = log.number("weights_bytes"), log.number("kv_pool_bytes")
    if budget is None or weights is None or pool is None:
        return None
    rest = round(budget - weights - pool)
    return rest if rest >= 0 else None


def budget_of(log: EngineLog) -> int | None:
    """vLLM's fraction × total, as printed or from the two; None for engines whose fraction is of the rest."""
    printed = log.number("budget_bytes")
    if printed is not None:
        return round(printed)
    fraction, total = log.number("gpu_memory_utilization"), log.number("gpu_total_bytes")
    if log.engine != "vllm" or fraction is None or total is None or not 0 < fraction <= 1:
        return None
    return round(fraction * total)


def save(calibration: MemoryCalibration, path: str | Path, *, force: bool = False) -> None:
    """Write the file, whole or not at all; an existing one only with `force`.

    Errors: InputError where it exists or cannot be written.
    """
    import yaml

    target = Path(path)
    text = "# Written by capplan doctor --save; vram --calibration reads it.\n"
    text += yaml.safe_dump(calibration.to_dict(), sort_keys=False, allow_unicode=True)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".capplan-", suffix=".yaml")
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        if force:
            os.replace(temporary, target)
        else:
            os.link(temporary, target)  # fails where the name is taken, without a moment in between
    except FileExistsError:
        raise InputError("is there already", where=str(target), hint="--force overwrites it") from None
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        with suppress(OSError):
            os.unlink(temporary)


def _unwritable(target: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or str(error)
    return InputError(
        f"cannot be written: {reason}", where=str(target), hint="give a file in a folder of yours"
    )


def read(path: str | Path) -> MemoryCalibration:
    """The calibration in a file. Errors: InputError naming the key; unknown keys are refused."""
    file = Path(path)
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise InputError("too large for a calibration", where=str(file), hint=_HINT)
        data = catalog.read_yaml(file)
    except RecursionError:
        raise InputError("nested too deeply", where=str(file), hint=_HINT) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a file name"
        raise InputError(f"cannot be read: {reason}", where=str(file), hint=_HINT) from None
    keys = Keys(data, where=str(file))
    if data.get("schema") != SCHEMA or data.get("kind") != "memory":
        said = f"{data.get('schema')} {data.get('kind')}"
        raise keys.fail("schema", f"{shown(said)} is no {SCHEMA} of kind memory", _HINT)
    keys.used.update(("schema", "kind", "origin", "software", "measurements", "state", "fit_sha256"))
    engine, gpu, fit = (_child(keys, name) for name in ("engine", "gpu", "fit"))
    terms = _child(fit, "terms")
    made = MemoryCalibration(
        engine=engine.text("name") or "",
        version=engine.text("version"),
        gpu_id=gpu.text("id"),
        gpu_total_bytes=gpu.optional_integer("total_bytes", high=_LARGEST_BYTES),
        terms={name: terms.integer(name, low=0, high=_LARGEST_BYTES) for name in TERMS if name in terms.data},
        graphs_in_budget=None if fit.data.get("graphs_in_budget") is None else fit.flag("graphs_in_budget"),
        state=_state(_child(keys, "state")),
    )
    fit.used.add("graphs_in_budget")
    for part, known in ((keys, ()), (engine, ()), (gpu, ()), (fit, ()), (terms, TERMS)):
        _refuse_unknown(part, known)
    if not made.terms:
        raise fit.fail("terms", "empty", "at least one of " + ", ".join(TERMS))
    if data.get("fit_sha256") != _digest(made.fit()):
        raise keys.fail("fit_sha256", "does not match fit: it was changed after it was measured", _HINT)
    return made


_HINT: Final = "`capplan doctor LOG --save FILE` writes one"


def _state(keys: Keys) -> dict[str, Any]:
    for key, value in keys.data.items():
        if key not in (*SETTINGS, "model", "weights_bytes", "kv_pool_bytes"):
            raise keys.fail(str(key), "unknown key", did_you_mean(str(key), SETTINGS, _HINT))
        if not isinstance(value, str | int | float | bool):
            raise keys.fail(key, f"{shown(value)} is no setting", _HINT)
    return dict(keys.data)


def _child(keys: Keys, name: str) -> Keys:
    child = keys.child(name)
    if child is None:
        raise keys.fail(name, "missing", _HINT)
    return child


def _refuse_unknown(keys: Keys, known: tuple[str, ...]) -> None:
    for key in keys.unused():
        raise keys.fail(str(key), "unknown key", did_you_mean(str(key), (*keys.used, *known), _HINT))


def differences(calibration: MemoryCalibration, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings asked now that are not those it was measured with, as "name 8192 (measured at 2048)"."""
    return tuple(
        f"{name} {value} (measured at {calibration.state[name]})"
        for name, value in asked.items()
        if value is not None and name in calibration.state and calibration.state[name] != value
    )


def with_measured(
    plan: EnginePlan,
    calibration: MemoryCalibration,
    planned: Callable[[int], EnginePlan],
    extra_bytes: int,
) -> EnginePlan:
    """A plan whose terms beside weights and KV cache are the measured ones.

    `planned` makes the same plan with other bytes beside the decoder: what the measurement has more (or
    less) than the estimate is put there, so that the pool and all that follows from it are the engine's own
    rules again. Where nothing differs from what was measured the pool has no band.
    Errors: InputError for another engine's measurement.
    """
    if plan.engine != calibration.engine:
        raise InputError(
            f"measured with {calibration.engine}, asked for {plan.engine}",
            where="--calibration, --engine",
            hint=f"--engine {calibration.engine}, or measure {plan.engine}",
        )
    if plan.engine in _FRACTION_OF_FREE:
        raise InputError(
            f"{plan.engine}'s fraction is of free memory: measured terms do not go into its plan",
            where="--calibration, --engine",
            hint="leave out --engine: they then stand for the rule of thumb",
        )
    outside = "cuda_graphs_outside" in plan.terms
    own = {name: size for name, size in plan.terms.items() if name not in (*_KEPT, *_CACHES)}
    inside = {
        name: size for name, size in calibration.terms.items() if not (outside and name == "cuda_graphs")
    }
    estimated = sum(size for name, size in own.items() if not name.endswith("_outside"))
    after = planned(extra_bytes + sum(inside.values()) - estimated)
    kept = {name: plan.terms[name] for name in (*_KEPT, *_CACHES) if name in plan.terms}
    terms = kept | inside
    if outside:
        terms["cuda_graphs_outside"] = calibration.terms.get("cuda_graphs", own["cuda_graphs_outside"])
    asked = {flag.name: flag.value for flag in plan.flags}
    other = differences(calibration, asked)
    if calibration.version is not None and calibration.version != plan.version:
        other = (f"version {plan.version} (measured on {calibration.version})", *other)
    notes = tuple(f"not as measured: {text}" for text in other)
    pool = after.kv_pool
    starts = after.starts
    if not other:
        pool = replace(pool, low=pool.value, high=pool.value)
        starts = after.more.get("starts_at_estimate", starts)
    return replace(
        after,
        terms=terms,
        kv_pool=pool,
        starts=starts,
        notes=(*(note for note in after.notes if other or not note.startswith("KV pool between")), *notes),
    )
