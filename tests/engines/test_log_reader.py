"""Start-up logs of every engine and version: the figures, the line of each, refusals and bad input.

The logs are written here in the engines' words with other numbers; where a field report's figures are
restated its thread is named.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import codecs
import gzip
import io
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from capplan.engines.log_reader import _LITERALS, HINTS, READERS, read_log
from capplan.engines.log_record import FIELDS, EngineLog
from capplan.errors import InputError
from capplan.units import GIB, MIB

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def read(text: str) -> EngineLog:
    return read_log(io.StringIO(text))


def gib(value: float) -> Any:
    """A size printed with two decimals."""
    return pytest.approx(value * GIB, abs=1)


def values(log: EngineLog) -> dict[str, Any]:
    return {name: reading.value for name, reading in log.fields.items()}


def holds(log: EngineLog, **expected: Any) -> None:
    got = values(log)
    assert {name: got.get(name) for name in expected} == expected


VLLM_05 = """\
INFO 06-20 08:11:02 llm_engine.py:161] Initializing an LLM engine (v0.5.1) with config: \
model='meta-llama/Meta-Llama-3-8B', speculative_config=None, tokenizer='x', rope_scaling=None, \
trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=8192, download_dir=None, \
tensor_parallel_size=1, disable_custom_all_reduce=False, quantization=None, enforce_eager=True, \
kv_cache_dtype=fp8, decoding_config=DecodingConfig(guided_decoding_backend='outlines', model='no'), seed=0)
INFO 06-20 08:11:20 model_runner.py:160] Loading model weights took 14.9595 GB
INFO 06-20 08:11:24 gpu_executor.py:83] # GPU blocks: 5970, # CPU blocks: 682
INFO 06-20 08:11:26 model_runner.py:1122] Graph capturing finished in 12 secs.
"""

VLLM_064 = """\
INFO 11-21 08:19:05 llm_engine.py:249] Initializing an LLM engine (v0.6.4.post1) with config: model='m'
INFO 11-21 08:19:05 model_runner.py:1077] Loading model weights took 14.9888 GB
INFO 11-21 08:19:07 worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB \
initial_memory_usage=0.31GiB peak_torch_memory=17.06GiB memory_usage_post_profile=15.4Gib \
non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90
INFO 11-21 08:19:07 gpu_executor.py:113] # GPU blocks: 1952, # CPU blocks: 2048
INFO 11-21 08:19:07 gpu_executor.py:117] Maximum concurrency for 20000 tokens per request: 1.56x
INFO 11-21 08:19:30 model_runner.py:1518] Graph capturing finished in 14 secs, took 0.30 GiB
"""

VLLM_07_TP2 = """\
INFO 03-01 10:30:42 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.3) with config: model='q', \
max_seq_len=50000, tensor_parallel_size=2, quantization=awq
INFO 03-01 10:30:55 model_runner.py:1115] Loading model weights took 10.3012 GB
(VllmWorkerProcess pid=1234) INFO 03-01 10:30:55 model_runner.py:1115] Loading model weights took 10.8012 GB
(VllmWorkerProcess pid=1234) INFO 03-01 10:30:57 worker.py:267] model weights take 10.80GiB; \
non_torch_memory takes 0.33GiB; PyTorch activation peak memory takes 1.01GiB; the rest of the memory \
reserved for KV Cache is 14.52GiB.
INFO 03-01 10:30:57 worker.py:267] Memory profiling takes 1.48 seconds
INFO 03-01 10:30:57 worker.py:267] the current vLLM instance can use total_gpu_memory (31.37GiB) x \
gpu_memory_utilization (0.85) = 26.66GiB
INFO 03-01 10:30:57 worker.py:267] model weights take 10.30GiB; non_torch_memory takes 0.33GiB; PyTorch \
activation peak memory takes 1.77GiB; the rest of the memory reserved for KV Cache is 14.26GiB.
INFO 03-01 10:30:57 executor_base.py:110] # CUDA blocks: 7299, # CPU blocks: 2048
INFO 03-01 10:30:57 executor_base.py:115] Maximum concurrency for 50000 tokens per request: 2.34x
"""

VLLM_11 = """\
(APIServer pid=1) INFO 10-12 08:00:01 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=1) INFO 10-12 08:00:01 [utils.py:233] non-default args: {'model_tag': 'org/m', 'port': 8077, \
'model': 'org/m', 'max_model_len': 16384, 'gpu_memory_utilization': 0.95, 'max_num_seqs': 64, \
'limit_mm_per_prompt': {'image': 1}}
(APIServer pid=1) INFO 10-12 08:00:09 [scheduler.py:205] Chunked prefill is enabled with \
max_num_batched_tokens=4096.
(EngineCore_DP0 pid=99) INFO 10-12 08:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with \
config: model='org/m', speculative_config=None, dtype=torch.bfloat16, max_seq_len=16384, \
tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, quantization=fp8, \
enforce_eager=False, kv_cache_dtype=auto, compilation_config={"level":3,"max_num_seqs":7}
(Worker_TP0 pid=120) INFO 10-12 08:01:02 [gpu_model_runner.py:2653] Model loading took 20.5000 GiB and 31.7 seconds
(Worker_TP1 pid=121) INFO 10-12 08:01:03 [gpu_model_runner.py:2653] Model loading took 20.7500 GiB and 32.7 seconds
(Worker_TP1 pid=121) INFO 10-12 08:01:33 [gpu_worker.py:298] Available KV cache memory: 40.25 GiB
(Worker_TP0 pid=120) INFO 10-12 08:01:33 [gpu_worker.py:298] Available KV cache memory: 41.75 GiB
(EngineCore_DP0 pid=99) INFO 10-12 08:01:34 [kv_cache_utils.py:1087] GPU KV cache size: 342,016 tokens
(EngineCore_DP0 pid=99) INFO 10-12 08:01:34 [kv_cache_utils.py:1091] Maximum concurrency for 16,384 tokens \
per request: 20.88x
(EngineCore_DP0 pid=99) INFO 10-12 08:01:34 [kv_cache_utils.py:1087] GPU KV cache size: 329,728 tokens
(EngineCore_DP0 pid=99) INFO 10-12 08:01:34 [kv_cache_utils.py:1091] Maximum concurrency for 16,384 tokens \
per request: 20.12x
(Worker_TP1 pid=121) INFO 10-12 08:01:50 [gpu_model_runner.py:3480] Graph capturing finished in 15 secs, \
took 0.66 GiB
(Worker_TP1 pid=121) INFO 10-12 08:01:50 [gpu_worker.py:391] Free memory on device (78.60/79.20 GiB) on \
startup. Desired GPU memory utilization is (0.95, 75.24 GiB). Actual usage is 20.75 GiB for weight, 13.5 \
GiB for peak activation, 0.74 GiB for non-torch memory, and 0.66 GiB for CUDAGraph memory. Replace \
gpu_memory_utilization config with `--kv-cache-memory=42000000000` to fit into requested memory, or \
`--kv-cache-memory=45000000000` to fully utilize gpu memory. Current kv cache memory in use is 43218108416 bytes.
(APIServer pid=1) INFO:     Application startup complete.
"""

VLLM_32 = """\
(APIServer pid=7) INFO 11-02 14:00:00 [api_utils.py:339]   ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0
(APIServer pid=7) INFO 11-02 14:00:00 [api_utils.py:339]    █▄█▀ █     █     █     █  model   org/hybrid
(EngineCore pid=79) INFO 11-02 14:00:20 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: \
model='org/hybrid', speculative_config=SpeculativeConfig(method='mtp', model='org/draft', \
num_spec_tokens=2), dtype=torch.bfloat16, max_seq_len=131072, tensor_parallel_size=1, quantization=None
(EngineCore pid=79) INFO 11-02 14:00:50 [gpu_model_runner.py:5150] Model loading took 20.13 GiB memory \
and 31.657031 seconds
(EngineCore pid=79) INFO 11-02 14:00:51 [interface.py:645] Setting attention block size to 544 tokens to \
ensure that attention page size is >= mamba page size.
(EngineCore pid=79) INFO 11-02 14:00:51 [runner.py:132] Encoder cache will be initialized with a budget \
of 8192 tokens, and profiled with 1 image items of the maximum feature size.
(EngineCore pid=79) INFO 11-02 14:01:20 [gpu_model_runner.py:6475] Estimated CUDA graph memory: 0.44 GiB total
(EngineCore pid=79) INFO 11-02 14:01:20 [gpu_worker.py:759] Available KV cache memory: 37.99 GiB
(EngineCore pid=79) INFO 11-02 14:01:20 [gpu_worker.py:774] CUDA graph memory profiling is enabled \
(default since v0.21.0). The current --gpu-memory-utilization=0.9000 is equivalent to \
--gpu-memory-utilization=0.8901 without CUDA graph memory profiling. To maintain
(EngineCore pid=79) INFO 11-02 14:01:20 [kv_cache_utils.py:2327] GPU KV cache size: 150,745 tokens, \
Maximum concurrency for 131,072 tokens per request: 1.15x
(EngineCore pid=79) INFO 11-02 14:01:40 [gpu_worker.py:971] CUDA graph pool memory: 0.24 GiB (actual), \
0.44 GiB (estimated), difference: 0.2 GiB (83.3%).
(EngineCore pid=79) INFO 11-02 14:01:40 [gpu_worker.py:1034] Free memory on device (70.0/71.0 GiB) on \
startup. Desired GPU memory utilization is (0.9, 63.9 GiB). Actual usage is 20.39 GiB for consumed memory \
(weights + non-torch), 5.52 GiB for peak activation, and 0.24 GiB for CUDAGraph memory. Replace \
gpu_memory_utilization config with `--kv-cache-memory=40000000000` (37.25 GiB) to fit into requested \
memory, or `--kv-cache-memory=41000000000` (38.18 GiB) to fully utilize gpu memory. Current kv cache \
memory in use is 37.99 GiB.
"""


def test_vllm_before_the_profiling_line() -> None:
    log = read(VLLM_05)
    holds(
        log,
        version="0.5.1",
        model="meta-llama/Meta-Llama-3-8B",
        dtype="bfloat16",
        max_model_len=8192,
        tp=1,
        enforce_eager=True,
        kv_cache_dtype="fp8",
        weights_bytes=gib(14.9595),  # printed "GB", in GiB
        kv_blocks=5970,
        kv_tokens=5970 * 16,
    )
    assert log.engine == "vllm"
    assert log.fields["kv_tokens"].derived == "kv_blocks × block size 16 (vLLM's default; not printed)"
    assert (log.fields["kv_blocks"].line, log.fields["version"].line) == (3, 1)
    assert "cuda_graph_bytes" not in log.fields  # that version prints no size
    assert "quantization" not in log.fields  # None is not a format


def test_vllm_064_activation_is_the_peak_less_the_weights() -> None:
    log = read(VLLM_064)
    holds(
        log,
        version="0.6.4.post1",
        gpu_total_bytes=gib(23.58),
        gpu_memory_utilization=0.9,
        weights_bytes=gib(14.9888),
        activation_bytes=gib(17.06 - 14.9888),
        non_torch_bytes=gib(0.35),
        kv_pool_bytes=gib(3.81),
        kv_tokens=31232,
        max_concurrency=1.56,
        max_concurrency_tokens=20000,
        cuda_graph_bytes=gib(0.30),
    )
    assert log.fields["activation_bytes"].derived is not None
    assert log.fields["activation_bytes"].line == 3


def test_vllm_ranks_disagree_and_the_least_pool_binds() -> None:
    log = read(VLLM_07_TP2)  # vllm-project/vllm#14452
    holds(
        log,
        tp=2,
        generation="V0",
        quantization="awq",
        budget_bytes=gib(26.66),
        gpu_memory_utilization=0.85,
        weights_bytes=gib(10.3012),
        activation_bytes=gib(1.77),
        kv_pool_bytes=gib(14.26),
        kv_tokens=116784,
        max_concurrency=2.34,
    )
    assert log.ranks["pid 1234"]["kv_pool_bytes"].value == gib(14.52)
    terms = sum(log.number(name) or 0 for name in ("weights_bytes", "non_torch_bytes", "activation_bytes"))
    assert log.number("budget_bytes") == pytest.approx(
        terms + (log.number("kv_pool_bytes") or 0), abs=0.011 * GIB
    )


def test_vllm_v1_with_workers() -> None:
    log = read(VLLM_11)
    holds(
        log,
        version="0.11.0",
        generation="V1",
        model="org/m",
        quantization="fp8",
        tp=2,
        pp=1,
        dp=1,
        max_model_len=16384,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.95,
        gpu_total_bytes=gib(79.20),
        gpu_free_bytes=gib(78.60),
        budget_bytes=gib(75.24),
        weights_bytes=gib(20.75),
        activation_bytes=gib(13.5),
        non_torch_bytes=gib(0.74),
        cuda_graph_bytes=gib(0.66),
        kv_pool_bytes=43218108416,
        kv_suggested_bytes=42000000000,
        kv_tokens=329728,
        max_concurrency=20.12,
        max_concurrency_tokens=16384,
    )
    assert log.ranks["TP0"]["weights_bytes"].value == gib(20.5)
    assert (log.refusal, log.oom, log.starts) == (None, False, 1)
    assert log.started_line == len(VLLM_11.splitlines()) == log.lines
    assert log.fields["kv_pool_bytes"].rank == "TP1"


def test_vllm_with_graphs_inside_the_budget() -> None:
    log = read(VLLM_32)
    holds(
        log,
        version="0.32.0",
        model="org/hybrid",
        max_model_len=131072,
        block_size=544,
        encoder_cache_tokens=8192,
        cuda_graph_in_budget=True,
        cuda_graph_estimate_bytes=gib(0.44),
        cuda_graph_bytes=gib(0.24),
        gpu_memory_utilization=0.9,
        weights_bytes=gib(20.13),
        non_torch_bytes=gib(20.39 - 20.13),
        # 63.9 - 20.39 - 5.52 = 37.99: the budget closes, so the estimate is inside the activation
        activation_bytes=gib(5.52 - 0.44),
        kv_tokens=150745,
        max_concurrency=1.15,
    )


def test_vllm_graphs_outside_the_activation_stay_outside() -> None:
    text = VLLM_32.replace("5.52 GiB for peak", "5.08 GiB for peak")  # now 0.44 is missing from the sum
    holds(read(text), activation_bytes=gib(5.08))


def test_vllm_graph_estimate_printed_but_not_counted() -> None:
    log = read(
        "(EngineCore pid=1) INFO [x.py:1] Initializing a V1 LLM engine (v0.18.0) with config: model='m'\n"
        "(EngineCore pid=1) INFO [x.py:1] Estimated CUDA graph memory: 0.26 GiB total\n"
        "(EngineCore pid=1) INFO [x.py:1] Available KV cache memory: 17.36 GiB\n"
        "(EngineCore pid=1) INFO [x.py:1] In v0.19, CUDA graph memory profiling will be enabled by default "
        "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=1), which more accurately accounts for it. To try it, "
        "increase --gpu-memory-utilization from 0.7000 to 0.7021 to maintain the same size.\n"
    )
    holds(log, cuda_graph_in_budget=False, gpu_memory_utilization=0.7, kv_pool_bytes=gib(17.36))


def test_vllm_v0_draft_model_is_not_the_model() -> None:
    log = read(
        "INFO x.py:1] Initializing an LLM engine (v0.6.1) with config: model='big'\n"
        "INFO model_runner.py:1] Loading model weights took 32.9000 GB\n"
        "INFO model_runner.py:1] Loading model weights took 14.9600 GB\n"
        "INFO gpu_executor.py:1] # GPU blocks: 900, # CPU blocks: 1\n"
    )
    holds(log, weights_bytes=gib(32.9), draft_weights_bytes=gib(14.96), kv_tokens=14400)


def test_vllm_block_size_from_the_concurrency() -> None:
    log = read(
        "INFO vLLM # cuda blocks: 1444, # CPU blocks: 0\n"
        "INFO Maximum concurrency for 16000 tokens per request: 11.55x\n"
    )
    holds(log, kv_tokens=1444 * 128)  # 11.55 · 16000 / 1444 = 128
    assert "from the concurrency printed" in str(log.fields["kv_tokens"].derived)


def test_a_log_of_several_starts_is_read_from_the_last() -> None:
    first = VLLM_11.replace("20.7500", "99.0000").replace("329,728", "1,000")
    second = VLLM_11.replace("pid=99", "pid=500")
    log = read(first + second)
    assert log.starts == 2
    assert log.fields["weights_bytes"].line > len(VLLM_11.splitlines())
    holds(log, weights_bytes=gib(20.75), kv_tokens=329728)


def test_a_last_start_cut_off_before_memory_leaves_the_one_before() -> None:
    head = "".join(VLLM_11.splitlines(keepends=True)[:4])
    log = read(VLLM_11 + head)
    holds(log, weights_bytes=gib(20.75))
    assert any("the one before it is read" in warning for warning in log.warnings)


@pytest.mark.parametrize(
    ("line", "reason", "numbers"),
    [
        pytest.param(  # QwenLM/Qwen3#295
            "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can "
            "be stored in KV cache (7344). Try increasing `gpu_memory_utilization` or decreasing",
            "context_exceeds_kv_cache",
            {"max_model_len": 32768, "kv_tokens": 7344},
            id="old wording",
        ),
        pytest.param(  # vllm-project/vllm#16118, the doubled s of many versions
            "ValueError: To serve at least one request with the models's max seq len (1048576), (24.00 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (9.97 GiB). Try increasing",
            "context_exceeds_kv_cache",
            {"max_model_len": 1048576, "kv_needed_bytes": gib(24.0), "kv_pool_bytes": gib(9.97)},
            id="V1 without an estimate",
        ),
        pytest.param(  # vllm-project/vllm#34076
            "ValueError: To serve at least one request with the model's max seq len (262144), 24.0 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (3.18 GiB). Based on the available "
            "memory, the estimated maximum model length is 34736. Try increasing `gpu_memory_utilization`",
            "context_exceeds_kv_cache",
            {
                "max_model_len": 262144,
                "kv_needed_bytes": gib(24.0),
                "kv_pool_bytes": gib(3.18),
                "largest_max_model_len": 34736,
            },
            id="V1 with an estimate, no bracket",
        ),
        pytest.param(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when",
            "no_memory_for_kv_cache",
            {},
            id="nothing left",
        ),
        pytest.param(
            "ValueError: Free memory on device (67.24/79.25 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 71.33 GiB). Decrease GPU memory utilization or reduce GPU memory used by other",
            "free_memory_below_budget",
            {
                "gpu_free_bytes": gib(67.24),
                "gpu_total_bytes": gib(79.25),
                "gpu_memory_utilization": 0.9,
                "budget_bytes": gib(71.33),
            },
            id="another process holds memory",
        ),
        pytest.param(
            "ValueError: Free memory on device cuda:3 (5.31/23.56 GiB) on startup is less than desired GPU "
            "memory utilization (0.8, 18.85 GiB)",
            "free_memory_below_budget",
            {
                "gpu_free_bytes": gib(5.31),
                "gpu_total_bytes": gib(23.56),
                "gpu_memory_utilization": 0.8,
                "budget_bytes": gib(18.85),
            },
            id="device named",
        ),
        pytest.param(
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (658). Each decode sequence",
            "state_blocks_below_max_num_seqs",
            {"max_num_seqs": 1024, "state_slots": 658},
            id="state blocks",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please",
            "out_of_memory_in_sampler",
            {"max_num_seqs": 1024},
            id="sampler",
        ),
    ],
)
def test_vllm_refusals(line: str, reason: str, numbers: dict[str, object]) -> None:
    log = read(f"INFO vLLM API server version 0.11.0\n(EngineCore_DP0 pid=9) ERROR [core.py:708] {line}\n")
    assert log.refusal is not None
    assert (log.refusal.reason, log.refusal.line) == (reason, 2)
    assert log.refusal.numbers == numbers
    assert log.refusal.text.startswith("(EngineCore_DP0 pid=9) ERROR")


def test_a_failure_that_is_not_about_memory_is_said_so() -> None:
    log = read(
        "INFO vLLM Available KV cache memory: 3.00 GiB\nERROR [core.py:1] EngineCore failed to start.\n"
    )
    assert log.refusal is None
    assert log.warnings == ("line 2: the engine failed to start for a reason that is not about memory",)


OOM_NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of "
    "23.57 GiB of which 605.88 MiB is free. Process 4711 has 1.20 GiB memory in use. Including non-PyTorch "
    "memory, this process has 21.50 GiB memory in use. Of the allocated memory 20.21 GiB is allocated by "
    "PyTorch, with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), and 38.07 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large"
)
OOM_OLD = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total "
    "capacity; 21.50 GiB already allocated; 11.94 MiB free; 22.01 GiB reserved in total by PyTorch)"
)


def test_an_out_of_memory_trace_before_serving() -> None:
    log = read(f'  File "/usr/lib/python3/site-packages/vllm/v1/worker/gpu_worker.py", line 1\n{OOM_NEW}\n')
    assert log.engine == "vllm"
    assert log.oom
    assert log.refusal is not None
    assert log.refusal.reason == "out_of_memory"
    holds(
        log,
        oom_tried_bytes=gib(1.74),
        oom_total_bytes=gib(23.57),
        oom_free_bytes=round(605.88 * MIB),
        oom_other_process_bytes=gib(1.20),
        oom_process_bytes=gib(21.50),
        oom_torch_bytes=gib(20.21),
        oom_graph_pool_bytes=128 * MIB,
        oom_unallocated_bytes=round(38.07 * MIB),
        oom_device=1,
    )


def test_the_message_of_older_pytorch() -> None:
    log = read(
        f"Traceback sglang/srt/model_executor/model_runner.py\nLoad weight begin. avail mem=23.1 GB\n{OOM_OLD}\n"
    )
    assert log.engine == "sglang"
    holds(
        log,
        oom_tried_bytes=20 * MIB,
        oom_total_bytes=gib(23.69),
        oom_free_bytes=round(11.94 * MIB),
        oom_torch_bytes=gib(21.5),
        oom_device=0,
    )


def test_the_engines_own_reason_counts_before_the_failed_allocation() -> None:
    own = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
    log = read(f"(EngineCore_DP0 pid=1) ERROR {OOM_NEW}\n(EngineCore_DP0 pid=1) ERROR {own}\n")
    assert log.refusal is not None
    assert log.refusal.reason == "out_of_memory_in_sampler"
    assert log.oom


def test_out_of_memory_while_serving_is_no_refusal() -> None:
    log = read(VLLM_11 + f"(EngineCore_DP0 pid=99) ERROR {OOM_NEW}\n")
    assert log.oom
    assert log.refusal is None
    assert any("after it had started" in warning for warning in log.warnings)


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


def test_figures_that_cannot_be_are_said_so() -> None:
    log = read(
        "INFO vLLM the current vLLM instance can use total_gpu_memory (22.06GiB) x gpu_memory_utilization "
        "(0.90) = 19.85GiB\nINFO the rest of the memory reserved for KV Cache is 65.20GiB.\n"
    )
    assert log.warnings == (
        "line 2: kv_pool_bytes of 65.20 GiB is more than the device's 22.06 GiB (line 1)",
    )
    log = read("INFO vLLM Model loading took 99999999999 GiB\nAvailable KV cache memory: -2.14 GiB\n")
    assert "weights_bytes" not in log.fields
    holds(log, kv_pool_bytes=gib(-2.14))


PREFIXES = [
    pytest.param(lambda line: line, id="plain"),
    pytest.param(lambda line: f"\x1b[36m(EngineCore pid=7)\x1b[0;0m {line}", id="colours"),
    pytest.param(lambda line: f"2026-11-02T14:00:00.123456789Z stderr F {line}", id="kubernetes"),
    pytest.param(lambda line: f"vllm-1  | {line}\r", id="compose, CRLF"),
    pytest.param(lambda line: f"serve1.log:{line}", id="grep"),
    pytest.param(lambda line: json.dumps({"log": line + "\n", "stream": "stderr"}), id="docker json"),
    pytest.param(lambda line: json.dumps({"level": "INFO", "fields": {"message": line}}), id="nested json"),
    pytest.param(lambda line: f"(RayWorkerWrapper pid=4, ip=10.0.0.2) {line} [repeated 3x]", id="ray"),
    pytest.param(lambda line: f"> > {line}", id="quoted mail"),
    pytest.param(lambda line: f"Capturing:  10%|#   |\rCapturing: 100%|####|\r{line}", id="progress bar"),
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_do_not_matter(prefix: Any) -> None:
    lines = [
        "INFO 01-01 00:00:00 [x.py:1] Initializing a V1 LLM engine (v0.11.0) with config: model='a/b', max_seq_len=512",
        "INFO 01-01 00:00:01 [x.py:1] Model loading took 3.5000 GiB and 3.1 seconds",
        "INFO 01-01 00:00:02 [x.py:1] Available KV cache memory: 7.25 GiB",
    ]
    log = read("\n".join(prefix(line) for line in lines) + "\n")
    holds(
        log, version="0.11.0", model="a/b", max_model_len=512, weights_bytes=gib(3.5), kv_pool_bytes=gib(7.25)
    )
    assert log.fields["kv_pool_bytes"].line == 3


def test_a_long_line_and_a_last_line_without_end() -> None:
    filler = "x" * 3_000_000
    log = read(f"INFO vLLM {filler}\n{filler}\nAvailable KV cache memory: 7.25 GiB")
    holds(log, kv_pool_bytes=gib(7.25))
    assert log.lines == 3


def test_lines_are_counted_across_blocks(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    noise = 'INFO:     10.0.0.1:51234 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 40_000
    path.write_text(noise + "vLLM Available KV cache memory: 7.25 GiB\n" + noise)
    log = read_log(path)
    assert log.fields["kv_pool_bytes"].line == 40_001
    assert log.lines == 80_001
    cut = read_log(path, max_bytes=3_000_000)
    assert any("only the first 3000000 bytes" in warning for warning in cut.warnings)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16-le", "utf-16-be"])
def test_encodings_of_windows(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    mark = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(encoding, b"")
    path.write_bytes(mark + LLAMACPP_NEW.encode(encoding))
    holds(read_log(str(path)), compute_bytes=round(618.5 * MIB))


def test_streams_and_paths_agree(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text(VLLM_11)
    with path.open("rb") as stream:
        assert values(read_log(stream)) == values(read_log(path)) == values(read(VLLM_11))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(bytes(range(256)) * 400, "binary", id="binary"),
        pytest.param(gzip.compress(VLLM_11.encode()), "gzip-compressed", id="compressed"),
        pytest.param(b"GET / 200\nhello\n", "no engine known", id="another program"),
        pytest.param(b"INFO epoch 1 loss 0.3 memory 12 GiB\n" * 50, "no engine known", id="a training log"),
        pytest.param(b"we use vLLM and sglang; memory is tight\n", "none of its lines", id="prose"),
        pytest.param(OOM_NEW.encode() + b"\n", "of which engine it does not say", id="a trace alone"),
    ],
)
def test_bad_input_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read_log(path)
    assert str(path) in caught.value.where
    assert caught.value.hint


def test_unreadable_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.log", tmp_path, "no\0name"):
        with pytest.raises(InputError, match="cannot be read"):
            read_log(path)


def test_every_field_is_declared_and_has_a_line() -> None:
    for text in (
        VLLM_05,
        VLLM_064,
        VLLM_07_TP2,
        VLLM_11,
        VLLM_32,
        SGLANG_TP2,
        TRTLLM_CPP,
        TRTLLM_TORCH,
        TGI_3,
        LLAMACPP_NEW,
    ):
        log = read(text)
        lines = text.splitlines()
        for name, reading in log.fields.items():
            assert name in FIELDS
            assert lines[reading.line - 1].strip().startswith(reading.text[:40])
            assert isinstance(
                reading.value,
                {"bytes": int, "int": int, "float": float, "str": str, "bool": bool}[reading.unit],
            )


def test_every_wording_is_reached_by_a_hint() -> None:
    assert [text for text in _LITERALS if not any(hint in text.encode() for hint in HINTS)] == []
    named = {name for reader in READERS for phrase in reader.WORDINGS for name in phrase.tail.groupindex}
    assert {name for name in named if name.endswith("_bytes") and name not in FIELDS} == {
        *(
            "kv_needed_bytes",
            "used_bytes",
            "k_bytes",
            "v_bytes",
            "kv_bytes",
            "buffer_bytes",
            "left_bytes",
            "self_bytes",
        ),
    }


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{path} is absent")
        pytest.skip("the shared data is not here")
    return path


def test_real_llamacpp_loads() -> None:
    lines = shared("oracles/llama_cpp_load_log_lines.txt").read_text().splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if "file format" in line] + [len(lines)]
    assert len(starts) == 8
    for begin, end in itertools.pairwise(starts):
        text = "".join(lines[begin:end])
        log = read(text)
        printed = sum(
            float(line.split("=")[1].split()[0]) for line in text.splitlines() if "model buffer size" in line
        )
        assert log.number("host_weights_bytes") == pytest.approx(printed * MIB, abs=1)
        holds(
            log,
            host_kv_bytes=96 * MIB,
            host_compute_bytes=round(68.5 * MIB),
            context_tokens=2048,
        )
    assert read("".join(lines)).starts == 7


def test_real_vllm_starts_on_a_cpu() -> None:
    text = shared("oracles/vllm_bench/startup_log_lines.txt").read_text()
    log = read(text)
    assert log.starts == 2  # another process id of the engine's core
    holds(log, kv_tokens=43648, max_concurrency=21.31, max_concurrency_tokens=2048)
    first = read("".join(text.splitlines(keepends=True)[:4]))
    holds(first, kv_tokens=524288, max_concurrency=256.0)
