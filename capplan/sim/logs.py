"""Files of a simulation: a row a request, a row a step."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from capplan.errors import InputError
from capplan.sim.flow import Recorder, Scheduler
from capplan.sim.metrics import REQUEST_COLUMNS, Metrics
from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request

STEP_COLUMNS: Final = (
    "step,start_{0},end_{0},sched_tokens,prefill_tokens,prefill_reqs,decode_reqs,decode_ctx_tokens,new_reqs,"
    "resumed_reqs,running,waiting,preempted,finished,kv_blocks_used,kv_blocks_total,tokens_out"
)
WHOLE: Final = frozenset(
    (
        *("index", "prompt_tokens", "cached_tokens", "output_tokens", "samples", "preemptions", "truncated"),
        *("session", "turn"),
    )
)


class StepLog:
    """A recorder that writes a row a step and passes it on; `unit` is that of the simulation's clock."""

    def __init__(self, stream: TextIO, recorder: Recorder, kv_blocks: int, unit: str) -> None:
        self.recorder, self.kv_blocks = recorder, kv_blocks
        self._write = csv.writer(stream, lineterminator="\n").writerow
        self._write(STEP_COLUMNS.format(unit).split(","))
        self._number = 0

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        """One step has passed (of a scheduler made `stepwise`)."""
        new = sum(
            not request.preemptions and past == request.cached_tokens for request, _, past in step.chunks
        )
        self._write(
            (
                self._number,
                start_s,
                end_s,
                step.decoding + step.prompt_tokens,
                step.prompt_tokens,
                step.prompt_sequences,
                step.decoding,
                step.kv_tokens,
                new,
                step.resumed,
                len(replica.running) + len(done),
                len(replica.waiting),
                len(step.preempted),
                len(done),
                step.kv_blocks,
                self.kv_blocks,
                step.made_tokens,
            )
        )
        self._number += count
        self.recorder.steps(replica, step, count, start_s, end_s, done)

    def rejected(self, request: Request, now_s: float) -> None:
        """Passed on."""
        self.recorder.rejected(request, now_s)


def stepwise(scheduler: Scheduler) -> Scheduler:
    """The same scheduler, every step by itself."""

    def single(replica: Replica) -> Step:
        step = scheduler(replica)
        step.steady = False
        return step

    return single


@contextmanager
def steps_log(
    path: Path | None, recorder: Recorder, kv_blocks: int, unit: str = "s"
) -> Iterator[tuple[Recorder, bool]]:
    """The recorder that also writes `path`, and whether steps must come one by one."""
    if path is None:
        yield recorder, False
        return
    with _written(path) as stream:
        yield StepLog(stream, recorder, kv_blocks, unit), True


def write_requests(path: Path, metrics: Metrics) -> None:
    """A row a request in order of arrival; rejected ones last, without times."""
    with _written(path) as stream:
        write = csv.writer(stream, lineterminator="\n").writerow
        write((*REQUEST_COLUMNS, "rejected"))
        for row in metrics.requests().tolist():
            write((*map(_cell, REQUEST_COLUMNS, row), 0))
        for index, arrival_s, prompt_tokens, output_tokens in metrics.rejections:
            known: dict[str, Any] = {
                "index": index,
                "arrival_s": arrival_s,
                "prompt_tokens": prompt_tokens,
                "output_tokens": output_tokens,
            }
            write((*(known.get(name, "") for name in REQUEST_COLUMNS), 1))


def _cell(name: str, value: float) -> float | int:
    return int(value) if name in WHOLE else round(value, 9)


@contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """A text file to write; InputError where that is not possible."""
    try:
        stream = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", where=str(path), hint="check the folder"
        ) from None
    with stream:
        yield stream
