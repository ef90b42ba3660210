"""Multi-turn sessions: every prompt is the session so far, all prompts and answers, and new text.

    prompt of turn t = system prompt + Σ_{i<t} (text_i + answer_i) + text_t

A session is drawn whole when it starts, so that its turns, lengths and pauses do not depend on how fast
answers come: two schedulers see the same sessions.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from capplan.sim.arrivals import Arrivals, ThinkTime, user_starts
from capplan.sim.lengths import Lengths
from capplan.sim.load import Load
from capplan.sim.request import NOT_YET, Request, Segments
from capplan.sim.spelled import finite, split_kind, whole

SYSTEM_PROMPT: Final = "system prompt"
"""The segment that all prompts of a workload begin with."""
RETRY_S: Final = 1.0
"""A user whose request is rejected waits so long at least: no engine is asked endlessly at one moment."""
MAX_TURNS: Final = 10_000
TURN_FORMS: Final[Mapping[str, str]] = {"constant": "constant:4", "geometric": "geometric:4"}


@dataclass(frozen=True, slots=True)
class Turns:
    """How many turns a session has: always the mean, or geometric: each is the last with chance 1 / mean."""

    mean: float
    geometric: bool = False

    @property
    def mean_earlier(self) -> float:
        """Turns before a turn, on average over all turns: E[T·(T − 1) / 2] / E[T].

        constant T: (T − 1) / 2;  geometric of mean m: m − 1, for long sessions have most of the turns
        """
        return self.mean - 1 if self.geometric else (self.mean - 1) / 2

    def sampler(self, rng: random.Random) -> Callable[[], int]:
        """A function that draws one session's turns."""
        if not self.geometric or self.mean == 1:
            turns = round(self.mean)
            return lambda: turns
        # Inverse of P(turns > k) = (1 − 1/mean)^k.
        draw, log, per_turn = rng.random, math.log, math.log1p(-1 / self.mean)
        return lambda: min(1 + int(log(1.0 - draw()) / per_turn), MAX_TURNS)

    def describe(self) -> str:
        """The number in words."""
        return f"{self.mean:g} turns" + (" on average, geometric" if self.geometric else "")


def answered(request: Request) -> bool:
    """Whether an answer came; a rejected request has none."""
    return request.first_token_s != NOT_YET


def parse_turns(text: str | int, *, where: str) -> Turns:
    """Turns from their spelling: `4`, `constant:4`, `geometric:4`."""
    spelling = str(text).strip()
    kind, rest = "constant", spelling
    if not spelling[:1].isdigit() and spelling[:1] not in ("-", "+", "."):
        kind, rest = split_kind(spelling, TURN_FORMS, where)
    example = TURN_FORMS[kind]
    if kind == "constant":
        return Turns(whole(rest, "turns", where, example, low=1, high=MAX_TURNS))
    mean = finite(rest, "mean turns", where, example)
    # The chance of a cut at MAX_TURNS is below e^-100 then.
    whole(str(math.ceil(mean)), "mean turns", where, example, low=1, high=MAX_TURNS // 100)
    return Turns(max(mean, 1.0), geometric=True)


class Session:
    """One session under way: what its next turns will be, and its prompt so far."""

    __slots__ = ("number", "segments", "texts", "turn")

    def __init__(self, number: int, texts: list[tuple[int, int, float]], system_tokens: int) -> None:
        """`texts`: of each turn the new tokens, the answer's tokens and the pause after it in s."""
        self.number = number
        self.texts = texts
        self.turn = 0
        self.segments: Segments = ((SYSTEM_PROMPT, system_tokens),) if system_tokens else ()

    def next_request(self, index: int, arrival_s: float, samples: int) -> Request:
        """The request of the turn that has come; its answer is part of the prompts to follow."""
        new_tokens, output_tokens, _ = self.texts[self.turn]
        answer = (self.number, self.turn, "answer")
        segments = (*self.segments, ((self.number, self.turn, "text"), new_tokens))
        request = Request(
            index,
            arrival_s,
            sum(tokens for _, tokens in segments),
            output_tokens,
            segments=segments,
            output_key=answer,
            session=self.number,
            turn=self.turn,
            samples=samples,
        )
        self.segments = (*segments, (answer, output_tokens))
        self.turn += 1
        return request


class SessionWorkload:
    """Sessions that start by themselves (`starts` an arrival process) or one after another (`users`).

    A turn follows its answer after the pause drawn for it; a user's next session follows the last answer in
    the same way. A session ends before a turn whose prompt and answer would pass `max_context_tokens`
    (counted in `cut_sessions`), and after a turn that is rejected. No turn starts at or after `duration_s`;
    sessions start until they have `requests` turns between them, the last one shortened.
    """

    shares = True
    count: int | None = None  # a rejected turn's followers never come

    def __init__(
        self,
        *,
        isl: Lengths,
        osl: Lengths,
        turns: Turns,
        think_time: ThinkTime,
        streams: Callable[[str], random.Random],
        starts: Arrivals | None = None,
        users: int = 0,
        ramp_up_s: float = 0.0,
        requests: int | None = None,
        duration_s: float = math.inf,
        system_prompt_tokens: int = 0,
        max_context_tokens: int | None = None,
        samples: int = 1,
    ) -> None:
        self.isl, self.osl, self.turns, self.think_time = isl, osl, turns, think_time
        self.streams = streams
        self.starts = starts
        self.users = users
        self.ramp_up_s = ramp_up_s
        self.requests = math.inf if requests is None else requests
        self.duration_s = duration_s
        self.system_prompt_tokens = system_prompt_tokens
        self.max_context_tokens = math.inf if max_context_tokens is None else max_context_tokens
        self.samples = samples
        self._restart()

    def arrivals(self) -> Iterator[Request]:
        """The first turn of every session that starts by itself; from the beginning at each call."""
        self._restart()
        if self.starts is not None:
            yield from self._begin(self.starts.times(self.streams("arrivals")))
        else:
            # Drawn before the first answer can draw: a slow engine must not change them.
            yield from list(self._begin(user_starts(self.users, self.ramp_up_s)))

    def after(self, request: Request, now_s: float) -> Request | None:
        """The session's next turn; after its last one the user's next session, where there are users."""
        session = self._sessions[request.session]
        pause_s, served = session.texts[request.turn][2], answered(request)
        arrival_s = now_s + (pause_s if served else max(pause_s, RETRY_S))
        ends = arrival_s >= self.duration_s
        if served and not ends and session.turn < len(session.texts):
            return self._next(session, arrival_s)
        del self._sessions[request.session]
        if self.starts is None and not ends and self._planned < self.requests:
            return self._start(arrival_s)
        return None

    def load(self) -> Load:
        """Its means, sessions that `max_context_tokens` or `requests` cut short counted as whole."""
        isl, osl = self.isl.mean_tokens, self.osl.mean_tokens
        rate = None if self.starts is None else self.starts.request_per_s * self.turns.mean
        longest = self.max_context_tokens
        if not self.turns.geometric:
            a_turn = self.isl.max_tokens + self.osl.max_tokens
            longest = min(longest, self.system_prompt_tokens + round(self.turns.mean) * a_turn)
        return Load(
            request_per_s=None if rate == math.inf else rate,
            users=self.users or None,
            mean_prompt_tokens=self.system_prompt_tokens + self.turns.mean_earlier * (isl + osl) + isl,
            mean_output_tokens=osl,
            max_context_tokens=None if longest == math.inf else int(longest),
        )

    def describe(self) -> str:
        """The workload in words."""
        pace = f"{self.users} users" if self.starts is None else self.starts.describe()
        return (
            f"sessions of {self.turns.describe()}, {pace}; think time {self.think_time.describe()}; "
            f"system prompt {self.system_prompt_tokens} tokens; new text a turn {self.isl.describe()}; "
            f"answer {self.osl.describe()}"
        )

    def _restart(self) -> None:
        self.cut_sessions = 0
        self._planned = 0
        self._made = 0
        self._started = 0
        self._sessions: dict[int, Session] = {}
        self._draw_turns = self.turns.sampler(self.streams("turns"))
        self._draw_isl = self.isl.sampler(self.streams("isl"))
        self._draw_osl = self.osl.sampler(self.streams("osl"))
        self._draw_think = self.think_time.sampler(self.streams("think time"))

    def _begin(self, times: Iterator[float]) -> Iterator[Request]:
        for start_s in times:
            if start_s >= self.duration_s or self._planned >= self.requests:
                return
            yield self._start(start_s)

    def _start(self, start_s: float) -> Request:
        turns = int(min(self._draw_turns(), self.requests - self._planned))
        texts = [(self._draw_isl(), self._draw_osl(), self._draw_think()) for _ in range(turns)]
        contexts = accumulate((text + answer for text, answer, _ in texts), initial=self.system_prompt_tokens)
        fitting = sum(tokens <= self.max_context_tokens for tokens in contexts) - 1
        kept = max(fitting, 1)  # a first turn comes in any case, and may be rejected
        self.cut_sessions += kept < turns
        texts = texts[:kept]
        session = Session(self._started, texts, self.system_prompt_tokens)
        self._sessions[session.number] = session
        self._started += 1
        self._planned += len(texts)
        return self._next(session, start_s)

    def _next(self, session: Session, arrival_s: float) -> Request:
        request = session.next_request(self._made, arrival_s, self.samples)
        self._made += 1
        return request
