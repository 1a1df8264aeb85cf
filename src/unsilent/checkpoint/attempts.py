"""How often runs came to grief soon after they were loaded from a checkpoint, and which ones lose their trust by it.

It stands in a file inside the checkpoint's directory, so that restarts count too: a poisoned checkpoint would otherwise
be loaded for ever. The first checkpoint whose attempts run out is distrusted alone. When the one further back runs out
as well, two are distrusted at once, then four, and so on: a run with n poisoned checkpoints is done with them after
about log2(n) rounds. Nothing is deleted. Single process, no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsilent.checkpoint.files import sync_directory

FILE = "attempts.json"
LIMIT = 3  # failures at one step, from then on the checkpoint is not loaded any more
SOON = 10  # steps after the load within which a failure is held against the checkpoint


def read(path: Path) -> dict[int, int]:
    """The failures of a checkpoint: how many at which step. One that cannot be read counts as none."""
    return _read(path)[0]


def add(path: Path, step: int) -> int:
    """Count one more failure at ``step``; returns how many there are by now.

    Raises:
        OSError: it cannot be written.
    """
    failures, reason = _read(path)
    failures[step] = failures.get(step, 0) + 1
    _write(path, failures, reason)
    return failures[step]


def condemn(path: Path, reason: str) -> None:
    """The checkpoint must not be loaded any more, for what happened with a newer one.

    Raises:
        OSError: it cannot be written.
    """
    failures, earlier = _read(path)
    _write(path, failures, earlier or reason)


def inherit(old: Path, new: Path) -> str:
    """Carry what is held against a checkpoint over to the one that is about to replace it; returns why that is poisoned.

    Else going one checkpoint back would write this one anew, and the counting would never end.

    Raises:
        OSError: it cannot be written.
    """
    failures, reason = _read(old)
    if failures or reason:
        _write(new, failures, reason)
    return distrusted(new)


def exhausted(path: Path) -> str:
    """Why its own attempts have run out, "" while they have not."""
    for step, count in read(path).items():
        if count >= LIMIT:
            return f"after each of {count} loads the gradient was not finite at step {step}: it is held to be poisoned"
    return ""


def distrusted(path: Path) -> str:
    """Why the checkpoint must not be loaded again, for its own failures or those of a newer one; "" while it may be."""
    return exhausted(path) or _read(path)[1]


def at_once(before: int) -> int:
    """How many checkpoints lose their trust together, after so many newer ones have run out of attempts themselves."""
    return 2**before


def _read(path: Path) -> tuple[dict[int, int], str]:
    """(failures by step, why it was condemned)."""
    try:
        record = json.loads((path / FILE).read_text(encoding="utf-8"))
        failures = {int(step): int(count) for step, count in record["failures"].items()}
        return failures, str(record.get("condemned", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, ""


def _write(path: Path, failures: Mapping[int, int], reason: str) -> None:
    record: dict[str, Any] = {"schema": 1, "failures": {str(s): n for s, n in sorted(failures.items())}}
    if reason:
        record["condemned"] = reason
    aside = path / f".{FILE}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path / FILE)
    sync_directory(path)
