"""vLLM's start-up log: V0 (0.2 to 0.10) and V1 (0.6.6 on), CUDA, ROCm, CPU and Ascend builds, to 0.33.

The same term has had many wordings; each stands here with the versions that print it.
Sources: vLLM 0.32.0's own source, public issue threads and logs of 0.1 to 0.29, read 2026-11.
"""

import re

from capplan.engines.log_record import Line, Notes
from capplan.engines.log_wording import count, key_values, parse, size, values_of, wording
from capplan.engines.logs_vllm_terms import finish

__all__ = ["ENGINE", "EVIDENCE", "WORDINGS", "finish"]

ENGINE = "vllm"
EVIDENCE = (
    "vLLM",
    "vllm/",
    "/vllm",
    "vllm.",
    "# GPU blocks: ",
    "KV cache size: ",
    "Loading model weights took ",
    "Model loading took ",
    "gpu_model_runner",
    "EngineCore",
    "VllmWorker",
    "max seq len",
    "No available memory for the cache blocks",
    "on startup is less than desired",
    "gpu_memory_utilization",
    "Available KV cache memory",
)
# Printed by the API server or by the engine's constructor: what follows belongs to a new start.
_CONFIG_KEYS = {
    **{"model": "model", "dtype": "dtype", "max_seq_len": "max_model_len", "max_model_len": "max_model_len"},
    **{"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "data_parallel_size": "dp"},
    **{"quantization": "quantization", "enforce_eager": "enforce_eager", "block_size": "block_size"},
    **{"kv_cache_dtype": "kv_cache_dtype", "gpu_memory_utilization": "gpu_memory_utilization"},
    **{"max_num_batched_tokens": "max_num_batched_tokens", "max_num_seqs": "max_num_seqs"},
}


def _config(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The constructor's line: version and the settled configuration."""
    seen = f"config of {line.role or 'the engine'}"
    if seen in notes.memo:
        notes.new_start()
    notes.memo[seen] = "1"
    for name, value in values_of(match):
        notes.put(line, name, value)
    _settings(notes, line, line.text[match.end() :])


def _arguments(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """The command line as the server repeats it: all of it to 0.8, what differs from defaults later."""
    notes.new_start()
    _settings(notes, line, line.text[match.end() :])


def _settings(notes: Notes, line: Line, text: str) -> None:
    for key, printed in key_values(text):
        name = _CONFIG_KEYS.get(key)
        value = None if name is None else parse(name, printed.removeprefix("torch."))
        # max_model_len -1 asks for the largest that fits; the engine prints which it took.
        if name is not None and value is not None and value != -1 and not printed.startswith("<"):
            notes.put(line, name, value)


def _server(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.new_start()
    for name, value in values_of(match):
        notes.put(line, name, value)


def _weights(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """Weights of a rank; a second, different figure before the pool is a V0 draft model's."""
    value = dict(values_of(match, "GiB")).get("weights_bytes")
    if not isinstance(value, int):
        return
    old = notes.get("weights_bytes", line.rank)
    pooled = notes.get("kv_blocks", line.rank) or notes.get("kv_pool_bytes", line.rank)
    if old is None or pooled is not None or not isinstance(old.value, int):
        notes.put(line, "weights_bytes", value)
    elif abs(old.value - value) > 0.001 * old.value:
        notes.put(line, "draft_weights_bytes", value)


def _free_memory(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """Both sentences on the memory free at start: the refusal, and the account after a good start."""
    values = dict(values_of(match, "GiB"))
    rest = line.text[match.end() :][:1500]
    refused = _REFUSED.match(rest)
    if refused is not None:
        values.update(values_of(refused))
        notes.refuse(line, "free_memory_below_budget", values)
    else:
        for part in _ACCOUNT:
            found = part.search(rest)
            if found is not None:
                values.update(values_of(found))
    for name, value in values.items():
        # The loading line has more digits, and is of the model alone.
        notes.put(line, name, value, weak=name == "weights_bytes")


_REFUSED = re.compile(
    r" is less than (?:desired (?:GPU|CPU) memory utilization|the engine's budget[^(]{0,80})"
    rf" \((?P<gpu_memory_utilization>[\d.]{{1,12}}),{size('budget_bytes')}\)",
    re.ASCII,
)
_ACCOUNT = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"utilization is \((?P<gpu_memory_utilization>[\d.]{{1,12}}),{size('budget_bytes')}\)",
        rf"{size('weights_bytes')} for weight,",
        rf"{size('consumed_bytes')} for consumed memory",
        rf"{size('activation_bytes')} for peak activation",
        rf"{size('non_torch_bytes')} for non-torch memory",
        rf"{size('cuda_graph_bytes')} for CUDAGraph memory",
        r"`--kv-cache-memory=(?P<kv_suggested_bytes>\d{1,18})`.{0,40}? to fit into requested",
        rf"kv cache memory in use is{size('kv_pool_bytes')}",
    )
)


def _graph_profiling(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """Whether the graph estimate came off the budget, and the fraction in force (0.17 on)."""
    notes.put(line, "cuda_graph_in_budget", match["state"] == "enabled (")
    for name, value in values_of(match):
        if name == "gpu_memory_utilization":
            notes.put(line, name, value)


def _started(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.started_line = notes.started_line or line.number


def _failed(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.memo.setdefault("failed", str(line.number))


_LONG = r".{0,400}?"
_FRACTION = r"--gpu-memory-utilization(?:=| from )(?P<gpu_memory_utilization>\d\.\d{1,8})"
WORDINGS = (
    wording(
        "Initializing a",
        r"n? ?(?P<generation>V[01])? ?LLM engine \(v(?P<version>[^\s)]{1,60})\) with config: ",
        then=_config,
    ),
    wording("Initializing an LLM engine with config: ", then=_config),
    wording("vLLM API server version ", r"(?P<version>[^\s,]{1,60})", then=_server),
    wording(
        "vLLM server version ", r"(?P<version>[^\s,]{1,60}), serving model (?P<model>\S{1,200})", then=_server
    ),
    wording("▀▄▀ █", r"\s{1,8}version \s{0,4}(?P<version>\S{1,60})", then=_server),
    wording("█     █     █     █", r"\s{1,8}model\s{1,8}(?P<model>\S{1,200})"),
    wording("args: Namespace", r"(?=\()", then=_arguments),
    wording("non-default args: ", r"(?=\{)", then=_arguments),
    wording("Using max model len ", count("max_model_len")),
    wording(
        "Auto-fit max_model_len: reduced from ", rf"\d{{1,12}} to{count('max_model_len')}", engine_wide=True
    ),
    wording(
        "Chunked prefill is enabled with max_num_batched_tokens=",
        count("max_num_batched_tokens"),
        engine_wide=True,
    ),
    wording("Defaulting max_num_batched_tokens to ", count("max_num_batched_tokens"), engine_wide=True),
    wording("Defaulting max_num_seqs to ", count("max_num_seqs"), engine_wide=True),
    wording("Setting attention block size to ", count("block_size") + " tokens", engine_wide=True),
    wording("Encoder cache will be initialized with a budget of ", count("encoder_cache_tokens") + " tokens"),
    wording("Using fp8", r"(?P<kv_cache_dtype>\w{0,12}) data type to store kv cache"),
    # 0.2 to 0.7 print four decimals and "GB"; 0.8 on "GiB"; 0.13 on "GiB memory and".
    wording("Loading model weights took ", size("weights_bytes"), then=_weights),
    wording("Model loading took ", size("weights_bytes"), then=_weights),
    # 0.6.2 to 0.6.4.
    wording(
        "Memory profiling results: total_gpu_memory=",
        size("gpu_total_bytes")
        + rf"{_LONG}peak_torch_memory={size('peak_torch_bytes')}"
        + rf"{_LONG}non_torch_memory={size('non_torch_bytes')}"
        + rf"{_LONG}kv_cache_size={size('kv_pool_bytes')}{_LONG}gpu_memory_utilization="
        + count("gpu_memory_utilization"),
    ),
    # 0.6.5 to 0.10 (V0).
    wording(
        "the current vLLM instance can use total_gpu_memory (",
        size("gpu_total_bytes")
        + r"\) x gpu_memory_utilization \("
        + count("gpu_memory_utilization")
        + r"\) ="
        + size("budget_bytes"),
    ),
    wording("model weights take", size("weights_bytes"), weak=True),
    wording("non_torch_memory takes", size("non_torch_bytes")),
    wording("PyTorch activation peak memory takes", size("activation_bytes")),
    wording("the rest of the memory reserved for KV Cache is", size("kv_pool_bytes")),
    # V1.
    wording("Available KV cache memory: ", size("kv_pool_bytes")),
    wording(" KV cache size: ", count("kv_tokens") + " tokens", least=True),
    wording(
        "Maximum concurrency for ",
        count("max_concurrency_tokens") + " tokens per request:" + count("max_concurrency") + "x",
        least=True,
    ),
    wording("# GPU blocks: ", count("kv_blocks"), least=True),
    wording("# CUDA blocks: ", count("kv_blocks"), least=True),
    wording("# cuda blocks: ", count("kv_blocks"), least=True),
    wording("# rocm blocks: ", count("kv_blocks"), least=True),
    wording("Graph capturing finished in ", rf"\d{{1,6}} secs?, took{size('cuda_graph_bytes')}"),
    wording("Estimated CUDA graph memory: ", size("cuda_graph_estimate_bytes")),
    wording(
        "CUDA graph pool memory: ",
        size("cuda_graph_bytes") + r" \(actual\),\s" + size("cuda_graph_estimate_bytes"),
    ),
    wording(
        "CUDA graph memory profiling is ",
        rf"(?P<state>enabled \(|disabled){_LONG}{_FRACTION}",
        then=_graph_profiling,
    ),
    wording(
        "CUDA graph memory profiling will be ",
        rf"(?P<state>enabled by){_LONG}{_FRACTION}",
        then=_graph_profiling,
    ),
    wording(
        "Free memory on device ",
        r"(?:\w{1,12}(?::\d{1,4})? )?\("
        + count("gpu_free_bytes")
        + "/"
        + size("gpu_total_bytes")
        + r"\) on startup",
        then=_free_memory,
    ),
    wording(
        "Initial free memory: ",
        size("gpu_free_bytes")
        + rf"; Requested memory:{count('gpu_memory_utilization')} \(util\),{size('budget_bytes')}",
    ),
    wording(
        "Initial free memory ",
        size("gpu_free_bytes") + rf", reserved{size('kv_pool_bytes')} memory for KV Cache",
    ),
    wording("Explicitly set (", count("kv_pool_bytes") + r"/[\d.]{1,12}\) GiB for KV cache", unit="GiB"),
    # Debug level.
    wording("torch peak memory increase: ", size("activation_bytes"), weak=True),
    wording("non-torch forward increase memory: ", size("non_torch_bytes"), weak=True),
    wording("total consumed (from mem_get_info): ", size("consumed_bytes"), weak=True),
    # Refusals.
    wording(
        "max seq len (",
        count("max_model_len")
        + r"\) is larger than the maximum number of tokens that can be stored in KV cache \("
        + count("kv_tokens")
        + r"\)",
        reason="context_exceeds_kv_cache",
    ),
    wording(
        "To serve at least one request with the model",
        r".{0,8}? max seq len \("
        + count("max_model_len")
        + r"\),\s{0,2}\(?"
        + size("kv_needed_bytes")
        + r" KV cache is needed, which is larger than the available KV cache memory \("
        + size("kv_pool_bytes")
        + rf"\)(?:{_LONG}estimated maximum model length is{count('largest_max_model_len')})?",
        reason="context_exceeds_kv_cache",
    ),
    wording("No available memory for the cache blocks", reason="no_memory_for_kv_cache"),
    wording("Cannot auto-fit max_model_len: not enough", reason="no_memory_for_kv_cache"),
    wording(
        "max_num_seqs (",
        count("max_num_seqs") + r"\) exceeds available Mamba cache blocks \(" + count("state_slots") + r"\)",
        reason="state_blocks_below_max_num_seqs",
    ),
    wording(
        "out of memory occurred when warming up sampler with ",
        count("max_num_seqs") + " dummy",
        reason="out_of_memory_in_sampler",
    ),
    wording("EngineCore failed to start", then=_failed),
    wording("Engine core initialization failed", then=_failed),
    wording("Engine process failed to start", then=_failed),
    wording("Application startup complete", then=_started),
)
