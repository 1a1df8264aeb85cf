"""Check ``audit``: another rank recomputes a rank's work of this step and compares bits.

The check keeps this rank's own recorded reading (R) and the first replay of its neighbour's work (B1), and says
whether they agree. Exchange of the work and further replays are the guard's business; the judging is ``judge.py``'s.

Cost. Time: on an audited step one more forward and backward, in deterministic kernels, as in the step itself; on every
step one pass over the local gradients for their fingerprints. Memory: on an audited step one more set of gradients for
the replay, in act mode one copy of the local gradients for a repair, and the auditee's batch. Traffic: on an audited
step one message to one other rank, of batch, generators' states, the buffers that the forward wrote, and 16 bytes for
each parameter and buffer. Calibration adds two replays once; an alarm adds at most five rounds of replays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn

from unsilent.agreement import Agreed, Declaration
from unsilent.checks.protocol import Coverage, Moment
from unsilent.fingerprints import sums_of_gradients
from unsilent.records import AuditEvidence, Execution, Place, Site
from unsilent.reduction import Bucket, scale_
from unsilent.replay import Reading, Recorder, Work, assemble, read_execution


class Strength(str, Enum):
    """What calibration allows an audit to compare."""

    BITWISE = "bitwise"
    LOSS_ONLY = "loss only"
    OFF = "off"


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """``micro_batch="all"`` audits the accumulated local gradient, ``"rotating"`` one micro-batch, taking turns."""

    micro_batch: Literal["all", "rotating"] = "all"


@dataclass(frozen=True)
class _Compared:
    """One rank's view of an audit: its own reading's digest, and what it found about its auditee."""

    recorded: str | None
    finite: bool
    weights: int
    auditee: int | None
    replayed: str | None
    replay_finite: bool
    failure: str
    outside_state: str
    attribute: str
    tensors: tuple[str, ...]
    auditee_weights: int | None
    own: tuple[Execution, ...]


class Audit:
    """See the module's text.

    Args:
        inner: the module under the DDP wrapper.
        recorder: holds the capture of the live step.
        auditors: for each rank, who audits it; None where nobody can.
        reduces: whether buckets are reduced; without, local gradients are read from ``.grad``.
        labels: what a reading has a row for, see :meth:`unsilent.reduction.Reduction.labels`.
        team_places: of the teams, where ranks compute batches together.
        scale: what local gradients are multiplied by before they are reduced.
    """

    name = "audit"
    sites: tuple[Site, ...] = (Site.FORWARD, Site.BACKWARD, Site.GRADIENT)

    def __init__(
        self,
        inner: nn.Module,
        recorder: Recorder,
        config: AuditConfig,
        *,
        rank: int,
        auditors: tuple[int | None, ...],
        places: Sequence[Place],
        period: int,
        reduces: bool,
        labels: Callable[[], list[tuple[str, Hashable]]],
        scale: float = 1.0,
        team_places: Sequence[Place] | None = None,
    ) -> None:
        self._labels = labels
        self._team_places = places if team_places is None else team_places
        self.period = period
        self.config = config
        self.strength = Strength.BITWISE
        #: False where the live step's losses are not known, so that gradients and buffers are compared without them
        self.compares_losses = True
        self._inner, self._recorder, self._rank, self._reduces = inner, recorder, rank, reduces
        self.auditors, self._places, self._scale = auditors, places, scale
        self._rows: dict[Hashable, torch.Tensor] = {}
        self._micro_rows: dict[int, torch.Tensor] = {}
        self._micro_batch: int | None = None
        self._reading: Reading | None = None
        self._due = False
        self._listening = False  # the live forward and backward of the micro-batch that is audited are running
        self._compared: _Compared | None = None
        self._mismatch = False
        #: a replay used the job's process group: ranks that rerun work alone would wait for the others for ever
        self.communicates = False
        self._hooks: list[Any] = []
        if config.micro_batch == "rotating":
            self._hooks = [p.register_hook(self._see(p)) for p in inner.parameters() if p.requires_grad]

    def coverage(self) -> tuple[Coverage, ...]:
        partners = {a for a in self.auditors if a is not None}
        same_node = [
            r for r, a in enumerate(self.auditors) if a is not None and self._places[a].node == self._places[r].node
        ]
        nodes = len({p.node for p in self._team_places})
        blind = "one-shot errors in steps that are not audited"
        if self.config.micro_batch == "rotating":
            blind += ", and in micro-batches whose turn it is not"
        if not partners:
            blind += "; no other rank can audit: a device that repeats its error is not seen"
        elif nodes < 3:
            blind += f"; with {nodes} node{'s' if nodes > 1 else ''} a fault that repeats names both sides"
        if same_node:
            blind += f"; ranks {same_node} are audited on their own node"
        alone = [r for r, a in enumerate(self.auditors) if a is None]
        if alone and partners:
            blind += f"; ranks {alone} have no partner of like environment and are replayed on their own device only"
        when = f"every {self.period} steps, when saving, when triggered"
        return tuple(
            Coverage(site=site, check=self.name, how=f"ring replay on another rank, {self.strength.value}", when=when,
                     blind=blind)
            for site in ("forward", "backward", "gradient")
        )  # fmt: skip

    def declares(self) -> Declaration:
        return Declaration(flags=("mismatch", "communicates"))

    def wants(self, step: int, micro_batch: int) -> frozenset[str]:
        return frozenset({""}) if self._micro_batch == micro_batch else frozenset()

    def begin(self, moment: Moment) -> None:
        self._rows.clear()
        self._micro_rows.clear()
        self._reading = None
        self._compared = None
        self._mismatch = False
        self._due = self.name in moment.due
        self._micro_batch = None

    def rotate(self, step: int, micro_batches: int) -> int | None:
        """The micro-batch whose turn it is, None when the accumulated gradient is audited."""
        ring = all(auditor is not None for auditor in self.auditors)
        if self.config.micro_batch == "rotating" and micro_batches > 1 and self._due and ring:
            self._micro_batch = (step // max(self.period, 1)) % micro_batches
        return self._micro_batch

    @property
    def rotating(self) -> bool:
        """Whether this step is compared by one micro-batch only."""
        return self._micro_batch is not None

    def to_send(self, work: Work) -> Work:
        """What of this rank's work its auditor needs."""
        return work if self._micro_batch is None else work.only(self._micro_batch)

    def all_micro_batches(self) -> None:
        """An alarm: from now on this step is compared by its accumulated gradient, since a sum cannot be undone."""
        self._micro_batch = None

    def before_reduction(self, bucket: Bucket) -> None:
        # In every step, so that any step can still be audited when another check asks for it.
        if self.strength is not Strength.OFF:
            self._rows.update(bucket.sums())

    def before_update(self, moment: Moment) -> None:
        return

    def record(self, losses: Sequence[torch.Tensor]) -> Reading:
        """R: the digests of this rank's own live step. Call once, after the backward."""
        self._reading = self._read(losses)
        return self._reading

    @property
    def attribute(self) -> str:
        """The attribute that this rank's live forward has changed, as ``module.attribute``; "" where none."""
        return self._recorder.attribute

    @property
    def recorded(self) -> Reading | None:
        """R of this step; None when the step was not recorded."""
        return self._reading

    def compare(
        self,
        auditee: int | None,
        theirs: Reading | None,
        replayed: Reading | None,
        *,
        failure: str,
        outside_state: str,
        attribute: str,
        weights: int,
        auditee_weights: int | None,
        finite: bool,
        replay_finite: bool,
        own: Sequence[Execution] = (),
    ) -> None:
        """Note what the ring replay of ``auditee`` gave; the flag goes into the vector with :meth:`fill`."""
        differing: tuple[str, ...] = ()
        if theirs is not None and replayed is not None:
            differing = self.differing(theirs, replayed)
        assert self._reading is not None
        recorded = self.digest_of(self._reading)
        self._mismatch = (
            bool(differing)
            or bool(failure)
            or (auditee is not None and weights != auditee_weights)
            or any(execution.digest != recorded for execution in own)
        )
        self._compared = _Compared(
            recorded=recorded,
            finite=finite,
            weights=weights,
            auditee=auditee,
            replayed=None if replayed is None else self.digest_of(replayed),
            replay_finite=replay_finite,
            failure=failure,
            outside_state=outside_state,
            attribute=attribute,
            tensors=differing[:8],
            auditee_weights=auditee_weights,
            own=tuple(own),
        )

    def digest_of(self, reading: Reading) -> str:
        """The digest that two executions are compared by, at the strength that calibration allows."""
        return self._cut(reading).digest

    def differing(self, one: Reading, other: Reading) -> tuple[str, ...]:
        return self._cut(one).differing(self._cut(other))

    def settled(self) -> None:
        """A repair put the agreed value in place of the wrong one: this step's audit no longer objects."""
        self._mismatch = False

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        return {"mismatch": self._mismatch, "communicates": self.communicates}, {}

    def alarm(self, agreed: Agreed) -> bool:
        return self.strength is not Strength.OFF and agreed.raised(self.name, "mismatch")

    def details(self) -> _Compared | None:
        return self._compared

    def evidence(self, step: int, details: Sequence[Any]) -> tuple[AuditEvidence, ...]:
        """One record for each rank that somebody audited."""
        found: list[AuditEvidence] = []
        views: list[_Compared | None] = list(details)
        for auditor, view in enumerate(views):
            if view is None or view.auditee is None:
                continue
            own = views[view.auditee]
            if own is None:
                continue
            executions = [Execution(rank=view.auditee, digest=own.recorded, recorded=True, finite=own.finite)]
            executions.append(
                Execution(rank=auditor, digest=view.replayed, finite=view.replay_finite, failure=view.failure)
            )
            executions.extend(own.own)
            found.append(
                AuditEvidence(
                    step=step,
                    auditee=view.auditee,
                    auditor=auditor,
                    executions=tuple(executions),
                    weights_equal=view.weights == view.auditee_weights,
                    outside_state=view.outside_state or own.outside_state,
                    attribute=view.attribute or own.attribute,
                    tensors=view.tensors,
                )
            )
        return tuple(found)

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        return

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _read(self, losses: Sequence[torch.Tensor]) -> Reading:
        buffers = self._recorder.written_now()
        if self._micro_batch is not None:
            return assemble([losses[self._micro_batch]], self._labels(), self._micro_rows, {})
        if self._reduces:
            return assemble(losses, self._labels(), self._rows, buffers)
        gradients = {id(p): p.grad for p in self._inner.parameters() if p.grad is not None}
        return read_execution(self._inner, losses, gradients, buffers)

    def _cut(self, reading: Reading) -> Reading:
        """Only what may be compared: everything, or only the losses."""
        keep = [i for i, name in enumerate(reading.names) if self._comparable(name)]
        if len(keep) == len(reading.names):
            return reading
        return Reading(names=tuple(reading.names[i] for i in keep), rows=reading.rows[keep])

    def _comparable(self, name: str) -> bool:
        is_loss = name.startswith("loss[")
        if self.strength is Strength.LOSS_ONLY or (is_loss and not self.compares_losses):
            return is_loss and self.compares_losses
        return self._micro_batch is None or not name.startswith("buffer.")

    def _see(self, parameter: nn.Parameter) -> Any:
        """A permanent hook on the gradient of one micro-batch, before it is accumulated; switched by data."""

        def see(gradient: torch.Tensor) -> None:
            if self._micro_batch is not None and self._listening and id(parameter) not in self._micro_rows:
                self._micro_rows[id(parameter)] = sums_of_gradients([scale_(gradient.detach().clone(), self._scale)])[0]

        return see

    def listen(self, micro_batch: int | None) -> None:
        """Tell which micro-batch is running, None outside the live forward and backward."""
        self._listening = micro_batch is not None and bool(self.wants(0, micro_batch))
