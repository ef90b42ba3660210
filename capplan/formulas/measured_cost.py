"""Times read off a device's own measured points: tables over rows, and what lies between and beyond them.

Where `op_cost` puts a shape through fitted fractions, these interpolate: an exact (n, k) that was timed is
known at the measured m, and the rest is a line. Times in tables are microseconds. Tables rise with every
axis (the fit sees to that), so nothing here is faster with more work.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

from capplan.formulas.blend import MICROSECOND, Number, divisor

NANOSECOND: Final = 1e-9


def on_line(*, x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """y at x of a broken line through measured points.

    Below the first point it is that point's value; beyond the last the last stretch goes on, and from a
    single point y grows with x.
    Holds for: xs rising, ys not falling. Example: xs 1, 3, ys 10, 20: 15 at 2, 25 at 4, 10 at 0.5.
    """
    if x <= xs[0]:
        return ys[0]
    if len(xs) == 1:
        return ys[0] * x / xs[0]
    place = min(bisect_right(xs, x), len(xs) - 1)
    low, high = xs[place - 1], xs[place]
    return ys[place - 1] + (ys[place] - ys[place - 1]) * (x - low) / (high - low)


def gemm_s(*, m: float, n: int, k: int, fit: Mapping[str, Any]) -> float:
    """Time of an (m × k) · (k × n) product, in seconds.

        the (n, k) that was timed    between its rows m, beyond them along the last stretch
        another one                  fixed(m) + weight(m) · n · k,   each between the rows m

    `fit`: `shapes` {"n x k": {m: […], us: […]}}, and `affine` {m: […], fixed_us: […], weight_ns: […]}.
    Holds for: one call with its weights out of cache. Source: aiconfigurator's measured kernels, where an
    exact (n, k) over six m is 2 to 6 % off and an affine form 7 to 13 %.
    Example: 1,000 µs at m 1 and 1,200 µs at m 3: 1,100 µs at m 2.
    """
    own = fit["shapes"].get(f"{n} x {k}")
    if own is not None:
        return on_line(x=m, xs=own["m"], ys=own["us"]) * MICROSECOND
    general = fit["affine"]
    fixed = on_line(x=m, xs=general["m"], ys=general["fixed_us"])
    weight = on_line(x=m, xs=general["m"], ys=general["weight_ns"])
    return fixed * MICROSECOND + weight * NANOSECOND * n * k


def elementwise_s(*, name: str, bytes_moved: float, fit: Mapping[str, Any]) -> float | None:
    """Time of a small kernel that was timed by name, in seconds; None for another one.

    `fit`: `named` {name: {bytes: […], us: […]}}. Example: as `on_line`, over the bytes moved.
    """
    own = fit.get("named", {}).get(name)
    return None if own is None else on_line(x=bytes_moved, xs=own["bytes"], ys=own["us"]) * MICROSECOND


def decode_attention_s(*, batch: float, kv_tokens: Number, table: Mapping[str, Any]) -> Number:
    """Time of paged attention of one query a sequence, in seconds, of the heads that were timed.

        t = fixed(batch) + token(batch) · kv_tokens / batch

    `table`: {batch: […], fixed_us: […], token_ns: […]}: for each batch a line over the mean context, each
    number between the batches. Holds for: sequences of like length. Source: a device's own points; an affine
    form is nearer to measured attention than a sparse table (4 to 8 % against 5 to 11 %).
    Example: fixed 100 µs, 10 ns a token, batch 1, 1,000 tokens: 110 µs.
    """
    fixed = on_line(x=batch, xs=table["batch"], ys=table["fixed_us"])
    token = on_line(x=batch, xs=table["batch"], ys=table["token_ns"])
    return fixed * MICROSECOND + token * NANOSECOND * (kv_tokens / divisor(batch))


def prefill_attention_s(
    *, sequences: float, tokens: float, pairs: float, share: float, fit: Mapping[str, float]
) -> float:
    """Time of causal attention of prompts, in seconds: a line over tokens and query-key pairs.

        t = sequences · fixed + share · (token · tokens + pair · pairs)

    `share`: heads · (k + v) of the shape asked over those of the shape that was timed.
    Example: fixed 50 µs, 100 ns a token, 1 ns a pair, one prompt of 1,000 (500,500 pairs): 650.5 µs.
    """
    moved = fit["token_ns"] * tokens + fit["pair_ns"] * pairs
    return sequences * fit["fixed_us"] * MICROSECOND + share * moved * NANOSECOND
