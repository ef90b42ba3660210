"""KV memory as it was before paging: one contiguous span a request, as long as it could ever become.

    waste = reserved and not yet used + reserved and never used + free but in pieces too small

Source: the serving lesson, "PagedAttention"; Kwon et al. 2023, figures 2 and 3 (Orca's three variants).
"""

from bisect import bisect_left
from typing import Literal

from capplan.errors import InputError
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request

Reserve = Literal["max", "pow2", "exact"]
"""For a request: the model's whole length; its prompt and its output's next power of two; just its own."""
Fit = Literal["first", "best", "buddy"]
"""Which hole a request goes into: the first that is large enough, or the smallest such; or the smallest for
spans of powers of two that begin at multiples of their size, as a buddy allocator's do."""


class ContiguousKv:
    """An address space of `total` blocks, in which each request holds one span from admission to end.

    `free` counts the blocks of all holes together, however small. `promised_tokens` are what those inside
    will hold in the end. Nothing is shared: several answers of one prompt take a span each.
    """

    def __init__(
        self, *, limits: Limits, max_model_len: int, reserve: Reserve = "max", fit: Fit = "first"
    ) -> None:
        self.limits, self.max_model_len = limits, max_model_len
        self.reserve, self.fit = reserve, fit
        self.total, self.block_size = limits.kv_blocks, limits.block_size
        self.free = self.total
        self.promised_tokens = 0
        self._holes: list[tuple[int, int]] = [(0, self.total)] if self.total else []
        self._spans: dict[Request, tuple[int, int]] = {}

    @property
    def used(self) -> int:
        """Blocks reserved."""
        return self.total - self.free

    @property
    def reserved_tokens(self) -> int:
        """Tokens that the spans could hold."""
        return self.used * self.block_size // self.limits.kv_groups

    @property
    def largest_hole(self) -> int:
        """Blocks of the largest hole."""
        return max((size for _, size in self._holes), default=0)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return self.limits.kv_groups * -(-tokens // self.block_size)

    def limited_blocks(self, request: Request) -> int:
        """None: every layer keeps all tokens."""
        return 0

    def span_blocks(self, request: Request) -> int:
        """Blocks that a request reserves."""
        tokens = self.max_model_len
        if self.reserve != "max":
            new = self.limits.new_tokens(request)
            if self.reserve == "pow2":
                new = _power_of_two(new)
            tokens = min(tokens, request.prompt_tokens + new)
        blocks = self.blocks_for(tokens)
        return request.samples * (_power_of_two(blocks) if self.fit == "buddy" else blocks)

    def _begin(self, hole: tuple[int, int], size: int) -> int:
        """Where in a hole a span of that size begins, if it has room."""
        return hole[0] if self.fit != "buddy" else -(-hole[0] // size) * size

    def admit(
        self, request: Request, *, tokens: int, limit: int, whole: bool = False, spare: int = 0
    ) -> int | None:
        """A span for a waiting request: 0 tokens of it are cached; None where no hole is large enough."""
        size = self.span_blocks(request)
        fitting = [hole for hole in self._holes if self._begin(hole, size) + size <= sum(hole)]
        if not fitting or self.free - size < spare:
            return None
        hole = fitting[0] if self.fit == "first" else min(fitting, key=lambda hole: hole[1])
        at, begin, end = self._holes.index(hole), self._begin(hole, size), sum(hole)
        left = ((hole[0], begin - hole[0]), (begin + size, end - begin - size))
        self._holes[at : at + 1] = [rest for rest in left if rest[1]]
        self._spans[request] = (begin, size)
        self.free -= size
        self.promised_tokens += _final_tokens(request)
        return 0

    def cached_tokens(self, request: Request) -> int:
        """None: nothing is shared."""
        return 0

    def grow(self, request: Request, computed: int, upto: int) -> bool:
        """A request's tokens have their place already."""
        return True

    def take(self, count: int) -> None:
        """Nothing is taken beyond the spans."""

    def give_back(self, count: int) -> None:
        """Nothing is held beyond the spans."""

    def release(self, request: Request, computed: int, made: int = 0) -> None:
        """Free a request's span, and join the holes on its sides."""
        begin, size = self._spans.pop(request)
        self.free += size
        self.promised_tokens -= _final_tokens(request)
        holes = self._holes
        at = bisect_left(holes, (begin, 0))
        end = begin + size
        if at < len(holes) and holes[at][0] == end:
            end += holes.pop(at)[1]
        if at and sum(holes[at - 1]) == begin:
            begin = holes.pop(at - 1)[0]
            at -= 1
        holes.insert(at, (begin, end - begin))

    def forget(self, request: Request) -> None:
        """Nothing is remembered of a request."""


def _power_of_two(number: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def _final_tokens(request: Request) -> int:
    """Tokens that a request holds in the end; the last one made needs no KV."""
    return request.samples * (request.prompt_tokens + request.output_tokens - 1)


class ContiguousReplica(Replica):
    """A replica whose requests have all their memory from the beginning."""

    blocks: ContiguousKv

    def __init__(self, limits: Limits, *, reserve: Reserve = "max", fit: Fit = "first") -> None:
        if limits.max_model_len is None:
            raise InputError(
                "no length to reserve for a request",
                where="--max-model-len",
                hint="give the longest sequence that may come, prompt and output together",
            )
        kv = ContiguousKv(limits=limits, max_model_len=limits.max_model_len, reserve=reserve, fit=fit)
        super().__init__(limits, kv)

    def fits(self, request: Request) -> bool:
        """Whether the request has room in an empty replica."""
        return super().fits(request) and self.blocks.span_blocks(request) <= self.blocks.total

    def blocks_to_decode(self) -> int:
        """None: tokens have their place."""
        return 0

    def blocks_to_chunk(self, request: Request, tokens: int) -> int:
        """None: tokens have their place."""
        return 0

    def decode_all(self, step: Step) -> bool:
        """All decoding requests make a token in this step."""
        step.decoding += self.decoding
        step.kv_tokens += self.kv_tokens
        return True

    def decode_one(self, step: Step, request: Request) -> bool:
        """One decoding request makes a token in this step."""
        step.decoding += request.samples
        step.kv_tokens += request.samples * self.context(request)
        return True

    def steady_steps(self) -> int:
        """Steps like this one until a request ends."""
        return self._next_end() - self.tick

    def _take_ahead(self, steps: int) -> None:
        """Nothing: tokens have their place."""

    def _copies(self, request: Request, tokens: int) -> int:
        """None: every answer has a span of its own."""
        return 0
