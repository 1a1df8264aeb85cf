"""A file of JSON lines that a training process appends to; no call here raises because of a disk."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

_LOCK_SECONDS = 5.0


class LineFile:
    """Appends JSON objects to one file, a line each; usable from several threads.

    Every line goes out in one ``write`` call on a descriptor opened with ``O_APPEND``, so that processes sharing a
    local file do not cut each other's lines. What could not be written is counted and said, as ``lost_before``, in the
    next line that can be.

    Args:
        path: the file; it and its folders are created when the first line is written.
        mode: who may read a file that is created, before the process's umask.

    Attributes:
        lost: how many lines could not be written.
        problem: why the last one could not, "" when nothing is wrong.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        self.path = path
        self._mode = mode
        self.lost = 0
        self.problem = ""
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._unsaid = 0
        self._torn = False

    def open(self) -> None:
        """Open the file before there is anything to write; what is in the way becomes the problem."""
        try:
            self._open()
        except OSError as error:
            self.problem = str(error)

    def append(self, line: dict[str, Any], *, durable: bool) -> None:
        """Append one object of plain JSON values; ``durable``: it is on the disk before the call returns."""
        # The lock is waited for with a limit: the watcher must get away even when the main thread hangs in a write.
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            self.lost += 1
            self._unsaid += 1
            self.problem = "another thread is stuck writing a line"
            return
        try:
            descriptor = self._open()
            if self._unsaid:
                line["lost_before"] = self._unsaid
            data = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
            if self._torn:
                data = b"\n" + data
            written = os.write(descriptor, data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(f"only {written} of {len(data)} bytes of a line fitted on the disk")
            if durable:
                os.fsync(descriptor)
            self._unsaid = 0
            self.problem = ""
        except OSError as error:
            self.lost += 1
            self._unsaid += 1
            self.problem = str(error)
            self._close()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        if self._lock.acquire(timeout=_LOCK_SECONDS):
            try:
                self._close()
            finally:
                self._lock.release()

    def _open(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self._mode)
            size = os.fstat(self._descriptor).st_size
            # A writer that was killed may have left half a line: begin after it.
            self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        return self._descriptor

    def _close(self) -> None:
        # Forgotten first: after a close that failed the number may already stand for another file.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
