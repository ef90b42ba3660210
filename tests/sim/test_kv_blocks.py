"""Blocks: what a request takes, what stays in the cache, and in which order it is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.sim.kv_blocks import KvBlocks
from capplan.sim.request import Request


def request(index: int, prompt: int, **more: object) -> Request:
    return Request(index, 0.0, prompt, 10, **more)  # type: ignore[arg-type]


def shared(index: int, prompt: int, prefix: int = 64) -> Request:
    """A prompt whose first tokens are everybody's."""
    return request(index, prompt, segments=(("system", prefix),))


def admitted(blocks: KvBlocks, one: Request) -> int | None:
    return blocks.admit(one, tokens=one.prompt_tokens, limit=one.prompt_tokens)


def test_a_prompt_takes_its_blocks_and_gives_them_back() -> None:
    blocks = KvBlocks(total=10, block_size=16)
    one = request(0, 33)
    assert admitted(blocks, one) == 0
    assert blocks.used == 3
    assert blocks.grow(one, 33, 48)
    assert blocks.used == 3
    assert blocks.grow(one, 48, 49)
    assert blocks.used == 4
    blocks.release(one, 49)
    assert blocks.used == 0


def test_nothing_changes_where_too_few_are_free() -> None:
    blocks = KvBlocks(total=3, block_size=16, caching=True)
    assert admitted(blocks, request(0, 32)) == 0
    two = request(1, 32)
    assert admitted(blocks, two) is None
    assert blocks.used == 2
    assert blocks.admit(two, tokens=32, limit=16, whole=True) is None
    assert blocks.admit(two, tokens=32, limit=16, spare=1) is None
    assert blocks.admit(two, tokens=32, limit=16) == 0
    assert not blocks.grow(two, 16, 32)
    assert blocks.used == 3


def test_a_shared_prefix_is_held_once() -> None:
    """64 shared tokens are 4 blocks; each prompt of 80 has one more of its own."""
    blocks = KvBlocks(total=20, block_size=16, caching=True)
    first, second = shared(0, 80), shared(1, 80)
    assert admitted(blocks, first) == 0
    assert admitted(blocks, second) == 64
    assert blocks.used == 6
    blocks.release(first, 80)
    assert blocks.used == 5
    blocks.release(second, 80)
    assert blocks.used == 0
    assert admitted(blocks, shared(2, 70)) == 64


def test_the_last_token_is_always_computed() -> None:
    """A prompt of 64 shared tokens finds three of its four blocks; the fourth it computes again."""
    blocks = KvBlocks(total=20, block_size=16, caching=True)
    assert admitted(blocks, shared(0, 64)) == 0
    assert admitted(blocks, shared(1, 64)) == 48
    assert blocks.used == 5


def test_a_shorter_prompt_shares_what_it_has() -> None:
    blocks = KvBlocks(total=20, block_size=16, caching=True)
    admitted(blocks, shared(0, 40))
    assert admitted(blocks, shared(1, 100)) == 32


def test_blank_blocks_are_reused_before_cached_ones_and_old_before_new() -> None:
    blocks = KvBlocks(total=8, block_size=16, caching=True)
    first, second = shared(0, 64), request(1, 40)
    admitted(blocks, first)
    admitted(blocks, second)
    # 4 cached and free, then 2 full and 1 blank: the blank ones (1 never used) go first.
    blocks.release(first, 64)
    blocks.release(second, 40)
    blocks.take(2)
    assert blocks.admit(shared(2, 65), tokens=65, limit=1) == 64
    blocks = KvBlocks(total=8, block_size=16, caching=True)
    admitted(blocks, first)
    blocks.release(first, 64)
    # Five blocks for another: the prompt's last one is lost first.
    other = request(3, 80)
    admitted(blocks, other)
    blocks.release(other, 80)
    assert blocks.admit(shared(4, 65), tokens=65, limit=1) == 48


def test_a_thrown_out_request_finds_its_own_blocks_again() -> None:
    blocks = KvBlocks(total=10, block_size=16, caching=True)
    one = request(0, 70)
    admitted(blocks, one)
    blocks.release(one, 70)
    other = request(1, 70)
    assert admitted(blocks, other) == 0  # nobody else can
    assert admitted(blocks, one) == 64
    blocks.release(one, 70)
    blocks.take(2)  # one blank block, one of its own from the end
    blocks.release(other, 70)
    assert admitted(blocks, one) == 48


def test_the_next_turn_finds_the_answer_before_it() -> None:
    """A turn of 40 tokens and 25 made, the last one not stored: 64 of the next prompt's 90 are cached."""
    blocks = KvBlocks(total=20, block_size=16, caching=True)
    first = request(0, 40, segments=(("turn 0", 40),), output_key="answer 0")
    admitted(blocks, first)
    blocks.grow(first, 40, 64)
    blocks.release(first, 64, made=24)
    following = request(1, 90, segments=(("turn 0", 40), ("answer 0", 25), ("turn 1", 25)))
    assert admitted(blocks, following) == 64


@given(
    total=st.integers(4, 60),
    caching=st.booleans(),
    moves=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 200), st.booleans()), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_used_and_free_are_always_all(total: int, caching: bool, moves: list[tuple[int, int, bool]]) -> None:
    """Whatever comes and goes: free ≥ 0, and all is free once everybody has left."""
    blocks = KvBlocks(total=total, block_size=16, caching=caching)
    held: dict[int, Request] = {}
    for index, tokens, shares in moves:
        if index in held:
            one = held.pop(index)
            blocks.release(one, one.prompt_tokens)
            continue
        one = shared(index, tokens) if shares else request(index, tokens)
        found = admitted(blocks, one)
        if found is not None:
            assert 0 <= found < tokens
            held[index] = one
        assert 0 <= blocks.free <= total
        # No more than each request's own blocks; shared ones count once.
        assert blocks.used <= sum(blocks.blocks_for(one.prompt_tokens) for one in held.values())
    for one in held.values():
        blocks.release(one, one.prompt_tokens)
    assert blocks.free == total
    blocks.take(total)
    assert blocks.free == 0
