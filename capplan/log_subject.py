"""Which model, GPU and formats a start-up log is about: names of the log → the catalog, by declared alias.

A log is text of unknown origin: no path in it is opened. What the user names goes first.
"""

import re
from dataclasses import dataclass
from typing import Final

from capplan import catalog, model_source
from capplan.engines.log_record import EngineLog
from capplan.errors import shown
from capplan.specs import Format, Gpu, Model
from capplan.units import format_gib

# "…-Q4_K_M", "….i1-IQ3_XS", "…-UD-Q4_K_XL" at the end of a GGUF file's name.
_GGUF_TYPE: Final = re.compile(
    r"[.-](?:i1-|UD-)?(?P<type>(?:I?Q\d\w{0,8}|TQ\d_0|BF16|F16|F32|MXFP4(?:_MOE)?))$",
    re.ASCII | re.IGNORECASE,
)
_SPLIT: Final = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_SNAPSHOT: Final = re.compile(r"models--([\w.-]{1,96})--([\w.-]{1,96})(?:/|$)", re.ASCII)
# CUDA's total is up to this share below the driver's, which the catalog has.
_BELOW_DRIVER: Final = 0.02
_ABOVE_DRIVER: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What a log is about.

    `model` and `gpu` are None where neither the log nor the user names one of the catalog; `missing` says
    what would have to be given. `total_bytes` is the GPU's memory: the log's own figure, else the catalog's.
    `precision` None keeps the checkpoint's formats.
    """

    model: Model | None
    gpu: Gpu | None
    total_bytes: int | None
    total_from_log: bool
    precision: Format | None
    kv_format: Format
    notes: tuple[str, ...]
    missing: tuple[str, ...]


def subject_of(
    log: EngineLog, *, model: str | None = None, gpu: str | None = None, online: bool = False
) -> Subject:
    """The model, GPU and formats of a log; `model` and `gpu` are the user's own names for them.

    Errors: InputError for a name of the user's that is not known.
    """
    notes: list[str] = []
    missing: list[str] = []
    spec, file_type = _model(log, model, online, notes, missing)
    total = log.number("gpu_total_bytes")
    found = _gpu(log, gpu, notes)
    usable = round(total) if total else found.usable_bytes if found is not None else None
    if usable is None:
        missing.append("the GPU: neither its name nor its memory is in the log; give --gpu NAME")
    return Subject(
        model=spec,
        gpu=found,
        total_bytes=usable,
        total_from_log=bool(total),
        precision=None if spec is None else _precision(log, spec, file_type, notes),
        kv_format=_kv_format(log, spec, notes),
        notes=tuple(notes),
        missing=tuple(missing),
    )


def _text(log: EngineLog, name: str) -> str | None:
    reading = log.fields.get(name)
    return None if reading is None else str(reading.value)


def _model(
    log: EngineLog, asked: str | None, online: bool, notes: list[str], missing: list[str]
) -> tuple[Model | None, str | None]:
    """The model, and the type that a GGUF file's name ends in."""
    named = [name for name in (_text(log, "model"), _text(log, "model_name")) if name]
    file_type = next((found for name in named if (found := _gguf_type(name))), None)
    if asked is not None:
        return model_source.load(asked, online=online), file_type
    for name in named:
        for candidate, how in _candidates(name):
            identity = catalog.index("models").get(catalog.normalised(candidate))
            if identity is not None:
                spec = catalog.load_model(identity)
                if how:
                    notes.append(f"the log's model {shown(name)} was taken for {spec.name} {how}")
                return spec, file_type
    if named:
        missing.append(f"the model: {shown(named[0])} is not in the catalog; give --model NAME or PATH")
    else:
        missing.append("the model: the log does not name it; give --model NAME or PATH")
    return None, file_type


def _candidates(name: str) -> list[tuple[str, str]]:
    """What a log's model may be called in the catalog, with how it was understood."""
    text = name.strip().replace("\\", "/").rstrip("/")
    made = [(text, "")]
    snapshot = _SNAPSHOT.search(text)
    if snapshot is not None:
        made.append((f"{snapshot[1]}/{snapshot[2]}", "(a Hugging Face cache)"))
    parts = [part for part in text.split("/") if part]
    if len(parts) > 2:
        made.append(("/".join(parts[-2:]), "(the end of its path)"))
    if parts:
        stem = _SPLIT.sub("", parts[-1].removesuffix(".gguf"))
        made.append((stem, "(the end of its path)" if len(parts) > 1 else ""))
        bare = _GGUF_TYPE.sub("", stem)
        if bare != stem:
            made += [(bare, "(its file name)"), (bare.removeprefix("Meta-"), "(its file name)")]
    return made


def _gguf_type(name: str) -> str | None:
    stem = _SPLIT.sub("", name.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf"))
    found = _GGUF_TYPE.search(stem)
    return found["type"].lower() if found is not None else None


def _gpu(log: EngineLog, asked: str | None, notes: list[str]) -> Gpu | None:
    if asked is not None:
        return catalog.gpu(asked)
    named = _text(log, "gpu_name")
    if named is not None:
        identity = catalog.index("gpus").get(catalog.normalised(named))
        if identity is not None:
            return catalog.load_gpu(identity)
        notes.append(f"the log's GPU {shown(named)} is not in the catalog: its memory alone is used")
    total = log.number("gpu_total_bytes")
    if named is not None or not total or log.engine == "llama.cpp":
        return None
    fitting = [
        gpu.id
        for gpu in (catalog.load_gpu(identity) for identity in catalog.ids("gpus"))
        if gpu.memory_driver_bytes
        and gpu.vendor in ("nvidia", "amd")
        and gpu.memory_driver_bytes * (1 - _BELOW_DRIVER)
        <= total
        <= gpu.memory_driver_bytes * (1 + _ABOVE_DRIVER)
    ]
    if len(fitting) == 1:
        notes.append(f"GPU taken for {fitting[0]}: the only one with {format_gib(total)}")
        return catalog.load_gpu(fitting[0])
    if fitting:
        notes.append(
            f"the log does not name the GPU; {format_gib(total)} has {', '.join(fitting[:4])}"
            + (f" and {len(fitting) - 4} more" if len(fitting) > 4 else "")
            + ": its memory alone is used (--gpu NAME says which)"
        )
    return None


def _precision(log: EngineLog, model: Model, file_type: str | None, notes: list[str]) -> Format | None:
    """The weight format where the log says one that the model's files do not have already."""
    if model.stored is not None or (model.quantization is not None and log.engine != "llama.cpp"):
        return None
    said = _text(log, "quantization")
    names = [file_type, _ggml_name(said)] if log.engine == "llama.cpp" else [said]
    for name in names:
        identity = catalog.index("formats").get(catalog.normalised(name)) if name else None
        if identity is not None:
            return catalog.load_format(identity)
    if said is not None and log.engine != "llama.cpp":
        notes.append(
            f"quantization {shown(said)} is no known weight format: weights planned as the checkpoint's own"
        )
    return None


def _ggml_name(said: str | None) -> str | None:
    """llama.cpp's "Q4_K - Medium" as the catalog's q4_k_m."""
    if said is None:
        return None
    base, _, size = said.strip().partition(" - ")
    return f"{base}_{size[:1]}" if size else base


def _kv_format(log: EngineLog, model: Model | None, notes: list[str]) -> Format:
    said = _text(log, "kv_cache_dtype")
    if said is None or said == "auto":
        scheme = model.quantization.kv_format if model and model.quantization else None
        return catalog.load_format(scheme or "bf16")
    for name in (said, said.removeprefix("torch."), said.replace("float8", "fp8"), said.split("_")[0]):
        identity = catalog.index("formats").get(catalog.normalised(name))
        if identity is not None:
            found = catalog.load_format(identity)
            if found.kv or log.engine == "llama.cpp":
                return found
    notes.append(f"kv_cache_dtype {shown(said)} is not known: counted as 16-bit")
    return catalog.load_format("bf16")
