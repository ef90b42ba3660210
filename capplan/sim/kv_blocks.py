"""Paged KV memory of one replica: how many blocks are in use, and what the free ones still hold.

Blocks that no other request can ever match are counted, not kept one by one: freed, a request's own blocks
stand in the free queue as one run. Blocks whose tokens others may share are kept each, by their chain.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from capplan.sim.request import Request

Chain = tuple[int, int]
"""A block's tokens together with all before them: the number of the segment it ends in, and where it ends."""


class _Shared:
    """A block that several requests may use at once; with no holders it waits in the free queue."""

    __slots__ = ("chain", "holders")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.holders = 1


class _Run:
    """`count` free blocks full of one request's own tokens, in order; reused from the last one on."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


class KvBlocks:
    """`total` blocks of `block_size` tokens; with `caching`, a freed block keeps its tokens until reused.

    Blank blocks are reused first, those that were not full when they were freed among them; then the others
    in the order they were freed, a request's last block first. Of the blocks a request holds only the shared
    ones are kept; the others follow from its tokens.
    Models whose layers keep different things have groups of layers: `groups` of them keep every token and
    take a block each where one is full; of the `limited` ones, (tokens a block, blocks at most), as with
    windows and states, a request takes what it will need in the end when it is let in (vLLM takes them one by
    one: unverified).
    Source: vLLM V1's block pool, whose steps tests/sim compares.
    """

    def __init__(
        self,
        *,
        total: int,
        block_size: int,
        caching: bool = False,
        groups: int = 1,
        limited: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.total, self.block_size, self.caching = total, block_size, caching and groups > 0
        self.groups, self.limited = groups, limited
        self.free = total
        self._blank = total
        self._queue: OrderedDict[_Run | _Shared, None] = OrderedDict()
        self._cached: dict[Chain, list[_Shared]] = {}
        self._shared: dict[Request, list[_Shared]] = {}
        self._left: dict[Request, _Run] = {}
        self._segments: dict[tuple[int, int, Hashable], int] = {}

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.total - self.free

    @property
    def remembers(self) -> bool:
        """Whether any block, free or in use, holds tokens that a request could find."""
        return bool(self._queue or self._left or self._shared)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens, in the groups that keep every token."""
        return -(-tokens // self.block_size) * self.groups

    def limited_blocks(self, request: Request) -> int:
        """Blocks of the other groups, from a request's admission to its end, each answer its own."""
        tokens = request.prompt_tokens + request.output_tokens
        return request.samples * sum(min(-(-tokens // size), most) for size, most in self.limited)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the cache holds; the last one is never taken from it."""
        if not self.caching:
            return 0
        tokens = request.prompt_tokens + request.made_tokens
        hits, own = self._hits(request, (tokens - 1) // self.block_size)
        return (len(hits) + own) * self.block_size

    def admit(
        self, request: Request, *, tokens: int, limit: int, whole: bool = False, spare: int = 0
    ) -> int | None:
        """Blocks for a waiting request: the tokens found in the cache, or None where too few are free.

        It has `tokens` in all and computes `limit` of them at most beyond those cached; with `whole` all of
        them must have room, and `spare` blocks must stay free. The last token is never taken from the cache.
        """
        hits, own = self._hits(request, (tokens - 1) // self.block_size) if self.caching else ([], 0)
        cached = (len(hits) + own) * self.block_size
        idle = own + sum(1 for block in hits if not block.holders)
        upto = min(tokens, cached + limit)
        found = (len(hits) + own) * self.groups - (self.limited_blocks(request) if self.limited else 0)
        taken = self.blocks_for(upto) - found
        needed = self.blocks_for(tokens) - found if whole else taken
        if needed + idle * self.groups + spare > self.free:
            return None
        if self.caching:
            self._touch(request, hits, own)
        self.take(taken)
        if request.segments and self.caching:
            self._keep(request, upto, made=0)
        return cached

    def grow(self, request: Request, computed: int, upto: int) -> bool:
        """Blocks for a request's tokens from `computed` up to `upto`; False where too few are free."""
        needed = self.blocks_for(upto) - self.blocks_for(computed)
        if needed > self.free:
            return False
        self.take(needed)
        if request.segments and self.caching:
            self._keep(request, upto, made=0)
        return True

    def take(self, count: int) -> None:
        """So many free blocks, in order of reuse; what they held is lost."""
        self.free -= count
        if not self.caching:
            return
        self._blank -= count
        queue = self._queue
        while self._blank < 0:
            entry = next(iter(queue))
            if isinstance(entry, _Run):
                taken = min(-(self._blank // self.groups), entry.count)
                self._blank += taken * self.groups
                entry.count -= taken
                if entry.count:
                    return
            else:
                self._blank += self.groups
                self._evict(entry)
            del queue[entry]

    def give_back(self, count: int) -> None:
        """So many blocks in use that hold nothing worth keeping."""
        self.free += count
        self._blank += count

    def release(self, request: Request, computed: int, made: int = 0) -> None:
        """Free what a request holds, `computed` tokens, of which it made the last `made`."""
        blocks = self.blocks_for(computed) + (self.limited_blocks(request) if self.limited else 0)
        if not self.caching:
            self.free += blocks
            return
        if request.output_key is not None and made:
            self._keep(request, computed, made)
        shared = self._shared.pop(request, [])
        full = computed // self.block_size
        own = full - len(shared)
        if own:
            run = _Run(own)
            self._queue[run] = None
            self._left[request] = run
        self._blank += blocks - full * self.groups
        self.free += blocks - len(shared) * self.groups
        for block in reversed(shared):
            block.holders -= 1
            if not block.holders:
                self._queue[block] = None
                self.free += self.groups

    def forget(self, request: Request) -> None:
        """A request will not come back: nobody can match its own blocks any more."""
        run = self._left.pop(request, None)
        if run is not None and len(self._queue) == 1:
            # Alone in the queue, its blocks are the next after the blank ones: as good as blank.
            self._queue.clear()
            self._blank += run.count * self.groups

    def _hits(self, request: Request, most: int) -> tuple[list[_Shared], int]:
        """Cached blocks of a request from its beginning, `most` at most: shared ones, how many of its own."""
        hits: list[_Shared] = []
        if not request.segments:
            run = self._left.get(request)
            return hits, 0 if run is None else min(run.count, most)
        made = request.made_tokens if request.output_key is not None else 0
        for chain in self._chains(request, request.prompt_tokens, made):
            if len(hits) == most:
                return hits, 0
            found = self._cached.get(chain)
            if not found:
                return hits, 0
            hits.append(found[0])
        run = self._left.get(request)
        return hits, min(run.count, most - len(hits)) if run is not None else 0

    def _touch(self, request: Request, hits: list[_Shared], own: int) -> None:
        """Hold the blocks found."""
        for block in hits:
            if not block.holders:
                del self._queue[block]
                self.free -= self.groups
            block.holders += 1
        if hits:
            self._shared[request] = list(hits)
        run = self._left.pop(request, None)
        if run is not None and own:
            self.free -= own * self.groups
            run.count -= own
            if not run.count:
                del self._queue[run]

    def _keep(self, request: Request, upto: int, made: int) -> None:
        """Enter the full shareable blocks of a request's first `upto` tokens, `made` of its answer."""
        held = self._shared.setdefault(request, [])
        for chain in self._chains(request, min(upto - made, request.prompt_tokens), made, len(held)):
            block = _Shared(chain)
            self._cached.setdefault(chain, []).append(block)
            held.append(block)

    def _chains(self, request: Request, prompt: int, made: int, skipped: int = 0) -> Iterator[Chain]:
        """The chains of a request's full blocks in its first `prompt` tokens and the `made` after them.

        Without the first `skipped`.
        """
        segments = list(request.segments)
        if made and sum(tokens for _, tokens in segments) >= request.prompt_tokens:
            segments.append((request.output_key, made))
        number, before, begin, end = 0, 0, 0, self.block_size
        for key, tokens in segments:
            number = self._segments.setdefault((number, before, key), len(self._segments) + 1)
            until = min(begin + tokens, prompt + made)
            if skipped and end <= until:
                past = min(skipped, (until - end) // self.block_size + 1)
                end += past * self.block_size
                skipped -= past
            while end <= until:
                yield number, end - begin
                end += self.block_size
            begin += tokens
            before = tokens

    def _evict(self, block: _Shared) -> None:
        found = self._cached[block.chain]
        found.remove(block)
        if not found:
            del self._cached[block.chain]
