"""The paged-attention reference against a dense gather and a plain softmax in float64."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.kernels.paged_attention import paged_attention_reference, write_token

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = pytest.importorskip("torch", reason="the kernels' references run on torch")

FP32_RELATIVE = 2e-6  # a few hundred fp32 sums, seen up to 6e-7
ROUNDING = {"float32": FP32_RELATIVE, "bfloat16": 2**-8, "float16": 2**-11}  # half a step + sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """Arguments of one call, by the names the kernel gives them."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor

    def run(self, **options: Any) -> Tensor:
        return paged_attention_reference(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.context_lens,
            **options,
        )


def make(
    lengths: list[int],
    *,
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "float32",
    window: int | None = None,
    seed: int = 0,
) -> Paged:
    """Scattered blocks; NaN in every slot and nonsense in every table entry not to be read."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    columns = [-(-length // block_size) for length in lengths]
    spare = 3
    ids = torch.randperm(sum(columns) + spare, generator=generator).to(torch.int32)
    table = torch.full((len(lengths), max(columns) + 1), -1, dtype=torch.int32)
    table[:, -1] = 10**9
    shape = (len(ids), block_size, kv_heads, head_dim)
    keys = torch.full(shape, math.nan, dtype=kind)
    values = torch.full(shape, math.nan, dtype=kind)
    used = 0
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for column in range(columns[row]):
            start = column * block_size
            if start + block_size <= first:
                continue  # before the window: stays -1, a block already given back
            table[row, column] = block = ids[used]
            used += 1
            low, high = max(first - start, 0), min(length - start, block_size)
            for cache in (keys, values):
                cache[block, low:high] = torch.randn(high - low, kv_heads, head_dim, generator=generator).to(
                    kind
                )
    return Paged(
        query=torch.randn(len(lengths), heads, head_dim, generator=generator).to(kind),
        key_cache=keys,
        value_cache=values,
        block_table=table,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
    )


def dense(case: Paged, *, softmax_scale: float | None = None, window: int | None = None) -> Tensor:
    """Float64, nothing online and nothing grouped: gather, repeat the KV heads, softmax, sum."""
    batch, heads, head_dim = case.query.shape
    block_size, kv_heads = case.key_cache.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    output = torch.empty(batch, heads, head_dim, dtype=torch.float64)
    for row in range(batch):
        length = int(case.context_lens[row])
        tokens = range(max(0, length - (window or length)), length)
        where = [(int(case.block_table[row, t // block_size]), t % block_size) for t in tokens]
        keys = torch.stack([case.key_cache[block, slot] for block, slot in where]).double()
        values = torch.stack([case.value_cache[block, slot] for block, slot in where]).double()
        for head in range(heads):
            shared = head * kv_heads // heads
            probability = torch.softmax((keys[:, shared] @ case.query[row, head].double()) * scale, dim=0)
            output[row, head] = probability @ values[:, shared]
    return output


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


EDGE_LENGTHS = [
    pytest.param(1, [1, 2, 3, 37], id="block size 1"),
    pytest.param(16, [1], id="one token of context"),
    pytest.param(16, [15, 16, 17], id="before, on and past a block edge"),
    pytest.param(16, [32, 33, 1, 250], id="ragged over many blocks"),
    pytest.param(128, [127, 128, 129, 1], id="block size 128"),
]
HEADS = [
    pytest.param(8, 8, id="MHA"),
    pytest.param(8, 2, id="GQA"),
    pytest.param(6, 2, id="group of 3"),
    pytest.param(8, 1, id="MQA"),
    pytest.param(1, 1, id="one head"),
]


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("block_size", "lengths"), EDGE_LENGTHS)
def test_equals_dense_attention(block_size: int, lengths: list[int], heads: int, kv_heads: int) -> None:
    case = make(lengths, block_size=block_size, heads=heads, kv_heads=kv_heads)
    assert relative_error(case.run(), dense(case)) < FP32_RELATIVE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_output_is_the_exact_one_rounded_once(head_dim: int, dtype: str) -> None:
    case = make([1, 17, 70], head_dim=head_dim, dtype=dtype)
    output = case.run()
    assert output.dtype == case.query.dtype
    assert output.shape == case.query.shape
    expected = dense(case)
    excess = (output.double() - expected).abs() - ROUNDING[dtype] * expected.abs()
    assert float(excess.max()) < FP32_RELATIVE


def test_long_context_does_not_drift() -> None:
    case = make([3000], heads=2, kv_heads=1)
    assert relative_error(case.run(), dense(case)) < FP32_RELATIVE


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_window_keeps_the_last_tokens_and_reads_no_block_before_them(block_size: int, window: int) -> None:
    case = make([1, 16, 33, 100], block_size=block_size, window=window)
    assert relative_error(case.run(window=window), dense(case, window=window)) < FP32_RELATIVE


def test_two_tokens_by_hand() -> None:
    # Scores ln 1 and ln 3: weights 1/4 and 3/4 of the values 8 and 16 are 14.
    case = Paged(
        query=torch.tensor([[[2.0]]]),
        key_cache=torch.tensor([0.0, math.log(3)]).reshape(2, 1, 1, 1),
        value_cache=torch.tensor([8.0, 16.0]).reshape(2, 1, 1, 1),
        block_table=torch.tensor([[0, 1]], dtype=torch.int32),
        context_lens=torch.tensor([2], dtype=torch.int32),
    )
    assert case.run(softmax_scale=0.5).item() == pytest.approx(14.0, abs=1e-6)
    assert case.run(softmax_scale=1.0).item() == pytest.approx((8 + 9 * 16) / 10, abs=1e-6)
    assert case.run(window=1).item() == 16.0


def test_heads_read_the_kv_head_of_their_group() -> None:
    # One token: the output is its value, so value = KV head number shows who read what.
    case = make([1], heads=6, kv_heads=3)
    case.value_cache[:] = torch.arange(3.0)[:, None]
    assert case.run()[0, :, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    case = make([40], dtype="bfloat16")
    case.query[:] = 60.0
    case.key_cache[:] = 60.0
    case.key_cache[int(case.block_table[0, 1]), 3] = 100.0  # +19,200 over the others
    expected = case.value_cache[int(case.block_table[0, 1]), 3].repeat_interleave(2, dim=0)
    assert torch.equal(case.run()[0], expected)


def test_a_larger_maximum_in_a_later_block_rescales_what_came_before() -> None:
    case = make([48], heads=2, kv_heads=1)
    for column in range(3):
        case.key_cache[int(case.block_table[0, column])] *= 4.0**column
    assert relative_error(case.run(), dense(case)) < FP32_RELATIVE


def test_sequences_share_the_blocks_of_a_common_prefix() -> None:
    case = make([40, 45])
    case.block_table[1, :2] = case.block_table[0, :2]
    assert relative_error(case.run(), dense(case)) < FP32_RELATIVE
    twin = Paged(
        query=case.query[:1].repeat(2, 1, 1),
        key_cache=case.key_cache,
        value_cache=case.value_cache,
        block_table=case.block_table[:1].repeat(2, 1),
        context_lens=case.context_lens[:1].repeat(2),
    )
    first, second = twin.run()
    assert torch.equal(first, second)


def test_cache_may_be_a_strided_view() -> None:
    case = make([5, 20])
    both = torch.stack([case.key_cache, case.value_cache])  # vLLM keeps K and V in one tensor
    interleaved = both.permute(1, 2, 3, 0, 4).contiguous()
    view = Paged(
        query=case.query,
        key_cache=interleaved[..., 0, :],
        value_cache=interleaved[..., 1, :],
        block_table=case.block_table,
        context_lens=case.context_lens,
    )
    assert not view.key_cache.is_contiguous()
    assert torch.equal(view.run(), case.run())


def test_empty_batch_gives_an_empty_answer() -> None:
    case = Paged(
        query=torch.zeros(0, 4, 8),
        key_cache=torch.zeros(1, 16, 2, 8),
        value_cache=torch.zeros(1, 16, 2, 8),
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        context_lens=torch.zeros(0, dtype=torch.int32),
    )
    assert case.run().shape == (0, 4, 8)


CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 60), min_size=1, max_size=4),
        "block_size": st.sampled_from([1, 3, 16, 128]),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([1, 7, 64, 80]),
        "window": st.none() | st.integers(1, 70),
        "seed": st.integers(0, 2**31),
    }
)


def build(shape: dict[str, Any]) -> tuple[Paged, int | None]:
    wanted = dict(shape)
    group = wanted.pop("group")
    return make(heads=group * shape["kv_heads"], **wanted), shape["window"]


@settings(max_examples=40, deadline=None)
@given(CASES)
def test_any_shape_equals_dense_attention(shape: dict[str, Any]) -> None:
    case, window = build(shape)
    assert relative_error(case.run(window=window), dense(case, window=window)) < 10 * FP32_RELATIVE


@settings(max_examples=20, deadline=None)
@given(CASES, st.integers(0, 2**31))
def test_where_a_block_lies_changes_no_bit(shape: dict[str, Any], seed: int) -> None:
    case, window = build(shape)
    blocks = case.key_cache.shape[0]
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))
    inside = (case.block_table >= 0) & (case.block_table < blocks)
    table = case.block_table.clone()
    table[inside] = torch.argsort(order)[table[inside].long()].to(torch.int32)
    moved = Paged(
        query=case.query,
        key_cache=case.key_cache[order],
        value_cache=case.value_cache[order],
        block_table=table,
        context_lens=case.context_lens,
    )
    assert torch.equal(moved.run(window=window), case.run(window=window))


@settings(max_examples=20, deadline=None)
@given(CASES)
def test_a_sequence_does_not_see_its_neighbours(shape: dict[str, Any]) -> None:
    case, window = build(shape)
    together = case.run(window=window)
    for row in range(len(shape["lengths"])):
        alone = Paged(
            query=case.query[row : row + 1],
            key_cache=case.key_cache,
            value_cache=case.value_cache,
            block_table=case.block_table[row : row + 1],
            context_lens=case.context_lens[row : row + 1],
        )
        assert torch.equal(alone.run(window=window)[0], together[row])


@settings(max_examples=20, deadline=None)
@given(CASES)
def test_output_stays_between_the_smallest_and_the_largest_value(shape: dict[str, Any]) -> None:
    case, window = build(shape)
    seen = case.value_cache[~case.value_cache.isnan()]
    output = case.run(window=window)
    assert float(seen.min()) - 1e-5 <= float(output.min())
    assert float(output.max()) <= float(seen.max()) + 1e-5


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_tokens_written_through_the_table_are_the_ones_attended_to(block_size: int) -> None:
    lengths = [1, 16, 17, 30]
    case = make(lengths, block_size=block_size)
    keys = torch.full_like(case.key_cache, math.nan)
    values = torch.full_like(case.value_cache, math.nan)
    for position in range(max(lengths)):
        rows = [row for row, length in enumerate(lengths) if length > position]
        where = [(int(case.block_table[r, position // block_size]), position % block_size) for r in rows]
        write_token(
            torch.stack([case.key_cache[block, slot] for block, slot in where]),
            torch.stack([case.value_cache[block, slot] for block, slot in where]),
            keys,
            values,
            case.block_table[rows],
            torch.full((len(rows),), position, dtype=torch.int32),
        )
    # Every slot of a context was written, and no other one: NaN stays where NaN was.
    assert torch.equal(keys.nan_to_num(7e9), case.key_cache.nan_to_num(7e9))
    assert torch.equal(values.nan_to_num(7e9), case.value_cache.nan_to_num(7e9))


BAD_ATTENTION = [
    ("query", lambda c: c.query[0], "query: expected [batch, heads, head_dim]"),
    ("query", lambda c: c.query[:, :3], "query: 3 heads are not a multiple of 2 KV heads"),
    ("query", lambda c: c.query[:, :0], "query: 0 heads"),
    ("query", lambda c: c.query[..., :32], "query: expected shape [2, 4, 64]"),
    ("query", lambda c: c.query.bfloat16(), "query: expected the dtype of key_cache"),
    ("query", lambda c: c.query.to("meta"), "query: on meta"),
    ("key_cache", lambda c: c.key_cache[0], "key_cache: expected [num_blocks, block_size"),
    ("key_cache", lambda c: c.key_cache[:0], "key_cache: expected [num_blocks, block_size"),
    ("key_cache", lambda c: c.key_cache.double(), "key_cache: expected fp16, bf16 or fp32"),
    ("key_cache", lambda c: c.key_cache.char(), "key_cache: expected fp16, bf16 or fp32"),
    ("value_cache", lambda c: c.value_cache[:, :8], "value_cache: expected shape"),
    ("value_cache", lambda c: c.value_cache.half(), "value_cache: expected the dtype"),
    ("block_table", lambda c: c.block_table.long(), "block_table: expected int32"),
    ("block_table", lambda c: c.block_table[0], "block_table: expected 2 dimensions"),
    ("block_table", lambda c: c.block_table[:1], "block_table: expected 2 sequences"),
    ("block_table", lambda c: c.block_table.clone().fill_(-1), "block_table[0, 0] is -1"),
    ("block_table", lambda c: c.block_table.clone().fill_(99), "block_table[0, 0] is 99"),
    ("context_lens", lambda c: c.context_lens.float(), "context_lens: expected int32"),
    ("context_lens", lambda c: c.context_lens[:, None], "context_lens: expected 1 dimensions"),
    ("context_lens", lambda c: c.context_lens[:1], "context_lens: expected 2 sequences"),
    ("context_lens", lambda c: c.context_lens * 0, "context_lens[0] is 0"),
    ("context_lens", lambda c: c.context_lens * 0 + 49, "context_lens[0] is 49; block_table has"),
    ("context_lens", lambda c: c.context_lens * 99, "context_lens[0] is 495"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD_ATTENTION, ids=[m for _, _, m in BAD_ATTENTION])
def test_attention_refuses(name: str, spoil: Any, message: str) -> None:
    case = make([5, 20])
    arguments = {field: getattr(case, field) for field in Paged.__slots__}
    arguments[name] = spoil(case)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        paged_attention_reference(**arguments)


def test_only_the_last_block_id_is_out_of_range() -> None:
    case = make([5, 33])
    case.block_table[1, 2] = case.key_cache.shape[0]
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is 7; key_cache has blocks 0 to 6"):
        case.run()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_attention_refuses_a_scale_that_is_no_positive_number(scale: float) -> None:
    with pytest.raises(ValueError, match=r"^softmax_scale: "):
        make([5]).run(softmax_scale=scale)


@pytest.mark.parametrize("window", [0, -4])
def test_attention_refuses_an_empty_window(window: int) -> None:
    with pytest.raises(ValueError, match=r"^window: "):
        make([5]).run(window=window)


BAD_WRITES = [
    ("key", lambda a: a["key"][:, :1], "key: expected shape [2, 2, 64]"),
    ("key", lambda a: a["key"].half(), "key: expected the dtype of key_cache"),
    ("value", lambda a: a["value"][0], "value: expected shape [2, 2, 64]"),
    ("value_cache", lambda a: a["value_cache"][1:], "value_cache: expected shape"),
    ("positions", lambda a: a["positions"].long(), "positions: expected int32"),
    ("positions", lambda a: a["positions"] - 9, "positions[0] is -4"),
    ("positions", lambda a: a["positions"] - 6, "positions[0] is -1"),
    ("positions", lambda a: a["positions"] + 43, "positions[0] is 48"),
    ("positions", lambda a: a["positions"] + 900, "positions[0] is 905"),
    ("block_table", lambda a: a["block_table"][:1], "block_table: expected 2 sequences"),
    ("block_table", lambda a: a["block_table"] * 0 - 1, "block_table[0, 0] is -1"),
    ("block_table", lambda a: a["block_table"] * 0 + 99, "block_table[0, 0] is 99"),
    ("block_table", lambda a: a["block_table"] * 0, "block_table: two sequences would write"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD_WRITES, ids=[m for _, _, m in BAD_WRITES])
def test_write_refuses_and_writes_nothing(name: str, spoil: Any, message: str) -> None:
    case = make([20, 20])
    arguments = {
        "key": torch.ones(2, 2, 64),
        "value": torch.ones(2, 2, 64),
        "key_cache": case.key_cache.clone(),
        "value_cache": case.value_cache.clone(),
        "block_table": case.block_table,
        "positions": torch.tensor([5, 5], dtype=torch.int32),
    }
    arguments[name] = spoil(arguments)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        write_token(**arguments)
    assert torch.equal(arguments["key_cache"].nan_to_num(7e9), case.key_cache.nan_to_num(7e9))
