"""The nouns that travel from a check to the report. No torch, no I/O, nothing changes after it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Site(str, Enum):
    """Where in a step a value can go wrong."""

    BATCH = "batch"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer"
    WEIGHTS = "weights"
    OPTIMIZER_STATE = "optimizer_state"
    RNG = "rng"
    CHECKPOINT = "checkpoint"


#: where a replica can be wrong at rest
STATE_SITES = (Site.WEIGHTS, Site.OPTIMIZER_STATE)


class Kind(str, Enum):
    """What a verdict says of the cause."""

    TRANSIENT = "TRANSIENT"
    PERSISTENT = "PERSISTENT"
    SOFTWARE = "SOFTWARE"
    INCONCLUSIVE = "INCONCLUSIVE"


class Action(str, Enum):
    """What is done about a verdict, from cheap to dear."""

    CONTINUE = "CONTINUE"
    REPAIR = "REPAIR"
    RECOMPUTE = "RECOMPUTE"
    HEAL = "HEAL"
    ROLLBACK = "ROLLBACK"
    QUARANTINE = "QUARANTINE"
    STOP = "STOP"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs. ``environment`` is a short digest: equal digests promise equal bits for equal work."""

    rank: int
    node: str
    device: str
    environment: str = ""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A device, or (with only ``rank`` and ``path``) a source that is not a device, such as a batch or a tensor."""

    rank: int | None = None
    node: str | None = None
    device: str | None = None
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found, who is suspected, and why, in words.

    ``tensors`` names what differed (first few), ``elements`` an element range inside the first of them where known.
    ``acquits`` names devices that this step was blamed on when it ran before, wrongly.
    """

    kind: Kind
    site: Site
    step: int
    reason: str
    check: str
    suspects: tuple[Suspect, ...] = ()
    tensors: tuple[str, ...] = ()
    elements: tuple[int, int] | None = None
    acquits: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON values; ``acquits`` is there only where somebody is acquitted."""
        record = asdict(self)
        record["kind"], record["site"] = self.kind.value, self.site.value
        if not self.acquits:
            del record["acquits"]
        return record


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One run of a rank's work for a step.

    ``rank`` is who computed (not whose work it is). ``digest`` stands for loss, gradients and written buffers, bit by
    bit; None when the run could not be made, and ``failure`` says why. ``recorded`` marks the live run (R); replays
    have it False. ``finite`` is False when a value of it was NaN or infinite.
    """

    rank: int
    digest: str | None
    recorded: bool = False
    finite: bool = True
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditEvidence:
    """All executions known of the work of ``auditee`` in ``step``, the live one first.

    ``weights_equal`` is False when auditee and auditor did not hold the same weights; ``outside_state`` names what a
    live forward has changed that reruns do not begin with ("" when nothing); ``attribute`` names a module's attribute that a
    forward changes: reruns begin with what it was at the start of the step, each rank with its own; ``alarm`` says why a recorded value
    that repeats is bad anyway ("" when only a mismatch was seen, e.g. "the loss is not finite").
    """

    step: int
    auditee: int
    auditor: int
    executions: tuple[Execution, ...]
    weights_equal: bool = True
    outside_state: str = ""
    attribute: str = ""
    alarm: str = ""
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class VoteEvidence:
    """The digests that ranks hold of one tensor that must be equal on them; None where a rank has no such tensor.

    ``ranks`` says whose digests they are, () that they are those of all ranks in order.
    """

    step: int
    site: Site
    tensor: str
    digests: tuple[str | None, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CounterEvidence:
    """The values that all ranks hold of one counter that must be equal: step, learning rate, scaler scale."""

    step: int
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FiniteEvidence:
    """Which ranks saw NaN or Inf: in the local gradients before the reduction, and in the reduced ones after it.

    ``scaler`` is True when a loss scaler is in use; ``streak`` counts the steps in a row, this one included, in which
    the scaler had to back off; ``lone_streak`` how often in a row the same single rank overflowed alone. ``averaged``
    says that what was reduced had been divided by the number of ranks, so that finite values cannot overflow in the sum.
    """

    step: int
    world_size: int
    local: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()
    scaler: bool = False
    streak: int = 0
    lone_streak: int = 0
    averaged: bool = False
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnreducedEvidence:
    """Parameters that got a gradient which no reduction has touched, per rank that saw it."""

    step: int
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SpikeEvidence:
    """A rank whose own step stands out from those before it: the tensor that does most, and why."""

    step: int
    rank: int
    tensor: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A request: ``executor`` reruns the work of ``auditee``, ``times`` times."""

    executor: int
    auditee: int
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action and the reason for it. ``would`` is what act mode does; in observe mode ``action`` is CONTINUE."""

    action: Action
    reason: str
    would: Action | None = None


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the run's log."""

    kind: str
    step: int
    time: float
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
