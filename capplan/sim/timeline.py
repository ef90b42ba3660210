"""The engine's state over time in a bounded number of bins, and the gaps between tokens.

Bins double in width whenever the run outgrows them, so that a run of any length has 256 to 512 of them.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

BINS: Final = 512
COLUMNS: Final = (
    "start_s",
    "end_s",
    "steps",
    "decoding",
    "kv_tokens",
    "prompt_tokens",
    "gaps",
    "kv_blocks",
    "held_tokens",
    "waiting",
    "running",
    "preempted",
    "made_tokens",
)
"""Of a run of steps alike: contexts as it begins; blocks, tokens held and requests waiting as it ends.

`running` are sequences under way, those that wait for others' prompts among them.
"""
SUMS: Final = (
    "busy_s",
    "steps",
    "tokens",
    "decoded",
    "prompt_tokens",
    "gaps",
    "gap_s",
    "kv_block_s",
    "unfilled_token_s",
    "waiting_s",
    "running_s",
    "idle_slot_s",
    "preempted",
)
"""Of a bin; `tokens` are those made, `decoded` sequences in steps, waiting_s the integral of requests."""
USAGE_BINS: Final = 1001
"""Of KV usage, 0.1 % each."""
SHORTEST_GAP_S: Final = 1e-5
GAP_RATIO: Final = 1.005
GAP_BINS: Final = 5100
"""Of gaps between tokens, 0.5 % each: from 10 µs to 13 days."""
SPREAD: Final = 0.04
"""A run of steps whose contexts grow less than this has gaps alike."""
PARTS: Final = 1024
"""A run's gaps are spread over at most so many."""


class Timeline:
    """Sums over bins of time; `width_s` is their present width."""

    def __init__(
        self,
        *,
        slots: int,
        kv_blocks: int,
        block_size: int,
        kv_groups: int = 1,
        slope: Callable[[int, int], float] | None,
    ) -> None:
        import numpy as np

        self.slots, self.kv_blocks, self.slope = slots, kv_blocks, slope
        self.block_size, self.kv_groups = block_size, kv_groups
        self.width_s = 0.0
        self.sums = {name: np.zeros(BINS) for name in SUMS}
        self.most_kv_blocks = np.zeros(BINS)
        self._usage_s = np.zeros((BINS, USAGE_BINS))
        self._gap_counts = np.zeros((BINS, GAP_BINS))
        # By products alone, which are the same on every machine.
        ends = accumulate(range(GAP_BINS - 2), lambda end, _: end * GAP_RATIO, initial=SHORTEST_GAP_S)
        self._gap_ends = np.array(list(ends))

    def add(self, rows: Any, gaps: Sequence[tuple[float, float, int]]) -> None:
        """Runs of steps with the COLUMNS, in order; and gaps that are no step's length: (end_s, s, count)."""
        import numpy as np

        self._reach(float(rows[-1, 1]))
        (start, end, steps, decoding, _, prompts, regular, blocks, held, waiting, running, out, made) = rows.T
        first = np.floor(start / self.width_s).astype(np.int64)
        last = np.minimum(np.floor(end / self.width_s).astype(np.int64), BINS - 1)
        pieces = last - first + 1
        row = np.repeat(np.arange(len(rows)), pieces)
        place = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        bins = first[row] + place
        begin = np.maximum(start[row], bins * self.width_s)
        took = np.maximum(np.minimum(end[row], (bins + 1) * self.width_s) - begin, 0.0)
        whole = np.maximum(end - start, 1e-300)
        # A step that only threw requests out takes no time.
        share = np.where(end > start, 0.0, 1 / pieces)[row] + took / whole[row]
        # Blocks are taken evenly over a run: a token a sequence and step.
        grown = np.minimum(blocks, decoding * (steps - 1) * self.kv_groups / self.block_size)
        passed = (begin + took / 2 - start[row]) / whole[row]
        used = blocks[row] - grown[row] * (1 - passed)
        most = np.minimum(used + grown[row] * share / 2, blocks[row])
        unfilled = np.maximum(blocks * self.block_size - held * self.kv_groups, 0.0)
        values = {
            "busy_s": took,
            "steps": share * steps[row],
            "tokens": share * made[row],
            "decoded": share * (decoding * steps)[row],
            "prompt_tokens": share * prompts[row],
            "gaps": share * regular[row],
            "gap_s": share * (regular * whole / steps)[row],
            "kv_block_s": took * used,
            "unfilled_token_s": took * unfilled[row],
            "waiting_s": took * waiting[row],
            "running_s": took * running[row],
            "idle_slot_s": took * ((self.slots - running) * (waiting > 0))[row],
            "preempted": share * out[row],
        }
        for name, value in values.items():
            self.sums[name] += np.bincount(bins, value, BINS)
        np.maximum.at(self.most_kv_blocks, bins, most)
        usage = np.minimum(used * (USAGE_BINS - 1) / self.kv_blocks, USAGE_BINS - 1).astype(np.int64)
        np.add.at(self._usage_s.reshape(-1), bins * USAGE_BINS + usage, took)
        self._add_gaps(rows, np.minimum(((start + end) / 2 / self.width_s).astype(np.int64), BINS - 1))
        if gaps:
            self._add_own(np.array(gaps))

    def _add_gaps(self, rows: Any, bins: Any) -> None:
        """Gaps between tokens: a run's mean step, or its first to its last where they differ."""
        import numpy as np

        start, end, steps, decoding, contexts, _, regular = rows.T[:7]
        mean = (end - start) / steps
        parts = np.ones(len(rows), dtype=np.int64)
        half = np.zeros(len(rows))
        if self.slope is not None:
            spread = (steps - 1) * decoding > SPREAD * contexts
            for at in np.flatnonzero(spread & (decoding > 0)):
                growth = self.slope(int(decoding[at]), int(contexts[at])) * decoding[at] * (steps[at] - 1)
                half[at] = min(growth / 2, 0.9 * mean[at])
                parts[at] = min(PARTS, 1 + int(growth / (mean[at] - half[at]) / (GAP_RATIO - 1)))
        row = np.repeat(np.arange(len(rows)), parts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        gap = mean[row] + half[row] * ((2 * place + 1) / parts[row] - 1)
        self._count(bins[row], gap, regular[row] / parts[row])

    def _add_own(self, gaps: Any) -> None:
        """Gaps that are no step's length."""
        import numpy as np

        bins = np.minimum((gaps[:, 0] / self.width_s).astype(np.int64), BINS - 1)
        self._count(bins, gaps[:, 1], gaps[:, 2])
        self.sums["gaps"] += np.bincount(bins, gaps[:, 2], BINS)
        self.sums["gap_s"] += np.bincount(bins, gaps[:, 1] * gaps[:, 2], BINS)

    def _count(self, bins: Any, gap: Any, count: Any) -> None:
        import numpy as np

        place = np.searchsorted(self._gap_ends, gap, side="right")
        np.add.at(self._gap_counts.reshape(-1), bins * GAP_BINS + place, count)

    def _reach(self, end_s: float) -> None:
        """Widen the bins until they reach so far; widths are powers of two, the same on every machine."""
        import numpy as np

        if not self.width_s:
            self.width_s = 2.0 ** math.ceil(math.log2(max(end_s, 1e-3) / BINS))
        while end_s > self.width_s * BINS:
            self.width_s *= 2
            for value in (*self.sums.values(), self._usage_s, self._gap_counts):
                value[: BINS // 2] = value[::2] + value[1::2]
                value[BINS // 2 :] = 0
            most = self.most_kv_blocks
            most[: BINS // 2] = np.maximum(most[::2], most[1::2])
            most[BINS // 2 :] = 0

    def bins_between(self, start_s: float, end_s: float) -> slice:
        """The bins from one moment to another, one at least."""
        if not self.width_s:
            return slice(0, 0)
        first = min(int(start_s / self.width_s), BINS - 1)
        return slice(first, max(first + 1, min(BINS, math.ceil(end_s / self.width_s))))

    def sum_of(self, name: str, chosen: slice) -> float:
        """A sum over some bins."""
        return float(self.sums[name][chosen].sum())

    def usage_s(self, chosen: slice) -> Any:
        """Seconds at each KV usage, 0 to 100 % in USAGE_BINS; idle time, without steps, is not among them."""
        return self._usage_s[chosen].sum(axis=0)

    def gap_percentile_s(self, chosen: slice, percent: float) -> float | None:
        """A percentile of the gaps between tokens, within 0.25 %; None without any."""
        import numpy as np

        counts = np.cumsum(self._gap_counts[chosen].sum(axis=0))
        if not len(counts) or counts[-1] <= 0:
            return None
        place = int(np.searchsorted(counts, counts[-1] * percent / 100))
        return float(self._gap_ends[max(0, place - 1)]) * (1 + (GAP_RATIO - 1) / 2 if place else 1)
