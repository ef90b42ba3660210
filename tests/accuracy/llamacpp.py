"""Rows of memory_llamacpp.csv beside the plan: one figure of one distinct configuration at a time.

Rows repeat (the same file on many GPUs); a configuration counts once. What cannot be planned is listed with
its reason, by rule and never by row: no figure printed, recipe unknown, cache type not stated, several loads
summed by the collector.
"""

import csv
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from zlib import crc32

from capplan import catalog, model_source
from capplan.engines import llama_cpp_buffers as buffers
from capplan.engines.llama_cpp import compute_rule, plan
from capplan.engines.plan import EngineFlags
from capplan.readers import hf_config
from capplan.specs import Format, Model
from capplan.units import MIB
from tests.accuracy.oracles import DATA, Row

FILE = DATA / "measured" / "memory_llamacpp.csv"
FORK = "ik_llama.cpp"
# The names in the table; Llama-1 has the shapes of Llama-2 at 7B and 13B.
NAMES = {
    "llama 1 6.74 b": "llama-2-7b",
    "llama 1 13.02 b": "llama-2-13b",
    "llama 2 6.74 b": "llama-2-7b",
    "llama 2 13.02 b": "llama-2-13b",
    "llama 2 68.98 b": "llama-2-70b",
    "llama 3 8.03 b": "llama-3-8b",
    "qwen3 235b a22b": "qwen3-235b-a22b",
    "qwen3 235b a22b 128k": "qwen3-235b-a22b",
    "deepseek r1 0528": "deepseek-r1",
    "deepseek r1 0528 bf16": "deepseek-r1",
    "deepseek v3 0324": "deepseek-v3",
    "deepseek v3 0324 bf16": "deepseek-v3",
    "kimi k2 instruct": "kimi-k2",
}
# hidden, FFN, layers, heads of the two Llama-1 sizes that no later model has.
LLAMA_1 = {"llama 1 32.53 b": (6656, 17920, 60, 52), "llama 1 65.29 b": (8192, 22016, 80, 64)}
QUANTS = {"F16": "fp16", "Q4_0": "q4_0", "Q8_0": "q8_0", "Q4_K - Medium": "q4_k_m", "Q6_K": "q6_k"}
KV_BITS = {"f16": 16, "q8_0": 8}
MIXED_BY_HAND = "tensors placed by hand (--override-tensor), or a recipe of the file's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One printed size beside the planned one, MiB; `left` says why it was not planned."""

    name: str
    kind: str
    fork: bool
    row: Row
    printed: float
    planned: float | None = None
    left: str = ""

    @property
    def error(self) -> float:
        """Signed relative error."""
        assert self.planned is not None
        return self.planned / self.printed - 1


@functools.cache
def model_of(name: str) -> Model | None:
    """The model a row's name means."""
    key = " ".join(name.lower().replace("-", " ").split())
    if key in LLAMA_1:
        hidden, ffn, layers, heads = LLAMA_1[key]
        config = {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        }
        architecture = catalog.architecture("llama")
        return hf_config.read_model(config, where="test", name=name, architecture=architecture, source="test")
    return model_source.load(NAMES[key]) if key in NAMES else None


@functools.cache
def weights_of(name: str, quant: str) -> buffers.LayerWeights | None:
    """The model's weights by layer, where its type is one recipe of llama.cpp's own."""
    model, made = model_of(name), QUANTS.get(quant)
    if model is None or made is None:
        return None
    precision: Format = catalog.weight_format(made)
    return buffers.layer_weights(model, weights_bytes=0, precision=precision)


def ubatch_of(row: Row) -> int:
    """Micro-batch of the row: 512 where its note does not say."""
    found = re.search(r"ubatch=(\d+)", row["notes"])
    return int(found.group(1)) if found else 512


def build_of(row: Row) -> int:
    """Build of the row; the fork, which prints none and ran with -fa, counts as the first that has it on."""
    found = re.match(r"\d+", row["engine_version"])
    return int(found.group()) if found else 6325


@functools.cache
def figures() -> tuple[Figure, ...]:
    """All figures of all distinct configurations."""
    with FILE.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    made: dict[tuple[object, ...], Figure] = {}
    for row in rows:
        for figure in _row_figures(row):
            key = (
                figure.kind, row["engine"], row["model"], row["quant"], row["n_gpu"], row["n_ctx"],
                row["kv_type"], ubatch_of(row), figure.printed,
            )  # fmt: skip
            made.setdefault(key, figure)
    return tuple(made.values())


def _row_figures(row: Row) -> Iterator[Figure]:
    fork = row["engine"] == FORK
    name = " ".join(
        (row["model"], row["quant"], f"{row['n_gpu']} GPU", f"{row['n_ctx']} cells", f"u{ubatch_of(row)}")
    )
    known = [
        (kind, float(row[column]))
        for kind, column in (
            ("model", "model_buffer_mib"), ("embedding", "host_model_buffer_mib"), ("kv", "kv_buffer_mib"),
            ("compute", "compute_buffer_mib"), ("host compute", "host_compute_buffer_mib"),
        )
        if row[column]
    ]  # fmt: skip
    parts = [float(part) for part in row["per_gpu_model_mib"].split()]
    for kind, printed in known:
        reason, planned = _plan(row, kind, parts)
        yield Figure(
            name=f"{name} {row['kv_type']}".strip(), kind=kind, fork=fork, row=row,
            printed=printed, planned=planned, left=reason,
        )  # fmt: skip
    if not fork and len(parts) > 1:
        weights = weights_of(row["model"], row["quant"])
        model = model_of(row["model"])
        assert weights
        assert model
        split = sorted(device_weights(model, weights, len(parts)))
        # Cards of unequal free memory swap a layer: the sizes are compared in order.
        for number, (printed, planned) in enumerate(zip(sorted(parts), split, strict=True)):
            yield Figure(
                name=f"{name} part {number}", kind="model part", fork=fork, row=row,
                printed=printed, planned=planned,
            )  # fmt: skip


def device_weights(model: Model, weights: buffers.LayerWeights, devices: int) -> list[float]:
    """Model buffer of each of equal GPUs that take everything, MiB."""
    place = buffers.place_layers(model.layers, model.layers + 1, (1.0,) * devices)
    return [
        (sum(weights.layers[i] for i in layers) + (weights.output if place.output_on == number else 0)) / MIB
        for number, layers in enumerate(place.gpus)
    ]


def _plan(row: Row, kind: str, parts: list[float]) -> tuple[str, float | None]:
    """Why a figure is left, or what is planned for it in MiB."""
    fork = row["engine"] == FORK
    devices = int(row["n_gpu"])
    model = model_of(row["model"])
    if model is None:
        return f"the model {row['model']!r} is not named", None
    if fork and len(parts) > devices:
        return "several loads are summed in one row", None
    if kind in ("model", "embedding"):
        weights = weights_of(row["model"], row["quant"])
        if fork or weights is None:
            return MIXED_BY_HAND, None
        return "", (weights.output + sum(weights.layers) if kind == "model" else weights.embedding) / MIB
    size = buffers.widths(model)
    cells = int(float(row["n_ctx"]))
    if kind == "kv":
        if row["kv_type"] not in KV_BITS:
            return "the cache's type is not stated", None
        context = buffers.cache_context(n_ctx=cells, sequences=1, unified=True)
        kv, _ = buffers.layer_cache_bytes(
            model, context, kv_bits=KV_BITS[row["kv_type"]], ubatch=ubatch_of(row)
        )
        return "", sum(kv) / MIB
    if size.latent:
        return "latent attention: the fork expands its keys (-mla), not modelled", None
    rule, _ = compute_rule(build_of(row))
    pipelined = devices > 1 and not fork  # tensors placed by hand switch the pipeline off
    if kind == "host compute":
        if fork:
            return MIXED_BY_HAND, None
        made = buffers.host_compute_bytes(size, rule, cells=cells, ubatch=ubatch_of(row), pipelined=pipelined)
        return "", made / MIB
    return "", compute_mib(row, rule)


def compute_mib(row: Row, rule: buffers.ComputeRule) -> float:
    """Compute buffers of all GPUs of a row by a rule; KeyError for a model that is not named."""
    model = model_of(row["model"])
    if model is None:
        raise KeyError(row["model"])
    devices = int(row["n_gpu"])
    total = sum(
        buffers.compute_bytes(
            buffers.widths(model),
            rule,
            cells=int(float(row["n_ctx"])),
            ubatch=ubatch_of(row),
            # Tensors placed by hand, as in the fork's rows, switch the pipeline off.
            pipelined=devices > 1 and row["engine"] != FORK,
            has_output=number == devices - 1,
        )
        for number in range(devices)
    )
    return total / MIB


def fitted(figure: Figure) -> bool:
    """Whether a figure's group is in the half for fitting, by a hash: models, or GPU counts of one model."""
    row = figure.row
    group = row["model"] if build_of(row) < 1700 else f"{row['model']}/{row['n_gpu']}/{row['n_ctx']}"
    return crc32(group.encode()) % 2 == 0


def fit(half: Sequence[Figure], rule: buffers.ComputeRule) -> list[buffers.ComputeRule]:
    """The rules, of small whole numbers, that come nearest to these figures (all that tie)."""
    scored: dict[float, list[buffers.ComputeRule]] = {}
    for ffn, score, mask in product(range(1, 5), range(1, 6), (2, 4, 6)):
        tried = replace(rule, ffn_copies=ffn, score_hidden=score, mask_bytes=mask)
        errors = [abs(compute_mib(one.row, tried) / one.printed - 1) for one in half]
        scored.setdefault(round(sum(errors) / len(errors), 4), []).append(tried)
    return scored[min(scored)]


@functools.cache
def starts() -> tuple[Row, ...]:
    """One row of each model, type and number of GPUs that the catalog knows; the fork's have no refusals."""
    with FILE.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["engine"] != FORK]
    known = {
        (row["model"], row["quant"], row["n_gpu"], row["gpu"]): row
        for row in rows
        if catalog.normalised(row["gpu"]) in catalog.index("gpus")
    }
    return tuple(known.values())


def starts_by_plan(row: Row) -> bool | None:
    """Whether the plan starts all layers on the row's GPUs."""
    model = model_of(row["model"])
    if model is None:
        raise KeyError(row["model"])
    made = plan(
        model,
        weights_bytes=0,
        total_bytes=catalog.gpu(row["gpu"]).usable_bytes,
        flags=EngineFlags(
            version=str(build_of(row)),
            max_model_len=int(float(row["n_ctx"] or 512)),
            gpu_layers=model.layers + 1,
            pp=int(row["n_gpu"]),
        ),
        precision=catalog.weight_format(QUANTS[row["quant"]]),
    )
    return made.starts
