"""Seeded mutation of start-up logs: whatever the text, an answer or an InputError, and soon.

1,200 inputs run always, 30,000 with `-m slow`. A failure names its seed: `mutant(seed)` makes the input
again.
"""
# ruff: noqa: E501  (log lines are as long as the engines make them)

import contextlib
import io
import math
import random
import time

import pytest

from capplan.engines.log_reader import _LITERALS, read_log
from capplan.engines.log_record import FIELDS, SIGNED, EngineLog
from capplan.errors import InputError

SEEDS = [
    "(EngineCore_DP0 pid=9) INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='a', "
    "max_seq_len=16384, tensor_parallel_size=2, nested={'x': [1, (2)]}\n"
    "(Worker_TP0 pid=12) INFO Model loading took 20.5000 GiB and 31.7 seconds\n"
    "(Worker_TP1 pid=13) INFO Available KV cache memory: 41.75 GiB\n"
    "(EngineCore_DP0 pid=9) INFO GPU KV cache size: 342,016 tokens, Maximum concurrency for 16,384 tokens per "
    "request: 20.88x\n"
    "INFO Free memory on device (78.60/79.20 GiB) on startup. Desired GPU memory utilization is (0.95, 75.24 "
    "GiB). Actual usage is 20.75 GiB for weight, 13.5 GiB for peak activation, 0.74 GiB for non-torch memory, "
    "and 0.66 GiB for CUDAGraph memory.\n",
    "INFO worker.py:232] Memory profiling results: total_gpu_memory=23.58GiB initial_memory_usage=0.31GiB "
    "peak_torch_memory=17.06GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB gpu_memory_utilization=0.90\n"
    "# GPU blocks: 1952, # CPU blocks: 2048\nMaximum concurrency for 20000 tokens per request: 1.56x\n",
    "[2025-10-16 09:05:00] server_args=ServerArgs(model_path='o/m', mem_fraction_static=0.911, tp_size=2)\n"
    "[2025-10-16 09:05:51 TP1] Load weight begin. avail mem=139.40 GB\n"
    "[2025-10-16 09:06:20 TP1] Load weight end. type=M, avail mem=110.70 GB, mem usage=28.70 GB.\n"
    "[2025-10-16 09:06:22 TP1] KV Cache is allocated. #tokens: 1669816, K size: 38.22 GB, V size: 38.22 GB\n"
    "[2025-10-16 09:06:30 TP0] Capture cuda graph end. Time elapsed: 5.37 s. mem usage=1.44 GB. avail mem=3 GB.\n",
    "[TensorRT-LLM] TensorRT-LLM version: 0.12.0\n[TensorRT-LLM][INFO] Loaded engine size: 6214 MiB\n"
    "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 62.99 GiB for max tokens in paged KV cache (294848).\n"
    "[TRT-LLM] [RANK 1] [E] Executor creation failed due to insufficient GPU memory.\n",
    '2025 INFO text_generation_launcher: Args {\n    model_id: "o/m",\n    num_shard: Some(\n        2,\n    ),\n}\n'
    "INFO text_generation_launcher: KV-cache blocks: 175856, size: 1\n",
    "llama_model_loader: loaded meta data with 31 key-value pairs and 443 tensors from /m/x.gguf (version 3)\n"
    "load_tensors:        CUDA0 model buffer size =  9000.25 MiB\nllama_context: n_ctx         = 16384\n"
    "llama_kv_cache:      CUDA0 KV buffer size =  1024.00 MiB\n"
    "allocating 51748.72 MiB on device 1: cudaMalloc failed: out of memory\n",
    "vllm/v1 torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity "
    "of 23.57 GiB of which 605.88 MiB is free.\n",
]
NUMBERS = [
    *("0", "-1", "1", "1e308", "NaN", "inf", "-inf", "9" * 25, "9" * 5000, "1,2,3", ",", "0.", ".5", "-0.0"),
    *("18446744073709551615", "17179869184", "1.7976931348623157e309", "٣", "１２", "0x10", "1_000"),
]
NOISE = [
    "\x00",
    "\r",
    "\n",
    "\r\n",
    "\x1b[36m",
    "\x1b[",
    "{",
    "}",
    "(",
    ")",
    "'",
    '"',
    "\\",
    "é",
    "\ud800",
    "█",
    "\t",
]


def mutant(seed: int) -> bytes:
    """A log with a few things wrong with it."""
    draw = random.Random(seed)
    text = "".join(draw.sample(SEEDS, draw.choice((1, 1, 1, 2, 3))))
    for _ in range(draw.choice((1, 1, 2, 4, 12))):
        at = draw.randrange(len(text) + 1)
        kind = draw.randrange(9)
        if kind == 0:
            text = text[:at] + draw.choice(NOISE) * draw.choice((1, 1, 3, 400)) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + draw.choice((1, 5, 60)) :]
        elif kind == 2:
            digits = [index for index, char in enumerate(text) if char.isdigit()]
            if digits:
                at = draw.choice(digits)
                text = text[:at] + draw.choice(NUMBERS) + text[at + 1 :]
        elif kind == 3:
            text = text[:at] + draw.choice(_LITERALS) + text[at:]
        elif kind == 4:
            text = text[:at] + draw.choice(_LITERALS) * draw.choice((2, 50, 2000)) + text[at:]
        elif kind == 5:
            lines = text.splitlines(keepends=True)
            draw.shuffle(lines)
            text = "".join(lines)
        elif kind == 6:
            text = text[:at] + "x" * draw.choice((1, 70_000)) + text[at:]
        elif kind == 7:
            text = text[:at] + '{"log": "' + "[" * draw.choice((1, 3000)) + text[at:]
        else:
            text = text[:at]
    data = text.encode("utf-8", errors="surrogatepass")
    if draw.random() < 0.1:
        spoiled = bytearray(data or b"x")
        for _ in range(20):
            spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
        data = bytes(spoiled)
    return data


def sane(log: EngineLog) -> None:
    """Figures a caller may use without looking: finite, not negative but where the engine prints so."""
    for name, reading in log.fields.items():
        assert name in FIELDS
        assert 1 <= reading.line <= log.lines
        assert len(reading.text) <= 240
        if isinstance(reading.value, str):
            assert len(reading.value) <= 240
        else:
            assert math.isfinite(reading.value)
            assert reading.value >= 0 or name in SIGNED
    assert len(log.warnings) <= 64


def check(seeds: range, seconds_each: float) -> None:
    answered = 0
    for seed in seeds:
        begin = time.process_time()
        try:
            sane(read_log(io.BytesIO(mutant(seed))))
            answered += 1
        except InputError:
            pass
        except Exception as error:
            pytest.fail(f"mutant({seed}): {type(error).__name__}: {error}")
        took = time.process_time() - begin
        assert took < seconds_each, f"mutant({seed}) took {took:.2f} s"
    assert answered > len(seeds) // 3, "the mutants say too little"


def test_mutants() -> None:
    check(range(1200), 1.0)


@pytest.mark.slow
def test_many_mutants() -> None:
    check(range(1200, 31_200), 1.0)


def test_the_worst_lines_stay_linear() -> None:
    """Every wording at once, over and over, in lines as long as are looked at."""
    for literal in _LITERALS:
        data = (("vLLM " + literal * (65_000 // len(literal)))[:65_000] + "\n").encode() * 3
        begin = time.process_time()
        with contextlib.suppress(InputError):
            sane(read_log(io.BytesIO(data)))
        assert time.process_time() - begin < 1.0, literal
