"""``unsilent exec``: runs a launcher such as torchrun and returns the code that the run itself ended with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.children import Children
from unsilent.errors import EXIT_OK
from unsilent.events import EXIT_FILE, read_exit


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
    before = stamp(directory)
    with Children() as children:
        children.start(command)
        (own,) = children.wait()
    return ended(own, directory, before)


def ended(own: int, directory: Path | None, before: tuple[int, int] | None) -> Ended:
    """How a command that ended with ``own`` has ended, ``before`` being the run's :func:`stamp` when it began."""
    outcome = None
    # A file that has not been written since is of an earlier run.
    if directory is not None and stamp(directory) not in (None, before):
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


def stamp(directory: Path | None) -> tuple[int, int] | None:
    """Tells one ``exit.json`` of a run directory from the next; None where there is none."""
    if directory is None:
        return None
    try:
        found = (directory / EXIT_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
