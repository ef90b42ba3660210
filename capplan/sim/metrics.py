"""What is kept of a simulation: a row a finished request, and the engine's state folded into a timeline.

The loop calls it once a step (or run of steps alike) and once a request, so a call only packs numbers into a
buffer; full buffers are worked off by numpy.
"""

from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request
from capplan.sim.timeline import COLUMNS, Timeline

ROWS: Final = 16384
"""Rows of a buffer."""
REQUEST_COLUMNS: Final = (
    "index",
    "arrival_s",
    "first_scheduled_s",
    "first_token_s",
    "done_s",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "samples",
    "preemptions",
    "truncated",
    "session",
    "turn",
)
TIMES: Final = slice(1, 5)
"""The columns that are moments."""
_STEP: Final = Struct(f"{len(COLUMNS)}d")
_REQUEST: Final = Struct(f"{len(REQUEST_COLUMNS)}d")

Slope = Callable[[int, int], float]
"""(sequences, their contexts) → seconds that one more token in all contexts adds to a decode-only step."""
Told = Callable[[float, int], None]
"""(the simulation's time in s, requests finished): called now and then."""


class Metrics:
    """The Recorder of a simulation; `slots`, `kv_blocks` and `kv_groups` are the replica's limits.

    `slope` resolves the gaps between tokens inside of runs of steps; without it a run's gaps count by their
    mean. `told` hears of the progress whenever a buffer is full. `clock_s` is the unit of the simulation's
    clock in seconds; everything kept is in seconds.
    Memory: 104 bytes a request and 26 MB.
    """

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        block_size: int,
        kv_groups: int = 1,
        slope: Slope | None = None,
        told: Told | None = None,
        clock_s: float = 1.0,
    ) -> None:
        self.timeline = Timeline(
            slots=slots, kv_blocks=kv_blocks, block_size=block_size, kv_groups=kv_groups, slope=slope
        )
        self.finished = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.steps_taken = 0
        self.end_s = 0.0
        self.rejections: list[tuple[int, float, int, int]] = []
        self.told = told
        self._clock_s = clock_s
        self._steps = bytearray(_STEP.size * ROWS)
        self._step_at = 0
        self._requests = bytearray(_REQUEST.size * ROWS)
        self._request_at = 0
        self._full: list[bytes] = []
        # Who decodes but has not had a token in the last step: since when.
        self._decoding = 0
        self._stalled: list[tuple[float, int]] = []
        self._thrown_out: dict[Request, float] = {}
        self._held_back: dict[Request, float] = {}
        self._gaps: list[tuple[float, float, int]] = []

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """`count` steps alike have passed."""
        decoding, held = step.decoding, step.kv_tokens
        gaps = decoding * count
        held += gaps
        for request, tokens, past in step.chunks:
            if tokens > 1 or past < request.prompt_tokens:
                held += past + tokens
            if request.preemptions:
                self.recomputed_tokens += max(0, min(past + tokens, request.reached_tokens) - past)
        if step.preempted:
            # Those that decoded wait by themselves from now on.
            out = (request for request in step.preempted if request.made_tokens)
            self._decoding -= sum(request.samples for request in out if request not in self._thrown_out)
            if self._stalled:
                self._leave(replica, step, count)
        if step.stalled or not decoding:
            if self._decoding and step.chunks:
                self._stall(replica, step, start_s, end_s)
        elif self._stalled:
            gaps -= self._caught_up(decoding, start_s + (end_s - start_s) / count, end_s)
        if step.preempted or step.held_back or self._thrown_out or self._held_back:
            first_end_s = start_s + (end_s - start_s) / count
            gaps -= self._out_of_step(replica, step, start_s, first_end_s, end_s)
        waiting_to_decode, self._decoding = self._decoding, replica.decoding
        at = self._step_at
        _STEP.pack_into(
            self._steps,
            at,
            start_s,
            end_s,
            count,
            decoding,
            step.kv_tokens,
            step.prompt_tokens,
            gaps,
            step.kv_blocks,
            held,
            len(replica.waiting),
            (decoding or waiting_to_decode) + step.prompt_sequences + len(step.held_back),
            len(step.preempted),
            step.made_tokens,
        )
        self._step_at = at + _STEP.size
        if self._step_at == len(self._steps):
            self._fold()
        for request in done:
            self.keep(request)

    def keep(self, request: Request) -> None:
        """A finished request."""
        at = self._request_at
        _REQUEST.pack_into(
            self._requests,
            at,
            request.index,
            request.arrival_s,
            request.first_scheduled_s,
            request.first_token_s,
            request.done_s,
            request.prompt_tokens,
            request.cached_tokens,
            request.output_tokens,
            request.samples,
            request.preemptions,
            request.truncated,
            request.session,
            request.turn,
        )
        self._request_at = at + _REQUEST.size
        if self._request_at == len(self._requests):
            self._full.append(bytes(self._requests))
            self._request_at = 0

    def rejected(self, request: Request, now_s: float) -> None:
        """A request that could never be served."""
        self.rejections.append(
            (
                request.index,
                request.arrival_s * self._clock_s,
                request.prompt_tokens,
                request.output_tokens,
            )
        )

    def requests(self) -> Any:
        """The finished requests in order of arrival: an array with the REQUEST_COLUMNS as its columns."""
        import numpy as np

        raw = b"".join([*self._full, bytes(self._requests[: self._request_at])])
        found = np.frombuffer(raw).reshape(-1, len(REQUEST_COLUMNS))
        if self._clock_s != 1:
            found = found.copy()
            found[:, TIMES] *= self._clock_s
        return found[np.lexsort((found[:, 0], found[:, 1]))]

    def close(self) -> None:
        """Work off what is still in the buffers; more may follow."""
        self._fold()

    def _fold(self) -> None:
        """Full buffer → timeline."""
        import numpy as np

        rows = np.frombuffer(bytes(self._steps[: self._step_at])).reshape(-1, len(COLUMNS))
        self._step_at = 0
        self.finished = (len(self._full) * len(self._requests) + self._request_at) // _REQUEST.size
        if not len(rows):
            return
        gaps = self._gaps
        if self._clock_s != 1:
            rows = rows.copy()
            rows[:, :2] *= self._clock_s
            gaps = [(end * self._clock_s, gap * self._clock_s, count) for end, gap, count in gaps]
        self.end_s = float(rows[-1, 1])
        self.steps_taken += int(rows[:, 2].sum())
        self.timeline.add(rows, gaps)
        self._gaps.clear()
        if self.told is not None:
            self.told(self.end_s, self.finished)

    def _stall(self, replica: Replica, step: Step, start_s: float, end_s: float) -> None:
        """A step of prompts alone: those that decode wait; those that begin to had their token at its end."""
        waiting = self._decoding - sum(request.samples for request in step.held_back)
        if not self._stalled and waiting > 0:
            self._stalled.append((start_s, waiting))
        begun = replica.decoding - self._decoding
        if begun > 0:
            self._stalled.append((end_s, begun))

    def _leave(self, replica: Replica, step: Step, count: int) -> None:
        """Requests thrown out after a wait for others' prompts: since when, each."""
        tick = replica.tick - (0 if step.stalled else count)
        for request in step.preempted:
            # Who began to decode in the wait had a token at the end of its own prompt.
            began = request.since_tick == tick
            at = next(
                (
                    at
                    for at, (since_s, _) in enumerate(self._stalled)
                    if at and since_s == request.first_token_s
                ),
                min(int(began), len(self._stalled) - 1),
            )
            since_s, sequences = self._stalled[at]
            self._stalled[at] = since_s, sequences - request.samples
            self._thrown_out.setdefault(request, since_s)

    def _caught_up(self, decoding: int, first_end_s: float, end_s: float) -> int:
        """The first step in which all decode again ends their wait; how many gaps that was."""
        left = decoding
        for since_s, sequences in self._stalled:
            sequences = min(sequences, left)
            self._gaps.append((end_s, first_end_s - since_s, sequences))
            left -= sequences
        self._stalled.clear()
        return decoding - left

    def _out_of_step(
        self, replica: Replica, step: Step, start_s: float, first_end_s: float, end_s: float
    ) -> int:
        """Requests thrown out or held back get their next token late; gaps that are no step's length."""
        special = 0
        for request, tokens, past in step.chunks:
            if not request.preemptions:
                continue
            since_s = self._thrown_out.get(request)
            if request in replica.prefilling:
                continue
            if since_s is not None:
                del self._thrown_out[request]
                self._gaps.append((end_s, end_s - since_s, request.samples))
            # A lone token was counted among the decoding.
            special += tokens == 1 and past >= request.prompt_tokens
        for request in step.preempted:
            self.preemptions += 1
            last_s = self._held_back.pop(request, start_s)
            if request.made_tokens:
                self._thrown_out.setdefault(request, last_s)
        late = set(step.held_back)
        for request in [request for request in self._held_back if request not in late]:
            self._gaps.append((end_s, first_end_s - self._held_back.pop(request), request.samples))
            special += request.samples
        for request in step.held_back:
            self._held_back.setdefault(request, start_s)
        return special
