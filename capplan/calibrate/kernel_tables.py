"""Reader of kernel tables in aiconfigurator's terms: one CSV file an operation, for all GPUs and engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from capplan import catalog
from capplan.calibrate.tables import Cells, Measured, Row, Source, lines, weight_bits
from capplan.specs import Gpu

_MS: Final = 1e-3
# Names in these tables that mean another part than the catalog's alias: the A100 is the one of 80 GB.
_GPUS: Final = {"a100_sxm": "a100-sxm-80gb"}
# Weights of these were not rotated between calls, of others six copies were.
_ONE_COPY: Final = ("fp8_block", "nvfp4")
_COPIES: Final = 6
_LATENT: Final = 576
_OPS: Final = {"alltoall": "all_to_all"}

IMPOSSIBLE: Final = "faster than the memory allows"
EAGER: Final = "timed without CUDA graphs"


def _source(what: str) -> Source:
    return Source(
        what=what,
        source="ai-dynamo/aiconfigurator: wheel aiconfigurator-core 0.12.0, some rows of git 095f58a51c4c",
        licence="Apache-2.0",
        date="2026-09",
    )


def read(folder: Path, into: Measured) -> bool:
    """Every kernel table of a folder; False where there is none."""
    found = False
    for name, read_row in _READERS.items():
        path = folder / f"{name}.csv"
        if path.exists():
            found = True
            source = _source(f"{name}.csv")
            for cells in lines(path):
                gpu = _gpu(cells)
                into.add(gpu.id, source, read_row(cells, gpu))
    path = folder / "moe.csv"
    if path.exists():
        found = True
        _experts(path, into)
    return found


def _gpu(cells: Cells) -> Gpu:
    name = cells.text("gpu")
    return catalog.load_gpu(_GPUS[name]) if name in _GPUS else catalog.gpu(name)


def _impossible(seconds: float, moved: float, held: float, gpu: Gpu) -> bool:
    """Data that no cache held came faster than the memory's bandwidth."""
    return held > (gpu.l2_bytes or 0) and moved > seconds * gpu.memory_bandwidth_bytes_per_s


def _gemm(cells: Cells, gpu: Gpu) -> Row | str:
    dtype, engine = cells.dtype("dtype"), cells.text("backend")
    if dtype == "fp8_block" and engine == "vllm":
        return EAGER
    m, n, k = (cells.count(name) for name in "mnk")
    seconds = cells.seconds("latency_ms", _MS)
    copies = 1 if dtype in _ONE_COPY else _COPIES
    weights = n * k * weight_bits(dtype) / 8
    if _impossible(seconds, weights + 2 * m * (n + k), weights * copies, gpu):
        return IMPOSSIBLE
    return Row(
        op="gemm",
        dtype=dtype,
        engine=engine,
        columns={"m": m, "n": n, "k": k, "copies": copies},
        seconds=seconds,
        group=f"{n}x{k}",
    )


def _kv_dtype(cells: Cells) -> str:
    """bf16, fp8 (the cache alone), or fp8_compute (the products too)."""
    compute, stored = cells.dtype("compute_dtype"), cells.dtype("kv_dtype")
    return "fp8_compute" if compute == "fp8" else stored


def _stored_bits(dtype: str) -> int:
    return 16 if dtype == "bf16" else 8


def _decode(cells: Cells, gpu: Gpu) -> Row | str:
    dtype, batch, heads = _kv_dtype(cells), cells.count("batch"), cells.count("num_heads")
    kv_heads, width = cells.count("num_kv_heads"), cells.count("head_dim")
    context, window = cells.count("context_len"), int(cells.number("window"))
    tokens = batch * (min(context, window) if window else context)
    seconds = cells.seconds("latency_ms", _MS)
    moved = tokens * kv_heads * 2 * width * _stored_bits(dtype) / 8
    if _impossible(seconds, moved, moved, gpu):
        return IMPOSSIBLE
    return Row(
        op="decode_attention",
        dtype=dtype,
        engine=cells.text("backend"),
        columns={
            "batch": batch,
            "kv_tokens": tokens,
            "heads": heads,
            "kv_heads": kv_heads,
            "k_width": width,
            "v_width": width,
            "copies": 1,
        },
        seconds=seconds,
        group=f"{batch}x{heads}",
    )


def causal_pairs(length: int, past: int, window: int) -> int:
    """Query-key pairs of `length` new tokens after `past`, each seeing itself and what the window leaves."""
    if not window:
        return length * past + length * (length + 1) // 2
    growing = max(0, min(length, window - past))
    grown = growing * past + growing * (growing + 1) // 2
    return grown + (length - growing) * window


def _prefill(cells: Cells, gpu: Gpu) -> Row | str:
    batch, heads = cells.count("batch"), cells.count("num_heads")
    kv_heads, width = cells.count("num_kv_heads"), cells.count("head_dim")
    length, past = cells.count("seq_len"), int(cells.number("past_len"))
    window = int(cells.number("window"))
    return Row(
        op="prefill_attention",
        dtype=_kv_dtype(cells),
        engine=cells.text("backend"),
        columns={
            "sequences": batch,
            "tokens": batch * length,
            "pairs": batch * causal_pairs(length, past, window),
            "heads": heads,
            "kv_heads": kv_heads,
            "k_width": width,
            "v_width": width,
        },
        seconds=cells.seconds("latency_ms", _MS),
        group=f"{batch}x{heads}",
    )


def _mla(cells: Cells, gpu: Gpu) -> Row | str:
    dtype, batch, heads = _kv_dtype(cells), cells.count("batch"), cells.count("num_heads")
    length, context = cells.count("query_len"), cells.count("context_len")
    seconds = cells.seconds("latency_ms", _MS)
    shared = {"heads": float(heads)}
    if cells.text("phase") == "decode":
        moved = batch * context * _LATENT * _stored_bits(dtype) / 8
        if _impossible(seconds, moved, moved, gpu):
            return IMPOSSIBLE
        op, own = "mla_decode", {"batch": batch, "kv_tokens": batch * context}
    else:
        pairs = batch * causal_pairs(length, context - length, 0)
        op, own = "mla_prefill", {"sequences": batch, "tokens": batch * length, "pairs": pairs}
    return Row(
        op=op,
        dtype=dtype,
        engine=cells.text("backend"),
        columns=shared | own,
        seconds=seconds,
        group=f"{batch}x{heads}",
    )


def _collectives(cells: Cells, gpu: Gpu) -> Row | str:
    eager = "_eager" if cells.text("kernel").endswith("_eager") else ""
    op, ranks = cells.text("op"), cells.count("num_gpus")
    size = 2 * cells.count("message_elements")
    return Row(
        op=_OPS.get(op, op),
        dtype=str(ranks),
        engine=cells.text("library") + eager,
        columns={"bytes_moved": size, "ranks": ranks},
        seconds=cells.seconds("latency_ms", _MS),
        group=str(size),
    )


def _experts(path: Path, into: Measured) -> None:
    """Routed experts. Two matrices where the same shape was timed by a kernel without a gate on that GPU's
    tables; where no such kernel was known yet (A100), every shape was timed with a gate."""
    shape = ("hidden", "inter", "top_k", "num_experts")
    rows = [(cells, _gpu(cells), tuple(cells.count(name) for name in shape)) for cells in lines(path)]
    plain = {widths for cells, _, widths in rows if cells.text("kernel").endswith("_nongated")}
    knowing = {gpu.id for cells, gpu, _ in rows if cells.text("kernel").endswith("_nongated")}
    source = _source(path.name)
    for cells, gpu, widths in rows:
        routing = cells.text("routing")
        ranks = (cells.count("tp"), cells.count("ep"))
        # A kernel for few tokens that an engine is told to use: its own entry, as another engine's would be.
        variant = "_min_latency" if cells.text("kernel").endswith("_min_latency") else ""
        columns = dict(zip(("hidden", "inter", "top_k", "experts", "tp", "ep"), widths + ranks, strict=True))
        columns["tokens"] = cells.count("num_tokens")
        row = Row(
            op="experts",
            dtype=cells.dtype("dtype"),
            engine=cells.text("backend") + variant,
            columns={
                **columns,
                "gated": float(not (widths in plain and gpu.id in knowing)),
                "skew": 0.0 if routing == "balanced" else float(routing.rpartition("_")[2]),
            },
            seconds=cells.seconds("latency_ms", _MS),
            group="x".join(map(str, widths + ranks)),
        )
        into.add(gpu.id, source, row)


_READERS: Final[dict[str, Callable[[Cells, Gpu], Row | str]]] = {
    "gemm": _gemm,
    "attention_decode": _decode,
    "attention_context": _prefill,
    "mla": _mla,
    "collectives": _collectives,
}
