"""Spans of contiguous memory: holes, fragmentation, and what of it is waste."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim import simulator
from capplan.sim.contiguous import ContiguousKv, ContiguousReplica, Fit, Reserve
from capplan.sim.replay import LinearTimes
from capplan.sim.replica import Limits, Replica
from capplan.sim.request import Request
from capplan.sim.schedulers import SCHEDULERS
from capplan.sim.trial import Totals
from capplan.sim.workload import WorkloadSpec, build
from tests.sim.scheduling import requests, serve


def limits(blocks: int, max_model_len: int | None = 100, **more: int) -> Limits:
    return Limits(
        max_num_seqs=64,
        max_num_batched_tokens=1000,
        kv_blocks=blocks,
        block_size=1,
        max_model_len=max_model_len,
        **more,
    )


def memory(tokens: int, fit: Fit = "first", reserve: Reserve = "exact") -> ContiguousKv:
    return ContiguousKv(limits=limits(tokens), max_model_len=100, reserve=reserve, fit=fit)


def put(kv: ContiguousKv, request: Request) -> bool:
    return kv.admit(request, tokens=request.prompt_tokens, limit=request.prompt_tokens) is not None


def test_free_memory_in_pieces_lets_nobody_in() -> None:
    kv = memory(100)
    spans = [Request(index, 0, 10, 10) for index in range(5)]
    assert all(put(kv, request) for request in spans)
    assert (kv.used, kv.free) == (100, 0)
    for request in (spans[0], spans[2], spans[4]):
        kv.release(request, 0)
    # 60 tokens are free, in three holes of 20: a span of 30 has no place.
    assert (kv.free, kv.largest_hole) == (60, 20)
    assert not put(kv, Request(9, 0, 20, 10))
    assert put(kv, Request(10, 0, 10, 10))


def test_holes_side_by_side_become_one() -> None:
    kv = memory(60)
    first, second, third = (Request(index, 0, 10, 10) for index in range(3))
    for request in (first, second, third):
        put(kv, request)
    kv.release(first, 0)
    kv.release(third, 0)
    assert kv.largest_hole == 20
    kv.release(second, 0)
    assert (kv.free, kv.largest_hole) == (60, 60)


def test_first_fit_takes_the_first_hole_and_best_fit_the_smallest() -> None:
    found = {}
    for fit in ("first", "best"):
        kv = memory(100, fit)
        wide, wall, narrow, end = (
            Request(index, 0, size, 0 + 1) for index, size in enumerate((39, 9, 19, 29))
        )
        for request in (wide, wall, narrow, end):
            put(kv, request)
        kv.release(wide, 0)
        kv.release(narrow, 0)
        # Holes of 40 and 20: a span of 20 leaves 20 + 20, or 40.
        put(kv, Request(9, 0, 10, 10))
        found[fit] = kv.largest_hole
    assert found == {"first": 20, "best": 40}


def test_a_buddys_spans_are_powers_of_two_at_multiples_of_their_size() -> None:
    kv = memory(128, "buddy")
    # 19 + 1 become 32, 39 + 1 become 64, 4 + 1 become 8.
    small, large, tiny = Request(0, 0, 19, 1), Request(1, 0, 39, 1), Request(2, 0, 4, 1)
    assert [kv.span_blocks(request) for request in (small, large, tiny)] == [32, 64, 8]
    assert all(put(kv, request) for request in (small, large, tiny))
    # 0–32, then 64–128 for the large one, and 32–40 for the tiny one, in the smallest hole.
    assert (kv.used, kv.largest_hole) == (104, 24)
    # 24 are free from 40 on, but 16 of them only at 48.
    assert put(kv, Request(3, 0, 15, 1))
    assert (kv.used, kv.largest_hole) == (120, 8)


@pytest.mark.parametrize(
    ("reserve", "blocks"),
    [pytest.param("max", 100, id="the model's whole length"), ("pow2", 10 + 32), ("exact", 10 + 25)],
)
def test_what_a_request_reserves(reserve: Reserve, blocks: int) -> None:
    # 10 tokens in, 25 out: the next power of two is 32 (Orca's Pow2: "when the output is 25, 32").
    assert memory(200, reserve=reserve).span_blocks(Request(0, 0, 10, 25)) == blocks
    assert memory(200, reserve=reserve).span_blocks(Request(0, 0, 10, 25, samples=3)) == 3 * blocks


def test_max_tokens_are_reserved_where_clients_ask_for_more_than_comes() -> None:
    kv = ContiguousKv(limits=limits(200, max_new_tokens=50), max_model_len=100, reserve="exact")
    assert kv.span_blocks(Request(0, 0, 10, 25)) == 60
    assert kv.span_blocks(Request(0, 0, 80, 5)) == 100


def test_promised_tokens_are_what_those_inside_will_hold() -> None:
    kv = memory(300, reserve="max")
    first, second = Request(0, 0, 10, 25), Request(1, 0, 4, 1)
    put(kv, first)
    put(kv, second)
    assert kv.promised_tokens == 34 + 4
    assert kv.reserved_tokens == 200
    kv.release(first, 34)
    assert kv.promised_tokens == 4


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
    fit=st.sampled_from(["first", "best", "buddy"]),
)
def test_memory_is_whole_again_when_all_have_left(sizes, order, fit) -> None:  # type: ignore[no-untyped-def]
    kv = memory(120, fit)
    inside: list[Request] = []
    for index, size in enumerate(sizes):
        request = Request(index, 0, size, 1)
        if put(kv, request):
            inside.append(request)
        elif inside:
            kv.release(inside.pop(order.randrange(len(inside))), 0)
        assert kv.used == sum(kv.span_blocks(request) for request in inside)
        assert kv.used + kv.free == kv.total
        assert kv.largest_hole <= kv.free
    while inside:
        kv.release(inside.pop(order.randrange(len(inside))), 0)
    assert (kv.free, kv.largest_hole, kv.promised_tokens) == (120, 120, 0)


def test_without_a_longest_length_there_is_nothing_to_reserve() -> None:
    with pytest.raises(InputError, match="no length to reserve") as caught:
        ContiguousReplica(limits(100, max_model_len=None))
    assert "--max-model-len" in str(caught.value)


def test_fragmentation_delays_a_request_that_there_is_memory_for() -> None:
    # Spans of 8 + 4, 8 + 12, 8 + 4 fill 44 of 48. When the outer ones are through, 28 are free in holes of
    # 12 and 16: 8 + 12 = 20 must wait for the middle one.
    coming = requests((8, 4), (8, 12), (8, 4), (8, 12), arrivals=(0, 0, 0, 1))
    replica = ContiguousReplica(limits(48), reserve="exact")
    serve("orca", coming, replica=replica)
    assert coming[0].done_s == coming[2].done_s == 4
    assert coming[3].first_scheduled_s == coming[1].done_s == 12
    again = requests((8, 4), (8, 12), (8, 4), (8, 12), arrivals=(0, 0, 0, 1))
    serve("vllm_v1", again, kv_blocks=48, block_size=1)
    assert again[3].first_scheduled_s == 1


@pytest.mark.parametrize(
    ("reserve", "held"),
    [
        pytest.param("max", 0.204, id="Orca (Max)"),
        pytest.param("pow2", 0.268, id="Orca (Pow2)"),
        pytest.param("exact", 0.382, id="Orca (Oracle)"),
        pytest.param(None, 0.963, id="paged"),
    ],
)
def test_the_shares_of_memory_that_hold_tokens_are_the_papers(reserve: Reserve | None, held: float) -> None:
    """Kwon et al. 2023, figure 2: OPT-13B on an A100 of 40 GB, 15.7 k tokens of KV; ShareGPT's mean lengths.

    The paper gives the means alone; conversations vary about as much as their mean.
    """
    tokens = 15_700
    capacity = Limits(
        max_num_seqs=1000,
        max_num_batched_tokens=100_000,
        kv_blocks=tokens if reserve else tokens // 16,
        block_size=1 if reserve else 16,
        max_model_len=2048,
    )
    replica = ContiguousReplica(capacity, reserve=reserve, fit="buddy") if reserve else Replica(capacity)
    totals = Totals(memory_bound=True)
    simulator.run(
        workload=build(
            WorkloadSpec(
                isl="lognormal:mean=161,cv=1.1,max=1000",
                osl="lognormal:mean=338,cv=1.1,max=1000",
                request_per_s=math.inf,
                requests=1500,
                seed=0,
            )
        ),
        replica=replica,
        scheduler=SCHEDULERS["orca" if reserve else "vllm_v1"].scheduler(),
        times=LinearTimes(base=20, prompt_token=0.1, decode_sequence=0.05, context_token=0.0005),
        recorder=totals,
    )
    assert totals.outcome().held == pytest.approx(held, abs=0.03)
