"""Reading a log: prefixes, encodings, sizes, bad input, real files, and figures of field reports."""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import codecs
import gzip
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from capplan.engines.log_reader import _LITERALS, HINTS, READERS, read_log
from capplan.engines.log_record import FIELDS
from capplan.errors import InputError
from capplan.units import GIB, MIB
from tests.engines.log_reading import gib, holds, read

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


START = """\
(APIServer pid=1) INFO 10-12 08:00:01 [api_server.py:1839] vLLM API server version 0.11.0
(EngineCore_DP0 pid=99) INFO 10-12 08:00:20 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with \
config: model='org/m', max_seq_len=16384, tensor_parallel_size=1
(EngineCore_DP0 pid=99) INFO 10-12 08:01:03 [x.py:1] Model loading took 20.7500 GiB and 32.7 seconds
(EngineCore_DP0 pid=99) INFO 10-12 08:01:33 [x.py:1] Available KV cache memory: 40.25 GiB
"""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of "
    "23.57 GiB of which 605.88 MiB is free."
)


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
    path.write_bytes(mark + START.encode(encoding))
    holds(read_log(str(path)), kv_pool_bytes=gib(40.25))


def test_streams_and_paths_agree(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text(START)
    with path.open("rb") as stream:
        assert dict(read_log(stream).fields) == dict(read_log(path).fields) == dict(read(START).fields)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(bytes(range(256)) * 400, "binary", id="binary"),
        pytest.param(gzip.compress(START.encode()), "gzip-compressed", id="compressed"),
        pytest.param(b"GET / 200\nhello\n", "no engine known", id="another program"),
        pytest.param(b"INFO epoch 1 loss 0.3 memory 12 GiB\n" * 50, "no engine known", id="a training log"),
        pytest.param(b"we use vLLM and sglang; memory is tight\n", "none of its lines", id="prose"),
        pytest.param(OUT_OF_MEMORY.encode() + b"\n", "of which engine it does not say", id="a trace alone"),
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
            "rest_bytes",
            "state_each_bytes",
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
    assert log.starts == 2  # told apart by their process ids
    holds(log, kv_pool_bytes=2 * GIB, kv_tokens=43648, max_concurrency=21.31, max_concurrency_tokens=2048)
    first = read("".join(text.splitlines(keepends=True)[:4]))
    holds(first, kv_pool_bytes=GIB, kv_tokens=524288, max_concurrency=256.0)


REPORTS = [
    pytest.param(
        "OpenRLHF/OpenRLHF#336",
        "INFO vLLM # GPU blocks: 378, # CPU blocks: 512\nValueError: The model's max seq len (8192) is larger than "
        "the maximum number of tokens that can be stored in KV cache (6048). Try\n",
        {"kv_blocks": 378, "kv_tokens": 6048, "max_model_len": 8192},
        id="378 blocks are 6048 tokens",
    ),
    pytest.param(
        "vllm-project/vllm#11251",
        "INFO vLLM Loading model weights took 7.5100 GB\n"
        "INFO the current vLLM instance can use total_gpu_memory (15.77GiB) x gpu_memory_utilization (0.90) = 14.19GiB\n"
        "INFO model weights take 7.51GiB; non_torch_memory takes 0.39GiB; PyTorch activation peak memory takes 2.53GiB; "
        "the rest of the memory reserved for KV Cache is 3.76GiB.\n"
        "INFO # cuda blocks: 3852, # CPU blocks: 4096\nINFO Maximum concurrency for 40000 tokens per request: 1.54x\n",
        {
            "kv_tokens": 61632,
            "max_concurrency": 1.54,
            "kv_pool_bytes": gib(3.76),
            "budget_bytes": gib(14.19),
            "activation_bytes": gib(2.53),
            "non_torch_bytes": gib(0.39),
        },
        id="four terms close the budget",
    ),
    pytest.param(
        "vllm-project/vllm#21489",
        "INFO vLLM Free memory on device (177.66/178.36 GiB) on startup. Desired GPU memory utilization is (0.9, 160.53 "
        "GiB). Actual usage is 8.58 GiB for weight, 9.96 GiB for peak activation, 0.07 GiB for non-torch memory, and 0.65 "
        "GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=151519866880` to fit "
        "into requested memory\n",
        {
            "gpu_total_bytes": gib(178.36),
            "gpu_free_bytes": gib(177.66),
            "budget_bytes": gib(160.53),
            "weights_bytes": gib(8.58),
            "activation_bytes": gib(9.96),
            "non_torch_bytes": gib(0.07),
            "cuda_graph_bytes": gib(0.65),
            "kv_suggested_bytes": 151519866880,
        },
        id="the pool suggested in bytes",
    ),
    pytest.param(
        "vllm-project/vllm#57475",
        "INFO [vllm/x.py] Available KV cache memory: 2.97 GiB\nINFO GPU KV cache size: 150,745 tokens, Maximum "
        "concurrency for 124,000 tokens per request: 1.22x\nINFO Graph capturing finished in 3 secs, took 0.46 GiB\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of "
        "22.36 GiB of which 120.88 MiB is free.\n",
        {
            "kv_pool_bytes": gib(2.97),
            "kv_tokens": 150745,
            "cuda_graph_bytes": gib(0.46),
            "oom_tried_bytes": 136 * MIB,
            "oom_free_bytes": round(120.88 * MIB),
            "oom_total_bytes": gib(22.36),
        },
        id="the remainder was too small for the graphs",
    ),
    pytest.param(
        "vLLM 0.27, a 24 GB card, gpustack/runner#251",
        "INFO vLLM Estimated CUDA graph memory: 0.36 GiB total\nINFO Available KV cache memory: 6.87 GiB\n"
        "INFO CUDA graph memory profiling is enabled (default since v0.21.0). The current "
        "--gpu-memory-utilization=0.8200 is equivalent to --gpu-memory-utilization=0.8048 without\n",
        {
            "gpu_memory_utilization": 0.82,
            "cuda_graph_estimate_bytes": gib(0.36),
            "cuda_graph_in_budget": True,
            "kv_pool_bytes": gib(6.87),
        },
        id="graphs inside the fraction",
    ),
    pytest.param(
        "vllm-project/vllm#10927",
        "INFO vLLM Loading model weights took 29.3000 GB\nINFO # GPU blocks: 5373, # CPU blocks: 600\n"
        "INFO Maximum concurrency for 8192 tokens per request: 10.49x\n",
        {"weights_bytes": gib(29.3), "kv_tokens": 85968, "max_concurrency": 10.49},
        id="GB that are GiB",
    ),
    pytest.param(
        "openai/gpt-oss-120b on an 80 GB card",
        "INFO vLLM Model loading took 65.9651 GiB and 60.1 seconds\nINFO Available KV cache memory: -2.14 GiB\n"
        "ValueError: No available memory for the cache blocks.\n",
        {"weights_bytes": gib(65.9651), "kv_pool_bytes": gib(-2.14)},
        id="a pool below nothing",
    ),
    pytest.param(
        "sgl-project/sglang#18263",
        "[2026-02-04 00:00:00] Load weight end. type=Q, dtype=torch.bfloat16, avail mem=230.20 GB, mem usage=56.98 GB.\n"
        "[2026-02-04 00:00:01] KV Cache is allocated. #tokens: 1669816, K size: 76.44 GB, V size: 76.44 GB\n"
        "[2026-02-04 00:00:01] Memory pool end. avail mem=74.01 GB\n",
        {
            "weights_bytes": gib(56.98),
            "kv_tokens": 1669816,
            "kv_pool_bytes": gib(152.88),
            "free_after_pool_bytes": gib(74.01),
        },
        id="K and V together",
    ),
    pytest.param(
        "NVIDIA/TensorRT-LLM#224",
        "[TensorRT-LLM][INFO] Using 10718 tokens in paged KV cache.\n",
        {"kv_tokens": 10718},
        id="tokens, not blocks",
    ),
    pytest.param(
        "ggml-org/llama.cpp#8101",
        "ggml_aligned_malloc: insufficient memory (attempted to allocate 131072.00 MB)\n"
        "llama_kv_cache_init: failed to allocate buffer for kv cache\n",
        {"oom_tried_bytes": 128 * GIB},
        id="a context of a million tokens",
    ),
    pytest.param(
        "ggml-org/llama.cpp#23652",
        "llama_context: n_ctx         = 1024\nllama_context: n_seq_max     = 4\nllama_context: kv_unified    = true\n"
        "llama_context: n_ctx_seq     = 1024\nllama_kv_cache: CUDA0 KV buffer size = 128.00 MiB\n",
        {"kv_tokens": 1024, "max_num_seqs": 4, "max_model_len": 1024, "kv_unified": True},
        id="four slots over one cache",
    ),
    pytest.param(
        "ggml-org/llama.cpp#17767",
        "llama_context: n_ctx         = 4096\nllama_context: n_seq_max     = 4\nllama_context: n_ctx_per_seq = 1024\n"
        "llama_kv_cache: CUDA0 KV buffer size = 512.00 MiB\n",
        {"kv_tokens": 4096, "max_num_seqs": 4, "max_model_len": 1024},
        id="the context divided by slots",
    ),
]


@pytest.mark.parametrize(("thread", "text", "expected"), REPORTS)
def test_figures_of_field_reports(thread: str, text: str, expected: dict[str, Any]) -> None:
    holds(read(text), **expected)
