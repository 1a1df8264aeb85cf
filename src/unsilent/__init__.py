"""unsilent: catches silent data corruption in PyTorch training in the step in which it appears.

    guard = unsilent.Guard(model, optimizer, loss_fn)
    for batch in loader:
        outcome = guard.step(batch)

Names are loaded when they are first used, so that reading a report does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unsilent.checks.audit import AuditConfig
    from unsilent.checks.finite import FiniteConfig
    from unsilent.checks.update import UpdateConfig
    from unsilent.checks.update_rules import SDCDetector
    from unsilent.config import GuardConfig
    from unsilent.errors import (
        CheckpointError,
        CorruptionError,
        IntegrityLost,
        Quarantine,
        RankFailure,
        UnsilentError,
        UsageError,
    )
    from unsilent.fingerprints import Fingerprint, fingerprint
    from unsilent.guard import Guard, Outcome
    from unsilent.layout import Equal, Layout
    from unsilent.records import Action, Kind, Site, Suspect, Verdict

_HOME = {
    "Action": "unsilent.records",
    "AuditConfig": "unsilent.checks.audit",
    "CheckpointError": "unsilent.errors",
    "CorruptionError": "unsilent.errors",
    "Equal": "unsilent.layout",
    "Fingerprint": "unsilent.fingerprints",
    "FiniteConfig": "unsilent.checks.finite",
    "Guard": "unsilent.guard",
    "GuardConfig": "unsilent.config",
    "IntegrityLost": "unsilent.errors",
    "Kind": "unsilent.records",
    "Layout": "unsilent.layout",
    "Outcome": "unsilent.guard",
    "Quarantine": "unsilent.errors",
    "RankFailure": "unsilent.errors",
    "SDCDetector": "unsilent.checks.update_rules",
    "Site": "unsilent.records",
    "Suspect": "unsilent.records",
    "UnsilentError": "unsilent.errors",
    "UpdateConfig": "unsilent.checks.update",
    "UsageError": "unsilent.errors",
    "Verdict": "unsilent.records",
    "fingerprint": "unsilent.fingerprints",
}

__all__ = [
    "Action",
    "AuditConfig",
    "CheckpointError",
    "CorruptionError",
    "Equal",
    "Fingerprint",
    "FiniteConfig",
    "Guard",
    "GuardConfig",
    "IntegrityLost",
    "Kind",
    "Layout",
    "Outcome",
    "Quarantine",
    "RankFailure",
    "SDCDetector",
    "Site",
    "Suspect",
    "UnsilentError",
    "UpdateConfig",
    "UsageError",
    "Verdict",
    "fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unsilent' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # also undoes the submodule of the same name that the import has put here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
