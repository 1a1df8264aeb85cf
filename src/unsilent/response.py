"""From findings to what is done about them: choose the action, put it on record, do it, or end the run together.

Every rank runs the same code on the same agreed findings. What is chosen is decided in ``policy.py``; how the state is put
right, in ``recovery/``.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from unsilent import bundle
from unsilent.calibration import Calibration
from unsilent.checkpoint import Saved
from unsilent.checks.audit import Audit
from unsilent.checks.finite import Finite, extremes
from unsilent.checks.protocol import Moment
from unsilent.checks.replicas import Replicas
from unsilent.checks.update import Update
from unsilent.config import GuardConfig
from unsilent.errors import CheckpointError, CorruptionError, Inconclusive, IntegrityLost, Quarantine
from unsilent.events import write_exclude
from unsilent.inquiry import Finding, Inquiry
from unsilent.inventory import Inventory
from unsilent.journal import Journal
from unsilent.policy import Situation, decide, explained, person_needed
from unsilent.records import STATE_SITES, Action, Decision, Kind, Site, Verdict
from unsilent.recovery.heal import heal
from unsilent.recovery.rebuild import rebuild
from unsilent.recovery.rebuild_sharded import rebuild_sharded
from unsilent.recovery.rollback import PastStep, Rollback
from unsilent.recovery.share import Share
from unsilent.recurrence import COMES_BACK
from unsilent.reduction import Reduction
from unsilent.replay import Recorder
from unsilent.ring import Ring
from unsilent.sharded_reduction import ShardedReduction
from unsilent.sharded_replay import ShardedReplayer
from unsilent.standing import Standing
from unsilent.world import World

_TAG_ENDED, _TAG_EXCLUDED, _TAG_HEAL, _TAG_COMMUNICATES = 14, 18, 24, 25

#: so often a run goes back since two copies differ; after that it is no fault that passes
_MOST_EVEN_COPIES = 3

_SEVERITY = {
    action: i
    for i, action in enumerate(
        (Action.CONTINUE, Action.REPAIR, Action.RECOMPUTE, Action.HEAL, Action.ROLLBACK, Action.QUARANTINE, Action.STOP)
    )
}


def gravest(decided: list[tuple[Finding, Decision]]) -> tuple[Finding, Decision]:
    """The finding whose action is done, or would be: the others are put right by it as well."""
    return max(decided, key=lambda pair: _SEVERITY[pair[1].would or pair[1].action])


@dataclass(frozen=True, kw_only=True)
class WayBack:
    """Where a rollback goes: to the state at the start of step ``start``, that of the snapshot unless a checkpoint is
    given, and why the snapshot does not serve then; or what is missing, so that there is nowhere to go."""

    start: int = -1
    saved: Saved | None = None
    instead: str = ""
    missing: str = ""


class Response:
    """Responds for one guard.

    Args:
        scaler, scheduler, scales: the user's; whether the scaler is in use.
        nothing_kept: why nothing is kept to go back to, nor would be outside of observe mode; "" where it is.
        reruns_hold: whether a rerun gives what the live step has computed; in doubt where that was the loop's own code.
        attempt: runs a part of the check named; what it raises is flagged to all ranks.
        tally: what each check has done so far, for the log.

    Attributes:
        alarms: how many findings each check has led to.
        stopped: a verdict has ended the run.
        unsound: why the live state is that of no step, "" while it is one: a rollback has not come to its end.
    """

    def __init__(
        self,
        config: GuardConfig,
        world: World,
        journal: Journal,
        *,
        inventory: Inventory,
        reduction: Reduction | ShardedReduction,
        recorder: Recorder,
        ring: Ring,
        rollback: Rollback,
        finite: Finite,
        replicas: Replicas,
        audit: Audit,
        update: Update | None,
        calibration: Calibration,
        inquiry: Inquiry,
        standing: Standing,
        scaler: Any,
        scheduler: Any,
        scales: bool,
        nothing_kept: Callable[[], str],
        reruns_hold: Callable[[], bool],
        attempt: Callable[[str, Callable[[], Any]], Any],
        tally: Callable[[], dict[str, dict[str, int]]],
    ) -> None:
        self._config, self._world, self._journal = config, world, journal
        self._inventory, self._inner = inventory, inventory.model
        self._reduction, self._recorder, self._ring, self._rollback = reduction, recorder, ring, rollback
        self._finite, self._replicas, self._audit, self._update = finite, replicas, audit, update
        self._calibration, self._inquiry, self._standing = calibration, inquiry, standing
        self._scaler, self._scheduler, self._scales = scaler, scheduler, scales
        self._nothing_kept, self._reruns_hold, self._attempt, self._tally = nothing_kept, reruns_hold, attempt, tally
        self.alarms: Counter[str] = Counter()
        self.stopped = False
        self.unsound = ""
        #: the steps in which the run went back since its copies differed and nobody could be outvoted
        self._even_copies: list[int] = []

    # ---- deciding ----------------------------------------------------------------------------------------------------

    def decide(self, finding: Finding, moment: Moment, recomputes_left: int) -> Decision:
        """What is to be done about a finding of this step."""
        verdict = finding.verdict
        nodes = {s.node for s in verdict.suspects if s.node is not None}
        reducible = self._reduction.hooked or not self._reduction.reduces
        remade = reducible and self._reruns_hold()
        in_state = verdict.site in STATE_SITES
        contaminated = self._standing.vouched < moment.step - 1
        way_back_matters = in_state or (verdict.kind is Kind.PERSISTENT and contaminated)
        situation = Situation(
            mode=self._config.mode,
            quarantine=self._config.quarantine,
            on_inconclusive=self._config.on_inconclusive,
            strikes=self._standing.suspicion.strikes(verdict, before=moment.step),
            recomputes_left=recomputes_left if remade else 0,
            repair_possible=bool(finding.shares) and reducible,
            # Nobody can have used the wrong state before it read clean: at the last step, or before the first one.
            heal_allowed=in_state
            and remade
            and not self._reduction.sharded  # a wrong shard has been gathered by all ranks of its replica
            and (moment.first or self._standing.last_clean_vote >= moment.step - 1 or self._just_averaged(moment))
            and all(self._world.gather(self._can_heal(finding), step=moment.step, tag=_TAG_HEAL)),
            no_way_back=self._way_back(verdict, moment.step).missing if way_back_matters else "it is not needed",
            contaminated=contaminated,
            approved=bool(nodes & self._standing.approved()),
            recorded_is_right=finding.recorded_is_right,
            harmless=finding.harmless,
            even_copies=self._has_even_copies(verdict)
            and moment.step not in self._even_copies
            and len(self._even_copies) < _MOST_EVEN_COPIES,
        )
        decision = decide(verdict, situation)
        if decision.action is Action.STOP and reducible and not remade:
            why = "that reruns of loss_fn give what the block of guard.watch computes has not been shown: none may help here"
            decision = replace(decision, reason=f"{decision.reason}; {why}")
        # A loss scaler skips such an update by itself.
        must_not_pass = finding.bad_number and not finding.harmless and not self._scales
        if decision.action is Action.CONTINUE and must_not_pass and self._config.mode == "act":
            # P5: what is not finite never reaches the optimizer, whoever made it.
            if recomputes_left > 0 and remade:
                return Decision(action=Action.RECOMPUTE, would=Action.RECOMPUTE, reason=decision.reason)
            return Decision(action=Action.STOP, would=Action.STOP, reason="the gradient is not finite")
        return decision

    def _just_averaged(self, moment: Moment) -> bool:
        """Whether local SGD has made the weights anew since the last update."""
        return self._config.averaged_every is not None and not moment.apart

    def _has_even_copies(self, verdict: Verdict) -> bool:
        """Whether a vote ended without a majority, among ranks of like environment."""
        undecided = verdict.kind is Kind.INCONCLUSIVE and verdict.check == "replicas"
        return undecided and not self._inquiry.unlike_replicas

    def record(self, decided: list[tuple[Finding, Decision]], moment: Moment) -> None:
        """Events, evidence and strikes of what was found; before anybody acts."""
        for finding, decision in decided:
            verdict = finding.verdict
            self.alarms[verdict.check] += 1
            would = decision.would or decision.action
            self._journal.write("verdict", moment.step, verdict=verdict, action=decision.action, would=would.value)
            self._journal.say(f"step {moment.step}: {verdict.kind.value}: {verdict.reason} -> {would.value}")
            self._keep_evidence(finding, moment)
            if verdict.check == "replicas" and verdict.kind is Kind.INCONCLUSIVE and self._inquiry.unlike_replicas:
                self._journal.write("check_degraded", moment.step, check="replicas", reason=verdict.reason)
            if would is not decision.action:
                self._standing.unrepaired(verdict, moment.step)
            self._standing.strike(verdict, moment.step, acted_on=would is decision.action)
            if verdict.kind is not Kind.PERSISTENT:
                continue
            nodes = {s.node for s in verdict.suspects if s.node is not None}
            comes_back = self._standing.suspicion.strikes(verdict, before=moment.step) >= COMES_BACK
            if comes_back and would is not Action.QUARANTINE and nodes - self._standing.pending:
                self._standing.pending |= nodes
                self._journal.write("ask", moment.step, verdict=verdict, action=Action.QUARANTINE)
                self._journal.say(
                    f"take {', '.join(sorted(nodes))} out? unsilent approve RUN {' '.join(sorted(nodes))}"
                )

    # ---- acting ------------------------------------------------------------------------------------------------------

    def act(
        self, finding: Finding, decision: Decision, every: list[Finding], moment: Moment, losses: list[torch.Tensor]
    ) -> bool:
        """Do it. True when the step was rebuilt and must be looked at again; raises when the run must not go on."""
        action, verdict = decision.action, finding.verdict
        if action is Action.CONTINUE:
            undecided = verdict.kind is Kind.INCONCLUSIVE and verdict.check == "audit"
            if undecided and verdict.site is not Site.WEIGHTS and "audit" in moment.due:
                self._calibration.degrade(verdict, moment.step)
            return False
        if action is Action.QUARANTINE:
            self._quarantine(verdict, moment.step)
        if action is Action.STOP:
            if verdict.kind is Kind.INCONCLUSIVE:
                self.stop_undecided(verdict, moment.step)
            poisoned = verdict.kind is Kind.SOFTWARE and finding.bad_number
            held = self._standing.not_finite_after_load(moment.step) if poisoned else ""
            self.stop(verdict, moment.step, f"{decision.reason}; {held}" if held else decision.reason)
        if action is Action.ROLLBACK:
            work = self._recorder.work(moment.step)
            self._roll_back(verdict, moment.step, self._rollback.describe(work, self._ring.kernels), losses)
            return True
        if action is Action.HEAL:
            votes = tuple(vote for f in every for vote in f.votes)
            healed = heal(self._world, self._inventory, votes)
            self._ring.stale = True
            shares = tuple(Share(auditee=rank, source=rank, digest=None) for rank in healed)
        else:
            shares = tuple({s.auditee: s for f in every for s in f.shares}.values())
            if verdict.check == "audit" and not shares:
                if verdict.kind is not Kind.INCONCLUSIVE or not finding.bad_number:
                    return True  # nobody holds the right value: the same gradient must not pass as a new one
                self._reduction.forget()  # work that repeats nowhere: all compute anew, and `finite` looks again
        local: list[torch.Tensor] = []
        changed = self._rebuild(shares, every, losses, observe=lambda b: local.extend(extremes([b])))
        if changed is None:
            return True
        if why := person_needed([f.verdict for f in every], changed):
            self._journal.write("needs_human", moment.step, verdict=verdict, reason=why)
            self._journal.say(f"step {moment.step} needs a person: {why}")
        self._finite.recheck(local)
        self._settle()
        if action is Action.HEAL or "replicas" in moment.due:
            # Only a vote's winner writes into the state; other actions leave what was read of it as it is.
            self._replicas.read(gradients=self._reduction.reduces, state=action is Action.HEAL)
        return True

    def _rebuild(
        self,
        shares: tuple[Share, ...],
        every: list[Finding],
        losses: list[torch.Tensor],
        *,
        observe: Callable[[torch.Tensor], None],
    ) -> float | None:
        """The step's gradients anew, with these shares; by how much they have changed where that matters, None where it
        failed somewhere."""
        if isinstance(self._reduction, Reduction):
            only = None if shares else self._wrong_buckets(every)
            return rebuild(self._world, self._reduction, self._ring, shares, losses, observe=observe, only=only)
        replayer, reading = self._ring.replayer, self._audit.recorded
        assert isinstance(replayer, ShardedReplayer)
        recorded = self._audit.digest_of(reading) if shares and reading is not None else None
        return rebuild_sharded(
            self._world, replayer, self._ring, shares, losses,
            recorded=recorded, measured=not explained([f.verdict for f in every]), observe=observe,
        )  # fmt: skip

    def _way_back(self, verdict: Verdict, step: int) -> WayBack:
        """The newest state that is trusted and that the fault cannot have touched, if the kept batches reach from there
        up to now; all ranks call it. In observe mode nothing is kept, and only the steps are reckoned with.
        """
        if missing := self._nothing_kept():
            return WayBack(missing=missing)
        if any(self._world.gather(self._audit.communicates, step=step, tag=_TAG_COMMUNICATES)):
            return WayBack(missing="the model communicates, so no rank can rerun its work alone")
        if not self._reduction.hooked and self._reduction.reduces:
            return WayBack(missing=self._reduction.notice)
        oldest, newest = step - self._config.keep_batches, step
        if verdict.site not in STATE_SITES:
            # What a bad device did must be done by others, and it is known by then which device that is.
            named = self._standing.suspicion.struck | {s.rank for s in verdict.suspects if s.rank is not None}
            bad = {member for rank in named for member in self._world.teams.of(rank)}
            others = [self._ring.auditors[rank] for rank in bad]
            if any(auditor is None or auditor in bad for auditor in others):
                return WayBack(missing="no healthy device could do again what the bad one did")
            newest = self._standing.vouched + 1
        observes = self._config.mode == "observe"
        missing = f"no snapshot was taken between the steps {max(oldest, 0)} and {newest}"
        taken = self._rollback.taken_at
        if taken is not None and oldest <= taken <= newest:
            missing = "" if observes else self._rollback.problem(
                step, start=taken, substitutes=self._substitutes(), snapshot=True
            )  # fmt: skip
            if not missing:
                return WayBack(start=taken)
        saved = self._standing.newest_certified(at_most=newest)
        if saved is None or saved.steps < oldest:
            return WayBack(missing=f"{missing}, and no certified checkpoint is in reach")
        if not observes:
            problem = self._rollback.problem(step, start=saved.steps, substitutes=self._substitutes(), snapshot=False)
            if problem:
                return WayBack(missing=f"{missing}; from the checkpoint of step {saved.steps}: {problem}")
        return WayBack(start=saved.steps, saved=saved, instead=missing)

    def _substitutes(self) -> dict[int, int]:
        """Who runs again the work of devices that are known to be bad, and of those who compute together with one."""
        by_others = {rank: auditor for rank in sorted(self._standing.suspicion.struck)
                     if (auditor := self._ring.auditors[rank]) is not None}  # fmt: skip
        return self._world.teams.substitutes(by_others)

    def act_at_rest(self, finding: Finding, decision: Decision, every: list[Finding], step: int) -> None:
        """The same between two steps, where no work is under way: the state is put right, or the run ends."""
        verdict = finding.verdict
        if decision.action is Action.STOP and verdict.kind is Kind.INCONCLUSIVE:
            self.stop_undecided(verdict, step)
        if decision.action is Action.ROLLBACK:
            self._roll_back(verdict, step, None, [])
        elif decision.action is Action.HEAL:
            heal(self._world, self._inventory, tuple(vote for f in every for vote in f.votes))
            self._replicas.read(gradients=False)
        else:
            self.stop(verdict, step, decision.reason)

    def _roll_back(self, verdict: Verdict, step: int, current: PastStep | None, losses: list[torch.Tensor]) -> None:
        """Back to the newest state that is still trusted, in memory or on disk, and forward again; else the run stops."""
        if verdict.kind is Kind.INCONCLUSIVE:
            self._even_copies.append(step)
            if len(self._even_copies) == _MOST_EVEN_COPIES:
                why = f"copies of the state have differed {_MOST_EVEN_COPIES} times without a majority: do updates repeat here?"
                self._journal.write("needs_human", step, verdict=verdict, reason=why)
                self._journal.say(f"step {step} needs a person: {why}")
        way = self._way_back(verdict, step)
        if way.missing:
            self.stop(verdict, step, f"there is no way back: {way.missing}")
        self._ring.forget()
        self.unsound = f"the rollback at step {step} has not come to its end, and the state is that of no step"
        if way.saved is None:
            self._rollback.restore()
        else:
            self._journal.say(f"step {step}: {way.instead}; going back to {way.saved.path}")
            self._load(verdict, step, way.saved)
        substitutes = self._substitutes()
        local: list[torch.Tensor] = []
        problem = self._rollback.come_forward(
            start=way.start,
            current=current,
            losses=losses,
            substitutes=substitutes,
            observe=lambda b: local.extend(extremes([b])),
        )
        if problem:
            self.stop(verdict, step, f"ROLLBACK to step {way.start} failed: {problem}")
        self.unsound = ""
        self._ring.stale = True
        self._standing.rolled_back(way.start, step, by_others=substitutes)
        if current is not None:
            self._finite.recheck(local)
        self._settle()
        self._attempt(
            "replicas", lambda: self._replicas.read(gradients=current is not None and self._reduction.reduces)
        )

    def _load(self, verdict: Verdict, step: int, saved: Saved) -> None:
        """The state of a certified checkpoint."""
        store = self._standing.newest_store()
        assert store is not None
        try:
            store.load(self._inventory, scaler=self._scaler, scheduler=self._scheduler, path=saved.path)
        except (CheckpointError, OSError) as error:  # on all ranks together
            self.stop(verdict, step, f"{saved.path} cannot be gone back to: {error}")

    def _settle(self) -> None:
        """The step has been put right: what objected to it before does so no longer."""
        self._audit.settled()
        if self._update is not None:
            self._update.settled()

    def _wrong_buckets(self, every: list[Finding]) -> frozenset[int] | None:
        """The buckets whose reduced values differ between ranks, where a vote has named them; None for all."""
        votes = [vote for f in every for vote in f.votes if f.verdict.site is Site.REDUCTION]
        differing = {vote.tensor.removeprefix("gradient.") for vote in votes if len(set(vote.digests)) > 1}
        if not differing:
            return None
        wrong = {id(p) for name, p in self._inner.named_parameters() if name in differing}
        return frozenset(b.index for b in self._reduction.buckets if any(id(p) in wrong for p in b.parameters))

    def _can_heal(self, finding: Finding) -> bool:
        """Whether the healed rank can rerun its work: alone, and from a capture that does not hold the wrong value."""
        captured = {f"model.{name}" for name in self._recorder.written_now()}
        return not self._audit.communicates and not any(
            vote.tensor in captured for vote in finding.votes if len(set(vote.digests)) > 1
        )

    # ---- ending the run ----------------------------------------------------------------------------------------------

    def _quarantine(self, verdict: Verdict, step: int) -> None:
        nodes = sorted({s.node for s in verdict.suspects if s.node is not None})
        resume = self._standing.resume_from()
        directory, written = self._config.directory, True
        if directory is not None and self._world.rank == 0:
            written = write_exclude(directory, nodes, verdict.reason)
        written = self._world.gather(written, step=step, tag=_TAG_EXCLUDED)[0]
        self._journal.write("quarantine", step, verdict=verdict, action=Action.QUARANTINE, resume_from=resume)
        where = f"; resume from {resume}" if resume else "; no certified checkpoint to resume from"
        if not written:
            where += f"; {directory}/exclude.json could not be written: leave them out by hand"
        raise self._ended(
            Quarantine(f"restart without {', '.join(nodes)}: {verdict.reason}{where}", verdict=verdict,
                       resume_from=resume), step,
        )  # fmt: skip

    def stop(self, verdict: Verdict, step: int, reason: str) -> NoReturn:
        """End the run on all ranks: the state can no longer be trusted, or cannot be put right."""
        resume = self._standing.resume_from()
        where = f"; resume from {resume}" if resume else "; no certified checkpoint to resume from"
        raise self._ended(
            IntegrityLost(f"{verdict.reason}; {reason}{where}", verdict=verdict, resume_from=resume), step
        )

    def stop_undecided(self, verdict: Verdict, step: int) -> NoReturn:
        """End the run on all ranks: nobody can tell the right value, and the configuration says to stop then."""
        raise self._ended(Inconclusive(verdict.reason, verdict=verdict, resume_from=self._standing.resume_from()), step)

    def _ended(self, error: CorruptionError, step: int) -> CorruptionError:
        """Put the outcome on disk before any rank leaves."""
        self.stopped = True
        self._journal.ended(error, step, tally=self._tally())
        self._world.gather(None, step=step, tag=_TAG_ENDED)
        return error

    # ---- evidence ----------------------------------------------------------------------------------------------------

    def _keep_evidence(self, finding: Finding, moment: Moment) -> None:
        batch = None
        if self._config.evidence == "full" and self._world.rank in self._ring.works:
            batch = [m.batch for m in self._ring.works[self._world.rank].micro_batches]
        wanted = set(finding.verdict.tensors)
        tensors = {e.name: e.tensor for e in (*self._inventory.entries(), *self._inventory.gradients())
                   if e.name in wanted}  # fmt: skip
        record = {"verdict": finding.verdict, **finding.evidence}
        parts: dict[str, Any] = {}
        if self._config.evidence == "full" and self._journal.keeps(finding.verdict):
            with contextlib.suppress(Exception):  # whatever an odd batch does, training goes on
                record[bundle.FACTS], parts = self._rerunnable(finding)
        batch = None if parts else batch
        self._journal.keep(moment.step, finding.verdict, record, tensors=tensors, batch=batch, parts=parts)

    def _rerunnable(self, finding: Finding) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``unsilent replay`` needs to rerun the work that an audit was about."""
        return bundle.rerunnable(
            finding.evidence.get("audits", ()), self._ring, self._audit, self._inner, rank=self._world.rank,
            places=self._world.places, scale=self._reduction.scale, environment=self._world.environment,
            loss_scale=self._scaler.get_scale() if self._scaler is not None and self._scales else None,
        )  # fmt: skip
