"""``unsilent exec``: runs a launcher such as torchrun and returns the code that the run itself ended with."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from unsilent.errors import EXIT_OK, UsageError
from unsilent.events import EXIT_FILE, read_exit

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """How the command ended.

    Attributes:
        exit_code: what the caller should end with.
        own: the command's own code; 128 and the signal's number when a signal ended it.
        outcome: the run's ``exit.json``, None when this run has written none.
    """

    exit_code: int
    own: int
    outcome: dict[str, Any] | None


def execute(command: Sequence[str], directory: Path | None) -> Ended:
    """Run ``command`` to its end; signals are passed on to it.

    A command that failed although its run had ended in order (exit.json says 0) has failed: its own code stands.

    Args:
        directory: the run directory; None takes it from the command's ``--out``.

    Raises:
        UsageError: the command cannot be started.
    """
    directory = directory or out_of(command)
    before = _stamp(directory)
    own = _run(command)
    outcome = None
    # A file that has not been written since is of an earlier run.
    if directory is not None and _stamp(directory) not in (None, before):
        outcome = read_exit(directory)
    code = own if outcome is None or outcome["exit_code"] == EXIT_OK else int(outcome["exit_code"])
    return Ended(exit_code=code, own=own, outcome=outcome)


def out_of(command: Sequence[str]) -> Path | None:
    """The value of ``--out`` in a command line; the last one counts."""
    found: Path | None = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == "--out" and following is not None:
            found = Path(following)
        elif word.startswith("--out="):
            found = Path(word.removeprefix("--out="))
    return found


def _run(command: Sequence[str]) -> int:
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    kept = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        # A session of its own: Ctrl-C on a terminal would reach it a second time, besides the one we pass on.
        child = subprocess.Popen(command, start_new_session=True)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    except OSError as error:
        raise UsageError(f"cannot start {command[0]}: {error.strerror or error}") from error
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _stamp(directory: Path | None) -> tuple[int, int] | None:
    if directory is None:
        return None
    try:
        found = (directory / EXIT_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
