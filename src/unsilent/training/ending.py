"""How a rank leaves: the outcome on disk first, then one sentence, from one rank.

torchrun turns every worker's exit code into 1 and ends the others as soon as the first one has left, so whoever leaves
first has to have written ``exit.json``. An error that all ranks meet (a preset that does not exist) is said once: by
the rank that put it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsilent.errors import (
    EXIT_BAD_CHECKPOINT,
    EXIT_INTERNAL,
    EXIT_OK,
    EXIT_USAGE,
    CheckpointError,
    CorruptionError,
    RankFailure,
    UsageError,
)
from unsilent.events import EXIT_FILE, read_exit, write_exit
from unsilent.screen import show

EXIT_INTERRUPTED = 130


def this_attempt() -> str:
    """The same for all ranks that one torchrun agent, or ``unsilent launch``, has started together; no other start's."""
    if "UNSILENT_LAUNCH" in os.environ:
        return os.environ["UNSILENT_LAUNCH"]
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return f"process {os.getpid()}"
    return f"agent {os.getppid()} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ.get('MASTER_PORT', '')}"


def forget_last_run(directory: Path) -> None:
    """What an earlier run ended with no longer holds. Rank 0 calls it before it meets the others."""
    with _locked(directory):
        record = read_exit(directory)
        if record is None or record.get("attempt") != this_attempt():
            (directory / EXIT_FILE).unlink(missing_ok=True)


def record_error(directory: Path, error: BaseException, *, rank: int, step: int, met: bool) -> tuple[int, bool]:
    """Put on disk that the run ends with ``error``.

    Args:
        met: the ranks have met, so that what stands in ``exit.json`` is of this run.

    Returns:
        The exit code of this rank, and whether this rank is the one that tells people.
    """
    if isinstance(error, CorruptionError):
        return error.exit_code, rank == 0  # raised on all ranks together, and rank 0's journal has written it
    if isinstance(error, RankFailure):
        claimed = _claim(directory, EXIT_INTERNAL, step, met=met, message=str(error))
        # What another rank was told about its input, that rank says itself.
        echo = error.error.startswith("UsageError")
        return EXIT_INTERNAL, claimed or (rank == (1 if error.rank == 0 else 0) and not echo)
    if isinstance(error, UsageError | CheckpointError):
        code = EXIT_USAGE if isinstance(error, UsageError) else EXIT_BAD_CHECKPOINT
        return code, _claim(directory, code, step, met=met, message=str(error))
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, False
    _claim(directory, EXIT_INTERNAL, step, met=met, message=f"{type(error).__name__}: {error}")
    return EXIT_INTERNAL, True


def say_error(error: BaseException) -> None:
    """One sentence for what was foreseen, a traceback for what was not."""
    if isinstance(error, UsageError | CheckpointError | CorruptionError | RankFailure):
        show(f"unsilent: {error}")
    else:
        show("".join(traceback.format_exception(error)).rstrip())


def error_record(error: BaseException, code: int) -> dict[str, Any]:
    """The same for ``--json``."""
    record: dict[str, Any] = {"exit_code": code, "error": str(error) or type(error).__name__}
    if isinstance(error, CorruptionError):
        record |= {"verdict": error.verdict.to_json(), "resume_from": error.resume_from}
    if isinstance(error, RankFailure):
        record |= {"failed_rank": error.rank}
    return record


def _claim(directory: Path, code: int, step: int, *, met: bool, message: str) -> bool:
    """Write ``exit.json`` unless this run has written it already; True when it was us."""
    with _locked(directory):
        record = read_exit(directory)
        if record is not None:
            ours = met or record.get("attempt") == this_attempt()
            # What a survivor wrote about us ("rank 1 failed") says less than what we know ourselves.
            better = record["exit_code"] == EXIT_OK or (code != EXIT_INTERNAL and "rank_failure" in record)
            if ours and not better:
                return False
        return write_exit(directory, code, step, attempt=this_attempt(), message=message) or record is None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One rank of this machine at a time; where the file system has no locks, all at once."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
