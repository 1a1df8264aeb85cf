"""What a check is: it sees buckets and moments of a step, puts flags and digests into the agreed vector, and gives
details when they are asked for. It never acts, and never communicates by itself, unless it was handed the means (votes over
shards)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from unsilent.agreement import Agreed, Declaration
from unsilent.records import Site
from unsilent.reduction import Bucket


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Where the run is. ``due`` names the checks whose turn it is; ``first`` is the first step after start or load; in a step
    ``apart`` every rank has weights of its own, which local SGD has not averaged yet."""

    step: int
    due: frozenset[str]
    first: bool = False
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """One line of the coverage table: what is looked at, how, when, and what it cannot see."""

    site: str
    check: str
    how: str
    when: str
    blind: str


class Check(Protocol):
    """The protocol of every check; ``tests/contract`` holds each one to it.

    A method that raises is a fault of the guard: the step catches it, and the check is switched off on all ranks
    together. Order in a step: ``begin``, ``before_reduction`` for every bucket, ``before_update``, ``fill``; on an
    alarm ``details`` and ``evidence``; then ``after_update``, also when the update was skipped.
    """

    name: str
    sites: tuple[Site, ...]
    period: int

    def coverage(self) -> tuple[Coverage, ...]:
        """What this check looks at and cannot see, for the table printed at start."""
        ...

    def declares(self) -> Declaration:
        """Its part of the agreed vector; the same on all ranks."""
        ...

    def wants(self, step: int, micro_batch: int) -> frozenset[str]:
        """The units (module names, "" for the whole model) whose gradients it wants to see in this micro-batch."""
        ...

    def begin(self, moment: Moment) -> None:
        """A step begins; forget the last one, except findings made after its update."""
        ...

    def before_reduction(self, bucket: Bucket) -> None:
        """See one bucket of local gradients. Runs inside backward: no communication, no synchronisation."""
        ...

    def before_update(self, moment: Moment) -> None:
        """Forward, backward and reduction are over, nothing was updated yet: take the readings."""
        ...

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        """Flags and digests of this rank. The one place where readings are brought to the host."""
        ...

    def alarm(self, agreed: Agreed) -> bool:
        """Whether what all ranks know now needs a closer look; the same answer on all ranks."""
        ...

    def details(self) -> Any:
        """What the others need for the closer look: plain picklable data, gathered from all ranks."""
        ...

    def evidence(self, step: int, details: Sequence[Any]) -> Sequence[Any]:
        """Turn the details of all ranks into evidence records; the same on all ranks."""
        ...

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        """The update is over or was skipped; findings made here ride in the next step's vector."""
        ...
