"""Both references in one decode loop, against the same model with no pages and no 4-bit weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from capplan.kernels.paged_attention import paged_attention_reference, write_token
from capplan.kernels.quantized_gemm import (
    Int4Weight,
    dequantize_int4,
    quantize_int4,
    quantized_gemm_reference,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = pytest.importorskip("torch", reason="the kernels' references run on torch")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, POSITIONS = 64, 4, 2, 16, 96, 50, 2, 64
BLOCK_SIZE = 4
SHAPES = {  # outputs, inputs
    "q": (HEADS * HEAD_DIM, HIDDEN),
    "k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}
Layer = dict[str, Int4Weight]


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class TinyModel:
    """Two pre-norm GQA blocks of random 4-bit weights; embedding and head stay as they are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def weight(shape: tuple[int, int], symmetric: bool) -> Int4Weight:
            values = torch.randn(*shape, generator=generator) / math.sqrt(shape[1]) * 2
            return quantize_int4(values, group_size=32, symmetric=symmetric)

        self.layers: list[Layer] = [
            {name: weight(shape, symmetric=layer == 1) for name, shape in SHAPES.items()}
            for layer in range(LAYERS)
        ]
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.place = torch.randn(POSITIONS, HIDDEN, generator=generator)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator) / math.sqrt(HIDDEN)


class PagedDecoder:
    """One token a sequence and step; keys and values only ever in the blocks."""

    def __init__(self, model: TinyModel, window: int | None, num_blocks: int) -> None:
        self.model, self.window = model, window
        shape = (LAYERS, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.keys = torch.full(shape, math.nan)
        self.values = torch.full(shape, math.nan)

    def step(self, tokens: list[int], positions: list[int], table: Tensor) -> Tensor:
        batch = len(tokens)
        at = torch.tensor(positions, dtype=torch.int32)
        x = self.model.embedding[tokens] + self.model.place[positions]
        for index, layer in enumerate(self.model.layers):
            h = norm(x)
            q, k, v = (
                quantized_gemm_reference(h, layer[name]).reshape(batch, -1, HEAD_DIM) for name in "qkv"
            )
            write_token(k, v, self.keys[index], self.values[index], table, at)
            attended = paged_attention_reference(
                q, self.keys[index], self.values[index], table, at + 1, window=self.window
            )
            x = x + quantized_gemm_reference(attended.reshape(batch, -1), layer["o"])
            h = norm(x)
            gate, up = (quantized_gemm_reference(h, layer[name]) for name in ("gate", "up"))
            x = x + quantized_gemm_reference(torch.nn.functional.silu(gate) * up, layer["down"])
        return norm(x) @ self.model.head.T


def dense_logits(model: TinyModel, tokens: list[int], window: int | None) -> Tensor:
    """Float64, the whole sequence at once, a causal mask: logits of the last position."""
    n = len(tokens)
    x = (model.embedding[tokens] + model.place[:n]).double()
    behind = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden_tokens = (behind < 0) | (behind >= (n if window is None else window))
    for layer in model.layers:
        matrix = {name: dequantize_int4(weight).double().T for name, weight in layer.items()}
        h = norm(x)
        q, k, v = ((h @ matrix[name]).reshape(n, -1, HEAD_DIM).transpose(0, 1) for name in "qkv")
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=0) for each in (k, v))
        scores = (q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)).masked_fill(hidden_tokens, -math.inf)
        attended = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(n, -1)
        x = x + attended @ matrix["o"]
        h = norm(x)
        gate = torch.nn.functional.silu(h @ matrix["gate"])
        x = x + (gate * (h @ matrix["up"])) @ matrix["down"]
    return (norm(x) @ model.head.double().T)[-1]


@pytest.mark.parametrize("window", [None, 6], ids=["full attention", "window of 6"])
def test_greedy_decode_equals_the_unpaged_unquantised_model(window: int | None) -> None:
    """Three sequences over one cached prefix of two blocks, each with a prompt of its own."""
    model = TinyModel()
    decoder = PagedDecoder(model, window, num_blocks=40)
    prefix = [3, 14, 15, 9, 26, 5, 35, 8]
    prompts = [prefix + [tail] * (1 + 2 * tail) for tail in range(3)]  # 9, 11 and 13 tokens
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table = ids[2:].reshape(-1)[:30].reshape(3, 10).clone()
    table[:, :2] = ids[:2]

    for position, token in enumerate(prefix):  # once, for all three
        decoder.step([token], [position], table[:1])
    histories = [list(prefix) for _ in prompts]
    for _ in range(18):
        for prompt, history in zip(prompts, histories, strict=True):
            if len(history) < len(prompt):
                history.append(prompt[len(history)])
            else:
                history.append(int(dense_logits(model, history, window).argmax()))
        logits = decoder.step([h[-1] for h in histories], [len(h) - 1 for h in histories], table)
        for row, history in enumerate(histories):
            expected = dense_logits(model, history, window)
            assert torch.allclose(logits[row].double(), expected, rtol=0, atol=2e-5)
            assert int(logits[row].argmax()) == int(expected.argmax())
    assert len({tuple(history[-5:]) for history in histories}) == 3  # they did diverge
