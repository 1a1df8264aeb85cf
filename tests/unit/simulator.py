"""Devices that err, and audits of them. Knows only the records: the judge and the ring are given to it, not used.

A healthy device gives the true value of a rank's work. A faulty one errs as its behaviour says, and never in the same
bits as a device on another node: that is the fault budget under which the judge promises to blame nobody healthy. A
faulty host makes the same error on all of its devices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unsilent.records import AuditEvidence, Execution, Place, Replay

BEHAVIOURS = (
    "repeats the same error",
    "never repeats anything",
    "errs as auditee",
    "errs as auditor",
    "errs as arbiter",
    "errs sometimes",
    "errs once",
)
HOST = "its host repeats one error"


@dataclass(frozen=True)
class World:
    places: tuple[Place, ...]
    groups: tuple[int, ...]

    def peers(self, rank: int) -> list[Place]:
        """Who may be compared with ``rank``: like environment, same group; itself included."""
        home, group = self.places[rank], self.groups[rank]
        return [p for p in self.places if p.environment == home.environment and self.groups[p.rank] == group]


def random_world(rng: random.Random) -> World:
    """3 to 64 ranks, mostly few, on one to many nodes, sometimes unlike, sometimes with model-parallel groups."""
    ranks = rng.choice((3, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, rng.randint(3, 64)))
    if rng.random() < 0.7:  # equal nodes, as most jobs have them
        per_node = rng.choice([size for size in (1, 1, 2, 4, 8) if size <= ranks])
        nodes = [f"n{rank // per_node}" for rank in range(ranks)]
    else:
        count = rng.randint(1, ranks)
        nodes = [f"n{rng.randrange(count)}" for _ in range(ranks)]
    kinds = 2 if rng.random() < 0.15 else 1
    axes = 2 if ranks >= 6 and rng.random() < 0.15 else 1
    places = tuple(
        Place(rank=rank, node=node, device=f"gpu-{rank}", environment=f"env{rng.randrange(kinds)}")
        for rank, node in enumerate(nodes)
    )
    return World(places, tuple(rank % axes for rank in range(ranks)))


class Cluster:
    """The devices of a world, some of them faulty; runs work and remembers who erred how often."""

    def __init__(self, world: World, faulty: dict[int, str], rng: random.Random, failing: float = 0.0) -> None:
        self.world = world
        self.faulty = faulty
        self.errors: dict[int, int] = {}
        self._rng = rng
        self._failing = failing
        self._alike = {rank: rng.random() < 0.5 for rank in faulty}
        self._rate = {rank: rng.choice((0.1, 0.3, 0.6, 0.9)) for rank in faulty}
        self._countdown = {rank: rng.randrange(5) for rank in faulty}
        self._serial = 0

    def run(self, executor: int, auditee: int, auditor: int, *, recorded: bool = False) -> Execution:
        """One execution of the work of ``auditee`` on the device of ``executor``."""
        if not recorded and self._failing and self._rng.random() < self._failing:
            return Execution(rank=executor, digest=None, failure="out of memory")
        if executor in self.faulty and self._errs(executor, auditee, auditor):
            self.errors[executor] = self.errors.get(executor, 0) + 1
            self._serial += 1
            digest = self._wrong(executor, auditee)
        else:
            digest = f"right {auditee} {self.world.places[executor].environment}"
        return Execution(rank=executor, digest=digest, recorded=recorded)

    def _wrong(self, executor: int, auditee: int) -> str:
        behaviour = self.faulty[executor]
        if behaviour == HOST:
            return f"wrong {self.world.places[executor].node} {auditee}"
        if behaviour == "repeats the same error" or (behaviour != "never repeats anything" and self._alike[executor]):
            return f"wrong {executor} {auditee}"
        return f"wrong {executor} {auditee} {self._serial}"

    def _errs(self, executor: int, auditee: int, auditor: int) -> bool:
        behaviour = self.faulty[executor]
        if behaviour == "errs as auditee":
            return executor == auditee
        if behaviour == "errs as auditor":
            return executor == auditor != auditee
        if behaviour == "errs as arbiter":
            return executor not in (auditee, auditor)
        if behaviour == "errs sometimes":
            return self._rng.random() < self._rate[executor]
        if behaviour == "errs once":
            self._countdown[executor] -= 1
            return self._countdown[executor] == -1
        return True


def settle(
    cluster: Cluster,
    auditee: int,
    auditor: int | None,
    ask: Callable[[AuditEvidence], Sequence[Replay]],
    alarm: str = "",
) -> tuple[AuditEvidence, int]:
    """The live run and its audit, then every replay that ``ask`` requests until it requests none; and the rounds."""
    partner = auditee if auditor is None else auditor
    executions = (
        cluster.run(auditee, auditee, partner, recorded=True),
        cluster.run(partner, auditee, partner),
    )
    evidence = AuditEvidence(step=7, auditee=auditee, auditor=partner, executions=executions, alarm=alarm)
    rounds = 0
    while requests := ask(evidence):
        rounds += 1
        made = [cluster.run(r.executor, r.auditee, partner) for r in requests for _ in range(r.times)]
        evidence = replace(evidence, executions=(*evidence.executions, *made))
        if rounds > 50:
            raise AssertionError(f"does not end: {evidence}")
    return evidence, rounds
