"""The ring replay: moves a rank's work to the rank that audits it, reruns it there, and collects the executions.

Every rank takes part in every exchange, also one whose own part failed: it sends the failure instead of its work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unsilent.attributes import Attributes
from unsilent.checks.audit import Audit
from unsilent.crossings import Crossings
from unsilent.determinism import Kernels
from unsilent.errors import RankFailure
from unsilent.localize import next_replays
from unsilent.records import AuditEvidence, Execution, Replay
from unsilent.replay import Execution as Run
from unsilent.replay import Reading, Replayer, Work, pack, unpack
from unsilent.sharded_reduction import Handover
from unsilent.world import World

_TAG_WORK, _TAG_FORWARD, _TAG_EXECUTIONS = 20, 21, 22
MAX_ROUNDS = 5
_MOST_LENT = 2


@dataclass
class Parcel:
    """What an auditee sends to its auditor. ``failure`` stands alone when the work could not be packed."""

    failure: str = ""
    work: bytes = b""
    names: tuple[str, ...] = ()
    rows: torch.Tensor | None = None
    weights: int = 0
    finite: bool = True


@dataclass(frozen=True, kw_only=True)
class Lent:
    """Gradients of one rank's work that another has computed, spread over all ranks; ``run`` is this rank's part in it."""

    handover: Handover
    run: Run | None


class Ring:
    """Conducts audits for one guard.

    Args:
        auditors: for each rank, who audits it; None where nobody can, then it replays its own work.
        crossings: where ranks compute batches together, notes what a rerun shows of the way that values take.
        repairs: steps are put right, so that a rerun in which all ranks have their own work may make its gradients ready.
    """

    def __init__(
        self,
        world: World,
        replayer: Replayer,
        audit: Audit,
        auditors: Sequence[int | None],
        *,
        crossings: Crossings | None = None,
        repairs: bool = False,
    ) -> None:
        self.world, self.replayer, self.audit = world, replayer, audit
        self.crossings, self._repairs = crossings, repairs
        self.auditors = auditors
        inverse = {auditor: auditee for auditee, auditor in enumerate(auditors) if auditor is not None}
        self.auditor: int | None = auditors[world.rank]
        #: whose work this rank replays; its own when nobody can audit it; None when it has nothing to do
        self.auditee: int | None = inverse.get(world.rank, world.rank if self.auditor is None else None)
        self.works: dict[int, Work] = {}
        self.kernels = Kernels.DEFAULT
        #: the state has changed since this step was recorded, so that its recording is that of other weights
        self.stale = False
        self.start: Attributes | None = None
        #: where ranks rerun together: the last rerun in which all had their own work, with its reduced gradients
        self.ready: Run | None = None
        #: where ranks rerun together: what arbiters have computed in the last rerun, its gradients spread over the ranks
        self.lent: tuple[Lent, ...] = ()

    def begin(self, work: Work | None, *, kernels: Kernels, start: Attributes | None) -> None:
        """Take this rank's own work of the step; ``start`` are the attributes its forward began with, if known."""
        self.works = {} if work is None else {self.world.rank: work}
        self.kernels = kernels
        self.stale = False
        self.start = start
        self.forget()

    def forget(self) -> None:
        """Drop the gradients that reruns have left for a repair."""
        self.ready, self.lent = None, ()

    def swap(self, reading: Reading | None, *, finite: bool, weights: int) -> Parcel:
        """Send this rank's work to its auditor and receive the auditee's; every rank calls it.

        Args:
            reading: R of this rank, None when it could not be taken.
            weights: digest of this rank's weights.
        """
        mine = self._parcel(reading, finite=finite, weights=weights)
        return self._swap(mine, self.works[self.world.rank].step)

    def compare(
        self,
        reading: Reading,
        theirs: Parcel,
        *,
        finite: bool,
        weights: int,
        outside_state: str,
        own_replays: int = 0,
    ) -> None:
        """Replay the auditee's work, and tell the audit check what came out. It communicates with nobody.

        Args:
            reading: R of this rank.
            theirs: what :meth:`swap` brought.
            weights: digest of this rank's weights.
            own_replays: also replay this rank's own work so often (calibration).
        """
        replayed: Run | None = None
        failure = theirs.failure
        if self.auditee is not None and not failure:
            failure = self._unpack(self.auditee, theirs.work)
        if self.auditee is not None and not failure:
            with self.crossings.rerun() if self.crossings is not None else contextlib.nullcontext():
                replayed, failure = self._rerun(self.auditee)
        elif self.replayer.together:
            self._rerun(self.world.rank)  # the others need this rank in their reruns
        own: list[Execution] = []
        for _ in range(own_replays):
            run, why = self._rerun(self.world.rank)
            own.append(self._execution(run, why))
        # Without a snapshot of the start, a rerun begins with what the live forward has left.
        changed = "" if replayed is None else replayed.attribute
        their_reading = None
        if theirs.rows is not None:
            their_reading = Reading(names=theirs.names, rows=theirs.rows.to(reading.rows.device))
        self.audit.compare(
            self.auditee,
            their_reading,
            None if replayed is None else replayed.reading,
            failure=failure,
            outside_state=outside_state or ("" if self.start is not None else changed),
            attribute=self.audit.attribute or changed,
            weights=weights,
            auditee_weights=theirs.weights if self.auditee is not None else None,
            finite=finite,
            replay_finite=True if replayed is None else replayed.finite,
            own=own,
        )

    def settle(self, evidences: Sequence[AuditEvidence], step: int) -> list[AuditEvidence]:
        """Ask for further replays until every audit is settled or hopeless: a bounded loop, the same on all ranks.

        Args:
            evidences: of teams; see :mod:`unsilent.teams`.
        """
        teams, places = self.world.teams, self.world.team_places
        current = list(evidences)
        for _ in range(MAX_ROUNDS):
            wanted = [next_replays(e, places) for e in current]
            requests = teams.requests(request for requests in wanted for request in requests)
            if not requests:
                break
            self._forward(requests, step)
            mine = self._answers(requests)
            everyone = self.world.gather(mine, step=step, tag=_TAG_EXECUTIONS)
            made = [
                (teams.lead(parts[0][0]), teams.one_execution([execution for _, execution in parts]))
                for ranks in teams.members
                for parts in zip(*(everyone[rank] for rank in ranks), strict=True)
            ]
            current = [
                replace(e, executions=(*e.executions, *(x for auditee, x in made if auditee == e.auditee)))
                for e in current
            ]
        return current

    def stand_by(self, *, own_replays: int) -> None:
        """In place of :meth:`compare` on a rank that could not read its own step: take part in the others' reruns."""
        for _ in range(1 + own_replays if self.replayer.together else 0):
            self._rerun(self.world.rank)

    def rerun(self, auditee: int, *, spread: bool = False, reduced: bool = False, take: Sequence[Handover] = ()) -> Run:
        """Rerun work that this rank holds; raises what the user's code raises. For the options see :meth:`Replayer.run`."""
        return self.replayer.run(
            self.works[auditee], kernels=self.kernels, start=self.start, spread=spread, reduced=reduced, take=take
        )

    def _parcel(self, reading: Reading | None, *, finite: bool, weights: int) -> Parcel:
        if reading is None:
            return Parcel(failure="its own step could not be read there", weights=weights)
        try:
            return Parcel(
                work=pack(self.audit.to_send(self.works[self.world.rank])),
                names=reading.names,
                rows=reading.rows.cpu(),
                weights=weights,
                finite=finite,
            )
        except Exception as error:  # noqa: BLE001 - the peer must get an answer, and the judge a reason
            return Parcel(failure=str(error), weights=weights)

    def _unpack(self, auditee: int, data: bytes) -> str:
        """Take another rank's work; gives why it cannot be taken."""
        try:
            self.works[auditee] = unpack(data, self.world.device)
        except Exception as error:  # noqa: BLE001 - what a batch holds may not come out everywhere: evidence, no fault
            return f"its work cannot be read there: {type(error).__name__}: {error}"
        return ""

    def _swap(self, mine: Parcel, step: int) -> Parcel:
        """Send to the auditor, receive from the auditee; a rank that audits itself needs no messenger."""
        sends = [(self.auditor, mine)] if self.auditor is not None else []
        receives = [self.auditee] if self.auditee is not None and self.auditee != self.world.rank else []
        got = self.world.exchange(sends, receives, step=step, tag=_TAG_WORK)
        if receives:
            return got[receives[0]]
        return mine if self.auditee == self.world.rank else Parcel()

    def _forward(self, requests: Sequence[Replay], step: int) -> None:
        """Bring work to executors that do not hold it yet; who holds what is known on all ranks."""
        moves = sorted(
            {(r.auditee, r.executor) for r in requests if r.executor not in (r.auditee, self.auditors[r.auditee])}
        )
        sends = [(to, self._own_bytes()) for source, to in moves if source == self.world.rank]
        receives = [source for source, to in moves if to == self.world.rank]
        if not sends and not receives:
            return
        got = self.world.exchange(sends, receives, step=step, tag=_TAG_FORWARD)
        for source, data in got.items():
            if data:
                self._unpack(source, data)

    def _own_bytes(self) -> bytes:
        try:
            return pack(self.works[self.world.rank])
        except Exception:  # noqa: BLE001 - an empty parcel: the executor reports that it could not run it
            return b""

    def _answers(self, requests: Sequence[Replay]) -> list[tuple[int, Execution]]:
        """Whose work this rank was asked to rerun, and what came out.

        Where reruns are made together, a rank that has nothing more to do reruns its own work, as often as the others go on. If
        all ranks have their own in the last of these reruns, it is a whole step: its gradients are made ready for a repair. If
        arbiters have others' in a rerun, a device may err in every execution: what the arbiters compute is kept for a repair.
        """
        rank = self.world.rank
        asked: dict[int, list[int]] = {member: [] for member in range(self.world.size)}
        for request in requests:
            asked[request.executor] += [request.auditee] * request.times
        turns = max(map(len, asked.values())) if self.replayer.together else len(asked[rank])
        made: list[tuple[int, Execution]] = []
        for turn in range(turns):
            whose = {member: works[turn] if turn < len(works) else member for member, works in asked.items()}
            whole = turn == turns - 1 and all(member == auditee for member, auditee in whose.items())
            readies = whole and self.replayer.together and self._repairs
            take = self._lending(whose) if turns == 1 else ()
            run, failure = self._rerun(whose[rank], reduced=readies, take=take)
            if readies:
                self.ready = run
            if take:
                self.lent = tuple(Lent(handover=handover, run=run) for handover in take)
            if turn < len(asked[rank]):
                made.append((whose[rank], self._execution(run, failure)))
        return made

    def _lending(self, whose: Mapping[int, int]) -> tuple[Handover, ...]:
        """How this rank takes part in spreading the gradients of a rerun in which arbiters, or teams of them, have others' work.

        A device that errs spoils its own work and that of the rank that it audits, so that two audits are open at once.
        """
        teams, rank = self.world.teams, self.world.rank
        pairs = {(teams.lead(member), teams.lead(auditee)) for member, auditee in whose.items() if member != auditee}
        if not (self.replayer.together and self._repairs) or len(pairs) > _MOST_LENT:
            return ()
        return tuple(
            Handover(self.world, source=teams.counterpart(rank, source), auditee=teams.counterpart(rank, auditee))
            for source, auditee in sorted(pairs)
        )

    def _rerun(self, auditee: int, *, reduced: bool = False, take: Sequence[Handover] = ()) -> tuple[Run | None, str]:
        try:
            if auditee not in self.works:
                if self.replayer.together:
                    self.rerun(self.world.rank, reduced=reduced, take=take)
                return None, "the work did not arrive"
            run = self.rerun(auditee, reduced=reduced, take=take)
            self.audit.communicates |= run.communicated
            return run, ""
        except RankFailure:
            raise
        except Exception as error:  # noqa: BLE001 - user code or memory: a replay that cannot run is evidence
            return None, f"{type(error).__name__}: {error}"

    def _execution(self, run: Run | None, failure: str) -> Execution:
        digest = None if run is None else self.audit.digest_of(run.reading)
        return Execution(
            rank=self.world.rank, digest=digest, finite=True if run is None else run.finite, failure=failure
        )
