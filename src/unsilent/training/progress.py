"""What a person sees while a run trains: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unsilent.screen import show

_SECONDS_BETWEEN_LINES = 10.0
_LINES_OF_A_RUN = 20


class Screen:
    """Rank 0 shows the run on stderr; the other ranks show nothing. Reads the loss only when it shows it.

    Args:
        total, done: steps of the run, and those that an earlier start has done.
    """

    def __init__(self, *, rank: int, total: int, done: int) -> None:
        self._shown, self._total, self._done = rank == 0, total, done
        self._every = max(1, total // _LINES_OF_A_RUN)
        self._last = time.monotonic()
        self._bar: Progress | None = None
        console = Console(stderr=True)
        if self._shown and console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[words]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, words="")

    def __enter__(self) -> Screen:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
                self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()

    def step(self, done: int, loss: torch.Tensor, *, checks: int, alarms: int) -> None:
        """``done`` steps are over; ``checks`` ran in all, ``alarms`` of the steps gave a verdict."""
        if not self._shown:
            return
        now = time.monotonic()
        if self._bar is not None:
            if now - self._last >= 0.1 or done == self._total:
                self._last = now
                self._bar.update(self._task, completed=done, words=_words(loss, checks, alarms))
        elif done % self._every == 0 or done == self._total or now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self.say(f"step {done}/{self._total}: {_words(loss, checks, alarms)}")

    def say(self, text: str) -> None:
        """One line, above the bar if there is one."""
        if self._shown:
            show(f"unsilent: {text}")


def _words(loss: torch.Tensor, checks: int, alarms: int) -> str:
    return f"loss {float(loss):.4f}, {checks} checks, {alarms} {'alarm' if alarms == 1 else 'alarms'}"
