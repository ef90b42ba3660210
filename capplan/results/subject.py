"""What a measured run was about: names → catalog entries and formats, or why not, where one is unknown."""

import functools
import re
from dataclasses import dataclass
from typing import Final

from capplan import catalog
from capplan.errors import InputError
from capplan.results.measured import MeasuredRun
from capplan.specs import Format, Gpu, Model

# 16 bits under either name: the two cost the same.
_EITHER_HALF: Final = frozenset({"fp16/bf16", "bf16/fp16"})
_REMARK: Final = re.compile(r"\s*\([^)]*\)$|\s+online$")
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A run's model, GPU, formats; `weights` None: the checkpoint's own, `kv` None: the engine's choice."""

    model: Model
    gpu: Gpu
    weights: Format | None
    kv: Format | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Why a run's subject is not known: "model", "gpu" or "format", and the name."""

    what: str
    name: str


def subject_of(run: MeasuredRun) -> Subject | Unknown:
    """The subject of a run, or what of it is unknown."""
    model_id = catalog.index("models").get(catalog.normalised(_model_name(run.model)))
    if model_id is None:
        return Unknown(what="model", name=run.model)
    gpu_id = catalog.index("gpus").get(catalog.normalised(run.gpu))
    if gpu_id is None:
        return Unknown(what="gpu", name=run.gpu)
    model = _model(model_id)
    weights: Format | None = None
    if run.weight_dtype is not None:
        found = format_of(run.weight_dtype)
        if found is None:
            return Unknown(what="format", name=run.weight_dtype)
        weights = None if _own(model, found) else found
    notes: tuple[str, ...] = ()
    kv = format_of(run.kv_dtype) if run.kv_dtype not in (None, AUTO) else None
    if kv is None and run.kv_dtype not in (None, AUTO):
        notes = (f"KV dtype {run.kv_dtype} is not known here: the engine's default taken",)
    return Subject(model=model, gpu=_gpu(gpu_id), weights=weights, kv=kv, notes=notes)


def format_of(name: str | None) -> Format | None:
    """The format that a table's dtype column means; None where it is unknown or two things at once."""
    if name is None:
        return None
    text = _REMARK.sub("", name.strip().lower())
    if text in _EITHER_HALF:
        text = "bf16"
    identity = catalog.index("formats").get(catalog.normalised(text))
    return None if identity is None else _format(identity)


def _model_name(name: str) -> str:
    """A path's last part: benchmark clients print where the server found the model."""
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", "./")) else name


def _own(model: Model, asked: Format) -> bool:
    """Whether the checkpoint already has the format asked for, or a narrower one.

    A table names the class (fp8) of what the checkpoint has in detail (128 × 128 blocks); and a model
    published in 4 bits only is listed under the format its activations have.
    """
    own = model.quantization
    if own is None or not own.rules:
        return False
    stored = own.rules[-1][1]
    if stored.element_bits == asked.element_bits:
        return _kind(stored) == _kind(asked)
    return stored.element_bits < asked.element_bits


def _kind(stored: Format) -> str:
    """What tables call a format: by its element, whatever its scales are shared by."""
    if stored.id in ("nvfp4", "mxfp4"):
        return "fp4"
    return "fp8" if stored.id.startswith("fp8") else f"int{stored.element_bits:g}"


@functools.cache
def _model(identity: str) -> Model:
    return catalog.load_model(identity)


@functools.cache
def _gpu(identity: str) -> Gpu:
    return catalog.load_gpu(identity)


@functools.cache
def _format(identity: str) -> Format | None:
    try:
        return catalog.load_format(identity)
    except InputError:
        return None
