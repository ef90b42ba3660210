"""Topics on what a plan needs in all: weights, overhead, demand, capacity, several GPUs."""

from typing import Any, Final

from capplan.estimate import vram
from capplan.formulas import latency, memory
from capplan.topics.kv_cache import LLAMA_3_8B
from capplan.topics.topic import Line, Topic, topic
from capplan.units import GB

# The lesson's studio: 8B in INT4, 16 users of 4,096 tokens, 24 GB.
STUDIO: Final[dict[str, Any]] = {
    "params": 8 * GB,
    "kv_from": "llama-3-8b",
    "precision": "int4",
    "overhead_bytes": 1_500_000_000,
    "gpu_memory_bytes": 24 * GB,
}


def _weights() -> tuple[Line, ...]:
    formats = {"FP32": 32, "FP16 / BF16": 16, "INT8 / FP8": 8, "INT4": 4}
    bytes_each = tuple(
        Line(f"one parameter in {name}", memory.weight_bytes(parameters=1, bits=bits), "B")
        for name, bits in formats.items()
    )
    return bytes_each + tuple(
        Line(f"{count}B in {name}", memory.weight_bytes(parameters=count * 1e9, bits=bits), "B")
        for count in (7, 70)
        for name, bits in formats.items()
    )


def _quantized_weights() -> tuple[Line, ...]:
    return (
        Line(
            "scales and zeros of a 4096 × 4096 AWQ matrix, g128",
            memory.group_scales_bytes(groups=4096 * 4096 // 128, scale_bits=16, zero_bits=4),
            "B",
        ),
        Line(
            "AWQ g128",
            memory.effective_bits(element_bits=4, group=128, scale_bits=16, zero_bits=4),
            "bit",
        ),
        Line("Llama-3-8B stored in AWQ g128", vram("llama-3-8b", precision="awq").weights_bytes, "B"),
        Line("Llama-3-8B stored in bf16", vram("llama-3-8b", precision="bf16").weights_bytes, "B"),
    )


def _overhead() -> tuple[Line, ...]:
    return tuple(
        Line(
            f"{name} of fp16 weights at {fraction:.0%}",
            memory.overhead_bytes(weight_bytes=size, fraction=fraction),
            "B",
        )
        for name, size in (("14 GB", 14e9), ("140 GB", 140e9))
        for fraction in (0.15, 0.20)
    )


def _total() -> tuple[Line, ...]:
    studio = vram(**STUDIO)
    need = studio.need
    total = memory.total_bytes(
        weights=need.weights_bytes,
        kv_cache=need.kv_bytes or 0,
        overhead=need.overhead.high_bytes,
    )
    mixed = studio.lesson or {}
    return (
        Line("weights, 8B in INT4", need.weights_bytes, "B"),
        Line("KV cache, 16 users at 4,096", need.kv_bytes or 0, "B"),
        Line("demand with 1.5 GB of overhead", total, "B"),
        Line("headroom in 24 GB", memory.headroom_bytes(usable=24 * GB, total=total), "B"),
        Line("demand as the lesson adds it: GB + GiB", mixed["total_mixed"], "GB and GiB"),
        Line("headroom as the lesson has it", mixed["headroom_mixed"], "GB and GiB"),
    )


def _capacity() -> tuple[Line, ...]:
    studio = vram(**STUDIO)
    verdict = studio.verdicts[0]
    longer = vram(**{**STUDIO, "kv_from": "llama-3.1-8b"}).verdicts[0]
    return (
        Line("8B INT4 in 24 GB: left for the KV cache", verdict.pool_bytes or 0, "B"),
        Line("users at 4,096 tokens", verdict.max_users or 0, "user"),
        Line("tokens for each of 16 users, Llama-3-8B (its limit)", verdict.max_context or 0, "token"),
        Line("tokens for each of 16 users, Llama-3.1-8B", longer.max_context or 0, "token"),
    )


def _training() -> tuple[Line, ...]:
    fp16 = memory.weight_bytes(parameters=7e9, bits=16)
    training = memory.training_bytes(parameters=7e9)
    llama = memory.weight_bytes(parameters=8e9, bits=16)
    serving = memory.total_bytes(
        weights=llama,
        kv_cache=memory.kv_cache_bytes(**LLAMA_3_8B, batch=8, context=4096),
        overhead=memory.overhead_bytes(weight_bytes=llama, fraction=0.20),
    )
    return (
        Line("training 7B with Adam, activations on top", training, "B"),
        Line("gradients and optimizer of it, absent in serving", training - fp16, "B"),
        Line("times its fp16 weights", training / fp16, "1"),
        Line(
            "at 20 B a parameter, activations included",
            memory.training_bytes(parameters=7e9, bytes_per_parameter=20),
            "B",
        ),
        Line("serving 8B in fp16, 8 users at 4,096, times its weights", serving / llama, "1"),
    )


def _sharding() -> tuple[Line, ...]:
    def rank(tp: int, gpu: str) -> Line:
        found = vram("llama-3-70b", precision="fp16", tp=tp, gpus=(gpu,)).verdicts[0]
        return Line(f"70B in fp16 on {tp} × {found.name}: headroom of each", found.headroom_bytes, "B")

    return (
        rank(2, "a100-sxm-80gb"),
        rank(4, "a100-sxm-80gb"),
        rank(4, "a100-sxm-40gb"),
        rank(8, "a100-sxm-40gb"),
        Line("layers of a stage, 80 over 4", memory.stage_layers(layers=80, stages=4), "layer"),
    )


def _replication() -> tuple[Line, ...]:
    weights = memory.weight_bytes(parameters=7e9, bits=16)
    total = memory.total_bytes(
        weights=weights,
        kv_cache=0,
        overhead=memory.overhead_bytes(weight_bytes=weights, fraction=0.20),
    )
    return (
        Line("7B in fp16 with 20 % of overhead", total, "B"),
        Line(
            "left of 24 GB for its KV cache",
            memory.headroom_bytes(usable=24 * GB, total=total),
            "B",
        ),
        Line(
            "4 replicas that make 1,000 tokens a second each",
            latency.throughput_token_per_s(tokens=4 * 1000, time_s=1),
            "token/s",
        ),
    )


FIT: Final[tuple[Topic, ...]] = (
    topic(
        "weights",
        "Weights by the headline formula",
        (memory.weight_bytes,),
        _weights,
        aliases=("weight-memory", "model-weights", "m-weights", "bytes-per-parameter"),
        command="vram",
    ),
    topic(
        "quantized-weights",
        "What quantized weights really take: scales, zero points, what stays at 16 bits",
        (memory.effective_bits, memory.group_scales_bytes),
        _quantized_weights,
        aliases=("effective-bits", "group-scales", "group-size"),
        command="vram --precision awq",
    ),
    topic(
        "overhead",
        "Run-time overhead by the rule of thumb",
        (memory.overhead_bytes,),
        _overhead,
        aliases=("overhead-rule", "cuda-context", "activation-memory"),
        command="vram --overhead",
    ),
    topic(
        "total",
        "Demand and headroom: the studio example",
        (memory.total_bytes, memory.headroom_bytes),
        _total,
        aliases=("headroom", "vram", "vram-demand", "budget", "studio"),
        command="vram",
    ),
    topic(
        "capacity",
        "How many users, how long a context",
        (memory.headroom_bytes, memory.kv_blocks),
        _capacity,
        holds="users whose whole context is full, in what weights and overhead leave.",
        aliases=("max-users", "max-context", "users", "context"),
        command="vram --gpu",
    ),
    topic(
        "training",
        "Memory of training against serving",
        (memory.training_bytes, memory.total_bytes),
        _training,
        holds="Adam with fp32 moments. The lesson's 16 to 20 times are bytes a parameter: 8 to 10 times the"
        " fp16 weights. Serving is past its 1.2 to 2 times once the KV cache outgrows the weights.",
        aliases=("training-memory", "optimizer-states", "inference-footprint", "adam"),
        command="vram",
    ),
    topic(
        "sharding",
        "One model over several GPUs",
        (memory.headroom_bytes, memory.stage_layers),
        _sharding,
        aliases=("tensor-parallel", "tp", "pipeline-parallel", "pp", "model-sharding"),
        command="vram --tp",
    ),
    topic(
        "replication",
        "Whole copies on several GPUs",
        (memory.total_bytes, memory.headroom_bytes, latency.throughput_token_per_s),
        _replication,
        holds="a model that fits on one GPU; throughput grows with the copies.",
        aliases=("data-parallel", "dp", "replicas", "model-replication"),
        command="vram --gpu",
    ),
)
