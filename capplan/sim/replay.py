"""The replay door: an engine's logged requests, limits and rule of step times, in whole microseconds."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan.errors import InputError, shown
from capplan.sim.replica import Limits, Step
from capplan.sim.request import Request
from capplan.sim.traces import TraceWorkload

MOST: Final = 1 << 40
"""Of any number in a limits file."""
_HINT: Final = "the log's own JSON: see docs/simulate.md, Replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes:
    """Step times by a rule, in whole microseconds.

    base + prompt_token · prompt tokens + decode_sequence · decoding sequences + context_token · contexts
    """

    base: float
    prompt_token: float
    decode_sequence: float
    context_token: float

    def _step(self, prompt_tokens: int, decoding: int, kv_tokens: int) -> int:
        return round(
            self.base
            + self.prompt_token * prompt_tokens
            + self.decode_sequence * decoding
            + self.context_token * kv_tokens
        )

    def step_s(self, step: Step) -> float:
        """One step, in microseconds."""
        return self._step(step.prompt_tokens, step.decoding, step.kv_tokens)

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        """Decode-only steps in a row, each rounded by itself."""
        passed, steps = 0, 0
        while not steps or (steps < most and passed < until_s):
            passed += self._step(0, decoding, kv_tokens + steps * decoding)
            steps += 1
        return steps, passed


class LoggedRequests:
    """Requests of a log, on a clock of whole microseconds; the first `prefix` tokens of all prompts agree.

    Columns as of any plain trace, and `priority` where the log has one.
    """

    count: int | None

    def __init__(self, path: Path, prefix: int) -> None:
        self._trace = TraceWorkload(path, prefix_shared=prefix)
        self.path, self.shares = path, prefix > 0
        self.count = self._trace.count

    def arrivals(self) -> Iterator[Request]:
        """Requests in order of arrival."""
        for request, priority in zip(self._trace.arrivals(), self._priorities(), strict=False):
            request.arrival_s = round(request.arrival_s * 1e6)
            request.priority = priority
            yield request

    def _priorities(self) -> Iterator[int]:
        with self.path.open(encoding="utf-8", newline="") as stream:
            for line, row in enumerate(csv.DictReader(stream), 2):
                text = row.get("priority") or "0"
                try:
                    yield int(text)
                except ValueError:
                    raise InputError(
                        f"priority {shown(text)}", where=f"{self.path}:{line}", hint="a whole number"
                    ) from None

    def after(self, request: Request, now_s: float) -> Request | None:
        """Nothing follows from an answer."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What an engine was run with: its limits, its step times, and the prefix that all prompts share."""

    limits: Limits
    times: LinearTimes
    prefix: int


def read_limits(path: Path) -> Logged:
    """The limits file of a log; num_blocks counts the null block, which no request can use.

    Needed: max_num_seqs, max_num_batched_tokens, num_blocks, block_size, step_base_us, us_per_prefill_token,
    us_per_decode_seq, us_per_ctx_token. Known: max_model_len, long_prefill_threshold, policy (fcfs,
    priority), prefix_caching, reserve_full, watermark, prefix. Other keys are the log's own notes.
    Raises InputError for a file that is none, a key missing or out of range, and another policy.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror or error}", where=str(path), hint="check the path"
        ) from None
    except (ValueError, RecursionError):
        raise InputError("no JSON", where=str(path), hint=_HINT) from None
    if not isinstance(data, dict):
        raise InputError("a list or value where limits should be", where=str(path), hint=_HINT)
    read = _Keys(data, path)
    policy = data.get("policy", "fcfs")
    if policy not in ("fcfs", "priority"):
        raise InputError(f"policy {shown(policy)}", where=str(path), hint="fcfs or priority")
    blocks = read.whole("num_blocks", least=2)
    return Logged(
        limits=Limits(
            max_num_seqs=read.whole("max_num_seqs"),
            max_num_batched_tokens=read.whole("max_num_batched_tokens"),
            kv_blocks=blocks - 1,
            block_size=read.whole("block_size"),
            max_model_len=read.whole("max_model_len", default=MOST),
            long_prefill_token_threshold=read.whole("long_prefill_threshold", least=0, default=0),
            prefix_caching=bool(read.whole("prefix_caching", least=0, default=0)),
            reserve_full=bool(read.whole("reserve_full", least=0, default=1)),
            policy=policy,
            spare_blocks=int(read.number("watermark", default=0.0) * blocks),
        ),
        times=LinearTimes(
            base=read.number("step_base_us"),
            prompt_token=read.number("us_per_prefill_token"),
            decode_sequence=read.number("us_per_decode_seq"),
            context_token=read.number("us_per_ctx_token"),
        ),
        prefix=read.whole("prefix", least=0, default=0),
    )


class _Keys:
    """Numbers of a limits file, each in its range."""

    def __init__(self, data: Mapping[str, Any], path: Path) -> None:
        self.data, self.path = data, path

    def whole(self, key: str, *, least: int = 1, default: int | None = None) -> int:
        """A whole number from `least`; true and false are 1 and 0."""
        value = self.data.get(key, default)
        if not isinstance(value, int) or not least <= value <= MOST:
            raise self._wrong(key, value, f"a whole number from {least}")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number, 0 or more."""
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
            raise self._wrong(key, value, "a number, 0 or more")
        return float(value)

    def _wrong(self, key: str, value: Any, wanted: str) -> InputError:
        what = f"{key} is missing" if value is None else f"{key} is {shown(value)}"
        return InputError(what, where=f"{self.path}: {key}", hint=f"{wanted}; {_HINT}")
