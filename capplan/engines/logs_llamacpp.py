"""llama.cpp's load log, builds 1600 (2023-12) to 2026-11, ik_llama.cpp, and servers on it (ollama).

Everything is MiB, "MB" included. Ranks are devices (CUDA0, ROCm1, Metal, CPU): a device's buffers of one
kind are summed, since a model split over files or with two kinds of KV cache prints several. The plain
fields are sums over the GPUs; `host_` fields over CPU, pinned and memory-mapped buffers.
Sources: public issue threads and logs of llama.cpp and ik_llama.cpp, read 2026-11.
"""

import re

from capplan.engines.log_record import FIELDS, Line, Notes, Reading, Value
from capplan.engines.log_wording import count, size, values_of, wording
from capplan.engines.logs_llamacpp_sums import finish, on_device
from capplan.engines.logs_torch import fail

__all__ = ["ENGINE", "EVIDENCE", "WORDINGS", "finish"]

ENGINE = "llama.cpp"
EVIDENCE = (
    "llama_model_load",
    "llm_load_",
    "load_tensors: ",
    "print_info: ",
    "ggml_",
    "llama_kv_cache",
    "llama_context: ",
    "llama_new_context_with_model",
    "sched_reserve: ",
    "llama_init_from",
    "llama_params_fit",
    "memory_breakdown_print",
    "llama-server",
    "llama.cpp",
)
_BUFFER = re.compile(
    r"(?P<device>[A-Za-z][\w\-]{0,24}(?:\[[\w.:\-]{1,60}\])?)\s{1,4}"
    r"(?:(?P<kind>model|KV|RS|compute|output) )?buffer size$",
    re.ASCII,
)
_FIELD_OF: dict[str | None, str] = {
    **{None: "weights_bytes", "model": "weights_bytes", "KV": "kv_pool_bytes", "RS": "state_bytes"},
    **{"compute": "compute_bytes", "output": "output_bytes"},
}


def _loader(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """A model file was opened: a new start, unless it was announced as the draft's."""
    if notes.memo.pop("draft next", None) is not None:
        notes.memo["draft"] = "1"
        return
    notes.new_start()
    notes.put(line, "model", match["model"])


def _described(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The first line on a model's contents, for logs cut off before its file is named."""
    if "draft" not in notes.memo:
        notes.new_start()


def _draft_next(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.memo["draft next"] = "1"


def _buffer(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """`CUDA0 model buffer size = 48928.09 MiB` and its kin, by device."""
    before = line.text[max(0, match.start() - 120) : match.start()]
    found = _BUFFER.search(before)
    value = dict(values_of(match)).get("buffer_bytes")
    if found is None or not isinstance(value, int) or "alloc_compute_meta" in before:
        return
    kind = found["kind"]
    if kind is None and "load_tensors" not in before:
        return
    name = _FIELD_OF[kind]
    if name == "weights_bytes" and "draft" not in notes.memo and _computes(notes):
        # Weights come before the compute buffers: a run pasted after another, without its heading.
        notes.new_start()
    if "draft" in notes.memo:
        drafts = {"weights_bytes": "draft_weights_bytes", "kv_pool_bytes": "draft_kv_pool_bytes"}
        name = drafts.get(name, "")
    if name:
        # A context made again prints its compute buffers again; the others add up.
        notes.put(on_device(line, found["device"]), name, value, add=kind not in ("compute", "output"))


def _computes(notes: Notes) -> bool:
    return any("compute_bytes" in readings for readings in notes.by_rank.values())


def _device(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """What a device is and holds, from the lines that list them."""
    groups = match.groupdict()
    kind = "ROCm" if groups.get("rocm") else "CUDA"
    device = groups.get("device") or f"{kind}{groups['index']}"
    _put_known(notes, on_device(line, device), match, weak=False)


def _breakdown(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The table at exit: total = free + (self = model + context + compute)."""
    _put_known(notes, on_device(line, match["device"]), match, weak=True)


def _put_known(notes: Notes, line: Line, match: re.Match[str], *, weak: bool) -> None:
    for name, value in values_of(match, "MiB"):
        if name in FIELDS:
            notes.put(line, name, value, weak=weak)


def _cells(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """One KV cache of the context; models with sliding layers have two."""
    for name, value in values_of(match):
        if name == "kv_total_bytes":
            notes.put(line, name, value, add=True)
        elif name != "kv_tokens" or _more(notes.get(name, line.rank), value):
            notes.put(line, name, value)


def _more(old: Reading | None, value: Value) -> bool:
    if old is None or isinstance(old.value, str) or isinstance(value, str):
        return True
    return value > old.value


def _tried(notes: Notes, line: Line, match: re.Match[str]) -> None:
    fail(notes, line, dict(values_of(match)))


def _retried(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The allocation that failed is tried again without copies for pipelining: no refusal yet."""
    notes.refusals.clear()
    notes.warn(f"line {line.number}: pipeline parallelism was given up for want of memory")


def _pinned(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.warn(f"line {line.number}: pinned host memory was refused; transfers will be slower")


def _started(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.started_line = notes.started_line or line.number


def _flag(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.put(line, "kv_unified", match["kv_unified"] in ("true", "1"))


_IS = r"\s{0,40}=\s{0,8}"
WORDINGS = (
    wording(
        "llama_model_loader: loaded meta data with ",
        r".{0,80}? from (?P<model>.{1,300}?)(?: \(version|$)",
        then=_loader,
    ),
    wording("print_info: file format", then=_described),
    wording("llm_load_print_meta: format ", then=_described),
    wording("loading draft model", then=_draft_next),
    wording("build: ", r"(?P<version>b?\d{1,6} \([0-9a-f]{6,12}\))", weak=True),
    wording("build = ", r"(?P<version>\d{1,6} \([0-9a-f]{6,12}\))", weak=True),
    wording("build=", r"(?P<version>\d{1,6})", weak=True),
    wording("build_info: ", r"(?P<version>b\d{1,6}-[0-9a-f]{6,12})", weak=True),
    wording("general.name", _IS + r"(?P<model_name>\S[^|]{0,200})"),
    wording("model ftype", _IS + r"(?P<quantization>\w[^|]{0,60})"),
    wording("file type", _IS + r"(?P<quantization>\w[^|]{0,60})"),
    wording("model size", _IS + size("checkpoint_bytes") + r" \("),
    wording("file size", _IS + size("checkpoint_bytes") + r" \("),
    wording("offloaded ", count("gpu_layers") + r"/(?P<layers>\d{1,6}) layers to GPU"),
    wording(": n_ctx ", _IS.replace("0,40", "0,39") + r"(?P<context_tokens>\d{1,12})"),
    wording(": n_ctx_per_seq ", _IS + r"(?P<max_model_len>\d{1,12})"),
    wording(": n_ctx_seq ", _IS + r"(?P<max_model_len>\d{1,12})"),
    wording("new slot", r"[ ,|].{0,80}?n_ctx(?:_slot)?\s?=\s?(?P<max_model_len>\d{1,12})"),
    wording(": n_batch ", _IS + r"(?P<max_num_batched_tokens>\d{1,12})"),
    wording(": n_ubatch ", _IS + r"(?P<micro_batch_tokens>\d{1,12})"),
    wording(": n_seq_max ", _IS + r"(?P<max_num_seqs>\d{1,9})"),
    wording("n_slots", r"\s?=\s?(?P<max_num_seqs>\d{1,9})(?:, n_ctx_slot = (?P<max_model_len>\d{1,12}))?"),
    wording(": flash_attn ", _IS + r"(?P<flash_attention>\w{1,12})"),
    wording("kv_unified", r"\s{0,40}=\s{0,4}'?(?P<kv_unified>true|false)", then=_flag),
    wording("buffer size", r"\s{0,20}=" + size("buffer_bytes"), then=_buffer),
    wording(
        "using device ",
        r"(?P<device>\w{1,24}) \((?P<gpu_name>[^)]{1,80})\)(?: \([0-9a-fA-F:.]{1,20}\))? -"
        + size("gpu_free_bytes")
        + " free",
        then=_device,
    ),
    wording(
        "Device ",
        r"(?P<index>\d{1,4}): (?P<gpu_name>[^,]{1,80}), (?:compute capability|(?P<rocm>gfx))"
        + r"(?:.{0,120}?VRAM:"
        + size("gpu_total_bytes")
        + ")?",
        then=_device,
    ),
    wording(
        "KV self size", _IS + size("kv_total_bytes") + r"(?:, (?:K|c\^KV) \((?P<kv_cache_dtype>\w{1,12})\))?"
    ),
    wording(
        "size =",
        size("kv_total_bytes")
        + r" \("
        + count("kv_tokens")
        + r" cells,.{0,60}?\), K \((?P<kv_cache_dtype>\w{1,12})\)",
        then=_cells,
    ),
    # Builds of 2023-12 and before: one GPU figure for all devices.
    wording("VRAM used", r"\s{0,20}=" + size("weights_bytes")),
    wording("VRAM kv self = ", size("kv_pool_bytes")),
    wording("VRAM scratch buffer: ", size("compute_bytes")),
    wording("projected to use ", size("projected_bytes") + " of device memory vs." + size("gpu_free_bytes")),
    wording("projected to use ", size("host_projected_bytes") + " of host memory"),
    wording(
        "memory_breakdown_print: |   - ",
        r"(?P<device>[\w\-]{1,24})[^|]{0,80}\|"
        + count("gpu_total_bytes")
        + r" ="
        + count("left_bytes")
        + r" \+ \("
        + count("self_bytes")
        + r" ="
        + count("weights_bytes")
        + r" \+"
        + count("kv_pool_bytes")
        + r" \+"
        + count("compute_bytes"),
        then=_breakdown,
    ),
    wording(
        "allocating ",
        size("oom_tried_bytes") + r" on device (?P<oom_device>\d{1,4}): cudaMalloc failed: out of memory",
        then=_tried,
    ),
    wording("insufficient memory (attempted to allocate ", size("oom_tried_bytes"), then=_tried),
    wording("of pinned memory: ", then=_pinned),
    wording("retrying without pipeline parallelism", then=_retried),
    wording("failed to allocate buffer for kv cache", reason="kv_cache_not_allocated"),
    wording("failed to allocate compute buffers", reason="compute_buffer_not_allocated"),
    wording("failed to allocate compute pp buffers", reason="compute_buffer_not_allocated"),
    wording("error loading model: ", r"(?:failed|unable) to allocate", reason="weights_not_allocated"),
    wording("server is listening on ", then=_started),
    wording("HTTP server listening", then=_started),
)
