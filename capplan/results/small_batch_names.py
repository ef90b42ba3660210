"""Names in tables of small-batch speeds → engines, platforms, catalog GPUs, models and formats.

Such tables name a GPU as its owner describes the machine, a model as llama-bench labels it or by its file, a
format by a GGUF type. Each is taken apart by rule and its parts resolve through the catalog's declared names.
"""

import functools
import re
from collections.abc import Iterator
from typing import Final

from capplan import catalog
from capplan.errors import InputError
from capplan.readers.ggml_types import GGML_FORMATS
from capplan.readers.gguf_architectures import ARCHITECTURES
from capplan.small_batch import Platform, family_of, platform_of
from capplan.specs import Format, Gpu, MixRule, Model
from capplan.weights import weight_budget

GGUF_ENGINES: Final = frozenset(("llama.cpp", "ik_llama.cpp", "ollama", "ctransformers"))
TENSOR_PARALLEL: Final = frozenset(("gpt-fast", "mlc", "vllm", "tensorrt-llm", "exllamav3"))
"""Engines whose GPUs share each layer; those of others hold whole layers and work in turn."""

_ENGINES: Final = {"mlc-llm": "mlc", "nvidia tensorrt-llm": "tensorrt-llm", "trt-llm": "tensorrt-llm"}
_PLATFORM_WORDS: Final[tuple[tuple[str, Platform], ...]] = (
    ("rocm", "rocm"),
    ("rocwmma", "rocm"),
    ("hip", "rocm"),
    ("vulkan", "vulkan"),
    ("sycl", "sycl"),
    ("metal", "metal"),
    ("cuda", "cuda"),
)
_BOARDS: Final = re.compile(r"\b(?:Pi|CM\d|HiFive|Radxa|Rock ?\d|Milk-V)\b")
# Hosts of other processors than x86-64, for which ROCm does not exist.
_NOT_X86: Final = re.compile(rf"{_BOARDS.pattern}|\b(?:Thelio Astra|Ampere|Altra|Grace|MS-R1)\b")
_VENDORS: Final = re.compile(r"^(?:nvidia|amd|intel|apple)\s+", re.IGNORECASE)
_APPLE: Final = re.compile(r"\bM\d+(?:[ -](?:Pro|Max|Ultra))?\b")
_APPLE_CORES: Final = re.compile(r"(\d+)[ -](?:GPU[ -]cores?|cores?[ -]GPU)\b|-(\d+)c\b", re.IGNORECASE)

_SPLIT: Final = re.compile(r"-\d{5}-of-\d{5}$")
_FILE_TYPE: Final = re.compile(
    r"[-.](?:UD-)?(?:i1-)?((?:I?Q\d\w*|TQ\d\w*|F16|BF16|F32|MXFP4(?:_MOE)?))$", re.IGNORECASE
)
_VARIANT: Final = re.compile(r"[-. _](?:instruct|inst|chat|it|hf|base|gguf|\d{4})$", re.IGNORECASE)
_LABEL: Final = re.compile(r"([\w.-]+) ([\d.]+|\?)B\b")

# GGML types whose llama.cpp mix is meant where only the type is named; "XL" mixes are near the medium ones.
_MIXES: Final = {
    "q8_k": "q8_0",
    "q5_k": "q5_k_m",
    "q4_k": "q4_k_m",
    "q3_k": "q3_k_m",
    "q5_k - medium": "q5_k_m",
    "q4_k - medium": "q4_k_m",
    "q3_k - medium": "q3_k_m",
    "q5_k - small": "q5_k_s",
    "q4_k - small": "q4_k_s",
    "q3_k - small": "q3_k_s",
    "q3_k - large": "q3_k_l",
    "f16": "fp16",
    "f32": "fp32",
    "float16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",
}
_MXFP4_FILE: Final = Format(
    id="mxfp4_moe",
    name="GGUF MXFP4: experts MXFP4, the rest Q8_0",
    element_bits=4,
    group_shape="gguf",
    group=32,
    block_bytes=17,
    rules=(
        *(
            MixRule(tensor=name, stored=GGML_FORMATS["MXFP4"], min_experts=1)
            for name in ("ffn_gate", "ffn_up", "ffn_down")
        ),
        MixRule(tensor="all", stored=GGML_FORMATS["Q8_0"]),
    ),
    source="llama.cpp src/llama-quant.cpp, LLAMA_FTYPE_MOSTLY_MXFP4_MOE",
)


def engine_of(name: str) -> str:
    """The engine a table names, without its platform and version."""
    text = re.sub(r"\s*\([^)]*\)", "", name.strip().lower())
    if text.startswith("ik_"):
        return "ik_llama.cpp"
    if text.startswith("llama.cpp"):
        return "llama.cpp"
    return _ENGINES.get(text, text.replace(" ", "-"))


def platform_named(engine: str, machine: str, gpu: Gpu) -> Platform:
    """What the engine's kernels are written for: as its name says, else the vendor's own where it exists."""
    words = re.split(r"[-_ .]", engine.lower())
    for word, platform in _PLATFORM_WORDS:
        if word in words:
            return platform
    own = platform_of(gpu)
    return "vulkan" if own == "rocm" and _NOT_X86.search(machine) else own


def on_board(machine: str) -> bool:
    """Whether a machine's description names a single-board computer as the GPU's host."""
    return _BOARDS.search(machine) is not None


@functools.cache
def gpu_named(machine: str) -> Gpu | None:
    """The GPU of a machine as its owner describes it: "13900K (Nvidia 4090)", "M1 Ultra (48 GPU Core)"."""
    known = catalog.index("gpus")
    for name in _gpu_names(machine):
        found = known.get(catalog.normalised(name)) if name.strip() else None
        if found is not None:
            return catalog.load_gpu(found)
    return None


def _gpu_names(machine: str) -> Iterator[str]:
    apple, cores = _APPLE.search(machine), _APPLE_CORES.search(machine)
    base = f"apple-{apple[0].replace(' ', '-')}" if apple else ""
    if apple and cores:
        yield f"{base}-{cores[1] or cores[2]}c"
    inside = re.search(r"\(([^()]*)\)[^()]*$", machine)
    outside = re.sub(r"\s*\([^()]*\).*$", "", machine)
    for part in (machine, inside[1] if inside else "", outside):
        bare = _VENDORS.sub("", part.strip())
        yield from (part, bare, re.sub(r"\s+\d+ ?GB$", "", bare))
    yield base


def model_named(name: str) -> tuple[Model | None, str]:
    """The catalog's model of a file's or a person's name, and the file's weight type ("" for none).

    A file's name ends in its type; a fine-tune's ends in its base's, with the size.
    """
    text = _SPLIT.sub("", name.strip())
    kind = _FILE_TYPE.search(text)
    if kind:
        text = text[: kind.start()]
    known = catalog.index("models")
    for candidate in _model_names(text):
        found = known.get(catalog.normalised(candidate))
        if found is not None:
            return _model(found), kind[1] if kind else ""
    return None, kind[1] if kind else ""


def _model_names(text: str) -> Iterator[str]:
    shorter = text
    names = [text]
    while match := _VARIANT.search(shorter):
        shorter = shorter[: match.start()]
        names.append(shorter)
    for name in names:
        yield name
        yield f"{name}-instruct"
        # ollama's tags: a colon before the size
        head, _, size = name.replace(" ", "-").replace(":", "-").rpartition("-")
        yield f"{head}:{size}"
        yield f"{head}-{size}"
    words = re.split(r"[- _]", shorter)
    for first in range(1, len(words) - 1):
        yield "-".join(words[first:])


@functools.cache
def model_labelled(
    label: str, *, parameters: float | None, weights: Format | None, file_bytes: float | None
) -> Model | None:
    """The catalog's model of a llama-bench label, "llama 8B": of that architecture, nearest in size.

    By the parameters printed (within 1 %), else by the file's size in its format (within 2 %).
    """
    match = _LABEL.match(label)
    architecture = ARCHITECTURES.get(match[1]) if match else None
    if match is None or architecture is None:
        return None
    kinds = {architecture.model_type, architecture.moe_type}
    if match[1] == "llama":
        kinds.add("mistral")
    if match[1] == "deepseek2":
        kinds.add("deepseek_v2")
    models = [model for model in _models() if model.architecture in kinds]
    if parameters is not None:
        far = {model.name: abs(model.parameters / parameters - 1) for model in models}
        limit = 0.01
    elif file_bytes is not None and weights is not None:
        far = {model.name: abs(weight_budget(model, weights).bytes / file_bytes - 1) for model in models}
        limit = 0.02
    elif match[2] != "?":
        far = {model.name: abs(round(model.parameters / 1e9) - float(match[2])) for model in models}
        limit = 0.5
    else:
        return None
    near = [model for model in models if far[model.name] <= limit]
    return min(near, key=lambda model: round(far[model.name], 3), default=None)


@functools.cache
def _models() -> tuple[Model, ...]:
    return tuple(_model(identity) for identity in catalog.ids("models"))


@functools.cache
def _model(identity: str) -> Model:
    return catalog.load_model(identity)


@functools.cache
def _format(identity: str) -> Format:
    return catalog.load_format(identity)


class UnknownFormatError(Exception):
    """A weight format that the catalog does not have."""


def format_named(quant: str, *, file_type: str, engine: str, model: Model | None) -> Format | None:
    """The weight format a table's row names; None: the checkpoint's own.

    `file_type` is the type in the model file's name. Raises UnknownFormatError.
    """
    text = quant.strip().lower()
    if model is not None and family_of(None, model) == "mxfp4":
        # Published in MXFP4: a file "F16" keeps it and holds the rest at 16 bits, llama.cpp's own has Q8_0.
        return None if text in ("f16", "bf16", "") else _MXFP4_FILE
    if text.startswith("mxfp4"):
        return _MXFP4_FILE
    if text in ("medium", "small", "large"):  # cut off from "Q4_K - Medium"
        text = file_type.lower()
    if "default tag" in text:
        text = "q4_k_m"
    bits = re.fullmatch(r"exl[23]-([\d.]+)bpw", text)
    if bits:
        return Format(
            id=text, name=quant, element_bits=float(bits[1]), effective_bits=float(bits[1]), quantizes="all"
        )
    if text.startswith("int4") or re.match(r"gptq-?4bit", text):
        return _four_bits(text, engine)
    if text == "int8" and engine in GGUF_ENGINES:
        text = "q8_0"
    text = re.sub(r"^ud-", "", re.sub(r"_xl$", "", text))
    text = _MIXES.get(text, text)
    found = catalog.index("formats").get(catalog.normalised(text)) if text else None
    if found is None:
        raise UnknownFormatError(quant)
    try:
        return _format(found)
    except InputError:
        raise UnknownFormatError(quant) from None


def _four_bits(text: str, engine: str) -> Format:
    """An engine's own 4 bits: Q4_K_M of GGUF engines, MLC's q4f16_1, gpt-fast's groups, else GPTQ's size."""
    if engine in GGUF_ENGINES:
        return _format("q4_k_m")
    group = re.search(r"g(\d+)$", text) if engine == "gpt-fast" else None
    if engine == "mlc" or group:
        return Format(
            id=f"{engine}-int4",
            name=f"{engine} int4",
            element_bits=4,
            group_shape="input",
            group=int(group[1]) if group else 32,
            scale_bits=16,
            zero_bits=16 if group else 0,
            quantizes="linear",
            keeps=("norm",),
        )
    return _format("gptq")
