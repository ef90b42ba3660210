"""Greedy sampling in Triton: the index of the largest logit of every row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.kernels.device_code import jit, needs_triton, tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 4096


@jit
def greedy_sampling_kernel(logits, tokens, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [rows]; logits fp16/bf16/fp32 [rows, vocabulary] contiguous, tokens int32 [rows].

    Every lane keeps its own best, so that the row is reduced across threads once.
    """
    row = tl.program_id(0)
    first = row.to(tl.int64) * vocabulary
    lane = tl.arange(0, block)
    highest = tl.full([block], -float("inf"), tl.float32)
    best = tl.full([block], 2147483647, tl.int32)
    for start in range(0, vocabulary, block):
        at = start + lane
        value = tl.load(logits + first + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        better = (at < vocabulary) & ((value > highest) | (best == 2147483647))
        highest = tl.where(better, value, highest)
        best = tl.where(better, at, best)
    # The lowest index among the lanes that hold the maximum.
    tl.store(tokens + row, tl.min(tl.where(highest == tl.max(highest, 0), best, 2147483647), 0))


def greedy_sampling(logits: Tensor) -> Tensor:
    """tokens[i] = the smallest c with logits[i, c] = max(logits[i]).

    logits fp16/bf16/fp32 [rows, vocabulary], contiguous, no NaN → int32 [rows].
    Raises ValueError for another shape.
    """
    import torch

    if logits.ndim != 2 or logits.shape[1] < 1:
        raise ValueError(f"logits: expected [rows, vocabulary], got {list(logits.shape)}")
    if logits.device.type != "cpu":
        return launch_greedy_sampling(logits)
    return logits.argmax(-1).to(torch.int32)


def launch_greedy_sampling(logits: Tensor) -> Tensor:
    """The Triton route, also for CPU tensors under the interpreter; arguments as greedy_sampling."""
    import torch

    needs_triton("greedy_sampling")
    if not logits.is_contiguous():
        raise ValueError("logits: must be contiguous")
    tokens = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    greedy_sampling_kernel[(logits.shape[0],)](logits, tokens, logits.shape[1], block=BLOCK, num_warps=8)
    return tokens


def greedy_sampling_reference(logits: Tensor) -> Tensor:
    """The formula of greedy_sampling in float64: int32 [rows]."""
    import torch

    values = logits.double()
    first = (values == values.amax(-1, keepdim=True)).to(torch.int32).argmax(-1)
    return first.to(torch.int32)
