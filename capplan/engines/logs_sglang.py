"""SGLang's start-up log, 0.3 to 0.5.23. Its "GB" is GiB throughout.

Memory is printed as what is left after each stage ("avail mem"); sizes of its own came later: of the KV
pool with 0.4, of weights ("mem usage") and CUDA graphs with 0.4.x. Where a stage prints no size it is the
difference of two of these. A draft model repeats every stage under the same words: what a rank loads
second is the draft's.
Sources: the source of SGLang 0.3.6, 0.4.6.post5, 0.5.6.post2 and 0.5.23; public issue threads, read 2026-11.
"""

import re

from capplan.engines.log_record import Line, Notes, Reading, again
from capplan.engines.log_wording import count, key_values, parse, size, values_of, wording

ENGINE = "sglang"
EVIDENCE = (
    "sglang",
    "SGLang",
    "server_args=",
    "Load weight begin.",
    "Load weight end.",
    "Memory pool end.",
    "KV Cache is allocated.",
    "max_total_num_tokens=",
    "mem_fraction_static",
    "--mem-fraction-static",
    "Mamba Cache is allocated.",
    "SWAKVPool",
)
_CONFIG_KEYS = {
    **{"model_path": "model", "dtype": "dtype", "quantization": "quantization", "page_size": "block_size"},
    **{"kv_cache_dtype": "kv_cache_dtype", "mem_fraction_static": "mem_fraction_static"},
    **{"context_length": "max_model_len", "max_running_requests": "max_num_seqs"},
    **{"chunked_prefill_size": "max_num_batched_tokens", "tp_size": "tp", "pp_size": "pp"},
    **{"dp_size": "dp", "ep_size": "ep", "disable_cuda_graph": "enforce_eager"},
}


def _server_args(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.new_start()
    for key, printed in key_values(line.text[match.end() :]):
        name = _CONFIG_KEYS.get(key)
        value = None if name is None else parse(name, printed)
        if name is not None and value is not None and value != -1:
            notes.put(line, name, value)


def _is_draft(notes: Notes, line: Line) -> bool:
    """Whether this rank has begun its second model."""
    return notes.memo.get(f"loads {line.rank}", "") == "2"


def _load_begin(notes: Notes, line: Line, match: re.Match[str]) -> None:
    key = f"loads {line.rank}"
    notes.memo[key] = "2" if key in notes.memo else "1"
    for name, value in values_of(match):
        notes.put(line, name, value, weak=True)
        notes.put(line, "loading_from_bytes", value)


def _load_end(notes: Notes, line: Line, match: re.Match[str]) -> None:
    values = dict(values_of(match))
    draft = _is_draft(notes, line)
    used = values.pop("used_bytes", None)
    after = values.get("free_after_weights_bytes")
    derived = None
    before = notes.get("loading_from_bytes", line.rank)
    if used is None and before is not None and isinstance(after, int) and isinstance(before.value, int):
        used = before.value - after
        derived = "available memory before loading less after"
    if used is not None:
        notes.put(line, "draft_weights_bytes" if draft else "weights_bytes", used, derived=derived)
    # A draft loaded before the pools leaves what they are carved from.
    if not draft or notes.get("free_after_pool_bytes", line.rank) is None:
        for name, value in values.items():
            if not draft or name == "free_after_weights_bytes":
                notes.put(line, name, value)


def _pool(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """A KV pool: of the target, of its sliding layers, or of the draft."""
    values = dict(values_of(match))
    parts = [values[name] for name in ("k_bytes", "v_bytes", "kv_bytes") if name in values]
    total = sum(part for part in parts if isinstance(part, int))
    tokens = values.get("kv_tokens")
    label = line.text[max(0, match.start() - 60) : match.start()]
    if _is_draft(notes, line) and notes.get("kv_pool_bytes", line.rank) is not None:
        pool, count_name, add = "draft_kv_pool_bytes", "draft_kv_tokens", False
    elif "SWA KV Cache" in label:
        pool, count_name, add = "kv_pool_bytes", "window_kv_tokens", True
    else:
        pool, count_name, add = "kv_pool_bytes", "kv_tokens", False
    notes.put(line, pool, total, add=add)
    if tokens is not None:
        notes.put(line, count_name, tokens)
    if "kv_cache_dtype" in values:
        notes.put(line, "kv_cache_dtype", values["kv_cache_dtype"])


def _hybrid_pool(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The sum over full and sliding layers, which 0.5.6 prints after two unlabelled pools."""
    if _is_draft(notes, line):
        return
    for name, value in values_of(match):
        notes.put(line, name, value)


def _graphs(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """CUDA graphs of decode, prefill or verify; a rank captures several."""
    captured = line.text[max(0, match.start() - 60) : match.start()].rpartition("Capture ")
    if not captured[1]:
        return
    draft = "draft" in captured[2] or ("target" not in captured[2] and _is_draft(notes, line))
    for _, value in values_of(match):
        notes.put(line, "draft_cuda_graph_bytes" if draft else "cuda_graph_bytes", value, add=True)


def _scheduler(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The scheduler's summary: what it settled on. A chunked_prefill_size of -1 is chunking off."""
    for pattern in _SUMMARY:
        found = pattern.search(line.text, match.start() - 24, match.end() + 400)
        for name, value in values_of(found) if found is not None else ():
            if value != -1:
                notes.put(line, name, value, weak=name == "kv_tokens")


_SUMMARY = tuple(
    re.compile(rf"\b{pattern}", re.ASCII)
    for pattern in (
        "max_total_num_tokens=" + count("kv_tokens"),
        "max_prefill_tokens=" + count("max_num_batched_tokens"),
        "chunked_prefill_size=" + count("max_num_batched_tokens"),
        "max_running_requests=" + count("max_num_seqs"),
        "context_len=" + count("max_model_len"),
        "available_gpu_mem=" + size("free_after_start_bytes"),
    )
)


def _started(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.started_line = notes.started_line or line.number


_DTYPE = r"(?: dtype: torch\.(?P<kv_cache_dtype>\w{1,20}),)?"
WORDINGS = (
    wording("server_args=", r"(?=ServerArgs\(|\{)(?:ServerArgs)?", then=_server_args),
    wording("Load weight begin. avail mem=", size("gpu_free_bytes"), then=_load_begin),
    wording(
        "Load weight end. ",
        r".{0,200}?(?:dtype=torch\.(?P<dtype>\w{1,20}), .{0,120}?)?avail mem="
        + size("free_after_weights_bytes")
        + r"(?:, mem usage="
        + size("used_bytes")
        + ")?",
        then=_load_end,
    ),
    wording(
        "KV Cache is allocated.",
        # 0.4.0 to 0.4.2 name no tokens.
        _DTYPE
        + r"(?: #tokens:"
        + count("kv_tokens")
        + r",)? (?:K size:"
        + size("k_bytes")
        + r", V size:"
        + size("v_bytes")
        + r"|KV size:"
        + size("kv_bytes")
        + ")",
        then=_pool,
    ),
    wording(
        "SWAKVPool mem usage: ",
        size("kv_pool_bytes")
        + r", swa size:"
        + count("window_kv_tokens")
        + r", full size:"
        + count("kv_tokens"),
        then=_hybrid_pool,
    ),
    wording(
        "Mamba Cache is allocated. max_mamba_cache_size: ",
        count("state_slots") + r", conv_state size:" + size("state_bytes"),
    ),
    wording("ssm_state size: ", size("state_bytes"), add=True),
    wording("Using KV cache dtype: torch.", r"(?P<kv_cache_dtype>\w{1,20})"),
    wording("Memory pool end. avail mem=", size("free_after_pool_bytes"), weak=True),
    wording("raph end. ", r".{0,6000}?mem usage=" + size("cuda_graph_bytes"), then=_graphs),
    wording("max_total_num_tokens=", count("kv_tokens"), then=_scheduler),
    wording(
        "Not enough memory. Please try to increase --mem-fraction-static",
        r"(?:.{0,40}?mem_fraction_static=(?P<mem_fraction_static>\d?\.\d{1,12}))?",
        reason="no_memory_for_kv_cache",
    ),
    wording(
        "Loaded weights leave no GPU memory for the KV cache",
        r"(?: under --mem-fraction-static=(?P<mem_fraction_static>\d?\.\d{1,12}))?"
        r"(?:.{0,20}?Raise --mem-fraction-static above (?P<least_mem_fraction_static>\d?\.\d{1,12}))?",
        reason="no_memory_for_kv_cache",
    ),
    wording(
        "Not enough GPU memory for hybrid (mamba/linear-attention) state cache",
        r"(?:.{0,80}?total_rest_memory="
        + size("rest_bytes")
        + r",.{0,4}?mamba_cache_per_req="
        + size("state_each_bytes")
        + ")?",
        reason="no_memory_for_state_cache",
    ),
    wording("ValueError: The memory capacity is unbalanced.", reason="unbalanced_memory"),
    wording(
        "Capture cuda graph failed: ", r"(?=.{0,200}?out of memory)", reason="out_of_memory_in_cuda_graphs"
    ),
    wording("The server is fired up and ready to roll", then=_started),
)


def finish(notes: Notes) -> None:
    """The pool of versions that print only what is left, and the working figures taken out."""
    for rank, readings in list(notes.by_rank.items()):
        before, after = readings.get("free_after_weights_bytes"), readings.get("free_after_pool_bytes")
        if "kv_pool_bytes" not in readings and before is not None and after is not None:
            _pool_from_rest(notes, before, after)
        notes.by_rank[rank].pop("loading_from_bytes", None)


def _pool_from_rest(notes: Notes, before: Reading, after: Reading) -> None:
    if isinstance(before.value, int) and isinstance(after.value, int):
        notes.put(
            again(after),
            "kv_pool_bytes",
            before.value - after.value,
            derived="available memory after the weights less after the pool",
        )
