"""How a guard behaves. Each check's own options stand next to the check."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from unsilent.checks.audit import AuditConfig
from unsilent.checks.finite import FiniteConfig
from unsilent.checks.update import UpdateConfig
from unsilent.errors import UsageError

NO_CHECKPOINT = (
    "with averaged_every no checkpoint is certified, since each rank has optimizer state that no other can vouch for"
)


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Options of :class:`unsilent.Guard`; frozen, keyword-only.

    Args:
        mode: ``"act"`` repairs; ``"observe"`` records every verdict and the action it would take, and changes nothing.
        quarantine: ``"ask"`` waits for ``unsilent approve RUN NODE`` before a node is taken out; ``"auto"`` does not.
        audit_every: steps between two ring audits; None for none on schedule (a trigger may still ask for one).
        replicas_every: steps between two votes over weights, optimizer state and reduced gradients; None for none.
        save_every: the run saves when the number of completed updates is a multiple of this; the step before such a
            save runs all checks. Without it, name such steps with ``guard.step(..., saving=True)``.
        total_steps: the last step of the run, if known, runs all checks.
        recomputes: how often in a row one step may be recomputed.
        snapshot_every: at most so many steps lie between two copies of weights and optimizer state in host memory, as far
            as votes allow: they are taken when a vote found all replicas alike. A rollback goes back to the last one.
            None for none.
        recovery_streams: on a GPU, micro-batches that a recovery computes anew are spread over so many streams; with more
            than one, cuBLAS repeats its bits only if CUBLAS_WORKSPACE_CONFIG is set.
        keep_batches: the batches of so many last steps are kept, so that a rollback can run these steps again.
        directory: run directory for events, evidence and ``exit.json``; None keeps none.
        ledger: directory that many runs share, in which each keeps a file of what was found on which device; what it
            holds against the devices of this run counts from the start. None keeps none.
        evidence: how much of a finding is kept: ``"digests"``, ``"slices"`` or ``"full"`` (with the batch).
        timeout_s: seconds within which every rank ends or raises once one has failed.
        on_guard_error: a fault in the guard itself switches the check off on all ranks (``"disable"``) or raises.
        on_inconclusive: what to do when nobody can tell the right value.
        node: the name of this host; None takes ``UNSILENT_NODE``, ``NODE_NAME``, ``SLURMD_NODENAME`` or the host's name.
        averaged_every: local SGD: gradients are not reduced, and the run itself makes the weights of all ranks alike, bit for bit,
            after the step in which the number of completed updates becomes a multiple of this. Only steps that begin with
            such weights are audited and voted on. None where ranks hold the same weights all the time.
        replicated_buffers: names of buffers that all ranks must hold alike; others may differ (BatchNorm).
        keep_checkpoints: how many checkpoints are kept, the newest certified one among them: that one and the one just
            written always stay. One without a certificate is not counted, and not deleted to make room.
        update: a statistic of every rank's own step that asks for an audit where it stands out; None for none.
        require_localization: refuse to start where a persistent fault could not be pinned on one node.
    """

    mode: Literal["act", "observe"] = "act"
    quarantine: Literal["ask", "auto"] = "ask"
    audit_every: int | None = 100
    replicas_every: int | None = 10
    save_every: int | None = None
    total_steps: int | None = None
    recomputes: int = 3
    snapshot_every: int | None = 10
    keep_batches: int = 10
    recovery_streams: int = 1
    directory: str | Path | None = None
    ledger: str | Path | None = None
    evidence: Literal["digests", "slices", "full"] = "digests"
    timeout_s: float = 60.0
    on_guard_error: Literal["disable", "raise"] = "disable"
    on_inconclusive: Literal["continue", "stop"] = "continue"
    node: str | None = None
    averaged_every: int | None = None
    replicated_buffers: tuple[str, ...] = ()
    keep_checkpoints: int = 3
    require_localization: bool = False
    finite: FiniteConfig = field(default_factory=FiniteConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    update: UpdateConfig | None = None

    def __post_init__(self) -> None:
        for name in ("audit_every", "replicas_every", "save_every", "total_steps", "snapshot_every", "averaged_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1, or None to switch it off")
        for name in ("audit_every", "replicas_every"):
            value = getattr(self, name)
            if self.averaged_every is not None and value is not None and value % self.averaged_every:
                raise UsageError(
                    f"{name} is {value} and averaged_every is {self.averaged_every}: it must be a multiple, since ranks hold the "
                    "same weights only then"
                )
        if self.averaged_every is not None and self.save_every is not None:
            raise UsageError(f"save_every is {self.save_every}: {NO_CHECKPOINT}")
        choices = {
            "mode": ("act", "observe"),
            "quarantine": ("ask", "auto"),
            "evidence": ("digests", "slices", "full"),
            "on_guard_error": ("disable", "raise"),
            "on_inconclusive": ("continue", "stop"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(allowed)}")
        if self.recomputes < 0 or self.timeout_s <= 0:
            raise UsageError("recomputes must not be negative and timeout_s must be positive")
        for name in ("keep_batches", "recovery_streams"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.keep_checkpoints < 1:
            raise UsageError(f"keep_checkpoints is {self.keep_checkpoints}: at least one checkpoint must be kept")
