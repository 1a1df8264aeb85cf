"""The conductor: the order of a guarded step, and the only place that holds state over steps.

    step → Reading (device) → Evidence (host) → Verdict → Action → Event

A replay gives more evidence and never calls back; the loop judge → replay → judge is a bounded ``for`` here and in
``ring.py``. Ranks decide together: each sees the same agreed vector, gathers the same details, and calls the same pure
functions with them, so that all come to the same action without being told.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsilent.agreement import Agreed, Agreement, Declaration
from unsilent.checkpoint import Certificate, CheckpointStore, CheckRun, Status, Trust
from unsilent.checkpoint import attach as attach_certificate
from unsilent.checkpoint import certify as certify_state
from unsilent.checkpoint import may_publish as may_publish_certificate
from unsilent.checks.audit import Audit, Strength
from unsilent.checks.finite import Finite
from unsilent.checks.protocol import Check, Coverage, Moment
from unsilent.checks.replicas import Replicas
from unsilent.config import GuardConfig
from unsilent.determinism import Kernels, missing_settings, running_with
from unsilent.errors import (
    CheckpointError,
    CorruptionError,
    Inconclusive,
    IntegrityLost,
    Quarantine,
    RankFailure,
    UsageError,
)
from unsilent.events import approved_nodes, write_exclude
from unsilent.generators import read_generators, write_generators
from unsilent.inventory import Inventory
from unsilent.journal import Journal
from unsilent.judge import judge_audits, judge_counters, judge_finite, judge_unreduced, judge_votes
from unsilent.localize import agreed_value, audit_ring, holders, recorded_is_right
from unsilent.policy import Policy, trust_lost
from unsilent.records import (
    Action,
    AuditEvidence,
    CounterEvidence,
    Decision,
    FiniteEvidence,
    Kind,
    Site,
    UnreducedEvidence,
    Verdict,
    VoteEvidence,
)
from unsilent.recovery.heal import heal
from unsilent.recovery.rebuild import Share, rebuild
from unsilent.reduction import Bucket, Reduction, check_supported
from unsilent.replay import Recorder, Replayer, pack
from unsilent.ring import Ring
from unsilent.schedule import Schedule
from unsilent.world import World

_PHASE_UPDATE, _PHASE_SAVE, _PHASE_END = 1, 2, 3
_TAG_DETAILS, _TAG_EVIDENCE, _TAG_LOAD = 10, 11, 12

#: What calibration tries, best first; each needs the work to repeat, and the last compares nothing.
_LADDER = (
    (Kernels.DETERMINISTIC, Strength.BITWISE),
    (Kernels.MATH_ATTENTION, Strength.BITWISE),
    (Kernels.DETERMINISTIC, Strength.LOSS_ONLY),
    (Kernels.DEFAULT, Strength.OFF),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one guarded step gave.

    Attributes:
        loss: mean over the micro-batches of this rank, detached, local.
        action: what was done; ``CONTINUE`` in a clean step and in observe mode.
        verdict: what was found, None when nothing was.
        step: the number of updates completed before this step.
    """

    loss: torch.Tensor
    step: int
    action: Action = Action.CONTINUE
    verdict: Verdict | None = None


@dataclass
class _Finding:
    """One verdict with what acting on it needs."""

    verdict: Verdict
    shares: tuple[Share, ...] = ()
    votes: tuple[VoteEvidence, ...] = ()
    recorded_is_right: bool = False
    harmless: bool = False
    record: dict[str, Any] = field(default_factory=dict[str, Any])


class Guard:
    """Guards a training step; every rank makes one, with the same arguments.

    Args:
        model: a plain module or a ``DistributedDataParallel``.
        optimizer: over the model's parameters.
        loss_fn: ``loss_fn(model, batch) -> loss``, a scalar; autocast belongs inside it. Replays call it with the
            module under the DDP wrapper.
        scaler, scheduler: stepped after the optimizer, as usual.
        clip_norm: clip the gradient's norm to this before the update.

    Raises:
        UsageError: what is asked for cannot be guarded; the message says what to change.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        clip_norm: float | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        check_supported(model)
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.scaler, self.scheduler, self.clip_norm = scaler, scheduler, clip_norm
        self.config = config or GuardConfig()
        self.steps = 0  # updates completed

        self._observers: list[Any] = []
        inner = getattr(model, "module", model) if hasattr(model, "reducer") else model
        parameters = [p for p in inner.parameters() if p.requires_grad]
        if not parameters:
            raise UsageError("the model has no parameter that requires a gradient: there is nothing to guard")
        self.world = World(
            parameters[0].device,
            group=getattr(model, "process_group", None),
            node=self.config.node,
            timeout_s=self.config.timeout_s,
        )
        self.reduction = Reduction(model, self._observers, self.world.watcher)
        self.inner = self.reduction.inner
        self._check_names()
        self.inventory = Inventory(
            self.inner, optimizer, replicated_buffers=frozenset(self.config.replicated_buffers)
        )
        self.recorder = Recorder(self.inner)
        self.replayer = Replayer(self.inner, loss_fn, scale_loss=self._scale_loss, scale=self.reduction.scale)
        self._auditors = audit_ring(self.world.places)
        if self.config.require_localization:
            self._require_localization()

        reduces = self.reduction.ddp is not None
        self.finite = Finite(self.inventory, self.config.finite, reduces=reduces, scaler=scaler is not None)
        self.replicas = Replicas(
            self.inventory, self._counters, period=self.config.replicas_every or 0, reduces=reduces
        )
        self.audit = Audit(
            self.inner,
            self.recorder,
            self.config.audit,
            rank=self.world.rank,
            auditors=self._auditors,
            places=self.world.places,
            period=self.config.audit_every or 0,
            reduces=reduces,
        )
        self.ring = Ring(self.world, self.replayer, self.audit, self._auditors)
        self.checks: dict[str, Check] = {c.name: c for c in (self.finite, self.replicas, self.audit)}
        self._observers += [_Guarded(self, check) for check in self.checks.values()]
        declarations = {name: check.declares() for name, check in self.checks.items()}
        errors = tuple(f"error.{name}" for name in self.checks)
        declarations["guard"] = Declaration(flags=("unreduced", "approved", "unpackable", *errors))
        self._agreement = Agreement(declarations)
        periods = {"audit": self.config.audit_every, "replicas": self.config.replicas_every}
        self._schedule = Schedule({name: period for name, period in periods.items() if period is not None})
        self._policy = Policy(
            mode=self.config.mode,
            quarantine=self.config.quarantine,
            on_inconclusive=self.config.on_inconclusive,
        )

        self._rung = 0  # of _LADDER
        self._calibrate_in = 1  # steps until the next calibration: after the first update, when its memory exists
        self._first = True
        self._last_run = dict.fromkeys(self._schedule.periods, 0)
        self._last_clean_vote = -1
        self._last_clean_audit = -1
        self._audit_was_clean = False
        self._strikes: dict[int, int] = {}
        self._pending: set[str] = set()  # nodes that wait for a person's approval
        self._certifies_nothing = ""
        self._candidates: set[int] = set()
        self._stores: dict[Path, CheckpointStore] = {}
        self._check_errors: dict[str, str] = {}
        self._counts: dict[str, int] = dict.fromkeys(self.checks, 0)

        run_id = self.world.gather(os.urandom(4).hex(), step=0, tag=2)[0]
        self.journal = Journal(
            self.config.directory,
            rank=self.world.rank,
            run_id=run_id,
            evidence=self.config.evidence,
            device=self.world.place.device if self.world.device.type == "cuda" else None,
        )
        self.journal.started()
        self.world.watcher.set_record(self.journal.rank_failed)
        self._sigterm = _HeldSignal(self.world) if self.world.size > 1 else None
        self._at_exit = _close_at_exit(self)
        self._announce()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(
        self, batch: Any = None, *, micro_batches: Sequence[Any] | None = None, saving: bool = False, last: bool = False
    ) -> Outcome:
        """Run one guarded step: forward, backward, reduction, checks, and the update if nothing speaks against it.

        Args:
            batch: this rank's batch, handed to ``loss_fn``; any pytree.
            micro_batches: instead of ``batch``, several whose gradients are accumulated, each loss divided by their
                number.
            saving: the state after this step will be saved, so that all checks run.
            last: this is the last step, so that all checks run.

        Raises:
            Quarantine, IntegrityLost: on all ranks together; nothing was updated.
            RankFailure: another rank failed.
            UsageError: no batch, or one that cannot be sent to the rank that audits it.
        """
        parts = list(micro_batches) if micro_batches is not None else [batch]
        if not parts or (micro_batches is None and batch is None):
            raise UsageError("step() needs a batch, or a non-empty list of micro_batches")
        with self._together():
            moment, kernels = self._begin(saving=saving, last=last)
            losses = self._forward_backward(parts, moment, kernels)
            action, verdict = self._check(moment, losses, kernels)
            self._update(moment, skipped=False)
            loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
            return Outcome(loss=loss, step=moment.step, action=action, verdict=verdict)

    def _begin(self, *, saving: bool, last: bool) -> tuple[Moment, Kernels]:
        """Whose turn it is in this step, and with which kernels it runs."""
        step = self.steps
        self.journal.step = step
        config = self.config
        announced = config.save_every is not None and (step + 1) % config.save_every == 0
        ends = config.total_steps is not None and step + 1 == config.total_steps
        due = set(self._schedule.due(step, forced=saving or last or announced or ends))
        if self._first and config.replicas_every is not None:
            due.add("replicas")
        if self._calibrate_in == 0 and config.audit_every is not None or any(self._strikes.values()):
            due.add("audit")
        due &= set(self.checks)
        if self.audit.strength is Strength.OFF:
            due.discard("audit")
        moment = Moment(step=step, due=frozenset(due), first=self._first)
        self._must_not_be_overdue(moment)
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.begin(moment))
        return moment, _LADDER[self._rung][0] if "audit" in due else Kernels.DEFAULT

    def _forward_backward(self, parts: list[Any], moment: Moment, kernels: Kernels) -> list[torch.Tensor]:
        """The user's own work, with a capture of what each micro-batch began from."""
        self.optimizer.zero_grad(set_to_none=True)
        audited = "audit" in moment.due
        self.recorder.begin_step(watch_attributes=audited)
        self.audit.rotate(moment.step, len(parts))
        losses: list[torch.Tensor] = []
        keep = audited and self.config.mode == "act"
        with self.reduction.step(keep=keep), running_with(kernels):
            for i, part in enumerate(parts):
                last = i == len(parts) - 1
                self.recorder.begin_micro_batch(part)
                self.audit.listen(i)
                with contextlib.nullcontext() if last else self._no_sync():
                    loss = self.loss_fn(self.model, part)
                    losses.append(loss.detach().clone())
                    loss = loss / len(parts) if len(parts) > 1 else loss
                    self._scale_loss(loss).backward()
        self.audit.listen(None)
        self.recorder.end_step()
        return losses

    def _check(self, moment: Moment, losses: list[torch.Tensor], kernels: Kernels) -> tuple[Action, Verdict | None]:
        """Checks, agreement, and on an alarm: find out, decide, act; until the step is clean or must not go on."""
        self._try("audit", lambda: self._own_reading(losses))
        start = self.recorder.attributes
        self.ring.begin(self.recorder.work(moment.step), kernels=kernels, start=start)
        if "audit" in moment.due and "audit" in self.checks:
            self._ring_compare(calibrate=self._calibrate_in == 0)
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.before_update(moment))
        first_verdict: Verdict | None = None
        first_action = Action.CONTINUE
        for attempt in range(self.config.recomputes + 1):
            agreed = self._agree(moment.step, _PHASE_UPDATE)
            findings = self._investigate(agreed, moment, losses)
            if not findings:
                self._note_clean(moment, agreed, repaired=first_verdict is not None)
                break
            decided = [(f, self._decide(f, moment, self.config.recomputes - attempt)) for f in findings]
            finding, decision = max(decided, key=lambda pair: _SEVERITY[pair[1].would or pair[1].action])
            self._record(decided, moment)
            if first_verdict is None:
                first_verdict, first_action = finding.verdict, decision.action
            begin = time.perf_counter()
            if not self._act(finding, decision, [f for f, _ in decided], moment, losses):
                self._note_unclean(moment, agreed, findings)
                break
            seconds = time.perf_counter() - begin
            self.journal.write(
                "action", moment.step, verdict=finding.verdict, action=decision.action, seconds=seconds,
                reason=decision.reason,
            )  # fmt: skip
        else:
            assert first_verdict is not None
            self._stop(first_verdict, f"{self.config.recomputes} recomputations in a row did not give a clean step")
        if "audit" in moment.due and self._calibrate_in == 0:
            self._calibrate_in = -1
            self._announce_calibration(moment.step)
        return first_action, first_verdict

    def _update(self, moment: Moment, *, skipped: bool) -> None:
        """Unscale, clip, step, scaler, scheduler; findings made after it ride in the next step's vector."""
        self.reduction.forget()
        if self.scaler is not None:
            if self.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.inner.parameters(), self.clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.inner.parameters(), self.clip_norm)
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.after_update(moment, skipped=skipped))
        self.steps += 1
        self._first = False
        if self._calibrate_in > 0:
            self._calibrate_in -= 1
        self._audit_was_clean = self._last_clean_audit == moment.step

    # ---- finding out -------------------------------------------------------------------------------------------------

    def _ring_compare(self, *, calibrate: bool = False) -> None:
        """The ring replay of this step, for all ranks at once."""
        reading = self.audit.recorded
        if reading is None:  # its own fault is flagged already; the others must not wait for this rank
            raise RankFailure(self.world.rank, "the audit could not read this rank's own step")
        self.ring.compare(
            reading,
            finite=not any(self.finite.fill()[0].values()),
            weights=self.replicas.weights_digest(),
            outside_state=self.recorder.outside_state,
            own_replays=2 if calibrate else 0,
        )

    def _agree(self, step: int, phase: int) -> Agreed:
        """The one blocking agreement of a clean step."""
        flags: dict[tuple[str, str], bool] = {}
        digests: dict[tuple[str, str], int] = {}
        for name, check in self.checks.items():
            filled = self._try(name, check.fill)
            if filled is not None:
                flags |= {(name, flag): up for flag, up in filled[0].items()}
                digests |= {(name, digest): value for digest, value in filled[1].items()}
        if phase == _PHASE_UPDATE:
            flags["guard", "unreduced"] = bool(self.reduction.unreduced())
        if self.reduction.error is not None:
            self._check_errors.setdefault("audit", str(self.reduction.error))
        for name in self._check_errors:
            flags["guard", f"error.{name}"] = True
        if self._pending and self.world.rank == 0 and self.config.directory is not None:
            flags["guard", "approved"] = bool(self._pending & approved_nodes(self.config.directory))
        vector = self._agreement.pack(step=step, phase=phase, flags=flags, digests=digests)
        agreed = self._agreement.unpack(self.world.reduce_max(vector))
        failed = [name for name in self.checks if agreed.raised("guard", f"error.{name}")]
        if failed:
            self._switch_off(failed, step)
        return agreed

    def _investigate(self, agreed: Agreed, moment: Moment, losses: list[torch.Tensor]) -> list[_Finding]:
        """From what all ranks agreed on to verdicts; the same on all ranks. Empty when the step is clean."""
        alarming = [name for name, check in self.checks.items() if check.alarm(agreed)]
        unreduced = agreed.raised("guard", "unreduced")
        if not alarming and not unreduced:
            return []
        mine: dict[str, Any] = {name: self.checks[name].details() for name in alarming}
        if unreduced:
            mine["unreduced"] = self._unreduced_names()
        everyone: list[dict[str, Any]] = self.world.gather(mine, step=moment.step, tag=_TAG_DETAILS)
        evidence: dict[str, Sequence[Any]] = {
            name: self.checks[name].evidence(moment.step, [details[name] for details in everyone])
            for name in alarming
        }
        record = {"evidence": evidence}
        # A difference in counters is software and explains every other difference, so nothing else is judged then.
        counters = [e for e in evidence.get("replicas", ()) if isinstance(e, CounterEvidence)]
        software = judge_counters(counters)
        if software is not None:
            return [_Finding(verdict=software, record=record)]
        if unreduced:
            return [_Finding(verdict=self._judge_unreduced(everyone, moment.step), record=record)]
        votes = tuple(e for e in evidence.get("replicas", ()) if isinstance(e, VoteEvidence))
        verdicts = judge_votes(votes, self.world.places) if votes else ()
        state = [v for v in verdicts if v.site in (Site.WEIGHTS, Site.OPTIMIZER_STATE)]
        if state:
            return [_Finding(verdict=v, votes=_votes_of(v, votes), record=record) for v in state]
        findings = self._investigate_finite(evidence.get("finite", ()), moment, losses, record)
        if findings is None and "audit" in evidence:
            findings = self._settle_audits(list(evidence["audit"]), moment, losses, record, alarms={})
        if findings:
            return findings
        return [_Finding(verdict=v, votes=_votes_of(v, votes), record=record) for v in verdicts]

    def _investigate_finite(
        self, evidence: Sequence[FiniteEvidence], moment: Moment, losses: list[torch.Tensor], record: dict[str, Any]
    ) -> list[_Finding] | None:
        """NaN or Inf: from hardware, from the reduction, or from code and data? None when ``finite`` saw nothing."""
        if not evidence:
            return None
        limits = self.finite.limits
        finding = judge_finite(
            evidence[0],
            streak_limit=limits.streak_limit,
            lone_limit=limits.lone_limit,
            places=self.world.places,
        )
        if finding is None:
            return None
        if finding.verdict is not None:
            return [_Finding(verdict=finding.verdict, record=record)]
        if not finding.audit:
            return []
        text = "NaN or Inf in the local gradient"
        findings = self._audit_now(moment, losses, record, alarms=dict.fromkeys(finding.audit, text))
        if finding.quiet_if_reproduced and all(f.verdict.kind is Kind.SOFTWARE for f in findings):
            return []
        if not findings:
            # No audit could say where it came from; it must not reach the optimizer all the same.
            verdict = Verdict(
                kind=Kind.INCONCLUSIVE, site=Site.GRADIENT, step=moment.step, check="finite", reason=finding.reason
            )
            return [_Finding(verdict=verdict, record=record)]
        return findings

    def _audit_now(
        self, moment: Moment, losses: list[torch.Tensor], record: dict[str, Any], *, alarms: Mapping[int, str]
    ) -> list[_Finding]:
        """An audit of this step that was not planned, or the planned one with the knowledge that a value is bad."""
        if "audit" not in self.checks or self.audit.strength is Strength.OFF:
            return []
        if "audit" not in moment.due:
            self._ring_compare()
        details = self.world.gather(self.audit.details(), step=moment.step, tag=_TAG_EVIDENCE)
        audits = list(self.audit.evidence(moment.step, details))
        return self._settle_audits(audits, moment, losses, record, alarms=alarms)

    def _settle_audits(
        self,
        audits: list[AuditEvidence],
        moment: Moment,
        losses: list[torch.Tensor],
        record: dict[str, Any],
        *,
        alarms: Mapping[int, str],
    ) -> list[_Finding]:
        """More replays until each audit is settled or hopeless, then judge."""
        if self.audit.rotating:
            # One micro-batch told that something is wrong; a repair needs the whole sum, so the whole is compared.
            self.audit.all_micro_batches()
            self._own_reading(losses)
            self._ring_compare()
            details = self.world.gather(self.audit.details(), step=moment.step, tag=_TAG_EVIDENCE)
            audits = list(self.audit.evidence(moment.step, details))
        audits = [_with_alarm(a, alarms.get(a.auditee, "")) for a in audits]
        audits = self.ring.settle(audits, moment.step)
        record["audits"] = audits
        places = self.world.places
        shares = tuple(s for a in audits if (s := _share(a, places)) is not None)
        findings: list[_Finding] = []
        for verdict in judge_audits(audits, places):
            ranks = {s.rank for s in verdict.suspects}
            own = [a for a in audits if a.auditee in ranks]
            right = bool(ranks) and all(recorded_is_right(a, places) for a in own) and bool(own)
            findings.append(_Finding(verdict=verdict, shares=shares, recorded_is_right=right, record=record))
        return findings

    # ---- deciding and acting -----------------------------------------------------------------------------------------

    def _decide(self, finding: _Finding, moment: Moment, recomputes_left: int) -> Decision:
        verdict = finding.verdict
        ranks = [s.rank for s in verdict.suspects if s.rank is not None]
        nodes = {s.node for s in verdict.suspects if s.node is not None}
        reducible = self.reduction.hooked or self.reduction.ddp is None
        in_state = verdict.site in (Site.WEIGHTS, Site.OPTIMIZER_STATE)
        decision = self._policy.decide(
            verdict,
            strikes=max((self._strikes.get(rank, 0) for rank in ranks), default=0),
            recomputes_left=recomputes_left if reducible else 0,
            repair_possible=bool(finding.shares) and reducible,
            # Nobody can have used the wrong state before it read clean: at the last step, or before the first one.
            heal_allowed=in_state and reducible and (moment.first or self._last_clean_vote >= moment.step - 1),
            approved=bool(nodes & self._approved),
            recorded_is_right=finding.recorded_is_right,
            harmless=finding.harmless,
        )
        bad_number = verdict.check == "finite" or any(a.alarm for a in finding.record.get("audits", ()))
        if decision.action is Action.CONTINUE and bad_number and self.config.mode == "act":
            # P5: what is not finite never reaches the optimizer, whoever made it.
            if recomputes_left > 0 and reducible:
                return Decision(action=Action.RECOMPUTE, would=Action.RECOMPUTE, reason=decision.reason)
            return Decision(action=Action.STOP, would=Action.STOP, reason="the gradient is not finite")
        return decision

    @property
    def _approved(self) -> frozenset[str]:
        if not self._pending or self.config.directory is None:
            return frozenset()
        names = approved_nodes(self.config.directory) if self.world.rank == 0 else frozenset()
        return self.world.gather(names, step=self.steps, tag=_TAG_LOAD)[0]

    def _record(self, decided: list[tuple[_Finding, Decision]], moment: Moment) -> None:
        """Events, evidence and strikes of what was found; before anybody acts."""
        for finding, decision in decided:
            verdict = finding.verdict
            would = decision.would or decision.action
            self.journal.write("verdict", moment.step, verdict=verdict, action=decision.action, would=would.value)
            self.journal.say(f"step {moment.step}: {verdict.kind.value}: {verdict.reason} -> {would.value}")
            self._keep_evidence(finding, moment)
            if verdict.kind is not Kind.PERSISTENT:
                continue
            for suspect in verdict.suspects:
                if suspect.rank is not None:
                    self._strikes[suspect.rank] = self._strikes.get(suspect.rank, 0) + 1
            self._withdraw_trust(verdict)
            second = any(self._strikes.get(s.rank or 0, 0) > 1 for s in verdict.suspects)
            nodes = {s.node for s in verdict.suspects if s.node is not None}
            if second and self.config.quarantine == "ask" and nodes - self._pending and would is not Action.QUARANTINE:
                self._pending |= nodes
                self.journal.write("ask", moment.step, verdict=verdict, action=Action.QUARANTINE)
                self.journal.say(f"take {', '.join(sorted(nodes))} out? unsilent approve RUN {' '.join(sorted(nodes))}")

    def _act(
        self, finding: _Finding, decision: Decision, every: list[_Finding], moment: Moment, losses: list[torch.Tensor]
    ) -> bool:
        """Do it. True when the step was rebuilt and must be looked at again; raises when the run must not go on."""
        action, verdict = decision.action, finding.verdict
        if action is Action.CONTINUE:
            if verdict.kind is Kind.INCONCLUSIVE and verdict.check == "audit":
                self._degrade(verdict, moment)
            return False
        if action is Action.QUARANTINE:
            self._quarantine(verdict)
        if action is Action.STOP:
            if verdict.kind is Kind.INCONCLUSIVE:
                raise self._ended(Inconclusive(verdict.reason, verdict=verdict, resume_from=self._resume_from()))
            self._stop(verdict, decision.reason)
        if action is Action.ROLLBACK:
            self._stop(verdict, decision.reason)
        if action is Action.HEAL:
            votes = tuple(vote for f in every for vote in f.votes)
            healed = heal(self.world, self.inventory, votes)
            shares = tuple(Share(auditee=rank, source=rank, digest=None) for rank in healed)
        else:
            shares = tuple({s.auditee: s for f in every for s in f.shares}.values())
        if not rebuild(self.world, self.reduction, self.ring, shares, losses):
            return True
        self.finite.recheck_reduced()
        self.audit.settled()
        if action is Action.HEAL or "replicas" in moment.due:
            self.replicas.read(gradients=self.reduction.ddp is not None)
        return True

    def _degrade(self, verdict: Verdict, moment: Moment) -> None:
        """Nothing repeats: take the next rung of the ladder and calibrate again in the next step."""
        if "audit" not in moment.due or self._rung == len(_LADDER) - 1:
            return
        self._rung += 1
        kernels, strength = _LADDER[self._rung]
        if kernels is Kernels.MATH_ATTENTION and not _uses_attention(self.inner):
            self._rung += 1
            kernels, strength = _LADDER[self._rung]
        self.audit.strength = strength
        self._calibrate_in = 1 if strength is not Strength.OFF else -1
        text = f"the audit compares from now on: {strength.value}, {kernels.value} kernels; {verdict.reason}"
        self.journal.write("check_degraded", moment.step, check="audit", reason=text)
        self.journal.say(text)

    def _quarantine(self, verdict: Verdict) -> None:
        nodes = sorted({s.node for s in verdict.suspects if s.node is not None})
        resume = self._resume_from()
        if self.config.directory is not None and self.world.rank == 0:
            write_exclude(self.config.directory, nodes, verdict.reason)
        self.journal.write("quarantine", self.steps, verdict=verdict, action=Action.QUARANTINE, resume_from=resume)
        where = f"; resume from {resume}" if resume else "; no certified checkpoint to resume from"
        raise self._ended(
            Quarantine(f"restart without {', '.join(nodes)}: {verdict.reason}{where}", verdict=verdict,
                       resume_from=resume)
        )  # fmt: skip

    def _stop(self, verdict: Verdict, reason: str) -> None:
        resume = self._resume_from()
        where = f"; resume from {resume}" if resume else "; no certified checkpoint to resume from"
        raise self._ended(
            IntegrityLost(f"{verdict.reason}; {reason}{where}", verdict=verdict, resume_from=resume)
        )

    def _ended(self, error: CorruptionError) -> CorruptionError:
        """Put the outcome on disk before any rank leaves."""
        self.journal.ended(error, self.steps)
        self.world.gather(None, step=self.steps, tag=_TAG_LOAD)
        return error

    # ---- trust -------------------------------------------------------------------------------------------------------

    def _note_clean(self, moment: Moment, agreed: Agreed, *, repaired: bool) -> None:
        for name in moment.due:
            self._last_run[name] = moment.step
        for name in self.checks:
            self._counts[name] += name == "finite" or name in moment.due
        if "replicas" in moment.due:
            self._last_clean_vote = moment.step
        if "audit" in moment.due and not repaired and self.audit.strength is Strength.BITWISE:
            self._last_clean_audit = moment.step
            self._promote(moment.step)

    def _note_unclean(self, moment: Moment, agreed: Agreed, findings: list[_Finding]) -> None:
        for name in moment.due:
            self._last_run[name] = moment.step
        if "replicas" in moment.due and not any(agreed.differs("replicas", d) for d in ("weights", "optimizer_state")):
            self._last_clean_vote = moment.step

    def _promote(self, step: int) -> None:
        """Every rank passed an audit: candidates written since the clean audit before are certified now."""
        if not self._candidates or self._certifies_nothing:
            return
        for steps in sorted(self._candidates):
            for store in self._stores.values():
                with contextlib.suppress(CheckpointError):
                    store.promote(steps)
                    self.journal.write("checkpoint", step, steps=steps, status="certified")
        self._candidates.clear()

    def _withdraw_trust(self, verdict: Verdict) -> None:
        """A PERSISTENT device: every checkpoint since its last clean audit is distrusted and never promoted."""
        clean = [self._last_clean_audit] if self._last_clean_audit >= 0 else []
        ranks = [s.rank for s in verdict.suspects if s.rank is not None]
        unaudited = self._last_clean_audit < self.steps - 1 and self.steps > 0
        for store in self._stores.values():
            saved = store.candidates()
            lost = trust_lost(
                verdict,
                candidates=[s.steps for s in saved],
                certified={s.steps for s in saved if s.status is Status.CERTIFIED},
                clean_audits=dict.fromkeys(ranks, clean),
            )
            for steps in lost.distrusted:
                with contextlib.suppress(CheckpointError):
                    store.distrust(steps, lost.reason)
            if lost.distrusted:
                self.journal.write("trust_withdrawn", self.steps, verdict=verdict, steps=list(lost.distrusted))
            self._candidates -= set(lost.distrusted)
        if unaudited and not self._certifies_nothing:
            self._certifies_nothing = (
                f"rank {ranks[0] if ranks else '?'} was wrong at step {verdict.step} and its last clean audit was at "
                f"step {self._last_clean_audit}: what it did in between has reached every replica"
            )

    def _resume_from(self) -> str | None:
        newest = [s for store in self._stores.values() if (s := store.newest(certified=True)) is not None]
        return str(max(newest, key=lambda s: s.steps).path) if newest else None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, root: str | Path) -> Path | None:
        """Write a certified checkpoint of the state after the last step; all ranks call it.

        All checks are forced: the vote runs again, now, and the step before should have been announced (``save_every``
        or ``saving=True``) so that it was audited; if it was not, the checkpoint is a candidate until the next clean
        audit certifies it.

        Returns:
            The checkpoint's directory, or None when the checks found something and no file was written.

        Raises:
            IntegrityLost, Quarantine: what was found cannot be put right here.
        """
        with self._together():
            store = self._store(root)
            if self.config.replicas_every is not None and "replicas" in self.checks and not self._vote_now(_PHASE_SAVE):
                self.journal.write("checkpoint_refused", self.steps, path=str(root))
                self.journal.say(f"no checkpoint of step {self.steps} was written: its checks failed")
                return None
            certified = self._audit_was_clean and not self._certifies_nothing
            status = Status.CERTIFIED if certified else Status.CANDIDATE
            path = store.save(
                self.inventory,
                steps=self.steps,
                checks=self._check_runs(),
                status=status,
                scaler=self.scaler,
                scheduler=self.scheduler,
                rng=read_generators(),
                guard=self.state_dict(),
            )
            if self._certifies_nothing:
                store.distrust(self.steps, self._certifies_nothing)
                self.journal.say(f"the checkpoint of step {self.steps} is not certified: {self._certifies_nothing}")
            elif not certified:
                self._candidates.add(self.steps)
            word = "distrusted" if self._certifies_nothing else status.value
            self.journal.write("checkpoint", self.steps, steps=self.steps, status=word, path=str(path))
            return path

    def load(self, root: str | Path) -> int:
        """Load the newest checkpoint under ``root`` that is trusted and verifies; all ranks call it.

        Returns:
            The number of updates completed.

        Raises:
            CheckpointError: nothing is left that can be loaded; the message says what was wrong with each.
            UsageError: the checkpoint is of another model or optimizer.
        """
        with self._together():
            loaded = self._store(root).load(self.inventory, scaler=self.scaler, scheduler=self.scheduler)
            for notice in loaded.notices:
                self.journal.write("notice", loaded.steps, text=str(notice))
                self.journal.say(str(notice))
            if loaded.rng is not None:
                write_generators(loaded.rng)
            torch.clear_autocast_cache()
            self.load_state_dict(dict(loaded.guard) if loaded.guard else {"steps": loaded.steps})
            self.steps = loaded.steps
            self._first = True
            self._last_run = dict.fromkeys(self._schedule.periods, self.steps)
            self._last_clean_vote = self._last_clean_audit = -1
            self._calibrate_in = 1
            return self.steps

    def _vote_now(self, phase: int) -> bool:
        """A vote after the update. False when it found something; in act mode a lone replica is healed first."""
        self.audit.settled()
        self.finite.begin(Moment(step=self.steps, due=frozenset()))
        self.replicas.read(gradients=False)
        for attempt in range(2):
            agreed = self._agree(self.steps, phase)
            if not self.replicas.alarm(agreed):
                return attempt == 0
            details = self.world.gather(self.replicas.details(), step=self.steps, tag=_TAG_DETAILS)
            evidence = self.replicas.evidence(self.steps, details)
            votes = tuple(e for e in evidence if isinstance(e, VoteEvidence))
            counters = judge_counters([e for e in evidence if isinstance(e, CounterEvidence)])
            verdicts = (counters,) if counters else judge_votes(votes, self.world.places)
            moment = Moment(step=self.steps, due=frozenset({"replicas"}))
            # The vote before this update was clean, so nobody has computed with the wrong replica yet.
            decided = [
                (f, self._decide(f, moment, 0))
                for v in verdicts
                for f in [_Finding(verdict=v, votes=_votes_of(v, votes), record={"evidence": evidence})]
            ]
            self._record(decided, moment)
            finding, decision = max(decided, key=lambda pair: _SEVERITY[pair[1].would or pair[1].action])
            if decision.action is Action.CONTINUE:
                return False
            if decision.action is not Action.HEAL:
                self._stop(finding.verdict, decision.reason)
            heal(self.world, self.inventory, votes)
            self.journal.write("action", self.steps, verdict=finding.verdict, action=Action.HEAL)
            self.replicas.read(gradients=False)
        return False

    def certify(self, state: Mapping[str, Any]) -> Certificate:
        """The certificate of a state that another writer is about to write; give the copy that is written."""
        return certify_state(state, steps=self.steps, checks=self._check_runs(), world_size=self.world.size)

    def may_publish(self, certificate: Certificate) -> str:
        """Whether that state may be called certified: ``"yes"``, ``"no"`` (final), or ``"wait"``."""
        audited = self._last_clean_audit if self._last_clean_audit >= 0 else None
        votes = {self._last_clean_vote, self._last_clean_vote + 1} if self._last_clean_vote >= 0 else set[int]()
        doubted = self._last_clean_audit + 1 if self._certifies_nothing else None
        trust = Trust(
            clean_audits=(audited,) * self.world.size, clean_replicas=votes, doubted_after=doubted
        )
        return may_publish_certificate(certificate, trust)

    def attach(self, certificate: Certificate, path: str | Path) -> Certificate:
        """Hash the files that another writer has written into ``path`` and put the certificate beside them."""
        return attach_certificate(certificate, path)

    def _store(self, root: str | Path) -> CheckpointStore:
        key = Path(root)
        if key not in self._stores:
            self._stores[key] = CheckpointStore(
                key,
                group=self.world.group,
                rank=self.world.rank,
                world_size=self.world.size,
                keep=self.config.keep_checkpoints,
            )
        return self._stores[key]

    def _check_runs(self) -> tuple[CheckRun, ...]:
        last = self.steps - 1
        runs = [CheckRun(check="finite", steps=(last, last))] if "finite" in self.checks else []
        if self._last_clean_vote >= 0:
            runs.append(CheckRun(check="replicas", steps=(self.steps, self.steps)))
        if self._last_clean_audit >= 0:
            runs.append(CheckRun(check="audit", steps=(self._last_clean_audit, self._last_clean_audit)))
        return tuple(runs)

    def state_dict(self) -> dict[str, Any]:
        """What the guard must remember over a restart; always the same keys and shapes."""
        return {"version": 1, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.steps = int(state.get("steps", 0))

    # ---- start, end, and what goes wrong with the guard itself -------------------------------------------------------

    def coverage(self) -> tuple[Coverage, ...]:
        """What is looked at in this run, how, when, and what that cannot see."""
        rows = [row for check in self.checks.values() for row in check.coverage()]
        off: list[Coverage] = []
        if self.config.audit_every is None:
            rows = [r for r in rows if r.check != "audit"]
            off += [_uncovered(site, "audit_every is None") for site in ("forward", "backward", "gradient")]
        if self.config.replicas_every is None:
            rows = [r for r in rows if r.check != "replicas"]
            off += [_uncovered(site, "replicas_every is None") for site in ("weights", "optimizer_state")]
        off.append(_uncovered("batch", "no check: wrong data that all ranks would compute alike is not seen"))
        off.append(_uncovered("optimizer", "an update that is wrong on all ranks alike is not seen"))
        if self.reduction.notice:
            off.append(_uncovered("gradient", self.reduction.notice))
        return (*rows, *off)

    def close(self) -> None:
        """Leave together: a last vote if the run is in order, then the own group is given back. All ranks call it."""
        if self.world.watcher.closed:
            return
        orderly = self.world.watcher.failure is None and sys.exc_info()[0] is None
        try:
            if orderly and self.steps and self.config.replicas_every is not None and "replicas" in self.checks:
                with self._together():
                    self._vote_now(_PHASE_END)
            self.journal.finished(self.steps) if orderly else None
        finally:
            self._detach(together=orderly)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close() if kind is None else self._detach(together=False)

    def _detach(self, *, together: bool) -> None:
        self.recorder.close()
        self.audit.close()
        self.reduction.close()
        self._observers.clear()
        if self._sigterm is not None:
            self._sigterm.release()
        atexit.unregister(self._at_exit)
        with contextlib.suppress(RankFailure, RuntimeError):
            self.world.close(together=together)
        self.journal.close()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """No rank fails alone: what is raised here is told to the others, and what they told is raised here."""
        try:
            yield
        except CorruptionError:
            raise
        except RankFailure:
            self.journal.wait_for_exit(3.0)
            raise
        except BaseException as error:
            # A broken connection is the echo of another rank's end; its own reason is worth waiting for.
            echo = isinstance(error, RuntimeError) and self.world.size > 1
            known = self.world.watcher.failure
            if known is None and echo:
                known = self.world.watcher.wait_for_failure(10.0 if _sounds_like_a_connection(error) else 0.3)
            if known is not None:
                self.world.watcher.raise_if_failed()
            if self.world.size > 1:
                self.world.watcher.post(f"{type(error).__name__}: {error}")
                self.journal.wait_for_exit(3.0)
            raise

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        """Run a part of a check; a fault of the guard itself is noted, flagged to all ranks, and not raised here."""
        if name not in self.checks:
            return None
        try:
            return work()
        except (RankFailure, CorruptionError):
            raise
        except Exception as error:  # noqa: BLE001 - P4: a fault in the guard does not kill a healthy job
            self._check_errors.setdefault(name, f"{type(error).__name__}: {error}")
            return None

    def _switch_off(self, names: list[str], step: int) -> None:
        """A check failed on some rank: it goes off on all ranks together, or all raise together."""
        errors = self.world.gather(dict(self._check_errors), step=step, tag=_TAG_EVIDENCE)
        for name in names:
            rank, error = next((r, e[name]) for r, e in enumerate(errors) if name in e)
            if self.config.on_guard_error == "raise":
                raise RankFailure(rank, f"check {name}: {error}")
            del self.checks[name]
            text = f"check {name} is off from step {step} on: on rank {rank} it failed with {error}"
            self.journal.write("guard_error", step, check=name, failed_rank=rank, error=error)
            self.journal.write("check_disabled", step, check=name, reason=text)
            self.journal.say(text)
        self._check_errors.clear()
        self.reduction.error = None

    def _must_not_be_overdue(self, moment: Moment) -> None:
        """P2: a check that is on and did not run within twice its period is an error, not a silence."""
        for name, period in self._schedule.periods.items():
            if name not in self.checks or (name == "audit" and self.audit.strength is Strength.OFF):
                continue
            if moment.step - self._last_run[name] > 2 * period:
                raise RuntimeError(
                    f"check {name} last ran at step {self._last_run[name]}, more than twice its period of {period} "
                    f"steps before step {moment.step}"
                )

    def _announce(self) -> None:
        rows = self.coverage()
        self.journal.write(
            "run_started", self.steps, world_size=self.world.size, nodes=list(self.world.nodes),
            mode=self.config.mode, quarantine=self.config.quarantine, environment=self.world.environment.digest,
        )  # fmt: skip
        self.journal.write("coverage", self.steps, rows=[vars(row) for row in rows])
        for row in rows:
            covered = f"{row.how}; {row.when}; not seen: {row.blind}" if row.how else f"NOT COVERED: {row.blind}"
            self.journal.say(f"{row.site:<16} {row.check:<9} {covered}")
        for text in missing_settings():
            self.journal.say(text)

    def _announce_calibration(self, step: int) -> None:
        kernels, strength = _LADDER[self._rung]
        self.journal.write("calibration", step, check="audit", strength=strength.value, kernels=kernels.value)
        self.journal.say(f"calibration at step {step}: audits compare {strength.value}, {kernels.value} kernels")

    def _require_localization(self) -> None:
        if len(self.world.nodes) < 3:
            raise UsageError(
                f"require_localization needs at least 3 nodes, and this run has {len(self.world.nodes)}: "
                f"{', '.join(self.world.nodes)}"
            )

    def _check_names(self) -> None:
        known = {n for n, _ in self.inner.named_buffers()}
        for name in self.config.replicated_buffers:
            if name not in known:
                raise UsageError(f"replicated_buffers names {name!r}, and the model has no such buffer")

    # ---- small readings ----------------------------------------------------------------------------------------------

    def _own_reading(self, losses: list[torch.Tensor]) -> None:
        if self.audit.strength is not Strength.OFF:
            self.audit.record(losses)
            if self._first:
                pack(self.recorder.work(self.steps))  # say at once that a batch cannot be sent, not when it matters

    def _unreduced_names(self) -> tuple[str, ...]:
        names = {id(p): n for n, p in self.inner.named_parameters()}
        return tuple(names[id(p)] for p in self.reduction.unreduced())

    def _judge_unreduced(self, everyone: list[dict[str, Any]], step: int) -> Verdict:
        names = dict.fromkeys(name for details in everyone for name in details["unreduced"])
        ranks = tuple(rank for rank, details in enumerate(everyone) if details["unreduced"])
        return judge_unreduced(UnreducedEvidence(step=step, tensors=tuple(names), ranks=ranks))

    def _counters(self) -> dict[str, str]:
        """What all ranks must hold alike besides tensors; values as exact text."""
        values = {"step": str(self.steps)}
        for i, group in enumerate(self.optimizer.param_groups):
            rate = group.get("lr")
            values[f"learning rate of group {i}"] = repr(float(rate)) if rate is not None else "none"
        if self.scaler is not None:
            values["scaler scale"] = repr(self.scaler.get_scale())
        if self.scheduler is not None:
            values["scheduler epoch"] = str(self.scheduler.last_epoch)
        return values

    def _keep_evidence(self, finding: _Finding, moment: Moment) -> None:
        batch = None
        if self.config.evidence == "full" and self.world.rank in self.ring.works:
            batch = [m.batch for m in self.ring.works[self.world.rank].micro_batches]
        wanted = set(finding.verdict.tensors)
        tensors = {e.name: e.tensor for e in (*self.inventory.entries(), *self.inventory.gradients())
                   if e.name in wanted}  # fmt: skip
        record = {"verdict": finding.verdict, **finding.record}
        self.journal.keep(moment.step, finding.verdict, record, tensors=tensors, batch=batch)

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.reduction.ddp.no_sync() if self.reduction.ddp is not None else contextlib.nullcontext()


class _Guarded:
    """Hands buckets to a check that may have been switched off, and keeps its errors out of backward."""

    def __init__(self, guard: Guard, check: Check) -> None:
        self._guard, self._check = weakref.ref(guard), check

    def before_reduction(self, bucket: Bucket) -> None:
        guard = self._guard()
        if guard is not None:
            guard._try(self._check.name, lambda: self._check.before_reduction(bucket))


class _HeldSignal:
    """Holds SIGTERM for two seconds, so that a survivor can put on disk which rank failed before it leaves.

    torchrun sends it 0.1 s after the first worker ended. A handler that somebody else installed is left alone.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._installed = False
        try:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._handle)
                self._installed = True
        except ValueError:  # not the main thread
            pass

    def _handle(self, number: int, frame: object) -> None:
        self._world.watcher.wait_for_failure(2.0)
        self._world.watcher.raise_if_failed()
        self.release()
        os.kill(os.getpid(), signal.SIGTERM)

    def release(self) -> None:
        if self._installed:
            self._installed = False
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _close_at_exit(guard: Guard) -> Callable[[], None]:
    """A process that ends without closing its guard tells the others whether it ended well."""
    reference = weakref.ref(guard)

    def at_exit() -> None:
        guard = reference()
        if guard is None or guard.world.watcher.closed:
            return
        error = getattr(sys, "last_value", None)
        if error is not None and guard.world.watcher.failure is None:
            guard.world.watcher.post(f"{type(error).__name__}: {error}")
        guard._detach(together=False)

    atexit.register(at_exit)
    return at_exit


_SEVERITY = {
    action: i
    for i, action in enumerate(
        (Action.CONTINUE, Action.REPAIR, Action.RECOMPUTE, Action.HEAL, Action.ROLLBACK, Action.QUARANTINE, Action.STOP)
    )
}


def _share(audit: AuditEvidence, places: Sequence[Any]) -> Share | None:
    """Whose work must be replaced and by whom; None when the live value is right or nobody holds a right one."""
    value = agreed_value(audit, places)
    if value is None or recorded_is_right(audit, places):
        return None
    able = holders(audit, places)
    if not able:
        return None
    source = next((rank for rank in able if rank != audit.auditee), able[0])
    return Share(auditee=audit.auditee, source=source, digest=value)


def _with_alarm(audit: AuditEvidence, alarm: str) -> AuditEvidence:
    return replace(audit, alarm=alarm) if alarm else audit


def _votes_of(verdict: Verdict, votes: tuple[VoteEvidence, ...]) -> tuple[VoteEvidence, ...]:
    names = set(verdict.tensors)
    return tuple(vote for vote in votes if vote.tensor in names)


def _uncovered(site: str, why: str) -> Coverage:
    return Coverage(site=site, check="-", how="", when="", blind=why)


def _uses_attention(model: nn.Module) -> bool:
    """Whether another attention kernel could make a difference; a model may always hide one in plain code."""
    return any("attention" in type(m).__name__.lower() or "attn" in type(m).__name__.lower() for m in model.modules())


def _sounds_like_a_connection(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "socket", "peer", "reduction failed"))

