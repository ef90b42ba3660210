"""What of an operation's shape lies outside the shapes that its calibration measured."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from capplan.device_rates import Rates
from capplan.op_costs import Bounds
from capplan.work import Collective, Experts, Gemm, Mix

SLACK: Final = 2.0
"""A size beyond its range by less than this factor counts as inside: the forms are smooth."""

Shape = tuple[str, str, dict[str, float]]
"""Operation and dtype as in a calibration, and the sizes that its `validity` names."""


def outside(costs: Bounds, method: str, arguments: tuple[Any, ...]) -> str:
    """The sizes of one call of `costs.method` far outside what was measured, in words; "" for none.

    Example: a product of 40,000 rows by a fit of 1 to 8,192: "m 40,000 (1 to 8,192)".
    """
    if method not in _SHAPES:
        return ""
    operation, dtype, sizes = _SHAPES[method](costs.rates, *arguments)
    ranges: Mapping[str, Any] = costs.ranges(operation, dtype)
    far = [
        f"{name} {sizes[name]:,.0f} ({low:,.0f} to {high:,.0f})"
        for name, (low, high) in ranges.items()
        # Less than one is the mean of some ranks that have one and some that have none.
        if name in sizes and not low / SLACK <= max(1.0, sizes[name]) <= high * SLACK
    ]
    return ", ".join(far)


def _gemm(rates: Rates, shape: Gemm, m: float) -> Shape:
    return "gemm", rates.runs(shape.dtype), {"m": m, "n": shape.n, "k": shape.k}


def _decode(rates: Rates, mix: Mix, batch: float, kept: float) -> Shape:
    own = mix.mixing
    operation = {"attention": "decode_attention", "latent": "mla_decode"}.get(own.form, own.form)
    sizes = {
        "batch": batch,
        "kv_tokens": kept,
        "context": kept / batch,
        "heads": own.heads,
        "kv_heads": own.kv_heads,
    }
    return operation, mix.kernel_dtype, sizes


def _prefill(rates: Rates, mix: Mix, sequences: float, tokens: float, pairs: float) -> Shape:
    own = mix.mixing
    operation = {"attention": "prefill_attention", "latent": "mla_prefill"}.get(own.form, own.form)
    sizes = {"sequences": sequences, "tokens": tokens, "pairs": pairs, "heads": own.heads}
    return operation, mix.kernel_dtype, sizes


def _experts(rates: Rates, shape: Experts, tokens: float) -> Shape:
    sizes = {
        "tokens": tokens,
        "hidden": shape.hidden,
        "inter": shape.inter,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "tp": shape.tp,
        "ep": shape.ep,
    }
    return "experts", rates.runs(shape.dtype), sizes


def _collective(rates: Rates, shape: Collective, count: float) -> Shape:
    return shape.op, str(shape.ranks), {"bytes_moved": shape.buffer_bytes(count), "ranks": shape.ranks}


_SHAPES: Final[dict[str, Callable[..., Shape]]] = {
    "gemm": _gemm,
    "decode": _decode,
    "prefill": _prefill,
    "experts": _experts,
    "collective": _collective,
}
