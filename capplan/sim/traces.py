"""Logged requests as a workload: a file's rows, checked, put in order, scaled in rate, repeated; streamed."""

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError, shown
from capplan.latency_question import MAX_TOKENS
from capplan.sim.load import Load
from capplan.sim.request import Request, Segments
from capplan.sim.sessions import SYSTEM_PROMPT
from capplan.sim.trace_forms import form_of
from capplan.sim.trace_rows import Row, block_segments, rows_of

BLOCK_TOKENS: Final = 512
"""Of a hash id in Mooncake's traces."""
MAX_TIME_S: Final = 1e12
MAX_KEPT_ROWS: Final = 200_000
"""A trace this short is kept, some 30 MB, and not read again for its next copy."""
Taken = tuple[float, int, int, Segments]
"""A row to take: time in s, prompt and output tokens, segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One copy of a trace, at its own rate."""

    requests: int
    span_s: float
    """From the first arrival to the last."""
    mean_prompt_tokens: float
    mean_output_tokens: float
    max_context_tokens: int
    """Prompt and output of the longest request."""
    failed: int
    """Rows of requests that had failed and are left out."""
    skipped: int
    """Bad rows left out."""

    @property
    def request_per_s(self) -> float:
        """Arrivals after the first one by the span; inf where all come at once."""
        return (self.requests - 1) / self.span_s if self.span_s else math.inf


class TraceWorkload:
    """The requests of a file, as logged or with options.

    `offset_s` leaves out the first seconds of the trace, `limit` takes so many requests, `duration_s` ends
    the simulation's arrivals. Time runs `rate_scale` times as fast, or so that the mean rate is
    `request_per_s` (a pass over the file finds its own). `repeat` copies follow one another, a mean gap
    apart; prompts of different copies have nothing in common but `prefix_shared`.
    Rows must be in order of time: `sort_rows` puts those right that stand up to so many rows too late.
    `skip_bad_rows` leaves broken, misplaced and impossible rows out; `skipped` counts them, a copy's worth.
    `failed` counts requests that had failed when logged (BurstGPT: 0 response tokens): always left out.
    """

    def __init__(
        self,
        path: Path,
        *,
        rate_scale: float | None = None,
        request_per_s: float | None = None,
        offset_s: float = 0.0,
        duration_s: float = math.inf,
        limit: int | None = None,
        repeat: int = 1,
        sort_rows: int = 0,
        skip_bad_rows: bool = False,
        prefix_shared: int = 0,
        samples: int = 1,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.path = path
        self.form = form_of(path)
        self.offset_s, self.duration_s = offset_s, duration_s
        self.limit, self.repeat = limit, repeat
        self.sort_rows, self.skip_bad_rows = sort_rows, skip_bad_rows
        self.prefix_shared, self.samples, self.block_tokens = prefix_shared, samples, block_tokens
        self.shares = self.form.blocks is not None or prefix_shared > 0
        self.count: int | None = None  # known after summary()
        self.skipped = 0
        self.first_skipped = ""
        self.failed = 0
        self._summary: TraceSummary | None = None
        if self.form.blocks is not None and prefix_shared:
            hint = "leave --prefix-shared out"
            raise InputError("the trace says itself what prompts share", where=str(path), hint=hint)
        self.rate_scale = 1.0 if rate_scale is None else rate_scale
        if request_per_s is not None:
            own = self.summary().request_per_s
            if own == math.inf:
                hint = "give no rate, or a trace with times"
                raise InputError("a trace whose requests come at once", where=str(path), hint=hint)
            self.rate_scale = request_per_s / own

    def summary(self) -> TraceSummary:
        """What one copy holds: a pass over the file, once."""
        if self._summary is None:
            self._summary = self._summarise()
            if self.duration_s == math.inf:
                self.count = self._summary.requests * self.repeat
        return self._summary

    def arrivals(self) -> Iterator[Request]:
        """Requests in order of arrival; the file is read anew at each call."""
        index, shift_s, end_s = 0, 0.0, self.duration_s
        scale, samples = self.rate_scale, self.samples
        keep = self.repeat > 1 and self.form.blocks is None
        kept: list[Taken] = []
        for copy in range(self.repeat):
            before = index
            first_s = time_s = 0.0
            for row in kept or self._rows(copy):
                time_s, prompt_tokens, output_tokens, segments = row
                if index == before:
                    first_s = time_s
                arrival_s = shift_s + time_s / scale
                if arrival_s >= end_s:
                    return
                yield Request(
                    index,
                    arrival_s,
                    prompt_tokens,
                    output_tokens,
                    segments=segments,
                    session=index,
                    samples=samples,
                )
                index += 1
                if keep and copy == 0:
                    # The next copy's rows: a list once it is whole, else read again.
                    kept.append(row)
                    if index == MAX_KEPT_ROWS:
                        keep, kept = False, []
            if index - before > 1:
                span_s = time_s - first_s
                shift_s += (span_s + span_s / (index - before - 1)) / scale
        if not index:
            self._refuse_empty()

    def after(self, request: Request, now_s: float) -> Request | None:
        """Nothing follows from an answer."""
        return None

    def load(self) -> Load:
        """Its means at the rate it is run; reads the file once."""
        summary = self.summary()
        rate = summary.request_per_s * self.rate_scale
        return Load(
            request_per_s=None if rate == math.inf else rate,
            mean_prompt_tokens=summary.mean_prompt_tokens,
            mean_output_tokens=summary.mean_output_tokens,
            max_context_tokens=summary.max_context_tokens,
        )

    def describe(self) -> str:
        """The workload in words."""
        parts = [f"{self.form.name} trace {self.path.name}"]
        if self.rate_scale != 1:
            parts.append(f"at {self.rate_scale:.6g} times its rate")
        if self.repeat > 1:
            parts.append(f"{self.repeat} copies")
        return ", ".join(parts)

    def _rows(self, copy: int) -> Iterator[Taken]:
        """One copy's rows to take, good and in order: time in s, prompt and output tokens, segments."""
        self.skipped, self.first_skipped, self.failed = 0, "", 0
        rows: Iterable[Row] = rows_of(self.path, self.form, self._bad)
        if self.sort_rows:
            rows = _sorted_within(rows, self.sort_rows)
        # None until the first row's time is known.
        origin_s = 0.0 if self.form.own_clock else None
        left = math.inf if self.limit is None else self.limit
        earliest_s, offset_s, has_blocks = 0.0, self.offset_s, self.form.blocks is not None
        shared = self.prefix_shared
        same: Segments = ((SYSTEM_PROMPT, shared),) if shared else ()
        for line, time_s, prompt_tokens, output_tokens, ids in rows:
            if origin_s is None and math.isfinite(time_s):
                origin_s = time_s
            time_s -= origin_s or 0.0
            if (
                earliest_s <= time_s < MAX_TIME_S
                and 0 < prompt_tokens <= MAX_TOKENS
                and 0 < output_tokens <= MAX_TOKENS
            ):
                segments: Segments | None = same
                if has_blocks:
                    segments = block_segments(ids, prompt_tokens, self.block_tokens, copy)
                elif prompt_tokens < shared:
                    segments = ((SYSTEM_PROMPT, prompt_tokens),)
                if segments is None:
                    self._bad(line, *self._wrong_blocks(ids, prompt_tokens))
                    continue
                earliest_s = time_s
                if time_s < offset_s:
                    continue
                yield time_s - offset_s, prompt_tokens, output_tokens, segments
                left -= 1
                if left <= 0:
                    return
            elif output_tokens == 0 and self.form.zero_output_is_failure:
                self.failed += 1
            else:
                self._bad(line, *self._wrong(time_s, earliest_s, prompt_tokens, output_tokens))

    def _wrong(self, time_s: float, earliest_s: float, prompt: int, output: int) -> tuple[str, str]:
        """What is wrong with a row that does not pass, and what to do."""
        for name, tokens in ((self.form.prompt, prompt), (self.form.output, output)):
            if not 0 < tokens <= MAX_TOKENS:
                hint = f"1 to {MAX_TOKENS:,} tokens; correct or remove the row, or give --skip-bad-rows"
                return f"{name} is {shown(tokens)}", hint
        if time_s < earliest_s and (earliest_s or not self.form.own_clock):
            hint = (
                "sort the file by time, or give --trace-sort ROWS to sort within so many, or --skip-bad-rows"
            )
            return f"{self.form.arrival} is {earliest_s - time_s:g} s before the row above", hint
        hint = "correct or remove the row, or give --skip-bad-rows"
        return f"{self.form.arrival} is {time_s:g} s, no time from 0 up", hint

    def _wrong_blocks(self, ids: Any, prompt_tokens: int) -> tuple[str, str]:
        need = -(-prompt_tokens // self.block_tokens)
        what = f"{len(ids)} ids" if isinstance(ids, list) else shown(ids)
        hint = f"{need}: a prompt of {prompt_tokens} tokens in blocks of {self.block_tokens}"
        return f"{self.form.blocks} holds {what}, not {need} numbers", f"{hint}; or give --skip-bad-rows"

    def _bad(self, line: int, what: str, hint: str) -> None:
        if not self.skip_bad_rows:
            raise InputError(what, where=f"{self.path}, line {line}", hint=hint)
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"line {line}: {what}"

    def _summarise(self) -> TraceSummary:
        requests = prompts = outputs = longest = 0
        first_s = time_s = 0.0
        for time_s, prompt_tokens, output_tokens, _ in self._rows(0):
            if not requests:
                first_s = time_s
            requests += 1
            prompts += prompt_tokens
            outputs += output_tokens
            longest = max(longest, prompt_tokens + output_tokens)
        if not requests:
            self._refuse_empty()
        return TraceSummary(
            requests=requests,
            span_s=time_s - first_s,
            mean_prompt_tokens=prompts / requests,
            mean_output_tokens=outputs / requests,
            max_context_tokens=longest,
            failed=self.failed,
            skipped=self.skipped,
        )

    def _refuse_empty(self) -> None:
        left_out = self.skipped + self.failed
        hint = "check the file, --trace-offset and --trace-limit" + (
            f"; {left_out} rows were left out" if left_out else ""
        )
        raise InputError("a trace without requests", where=str(self.path), hint=hint)


def _sorted_within(rows: Iterable[Row], window_rows: int) -> Iterator[Row]:
    """`rows` by time, given that none stands more than `window_rows` rows too late; ties in file order."""
    held: list[tuple[float, int, Row]] = []
    for row in rows:
        if not math.isfinite(row[1]):
            yield row  # an order it has not; the reader's check will refuse it
            continue
        entry = (row[1], row[0], row)
        if len(held) < window_rows:
            heapq.heappush(held, entry)
        else:
            yield heapq.heappushpop(held, entry)[2]
    while held:
        yield heapq.heappop(held)[2]
