"""What a checkpoint must contain, and how far it is trusted: the nouns and their JSON form. No torch, no files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, cast

from unsilent.errors import CheckpointError

CERTIFICATE = "certificate.json"
FORMAT = 1


class Status(str, Enum):
    """How far a checkpoint is trusted."""

    CANDIDATE = "candidate"
    CERTIFIED = "certified"
    DISTRUSTED = "distrusted"


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """The SHA-256 (hexadecimal) and the size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class CheckRun:
    """A check that ran clean, and the steps that it covered."""

    check: str
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a checkpoint, or a part of it, is not what its certificate says.

    ``file`` is "" when no file is to blame; ``tensors`` names what is, or may be, hit; ``rank`` is set when only some
    ranks saw it.
    """

    path: str
    reason: str
    file: str = ""
    tensors: tuple[str, ...] = ()
    rank: int | None = None

    def __str__(self) -> str:
        where = f"{self.path}/{self.file}" if self.file else self.path
        seen = f" (seen by rank {self.rank})" if self.rank is not None else ""
        shown = ", ".join(self.tensors[:3]) + (f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else "")
        return f"{where}: {self.reason}{seen}" + (f" [{shown}]" if shown else "")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is promised of one checkpoint.

    ``tensors`` maps the name of each saved tensor (its flattened key in torch.distributed.checkpoint) to the JSON form
    of its fingerprint, taken in memory before the write. ``files`` maps each file, relative to the checkpoint's
    directory, to its digest. ``rng`` maps a rank, as text, to the SHA-256 of its saved random state.
    """

    steps: int
    created: str
    torch: str
    status: Status = Status.CANDIDATE
    reason: str = ""
    world_size: int = 1
    checks: tuple[CheckRun, ...] = ()
    tensors: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: Mapping[str, FileDigest] = field(default_factory=dict[str, FileDigest])
    rng: Mapping[str, str] = field(default_factory=dict[str, str])

    def with_status(self, status: Status, reason: str = "") -> Certificate:
        """The same certificate with another status."""
        return replace(self, status=status, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values, sealed by the SHA-256 of its own content."""
        record: dict[str, Any] = {
            "format": FORMAT,
            "steps": self.steps,
            "status": self.status.value,
            "reason": self.reason,
            "created": self.created,
            "torch": self.torch,
            "world_size": self.world_size,
            "checks": [{"check": c.check, "steps": list(c.steps)} for c in self.checks],
            "tensors": dict(self.tensors),
            "files": {name: {"sha256": f.sha256, "size": f.size} for name, f in self.files.items()},
            "rng": dict(self.rng),
        }
        record["seal"] = _seal(record)
        return record

    def dumps(self) -> str:
        """The text of ``certificate.json``."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    @staticmethod
    def loads(text: str | bytes) -> Certificate:
        """Read the text of a ``certificate.json``.

        Raises:
            CheckpointError: it is not JSON, was changed after it was sealed, or is of a newer format.
        """
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"the certificate is not JSON: {error}") from None
        if not isinstance(parsed, dict) or "format" not in parsed:
            raise CheckpointError("the certificate has no format number")
        record = cast("dict[str, Any]", parsed)
        if record["format"] != FORMAT:
            raise CheckpointError(
                f"the certificate has format {record['format']!r}; this version of unsilent reads format {FORMAT}"
            )
        if record.get("seal") != _seal(record):
            raise CheckpointError("the certificate is damaged: its content does not match its own seal")
        try:
            return _from_record(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"the certificate cannot be read: {type(error).__name__}: {error}") from None


def _seal(record: Mapping[str, Any]) -> str:
    # One flipped bit in the certificate itself must not turn "distrusted" into something else.
    content = {key: value for key, value in record.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _from_record(record: dict[str, Any]) -> Certificate:
    files = {name: FileDigest(sha256=str(f["sha256"]), size=int(f["size"])) for name, f in record["files"].items()}
    for name in files:
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError(f"the file name {name!r} points out of the checkpoint")
    return Certificate(
        steps=int(record["steps"]),
        created=str(record["created"]),
        torch=str(record["torch"]),
        status=Status(record["status"]),
        reason=str(record["reason"]),
        world_size=int(record["world_size"]),
        checks=tuple(CheckRun(check=str(c["check"]), steps=tuple(map(int, c["steps"]))) for c in record["checks"]),
        tensors=dict(record["tensors"]),
        files=files,
        rng={str(rank): str(digest) for rank, digest in record["rng"].items()},
    )
