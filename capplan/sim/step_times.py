"""Step times of a simulation: the same StepTable as everything else, read in whole runs of steps."""

import math

from capplan.formulas.steady import StepSeconds
from capplan.sim.replica import Step
from capplan.step import StepTable


class TableTimes:
    """Times of a step table."""

    def __init__(self, table: StepTable) -> None:
        self.table = table

    def step_s(self, step: Step) -> float:
        """One step."""
        return self.table.step_s(
            decode_sequences=step.decoding,
            kv_tokens=step.kv_tokens,
            prompt_tokens=step.prompt_tokens,
            prompt_pairs=step.prompt_pairs,
            prompt_sequences=step.prompt_sequences,
        )

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        """Decode-only steps in a row while the contexts grow, `most` at most, until `until_s` have passed.

        k steps in one affine piece of the table: k · base + slope · (k · contexts + batch · k(k − 1) / 2)
        """
        passed, steps, piece = 0.0, 0, self.table.decode_piece
        while True:
            contexts = kv_tokens + steps * decoding
            base, slope, _, end = piece(decoding, contexts)
            first, growth = base + slope * contexts, slope * decoding
            room = most - steps
            if end < contexts + room * decoding:
                room = max(1, math.ceil((end - contexts) / decoding))
            whole = room * (first + growth * (room - 1) / 2)
            if passed + whole < until_s:
                steps += room
                passed += whole
                if steps == most:
                    return steps, passed
                continue
            count = _steps_until(first, growth, until_s - passed, room)
            return steps + count, passed + count * (first + growth * (count - 1) / 2)


class SingleSteps:
    """Times of a table without affine pieces, as under drafts and of llama.cpp: step by step."""

    def __init__(self, seconds: StepSeconds) -> None:
        self.seconds = seconds

    def step_s(self, step: Step) -> float:
        """One step."""
        return self.seconds(
            decode_sequences=step.decoding,
            kv_tokens=step.kv_tokens,
            prompt_tokens=step.prompt_tokens,
            prompt_pairs=step.prompt_pairs,
            prompt_sequences=step.prompt_sequences,
        )

    def steps_s(self, decoding: int, kv_tokens: int, most: int, until_s: float) -> tuple[int, float]:
        """Decode-only steps in a row while the contexts grow, `most` at most, until `until_s` have passed."""
        passed, steps = 0.0, 0
        while not steps or (steps < most and passed < until_s):
            contexts = kv_tokens + steps * decoding
            passed += self.seconds(decode_sequences=decoding, kv_tokens=contexts)
            steps += 1
        return steps, passed


def _steps_until(first: float, growth: float, seconds: float, most: int) -> int:
    """The fewest steps, one to `most`, that take so many seconds: k · first + growth · k · (k − 1) / 2."""
    count = math.ceil(seconds / first)
    if growth > 0:
        half = first - growth / 2
        count = math.ceil((math.sqrt(half * half + 2 * growth * seconds) - half) / growth)
    count = max(1, min(most, count))
    # The root is off by a rounding at most.
    while count > 1 and (count - 1) * (first + growth * (count - 2) / 2) >= seconds:
        count -= 1
    while count < most and count * (first + growth * (count - 1) / 2) < seconds:
        count += 1
    return count
