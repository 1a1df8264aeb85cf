"""Teams: the ranks that compute one batch together, in tensor, sequence, pipeline, context or expert parallelism. No torch.

A wrong value of one member is in the results of all of them, so a team is audited as a whole, by another team: each member by
the one at the same *position* there. Whoever judges such an audit sees a team as one device, which stands under the rank of
its first member (its *lead*). Without such parallelism every rank is a team of one, and nothing of this is to be seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unsilent.records import AuditEvidence, Execution, Place, Replay

_JOIN = "+"


class Teams:
    """All teams of a run.

    Args:
        members: the ranks of each team, in the order of their positions.
    """

    def __init__(self, members: Iterable[Sequence[int]]) -> None:
        self.members = tuple(tuple(ranks) for ranks in members)
        self._team_of = {rank: ranks for ranks in self.members for rank in ranks}

    @classmethod
    def of_one(cls, size: int) -> Teams:
        """Every rank by itself."""
        return cls((rank,) for rank in range(size))

    @classmethod
    def of_mesh(cls, sizes: Mapping[str, int], data: Sequence[str]) -> Teams:
        """Those of a mesh with these dimensions, whose ranks count up along the last one first.

        Args:
            data: the dimensions along which ranks have batches of their own.
        """
        teams: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(itertools.product(*(range(size) for size in sizes.values()))):
            own = tuple(i for name, i in zip(sizes, at, strict=True) if name in data)
            teams.setdefault(own, []).append(rank)
        return cls(teams.values())

    @property
    def alone(self) -> bool:
        """Whether every rank computes by itself."""
        return all(len(ranks) == 1 for ranks in self.members)

    def of(self, rank: int) -> tuple[int, ...]:
        """The team of a rank."""
        return self._team_of[rank]

    def lead(self, rank: int) -> int:
        return self.of(rank)[0]

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that do what this one does on other batches: those at its position in all teams, itself among them."""
        position = self.of(rank).index(rank)
        return tuple(ranks[position] for ranks in self.members)

    def counterpart(self, rank: int, team_of: int) -> int:
        """Who stands at the position of ``rank`` in the team of ``team_of``."""
        return self.of(team_of)[self.of(rank).index(rank)]

    def places(self, places: Sequence[Place]) -> tuple[Place, ...]:
        """One place for each team, under its lead; a team on several nodes has all their names."""
        by_rank = {place.rank: place for place in places}
        return tuple(_as_one([by_rank[rank] for rank in ranks]) for ranks in self.members)

    def as_one(self, audits: Iterable[AuditEvidence]) -> list[AuditEvidence]:
        """The audits of single ranks, as those of their teams."""
        of_team: dict[int, dict[int, AuditEvidence]] = {}
        for audit in audits:
            of_team.setdefault(self.lead(audit.auditee), {})[audit.auditee] = audit
        found: list[AuditEvidence] = []
        for lead, by_rank in of_team.items():
            parts = [by_rank[rank] for rank in self.of(lead) if rank in by_rank]
            if len(parts) < len(self.of(lead)):
                continue  # a member that could not be read: nobody can compare the team
            made = [self.one_execution(made) for made in zip(*(part.executions for part in parts), strict=False)]
            found.append(
                replace(
                    parts[0],
                    auditor=self.lead(parts[0].auditor),
                    executions=tuple(made),
                    weights_equal=all(part.weights_equal for part in parts),
                    outside_state=next((part.outside_state for part in parts if part.outside_state), ""),
                    attribute=next((part.attribute for part in parts if part.attribute), ""),
                    alarm=next((part.alarm for part in parts if part.alarm), ""),
                    tensors=tuple(dict.fromkeys(name for part in parts for name in part.tensors))[:8],
                )
            )
        return found

    def one_execution(self, made: Sequence[Execution]) -> Execution:
        """What the members of a team made together."""
        digests = [execution.digest for execution in made]
        return Execution(
            rank=self.lead(made[0].rank),
            digest=None if None in digests else _JOIN.join(digest for digest in digests if digest is not None),
            recorded=made[0].recorded,
            finite=all(execution.finite for execution in made),
            failure=next((execution.failure for execution in made if execution.failure), ""),
        )

    def each(self, digest: str | None, lead: int) -> dict[int, str | None]:
        """By member, its own part of a team's digest."""
        parts = [None] * len(self.of(lead)) if digest is None else digest.split(_JOIN)
        return dict(zip(self.of(lead), parts, strict=True))

    def requests(self, requests: Iterable[Replay]) -> list[Replay]:
        """What each member has to rerun where a team is asked to."""
        return [
            replace(request, executor=executor, auditee=self.counterpart(executor, request.auditee))
            for request in requests
            for executor in self.of(request.executor)
        ]

    def substitutes(self, substitutes: Mapping[int, int]) -> dict[int, int]:
        """Whole teams that stand in for one another, where a single member is to be replaced."""
        return {
            member: self.counterpart(member, source) for rank, source in substitutes.items() for member in self.of(rank)
        }


@dataclass(frozen=True)
class Crossing:
    """A value that a rank sends to others of its team, or (``arrived``) that its stage was sent.

    ``order`` grows along the way that values take through a team: micro-batch, backward after forward, stage of the
    pipeline (downwards in backward), number in the sequence of its rank.
    """

    order: tuple[int, int, int, int]
    name: str
    digest: tuple[int, int]
    arrived: bool = False


def first_to_diverge(
    recorded: Sequence[Sequence[Crossing]], rerun: Sequence[Sequence[Crossing]]
) -> tuple[int, Crossing] | None:
    """Which member of a team sent something else first, and where; None where that cannot be told.

    It cannot where two members are first, where the first difference is in what a member was sent, where the live run and the
    rerun, or two members of one stage, did not take the same way, and where nobody differs in what it sent.

    Args:
        recorded: of each member, in the order of positions, what its live run let cross.
        rerun: the same, of the run by another team.
    """
    first: list[tuple[int, Crossing]] = []
    ways = dict[int, list[tuple[tuple[int, int], str]]]()
    for position, (one, other) in enumerate(zip(recorded, rerun, strict=True)):
        way = [(crossing.order[:2], crossing.name) for crossing in one]
        if not way or way != [(crossing.order[:2], crossing.name) for crossing in other]:
            return None
        if ways.setdefault(abs(one[0].order[2]), way) != way:
            return None
        differing = [a for a, b in zip(one, other, strict=True) if a.digest != b.digest]
        if differing:
            first.append((position, min(differing, key=lambda crossing: crossing.order)))
    if not first:
        return None
    position, crossing = min(first, key=lambda entry: entry[1].order)
    shared = sum(entry[1].order == crossing.order for entry in first) > 1
    return None if shared or crossing.arrived else (position, crossing)


def _as_one(places: Sequence[Place]) -> Place:
    nodes = dict.fromkeys(place.node for place in places)
    environments = [place.environment for place in places]
    alike = len(set(environments)) == 1
    return replace(
        places[0],
        node=_JOIN.join(nodes),
        environment=environments[0] if alike else _JOIN.join(environments),  # position by position
    )
