"""Causal attention of a prompt, or of its next chunk, through torch's SDPA: FlashAttention where it can.

Prefill is compute-bound, and torch ships the kernels that reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of a sequence's last q_len tokens over its kv_len tokens; token i sees those up to itself.

        out[b, i, h] = Σ_t softmax_t(softmax_scale · query[b, i, h] · key[b, t]) · value[b, t]
        t from max(0, p + 1 - window) to p,   p = kv_len - q_len + i

    | tensor     | dtype          | shape                              |
    |------------|----------------|------------------------------------|
    | query      | fp16/bf16/fp32 | [batch, q_len, heads, head_dim]    |
    | key, value | as query       | [batch, kv_len, kv_heads, head_dim], kv_len ≥ q_len |
    | returns    | as query       | as query                           |

    A window builds a [q_len, kv_len] mask, which keeps SDPA from FlashAttention.
    Raises ValueError, naming the tensor, for a wrong shape or dtype.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right

    _check(query, key, value, window)
    q_len, kv_len = query.shape[1], key.shape[1]
    options: dict[str, Any] = {"scale": softmax_scale, "enable_gqa": query.shape[2] != key.shape[2]}
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if window is not None and window < kv_len:
        options["attn_mask"] = _visible(q_len, kv_len, window, query)
    elif q_len == kv_len:
        options["is_causal"] = True
    elif q_len > 1:
        mask = causal_lower_right(q_len, kv_len)
        options["attn_mask"] = mask if query.is_cuda else _visible(q_len, kv_len, kv_len, query)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    return out.transpose(1, 2)


def prefill_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The formula of prefill_attention in float64: [batch, q_len, heads, head_dim]."""
    import math

    import torch

    _check(query, key, value, window)
    group = query.shape[2] // key.shape[2]
    k, v = (tensor.double().repeat_interleave(group, 2) for tensor in (key, value))
    scale = query.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bihd,bthd->bhit", query.double(), k) * scale
    seen = _visible(query.shape[1], key.shape[1], window or key.shape[1], query)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("bhit,bthd->bihd", weights, v)


def _visible(q_len: int, kv_len: int, window: int, like: Tensor) -> Tensor:
    """Boolean [q_len, kv_len]: whether token kv_len - q_len + i sees token t."""
    import torch

    position = torch.arange(kv_len - q_len, kv_len, device=like.device)[:, None]
    token = torch.arange(kv_len, device=like.device)[None, :]
    return (token <= position) & (token > position - window)


def _check(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> None:
    if query.ndim != 4:
        raise ValueError(f"query: expected [batch, q_len, heads, head_dim], got {list(query.shape)}")
    batch, q_len, heads, head_dim = query.shape
    if key.ndim != 4 or (key.shape[0], key.shape[3]) != (batch, head_dim) or key.shape[1] < q_len:
        raise ValueError(
            f"key: expected [{batch}, {q_len} or more, kv_heads, {head_dim}], got {list(key.shape)}"
        )
    if key.shape[2] < 1 or heads % key.shape[2]:
        raise ValueError(f"query: {heads} heads are not a multiple of {key.shape[2]} KV heads")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name}: expected {query.dtype}, got {tensor.dtype}")
    if value.shape != key.shape:
        raise ValueError(f"value: expected {list(key.shape)}, got {list(value.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 token, got {window}")
