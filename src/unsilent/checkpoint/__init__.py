"""Checkpoints that carry a certificate: what they must contain, bit for bit, and how far they are trusted.

The data takes one way: ``state`` collects it from the model and the optimizer → ``draft`` takes its fingerprints and lets the
ranks agree (``composed`` makes those of whole tensors out of shards) → ``dcp`` writes it → ``files`` hashes what was written →
``store`` publishes it under its own name with its ``certificate``. Loading goes back the same way and copies nothing into the
model before every hash and every fingerprint has been compared.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsilent.checkpoint.certificate import Certificate, CheckRun, FileDigest, Problem, Status
    from unsilent.checkpoint.listing import Saved, checkpoints_in
    from unsilent.checkpoint.loading import Loaded
    from unsilent.checkpoint.store import CheckpointStore
    from unsilent.checkpoint.trust import Trust, may_publish
    from unsilent.checkpoint.verification import attach, certify, verify

# Lazy, so that reading a certificate does not import torch.
_HOME = {
    "Certificate": "certificate",
    "CheckRun": "certificate",
    "FileDigest": "certificate",
    "Problem": "certificate",
    "Status": "certificate",
    "CheckpointStore": "store",
    "Loaded": "loading",
    "Saved": "listing",
    "checkpoints_in": "listing",
    "Trust": "trust",
    "may_publish": "trust",
    "attach": "verification",
    "certify": "verification",
    "verify": "verification",
}

__all__ = [
    "Certificate",
    "CheckRun",
    "CheckpointStore",
    "FileDigest",
    "Loaded",
    "Problem",
    "Saved",
    "Status",
    "Trust",
    "attach",
    "certify",
    "checkpoints_in",
    "may_publish",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
