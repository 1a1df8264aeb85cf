"""May a checkpoint be called good? A pure decision over what is known of the audits so far."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

from unsilent.checkpoint.certificate import Certificate, Status


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What the run knows when it is asked.

    A *step* is the number of updates completed before it, so the step that a checkpoint of ``n`` completed updates
    ends with is ``n - 1``.

    Attributes:
        clean_audits: for each rank, the newest step whose audit of that rank was clean; None where there was none.
        clean_replicas: the ``steps`` (updates completed) at which the vote over replicas was clean.
        doubted_after: checkpoints with more than this many updates completed are not trusted, since a device that
            failed had its last clean audit there; None when no device failed.
    """

    clean_audits: tuple[int | None, ...]
    clean_replicas: Set[int] = frozenset()
    doubted_after: int | None = None


def may_publish(certificate: Certificate, trust: Trust) -> Literal["wait", "yes", "no"]:
    """Whether the checkpoint of this certificate may be called certified: ``no`` is final, ``wait`` is not."""
    if certificate.status is Status.DISTRUSTED:
        return "no"
    if trust.doubted_after is not None and certificate.steps > trust.doubted_after:
        return "no"
    if certificate.status is Status.CERTIFIED:
        return "yes"
    if certificate.steps not in trust.clean_replicas or not trust.clean_audits:
        return "wait"
    audited = all(step is not None and step >= certificate.steps - 1 for step in trust.clean_audits)
    return "yes" if audited else "wait"
