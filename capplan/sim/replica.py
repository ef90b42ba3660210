"""One engine replica at work: requests that wait, prefill and decode, and what a step makes of them.

Requests that decode advance together, one token a tick, so none of them is touched until something happens to
it: a request decodes since a tick, ends at a tick, and needs a block whenever its tokens fill the last one.
"""

import bisect
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from capplan.sim.kv_blocks import KvBlocks
from capplan.sim.request import NOT_YET, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine allows, under vLLM's names; `kv_blocks` are those that requests can use.

    `kv_groups` and `limited_groups`: those of KvBlocks.
    `reserve_full`: a prompt is admitted only if all of it has room. `spare_blocks` stay free on admission
    while anything runs. `policy` "priority": by the requests' priority, the lowest first, then by arrival.
    `whole_prompts`: a prompt is never cut into chunks; one of more than max_num_batched_tokens is refused.
    `max_new_tokens` is what clients ask at most, None: as many as they get; engines that reserve go by it.
    `queries` are the tokens that a decoding sequence brings to a step, 1 + those drafted.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int = 16
    kv_groups: int = 1
    limited_groups: tuple[tuple[int, int], ...] = ()
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = False
    reserve_full: bool = True
    spare_blocks: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    whole_prompts: bool = False
    max_new_tokens: int | None = None
    queries: int = 1

    def new_tokens(self, request: Request) -> int:
        """Tokens that the engine expects a request to make at most."""
        asked = self.max_new_tokens or 0
        if self.max_model_len is not None:
            asked = min(asked, self.max_model_len - request.prompt_tokens)
        return max(request.output_tokens, asked)


class KvMemory(Protocol):
    """Memory of a replica in blocks; KvBlocks is the paged one. `used` + `free` = `total`."""

    total: int
    block_size: int
    free: int

    @property
    def used(self) -> int:
        """Blocks in use."""
        ...

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        ...

    def limited_blocks(self, request: Request) -> int:
        """Blocks of a request in groups of layers that keep a window or a state."""
        ...

    def admit(
        self, request: Request, *, tokens: int, limit: int, whole: bool = False, spare: int = 0
    ) -> int | None:
        """Memory for a waiting request: the tokens found in the cache, or None where too little is free."""
        ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a waiting request that the cache holds."""
        ...

    def grow(self, request: Request, computed: int, upto: int) -> bool:
        """Memory for a request's tokens from `computed` up to `upto`; False where too little is free."""
        ...

    def take(self, count: int) -> None:
        """So many free blocks."""
        ...

    def give_back(self, count: int) -> None:
        """So many blocks that hold nothing worth keeping."""
        ...

    def release(self, request: Request, computed: int, made: int = 0) -> None:
        """Free what a request holds, `computed` tokens, of which it made the last `made`."""
        ...

    def forget(self, request: Request) -> None:
        """A request will not come back."""
        ...


class Step:
    """What one step computes: `decoding` sequences over `kv_tokens`, and `chunks` of prompts.

    A chunk is (request, tokens, tokens before them); together they have `prompt_tokens` and `prompt_pairs`
    of queries and keys, n · past + n · (n + 1) / 2 each. A lone token after the prompt, as after a
    preemption, is no prompt: it counts among the decoding. When it ends, before requests leave, `kv_blocks`
    are in use and `made_tokens` came out.
    `steady`: with nobody new, the next step would be like this one until a request ends or blocks run out.
    `open`: a request that arrives now would be let in.
    `stalled`: those that decode wait for this step's prompts. `padding` is computed besides, in vain.
    """

    # Defaults of the class: most steps set but a few.
    decoding = 0
    kv_tokens = 0
    kv_blocks = 0
    made_tokens = 0
    prompt_sequences = 0
    prompt_tokens = 0
    prompt_pairs = 0
    chunks: Sequence[tuple[Request, int, int]] = ()
    preempted: Sequence[Request] = ()
    held_back: Sequence[Request] = ()
    resumed = 0
    steady = False
    open = False
    stalled = False
    padding: "Step | None" = None

    def add(self, request: Request, tokens: int, past: int) -> None:
        """A chunk of a prompt, or of a preempted request's tokens."""
        self.chunks = [*self.chunks, (request, tokens, past)]
        if tokens == 1 and past >= request.prompt_tokens:
            self.decoding += 1
            self.kv_tokens += past
            return
        self.prompt_sequences += 1
        self.prompt_tokens += tokens
        self.prompt_pairs += tokens * past + tokens * (tokens + 1) // 2

    def withdraw(self, request: Request, tokens: int, past: int) -> None:
        """Take back what the step gave a request: a chunk, or its answers' next tokens."""
        if (request, tokens, past) in self.chunks:
            self.chunks = [chunk for chunk in self.chunks if chunk != (request, tokens, past)]
            self.prompt_sequences -= 1
            self.prompt_tokens -= tokens
            self.prompt_pairs -= tokens * past + tokens * (tokens + 1) // 2
        else:
            self.decoding -= request.samples
            self.kv_tokens -= request.samples * past

    def padded(self) -> "Step":
        """What is computed in all, the padding with it."""
        if self.padding is None:
            return self
        whole = Step()
        for name in ("decoding", "kv_tokens", "prompt_sequences", "prompt_tokens", "prompt_pairs"):
            setattr(whole, name, getattr(self, name) + getattr(self.padding, name))
        return whole


class Replica:
    """The state that a scheduler reads and changes.

    `waiting` in order; `running` in order of admission, of them `prefilling`, with prompt tokens left; their
    answers are `sequences` in all. The `decoding` ones hold `kv_tokens` tokens together, a prompt's shared by
    several answers as often as they read it. `last_call`: nobody is known to come any more.
    Of the decoding, `phases[p]` need a block at ticks ≡ p (mod block_size), and `ends` is a heap of (tick at
    which it is through, order, request), outdated where that is not the request's `end_tick`. Requests of
    `surely_fit` tokens with one answer always fit an empty replica.
    """

    leaps = True
    """Whether steps alike may be taken at once."""
    prompts_only = False
    """Whether requests leave with their first token, their KV held until it is fetched."""

    def __init__(self, limits: Limits, blocks: KvMemory | None = None) -> None:
        self.limits = limits
        self.blocks: KvMemory = blocks or KvBlocks(
            total=limits.kv_blocks,
            block_size=limits.block_size,
            caching=limits.prefix_caching,
            groups=limits.kv_groups,
            limited=limits.limited_groups,
        )
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.sequences = 0
        self.decoding = 0
        self.kv_tokens = 0
        self.tick = 0
        self.last_call = False
        self.phases = [0] * limits.block_size
        self.ends: list[tuple[int, int, Request]] = []
        self.order = 0
        self.surely_fit = self._tokens_that_surely_fit()

    def fits(self, request: Request) -> bool:
        """Whether the whole request has room in an empty replica; its answer is cut at max_model_len."""
        if request.prompt_tokens + request.output_tokens <= self.surely_fit and request.samples == 1:
            return True
        limits = self.limits
        if limits.max_model_len is not None:
            room = limits.max_model_len - request.prompt_tokens
            if room < 1:
                return False
            if room < request.output_tokens:
                request.output_tokens, request.truncated = room, True
        if limits.whole_prompts and request.prompt_tokens > limits.max_num_batched_tokens:
            return False
        if request.samples > limits.max_num_seqs:
            return False
        return self.blocks_to_end(request) <= limits.kv_blocks

    def _tokens_that_surely_fit(self) -> int:
        """Tokens of a request, its answer's among them, about which nothing need be asked."""
        limits = self.limits
        if limits.max_new_tokens is not None or limits.limited_groups or not limits.kv_groups:
            return 0
        tokens = limits.kv_blocks // limits.kv_groups * limits.block_size
        if limits.whole_prompts:
            tokens = min(tokens, limits.max_num_batched_tokens)
        return tokens if limits.max_model_len is None else min(tokens, limits.max_model_len)

    def blocks_to_end(self, request: Request) -> int:
        """Blocks that a request may hold in the end; the last token made needs no KV."""
        new = 1 if self.prompts_only else self.limits.new_tokens(request)
        tokens = request.prompt_tokens + new - 1
        return (
            self.blocks.blocks_for(tokens)
            + self.blocks.limited_blocks(request)
            + self._copies(request, tokens)
        )

    def context(self, request: Request) -> int:
        """Tokens of a running request that have their KV."""
        if request in self.prefilling:
            return request.computed_tokens
        return request.computed_tokens + self.tick - request.since_tick

    def blocks_to_decode(self) -> int:
        """Blocks that the decoding requests need for their next token."""
        return self.phases[self.tick % self.limits.block_size] * self.limits.kv_groups

    def decode_all(self, step: Step) -> bool:
        """All decoding requests make a token in this step; False where blocks are missing."""
        needed = self.phases[self.tick % self.limits.block_size] * self.limits.kv_groups
        if needed:
            if needed > self.blocks.free:
                return False
            self.blocks.take(needed)
        step.decoding += self.decoding
        step.kv_tokens += self.kv_tokens
        return True

    def decode_one(self, step: Step, request: Request) -> bool:
        """One decoding request makes a token in this step; False where its block is missing."""
        context, answers = self.context(request), request.samples
        if context % self.limits.block_size == 0:
            needed = answers * self.limits.kv_groups
            if self.blocks.free < needed:
                return False
            self.blocks.take(needed)
        step.decoding += answers
        step.kv_tokens += answers * context
        return True

    def blocks_to_chunk(self, request: Request, tokens: int) -> int:
        """Blocks that a running prompt needs for so many more tokens."""
        computed, upto = request.computed_tokens, request.computed_tokens + tokens
        needed = self.blocks.blocks_for(upto) - self.blocks.blocks_for(computed)
        return needed + self._copies_at(request, upto) if request.samples > 1 else needed

    def chunk(self, step: Step, request: Request, tokens: int) -> bool:
        """A running prompt advances by so many tokens in this step; False where blocks are missing."""
        past, copies = request.computed_tokens, 0
        if request.samples > 1:
            copies = self._copies_at(request, past + tokens)
            if self.blocks_to_chunk(request, tokens) > self.blocks.free:
                return False
        if not self.blocks.grow(request, past, past + tokens):
            return False
        self.blocks.take(copies)
        step.add(request, tokens, past)
        return True

    def admit(self, step: Step, request: Request, most: int) -> int:
        """Let the request in with a chunk of `most` tokens at most; the chunk's tokens, 0: no room.

        Tokens computed elsewhere, as by a prefill replica, need their blocks and no chunk.
        """
        limits = self.limits
        tokens, received = request.prompt_tokens + request.made_tokens, request.computed_tokens
        copies = self._copies(request, tokens) if request.samples > 1 else 0
        cached = self.blocks.admit(
            request,
            tokens=tokens,
            limit=most + received,
            whole=limits.reserve_full,
            spare=(limits.spare_blocks if self.running else 0) + copies,
        )
        if cached is None:
            return 0
        cached = max(cached, received)
        chunk = min(tokens - cached, most)
        if copies and cached + chunk == tokens:
            self.blocks.take(copies)
        request.computed_tokens = cached
        if request.preemptions:
            step.resumed += 1
        elif not received:
            request.cached_tokens = cached
        self.sequences += request.samples
        self.running[request] = None
        self.prefilling[request] = None
        step.add(request, chunk, cached)
        return chunk

    def enqueue(self, request: Request) -> None:
        """A request waits: behind the others, or by its priority."""
        if self.limits.policy == "priority":
            bisect.insort(self.waiting, request, key=Request.rank)
        else:
            self.waiting.append(request)

    def victim(self) -> Request:
        """The running request to throw out first: the last one admitted, or the lowest in priority."""
        if self.limits.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_s))
        return next(reversed(self.running))

    def preempt(self, step: Step, request: Request, given: int = 0) -> None:
        """Throw out a running request, to the queue's front; it will compute all its tokens again.

        `given`: the tokens that this step had given it already.
        """
        if request in self.prefilling:
            del self.prefilling[request]
            copies = self._copies_at(request, request.computed_tokens + given)
        else:
            self._stop(request)
            copies = self._copies(request, request.computed_tokens + given)
        self.blocks.give_back(copies)
        self._leave(request)
        self.blocks.release(request, request.computed_tokens + given, request.made_tokens)
        request.reached_tokens = max(request.reached_tokens, request.computed_tokens)
        request.computed_tokens = 0
        request.preemptions += 1
        if self.limits.policy == "priority":
            self.enqueue(request)
        else:
            self.waiting.appendleft(request)
        step.preempted = [*step.preempted, request]

    def steady_steps(self) -> int:
        """Steps like this one until a request ends or blocks run out; this step's blocks are taken."""
        steps = self._next_end() - self.tick
        free, size = self.blocks.free, self.limits.block_size
        free //= self.limits.kv_groups or 1
        if -(-steps // size) * self.decoding <= free or not self.limits.kv_groups:
            return steps
        for more in range(1, steps):
            free -= self.phases[(self.tick + more) % size]
            if free < 0:
                return more
        return steps

    def finish(self, step: Step, steps: int, now_s: float, start_s: float) -> list[Request]:
        """A step, or `steps` alike, is through at `now_s`: tokens are made, some requests are done."""
        done: list[Request] = []
        if steps > 1:
            self._take_ahead(steps)
        step.kv_blocks = self.blocks.used
        ticks = 0 if step.stalled else steps
        step.made_tokens = self.decoding * ticks
        self.tick += ticks
        self.kv_tokens += self.decoding * ticks
        for request in step.held_back:
            step.made_tokens -= request.samples
            self._shift(request, -1)
        ends = self.ends
        while ends and ends[0][0] <= self.tick:
            tick, _, request = heapq.heappop(ends)
            if request.end_tick == tick and request in self.running:
                self._stop(request)
                done.append(request)
        for request, tokens, _ in step.chunks:
            if request.first_scheduled_s == NOT_YET:
                request.first_scheduled_s = start_s
            request.computed_tokens += tokens
            if request.computed_tokens < request.prompt_tokens + request.made_tokens:
                continue
            del self.prefilling[request]
            request.made_tokens += 1
            step.made_tokens += request.samples
            if request.first_token_s == NOT_YET:
                request.first_token_s = now_s
            if request.made_tokens == request.output_tokens or self.prompts_only:
                done.append(request)
            else:
                self._start(request)
        for request in done:
            request.done_s = now_s
            self._leave(request)
            if not self.prompts_only:
                self.let_go(request)
        return done

    def let_go(self, request: Request) -> None:
        """Free the memory of a request that is through."""
        computed = request.computed_tokens
        if request.samples > 1:
            self.blocks.give_back(self._copies(request, computed))
        self.blocks.release(request, computed, computed - request.prompt_tokens)
        self.blocks.forget(request)

    def _leave(self, request: Request) -> None:
        del self.running[request]
        self.sequences -= request.samples

    def _copies(self, request: Request, tokens: int) -> int:
        """Blocks of the second and further answers: all but the prompt's full ones, which they share.

            (n − 1) · (ceil(tokens / block_size) − floor(prompt / block_size))

        The prompt's last block is copied when an answer first writes to it.
        Source: PagedAttention (Kwon et al. 2023), section 4.4, parallel sampling.
        """
        if request.samples == 1:
            return 0
        shared = request.prompt_tokens // self.limits.block_size
        return (request.samples - 1) * (self.blocks.blocks_for(tokens) - shared * self.limits.kv_groups)

    def _copies_at(self, request: Request, computed: int) -> int:
        """The copies that are due when a running request's prompt is computed so far."""
        whole = request.prompt_tokens + request.made_tokens
        return self._copies(request, computed) if computed == whole else 0

    def _take_ahead(self, steps: int) -> None:
        """The blocks of the steps after the first."""
        size = self.limits.block_size
        rounds, rest = divmod(steps - 1, size)
        needed = rounds * self.decoding
        first = (self.tick + 1) % size
        needed += sum(self.phases[first : first + rest]) + sum(self.phases[: max(0, first + rest - size)])
        if needed:
            self.blocks.take(needed * self.limits.kv_groups)

    def _start(self, request: Request) -> None:
        """A request decodes from this tick on."""
        answers = request.samples
        self.decoding += answers
        self.kv_tokens += answers * request.computed_tokens
        request.since_tick = self.tick
        self.phases[(self.tick - request.computed_tokens) % self.limits.block_size] += answers
        request.end_tick = self.tick + request.output_tokens - request.made_tokens
        self.order += 1
        heapq.heappush(self.ends, (request.end_tick, self.order, request))

    def _stop(self, request: Request) -> None:
        """A request decodes no more; its counts are those of this tick."""
        since, answers = request.since_tick, request.samples
        self.phases[(since - request.computed_tokens) % self.limits.block_size] -= answers
        request.computed_tokens += self.tick - since
        request.made_tokens += self.tick - since
        request.end_tick = 0
        self.decoding -= answers
        self.kv_tokens -= answers * request.computed_tokens

    def _shift(self, request: Request, tokens: int) -> None:
        """A decoding request is so many tokens ahead of the tick; −1 where it was not in the step."""
        size, answers = self.limits.block_size, request.samples
        self.phases[(request.since_tick - request.computed_tokens) % size] -= answers
        request.since_tick -= tokens
        self.phases[(request.since_tick - request.computed_tokens) % size] += answers
        request.end_tick -= tokens
        self.kv_tokens += answers * tokens
        self.order += 1
        heapq.heappush(self.ends, (request.end_tick, self.order, request))

    def _next_end(self) -> int:
        ends = self.ends
        while ends[0][2].end_tick != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0]
