"""The replay door: an engine's logged requests, limits and rule of step times, in whole microseconds."""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capplan.sim.replica import Limits, Replica, Step
from capplan.sim.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTimes:
    """A step takes base + a · prompt tokens + b · decoding sequences + c · their contexts, rounded, in µs."""

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
        """One step."""
        return self._step(step.prompt_tokens, step.decoding, step.kv_tokens)

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        """Decode-only steps in a row, each rounded by itself."""
        passed, steps = 0, 0
        while not steps or (steps < most and passed < until_s):
            passed += self._step(0, decoding, kv_tokens + steps * decoding)
            steps += 1
        return steps, passed
