"""The exceptions of unsilent, and the exit code that each one carries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsilent.records import Verdict

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTEGRITY_LOST = 10
EXIT_QUARANTINE = 11
EXIT_INCONCLUSIVE = 12
EXIT_BAD_CHECKPOINT = 13
EXIT_INTERNAL = 70


class UnsilentError(Exception):
    """Base of everything that unsilent raises on purpose."""

    exit_code = EXIT_INTERNAL


class UsageError(UnsilentError, ValueError):
    """What the caller asked for cannot be done; the message says what to change."""

    exit_code = EXIT_USAGE


class CheckpointError(UnsilentError):
    """A checkpoint is damaged, distrusted, or belongs to another model."""

    exit_code = EXIT_BAD_CHECKPOINT


class RankFailure(UnsilentError):
    """Another rank failed; raised on every rank that is still alive.

    Attributes:
        rank: the global rank that failed.
        error: what it reported, or that it stopped answering.
    """

    def __init__(self, rank: int, error: str) -> None:
        super().__init__(f"rank {rank} failed: {error}")
        self.rank = rank
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.error)  # else it could not travel between processes


class CorruptionError(UnsilentError):
    """The run must not go on as it is; raised on all ranks together.

    Attributes:
        verdict: what was found.
        resume_from: path of the newest checkpoint that is still trusted, or None.
    """

    def __init__(self, message: str, *, verdict: Verdict, resume_from: str | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.resume_from = resume_from

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), verdict=self.verdict, resume_from=self.resume_from), self.args


class Quarantine(CorruptionError):
    """A device is persistently wrong: restart without the named node."""

    exit_code = EXIT_QUARANTINE


class IntegrityLost(CorruptionError):
    """The state can no longer be trusted and cannot be repaired in place."""

    exit_code = EXIT_INTEGRITY_LOST


class Inconclusive(IntegrityLost):
    """Nobody could tell the right value, and the configuration says to stop then."""

    exit_code = EXIT_INCONCLUSIVE
