"""The public names and the commands are frozen: to add one is a decision, to lose one breaks somebody's code."""

from __future__ import annotations

import importlib

import pytest

import unsilent

NAMES: frozenset[str] = frozenset(
    {
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
    }
)
COMMANDS: frozenset[str] = frozenset(
    {
        "demo",
        "train",
        "exec",
        "approve",
        "report",
        "verify",
        "doctor",
        "ledger",
        "study",
        "replay",
        "recheck",
        "launch",
        "campaign",
    }
)


def test_the_public_names_are_the_frozen_ones() -> None:
    assert frozenset(unsilent.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_there(name: str) -> None:
    """Also once its module has been imported: a module of the same name would take its place."""
    assert callable(getattr(unsilent, name))
    importlib.import_module(getattr(unsilent, name).__module__)
    assert callable(getattr(unsilent, name))


def test_the_commands_are_the_frozen_ones() -> None:
    import typer.main

    app = importlib.import_module("unsilent.cli").app
    assert frozenset(typer.main.get_command(app).commands) == COMMANDS  # type: ignore[attr-defined]
