"""Physics of one kernel: work, traffic, and the time below which it cannot end.

Every function is keyword-only. Peaks are dense; times are seconds, rates are per second.
"""


def gemm_flop(*, m: float, n: int, k: int) -> float:
    """Work of an (m × k) · (k × n) product, in FLOP.

        2 · m · n · k

    Holds for: one multiply and one add per term; m = 1 is a GEMV.
    Source: serving lesson, "Prefill and Decode Phases" (GEMM, GEMV).
    Example: one token through 4096 × 14336: 117,440,512 FLOP.
    """
    return 2 * m * n * k


def gemm_bytes(*, m: float, n: int, k: int, weight_bits: float, activation_bits: float = 16) -> float:
    """Least memory traffic of that product: weights, input and output once each, in bytes.

        (n · k · weight_bits + m · (k + n) · activation_bits) / 8

    Holds for: a cache that keeps nothing from before. Source: serving lesson, "Phase 2: Decode".
    Example: one token through 4096 × 14336 in fp16: 117,440,512 + 36,864 = 117,477,376 B.
    """
    return (n * k * weight_bits + m * (k + n) * activation_bits) / 8


def attention_flop(*, queries: int, context: int, heads: int, head_dim: int) -> float:
    """Work of softmax(Q Kᵀ / √d_k) V in one layer, in FLOP.

        4 · queries · context · heads · head_dim        (2 for Q Kᵀ, 2 for the product with V)

    Holds for: every query against the whole context; a causal mask halves a square.
    Source: serving lesson, the attention formula of "KV Cache Optimization".
    Example: one token against 4,096 with 32 heads of 128: 67,108,864 FLOP.
    """
    return 4 * queries * context * heads * head_dim


def uncached_projections(*, tokens: int) -> int:
    """K and V projections computed to reach `tokens` tokens one by one without a KV cache.

        N · (N + 1) / 2         (with the cache: N)

    Holds for: one layer, no cache: every step projects all tokens before it again.
    Source: serving lesson, "Without caching … O(N²)"; flashcard lesson, "Why does the KV cache exist?".
    Example: 1,001 tokens: 501,501 instead of 1,001.
    """
    return tokens * (tokens + 1) // 2


def arithmetic_intensity(*, flop: float, bytes_moved: float) -> float:
    """Work per byte of memory traffic, in FLOP/B.

        flop / bytes

    Holds for: anything with traffic. Source: serving lesson, "High Arithmetic Intensity (FLOPS / byte)".
    Example: 140 GFLOP over 140 GB: 1.
    """
    return flop / bytes_moved


def ridge_intensity(*, flop_per_s: float, bytes_per_s: float) -> float:
    """Intensity at which a device's compute and memory limits meet, in FLOP/B.

        peak / bandwidth        (below: memory-bound; above: compute-bound)

    Holds for: dense peaks. Source: roofline model (Williams et al. 2009).
    Example: 312 TFLOP/s over 2.0 TB/s: 156.
    """
    return flop_per_s / bytes_per_s


def bandwidth_bound_s(*, bytes_moved: float, bytes_per_s: float) -> float:
    """Least time to move bytes, in seconds.

        bytes / bandwidth

    Holds for: a bound; no kernel reaches the datasheet's bandwidth.
    Source: serving lesson, "The Memory Bandwidth Trap in Decode Phase".
    Example: 140 GB at 2.0 TB/s: 0.07 s.
    """
    return bytes_moved / bytes_per_s


def compute_bound_s(*, flop: float, flop_per_s: float) -> float:
    """Least time to do the work, in seconds.

        flop / peak

    Holds for: a bound; no kernel reaches the datasheet's peak.
    Source: serving lesson, "Hardware Regime: Compute-bound".
    Example: 312 GFLOP at 312 TFLOP/s: 0.001 s.
    """
    return flop / flop_per_s


def bound_s(*, flop: float, bytes_moved: float, flop_per_s: float, bytes_per_s: float) -> float:
    """Least time of a kernel, in seconds.

        max(flop / peak, bytes / bandwidth)

    Holds for: work and traffic that overlap wholly. Source: roofline model (Williams et al. 2009).
    Example: 140 GFLOP and 140 GB at 312 TFLOP/s and 2.0 TB/s: 0.07 s, the memory's.
    """
    return max(
        compute_bound_s(flop=flop, flop_per_s=flop_per_s),
        bandwidth_bound_s(bytes_moved=bytes_moved, bytes_per_s=bytes_per_s),
    )


def bandwidth_fraction(*, bytes_moved: float, time_s: float, bytes_per_s: float) -> float:
    """Share of the memory bandwidth that was used (MBU).

        bytes / (time · bandwidth)

    Holds for: the bytes the work needs, not those a kernel fetched twice.
    Source: serving lesson, "Token Generation Rate … near memory bandwidth capacity".
    Example: 140 GB in 0.1 s of 2.0 TB/s: 0.7.
    """
    return bytes_moved / (time_s * bytes_per_s)
