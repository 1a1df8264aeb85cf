"""Whose part of a step is to be replaced, and by whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The work of ``auditee`` is to be taken from ``source``, whose rerun must give ``digest`` (None: any)."""

    auditee: int
    source: int
    digest: str | None
