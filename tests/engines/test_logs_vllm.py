"""vLLM's start-up logs by version, its refusals, and PyTorch's out-of-memory messages.

Written here in the engine's words with other numbers; where a field report's figures are restated its
thread is named.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import pytest

from capplan.engines.log_record import FIELDS
from capplan.units import GIB, MIB
from tests.engines.log_reading import gib, holds, read

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


def test_every_field_is_declared_and_has_a_line() -> None:
    for text in (VLLM_05, VLLM_064, VLLM_07_TP2, VLLM_11, VLLM_32):
        log = read(text)
        lines = text.splitlines()
        for name, reading in log.fields.items():
            assert name in FIELDS
            assert reading.text[:40] in lines[reading.line - 1]
            kinds = {"bytes": int, "int": int, "float": float, "str": str, "bool": bool}
            assert isinstance(reading.value, kinds[reading.unit])
