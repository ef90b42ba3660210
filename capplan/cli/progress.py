"""A long command's progress on a terminal, and its end by Ctrl-C."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capplan.simulate_run import Progress, Told

PAUSE_S = 0.2
"""Between two lines."""


class _Watch:
    """Writes the progress, and ends the work where it was interrupted: between steps, so that all adds up."""

    def __init__(self, at_once: bool) -> None:
        self.ending, self.at_once = False, at_once
        self._begun_s = self._shown_s = time.monotonic()
        self._wide = 0

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The first Ctrl-C asks for the end, a second one takes it."""
        if self.ending or self.at_once:
            raise KeyboardInterrupt
        self.ending = True

    def __call__(self, progress: "Progress") -> None:
        if self.ending:
            raise KeyboardInterrupt
        now_s = time.monotonic()
        if sys.stderr.isatty() and now_s - self._shown_s >= PAUSE_S:
            self._shown_s = now_s
            self._show(line(progress, now_s - self._begun_s))

    def _show(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._wide))
        sys.stderr.flush()
        self._wide = len(text)

    def clear(self) -> None:
        """Leave no line behind."""
        if self._wide:
            sys.stderr.write("\r" + " " * self._wide + "\r")
            sys.stderr.flush()


def line(progress: "Progress", passed_s: float) -> str:
    """One line: how much is done, and when the rest will be."""
    if progress.runs > 1:
        done, text = progress.run / progress.runs, f"{progress.run} of {progress.runs} runs"
    elif progress.requests:
        done = progress.finished / progress.requests
        text = f"{progress.finished:,} of {progress.requests:,} requests"
    else:
        return f"{progress.finished:,} requests, {progress.time_s:,.0f} s simulated"
    left = f", {passed_s / done - passed_s:,.0f} s left" if done > 0 else ""
    return f"{done:4.0%}  {text}{left}"


@contextmanager
def watched(at_once: bool = False) -> Iterator["Told"]:
    """Something that hears of the progress; while it does, Ctrl-C ends the work with what it has.

    `at_once`: not only when the progress is told.
    """
    watch = _Watch(at_once)
    main = threading.current_thread() is threading.main_thread()
    before: Any = signal.signal(signal.SIGINT, watch.interrupt) if main else None
    try:
        yield watch
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
        watch.clear()
