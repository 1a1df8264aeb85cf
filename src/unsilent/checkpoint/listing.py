"""Which checkpoints a directory holds; opens nothing but certificates. Single process, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unsilent.checkpoint.certificate import CERTIFICATE, Status
from unsilent.checkpoint.files import DCP_METADATA, read_certificate, steps_of
from unsilent.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One checkpoint in a directory.

    ``status`` is None when it has no certificate (unguarded) or when its certificate is ``damaged``; ``reason`` says
    why it is distrusted or damaged, or can never be certified.
    """

    path: Path
    steps: int
    status: Status | None
    reason: str = ""
    damaged: bool = False

    @property
    def unguarded(self) -> bool:
        return self.status is None and not self.damaged


def checkpoints_in(root: Path | str) -> list[Saved]:
    """All checkpoints of a directory, the oldest first."""
    root = Path(root)
    found = [look(path) for path in root.iterdir() if steps_of(path) is not None] if root.is_dir() else []
    return sorted((s for s in found if s is not None), key=lambda s: s.steps)


def look(path: Path) -> Saved | None:
    """What ``path`` is; None when it is no checkpoint."""
    steps = steps_of(path)
    try:
        certificate = read_certificate(path)
    except CheckpointError as error:
        return Saved(path=path, steps=steps or 0, status=None, reason=str(error), damaged=True)
    if certificate is not None:
        steps = certificate.steps if steps is None else steps
        return Saved(path=path, steps=steps, status=certificate.status, reason=certificate.reason)
    return Saved(path=path, steps=steps or 0, status=None) if (path / DCP_METADATA).is_file() else None


def load_order(root: Path, path: Path | str | None) -> list[Saved]:
    """What to try when loading: the newest first, those without a certificate last; or ``path`` alone."""
    if path is None and ((root / DCP_METADATA).is_file() or (root / CERTIFICATE).is_file()):
        path = root
    if path is not None:
        saved = look(Path(path))
        return [] if saved is None else [saved]
    return sorted(checkpoints_in(root), key=lambda s: (s.unguarded, -s.steps))
