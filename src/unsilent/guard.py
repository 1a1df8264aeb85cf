"""The conductor: the order of a guarded step, and the only place that holds state over steps.

    step → Reading (device) → Evidence (host) → Verdict → Action → Event

A replay gives more evidence and never calls back; the loop judge → replay → judge is a bounded ``for`` here and in
``ring.py``. Ranks decide together: each sees the same agreed vector, gathers the same details, and calls the same pure
functions with them, so that all come to the same action without being told.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unsilent.agreement import Agreed, Agreement, Declaration
from unsilent.calibration import Calibration
from unsilent.checkpoint import Certificate, CheckRun, Status
from unsilent.checkpoint import attach as attach_certificate
from unsilent.checkpoint import certify as certify_state
from unsilent.checkpoint import may_publish as may_publish_certificate
from unsilent.checkpoint.together import Together
from unsilent.checks.audit import Audit, AuditConfig, Strength
from unsilent.checks.finite import Finite
from unsilent.checks.protocol import Check, Coverage, Moment
from unsilent.checks.replicas import Replicas
from unsilent.checks.update import Update
from unsilent.config import NO_CHECKPOINT, GuardConfig
from unsilent.crossings import Crossings
from unsilent.determinism import Kernels, missing_settings, running_with
from unsilent.errors import (
    CheckpointError,
    CorruptionError,
    RankFailure,
    UsageError,
)
from unsilent.generators import read_generators, write_generators
from unsilent.inquiry import Finding, Inquiry
from unsilent.inventory import Inventory, is_partitioned
from unsilent.journal import Journal
from unsilent.judge import judge_counters
from unsilent.layout import Layout, Relations, check_layout, layout_of
from unsilent.lifeline import HeldSignal, close_at_exit, tell_at_end, together
from unsilent.localize import team_ring
from unsilent.optimizers import joined, joined_schedulers, parts_of, step_scaled
from unsilent.records import Action, CounterEvidence, Site, Verdict
from unsilent.recovery.rollback import Rollback
from unsilent.recovery.rollback_sharded import ShardedRollback
from unsilent.reduction import Bucket, Reduction, check_supported, unwrap
from unsilent.replay import MicroBatch, Recorder, Replayer, Work, pack
from unsilent.response import Response, gravest
from unsilent.ring import Ring
from unsilent.schedule import Schedule
from unsilent.sharded_reduction import ShardedReduction
from unsilent.sharded_replay import ShardedReplayer
from unsilent.sharding import ModuleGroup, fsdp_modules, is_sharded, module_groups
from unsilent.standing import Standing
from unsilent.streams import Streams
from unsilent.watched import Loop, Watched, weakly
from unsilent.weighing import Weighing, mean_loss, share_of
from unsilent.world import World

_PHASE_UPDATE, _PHASE_SAVE, _PHASE_END = 1, 2, 3
#: what a message of the guard itself is about; inquiry, ring and standing have numbers of their own
_TAG_RUN, _TAG_DETAILS, _TAG_ERRORS, _TAG_SENDABLE, _TAG_SHARDS = 2, 10, 12, 15, 9


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


class Guard:
    """Guards a training step; every rank makes one, with the same arguments.

    Args:
        model: a plain module, a ``DistributedDataParallel``, or a module under ``fully_shard`` (FSDP2, HSDP).
        optimizer: over the model's parameters; several, each over some of them, step in the order of the list.
        loss_fn: ``loss_fn(model, batch) -> loss``, a scalar; autocast belongs inside it. Replays call it with the
            module under the DDP wrapper.
        scaler, scheduler: stepped after the optimizer, as usual; several schedulers as a list.
        clip_norm: clip the gradient's norm to this before the update. With a scaler and several optimizers an overflow anywhere
            then leaves out all of them, not only the one that it is in: a norm that is not finite spoils all gradients.
        layout: which ranks compute one batch together (pipeline, context, expert parallelism), where the model does not tell.
            With a pipeline ``loss_fn(stage, batch)`` runs a whole schedule and returns a loss without a graph.

    Raises:
        UsageError: what is asked for cannot be guarded; the message says what to change.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss_fn: Callable[[Any, Any], torch.Tensor],
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | Sequence[torch.optim.lr_scheduler.LRScheduler] | None = None,
        clip_norm: float | None = None,
        layout: Layout | None = None,
        config: GuardConfig | None = None,
    ) -> None:
        self.optimizer, self.scheduler = joined(optimizer), joined_schedulers(scheduler)
        check_supported(model, self.optimizer)
        self.model, self.loss_fn, self.scaler, self.clip_norm = model, loss_fn, scaler, clip_norm
        self.config = config or GuardConfig()
        self.steps = 0  # updates completed
        self.last_due: frozenset[str] = frozenset()  # the scheduled checks that the last step ran
        self._loop: Loop | None = None  # set by watch(): the loop owns its step
        self._stepped = False  # step() was called

        self._observers: list[Any] = []
        self._taken = contextlib.ExitStack()  # hooks, handlers and files, given back in detach()
        self._made_during = id(sys.exc_info()[1])  # what was being handled already when this guard was made
        ddp, self.inner = unwrap(model)
        self._sharded, self._partitioned = is_sharded(model), is_partitioned(self.optimizer)
        for module in fsdp_modules(model):
            module.reshard()  # what an evaluation has gathered before
        parameters = [p for p in self.inner.parameters() if p.requires_grad]
        if not parameters:
            raise UsageError("the model has no parameter that requires a gradient: there is nothing to guard")
        self._check_names()
        self.inventory = Inventory(
            self.inner,
            self.optimizer,
            replicated_buffers=frozenset(self.config.replicated_buffers),
            copies=lambda tensor, name: self.relations.copies(tensor, name),
            called=lambda name: self.relations.called(name),
        )
        self.layout = layout
        if layout is not None and layout.stage is not None and clip_norm is not None:
            raise UsageError(
                "clip_norm would clip each stage of the pipeline by the norm of its own gradients: leave it out, and clip in a pre-hook "
                "of the optimizer by the norm over all stages"
            )
        if self._sharded:
            self.layout = layout or layout_of(model)
            check_layout(model, self.layout)
        elif layout is not None:
            raise UsageError("a Layout is for models under fully_shard or replicate: under DistributedDataParallel every rank "
                             "computes by itself")  # fmt: skip
        self.world = World(
            self._module_groups[0].device if self._sharded else parameters[0].device,
            group=None if ddp is None else ddp.process_group,
            node=self.config.node,
            timeout_s=self.config.timeout_s,
            teams=None if self.layout is None else self.layout.teams,
        )
        try:
            self.journal = self._open_journal()
            with together(self.world, self.journal, UsageError):
                self._take_over()
        except BaseException:
            self.detach(together=False)
            raise

    def _make_replayer(self) -> Replayer:
        if isinstance(self.reduction, ShardedReduction):
            return ShardedReplayer(
                self.inner, self.loss_fn, self.reduction, self.world,
                scale_loss=self._scale_loss, written=self.recorder.written,
            )  # fmt: skip
        return Replayer(
            self.inner,
            self.loss_fn,
            scale_loss=self._scale_loss,
            scale=self.reduction.scale,
            written=self.recorder.written,
            traffic=self.world.job_traffic,
            streams=Streams(streams, self.world.device) if (streams := self.config.recovery_streams) > 1 else None,
        )

    def _open_journal(self) -> Journal:
        run_id = self.world.gather(os.urandom(8).hex(), step=0, tag=_TAG_RUN)[0]
        journal = Journal(
            self.config.directory,
            rank=self.world.rank,
            run_id=run_id,
            evidence=self.config.evidence,
            device=self.world.place.device if self.world.device.type == "cuda" else None,
            ledger=self.config.ledger,
        )
        self._taken.callback(journal.close)
        journal.started()
        self.world.watcher.set_record(journal.rank_failed)
        return journal

    def _take_over(self) -> None:
        """Put hooks, checks and handlers in place."""
        self.relations = Relations(self.inner, self.layout, self._exchange)
        owners = [entry.copies is not None and len(entry.copies) == 1 for entry in self.inventory.weights()]
        everywhere = self._exchange((all(owners), any(owners))) if self._sharded else [(False, False)]
        self._alone = all(alone for alone, _ in everywhere)  # every shard has a single owner
        if self.config.require_localization:
            self._require_localization()
        self.reduction = (
            ShardedReduction(self.model, self._observers, self.world)
            if self._sharded
            else Reduction(self.model, self._observers, self.world.watcher)
        )
        self._taken.callback(self.reduction.close)
        if self.config.averaged_every is not None and (self.reduction.reduces or self.layout is not None):
            raise UsageError(
                "averaged_every is for local SGD, in which every rank trains by itself between two averages of the weights, and this "
                "model's gradients are reduced in every step: leave averaged_every out, or take the wrapper off"
            )
        if self.config.averaged_every is not None and self._scales:
            raise UsageError(
                "averaged_every was given with a loss scaler, whose scale would differ from rank to rank: train in bf16"
            )
        self._weighing = Weighing(self.world, averages=self.reduction.reduces)
        self.recorder = Recorder(self.inner, synchronises=self.reduction.synchronises_buffers)
        self._taken.callback(self.recorder.close)
        self.replayer = self._make_replayer()
        self._auditors = team_ring(self.world.places, self.world.teams)
        self.crossings: Crossings | None = None
        if self.layout is not None and not self.world.teams.alone:
            self.crossings = Crossings(self.inner, self.world.teams.of(self.world.rank), self.layout.stage)
        reduces = self.reduction.reduces
        self.finite = Finite(
            self.inventory, self.config.finite, reduces=reduces, scaler=self._scales,
            averages=self.reduction.hooked and not self._sharded, clips=self.clip_norm is not None and not self._scales and not self._sharded,
            replicated=not self._sharded,
        )  # fmt: skip
        self.replicas = Replicas(
            self.inventory,
            self._counters,
            period=self.config.replicas_every or 0,
            reduces=reduces,
            exchange=self._exchange if self._sharded or self._partitioned else None,
            partitioned=self._partitioned,
            alone=self._alone,
            partly_alone=any(some for _, some in everywhere),
            averaged=self.config.averaged_every is not None,
        )
        self.audit = Audit(
            self.inner,
            self.recorder,
            self._audits,
            rank=self.world.rank,
            auditors=self._auditors,
            places=self.world.places,
            period=self.config.audit_every or 0,
            reduces=reduces,
            labels=self.reduction.labels,
            scale=self.reduction.scale,
            team_places=self.world.team_places,
        )
        self._taken.callback(self.audit.close)
        self.update = None if self.config.update is None or self._sharded or self._partitioned else Update(
            self.inner, self.optimizer, self.config.update, reduces=reduces, scale=self.reduction.scale,
            loss_scale=lambda: self.scaler.get_scale() if self.scaler is not None and self._scales else 1.0,
            clip_norm=self.clip_norm, ranks=self.world.size,
        )  # fmt: skip
        self.ring = Ring(
            self.world, self.replayer, self.audit, self._auditors,
            crossings=self.crossings, repairs=self.config.mode == "act",
        )  # fmt: skip
        self.rollback = (ShardedRollback if self._sharded else Rollback)(
            self.world,
            self.inventory,
            self.reduction,
            self.replayer,
            update=self._apply,
            scaler=self.scaler,
            scheduler=self.scheduler,
            keep=self.config.keep_batches,
        )
        self.calibration = Calibration(self.inner, self.audit, self.journal)
        self.standing = Standing(
            self.world,
            self.journal,
            directory=self.config.directory,
            keep=self.config.keep_checkpoints,
            ledger=self.config.ledger,
            observe=self.config.mode == "observe",
        )
        own = () if self.update is None else (self.update,)
        every: tuple[Check, ...] = (self.finite, self.replicas, self.audit, *own)
        self.checks = {check.name: check for check in every}
        self.inquiry = Inquiry(
            self.world,
            self.ring,
            self.checks,
            self.finite,
            self.audit,
            weights_digest=self._weights_digest,
            outside_state=lambda: self.recorder.outside_state,
            unreduced=self._unreduced_names,
            attempt=self._try,
            update=self.update,
            calibrated=lambda: self.calibration.done,
            own_loop=lambda: self._loop is not None,
        )
        self.response = Response(
            self.config,
            self.world,
            self.journal,
            inventory=self.inventory,
            reduction=self.reduction,
            recorder=self.recorder,
            ring=self.ring,
            rollback=self.rollback,
            finite=self.finite,
            replicas=self.replicas,
            audit=self.audit,
            update=self.update,
            calibration=self.calibration,
            inquiry=self.inquiry,
            standing=self.standing,
            scaler=self.scaler,
            scheduler=self.scheduler,
            scales=self._scales,
            nothing_kept=self._nothing_kept,
            reruns_hold=self._reruns_hold,
            attempt=self._try,
            tally=self._tally,
        )
        self._observers += [_Guarded(self, check) for check in self.checks.values()]
        self._taken.callback(self._observers.clear)
        declarations = {name: check.declares() for name, check in self.checks.items()}
        errors = tuple(f"error.{name}" for name in self.checks)
        declarations["guard"] = Declaration(flags=("unreduced", *errors))
        self._agreement = Agreement(declarations)
        periods = {"audit": self.config.audit_every, "replicas": self.config.replicas_every}
        self._schedule = Schedule(
            {name: period for name, period in periods.items() if period is not None},
            first_steps=self.config.averaged_every is not None,
        )

        self._first = True
        self._last_run = dict.fromkeys(self._schedule.periods, 0)
        self._switched: dict[str, list[int]] = {}  # by kernels: steps not run with the default ones, not yet in the log
        self._check_errors: dict[str, str] = {}
        self._counts: dict[str, int] = dict.fromkeys(self.checks, 0)

        self._taken.callback(HeldSignal(self.world).release)
        self._taken.callback(atexit.unregister, close_at_exit(self))
        self._announce()
        self.standing.suspicion.recall()

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(
        self,
        batch: Any = None,
        *,
        micro_batches: Sequence[Any] | None = None,
        samples: Sequence[int] | None = None,
        saving: bool = False,
        last: bool = False,
    ) -> Outcome:
        """Run one guarded step: forward, backward, reduction, checks, and the update if nothing speaks against it.

        Args:
            batch: this rank's batch, handed to ``loss_fn``; any pytree.
            micro_batches: instead of ``batch``, several whose gradients are accumulated, each loss divided by their
                number.
            samples: how many samples each micro-batch holds, so that each counts by them: the gradient is then that of
                the mean over all samples of all ranks, which may have unequally many. Each loss must be a mean over
                its samples. Given on every rank in every step, or on none in none.
            saving: the state after this step will be saved, so that all checks run.
            last: this is the last step, so that all checks run.

        Raises:
            Quarantine, IntegrityLost: on all ranks together; nothing was updated.
            RankFailure: another rank failed.
            UsageError: no batch, one that cannot be sent to the rank that audits it, or samples that do not fit.
        """
        if self._loop is not None:
            raise UsageError("guard.step was called where guard.watch has been used: a run uses one of the two")
        self._stepped = True
        parts = list(micro_batches) if micro_batches is not None else [batch]
        if (not parts and samples is None) or (micro_batches is None and batch is None):
            raise UsageError("step() needs a batch, or a non-empty list of micro_batches")
        weights = self._weights(len(parts), samples)
        self._must_be_sendable(parts)
        with together(self.world, self.journal):
            moment, kernels = self._begin(saving=saving, last=last)
            losses = self._forward_backward(parts, weights, moment, kernels)
            action, verdict = self._check(moment, losses, kernels)
            self._update(moment, kernels)
            return Outcome(loss=mean_loss(losses, weights), step=moment.step, action=action, verdict=verdict)

    @contextlib.contextmanager
    def watch(
        self, batch: Any, *, accumulating: bool = False, divide_by: int = 1, saving: bool = False, last: bool = False
    ) -> Iterator[Watched]:
        """Bracket forward and backward of a loop that owns its step; on leaving the gradients are looked at and put right.

        In the block the loop does what it always did, and backward is of ``loss_fn(model, batch)``, as the guard was given
        it, or of a loss that is the same bit for bit: that is what is rerun. ``zero_grad`` comes before the block, whatever
        else is done to gradients after it, then one update. See ``docs/loops.md``.

        Args:
            batch: this rank's batch, as ``loss_fn`` takes it.
            accumulating: other micro-batches of this step follow, in blocks of their own; what is reduced and looked at is
                their sum, with the last.
            divide_by: the block divides its loss by this number before backward.
            saving, last: as for :meth:`step`; given with the first block of a step.

        Yields:
            What the step gave, known once its last block has been left.

        Raises:
            Quarantine, IntegrityLost: on all ranks together, on leaving the block; the update must not follow.
            RankFailure: another rank failed, in its block or elsewhere.
            UsageError: the loop is out of order, or the batch cannot be sent to the rank that audits it.
        """
        with together(self.world, self.journal):
            loop = self._own_loop(accumulating=accumulating)
            with loop.block(accumulating=accumulating, divide_by=divide_by):
                if loop.begun is None:
                    self._must_be_sendable([batch])
                    loop.begun = self._begin(saving=saving, last=last)
                    self._capture(loop.begun[0], divide_by=divide_by)
                moment, kernels = loop.begun
                watched = Watched(step=moment.step)
                with self._live(moment, kernels):
                    self.recorder.begin_micro_batch(batch)
                    yield watched
            if accumulating:
                return
            self.recorder.end_step()
            watched.action, watched.verdict = self._check(moment, [], kernels)
            self.reduction.forget()
            loop.checked()

    def _own_loop(self, *, accumulating: bool) -> Loop:
        """The loop that is watched; from its first block on the guard knows that updates are not its own."""
        if self._stepped:
            raise UsageError("guard.watch was called where guard.step has been used: a run uses one of the two")
        if accumulating and self.crossings is not None:
            raise UsageError("guard.watch cannot accumulate where ranks compute batches together: one block a step")
        if self._audits.micro_batch == "rotating":
            raise UsageError("guard.watch audits the sum of all micro-batches: take AuditConfig(micro_batch='all')")
        if self.clip_norm is not None:
            raise UsageError("clip_norm was given to a guard that makes no update (guard.watch): clip after the block")
        if self._loop is None:
            reduces = self.reduction.reduces
            self._loop = Loop(self.model, parts_of(self.optimizer), reduces=reduces, updated=weakly(self._updated))
            self._taken.callback(self._loop.close)
            self._observers.append(self._loop)
            self.audit.compares_losses = False
            self._announce_coverage(self._loop.coverage())
        return self._loop

    def _begin(self, *, saving: bool, last: bool) -> tuple[Moment, Kernels]:
        """Whose turn it is in this step, and with which kernels it runs."""
        step = self.steps
        self.journal.begin_step(step)
        self.standing.suspicion.begin_step(step)
        config = self.config
        announced = config.save_every is not None and (step + 1) % config.save_every == 0
        ends = config.total_steps is not None and step + 1 == config.total_steps
        due = set(self._schedule.due(step, forced=saving or last or announced or ends))
        if self._first and config.replicas_every is not None:
            due.add("replicas")
        audits = config.audit_every is not None or "update" in self.checks
        if audits and (self.calibration.due or (self.calibration.done and self.standing.watches_a_device)):
            due.add("audit")
        if self._sharded and "audit" in due and config.replicas_every is not None:
            due.add("replicas")  # a pair cannot compare its weights: the copies of each shard are compared
        apart = config.averaged_every is not None and step % config.averaged_every != 0
        if apart:
            due -= {"audit", "replicas"}
        due &= set(self.checks)
        if self.audit.strength is Strength.OFF:
            due.discard("audit")
        moment = Moment(step=step, due=frozenset(due), first=self._first, apart=apart)
        self.last_due = moment.due
        self._must_not_be_overdue(moment)
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.begin(moment))
        kernels = self.calibration.kernels if "audit" in due else Kernels.DEFAULT
        if kernels is not Kernels.DEFAULT and self._replicas_on:
            self._switched.setdefault(kernels.value, []).append(step)
        return moment, kernels

    def _forward_backward(
        self, parts: list[Any], weights: list[float | None], moment: Moment, kernels: Kernels
    ) -> list[torch.Tensor]:
        """The user's own work, with a capture of what each micro-batch began from."""
        self.optimizer.zero_grad(set_to_none=True)
        self._capture(moment)
        if not self.calibration.due:  # calibration compares the whole
            self._rotate(moment, len(parts))
        losses: list[torch.Tensor] = []
        with self._live(moment, kernels):
            for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                last = i == len(parts) - 1
                self.recorder.begin_micro_batch(part, weight)
                self.audit.listen(i)
                with contextlib.nullcontext() if last else self.reduction.accumulating():
                    loss = self.loss_fn(self.model, part)
                    losses.append(loss.detach().clone())
                    if loss.requires_grad or self.layout is None:
                        self._scale_loss(share_of(loss, weight=weight, divide_by=len(parts))).backward()
                    elif self.scaler is not None or len(parts) > 1 or weight is not None:
                        raise UsageError(
                            "loss_fn gave a loss without a graph, as a pipeline's schedule does: such a step takes one batch, and "
                            "no scaler, micro_batches or samples"
                        )
        self.audit.listen(None)
        self.recorder.end_step()
        return losses

    def _capture(self, moment: Moment, *, divide_by: int | None = None) -> None:
        """Make ready for what the step's micro-batches begin from."""
        self.reduction.reshard()  # what an evaluation since the last step has gathered
        self.recorder.begin_step(watch_attributes="audit" in moment.due, divide_by=divide_by)

    @contextlib.contextmanager
    def _live(self, moment: Moment, kernels: Kernels) -> Iterator[None]:
        """Bracket the live forward and backward."""
        audited = "audit" in moment.due
        keep = audited and self.config.mode == "act"
        with self.reduction.step(keep=keep), running_with(kernels), self._crossing(noted=audited):
            yield

    def _crossing(self, *, noted: bool) -> AbstractContextManager[None]:
        """Where ranks compute batches together: note what a rank computes before it may reach the others of its team."""
        return contextlib.nullcontext() if self.crossings is None else self.crossings.live(noted=noted)

    def _rotate(self, moment: Moment, parts: int) -> None:
        """Audit one micro-batch, if so configured; only where all ranks have equally many, so that all take the same."""
        if self._audits.micro_batch != "rotating" or "audit" not in moment.due:
            return
        if len(set(self.world.gather(parts, step=moment.step, tag=_TAG_DETAILS))) == 1:
            self.audit.rotate(moment.step, parts)

    def _check(self, moment: Moment, losses: list[torch.Tensor], kernels: Kernels) -> tuple[Action, Verdict | None]:
        """Checks, agreement, and on an alarm: find out, decide, act; until the step is clean or must not go on."""
        self._expect_others()
        self._try("audit", lambda: self._own_reading(losses))
        start = self.recorder.attributes
        self.ring.begin(self.recorder.work(moment.step), kernels=kernels, start=start)
        if "audit" in moment.due and "audit" in self.checks:
            self.inquiry.compare(own_replays=2 if self.calibration.due else 0)
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.before_update(moment))
        first_verdict: Verdict | None = None
        first_action = Action.CONTINUE
        done: list[Action] = []
        # One look more than actions, so that whatever the last of them did is looked at too.
        for attempt in range(self.config.recomputes + 2):
            agreed = self._agree(moment.step, _PHASE_UPDATE)
            if agreed.raised("audit", "communicates") and self.audit.strength is not Strength.OFF:
                # A rank that reran such work alone would wait for the others for ever.
                self.audit.communicates = True
                self.calibration.give_up(
                    "the model's forward or backward communicates over the job's process group, so no rank can rerun "
                    "work alone", moment.step,
                )  # fmt: skip
            findings = self._in_hindsight(self.inquiry.find(agreed, moment, losses))
            if not findings:
                self._note_spikes(moment.step)
                self._note_clean(moment, agreed, done)
                break
            if attempt > self.config.recomputes:
                assert first_verdict is not None
                self.response.stop(
                    first_verdict, moment.step, f"{attempt} repairs and recomputations did not give a clean step"
                )
            decided = [(f, self.response.decide(f, moment, self.config.recomputes - attempt)) for f in findings]
            finding, decision = gravest(decided)
            self.response.record(decided, moment)
            if first_verdict is None:
                first_verdict, first_action = finding.verdict, decision.action
            begin = time.perf_counter()
            if not self.response.act(finding, decision, [f for f, _ in decided], moment, losses):
                self._note_unclean(moment, agreed)
                break
            seconds = time.perf_counter() - begin
            done.append(decision.action)
            self.journal.write(
                "action", moment.step, verdict=finding.verdict, action=decision.action, seconds=seconds,
                reason=decision.reason,
            )  # fmt: skip
        self.ring.forget()
        if "audit" in moment.due and "audit" in self.checks and self.calibration.due:
            self.calibration.settle(moment.step)
        return first_action, first_verdict

    def _update(self, moment: Moment, kernels: Kernels) -> None:
        """The update itself; findings made after it ride in the next step's vector."""
        self.reduction.forget()
        if self._rolls_back:
            self.rollback.remember(self.recorder.work(moment.step), kernels)
        ran: list[bool] = []
        told = self.optimizer.register_step_post_hook(lambda *_: ran.append(True))
        norm = self.finite.total_norm if "finite" in self.checks else None
        try:
            self._apply(norm)
        finally:
            told.remove()
        self._updated(moment, skipped=not ran)

    def _updated(self, moment: Moment, skipped: bool) -> None:
        """The step is over: its update was made, or left out."""
        for name, check in self.checks.items():
            self._try(name, lambda check=check: check.after_update(moment, skipped=skipped))
        self.steps += 1
        self._first = False
        self.calibration.updated()

    def _apply(self, norm: torch.Tensor | None = None) -> None:
        """Unscale, clip, step, scaler, scheduler; ``norm`` is that of the gradients, where it is known already."""
        if self.scaler is not None:
            if self.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.inner.parameters(), self.clip_norm)
                self.scaler.step(self.optimizer)  # all or none: an overflow is in the norm, and so in all gradients
            else:
                step_scaled(self.scaler, self.optimizer)
            self.scaler.update()
        else:
            if self.clip_norm is not None and norm is not None:  # what ``clip_grad_norm_`` does with the norm it takes
                nn.utils.clip_grads_with_norm_(self.inner.parameters(), self.clip_norm, norm)
            elif self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.inner.parameters(), self.clip_norm)
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    # ---- finding out -------------------------------------------------------------------------------------------------

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
        vector = self._agreement.pack(step=step, phase=phase, flags=flags, digests=digests)
        agreed = self._agreement.unpack(self.world.reduce_max(vector))
        self.world.patience_s = math.inf
        failed = [name for name in self.checks if agreed.raised("guard", f"error.{name}")]
        if failed:
            self._switch_off(failed, step)
        return agreed

    def _in_hindsight(self, findings: list[Finding]) -> list[Finding]:
        """The findings as they look when what was found before is taken into account."""
        return [replace(f, verdict=self.standing.suspicion.in_hindsight(f.verdict)) for f in findings]

    # ---- trust -------------------------------------------------------------------------------------------------------

    def _note_clean(self, moment: Moment, agreed: Agreed, done: list[Action]) -> None:
        """The step is clean, after what was ``done`` about it."""
        for name in moment.due:
            self._last_run[name] = moment.step
        self._count(moment)
        # A check that has just gone off on some rank vouches for nothing.
        if "replicas" in moment.due and "replicas" in self.checks:
            self.standing.last_clean_vote = moment.step
            self._note_vote(moment, agreed)
        if "audit" not in moment.due or "audit" not in self.checks or self.audit.strength is not Strength.BITWISE:
            return
        if not done and not agreed.raised("audit", "mismatch"):
            self.standing.audited(moment.step)
        elif done and {*done} <= {Action.REPAIR, Action.ROLLBACK}:  # what healthy devices agree on took its place
            self.standing.mended(moment.step)

    def _note_unclean(self, moment: Moment, agreed: Agreed) -> None:
        for name in moment.due:
            self._last_run[name] = moment.step
        self._count(moment)
        if "replicas" not in moment.due or "replicas" not in self.checks:
            return
        if not any(agreed.differs("replicas", d) for d in ("weights", "optimizer_state")):
            self.standing.last_clean_vote = moment.step
        self._note_vote(moment, agreed)

    def _note_vote(self, moment: Moment, agreed: Agreed) -> None:
        """The vote before an update is over the state that the updates before it have left."""
        state = ("counters", "weights", "optimizer_state", "buffers")
        alike = not any(agreed.differs("replicas", d) for d in state)
        self.standing.voted(moment.step, alike=alike)
        if alike:
            self._log_fingerprints()
        last = self.rollback.taken_at
        if not alike or not self._goes_back:
            return
        # The next vote may come too late for the one after: what was kept since would not reach back.
        every, votes = self.config.snapshot_every or 0, self.config.replicas_every or 0
        if last is not None and moment.step - last + votes <= every:
            return
        self.rollback.taken_at = moment.step
        problem = self.rollback.take(moment.step, self.replicas.rows()) if self._rolls_back else ""
        if problem:
            self.journal.say(problem)

    def _log_fingerprints(self) -> None:
        """What the vote has read, so that ``unsilent recheck`` can compare a later run of these steps with it."""
        if self.world.rank == 0 and self.journal.directory is not None:
            self.journal.write(
                "fingerprints", self.steps, steps=self.steps, switched=self._switched,
                undone_after=self.rollback.went_back_to, **(self._try("replicas", self.replicas.fingerprints) or {}),
            )  # fmt: skip
        self._switched, self.rollback.went_back_to = {}, None

    @property
    def counts(self) -> dict[str, int]:
        """How often each check has run on this rank since the start, whatever it found."""
        return dict(self._counts)

    def _note_spikes(self, step: int) -> None:
        """What stood out in this step's updates was looked into, and nothing was wrong with it."""
        found = self.inquiry.confirmed
        if found is None or self.update is None:
            return
        self.update.confirmed()
        ranks, tensors = [s.rank for s in found.spikes], [s.tensor for s in found.spikes]
        told = f"rank {found.spikes[0].rank}, {tensors[0]}: {found.spikes[0].reason}; {found.how}"
        if not found.real:
            self.journal.write("notice", step, text=f"a spike that nobody could look into: {told}")
            self.journal.say(f"step {step}: a spike that nobody could look into: {told}")
            return
        self.journal.write(
            "spike_confirmed", step, check="update", site=Site.GRADIENT, ranks=ranks, tensors=tensors, reason=told
        )
        self.journal.say(f"step {step}: a real spike: {told}")

    def _count(self, moment: Moment) -> None:
        for name in self.checks:
            self._counts[name] += name in ("finite", "update") or name in moment.due

    @property
    def _scales(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def _rolls_back(self) -> bool:
        """Whether what a rollback needs is kept."""
        return self.config.mode == "act" and self._goes_back

    @property
    def _goes_back(self) -> bool:
        """Whether a rollback is among what may be done, or, in observe mode, would be."""
        return not self._nothing_kept()

    def _nothing_kept(self) -> str:
        """Why nothing is kept to go back to, "" where it is."""
        if self._loop is not None:
            return "this loop makes its updates itself, so past ones cannot be made again (guard.watch)"
        if self.config.averaged_every is not None:
            return "past steps cannot be made again where the run averages its weights itself (averaged_every)"
        kept = self.config.snapshot_every is not None and self._replicas_on and self.world.size > 1
        return "" if kept else "nothing is kept to go back to (snapshot_every, replicas_every)"

    def _reruns_hold(self) -> bool:
        """Whether a rerun of ``loss_fn`` gives what the live step has computed: of a loop's own code that must be shown."""
        return self._loop is None or (self.calibration.done and self.audit.strength is Strength.BITWISE)

    @property
    def _replicas_on(self) -> bool:
        return self.config.replicas_every is not None and "replicas" in self.checks

    def _tally(self) -> dict[str, dict[str, int]]:
        """For the log, which rank 0 writes: all ranks run the same checks, so it speaks for all of them."""
        ranks = self.world.size
        return {name: {"ran": n * ranks, "alarms": self.response.alarms[name]} for name, n in self._counts.items()}

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save(self, root: str | Path) -> Path | None:
        """Write a certified checkpoint of the state after the last step; all ranks call it.

        All checks are forced: the vote runs again, now, and the step before should have been announced (``save_every``
        or ``saving=True``) so that it was audited; if it was not, the checkpoint is a candidate until the next clean
        audit certifies it. A certified checkpoint of the same step that is there already is never replaced by one that
        is less. In observe mode it is written whatever the checks find, and never certified where they found something;
        where replicas differ it holds those of the lowest ranks.

        Returns:
            The checkpoint's directory, or None when the checks found something and no file was written.

        Raises:
            IntegrityLost, Quarantine: what was found cannot be put right here.
        """
        with together(self.world, self.journal, CheckpointError, UsageError, OSError):
            self._settle("guard.save")
            self._must_be_one_state()
            self.reduction.reshard()  # what an evaluation has gathered: a checkpoint knows shards
            unsound = self.response.unsound
            alike = not unsound and (not self._replicas_on or self._vote_now(_PHASE_SAVE))
            observe = self.config.mode == "observe"
            if not alike and not observe:
                reason = unsound or "its checks failed"
                self.journal.write("checkpoint_refused", self.steps, path=str(root), reason=reason)
                self.journal.say(f"no checkpoint of step {self.steps} was written: {reason}")
                return None
            store = self.standing.store(root)
            status = self.standing.status_of_next(self.steps) if alike else Status.CANDIDATE
            path = store.save(
                self.inventory,
                steps=self.steps,
                checks=self._checks_run(),
                status=status,
                scaler=self.scaler,
                scheduler=self.scheduler,
                rng=read_generators(),
                guard=self.state_dict(),
                may_differ=observe,
            )
            found = store.status_of(path) or status
            kept = found is Status.CERTIFIED and status is not Status.CERTIFIED
            reason = "a certified one of this step is there already: it is kept, nothing was written" if kept else ""
            self.journal.write(
                "checkpoint", self.steps, steps=self.steps, path=str(path), status=found.value, tally=self._tally(),
                reason=reason,
            )  # fmt: skip
            if kept:
                self.journal.say(f"{path}: {reason}")
            self.standing.saved(store, self.steps, path, found, alike=alike)
            return path

    def load(self, root: str | Path, *, certified: bool = False) -> int:
        """Load the newest checkpoint under ``root`` that is trusted and verifies; all ranks call it.

        Args:
            certified: take certified ones only, no candidates.

        Returns:
            The number of updates completed.

        Raises:
            CheckpointError: nothing is left that can be loaded; the message says what was wrong with each.
            UsageError: the checkpoint is of another model or optimizer.
        """
        with together(self.world, self.journal, CheckpointError, UsageError, OSError):
            self.reduction.reshard()  # what an evaluation has gathered: a checkpoint knows shards
            loaded = self.standing.store(root).load(
                self.inventory, scaler=self.scaler, scheduler=self.scheduler, certified=certified
            )
            for notice in loaded.notices:
                self.journal.write("notice", loaded.steps, text=str(notice))
                self.journal.say(str(notice))
            if loaded.rng is not None:
                write_generators(loaded.rng)
            self._begin_anew(loaded.steps)
            self.standing.begin_anew(
                loaded.steps, store=self.standing.store(root), path=loaded.path, status=loaded.status
            )
            return self.steps

    def _settle(self, before: str) -> None:
        """A watched step whose update was left out is over by now; ``before`` is what was called."""
        if self._loop is not None:
            self._loop.settle(before)

    def _must_be_one_state(self) -> None:
        if self.config.averaged_every is not None:
            raise UsageError(f"the state was not saved: {NO_CHECKPOINT}")

    @property
    def _holds_parts(self) -> bool:
        """Whether ranks hold parts of the state, so that no one of them can certify it."""
        return self._sharded or (self.layout is not None and not self.layout.teams.alone)

    def _checks_run(self) -> tuple[CheckRun, ...]:
        """What has been checked about the present state; where no shard has a second copy, a vote has compared counters only."""
        runs = self.standing.check_runs(self.steps, tuple(self.checks))
        return tuple(replace(run, check="counters") if self._alone and run.check == "replicas" else run for run in runs)

    def _begin_anew(self, steps: int) -> None:
        """The run goes on from a state that was loaded: nothing that was known of the one before holds for it."""
        torch.clear_autocast_cache()
        self.response.unsound = ""
        if self._loop is not None:
            self._loop.begin_anew()
        self._weighing.begin_anew()
        self.rollback.begin_anew()
        self.steps = steps
        self._first = True
        self._last_run = dict.fromkeys(self._schedule.periods, steps)
        self.calibration.begin_anew()

    def _vote_now(self, phase: int) -> bool:
        """A vote after the update. False when it found something; in act mode a lone replica is healed first."""
        self.reduction.reshard()
        self.audit.settled()
        self._try("finite", lambda: self.finite.begin(Moment(step=self.steps, due=frozenset())))
        self._try("replicas", lambda: self.replicas.read(gradients=False))
        for attempt in range(2):
            agreed = self._agree(self.steps, phase)
            if not self._replicas_on:  # it failed on some rank just now
                return True
            self._counts["replicas"] += attempt == 0
            if not self.replicas.alarm(agreed):
                self.standing.voted(self.steps, alike=True)
                self._log_fingerprints()
                return attempt == 0
            if self.config.mode == "observe":
                self.standing.voted(self.steps, alike=False)
            details = self.world.gather(self.replicas.details(), step=self.steps, tag=_TAG_DETAILS)
            evidence = self.replicas.evidence(self.steps, details)
            counters = judge_counters([e for e in evidence if isinstance(e, CounterEvidence)])
            record = {"replicas": evidence}
            voted = [Finding(verdict=counters)] if counters else self.inquiry.find_votes(evidence, record)
            findings = self._in_hindsight(voted)
            if not findings:  # what differs is known to, between unlike environments: no one state to save
                return False
            moment = Moment(step=self.steps, due=frozenset({"replicas"}))
            # The vote before this update was clean, so nobody has computed with the wrong replica yet.
            decided = [(f, self.response.decide(f, moment, 0)) for f in findings]
            self.response.record(decided, moment)
            finding, decision = gravest(decided)
            if decision.action is Action.CONTINUE:
                return False
            begin = time.perf_counter()
            self.response.act_at_rest(finding, decision, findings, self.steps)
            seconds = time.perf_counter() - begin
            self.journal.write(
                "action", self.steps, verdict=finding.verdict, action=decision.action, seconds=seconds,
                reason=decision.reason,
            )  # fmt: skip
        return False

    def certify(self, state: Mapping[str, Any]) -> Certificate:
        """The certificate of a state that another writer is about to write; give the copy that is written.

        All ranks call it together, before the next step: as :meth:`save` does, it holds a vote over the live state, of
        which the copy is one. Where the vote finds something the certificate is distrusted from the start; in observe
        mode it is a candidate that never becomes certified.

        Raises:
            IntegrityLost, Quarantine: what was found cannot be put right here.
            UsageError: a tensor cannot be certified.
            CheckpointError: what the ranks give of a sharded tensor is not the whole of it.
        """
        with together(self.world, self.journal, CheckpointError, UsageError):
            self._settle("guard.certify")
            self._must_be_one_state()
            self.reduction.reshard()  # what an evaluation has gathered: a checkpoint knows shards
            unsound = self.response.unsound
            alike = not unsound and (not self._replicas_on or self._vote_now(_PHASE_SAVE))
            certificate = certify_state(
                state,
                steps=self.steps,
                checks=self._checks_run(),
                world_size=self.world.size,
                ranks=Together(self.world.group, self.world.rank, self.world.size) if self._holds_parts else None,
            )
        if alike or self.config.mode == "observe":
            return certificate
        reason = unsound or "its checks failed"
        self.journal.write("checkpoint_refused", self.steps, reason=reason)
        self.journal.say(f"the state of step {self.steps} is not certified: {reason}")
        return certificate.with_status(Status.DISTRUSTED, reason)

    def may_publish(self, certificate: Certificate) -> str:
        """Whether that state may be called certified: ``"yes"``, ``"no"`` (final), or ``"wait"``.

        ``"yes"`` needs a clean vote over that very state and an audit of every rank at its last step or later. With
        ``replicas_every=None`` nobody votes, and with ``audit_every=None`` nobody audits: then it is never ``"yes"``.
        """
        return may_publish_certificate(certificate, self.standing.trust())

    def attach(self, certificate: Certificate, path: str | Path) -> Certificate:
        """Hash the files that another writer has written into ``path`` and put the certificate beside them."""
        return attach_certificate(certificate, path)

    def state_dict(self) -> dict[str, Any]:
        """What the guard must remember over a restart; always the same keys and shapes."""
        self._settle("guard.state_dict")
        return {"version": 1, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`; all ranks call it, once the state that belongs to it has been loaded."""
        self._begin_anew(int(state.get("steps", 0)))
        self.standing.begin_anew(self.steps)

    # ---- start, end, and what goes wrong with the guard itself -------------------------------------------------------

    def coverage(self) -> tuple[Coverage, ...]:
        """What is looked at in this run, how, when, and what that cannot see."""
        rows = [row for check in self.checks.values() for row in check.coverage()]
        if self.config.averaged_every is not None:
            averaged = f"every {self.config.audit_every} steps, after the weights were averaged"
            rows = [replace(row, when=averaged) if row.check == "audit" else row for row in rows]
        off: list[Coverage] = []
        if self.config.audit_every is None:
            rows = [r for r in rows if r.check != "audit"]
            off += [_uncovered(site, "audit_every is None") for site in ("forward", "backward", "gradient")]
        if self.config.replicas_every is None:
            off += [_uncovered(site, "replicas_every is None") for site in ("weights", "optimizer_state")]
            off.append(_uncovered("reduction", "replicas_every is None: reduced gradients that differ between ranks"))
        for check in (self.finite, self.replicas, self.audit, *(() if self.update is None else (self.update,))):
            if check.name not in self.checks:
                off += [_uncovered(site.value, f"check {check.name} failed and is off") for site in check.sites]
        off.append(_uncovered("batch", "no check: wrong data that all ranks would compute alike is not seen"))
        off.append(_uncovered("optimizer", "an update that is wrong on all ranks alike is not seen"))
        off.append(_uncovered("rng", "generators differ between ranks by design and are not compared"))
        if self.layout is not None and self.layout.stage is not None:
            off.append(_uncovered("optimizer", "settings of parameter groups: a pipeline's stages may have their own"))
        if self._sharded:
            if any(group.scatters for group in self._module_groups):
                blind = (
                    "a wrong weight that an all-gather gives to all ranks alike; given to one of them its audit sees it"
                )
                off.append(_uncovered("weights", blind))
            if self._alone:
                blind = (
                    "shards at rest: a certificate rests on audited steps, counters, and the way to the files and back"
                )
                off.append(_uncovered("checkpoint", blind))
            if self.config.audit.micro_batch == "rotating":
                off.append(
                    _uncovered("gradient", "rotating audits do not exist for sharded models yet: the sum is audited")
                )
        if self.config.update is not None and self.update is None:
            off.append(_uncovered("gradient", "check update does not look at sharded models or optimizers, and is off"))
        if self.reduction.notice:
            off.append(_uncovered("gradient", self.reduction.notice))
        off += () if self._loop is None else self._loop.coverage()
        return (*rows, *off)

    def close(self) -> None:
        """Leave together: a last vote if the run is in order, then the own group is given back. All ranks call it."""
        if self.world.watcher.closed:
            return
        error = sys.exc_info()[1]
        if error is not None and id(error) == self._made_during:
            error = None
        if error is not None:
            tell_at_end(self.world, self.journal, error)
        watcher = self.world.watcher
        orderly = watcher.failure is None and not watcher.posted and error is None
        try:
            self._settle("guard.close")
            # The last average of local SGD need not have been made yet.
            votes = self._replicas_on and self.config.averaged_every is None
            if orderly and self.steps and votes and not self.response.stopped:
                with together(self.world, self.journal):
                    self._vote_now(_PHASE_END)
            self.journal.finished(self.steps, tally=self._tally()) if orderly and not self.response.stopped else None
        except BaseException:
            orderly = False  # the others may have left already: nobody waits for anybody
            raise
        finally:
            self.detach(together=orderly)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            tell_at_end(self.world, self.journal, error)
            self.detach(together=False)

    def detach(self, *, together: bool) -> None:
        """Give back whatever was taken: hooks, handlers, threads, files; ``together`` as in :meth:`World.close`."""
        try:
            with contextlib.suppress(RankFailure, RuntimeError):
                self.world.close(together=together)
        finally:
            self._taken.close()

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
        errors = self.world.gather(dict(self._check_errors), step=step, tag=_TAG_ERRORS)
        for name in names:
            rank, error = next((r, e[name]) for r, e in enumerate(errors) if name in e)
            if self.config.on_guard_error == "raise":
                failure = RankFailure(rank, f"check {name}: {error}")
                self.world.watcher.failure = failure  # so that close() does not ask the failed rank again
                self.journal.rank_failed(failure)
                raise failure
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
        self.journal.write(
            "run_started", self.steps, world_size=self.world.size, nodes=list(self.world.nodes),
            places=[vars(place) for place in self.world.places],
            mode=self.config.mode, quarantine=self.config.quarantine, environment=self.world.environment.digest,
            directory=_absolute(self.config.directory), ledger=_absolute(self.config.ledger),
        )  # fmt: skip
        self._announce_layout()
        self._announce_coverage(self.coverage())
        for text in missing_settings():
            self.journal.say(text)
        apart = max(self.config.snapshot_every or 0, self.config.replicas_every or 0)
        if self._goes_back and apart > self.config.keep_batches:
            self.journal.say(
                f"snapshots may lie {apart} steps apart and the batches of {self.config.keep_batches} steps are kept: a "
                "rollback will not always reach back (keep_batches)"
            )

    def _announce_coverage(self, new: Sequence[Coverage]) -> None:
        """The whole table on record, and its ``new`` rows on the screen."""
        self.journal.write("coverage", self.steps, rows=[vars(row) for row in self.coverage()])
        for row in new:
            covered = f"{row.how}; {row.when}; not seen: {row.blind}" if row.how else f"NOT COVERED: {row.blind}"
            self.journal.say(f"{row.site:<16} {row.check:<9} {covered}")

    def _announce_layout(self) -> None:
        """Which ranks compute together, and who must hold what alike."""
        if self.layout is not None:
            self.journal.say(f"layout: {self.layout}")
        if self._sharded:
            alike = Counter(entry.copies for entry in self.inventory.weights())
            told = [f"{n} on {_listed(copies)}" for copies, n in alike.items() if copies is not None]
            self.journal.say(f"parameters that must be alike, bit for bit: {'; '.join(told)}")

    def _require_localization(self) -> None:
        nodes = sorted({place.node for place in self.world.team_places})
        if len(nodes) < 3:
            together = "" if self.world.teams.alone else " of ranks that compute together"
            raise UsageError(
                f"require_localization needs at least 3 nodes{together}, and this run has {len(nodes)}: {', '.join(nodes)}"
            )

    def _check_names(self) -> None:
        known = {n for n, _ in self.inner.named_buffers()}
        held = {id(p) for p in self.inner.parameters()} | {id(p) for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            if any(id(p) not in held for p in group["params"]):
                raise UsageError(
                    "the optimizer updates a parameter that the model does not hold: nobody could check it"
                )
        for name in self.config.replicated_buffers:
            if name not in known:
                raise UsageError(f"replicated_buffers names {name!r}, and the model has no such buffer")

    @property
    def _audits(self) -> AuditConfig:
        """How audits go here: a micro-batch of a sharded model cannot be told from the sum of those before it yet."""
        return AuditConfig() if self._sharded else self.config.audit

    # ---- shards ------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _module_groups(self) -> tuple[ModuleGroup, ...]:
        return module_groups(self.inner)

    def _weights_digest(self) -> int:
        """One number over the weights that this rank computes with, for a pair to compare; 0 where no other holds them."""
        if not self._sharded:
            return self.replicas.weights_digest(self.recorder.rows)
        if self._alone:
            return 0
        mine = None
        try:
            mine = self.replicas.weights_digest(self.recorder.rows)
        finally:  # the others wait for this rank's part
            everyone = self._exchange(mine)
        held = sorted({rank for group in self._module_groups for rank in group.replica})
        return hash(tuple(everyone[rank] for rank in held))

    def _exchange(self, mine: Any) -> list[Any]:
        return self.world.gather(mine, step=self.steps, tag=_TAG_SHARDS)

    # ---- small readings ----------------------------------------------------------------------------------------------

    def _own_reading(self, losses: list[torch.Tensor]) -> None:
        if self.audit.strength is not Strength.OFF:
            self.audit.record(losses)

    def _weights(self, micro_batches: int, samples: Sequence[int] | None) -> list[float | None]:
        """What each micro-batch counts; all ranks raise together where what is given does not fit."""
        with together(self.world, self.journal):
            self._weighing.must_be_as_before(samples)
        with together(self.world, self.journal, UsageError):
            return self._weighing.weights(micro_batches, samples, step=self.steps)

    def _must_be_sendable(self, parts: list[Any]) -> None:
        """Say in the first step that a batch cannot be sent, and not when it matters; all ranks raise together."""
        audits = self.config.audit_every is not None or "update" in self.checks
        if not self._first or "audit" not in self.checks or not audits:
            return
        problem = ""
        try:
            pack(Work(step=self.steps, micro_batches=tuple(MicroBatch(part, read_generators()) for part in parts)))
        except UsageError as error:
            problem = str(error)
        with together(self.world, self.journal, UsageError):
            problems = self.world.gather(problem, step=self.steps, tag=_TAG_SENDABLE)
            if any(problems):
                raise UsageError(next(text for text in problems if text))

    def _expect_others(self) -> None:
        """Where nothing was reduced here, the others may still wait for it in their backward, and never come."""
        names = self._unreduced_names()
        if names:
            self.world.patience_s = self.config.timeout_s / 2
            self.world.impatience = (
                f"gradients were not reduced on this rank ({', '.join(names[:8])}), while others still wait for them in "
                "backward: it uses other parameters than they do (find_unused_parameters=True may help)"
            )

    def _unreduced_names(self) -> tuple[str, ...]:
        names = {id(p): n.removeprefix("module.") for n, p in self.model.named_parameters()}
        return tuple(names[id(p)] for p in self.reduction.unreduced())

    def _counters(self) -> dict[str, str]:
        """What all ranks must hold alike besides tensors; values as exact text."""
        values = {"step": str(self.steps)}
        stages = self.layout is not None and self.layout.stage is not None  # each may have parameter groups of its own
        for i, group in enumerate(() if stages else self.optimizer.param_groups):
            for key, value in group.items():
                if key == "lr":
                    values[f"learning rate of group {i}"] = repr(float(value))
                elif isinstance(value, (bool, int, float, str, tuple)):
                    values[f"{key} of group {i}"] = repr(value)
        if self.scaler is not None:
            values["scaler scale"] = repr(self.scaler.get_scale())
            values["loss scaler's growth tracker"] = repr(self.scaler._get_growth_tracker())
        if self.scheduler is not None:
            values["scheduler epoch"] = str(self.scheduler.last_epoch)
        return values

    def _scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)


class _Guarded:
    """Hands buckets to a check that may have been switched off, and keeps its errors out of backward."""

    def __init__(self, guard: Guard, check: Check) -> None:
        self._guard, self._check = weakref.ref(guard), check

    def before_reduction(self, bucket: Bucket) -> None:
        guard = self._guard()
        if guard is not None:
            guard._try(self._check.name, lambda: self._check.before_reduction(bucket))


def _absolute(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} alone"
    listed = ", ".join(map(str, ranks[:4]))
    return f"ranks {listed}" if len(ranks) <= 4 else f"{len(ranks)} ranks, {listed}, ..."


def _uncovered(site: str, why: str) -> Coverage:
    return Coverage(site=site, check="-", how="", when="", blind=why)
