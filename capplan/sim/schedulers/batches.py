"""A replica that serves one batch after another: rows of equal length, held until the last one ends."""

from capplan.sim.contiguous import ContiguousReplica
from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request


class RowsKv:
    """Memory of one batch: `rows` of as many blocks, taken when it begins, free when it ends."""

    def __init__(self, limits: Limits) -> None:
        self.total, self.block_size, self._groups = limits.kv_blocks, limits.block_size, limits.kv_groups
        self.free: int = self.total

    @property
    def used(self) -> int:
        """Blocks of the batch."""
        return self.total - self.free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return self._groups * -(-tokens // self.block_size)

    def limited_blocks(self, request: Request) -> int:
        """None: every layer keeps all tokens."""
        return 0

    def begin(self, rows: int, tokens: int) -> None:
        """So many rows of so many tokens."""
        self.free = self.total - rows * self.blocks_for(tokens)

    def end(self) -> None:
        """The batch is through."""
        self.free = self.total

    def admit(
        self, request: Request, *, tokens: int, limit: int, whole: bool = False, spare: int = 0
    ) -> int | None:
        """A request of the batch has its row."""
        return 0

    def cached_tokens(self, request: Request) -> int:
        """None: nothing is shared."""
        return 0

    def grow(self, request: Request, computed: int, upto: int) -> bool:
        """A row is long enough."""
        return True

    def take(self, count: int) -> None:
        """Nothing is taken beyond the rows."""

    def give_back(self, count: int) -> None:
        """Nothing is held beyond the rows."""

    def release(self, request: Request, computed: int, made: int = 0) -> None:
        """A row stays until the batch ends."""

    def forget(self, request: Request) -> None:
        """Nothing is remembered of a request."""


class BatchReplica(ContiguousReplica):
    """Requests in batches of `width` rows, prompts padded to the longest.

    `together`: an answer is delivered when all of its batch are, those that wait for it `undelivered`.
    """

    rows: RowsKv

    def __init__(self, limits: Limits, *, together: bool = False) -> None:
        Replica.__init__(self, limits, RowsKv(limits))
        assert isinstance(self.blocks, RowsKv)
        self.rows = self.blocks
        self.together = together
        self.undelivered: list[Request] = []
        self.width = 0
        self._prompt_tokens = 0
        self._since_tick = 0

    def fits(self, request: Request) -> bool:
        """Whether the request has room in a batch of its own."""
        row = request.prompt_tokens + self.limits.new_tokens(request)
        rows_fit = request.samples * self.rows.blocks_for(row) <= self.rows.total
        return Replica.fits(self, request) and rows_fit

    def begin(self, step: Step) -> None:
        """The next batch: as many of those waiting, in order, as there are places and memory for."""
        prompt = new = 0
        waiting, limits = self.waiting, self.limits
        while waiting and self.sequences + waiting[0].samples <= limits.max_num_seqs:
            first = waiting[0]
            prompt_after = max(prompt, first.prompt_tokens)
            new_after = max(new, limits.new_tokens(first))
            row = self.rows.blocks_for(prompt_after + new_after)
            if (self.sequences + first.samples) * row > self.rows.total:
                break
            prompt, new = prompt_after, new_after
            self.admit(step, first, first.prompt_tokens)
            waiting.popleft()
        self.width, self._prompt_tokens, self._since_tick = self.sequences, prompt, self.tick
        self.rows.begin(self.width, prompt + new)
        padding = Step()
        prompts = len(step.chunks)
        padding.prompt_tokens = prompts * prompt - step.prompt_tokens
        padding.prompt_pairs = prompts * (prompt * (prompt + 1) // 2) - step.prompt_pairs
        step.padding = padding
        step.stalled = True

    def go_on(self, step: Step) -> None:
        """The batch makes a token a row; rows whose request has ended make one in vain."""
        self.decode_all(step)
        context = self._prompt_tokens + self.tick - self._since_tick
        padding = Step()
        padding.decoding = self.width - step.decoding
        padding.kv_tokens = self.width * context - step.kv_tokens
        step.padding = padding
        step.steady = True

    def finish(self, step: Step, steps: int, now_s: float, start_s: float) -> list[Request]:
        """A step, or `steps` alike, is through."""
        done = super().finish(step, steps, now_s, start_s)
        if self.together:
            self.undelivered += done
            done = []
        if not self.running:
            self.rows.end()
            self.width = 0
            done, self.undelivered = done + self.undelivered, []
            for request in done:
                request.done_s = now_s
        return done
