"""Topic on the speed of one user alone, as with llama.cpp on a desk."""

from typing import Any, Final

from capplan.formulas import latency, small_batch
from capplan.topics.topic import Line, Topic, topic

# Llama-3-8B in Q4_K_M on an RTX 4090, round fractions.
_STEP: Final[dict[str, Any]] = {
    "weight_bytes": 4.6e9,
    "flop": 15e9,
    "kv_bytes": 0,
    "kernels": 291,
    "bytes_per_s": 1.008e12,
    "flop_per_s": 82.6e12,
    "bandwidth_fraction": 0.8,
    "compute_fraction": 0.05,
    "kv_fraction": 0.5,
    "launch_s": 5e-6,
}


def _alone() -> tuple[Line, ...]:
    step_s = small_batch.decode_step_s(**_STEP)
    prompt_s = small_batch.prompt_s(
        flop=512 * 15e9,
        attention_flop=0,
        weight_bytes=4.6e9,
        kernels=291,
        chunks=1,
        bytes_per_s=1.008e12,
        flop_per_s=165e12,
        bandwidth_fraction=0.8,
        compute_fraction=0.4,
        attention_fraction=0.2,
        launch_s=5e-6,
    )
    return (
        Line(
            "loads of 5.70 ms, dequantisation of 3.63 ms: together",
            small_batch.hand_over_s(memory_s=5.704e-3, compute_s=3.632e-3),
            "s",
        ),
        Line("with 291 kernels of 5 µs: one token", step_s, "s"),
        Line("one user sees", latency.throughput_token_per_s(tokens=1, time_s=step_s), "token/s"),
        Line("its layers over two GPUs", small_batch.decode_step_s(**_STEP, hops=1, hop_s=3e-4), "s"),
        Line("a prompt of 512 tokens", prompt_s, "s"),
    )


ONE_USER: Final[tuple[Topic, ...]] = (
    topic(
        "one-user",
        "One user alone: fractions of bandwidth and arithmetic",
        (small_batch.decode_step_s, small_batch.hand_over_s, small_batch.prompt_s),
        _alone,
        aliases=("small-batch", "batch-1", "llama-cpp", "local", "dequantisation"),
    ),
)
