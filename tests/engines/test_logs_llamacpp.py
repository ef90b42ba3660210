"""Start-up logs of llama.cpp and ik_llama.cpp, in their wordings over the years."""

# ruff: noqa: E501  (log lines are as long as the engines make them)

import pytest

from capplan.units import GIB, MIB
from tests.engines.log_reading import gib, holds, read

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
