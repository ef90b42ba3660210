"""When a scheduler sees new requests: steps decided ahead of the GPU, and looks every few steps.

A step's requests are chosen while the GPU still computes those before it: a request that comes in the
meantime waits for them. And an engine may look for new requests every few steps only.
"""

import math
from collections import deque
from dataclasses import dataclass

from capplan.sim.replica import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """How an engine looks for new requests.

    `steps_ahead`: a step is decided so many steps before it starts; 1 with vLLM's asynchronous scheduling.
    `poll_steps`: decode steps between two looks; a step with prompts is followed by one. SGLang's
    --scheduler-recv-interval (managers/scheduler_recv_skipper.py, 0.5).
    """

    steps_ahead: int = 0
    poll_steps: int = 1


class Looks:
    """The looks of one run: requests that came until `seen_s` are known when the next step is decided."""

    def __init__(self, looking: Looking) -> None:
        self.looking = looking
        self.seen_s: float = 0
        self._starts: deque[float] = deque(maxlen=looking.steps_ahead)
        self._since_look = 0

    def idle(self, now_s: float) -> None:
        """Nothing runs: the next request is seen as it comes."""
        self._starts.clear()
        self._since_look = 0
        self.seen_s = now_s

    def resume(self, seen_s: float) -> None:
        """Steps passed without being told, at most one decided ahead: `seen_s` is the last one's start."""
        self._starts.clear()
        self._starts.append(seen_s)
        self._since_look = 0
        self.seen_s = seen_s

    def leap(self, most: int, until_s: float) -> tuple[int, float]:
        """Steps alike at most, and seconds until a request comes, where one may have come unseen.

        Until the next look nothing changes, however many have come.
        """
        if until_s > 0:
            return most, until_s
        return min(most, max(1, self.looking.poll_steps - self._since_look)), math.inf

    def passed(self, step: Step, count: int, start_s: float, now_s: float) -> None:
        """`count` steps alike are through; of many each counts as long as the mean one.

        seen = start of the step so many steps before the next one, at the last look
        """
        ahead, since = self.looking.steps_ahead, self._since_look + count
        self._since_look = 0 if step.chunks else since % self.looking.poll_steps
        step_s = (now_s - start_s) / count
        self._starts.extend(now_s - back * step_s for back in range(min(count, ahead), 0, -1))
        if since < self.looking.poll_steps and not step.chunks:
            return
        if self._since_look:
            self.seen_s = max(self.seen_s, now_s - (self._since_look + ahead) * step_s)
        else:
            self.seen_s = self._starts[0] if ahead else now_s
