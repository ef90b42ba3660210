"""Time of one operation of a step, in seconds: its shape, a device's datasheet rates, fitted numbers.

Every function is keyword-only and takes plain floats or numpy arrays. `fit` holds the numbers of one
(operation, dtype, engine): fixed times (`_us`, `_ns`), fractions of the datasheet's dense peak (`compute`)
and bandwidth (`memory`), the sharpness `p` of the hand-over between the two. More work, tokens or context
never takes less time; more bandwidth or FLOP/s never takes more.
"""

from collections.abc import Mapping
from typing import Final

from capplan.formulas.attention_cost import (
    decode_attention_s,
    mla_decode_s,
    mla_prefill_s,
    prefill_attention_s,
)
from capplan.formulas.blend import MICROSECOND, Number, read_bytes, rounded_up, smaller, soft_maximum

__all__ = [
    "TILE_ROWS",
    "collective_s",
    "decode_attention_s",
    "elementwise_s",
    "experts_s",
    "gemm_s",
    "mla_decode_s",
    "mla_prefill_s",
    "prefill_attention_s",
]

TILE_ROWS: Final = (16, 32, 64, 128, 256)
"""Heights of output tiles that GEMM kernels come in; `tile_m` is the least an engine has."""


def gemm_s(
    *,
    m: Number,
    n: Number,
    k: Number,
    weight_bits: float,
    activation_bits: float = 16,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
    cache_bytes: Number = 0.0,
) -> Number:
    """Time of an (m × k) · (k × n) product, in seconds.

        t = t0 + quantise · m · k / bw + soft(compute, memory)
        compute = least over tile heights tm ≥ tile_m of
                  waves · SMs · 2 · tm · tile_n · k / (compute · e(tm) · peak)
        waves   = steps · ⌈x⌉ + (1 − steps) · x,   x = ⌈m/tm⌉ · ⌈n/tile_n⌉ / SMs
        e(tm)   = tm / (tm + half_rows), 1 at the highest tile
        memory  = (weights + activations) / (memory · bw)

    A product narrower than the device still takes the time of one wave: long k, few columns are slow.
    `quantise`: bytes moved a activation element before the product starts (activation quantisation).
    `cache_bytes`: cache that may hold the weights from the call before; 0 in a model, whose other layers
    evict them. Holds for: one call inside a CUDA graph. Source: fits of measured kernels.
    Example: tests/formulas/test_op_cost.py works one by hand.
    """
    compute: Number = None
    highest = TILE_ROWS[-1]
    for rows in TILE_ROWS:
        if rows < fit["tile_m"]:
            continue
        tiles = rounded_up(m, rows) / rows * (rounded_up(n, fit["tile_n"]) / fit["tile_n"])
        share = tiles / sms
        waves = fit["steps"] * rounded_up(share, 1) + (1 - fit["steps"]) * share
        rate = flop_per_s * fit["compute"] * rows / (rows + fit["half_rows"])
        rate = rate * (highest + fit["half_rows"]) / highest
        time = waves * sms * 2 * rows * fit["tile_n"] * k / rate
        compute = time if compute is None else smaller(compute, time)
    weights = read_bytes(
        moved=n * k * weight_bits / 8,
        cache_bytes=cache_bytes,
        reach=fit["cache_reach"],
        speed=fit["cache_speed"],
    )
    memory = (weights + m * (n + k) * activation_bits / 8) / (fit["memory"] * bytes_per_s)
    fixed = fit["t0_us"] * MICROSECOND + fit["quantise"] * m * k / bytes_per_s
    return fixed + soft_maximum(first=compute, second=memory, p=fit["p"])


def experts_s(
    *,
    tokens: Number,
    hidden: Number,
    inter: Number,
    top_k: Number,
    experts: Number,
    ep: Number = 1,
    tp: Number = 1,
    weight_bits: float,
    activation_bits: float = 16,
    gated: Number = True,
    skew: Number = 0.0,
    flop_per_s: float,
    bytes_per_s: float,
    sms: int,
    fit: Mapping[str, float],
) -> Number:
    """Time of the routed experts of one layer on its busiest rank, in seconds.

        rows    = tokens · top_k / ep · ep^(b / (1 + b)),   b = busy · skew      (one rank gets more, not all)
        touched = experts/ep · (1 − (1 − top_k/experts)^(tokens^(1 / (1 + gather · skew))))
        compute = 2 · matrices · (rows + touched · pad_rows) · hidden · inter/tp / (compute · peak)
        memory  = touched · matrices · hidden · inter/tp · weight_bits/8 / (memory · bw)
        t = t0 + expert · experts/ep / SMs + traffic of permuted activations / bw + soft(compute, memory)

    `inter` and `experts` are the whole layer's; the rank holds inter/tp of experts/ep. matrices: 3 gated,
    2 plain. `skew`: 0 balanced, else the exponent of the router's power law. Holds for: all routed experts
    of one call, permutation and activation included; not for the router. Source: fits of measured kernels.
    """
    matrices = 2 + gated
    local, width = experts / ep, inter / tp
    busy = fit["busy"] * skew
    rows = tokens * top_k / ep * ep ** (busy / (1 + busy))
    spread = tokens ** (1 / (1 + fit["gather"] * skew))
    touched = local * (1 - (1 - top_k / experts) ** spread)
    padded = rows + touched * fit["pad_rows"]
    compute = 2 * matrices * padded * hidden * width / (fit["compute"] * flop_per_s)
    weights = touched * matrices * hidden * width * weight_bits / 8
    memory = weights / (fit["memory"] * bytes_per_s)
    permuted = (fit["permute"] * tokens * top_k + fit["permute_local"] * rows) * hidden
    moved = (permuted + fit["activate"] * rows * width) * activation_bits / 8
    fixed = (fit["t0_us"] + fit["expert_us"] * local / sms) * MICROSECOND
    return fixed + moved / bytes_per_s + soft_maximum(first=compute, second=memory, p=fit["p"])


def collective_s(
    *, bytes_moved: Number, ranks: int, link_bytes_per_s: float, fit: Mapping[str, float]
) -> Number:
    """Time of a collective over a buffer of `bytes_moved`, in seconds.

        soft(t0, bytes · (ranks − 1) / ranks / (memory · link))

    `link_bytes_per_s` is one direction. An all-reduce sends twice, so its fraction stays near half unless
    the switch adds. Holds for: one box, the rank count that was fitted. Source: ring algorithms (nccl-tests'
    bus bandwidth), fits of measured calls.
    Example: 1 GB over 4 ranks at 300 GB/s, all of it, no floor: 2.5 ms.
    """
    wire = bytes_moved * (ranks - 1) / ranks / (fit["memory"] * link_bytes_per_s)
    return soft_maximum(first=fit["t0_us"] * MICROSECOND, second=wire, p=fit["p"])


def elementwise_s(
    *, bytes_moved: Number, bytes_per_s: float, fit: Mapping[str, float], cache_bytes: Number = 0.0
) -> Number:
    """Time of a kernel that only moves data (norm, rotary, activation, add), in seconds.

        soft(t0, bytes / (memory · bw)), the bytes that the cache holds faster

    Holds for: reads and writes counted once each; `cache_bytes`: the last-level cache, which holds what the
    kernel before has written. Source: fits of measured kernels.
    Example: 1 MB at 1 TB/s, all of it, no floor: 1 µs.
    """
    moved = read_bytes(
        moved=bytes_moved, cache_bytes=cache_bytes, reach=fit["cache_reach"], speed=fit["cache_speed"]
    )
    memory = moved / (fit["memory"] * bytes_per_s)
    return soft_maximum(first=fit["t0_us"] * MICROSECOND, second=memory, p=fit["p"])
