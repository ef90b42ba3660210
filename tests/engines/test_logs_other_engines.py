"""Start-up logs and refusals of SGLang, TensorRT-LLM, TGI and llama.cpp.

Written here in the engines' words with other numbers; where a field report's figures are restated its
thread is named.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import io
from typing import Any

import pytest

from capplan.engines.log_reader import read_log
from capplan.engines.log_record import FIELDS, EngineLog
from capplan.units import GIB, MIB


def read(text: str) -> EngineLog:
    return read_log(io.StringIO(text))


def gib(value: float) -> Any:
    """A size printed with two decimals."""
    return pytest.approx(value * GIB, abs=1)


def holds(log: EngineLog, **expected: Any) -> None:
    got = {name: reading.value for name, reading in log.fields.items()}
    assert {name: got.get(name) for name in expected} == expected


SGLANG_TP2 = """\
[2025-10-16 09:05:00] server_args=ServerArgs(model_path='org/moe', tokenizer_path='org/moe', dtype='auto', \
quantization=None, kv_cache_dtype='auto', context_length=None, mem_fraction_static=0.911, \
max_running_requests=256, chunked_prefill_size=16384, page_size=1, tp_size=2, pp_size=1, dp_size=1, \
ep_size=1, disable_cuda_graph=False)
[2025-10-16 09:05:50 TP0] Init torch distributed ends. mem usage=1.20 GB
[2025-10-16 09:05:51 TP0] Load weight begin. avail mem=139.50 GB
[2025-10-16 09:05:51 TP1] Load weight begin. avail mem=139.40 GB
[2025-10-16 09:06:20 TP0] Load weight end. type=M, dtype=torch.bfloat16, avail mem=110.90 GB, mem usage=28.60 GB.
[2025-10-16 09:06:20 TP1] Load weight end. type=M, dtype=torch.bfloat16, avail mem=110.70 GB, mem usage=28.70 GB.
[2025-10-16 09:06:20 TP0] Using KV cache dtype: torch.float8_e5m2
[2025-10-16 09:06:22 TP1] KV Cache is allocated. #tokens: 1669816, K size: 38.22 GB, V size: 38.22 GB
[2025-10-16 09:06:22 TP0] KV Cache is allocated. #tokens: 1669816, K size: 38.22 GB, V size: 38.22 GB
[2025-10-16 09:06:22 TP0] Memory pool end. avail mem=34.01 GB
[2025-10-16 09:06:30 TP0] Capture cuda graph end. Time elapsed: 5.37 s. mem usage=1.44 GB. avail mem=32.57 GB.
[2025-10-16 09:06:33 TP0] Capture piecewise CUDA graph end. Time elapsed: 2.37 s. mem usage=0.25 GB. avail mem=32 GB.
[2025-10-16 09:06:34 TP0] max_total_num_tokens=1669816, chunked_prefill_size=16384, \
max_prefill_tokens=16384, max_running_requests=128, context_len=262144, available_gpu_mem=32.00 GB
[2025-10-16 09:06:40] The server is fired up and ready to roll!
"""


def test_sglang_with_ranks() -> None:
    log = read(SGLANG_TP2)
    assert log.engine == "sglang"
    holds(
        log,
        model="org/moe",
        mem_fraction_static=0.911,
        tp=2,
        block_size=1,
        enforce_eager=False,
        max_num_batched_tokens=16384,
        max_num_seqs=128,  # what the scheduler settled on, not the 256 asked for
        max_model_len=262144,
        kv_cache_dtype="float8_e5m2",
        gpu_free_bytes=gib(139.40),
        kv_tokens=1669816,
        kv_pool_bytes=gib(76.44),
        cuda_graph_bytes=gib(1.44 + 0.25),
        free_after_start_bytes=gib(32.0),
    )
    assert log.ranks["TP1"]["weights_bytes"].value == gib(28.7)
    assert log.started_line == 14
    assert log.fields["weights_bytes"].rank == "TP1"  # of equal pools the fuller rank


def test_sglang_03_prints_only_what_is_left() -> None:
    log = read(
        "[14:50:21 TP0] sglang\n"
        "[2024-11-02 14:50:21 TP0] Load weight begin. avail mem=78.58 GB\n"
        "[2024-11-02 14:50:31 TP0] Load weight end. type=L, dtype=torch.bfloat16, avail mem=63.58 GB\n"
        "[2024-11-02 14:50:31 TP0] Memory pool end. avail mem=8.33 GB\n"
        "[2024-11-02 14:50:36 TP0] max_total_num_tokens=452516, max_prefill_tokens=16384, "
        "max_running_requests=2049, context_len=131072\n"
    )
    holds(
        log,
        weights_bytes=gib(15.0),
        kv_pool_bytes=gib(55.25),
        kv_tokens=452516,
        max_num_batched_tokens=16384,
    )
    assert log.fields["weights_bytes"].derived == "available memory before loading less after"
    assert log.fields["kv_pool_bytes"].derived is not None
    assert "loading_from_bytes" not in log.fields


def test_sglang_draft_loaded_before_the_pools_and_no_pool_line() -> None:
    rank = "[2026-09-11 23:34:13 TP0 EP0]"
    log = read(
        f"{rank} Load weight begin. avail mem=111.00 GB\n"
        f"{rank} Load weight end. elapsed=5.0 s, type=T, quant=fp8, avail mem=17.00 GB, mem usage=94.00 GB.\n"
        f"{rank} Load weight begin. avail mem=17.50 GB\n"
        f"{rank} Load weight end. elapsed=5.0 s, type=D, quant=fp8, avail mem=14.50 GB, mem usage=3.00 GB.\n"
        f"{rank} Memory pool end. avail mem=9.50 GB\n"
        f"{rank} Memory pool end. avail mem=9.50 GB\n"
        f"{rank} Capture draft verify CUDA graph end. elapsed=4.26 s, mem usage=-0.01 GB, avail mem=7.68 GB.\n"
    )
    holds(
        log,
        weights_bytes=gib(94),
        draft_weights_bytes=gib(3),
        kv_pool_bytes=gib(5),
        draft_cuda_graph_bytes=gib(-0.01),
        gpu_free_bytes=gib(111),
    )


def test_sglang_pool_without_tokens() -> None:
    log = read(
        "2025-02-04 21:29:17 [2025-02-04 05:29:17 TP0] KV Cache is allocated. K size: 2.82 GB, V size: 2.82 GB.\n"
        "[2025-02-04 05:29:20 TP0] max_total_num_tokens=105531, chunked_prefill_size=2048, context_len=131072\n"
    )
    holds(log, kv_pool_bytes=gib(5.64), kv_tokens=105531, max_num_batched_tokens=2048)


def test_sglang_draft_window_and_state_pools() -> None:
    log = read(
        "[2026-06-08 07:20:50] server_args={'model_path': 'org/t', 'mem_fraction_static': 0.8, 'tp_size': 1, "
        "'chunked_prefill_size': -1, 'nested': {'tp_size': 9}}\n"
        "[2026-06-08 07:20:51] Load weight begin. avail mem=79.00 GB\n"
        "[2026-06-08 07:20:52] Load weight end. elapsed=1.00 s, type=T, quant=fp8, avail mem=59.00 GB, mem usage=20.00 GB.\n"
        "[2026-06-08 07:20:53] Mamba Cache is allocated. max_mamba_cache_size: 80, conv_state size: 0.25GB, "
        "ssm_state size: 3.00GB \n"
        "[2026-06-08 07:20:53] Full KV Cache is allocated. dtype: torch.bfloat16, #tokens: 375360, K size: 8.00 GB, V size: 5.00 GB\n"
        "[2026-06-08 07:20:53] SWA KV Cache is allocated. dtype: torch.bfloat16, #tokens: 300288, K size: 1.00 GB, V size: 0.50 GB\n"
        "[2026-06-08 07:20:53] Memory pool end. avail mem=30.00 GB\n"
        "[2026-06-08 07:20:54] Load weight begin. avail mem=30.00 GB\n"
        "[2026-06-08 07:20:55] Load weight end. elapsed=1.00 s, type=D, avail mem=29.00 GB, mem usage=1.00 GB.\n"
        "[2026-06-08 07:20:55] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 375360, K size: 0.33 GB, V size: 0.33 GB\n"
        "[2026-06-08 07:20:59] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=1.0 s, mem usage=0.50 GB, avail mem=28.0 GB.\n"
        "[2026-06-08 07:20:59] Capture draft decode CUDA graph end. bs=[1, 2, 4], elapsed=1.0 s, mem usage=0.10 GB, avail mem=27.9 GB.\n"
    )
    holds(
        log,
        tp=1,
        weights_bytes=gib(20),
        draft_weights_bytes=gib(1),
        kv_tokens=375360,
        window_kv_tokens=300288,
        kv_pool_bytes=gib(14.5),
        draft_kv_pool_bytes=gib(0.66),
        draft_kv_tokens=375360,
        state_slots=80,
        state_bytes=gib(3.25),
        cuda_graph_bytes=gib(0.5),
        draft_cuda_graph_bytes=gib(0.1),
        kv_cache_dtype="bfloat16",
    )
    assert "max_num_batched_tokens" not in log.fields  # -1 is off


@pytest.mark.parametrize(
    ("line", "reason", "numbers"),
    [
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "no_memory_for_kv_cache",
            {},
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
            "self.server_args.mem_fraction_static=0.7",
            "no_memory_for_kv_cache",
            {"mem_fraction_static": 0.7},
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7. Raise "
            "--mem-fraction-static above 0.812 (minimum viable",
            "no_memory_for_kv_cache",
            {"mem_fraction_static": 0.7, "least_mem_fraction_static": 0.812},
        ),
        (
            "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed "
            "max_mamba_cache_size=0 (total_rest_memory=-3.05 GB, mamba_cache_per_req=147.00 MB). Try: (1) reduce",
            "no_memory_for_state_cache",
            {"rest_bytes": gib(-3.05), "state_each_bytes": 147 * MIB},
        ),
        (
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.",
            "unbalanced_memory",
            {},
        ),
        (
            "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
            "out_of_memory_in_cuda_graphs",
            {},
        ),
    ],
)
def test_sglang_refusals(line: str, reason: str, numbers: dict[str, object]) -> None:
    log = read(f"[2025-01-01 00:00:00 TP0] Load weight begin. avail mem=23.0 GB\n{line}\n")
    assert log.engine == "sglang"
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.numbers) == (reason, numbers)


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


LLAMACPP_NEW = """\
ggml_cuda_init: found 2 CUDA devices (Total VRAM: 48160 MiB):
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes, VRAM: 24080 MiB
  Device 1: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes, VRAM: 24080 MiB (23818 MiB free)
build: 6123 (79c1160b0) with cc (Ubuntu 13.3.0) 13.3.0 for x86_64-linux-gnu
main: loading model
srv    load_model: loading model '/m/x-Q4_K_M.gguf'
llama_params_fit_impl: projected to use 19187 MiB of device memory vs. 47000 MiB of free device memory
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 3090) (0000:01:00.0) - 23691 MiB free
llama_model_load_from_file_impl: using device CUDA1 (NVIDIA GeForce RTX 3090) (0000:02:00.0) - 23500 MiB free
llama_model_loader: loaded meta data with 31 key-value pairs and 443 tensors from /m/x-Q4_K_M.gguf (version GGUF V3 (latest))
print_info: file format = GGUF V3 (latest)
print_info: file type   = Q4_K - Medium
print_info: file size   = 18.40 GiB (4.89 BPW)
print_info: general.name     = X 32B
load_tensors: offloaded 65/65 layers to GPU
load_tensors:        CUDA0 model buffer size =  9000.25 MiB
load_tensors:        CUDA1 model buffer size =  9200.50 MiB
load_tensors:   CPU_Mapped model buffer size =   417.66 MiB
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 16384
llama_context: n_ctx_per_seq = 4096
llama_context: n_batch       = 2048
llama_context: n_ubatch      = 512
llama_context: flash_attn    = auto
llama_context: kv_unified    = false
llama_context:  CUDA_Host  output buffer size =     2.32 MiB
llama_kv_cache_unified_iswa: creating non-SWA KV cache, size = 16384 cells
llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =   960.00 MiB
llama_kv_cache: size = 1984.00 MiB ( 16384 cells,  62 layers,  4/4 seqs), K (q8_0):  992.00 MiB, V (q8_0):  992.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB
llama_kv_cache: size =   64.00 MiB (  1536 cells,   2 layers,  4/4 seqs), K (q8_0):   32.00 MiB, V (q8_0):   32.00 MiB
llama_context:      CUDA0 compute buffer size =   307.00 MiB
llama_context:      CUDA1 compute buffer size =   311.50 MiB
llama_context:  CUDA_Host compute buffer size =    42.01 MiB
main: server is listening on http://127.0.0.1:8080 - starting the main loop
"""


def test_llamacpp_on_two_gpus() -> None:
    log = read(LLAMACPP_NEW)
    assert log.engine == "llama.cpp"
    holds(
        log,
        version="6123 (79c1160b0)",
        model="/m/x-Q4_K_M.gguf",
        model_name="X 32B",
        quantization="Q4_K - Medium",
        gpu_name="NVIDIA GeForce RTX 3090",
        gpu_total_bytes=2 * 24080 * MIB,
        gpu_free_bytes=(23691 + 23500) * MIB,
        projected_bytes=19187 * MIB,
        checkpoint_bytes=gib(18.40),
        gpu_layers=65,
        layers=65,
        weights_bytes=round(18200.75 * MIB),
        host_weights_bytes=round(417.66 * MIB),
        context_tokens=16384,
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        micro_batch_tokens=512,
        kv_unified=False,
        flash_attention="auto",
        kv_pool_bytes=2048 * MIB,
        kv_total_bytes=2048 * MIB,
        kv_tokens=16384,
        kv_cache_dtype="q8_0",
        compute_bytes=round(618.5 * MIB),
        host_compute_bytes=round(42.01 * MIB),
    )
    assert log.ranks["CUDA0"]["kv_pool_bytes"].value == 1088 * MIB
    assert log.started_line == len(LLAMACPP_NEW.splitlines())
    assert log.fields["weights_bytes"].derived == "sum over devices (lines 16, 17)"


def test_ik_llamacpp_in_quoted_mail() -> None:
    log = read(
        "> llm_load_tensors: offloaded 61/61 layers to GPU\n"
        "> llm_load_tensors:        CPU buffer size = 44823.65 MiB\n"
        "> llm_load_tensors:        CPU buffer size = 47456.06 MiB\n"
        "> llm_load_tensors:      CUDA0 buffer size =  9996.68 MiB\n"
        "> llama_new_context_with_model: n_ctx      = 32768\n"
        "> llama_kv_cache_init:      CUDA0 KV buffer size =  1166.65 MiB\n"
        "> llama_new_context_with_model: KV self size  = 1166.62 MiB, c^KV (q8_0): 1166.62 MiB, kv^T: not used\n"
        "> llama_new_context_with_model:      CUDA0 compute buffer size =  3425.00 MiB\n"
        "> llama_new_context_with_model:  CUDA_Host compute buffer size =   176.01 MiB\n"
    )
    holds(
        log,
        weights_bytes=round(9996.68 * MIB),
        host_weights_bytes=round(92279.71 * MIB),
        kv_pool_bytes=round(1166.65 * MIB),
        kv_total_bytes=round(1166.62 * MIB),
        kv_cache_dtype="q8_0",
        compute_bytes=3425 * MIB,
        kv_tokens=32768,
    )


def test_llamacpp_of_2023() -> None:
    log = read(
        "main: build = 1680 (afefa31)\n"
        "llm_load_tensors: VRAM used           = 6936.01 MiB\n"
        "llama_new_context_with_model: n_ctx      = 512\n"
        "llama_kv_cache_init: VRAM kv self = 400.00 MB\n"
        "llama_new_context_with_model: KV self size  =  400.00 MiB, K (f16):  200.00 MiB, V (f16):  200.00 MiB\n"
        "llama_new_context_with_model: VRAM scratch buffer: 75.00 MiB\n"
    )
    holds(
        log,
        version="1680 (afefa31)",
        weights_bytes=round(6936.01 * MIB),
        kv_pool_bytes=400 * MIB,
        kv_cache_dtype="f16",
        compute_bytes=75 * MIB,
    )


def test_llamacpp_draft_and_exit_table() -> None:
    log = read(
        "llama_model_loader: loaded meta data with 1 key-value pairs and 2 tensors from t.gguf (version GGUF V3)\n"
        "load_tensors: CUDA0 model buffer size = 100.00 MiB\n"
        "llama_context: CUDA0 compute buffer size = 10.00 MiB\n"
        "srv load_model: loading draft model 'd.gguf'\n"
        "llama_model_loader: loaded meta data with 1 key-value pairs and 2 tensors from d.gguf (version GGUF V3)\n"
        "print_info: file format = GGUF V3\n"
        "load_tensors: CUDA0 model buffer size = 7.00 MiB\n"
        "llama_kv_cache: CUDA0 KV buffer size = 3.00 MiB\n"
        "llama_memory_breakdown_print: |   - CUDA0 (RTX 4090)   | 24077 =  945 + (19187 = 17904 +     384 +     898) +        3945 |\n"
    )
    holds(
        log,
        model="t.gguf",
        weights_bytes=100 * MIB,
        draft_weights_bytes=7 * MIB,
        draft_kv_pool_bytes=3 * MIB,
        gpu_total_bytes=24077 * MIB,
        kv_pool_bytes=384 * MIB,  # not printed before the table at exit
    )


def test_llamacpp_out_of_memory() -> None:
    log = read(  # ikawrakow/ik_llama.cpp#749
        "llm_load_tensors:      CUDA0 buffer size = 20000.00 MiB\n"
        "llama_new_context_with_model: pipeline parallelism enabled (n_copies=4)\n"
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 279356.51 MiB on device 0: cudaMalloc failed: "
        "out of memory\n"
        "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 292926534144\n"
        "llama_new_context_with_model: failed to allocate compute buffers\n"
    )
    assert log.oom
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.line) == ("compute_buffer_not_allocated", 5)
    holds(log, oom_tried_bytes=round(279356.51 * MIB), oom_device=0)
    assert log.number("oom_tried_bytes") == pytest.approx(272.8 * GIB, rel=0.001)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("llama_kv_cache_init: failed to allocate buffer for kv cache", "kv_cache_not_allocated"),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", "weights_not_allocated"),
        ("graph_reserve: failed to allocate compute buffers", "compute_buffer_not_allocated"),
    ],
)
def test_llamacpp_refusals(line: str, reason: str) -> None:
    log = read(
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4480.00 MiB on device 3: cudaMalloc failed: out "
        f"of memory\n{line}\n"
    )
    assert log.refusal is not None
    assert log.refusal.reason == reason


def test_llamacpp_that_retries_has_not_refused() -> None:
    log = read(
        "1.06 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 51748.72 MiB on device 1: cudaMalloc failed: out of memory\n"
        "1.06 E graph_reserve: failed to allocate compute buffers\n"
        "1.06 W sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism\n"
        "1.07 I srv load_model: initializing, n_slots = 1, n_ctx_slot = 50176, kv_unified = 'false'\n"
    )
    assert log.oom
    assert log.refusal is None
    assert log.warnings == ("line 3: pipeline parallelism was given up for want of memory",)
    holds(log, max_num_seqs=1, max_model_len=50176, kv_unified=False)


def test_every_field_is_declared_and_has_a_line() -> None:
    for text in (SGLANG_TP2, TRTLLM_CPP, TRTLLM_TORCH, TGI_3, LLAMACPP_NEW):
        log = read(text)
        lines = text.splitlines()
        for name, reading in log.fields.items():
            assert name in FIELDS
            assert reading.text[:40] in lines[reading.line - 1]
            kinds = {"bytes": int, "int": int, "float": float, "str": str, "bool": bool}
            assert isinstance(reading.value, kinds[reading.unit])
