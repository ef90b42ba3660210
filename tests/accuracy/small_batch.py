"""Measured speeds of one sequence alone beside predictions from all other cards.

`python -m tests.accuracy.small_batch` prints the tables, `… fit` writes the calibration small-batch.yaml. The
baseline is 0.8 of the bandwidth, whatever the engine, the format and the card.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, median
from typing import Final

from capplan.calibrate import small_batch, small_batch_file
from capplan.results.small_batch import SmallBatchRun, SmallBatchTable, read_small_batch
from capplan.results.small_batch_names import TENSOR_PARALLEL
from capplan.small_batch_speed import FILE
from tests.accuracy import oracles

TABLE: Final = oracles.DATA / "measured" / "decode_small_batch.csv"
_BASELINE: Final = 0.8
_FEWEST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A measured run and what was predicted of it, in tokens per second."""

    run: SmallBatchRun
    measured: float
    predicted: float
    scored: bool

    @property
    def error(self) -> float:
        """(predicted − measured) / measured."""
        return self.predicted / self.measured - 1


@cache
def table() -> SmallBatchTable:
    """The measured table."""
    return read_small_batch(TABLE)


@cache
def decode_scores() -> tuple[Score, ...]:
    """Every generation speed, predicted from all other cards.

    Not scored: engines measured on one card only, of which nothing is left when that card is.
    """
    runs, _ = small_batch_file.split(table())
    predicted = small_batch.leave_cards_out(runs, small_batch.fit_decode, small_batch.predict_decode)
    return _scores(runs, [run.decode_token_per_s or 0 for run in runs], predicted.tolist())


@cache
def prompt_scores() -> tuple[Score, ...]:
    """Every prompt speed, predicted from all other cards."""
    decode, runs = small_batch_file.split(table())
    predicted = small_batch.prompts_with_cards_left_out(decode, runs)
    return _scores(runs, [run.prompt_token_per_s or 0 for run in runs], predicted.tolist())


@cache
def baseline_scores() -> tuple[Score, ...]:
    """Every generation speed at 0.8 of the bandwidth."""
    runs, _ = small_batch_file.split(table())
    predicted = [_baseline(run) for run in runs]
    return _scores(runs, [run.decode_token_per_s or 0 for run in runs], predicted)


def _baseline(run: SmallBatchRun) -> float:
    ranks = run.host.gpus if run.engine in TENSOR_PARALLEL else 1
    moved = run.reads.token_bytes + run.reads.kv_bytes(run.context)
    return _BASELINE * ranks * run.host.gpu.memory_bandwidth_bytes_per_s / moved


def _scores(
    runs: Sequence[SmallBatchRun], measured: Sequence[float], predicted: Sequence[float]
) -> tuple[Score, ...]:
    cards: dict[str, set[str]] = {}
    for run in runs:
        cards.setdefault(run.engine, set()).add(run.host.gpu.id)
    return tuple(
        Score(run=run, measured=got, predicted=want, scored=len(cards[run.engine]) > 1)
        for run, got, want in zip(runs, measured, predicted, strict=True)
    )


def errors(scores: Iterable[Score]) -> list[float]:
    """Sizes of the scored errors."""
    return [abs(score.error) for score in scores if score.scored]


def markdown() -> str:
    """The tables of this module."""
    lines = ["**Tokens per second of one sequence alone**, each card predicted from all others:", ""]
    lines += _table(
        ("what", "runs", "median error", "mean error", "at 0.8 of bandwidth: median", "mean"),
        [
            ("generation", *_pair(decode_scores()), *_pair(baseline_scores())[1:]),
            ("prompt", *_pair(prompt_scores()), "", ""),
        ],
    )
    lines += ["", "Generation:", ""]
    lines += _groups(decode_scores(), lambda run: (run.backend, run.family))
    lines += ["", "Prompt:", ""]
    lines += _groups(prompt_scores(), lambda run: (run.backend, run.family))
    alone = [score for score in decode_scores() if not score.scored]
    lines += [
        "",
        f"- Not scored: {len(alone)} runs of engines that one card only was measured with "
        f"({', '.join(sorted({score.run.engine for score in alone}))}); predicted from other engines: median "
        f"error {median(abs(score.error) for score in alone):.0%}.",
    ]
    lines += [f"- Left out: {count} rows, {reason}." for reason, count in sorted(table().reasons.items())]
    return "\n".join(lines) + "\n"


def _pair(scores: Sequence[Score]) -> tuple[str, str, str]:
    found = errors(scores)
    return f"{len(found):,}", f"{median(found):.1%}", f"{mean(found):.1%}"


def _groups(scores: Sequence[Score], key: Callable[[SmallBatchRun], tuple[str, ...]]) -> list[str]:
    groups: dict[tuple[str, ...], list[Score]] = {}
    for score in scores:
        if score.scored:
            groups.setdefault(key(score.run), []).append(score)
    rows = []
    for names, found in sorted(groups.items()):
        sizes = errors(found)
        worst = max(found, key=lambda score: abs(score.error))
        rows.append(
            (
                *names,
                len(found),
                len({score.run.host.gpu.id for score in found}),
                f"{median(sizes):.1%}",
                f"{mean(sizes):.1%}" if len(found) >= _FEWEST else "",
                f"{worst.error:+.0%} ({worst.run.model_name} on {worst.run.machine})",
            )
        )
    return _table(("backend", "weights", "runs", "cards", "median", "mean", "worst"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> list[str]:
    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *map(line, rows)]


if __name__ == "__main__":
    if sys.argv[1:] == ["fit"]:
        FILE.write_text(small_batch_file.as_yaml(small_batch_file.calibration(table())), encoding="utf-8")
    else:
        print(markdown(), end="")
