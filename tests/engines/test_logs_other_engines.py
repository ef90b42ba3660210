"""Start-up logs and refusals of SGLang, TensorRT-LLM, TGI and llama.cpp.

Written here in the engines' words with other numbers; where a field report's figures are restated its
thread is named.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import pytest

from capplan.engines.log_record import FIELDS
from capplan.units import MIB
from tests.engines.log_reading import SGLANG_TP2, gib, holds, read
from tests.engines.test_logs_llamacpp import LLAMACPP_NEW

TRTLLM_CPP = """\
[TensorRT-LLM] TensorRT-LLM version: 0.12.0
[TensorRT-LLM][INFO] Engine version 0.12.0 found in the config file, assuming engine(s) built by new builder API.
[TensorRT-LLM][INFO] TRTGptModel maxNumSequences: 64
[TensorRT-LLM][INFO] TRTGptModel maxSequenceLen: 4160
[TensorRT-LLM][INFO] TRTGptModel maxNumTokens: 8192
[TensorRT-LLM][INFO] Loaded engine size: 6214 MiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 928.77 MiB for execution context memory.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.14 GB GPU memory for runtime buffers.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 4.35 GB GPU memory for decoder.
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 79.10 GiB, available: 63.62 GiB
[TensorRT-LLM][INFO] Number of blocks in KV cache primary pool: 4607
[TensorRT-LLM][INFO] Number of tokens per block: 64.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 62.99 GiB for max tokens in paged KV cache (294848).
"""

TRTLLM_TORCH = """\
[TensorRT-LLM] TensorRT-LLM version: 1.1.0rc3
[12/20/2025-04:20:21] [TRT-LLM] [I] Use 63.32 GB for model weights.
[12/20/2025-04:21:10] [TRT-LLM] [W] Both free_gpu_memory_fraction and max_tokens are set (to 0.8999999761581421 and 8224, respectively). The smaller value will be used.
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[12/20/2025-04:21:10] [TRT-LLM] [I] max_seq_len=8224, max_num_requests=64, max_num_tokens=8192, max_batch_size=64
[12/20/2025-04:21:50] [TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 63.52 GiB
[12/20/2025-04:21:50] [TRT-LLM] [I] Memory used after loading model weights (outside torch) in memory usage profiling: 49.78 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory dynamically allocated during inference (inside torch) in memory usage profiling: 0.85 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: 49.28 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, available KV cache memory when calculating max tokens: 5.95 GiB, fraction is set 0.8999999761581421, kv size is 73728. device total memory 119.70 GiB, , tmp kv_mem 0.56 GiB
[12/20/2025-04:21:51] [TRT-LLM] [W] Adjusted max_seq_len to 86720
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).
"""


def test_tensorrt_llm_runtime() -> None:
    log = read(TRTLLM_CPP)
    assert log.engine == "tensorrt-llm"
    holds(
        log,
        version="0.12.0",
        weights_bytes=6214 * MIB,
        activation_bytes=round(928.77 * MIB),
        runtime_buffer_bytes=gib(1.14),
        decoder_bytes=gib(4.35),
        gpu_total_bytes=gib(79.10),
        free_after_weights_bytes=gib(63.62),
        kv_blocks=4607,
        block_size=64,
        kv_tokens=4607 * 64,
        kv_pool_bytes=gib(62.99),
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        max_model_len=4160,
    )


def test_tensorrt_llm_pytorch_measures_first_with_a_small_pool() -> None:
    log = read(TRTLLM_TORCH)
    holds(
        log,
        version="1.1.0rc3",
        free_gpu_memory_fraction=0.9,
        weights_bytes=gib(63.52),
        outside_torch_after_load_bytes=gib(49.78),
        activation_bytes=gib(0.85),
        non_torch_bytes=gib(49.28),
        gpu_total_bytes=gib(119.70),
        kv_pool_bytes=gib(5.95),
        kv_tokens=86720,
        kv_bytes_per_token=73728.0,
        max_model_len=86720,
        max_num_seqs=64,
    )
    assert any("86720" in warning for warning in log.warnings)


def test_tensorrt_llm_before_09() -> None:
    log = read(  # NVIDIA/TensorRT-LLM#1400
        "[TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache. \n"
        "[TensorRT-LLM][INFO] Using 132608 total tokens in paged KV cache, and 32 blocks per sequence\n"
    )
    holds(log, kv_pool_bytes=69524783104, kv_tokens=132608, kv_bytes_per_token=524288.0)


def test_tensorrt_llm_refusals() -> None:
    log = read(
        "[07/08/2025-19:47:15] [TRT-LLM] [RANK 1] [E] Failed to initialize executor on rank 1: Executor creation "
        "failed due to insufficient GPU memory.\n\nThe following component could not be created: KV cache\n"
        "Total GPU memory (GiB): 140.06\n"
        "Free GPU memory before component creation attempt (GiB): 108.86\n"
    )
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.rank) == ("out_of_memory_creating_executor", "rank 1")
    holds(log, gpu_total_bytes=gib(140.06), oom_free_bytes=gib(108.86))
    log = read(
        "[TensorRT-LLM][INFO] Using 693 tokens in paged KV cache.\n"
        "E1128 16:31 backend_model.cc:634] ERROR: Failed to create instance: maxTokensInPagedKvCache must be "
        "large enough to process at least 1 sequence to completion\n"
    )
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.line) == ("context_exceeds_kv_cache", 2)
    holds(log, kv_tokens=693)


TGI_3 = """\
tgi-1  | 2025-04-16T17:58:46.0Z  INFO text_generation_launcher: Args {
tgi-1  |     model_id: "org/m",
tgi-1  |     num_shard: Some(
tgi-1  |         2,
tgi-1  |     ),
tgi-1  |     quantize: Some(
tgi-1  |         Awq,
tgi-1  |     ),
tgi-1  |     kv_cache_dtype: None,
tgi-1  |     max_total_tokens: Some(
tgi-1  |         8192,
tgi-1  |     ),
tgi-1  |     cuda_memory_fraction: 0.9,
tgi-1  | }
tgi-1  | 2025-04-16T17:58:47.0Z  INFO text_generation_launcher: Default `max_batch_prefill_tokens` to 4096
tgi-1  | 2025-04-16T17:58:47.0Z  INFO text_generation_launcher: Sharding model on 2 processes
tgi-1  | 2025-04-16T17:59:10.0Z  INFO text_generation_launcher: KV-cache blocks: 175856, size: 1
tgi-1  | 2025-04-16T17:59:11.0Z  INFO text_generation_router_v3: backends/v3/src/lib.rs:137: Setting max batch total tokens to 175856
tgi-1  | 2025-04-16T17:59:12.0Z  INFO text_generation_router::server: router/src/server.rs:2402: Connected
"""


def test_tgi_with_arguments_in_a_column() -> None:
    log = read(TGI_3)
    assert log.engine == "tgi"
    holds(
        log,
        model="org/m",
        tp=2,
        quantization="Awq",
        max_model_len=8192,
        cuda_memory_fraction=0.9,
        max_num_batched_tokens=4096,
        kv_blocks=175856,
        block_size=1,
        kv_tokens=175856,
    )
    assert "kv_cache_dtype" not in log.fields
    assert log.started_line == 19


def test_tgi_1_with_arguments_in_a_line_and_a_refusal() -> None:
    log = read(  # huggingface/text-generation-inference#710
        '2023-07-27T10:00:00Z  INFO text_generation_launcher: Args { model_id: "/opt/ml/model", num_shard: Some(8), '
        "quantize: None, max_total_tokens: 4096, max_batch_prefill_tokens: 4096, max_batch_total_tokens: 16000 }\n"
        'Error: Warmup(Generation("Not enough memory to handle 16000 total tokens with 4096 prefill tokens. You '
        'need to decrease `--max-batch-total-tokens` or `--max-batch-prefill-tokens`"))\n'
    )
    holds(log, model="/opt/ml/model", tp=8, max_model_len=4096, max_num_batched_tokens=4096)
    assert log.refusal is not None
    assert log.refusal.reason == "prefill_exceeds_memory"
    assert log.refusal.numbers == {"total_tokens": 16000, "prefill_tokens": 4096}


@pytest.mark.parametrize(
    ("text", "reason", "numbers"),
    [
        (
            "Not enough memory to handle 256 prefill tokens. You need to",
            "prefill_exceeds_memory",
            {"prefill_tokens": 256},
        ),
        (
            "Not enough memory to handle `max_total_tokens=131072`",
            "context_exceeds_kv_cache",
            {"max_model_len": 131072},
        ),
    ],
)
def test_tgi_refusals(text: str, reason: str, numbers: dict[str, object]) -> None:
    log = read(f"ERROR warmup: text_generation_client: router/client/src/lib.rs:33: Server error: {text}\n")
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.numbers) == (reason, numbers)


def test_every_field_is_declared_and_has_a_line() -> None:
    for text in (SGLANG_TP2, TRTLLM_CPP, TRTLLM_TORCH, TGI_3, LLAMACPP_NEW):
        log = read(text)
        lines = text.splitlines()
        for name, reading in log.fields.items():
            assert name in FIELDS
            assert reading.text[:40] in lines[reading.line - 1]
            kinds = {"bytes": int, "int": int, "float": float, "str": str, "bool": bool}
            assert isinstance(reading.value, kinds[reading.unit])
