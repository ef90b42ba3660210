"""One request on its way through an engine, and where requests come from.

A prompt's identity is a list of segments, (key, tokens) from its beginning: two prompts share a prefix as far
as their segments agree. Tokens beyond the segments are the request's own and match nobody else's.
"""

from collections.abc import Hashable, Iterator
from typing import Final, Protocol

Segments = tuple[tuple[Hashable, int], ...]
NOT_YET: Final = -1.0
"""A moment that has not come."""


class Request:
    """One request; times in seconds on the simulation's clock, NOT_YET until they come.

    `output_tokens` counts the tokens it will make, the first one included. `output_key` names its output as a
    segment, for a later prompt that contains it (the next turn of a session); None: nobody asks for it.
    `session` and `turn` are the workload's own. `samples` answers of one prompt share its KV (--n).
    `reached_tokens` had their KV when it was thrown out.
    `computed_tokens` have their KV, `made_tokens` were sampled; while a request decodes both stand as they
    were at the replica's `since_tick`, and grow by one a tick (see replica.py).
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "computed_tokens",
        "done_s",
        "end_tick",
        "first_scheduled_s",
        "first_token_s",
        "index",
        "made_tokens",
        "output_key",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reached_tokens",
        "samples",
        "segments",
        "session",
        "since_tick",
        "truncated",
        "turn",
    )

    def __init__(
        self,
        index: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        *,
        segments: Segments = (),
        output_key: Hashable = None,
        session: int = 0,
        turn: int = 0,
        samples: int = 1,
        priority: int = 0,
    ) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.segments = segments
        self.output_key = output_key
        self.session = session
        self.turn = turn
        self.samples = samples
        self.priority = priority
        self.computed_tokens = 0
        self.made_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.reached_tokens = 0
        self.since_tick = 0
        self.end_tick = 0
        self.truncated = False
        self.first_scheduled_s = NOT_YET
        self.first_token_s = NOT_YET
        self.done_s = NOT_YET

    def rank(self) -> tuple[int, float, int]:
        """Its place in a queue by priority: the lowest number first, then the earliest."""
        return self.priority, self.arrival_s, self.index


class Workload(Protocol):
    """Where requests come from.

    `arrivals` are those that do not depend on answers, in order of arrival (streamed: never a whole list).
    `after` is what an answer brings about: a user's next request in a closed loop, a session's next turn; it
    arrives at `now_s` or later. `shares`: whether prompts may have segments in common. `count` is how many
    requests will come in all, None where nobody knows.
    """

    shares: bool
    count: int | None

    def arrivals(self) -> Iterator[Request]:
        """Requests in order of arrival."""
        ...

    def after(self, request: Request, now_s: float) -> Request | None:
        """The request that follows from a finished (or rejected) one, or None."""
        ...
