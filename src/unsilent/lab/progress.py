"""How far a long piece of work has come, with the time left: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress(name: str, total: int, *, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Gives a function to be called after each of ``total`` pieces."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=console, refresh_per_second=2) as bar:
            task = bar.add_task(name, total=total)
            yield lambda: bar.advance(task)
        return
    done, begin = 0, time.monotonic()

    def say() -> None:
        nonlocal done
        done += 1
        if done % max(1, total // 20) == 0 or done == total:
            left = (time.monotonic() - begin) / done * (total - done)
            console.print(f"{name}: {done} of {total}, about {left / 60:.0f} min left")

    yield say
