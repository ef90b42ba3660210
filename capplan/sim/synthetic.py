"""Synthetic requests of one turn: such as come by themselves, and users who wait for their answers."""

import math
import random
from collections.abc import Callable, Iterator
from itertools import islice

from capplan.sim.arrivals import Arrivals, ThinkTime, user_starts
from capplan.sim.lengths import Lengths
from capplan.sim.load import Load
from capplan.sim.request import Request, Segments
from capplan.sim.sessions import RETRY_S, SYSTEM_PROMPT, answered


class Prompts:
    """Makes requests one after another: lengths from their streams, all prompts beginning alike."""

    def __init__(
        self,
        *,
        isl: Lengths,
        osl: Lengths,
        streams: Callable[[str], random.Random],
        system_prompt_tokens: int = 0,
        prefix_shared: int = 0,
        samples: int = 1,
    ) -> None:
        self.isl, self.osl, self.samples = isl, osl, samples
        self.streams = streams
        self.system_prompt_tokens = system_prompt_tokens
        self.shared_tokens = system_prompt_tokens + prefix_shared

    def maker(self) -> Callable[[int, float], Request]:
        """(index, arrival_s) → the next request; from the beginning of the streams at each call."""
        draw_isl = self.isl.sampler(self.streams("isl"))
        draw_osl = self.osl.sampler(self.streams("osl"))
        system_tokens, shared_tokens, samples = self.system_prompt_tokens, self.shared_tokens, self.samples
        shared: Segments = ((SYSTEM_PROMPT, shared_tokens),) if shared_tokens else ()

        def make(index: int, arrival_s: float) -> Request:
            prompt_tokens = system_tokens + draw_isl()
            segments = shared if prompt_tokens >= shared_tokens else ((SYSTEM_PROMPT, prompt_tokens),)
            return Request(
                index, arrival_s, prompt_tokens, draw_osl(), segments=segments, session=index, samples=samples
            )

        return make

    def load(self, request_per_s: float | None, users: int | None = None) -> Load:
        """Means of these requests at a rate or from users."""
        return Load(
            request_per_s=None if request_per_s == math.inf else request_per_s,
            users=users,
            mean_prompt_tokens=self.system_prompt_tokens + self.isl.mean_tokens,
            mean_output_tokens=self.osl.mean_tokens,
            max_context_tokens=self.system_prompt_tokens + self.isl.max_tokens + self.osl.max_tokens,
        )

    def describe(self) -> str:
        """Lengths in words."""
        shared = f"; {self.shared_tokens} tokens shared" if self.shared_tokens else ""
        return f"prompt {self.isl.describe()}; output {self.osl.describe()}{shared}"


class OpenWorkload:
    """Requests that come by themselves, whatever the answers: `requests` of them, or until `duration_s`."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        times: Arrivals,
        requests: int | None = None,
        duration_s: float = math.inf,
    ) -> None:
        self.prompts, self.times = prompts, times
        self.requests, self.duration_s = requests, duration_s
        self.shares = prompts.shared_tokens > 0
        self.count = requests if duration_s == math.inf else None

    def arrivals(self) -> Iterator[Request]:
        """Requests in order of arrival; the same at each call."""
        make, end_s = self.prompts.maker(), self.duration_s
        times = self.times.times(self.prompts.streams("arrivals"))
        for index, arrival_s in enumerate(islice(times, self.requests)):
            if arrival_s >= end_s:
                return
            yield make(index, arrival_s)

    def after(self, request: Request, now_s: float) -> Request | None:
        """Nothing follows from an answer."""
        return None

    def load(self) -> Load:
        """Its means."""
        return self.prompts.load(self.times.request_per_s)

    def describe(self) -> str:
        """The workload in words."""
        return f"{self.times.describe()}; {self.prompts.describe()}"


class ClosedWorkload:
    """`users` who each send a request, wait for its answer, think, and send the next.

    User i starts at ramp_up_s · i / users. Ends after `requests` in all, or with the last request before
    `duration_s`. The k-th request sent has the k-th lengths of the streams, whoever sends it.
    """

    def __init__(
        self,
        *,
        prompts: Prompts,
        users: int,
        think_time: ThinkTime,
        ramp_up_s: float = 0.0,
        requests: int | None = None,
        duration_s: float = math.inf,
    ) -> None:
        self.prompts, self.users, self.think_time = prompts, users, think_time
        self.ramp_up_s, self.duration_s = ramp_up_s, duration_s
        self.limit = math.inf if requests is None else requests
        self.shares = prompts.shared_tokens > 0
        self.count = requests if duration_s == math.inf else None
        self._restart()

    def arrivals(self) -> Iterator[Request]:
        """Each user's first request; from the beginning at each call."""
        self._restart()
        # Made before the first answer can draw from the streams: a slow engine must not change them.
        first = [
            self._make(index, start_s)
            for index, start_s in enumerate(user_starts(self.users, self.ramp_up_s))
            if index < self.limit and start_s < self.duration_s
        ]
        self._made = len(first)
        yield from first

    def after(self, request: Request, now_s: float) -> Request | None:
        """The same user's next request, a pause after the answer (or RETRY_S after a refusal)."""
        pause_s = self._think()
        arrival_s = now_s + (pause_s if answered(request) else max(pause_s, RETRY_S))
        if self._made >= self.limit or arrival_s >= self.duration_s:
            return None
        following = self._make(self._made, arrival_s)
        following.session, following.turn = request.session, request.turn + 1
        self._made += 1
        return following

    def load(self) -> Load:
        """Its means."""
        return self.prompts.load(None, self.users)

    def describe(self) -> str:
        """The workload in words."""
        return f"{self.users} users, think time {self.think_time.describe()}; {self.prompts.describe()}"

    def _restart(self) -> None:
        self._make = self.prompts.maker()
        self._think = self.think_time.sampler(self.prompts.streams("think time"))
        self._made = 0
