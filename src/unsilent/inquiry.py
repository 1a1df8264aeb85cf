"""From an alarm to verdicts: gathers the details, asks for replays, and hands evidence to the pure judges.

Every rank runs the same code on the same gathered data, so that all come to the same verdicts without being told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unsilent.agreement import Agreed
from unsilent.checks.audit import Audit, Strength
from unsilent.checks.finite import Finite
from unsilent.checks.protocol import Check, Moment
from unsilent.checks.update import Update
from unsilent.judge import (
    differs_by_environment,
    judge_audits,
    judge_counters,
    judge_finite,
    judge_unreduced,
    judge_votes,
    unlike_the_block,
)
from unsilent.localize import (
    agreed_value,
    attribute_may_explain,
    holders,
    nothing_repeats,
    outputs_by_rank,
    recorded_is_right,
    recorded_value,
    steady_value,
)
from unsilent.records import (
    STATE_SITES,
    AuditEvidence,
    CounterEvidence,
    FiniteEvidence,
    Kind,
    Place,
    Site,
    SpikeEvidence,
    Suspect,
    UnreducedEvidence,
    Verdict,
    VoteEvidence,
)
from unsilent.recovery.share import Share
from unsilent.ring import Ring
from unsilent.teams import Crossing, Teams, first_to_diverge
from unsilent.world import World

#: what crossed on a rank, in its live step and in its rerun of another rank's; None where it is not known
_Told = tuple[list[Crossing], list[Crossing]] | None

_TAG_DETAILS, _TAG_AUDITS, _TAG_VOTE, _TAG_TRAFFIC, _TAG_AGAIN, _TAG_CROSSINGS = 10, 11, 13, 19, 17, 26


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """Spikes of a step that turned out to be real, or (``how`` says why not) could not be looked into."""

    spikes: tuple[SpikeEvidence, ...]
    how: str
    real: bool = True


@dataclass
class Finding:
    """One verdict with what acting on it needs.

    ``shares`` are the local gradients to replace, ``votes`` the tensors that differ between replicas;
    ``recorded_is_right`` says that the live value was the agreed one, so that only a replay was wrong; ``harmless`` that
    the loss scaler leaves this step out anyway.
    """

    verdict: Verdict
    shares: tuple[Share, ...] = ()
    votes: tuple[VoteEvidence, ...] = ()
    recorded_is_right: bool = False
    harmless: bool = False
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])
    #: the step's gradient holds a NaN or Inf, which must not reach the optimizer whatever this verdict is about
    bad_number: bool = False


class Inquiry:
    """Finds out what an alarm means.

    Args:
        checks: by name; a check that was switched off is no longer in it.
        weights_digest: one number over this rank's weights.
        unreduced: the names of parameters whose gradient no reduction has touched.
        attempt: runs a part of the check named; what it raises is flagged to all ranks and gives None.
        update: the check whose spikes are looked into, None when it is off.
        calibrated: whether it is known how far the work repeats here.
        own_loop: whether the live work is run by code of the loop's own, which may be another than the reruns'.
    """

    def __init__(
        self,
        world: World,
        ring: Ring,
        checks: Mapping[str, Check],
        finite: Finite,
        audit: Audit,
        *,
        weights_digest: Callable[[], int],
        outside_state: Callable[[], str],
        unreduced: Callable[[], tuple[str, ...]],
        attempt: Callable[[str, Callable[[], Any]], Any],
        update: Update | None = None,
        calibrated: Callable[[], bool] = lambda: True,
        own_loop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._world, self._ring, self._checks, self._finite, self._audit = world, ring, checks, finite, audit
        self._weights_digest, self._outside_state, self._unreduced = weights_digest, outside_state, unreduced
        self._attempt = attempt
        self._update, self._calibrated, self._own_loop = update, calibrated, own_loop
        #: what the last look made of this step's spikes, where it found nothing else; None without any
        self.confirmed: Confirmed | None = None
        #: replicas in unlike environments have drifted apart; it has been said, and is not said again
        self.unlike_replicas = False

    def compare(self, *, own_replays: int = 0) -> None:
        """The ring replay of this step, for all ranks at once."""
        filled = self._attempt("finite", self._finite.fill)
        finite = filled is None or not any(filled[0].values())
        weights = self._attempt("replicas", self._weights_digest) or 0
        # A rank that could not read its own step takes part all the same: the others must not wait for it.
        reading = self._audit.recorded
        theirs = self._ring.swap(reading, finite=finite, weights=weights)
        if reading is None:
            self._ring.stand_by(own_replays=own_replays)
        else:
            outside = self._outside_state()
            self._attempt(
                "audit",
                lambda: self._ring.compare(
                    reading, theirs, finite=finite, weights=weights, outside_state=outside, own_replays=own_replays
                ),
            )

    def find(self, agreed: Agreed, moment: Moment, losses: list[torch.Tensor]) -> list[Finding]:
        """The findings of a step before its update; empty when it is clean."""
        bad_number = agreed.raised("finite", "local") or agreed.raised("finite", "reduced")
        return [replace(finding, bad_number=bad_number) for finding in self._find(agreed, moment, losses)]

    def _find(self, agreed: Agreed, moment: Moment, losses: list[torch.Tensor]) -> list[Finding]:
        self.confirmed = None
        alarming = [name for name, check in self._checks.items() if check.alarm(agreed)]
        unreduced = agreed.raised("guard", "unreduced")
        if not alarming and not unreduced:
            return []
        # A check whose closer look fails on some rank (None) is flagged and goes off with the next agreed vector.
        mine: dict[str, Any] = {
            name: self._attempt(name, lambda n=name: (self._checks[n].details(),)) for name in alarming
        }
        if unreduced:
            mine["unreduced"] = self._unreduced()
        everyone: list[dict[str, Any]] = self._world.gather(mine, step=moment.step, tag=_TAG_DETAILS)
        evidence: dict[str, Any] = {}
        for name in alarming:
            records = self._evidence(name, moment.step, [details[name] for details in everyone])
            if records is None:
                return [Finding(verdict=_looked_in_vain(self._checks[name], moment.step))]
            if name == "audit":
                records = self._world.teams.as_one(records)
            evidence[name] = records
        how = ""
        if "update" in evidence and "finite" not in evidence and "audit" not in evidence:
            audits, how = self._audit_spike(moment, losses)
            if audits is not None:
                evidence["audit"] = audits
        unlike = _of_unlike_weights(evidence.get("audit", ()))
        if unlike and (failed := self._vote(moment, evidence)) is not None:
            return [failed]
        # A difference in counters is software and explains every other difference, so nothing else is judged then.
        software = judge_counters([e for e in evidence.get("replicas", ()) if isinstance(e, CounterEvidence)])
        if software is not None:
            return [Finding(verdict=software, evidence=evidence)]
        if unreduced:
            return [Finding(verdict=_judge_unreduced(everyone, moment.step), evidence=evidence)]
        voted = self.find_votes(evidence.get("replicas", ()), evidence, nothing_done_yet=moment.first)
        if state := _of_state(voted):
            return state
        findings = self._find_finite(evidence.get("finite", ()), moment, losses, evidence)
        # The audit that a NaN asked for may be the first to see that a replica holds other weights.
        if not unlike and (unlike := _of_unlike_weights(evidence.get("audits", ()))):
            if (failed := self._vote(moment, evidence)) is not None:
                return [failed]
            if state := _of_state(self.find_votes(evidence.get("replicas", ()), evidence)):
                return state  # counters ride in every step's vector, and are judged above
        if not findings and "audit" in evidence and "audits" not in evidence:
            findings = self._settle(list(evidence["audit"]), moment, losses, evidence, alarms={})
        if not findings and not voted and unlike:
            return [Finding(verdict=_unlike_weights(unlike), evidence=evidence)]
        if "update" in evidence and not voted:
            if findings and how and self._repeats_nowhere(evidence):
                findings, how = [], "with the kernels of this step the work repeats on no device"
                del evidence["audits"]
            if not findings:
                return self._weigh_spikes(evidence, moment, how)
        return findings or voted

    def _evidence(self, name: str, step: int, details: Sequence[tuple[Any] | None]) -> Sequence[Any] | None:
        """What the details of all ranks amount to; None when the closer look failed somewhere."""
        known = [detail[0] for detail in details if detail is not None]
        if len(known) < len(details):
            return None
        return self._attempt(name, lambda: self._checks[name].evidence(step, known))

    def _vote(self, moment: Moment, evidence: dict[str, Any]) -> Finding | None:
        """A vote that was not planned, into ``evidence``: a pair of ranks that was to be compared holds unlike weights.
        None, also where a vote was held already or votes are off; a finding when the closer look failed somewhere."""
        if "replicas" in evidence or "replicas" not in self._checks:
            return None
        replicas = self._checks["replicas"]
        now = replace(moment, due=moment.due | {"replicas"})
        self._attempt("replicas", lambda: replicas.before_update(now))
        mine = self._attempt("replicas", lambda: (replicas.details(),))
        voted = self._evidence("replicas", moment.step, self._world.gather(mine, step=moment.step, tag=_TAG_VOTE))
        if voted is None:
            return Finding(verdict=_looked_in_vain(replicas, moment.step))
        evidence["replicas"] = voted
        return None

    def find_votes(
        self, records: Sequence[Any], evidence: dict[str, Any], *, nothing_done_yet: bool = False
    ) -> list[Finding]:
        """The findings of a vote over replicas."""
        votes = tuple(e for e in records if isinstance(e, VoteEvidence))
        if not votes:
            return []
        findings: list[Finding] = []
        for ranks in dict.fromkeys(vote.ranks for vote in votes):
            among = tuple(vote for vote in votes if vote.ranks == ranks)
            places = [self._world.places[rank] for rank in ranks] or self._world.places
            verdicts = judge_votes(
                among, places, unlike_is_known=self.unlike_replicas, nothing_done_yet=nothing_done_yet
            )
            self.unlike_replicas |= any(differs_by_environment(vote, places) for vote in among)
            findings += [Finding(verdict=v, votes=_votes_of(v, among), evidence=evidence) for v in verdicts]
        return findings

    def _find_finite(
        self, records: Sequence[FiniteEvidence], moment: Moment, losses: list[torch.Tensor], evidence: dict[str, Any]
    ) -> list[Finding] | None:
        """NaN or Inf: from hardware, from the reduction, or from code and data? None when ``finite`` saw nothing."""
        if not records:
            return None
        limits = self._finite.limits
        finding = judge_finite(
            records[0],
            streak_limit=limits.streak_limit,
            lone_limit=limits.lone_limit,
            places=self._world.places,
            replicated=self._finite.replicated,
        )
        if finding is None:
            return None
        if finding.verdict is not None:
            return [Finding(verdict=finding.verdict, evidence=evidence)]
        if not finding.audit:
            return []
        # An overflow that a scaler searches for is no alarm when the auditor reproduces it: only a mismatch is.
        alarm = "" if finding.quiet_if_reproduced else "NaN or Inf in the local gradient"
        findings = self._audit_now(moment, losses, evidence, alarms=dict.fromkeys(finding.audit, alarm))
        if findings or (findings is not None and finding.quiet_if_reproduced):
            # A streak that a scaler cannot end is another matter: the run gets nowhere.
            seen = len(records[0].reduced)
            left_out = records[0].scaler and seen >= (self._world.size if self._finite.replicated else 1)
            if left_out and records[0].streak < limits.streak_limit:
                return [replace(f, harmless=f.verdict.kind is Kind.SOFTWARE) for f in findings]
            return findings
        # No audit can say where it came from; it must not reach the optimizer all the same.
        verdict = Verdict(
            kind=Kind.INCONCLUSIVE, site=Site.GRADIENT, step=moment.step, check="finite", reason=finding.reason
        )
        return [Finding(verdict=verdict, evidence=evidence)]

    def _audit_now(
        self, moment: Moment, losses: list[torch.Tensor], evidence: dict[str, Any], *, alarms: Mapping[int, str]
    ) -> list[Finding] | None:
        """An audit of this step that was not planned, or the planned one with the knowledge that a value is bad.

        None when no audit is possible.
        """
        if "audit" not in self._checks or self._audit.strength is Strength.OFF or self._ring.stale or moment.apart:
            return None
        if "audit" not in moment.due:
            self.compare()
            if any(self._world.gather(self._audit.communicates, step=moment.step, tag=_TAG_TRAFFIC)):
                self._audit.communicates = True  # flagged to all with the next agreed vector, which switches it off
                return None
        return self._settle(self._gather_audits(moment), moment, losses, evidence, alarms=alarms)

    def _audit_spike(self, moment: Moment, losses: list[torch.Tensor]) -> tuple[list[AuditEvidence] | None, str]:
        """The audit of this step that a spike asks for, and what it compares; None and why, where none is possible."""
        if "audit" not in self._checks or self._audit.strength is not Strength.BITWISE:
            return None, "audits are off or compare the loss only"
        if not self._calibrated():
            return None, "it is not known yet whether the work repeats"
        if self._ring.stale:
            return None, "the state was put right in this step, and its recording is that of the one before"
        if moment.apart:
            return None, "in this step every rank has weights of its own"
        whole = "audit" in moment.due and not self._audit.rotating
        if self._audit.rotating:
            self._audit.all_micro_batches()
            self._attempt("audit", lambda: self._audit.record(losses))
        if not whole:
            self.compare()
            if any(self._world.gather(self._audit.communicates, step=moment.step, tag=_TAG_TRAFFIC)):
                self._audit.communicates = True  # flagged to all with the next agreed vector, which switches it off
                return None, "the model communicates, so no rank can rerun its work alone"
        return self._gather_audits(moment), "audited bit by bit"

    def _weigh_spikes(self, evidence: dict[str, Any], moment: Moment, how: str) -> list[Finding]:
        """Spikes that no audit has found fault with; where there was none, each rank reruns its own step and looks again.

        What does not repeat bit by bit may still spike again: then it is the batch or the state. Where it does not,
        nobody can tell who erred.
        """
        spikes: tuple[SpikeEvidence, ...] = tuple(evidence["update"])
        if "audits" in evidence or "finite" in evidence:
            audited = {a.auditee for a in evidence.get("audits", ()) if all(x.digest is not None for x in a.executions)}
            real = all(spike.rank in audited for spike in spikes)
            self.confirmed = Confirmed(spikes=spikes, how=how if real else "no audit of it could be made", real=real)
            return []
        if any(self._world.gather(self._audit.communicates, step=moment.step, tag=_TAG_TRAFFIC)):
            self.confirmed = Confirmed(spikes=spikes, how=how, real=False)
            return []
        mine = self._attempt("update", self._comes_again) if self._spikes_here(spikes) else True
        again: list[bool | None] = self._world.gather(mine, step=moment.step, tag=_TAG_AGAIN)
        gone = [spike for spike in spikes if again[spike.rank] is False]
        if not gone:
            known = all(again[spike.rank] for spike in spikes)
            told = f"{how}; its own rerun spikes again" if known else f"{how}, and its own rerun failed"
            self.confirmed = Confirmed(spikes=spikes, how=told, real=known)
            return []
        return [Finding(verdict=_does_not_come_again(gone, how), evidence=evidence)]

    def _repeats_nowhere(self, evidence: dict[str, Any]) -> bool:
        """Whether the kernels of this step, which calibration need not have tried, give other bits each time."""
        outputs = [outputs_by_rank(a, self._world.team_places) for a in evidence.get("audits", ())]
        differing = [o for o in outputs if len({value for made in o.values() for value in made}) > 1]
        return bool(differing) and all(nothing_repeats(o) for o in differing)

    def _spikes_here(self, spikes: Sequence[SpikeEvidence]) -> bool:
        return any(spike.rank == self._world.rank for spike in spikes)

    def _comes_again(self) -> bool:
        assert self._update is not None
        return self._update.comes_again(self._ring.rerun(self._world.rank).gradients)

    def _gather_audits(self, moment: Moment) -> list[AuditEvidence]:
        details = self._world.gather(self._audit.details(), step=moment.step, tag=_TAG_AUDITS)
        return self._world.teams.as_one(self._audit.evidence(moment.step, details))

    def _settle(
        self,
        audits: list[AuditEvidence],
        moment: Moment,
        losses: list[torch.Tensor],
        evidence: dict[str, Any],
        *,
        alarms: Mapping[int, str],
    ) -> list[Finding]:
        """More replays until each audit is settled or hopeless, then judge."""
        if self._audit.rotating:
            # One micro-batch told that something is wrong; a repair needs the whole sum, so the whole is compared.
            self._audit.all_micro_batches()
            self._attempt("audit", lambda: self._audit.record(losses))
            self.compare()
            audits = self._gather_audits(moment)
        of_leads = {self._world.teams.lead(rank): alarm for rank, alarm in alarms.items()}
        audits = [replace(a, alarm=of_leads.get(a.auditee, a.alarm)) for a in audits]
        audits = self._ring.settle(audits, moment.step)
        evidence["audits"] = audits
        teams, places = self._world.teams, self._world.team_places
        own_first = self._ring.replayer.together
        unlike = unlike_the_block(audits, places, proved=self._calibrated()) if self._own_loop() else ()
        to_judge = audits if not unlike else [a for a in audits if a not in unlike]
        of_teams = [
            share
            for a in to_judge
            if (share := _share(a, places, own_first=own_first or bool(a.attribute))) is not None
        ]
        shares = tuple(part for share in of_teams for part in _each(share, teams))
        verdicts = judge_audits(audits, places, unlike=unlike)
        told = self._told(moment.step) if verdicts else None
        return [
            Finding(
                verdict=self._within_team(v, audits, told),
                shares=shares,
                recorded_is_right=_recorded_is_right(v, audits, places),
                evidence=evidence,
            )
            for v in verdicts
        ]

    def _told(self, step: int) -> list[_Told] | None:
        """By rank, what crossed in its live step and in its rerun of another rank's; None where there are no teams."""
        crossings = self._ring.crossings
        if crossings is None:
            return None
        # Below bits the values of healthy ranks differ, and the first to differ is anybody.
        mine = self._attempt("audit", crossings.told) if self._audit.strength is Strength.BITWISE else None
        return self._world.gather(mine, step=step, tag=_TAG_CROSSINGS)

    def _within_team(self, verdict: Verdict, audits: Sequence[AuditEvidence], told: Sequence[_Told] | None) -> Verdict:
        """A verdict about a team, as one about the member that erred first, or about all of them where nobody can tell."""
        teams = self._world.teams
        if told is None or not verdict.suspects or verdict.kind is Kind.SOFTWARE:
            return verdict
        suspects: list[Suspect] = []
        reason = verdict.reason
        for suspect in verdict.suspects:
            assert suspect.rank is not None
            ranks, first = teams.of(suspect.rank), None
            about = [a for a in audits if suspect.rank in (a.auditee, a.auditor) and a.auditee != a.auditor]
            for audit in sorted(about, key=lambda a: a.auditee != suspect.rank):  # its own work before that of others
                first = first or _first_of_team(audit, teams, told)
            guilty = ranks if first is None else (ranks[first[0]],)
            # No node is named where the judge names none: all that ran lay on one.
            places = [self._world.places[rank] for rank in guilty]
            suspects += [
                Suspect(rank=p.rank, node=None if suspect.node is None else p.node, device=p.device) for p in places
            ]
            reason += f"; rank {ranks[0]} stands for ranks {', '.join(map(str, ranks))}, which compute together, and "
            reason += (
                "nobody can tell which of them erred"
                if first is None
                else f"rank {guilty[0]} was the first of them to differ, {first[1]}"
            )
        return replace(verdict, suspects=tuple(suspects), reason=reason)


def _share(audit: AuditEvidence, places: Sequence[Place], *, own_first: bool) -> Share | None:
    """Whose work must be replaced and by whom; None when the live value is right or nobody holds a right one.

    ``own_first``: by the rank itself where its last rerun was right, since that takes one pass less, or since nobody else has
    the attributes that its forward changes.
    """
    if audit.outside_state or attribute_may_explain(audit):
        return None
    value = agreed_value(audit, places) or steady_value(audit, places)
    if value is None or recorded_value(audit) == value:
        return None
    able = holders(audit, places, value)
    if not able:
        return None
    # Where nothing else decides, the last one asked: its gradients may be at hand.
    source = next((rank for rank in able if (rank == audit.auditee) is own_first), able[-1])
    return Share(auditee=audit.auditee, source=source, digest=value)


def _each(share: Share, teams: Teams) -> list[Share]:
    """What a share of a team is for each of its members."""
    return [
        Share(auditee=rank, source=teams.counterpart(rank, share.source), digest=digest)
        for rank, digest in teams.each(share.digest, share.auditee).items()
    ]


def _first_of_team(audit: AuditEvidence, teams: Teams, told: Sequence[_Told]) -> tuple[int, str] | None:
    """Which member of the two teams of an audit differed first, by its position, and where; None where nobody can tell."""
    live, again = [told[rank] for rank in teams.of(audit.auditee)], [told[rank] for rank in teams.of(audit.auditor)]
    if any(entry is None for entry in (*live, *again)):
        return None
    recorded, rerun = [entry[0] for entry in live if entry], [entry[1] for entry in again if entry]
    if (first := first_to_diverge(recorded, rerun)) is not None:
        return first[0], f"in what it gave into {first[1].name}"
    if any(
        a.digest != b.digest
        for one, other in zip(recorded, rerun, strict=True)
        for a, b in zip(one, other, strict=False)
    ):
        return None
    # What went wrong after the last of them has reached nobody else.
    digests = [(x.recorded, x.rank, teams.each(x.digest, x.rank)) for x in audit.executions if x.digest is not None]
    own = next((parts for was_live, _, parts in digests if was_live), None)
    theirs = next((parts for was_live, rank, parts in digests if not was_live and rank == audit.auditor), None)
    if own is None or theirs is None:
        return None
    pairs = zip(own.values(), theirs.values(), strict=True)
    differing = [position for position, (one, other) in enumerate(pairs) if one != other]
    return (differing[0], "in its own gradients only") if len(differing) == 1 else None


def _recorded_is_right(verdict: Verdict, audits: Sequence[AuditEvidence], places: Sequence[Place]) -> bool:
    """Whether all live work of the suspects was right, so that they erred only as auditors or arbiters."""
    ranks = {suspect.rank for suspect in verdict.suspects}
    own = [audit for audit in audits if audit.auditee in ranks]
    return bool(own) and all(recorded_is_right(audit, places) for audit in own)


def _votes_of(verdict: Verdict, votes: tuple[VoteEvidence, ...]) -> tuple[VoteEvidence, ...]:
    names = set(verdict.tensors)
    return tuple(vote for vote in votes if vote.tensor in names)


def _looked_in_vain(check: Check, step: int) -> Verdict:
    return Verdict(
        kind=Kind.INCONCLUSIVE,
        site=check.sites[0],
        step=step,
        check=check.name,
        reason=f"check {check.name} raised an alarm, and its closer look failed; nobody is blamed",
    )


def _of_unlike_weights(audits: Sequence[AuditEvidence]) -> list[AuditEvidence]:
    return [audit for audit in audits if not audit.weights_equal]


def _of_state(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict.site in STATE_SITES]


def _unlike_weights(audits: Sequence[AuditEvidence]) -> Verdict:
    pairs = ", ".join(f"{a.auditee} and {a.auditor}" for a in audits)
    return Verdict(
        kind=Kind.INCONCLUSIVE,
        site=Site.WEIGHTS,
        step=audits[0].step,
        check="audit",
        reason=f"ranks {pairs} hold unlike weights, and no vote over replicas could settle it; nobody is blamed",
    )


def _does_not_come_again(spikes: Sequence[SpikeEvidence], why: str) -> Verdict:
    ranks = ", ".join(str(spike.rank) for spike in spikes)
    return Verdict(
        kind=Kind.INCONCLUSIVE,
        site=Site.GRADIENT,
        step=spikes[0].step,
        check="update",
        reason=f"the step of rank {ranks} stood out ({spikes[0].tensor}: {spikes[0].reason}) and its own rerun does not; "
        f"bits cannot be compared: {why}; nobody is blamed",
        tensors=tuple(dict.fromkeys(spike.tensor for spike in spikes)),
    )


def _judge_unreduced(everyone: Sequence[Mapping[str, Any]], step: int) -> Verdict:
    names = dict.fromkeys(name for details in everyone for name in details["unreduced"])
    ranks = tuple(rank for rank, details in enumerate(everyone) if details["unreduced"])
    return judge_unreduced(UnreducedEvidence(step=step, tensors=tuple(names), ranks=ranks))
