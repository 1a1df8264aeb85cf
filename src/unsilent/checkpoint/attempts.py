"""How often runs came to grief soon after they were loaded from a checkpoint.

It stands in a file inside the checkpoint's directory, so that restarts count too: a poisoned checkpoint would otherwise
be loaded for ever. Single process, no torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from unsilent.checkpoint.files import sync_directory

FILE = "attempts.json"
LIMIT = 3  # failures at one step, from then on the checkpoint is not loaded any more
SOON = 10  # steps after the load within which a failure is held against the checkpoint


def read(path: Path) -> dict[int, int]:
    """The failures of a checkpoint: how many at which step. One that cannot be read counts as none."""
    try:
        record = json.loads((path / FILE).read_text(encoding="utf-8"))
        return {int(step): int(count) for step, count in record["failures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def add(path: Path, step: int) -> int:
    """Count one more failure at ``step``; returns how many there are by now.

    Raises:
        OSError: it cannot be written.
    """
    failures = read(path)
    failures[step] = failures.get(step, 0) + 1
    _write(path, failures)
    return failures[step]


def inherit(old: Path, new: Path) -> str:
    """Carry the failures of a checkpoint over to the one that is about to replace it; returns why that is poisoned.

    Else going one checkpoint back would write this one anew, and the counting would never end.

    Raises:
        OSError: it cannot be written.
    """
    failures = read(old)
    if failures:
        _write(new, failures)
    return exhausted(new)


def _write(path: Path, failures: dict[int, int]) -> None:
    aside = path / f".{FILE}"
    with aside.open("w", encoding="utf-8") as file:
        json.dump({"schema": 1, "failures": {str(s): n for s, n in sorted(failures.items())}}, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path / FILE)
    sync_directory(path)


def exhausted(path: Path) -> str:
    """Why the checkpoint must not be loaded again, "" while it may be."""
    for step, count in read(path).items():
        if count >= LIMIT:
            return f"after each of {count} loads the gradient was not finite at step {step}: it is held to be poisoned"
    return ""
