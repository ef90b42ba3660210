"""Logs written in the engines' words with other numbers, and the calls the tests of doctor share."""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import contextlib
import io
from pathlib import Path
from typing import Any

from capplan.cli import run
from capplan.doctor import Diagnosis, diagnose

SHARED = Path(__file__).parents[1].parent / "shared" / "data"

STARTED = """\
(APIServer pid=1) INFO 10-12 08:00:01 [api_server.py:1839] vLLM API server version 0.11.0
(APIServer pid=1) INFO 10-12 08:00:01 [utils.py:233] non-default args: {'model': 'meta-llama/Llama-3.1-8B-Instruct', 'max_model_len': 16384, 'max_num_seqs': 256}
(APIServer pid=1) INFO 10-12 08:00:09 [scheduler.py:205] Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore_DP0 pid=99) INFO 10-12 08:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto
(EngineCore_DP0 pid=99) INFO 10-12 08:00:40 [model_runner.py:2653] Model loading took 15.0000 GiB and 12.3 seconds
(EngineCore_DP0 pid=99) INFO 10-12 08:01:40 [gpu_worker.py:298] Available KV cache memory: 50.50 GiB
(EngineCore_DP0 pid=99) INFO 10-12 08:01:40 [kv_cache_utils.py:1087] GPU KV cache size: 413,696 tokens
(EngineCore_DP0 pid=99) INFO 10-12 08:01:40 [kv_cache_utils.py:1091] Maximum concurrency for 16,384 tokens per request: 25.25x
(EngineCore_DP0 pid=99) INFO 10-12 08:01:50 [gpu_model_runner.py:3480] Graph capturing finished in 10 secs, took 0.50 GiB
(EngineCore_DP0 pid=99) INFO 10-12 08:01:51 [gpu_worker.py:391] Free memory on device (78.70/79.00 GiB) on startup. Desired GPU memory utilization is (0.9, 71.10 GiB). Actual usage is 15.0 GiB for weight, 5.25 GiB for peak activation, 0.35 GiB for non-torch memory, and 0.50 GiB for CUDAGraph memory.
(APIServer pid=1) INFO:     Application startup complete.
"""

# Figures of Graph-COM/SubgraphRAG#19: a model's own 131,072 tokens on 24 GB.
REFUSED = """\
INFO 12-01 10:00:00 [core.py:70] Initializing a V1 LLM engine (v0.10.1) with config: model='meta-llama/Llama-3.1-8B-Instruct', max_seq_len=131072, tensor_parallel_size=1, quantization=None, gpu_memory_utilization=0.9
INFO 12-01 10:00:30 Model loading took 14.9889 GiB and 12.3 seconds
INFO 12-01 10:00:50 Available KV cache memory: 4.76 GiB
ERROR 12-01 10:00:50 ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (4.76 GiB). Based on the available memory, the estimated maximum model length is 38976.
"""

# Figures of vllm-project/vllm#15105: the sampler's warm-up asks for what is not there.
SAMPLER = """\
INFO 03-19 [core.py:53] Initializing a V1 LLM engine (v0.8.1) with config: model='Qwen/Qwen2.5-7B-Instruct', max_seq_len=8192, tensor_parallel_size=1, gpu_memory_utilization=0.9
INFO 03-19 Model loading took 14.2 GiB and 3 seconds
INFO 03-19 GPU KV cache size: 90,000 tokens
ERROR 03-19 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 0 has a total capacity of 23.57 GiB of which 605.88 MiB is free.
ERROR 03-19 RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.
"""


AS_MEASURED = (
    *("--engine", "vllm", "--engine-version", "0.11.0", "--max-model-len", "16384"),
    *("--max-num-batched-tokens", "8192", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.9"),
)


def written(tmp_path: Path, text: str, name: str = "engine.log") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def diagnosed(text: str, **named: Any) -> Diagnosis:
    return diagnose(io.StringIO(text), **named)


def cli(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(list(arguments))
    return code, out.getvalue(), err.getvalue()
