"""Time of one sequence alone: a token's step, and a prompt, by fractions of a device's rates.

Every function is keyword-only; times are seconds, rates are per second. Each works on arrays as well.
"""

from typing import Final

KNEE: Final = 3
"""How sharply the slower of two limits takes over; equal limits make 2^(1/3) = 1.26 of either."""


def hand_over_s(*, memory_s: float, compute_s: float) -> float:
    """Time of work that both memory and arithmetic limit, in seconds.

        (memory³ + compute³)^(1/3)

    Holds for: kernels that overlap loads with arithmetic, but not wholly; some of both.
    Source: a smooth maximum; the exponent by cards held out, profiles/calibrations/small-batch.yaml.
    Example: 3 ms of loads, 4 ms of arithmetic: 4.50 ms.
    """
    total: float = (memory_s**KNEE + compute_s**KNEE) ** (1 / KNEE)
    return total


def decode_step_s(
    *,
    weight_bytes: float,
    flop: float,
    kv_bytes: float,
    kernels: float,
    bytes_per_s: float,
    flop_per_s: float,
    bandwidth_fraction: float,
    compute_fraction: float,
    kv_fraction: float,
    launch_s: float,
    ranks: float = 1,
    collectives: float = 0,
    collective_s: float = 0,
    hops: float = 0,
    hop_s: float = 0,
) -> float:
    """Time of one token of one sequence, in seconds.

        hand_over(weights / (f · B), flop / (g · F)) + kv / (k · B) + kernels · launch + collectives + hops

    f, g, k are fractions, B and F the bandwidth and the arithmetic rate of all ranks.
    `ranks` share each layer (tensor parallelism); GPUs that hold whole layers work one after the other: their
    bandwidth does not add up, each costs a hop. Of experts only those chosen are in `weight_bytes`. The
    second limit is the dequantisation: k-quants cost more instructions than a weak GPU has for each byte.

    Holds for: batch 1, all weights on the GPU. Not for: speculative decoding, layers on the CPU.
    Source: serving lesson, "The Memory Bandwidth Trap in Decode Phase"; fractions fitted to public runs.
    Example: 4.6 GB of weights, 15 GFLOP, no context, 291 kernels of 5 µs, 1,008 GB/s at 0.8, 82.6 TFLOP/s at
    0.05: 5.704 ms of loads and 3.632 of arithmetic make 6.158, launches 1.455: 7.61 ms.
    """
    memory_s = weight_bytes / (bandwidth_fraction * bytes_per_s * ranks)
    compute_s = flop / (compute_fraction * flop_per_s * ranks)
    return (
        hand_over_s(memory_s=memory_s, compute_s=compute_s)
        + kv_bytes / (kv_fraction * bytes_per_s * ranks)
        + kernels * launch_s
        + collectives * collective_s
        + hops * hop_s
    )


def prompt_s(
    *,
    flop: float,
    attention_flop: float,
    weight_bytes: float,
    kernels: float,
    chunks: float,
    bytes_per_s: float,
    flop_per_s: float,
    bandwidth_fraction: float,
    compute_fraction: float,
    attention_fraction: float,
    launch_s: float,
    stages: float = 1,
) -> float:
    """Time of a prompt of one sequence, in seconds.

        (n · (hand_over(weights / (f · B), flop / n / (g · F)) + launches) + attention / (a · F)) · fill

    f, g, a are fractions, B and F bandwidth and peak, n chunks; fill = (n + stages − 1) / (n · stages).
    A prompt goes through in `chunks` (llama.cpp's micro-batches); each reads all weights, every expert among
    them. `stages` GPUs that hold whole layers form a pipeline, which is full only once it has as many chunks.

    Holds for: batch 1, all weights on the GPU.
    Source: serving lesson, "Hardware Regime: Compute-bound"; fractions fitted to public runs.
    Example: 8 TFLOP, 0.2 of attention, 4.6 GB, 291 kernels of 5 µs, 1 chunk, 165 TFLOP/s at 0.4 and 0.2,
    1,008 GB/s at 0.8: 121.2 ms of arithmetic, 5.7 of loads, 6.1 of attention, 1.5 of launches: 128.7 ms.
    """
    chunk_s = hand_over_s(
        memory_s=weight_bytes / (bandwidth_fraction * bytes_per_s),
        compute_s=flop / (chunks * compute_fraction * flop_per_s),
    )
    attention_s = attention_flop / (attention_fraction * flop_per_s)
    alone_s = chunks * (chunk_s + kernels * launch_s) + attention_s
    return alone_s * (chunks + stages - 1) / (chunks * stages)
