"""The decode loop against a plain float64 model with contiguous keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from capplan import catalog
from capplan.calibrate.loop import DecodeLoop, LoopShape, loop_shape
from capplan.calibrate.step_check import LIMIT, check_step, reference, relative_error
from capplan.errors import InputError

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="the decode loop runs on torch")

SHAPE = LoopShape(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocab=300, layers=3)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def made(dtype: str = "bf16", **options: object) -> DecodeLoop:
    return DecodeLoop(SHAPE, dtype=dtype, device=CPU, distinct=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "w8a16", "int8", "w4a16"])
@pytest.mark.parametrize("context", [1, 37, 600], ids=["the first token", "a part of a block", "two chunks"])
def test_step_equals_the_plain_model(dtype: str, context: int) -> None:
    loop = made(dtype)
    loop.start(batch=3, context=context)
    expected = reference(loop)
    # 8-bit activations round each input to 1/127 of its row's largest.
    limit = 4e-2 if dtype == "int8" else LIMIT
    assert relative_error(loop.hidden_state(), expected) < limit


def test_a_wrong_kernel_is_seen() -> None:
    loop = made()
    loop.start(batch=2, context=40)
    expected = reference(loop)
    loop.table = loop.table.flip(1)  # another order of the blocks: other keys
    assert relative_error(loop.hidden_state(), expected) > LIMIT


def test_blocks_are_shuffled() -> None:
    loop = made()
    loop.start(batch=4, context=200)
    flat = loop.table.flatten().tolist()
    assert sorted(flat) == list(range(len(flat)))
    assert flat != sorted(flat)


def test_twin_without_blocks_gives_the_same_step() -> None:
    loop = made()
    loop.start(batch=2, context=700)
    flat = loop.contiguous()
    paged = loop.hidden_state()
    assert relative_error(loop.hidden_state(flat=flat), paged.double()) < 1e-2


def test_greedy_tokens_follow_the_plain_model() -> None:
    """Five steps: each token is the plain model's best, or as good as it within rounding."""
    loop = made()
    loop.start(batch=2, context=20, room=8)
    head = loop.head.dense().double()
    for _ in range(5):
        logits = reference(loop) @ head.T
        (tokens,) = loop.decode(1)
        for row, token in enumerate(tokens):
            assert float(logits[row].max() - logits[row, token]) < 0.05
    assert loop.lengths.tolist() == [25, 25]


def test_prompt_in_one_step_equals_its_tokens_one_by_one() -> None:
    """The last token of a prompt of 24, worked on at once and decoded."""
    loop = made()
    loop.start_prompt(tokens=24)
    prompt, table = loop.tokens, loop.table[:1]
    at_once = loop.hidden_state()[-1:]
    loop.prompt, loop.table = False, table
    for place in range(24):
        loop.tokens = prompt[place : place + 1]
        loop.positions = torch.tensor([place], dtype=torch.int32)
        loop.lengths = loop.positions + 1
        one = loop.hidden_state()
    assert relative_error(one, at_once.double()) < LIMIT


def test_fp8_cache_is_near_the_plain_model() -> None:
    loop = made(kv_dtype="fp8")
    loop.start(batch=2, context=50)
    assert relative_error(loop.hidden_state(), reference(loop)) < 5e-2


def test_watch_names_every_operation() -> None:
    loop = made()
    loop.start(batch=1, context=5)
    names: list[str] = []

    def watch(name: str, run: object, *arguments: object) -> object:
        names.append(name)
        return run(*arguments)  # type: ignore[operator]

    loop.watch = watch
    loop.step()
    assert names.count("qkv") == names.count("attention") == SHAPE.layers
    assert names.count("norm") == 2 * SHAPE.layers
    assert set(names) == {*SHAPE.linears, *SHAPE.small_bytes, "attention", "lm_head"}


def test_shape_of_a_catalog_model() -> None:
    shape = loop_shape(catalog.load_model("llama-3.2-1b"), 4)
    assert shape.linears == {
        "qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192),
    }  # fmt: skip
    assert (shape.layers, shape.vocab) == (4, 128_256)
    assert shape.kv_bytes(10, 2) == 2 * 10 * 8 * 64 * 2


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gemma-2-9b", "deepseek-v3", "bloom-7b1"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no plain dense model"):
        loop_shape(catalog.load_model(name))


def test_check_step_refuses_a_broken_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_step(SHAPE, "bf16", CPU)["relative_error"] < LIMIT
    whole = DecodeLoop.hidden_state
    monkeypatch.setattr(DecodeLoop, "hidden_state", lambda self, **options: whole(self) * 1.1)
    with pytest.raises(InputError, match="off a plain model"):
        check_step(SHAPE, "bf16", CPU)
