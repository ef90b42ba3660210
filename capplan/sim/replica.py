"""One engine replica at work: requests that wait, prefill and decode, and what a step makes of them.

Requests that decode advance together, one token a tick, so none of them is touched until something happens to
it: a request decodes since a tick, ends at a tick, and needs a block whenever its tokens fill the last one.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from capplan.sim.kv_blocks import KvBlocks
from capplan.sim.request import NOT_YET, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine allows, under vLLM's names; `kv_blocks` are those that requests can use.

    `reserve_full`: a prompt is admitted only if all of it has room. `spare_blocks` stay free on admission.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int = 16
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    prefix_caching: bool = False
    reserve_full: bool = True
    spare_blocks: int = 0


class Step:
    """What one step computes: `decoding` sequences over `kv_tokens`, and `chunks` of prompts.

    A chunk is (request, tokens, tokens before them); together they have `prompt_tokens` and `prompt_pairs` of
    queries and keys, n · past + n · (n + 1) / 2 each. A lone token after the prompt, as after a preemption, is
    no prompt: it counts among the decoding. `kv_blocks` are in use when the step ends, before requests leave.
    `steady`: with nobody new, the next step would be like this one until a request ends or blocks run out.
    `open`: a request that arrives now would be let in.
    """

    __slots__ = (
        "chunks",
        "decoding",
        "held_back",
        "kv_blocks",
        "kv_tokens",
        "open",
        "preempted",
        "prompt_pairs",
        "prompt_sequences",
        "prompt_tokens",
        "resumed",
        "steady",
    )

    def __init__(self) -> None:
        self.decoding = 0
        self.kv_tokens = 0
        self.kv_blocks = 0
        self.prompt_sequences = 0
        self.prompt_tokens = 0
        self.prompt_pairs = 0
        self.chunks: list[tuple[Request, int, int]] = []
        self.preempted: list[Request] = []
        self.held_back: list[Request] = []
        self.resumed = 0
        self.steady = False
        self.open = False

    def add(self, request: Request, tokens: int, past: int) -> None:
        """A chunk of a prompt, or of a preempted request's tokens."""
        self.chunks.append((request, tokens, past))
        if tokens == 1 and past >= request.prompt_tokens:
            self.decoding += 1
            self.kv_tokens += past
            return
        self.prompt_sequences += 1
        self.prompt_tokens += tokens
        self.prompt_pairs += tokens * past + tokens * (tokens + 1) // 2


class Replica:
    """The state that a scheduler reads and changes.

    `waiting` in order; `running` in order of admission, of them `prefilling`, with prompt tokens left. The
    `decoding` others hold `kv_tokens` tokens together.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = KvBlocks(
            total=limits.kv_blocks, block_size=limits.block_size, caching=limits.prefix_caching
        )
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}
        self.prefilling: dict[Request, None] = {}
        self.decoding = 0
        self.kv_tokens = 0
        self.tick = 0
        self._phases = [0] * limits.block_size
        self._ends: list[tuple[int, int, Request]] = []
        self._order = 0

    def context(self, request: Request) -> int:
        """Tokens of a running request that have their KV."""
        if request in self.prefilling:
            return request.computed_tokens
        return request.computed_tokens + self.tick - request.since_tick

    def blocks_to_decode(self) -> int:
        """Blocks that the decoding requests need for their next token."""
        return self._phases[self.tick % self.limits.block_size]

    def decode_all(self, step: Step) -> None:
        """All decoding requests make a token in this step."""
        self.blocks.take(self.blocks_to_decode())
        step.decoding += self.decoding
        step.kv_tokens += self.kv_tokens

    def decode_one(self, step: Step, request: Request) -> bool:
        """One decoding request makes a token in this step; False where its block is missing."""
        context = self.context(request)
        if context % self.limits.block_size == 0:
            if not self.blocks.free:
                return False
            self.blocks.take(1)
        step.decoding += 1
        step.kv_tokens += context
        return True

    def chunk(self, step: Step, request: Request, tokens: int) -> bool:
        """A running prompt advances by so many tokens in this step; False where blocks are missing."""
        past = request.computed_tokens
        if not self.blocks.grow(request, past, past + tokens):
            return False
        step.add(request, tokens, past)
        return True

    def admit(self, step: Step, request: Request, most: int) -> int:
        """Let the request in with a chunk of `most` tokens at most; the chunk's tokens, 0: no room."""
        limits = self.limits
        tokens = request.prompt_tokens + request.made_tokens
        cached = self.blocks.admit(
            request, tokens=tokens, limit=most, whole=limits.reserve_full, spare=limits.spare_blocks
        )
        if cached is None:
            return 0
        chunk = min(tokens - cached, most)
        request.computed_tokens = cached
        if request.preemptions:
            step.resumed += 1
        else:
            request.cached_tokens = cached
        self.running[request] = None
        self.prefilling[request] = None
        step.add(request, chunk, cached)
        return chunk

    def preempt(self, step: Step, request: Request) -> None:
        """Throw out a running request; it goes to the queue's front and will compute all its tokens again."""
        if request in self.prefilling:
            del self.prefilling[request]
        else:
            self._stop(request)
        del self.running[request]
        self.blocks.release(request, request.computed_tokens, request.made_tokens)
        request.computed_tokens = 0
        request.preemptions += 1
        self.waiting.appendleft(request)
        step.preempted.append(request)

    def steady_steps(self) -> int:
        """Steps like this one until a request ends or blocks run out; this step's blocks are taken already."""
        steps = self._next_end() - self.tick
        free, size = self.blocks.free, self.limits.block_size
        if -(-steps // size) * self.decoding <= free:
            return steps
        for more in range(1, steps):
            free -= self._phases[(self.tick + more) % size]
            if free < 0:
                return more
        return steps

    def finish(self, step: Step, steps: int, now_s: float, start_s: float) -> list[Request]:
        """A step, or `steps` alike, is through at `now_s`: tokens are made, some requests are done."""
        done: list[Request] = []
        if steps > 1:
            self._take_ahead(steps)
        step.kv_blocks = self.blocks.used
        self.tick += steps
        self.kv_tokens += self.decoding * steps
        for request in step.held_back:
            self._hold_back(request)
        ends = self._ends
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
            if request.first_token_s == NOT_YET:
                request.first_token_s = now_s
            if request.made_tokens == request.output_tokens:
                done.append(request)
            else:
                self._start(request)
        for request in done:
            request.done_s = now_s
            del self.running[request]
            self.blocks.release(
                request, request.computed_tokens, request.computed_tokens - request.prompt_tokens
            )
            self.blocks.forget(request)
        return done

    def _take_ahead(self, steps: int) -> None:
        """The blocks of the steps after the first."""
        size = self.limits.block_size
        rounds, rest = divmod(steps - 1, size)
        needed = rounds * self.decoding
        first = (self.tick + 1) % size
        needed += sum(self._phases[first : first + rest]) + sum(self._phases[: max(0, first + rest - size)])
        self.blocks.take(needed)

    def _start(self, request: Request) -> None:
        """A request decodes from this tick on."""
        self.decoding += 1
        self.kv_tokens += request.computed_tokens
        request.since_tick = self.tick
        self._phases[(self.tick - request.computed_tokens) % self.limits.block_size] += 1
        request.end_tick = self.tick + request.output_tokens - request.made_tokens
        self._order += 1
        heapq.heappush(self._ends, (request.end_tick, self._order, request))

    def _stop(self, request: Request) -> None:
        """A request decodes no more; its counts are those of this tick."""
        since = request.since_tick
        self._phases[(since - request.computed_tokens) % self.limits.block_size] -= 1
        request.computed_tokens += self.tick - since
        request.made_tokens += self.tick - since
        request.end_tick = 0
        self.decoding -= 1
        self.kv_tokens -= request.computed_tokens

    def _hold_back(self, request: Request) -> None:
        """A decoding request was not in the step that has just ended: it lags a tick behind."""
        size = self.limits.block_size
        self._phases[(request.since_tick - request.computed_tokens) % size] -= 1
        request.since_tick += 1
        self._phases[(request.since_tick - request.computed_tokens) % size] += 1
        request.end_tick += 1
        self.kv_tokens -= 1
        self._order += 1
        heapq.heappush(self._ends, (request.end_tick, self._order, request))

    def _next_end(self) -> int:
        ends = self._ends
        while ends[0][2].end_tick != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0]
