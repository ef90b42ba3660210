"""Calls the tests of the log readers share."""

# ruff: noqa: E501  (log lines are as long as the engines make them)

import io
from typing import Any

import pytest

from capplan.engines.log_reader import read_log
from capplan.engines.log_record import EngineLog
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
