"""TensorRT-LLM's start-up log, 0.5 to 1.2: the C++ runtime (also under Triton) and the PyTorch backend.

The runtime's "GB" is GiB. The PyTorch backend first allocates a small pool to measure with and prints it
in the same words as the final one: the last counts. Its fraction is of the memory FREE after loading.
Sources: TensorRT-LLM's public source and issue threads, read 2026-11.
"""

import re

from capplan.engines.log_record import Line, Notes, again
from capplan.engines.log_wording import count, size, values_of, wording
from capplan.engines.logs_torch import fail

ENGINE = "tensorrt-llm"
EVIDENCE = (
    "TensorRT-LLM",
    "[TRT-LLM]",
    "tensorrt_llm",
    "trtllm-",
    "TRTGptModel",
    "in paged KV cache",
    "[MemUsageChange]",
    "KV cache primary pool",
    "for k/v cache",
    "maxTokensInPagedKvCache",
    "Executor creation failed",
    "in memory usage profiling",
)


def _version(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.new_start()
    notes.put(line, "version", match["version"])


def _fraction(notes: Notes, line: Line, match: re.Match[str]) -> None:
    """A fraction kept as a 32-bit float: 0.8999999761581421 was given as 0.9."""
    notes.put(line, "free_gpu_memory_fraction", round(float(match["fraction"]), 6))


def _peak(notes: Notes, line: Line, match: re.Match[str]) -> None:
    for name, value in values_of(match):
        if name == "free_gpu_memory_fraction" and isinstance(value, float):
            value = round(value, 6)
        notes.put(line, name, value)


def _executor(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.oom = True
    notes.refuse(line, "out_of_memory_creating_executor")


def _native_oom(notes: Notes, line: Line, match: re.Match[str]) -> None:
    fail(notes, line, {})


def _reduced(notes: Notes, line: Line, match: re.Match[str]) -> None:
    for name, value in values_of(match):
        notes.put(line, name, value)
        notes.warn(f"line {line.number}: the sequence length was cut to {value}, what the KV pool holds")


def _started(notes: Notes, line: Line, match: re.Match[str]) -> None:
    notes.started_line = notes.started_line or line.number


_FRACTION = r"(?P<fraction>[01]?\.\d{1,18}|1\.0|1)"
_PROFILING = " in memory usage profiling: "
WORDINGS = (
    wording("TensorRT-LLM version: ", r"(?P<version>[^\s,]{1,60})", then=_version),
    wording("Engine version ", r"(?P<version>\d[^\s,]{1,60}) found in the config file", weak=True),
    wording("Loaded engine size: ", size("weights_bytes"), weak=True),
    wording("Use ", size("weights_bytes") + r" for model weights", weak=True),
    wording(" uses ", size("weights_bytes") + r" for model weights", weak=True),
    wording("Memory used after loading model weights (inside torch)", _PROFILING + size("weights_bytes")),
    wording(
        "Memory used after loading model weights (outside torch)",
        _PROFILING + size("outside_torch_after_load_bytes"),
    ),
    wording(
        "Memory dynamically allocated during inference (inside torch)",
        _PROFILING + size("activation_bytes"),
    ),
    wording("Memory used outside torch (e.g., NCCL and CUDA graphs)", _PROFILING + size("non_torch_bytes")),
    wording(
        "available KV cache memory when calculating max tokens: ",
        size("kv_pool_bytes")
        + r", fraction is set (?P<free_gpu_memory_fraction>[01]?\.?\d{1,18}), kv size(?: per token)? is"
        + count("kv_bytes_per_token")
        + r"\.?,? device total memory"
        + size("gpu_total_bytes"),
        then=_peak,
    ),
    wording(
        "Memory usage when calculating max tokens in paged kv cache: total: ",
        size("gpu_total_bytes") + r", available:" + size("free_after_weights_bytes"),
    ),
    wording("Estimated max memory in KV cache : ", size("kv_pool_bytes")),
    wording(
        "[MemUsageChange] Allocated ",
        size("kv_pool_bytes") + r" for max tokens in paged KV cache \(" + count("kv_tokens") + r"\)",
    ),
    wording("[MemUsageChange] Allocated ", size("activation_bytes") + " for execution context memory"),
    wording(
        "[MemUsageChange] Allocated ",
        size("runtime_buffer_bytes") + " GPU memory for runtime buffers",
    ),
    wording("[MemUsageChange] Allocated ", size("decoder_bytes") + " GPU memory for decoder"),
    # Before 0.9.
    wording("Allocate ", count("kv_pool_bytes") + " bytes for k/v cache"),
    wording("Using ", count("kv_tokens") + " (?:total )?tokens in paged KV cache"),
    wording("Number of blocks in KV cache primary pool: ", count("kv_blocks")),
    wording("Number of tokens per block: ", count("block_size")),
    wording("tokens per block=", count("block_size") + ", primary blocks=" + count("kv_blocks")),
    wording("free_gpu_memory_fraction=", _FRACTION, then=_fraction),
    wording("Both free_gpu_memory_fraction and max_tokens are set (to ", _FRACTION, then=_fraction),
    wording("tensor_parallel_size=", count("tp"), engine_wide=True),
    wording("pipeline_parallel_size=", count("pp"), engine_wide=True),
    wording("kv_cache_dtype='", r"(?P<kv_cache_dtype>\w{1,20})", engine_wide=True),
    wording("TRTGptModel maxNumSequences: ", count("max_num_seqs")),
    wording("TRTGptModel maxNumTokens: ", count("max_num_batched_tokens")),
    wording("TRTGptModel maxSequenceLen: ", count("max_model_len")),
    wording("TRTGptModel mMaxAttentionWindowSize: ", count("max_model_len"), weak=True),
    wording(
        "max_seq_len=",
        count("max_model_len")
        + ", max_num_requests="
        + count("max_num_seqs")
        + ", max_num_tokens="
        + count("max_num_batched_tokens"),
    ),
    wording("Adjusted max_seq_len to ", count("max_model_len"), then=_reduced),
    wording(
        "too large for at least one sequence to fit in kvCache. they are reduced to ",
        count("max_model_len"),
        then=_reduced,
    ),
    wording(
        "maxTokensInPagedKvCache must be large enough to process at least 1 sequence",
        reason="context_exceeds_kv_cache",
    ),
    wording("Executor creation failed due to insufficient GPU memory", then=_executor),
    wording("Executor creation failed with an error which might indicate insufficient", then=_executor),
    # These two follow that sentence, each on a line of its own.
    wording("Total GPU memory (GiB): ", count("gpu_total_bytes"), unit="GiB"),
    wording(
        "Free GPU memory before component creation attempt (GiB): ",
        count("oom_free_bytes"),
        unit="GiB",
    ),
    wording("cudaMallocAsync", r".{0,200}?: out of memory", then=_native_oom),
    wording("Application startup complete", then=_started),
    wording("successfully loaded 'tensorrt_llm'", then=_started),
    wording("Engine loaded and ready to serve", then=_started),
)


def finish(notes: Notes) -> None:
    """Bytes a token, where the pool and its tokens are both printed."""
    for readings in list(notes.by_rank.values()):
        pool, tokens = readings.get("kv_pool_bytes"), readings.get("kv_tokens")
        if pool is None or tokens is None or "kv_bytes_per_token" in readings:
            continue
        if isinstance(pool.value, int) and isinstance(tokens.value, int) and tokens.value:
            notes.put(
                again(pool),
                "kv_bytes_per_token",
                pool.value / tokens.value,
                derived="kv_pool_bytes / kv_tokens",
            )
