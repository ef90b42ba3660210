"""Is the decode step right? Against a plain model in float64 with its keys and values side by side."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from capplan.calibrate.loop import EPS, DecodeLoop, LoopShape
from capplan.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LIMIT: Final = 2e-2
"""Relative error of the last norm's output: a few bf16 roundings a layer."""
SMALL_FFN: Final = 1024


def check_step(shape: LoopShape, dtype: str, device: "torch.device") -> dict[str, float]:
    """Relative error of two layers' step, with a narrower feed-forward; InputError beyond LIMIT."""
    small = replace(shape, layers=2, ffn=min(shape.ffn, SMALL_FFN), vocab=min(shape.vocab, 512))
    loop = DecodeLoop(small, dtype=dtype, device=device, distinct=True)
    loop.start(batch=2, context=37)
    expected = reference(loop)
    error = relative_error(loop.hidden_state(), expected)
    if not error <= LIMIT:
        raise InputError(
            f"the {dtype} step is {error:.1%} off a plain model: a kernel is wrong on this device",
            where="capplan profile",
            hint="please report it, with the output of `capplan doctor`",
        )
    return {"relative_error": float(f"{error:.2g}"), "limit": LIMIT}


def relative_error(found: "Tensor", expected: "Tensor") -> float:
    """|found − expected| over |expected|, as norms."""
    return float((found.double() - expected).norm() / expected.norm())


def reference(loop: DecodeLoop) -> "Tensor":
    """The last norm's output of the loop's next step, in float64; the loop is left as it was."""
    import torch

    shape, positions = loop.shape, loop.positions.long()
    flat = [(cache.keys.double(), cache.values.double()) for cache in loop.contiguous()]
    residual = loop.embedding[loop.tokens.long()].double()

    def normed(x: "Tensor") -> "Tensor":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)

    half = shape.head_dim // 2
    cos, sin = (part[:, None] for part in loop.rope[positions].double().chunk(2, -1))

    def turned(x: "Tensor") -> "Tensor":
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    rows, group = torch.arange(len(positions)), shape.heads // shape.kv_heads
    for number, layer in enumerate(loop.layers):
        matrix = {name: made.dense().double() for name, made in layer.items()}
        heads = (normed(residual) @ matrix["qkv"].T).view(len(positions), -1, shape.head_dim)
        first, last_key = shape.heads, shape.heads + shape.kv_heads
        query, key, value = heads[:, :first], heads[:, first:last_key], heads[:, last_key:]
        keys, values = flat[number % len(flat)]
        keys[rows, positions], values[rows, positions] = turned(key), value
        out = []
        for row, last in enumerate(positions.tolist()):
            k, v = (each[row, : last + 1].repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("hd,thd->ht", turned(query)[row], k) * shape.head_dim**-0.5
            out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).flatten())
        residual = residual + torch.stack(out) @ matrix["o"].T
        gate, up = (normed(residual) @ matrix["gate_up"].T).chunk(2, -1)
        residual = residual + (torch.nn.functional.silu(gate) * up) @ matrix["down"].T
    return normed(residual)
