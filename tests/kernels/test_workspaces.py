"""Scratch that is shared by all launches of a step has room for each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as some

from capplan.kernels import split_k, split_kv
from capplan.kernels.device_code import power_of_two
from capplan.kernels.paged_attention_decode import SHORTEST_TILE, choose_tile, decode_workspace, tile_of
from capplan.kernels.w4a16_gemm import GEMV_BLOCK_N, choose_int4_tile
from capplan.kernels.w8a8_gemm import choose_w8a8_tile
from capplan.kernels.w8a16_gemm import choose_w8a16_tile

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="the kernels' wrappers run on torch")

LIKE = torch.empty(1)
CHIPS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@given(m=some.integers(1, 300), n=some.integers(1, 40_000), k=some.integers(1, 60_000))
def test_room_for_any_product(m: int, n: int, k: int) -> None:
    whole = split_k.largest_workspace(LIKE)
    for tile in (
        choose_int4_tile(m=m, group=128), choose_w8a16_tile(m=m), choose_w8a8_tile(m=m),
    ):  # fmt: skip
        for block_n in (tile.block_n, GEMV_BLOCK_N):
            assert tile.block_m * block_n <= split_k.LARGEST_TILE
            tiles = -(-m // tile.block_m) * -(-n // block_n)
            splits = split_k.choose_split_k(tiles=tiles, steps=-(-k // tile.block_k), device=LIKE)
            if splits > 1:
                assert splits * m * n <= whole.partial.numel()
                assert tiles <= whole.arrived.numel()


@given(
    batch=some.integers(1, 300),
    kv_heads=some.integers(1, 16),
    group=some.integers(1, 16),
    head_dim=some.sampled_from([64, 96, 128, 256]),
    longest=some.integers(1, 140_000),
    chip=some.sampled_from(CHIPS),
)
def test_room_for_any_attention(
    batch: int, kv_heads: int, group: int, head_dim: int, longest: int, chip: tuple[int, int]
) -> None:
    rows, columns = tile_of(group=group, head_dim=head_dim)
    assert (rows, columns) == (max(16, power_of_two(group)), power_of_two(head_dim))
    for fp8 in (False, True):
        tile = choose_tile(head_dim=columns, rows=rows, fp8=fp8, capability=chip)
        assert tile.block_n >= SHORTEST_TILE
        tiles = batch * kv_heads
        wanted = split_kv.choose_splits(tiles=tiles, longest=longest, block_n=tile.block_n, device=LIKE)
        with torch.device("meta"):
            like = torch.empty(1)
        made = decode_workspace(
            batch=batch, heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, longest=longest,
            device=like,
        )  # fmt: skip
        assert made.splits >= wanted
        assert made.partial.shape == (tiles, made.splits, rows, columns)
