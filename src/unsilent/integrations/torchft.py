"""torchft: its manager learns what the guard has found, so that it does not commit that step.

torchft keeps several replica groups of a job in step and leaves out one that fails; it looks at no values. A guard in
each group looks at them. torchft itself is not imported: whatever has its manager's ``report_error`` will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from unsilent.errors import CorruptionError, RankFailure


class Manager(Protocol):
    """What is used of ``torchft.Manager``."""

    def report_error(self, e: Exception) -> None: ...


@contextlib.contextmanager
def reporting_to(manager: Manager | None) -> Iterator[None]:
    """What the guard raises in this block is reported to the manager, and raised on.

        with reporting_to(manager):
            outcome = guard.step(batch)

    A manager that has been told of an error lets ``should_commit`` say no, and forms its quorum anew before the next
    step. What the guard repairs is no error. Without a manager nothing is reported.

    Raises:
        CorruptionError, RankFailure: as raised in the block.
    """
    try:
        yield
    except (CorruptionError, RankFailure) as error:
        if manager is not None:
            manager.report_error(error)
        raise
