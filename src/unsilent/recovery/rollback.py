"""ROLLBACK: go back to a trusted state in memory, and run the steps since then again from their kept batches.

Each rank reruns its own work on the inner module; the work of a device that is known to be bad is rerun by its auditor.
Gradients are reduced again in the bucket layout that the step had, and the same update follows, so that the state ends
with the bits of a run in which the fault never was. The step that is under way comes last; its update is left to the
guard, which looks at it again first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unsilent.determinism import Kernels
from unsilent.inventory import Inventory
from unsilent.recovery.snapshot import Settings, Snapshot, put_settings, restore, settings_of, take
from unsilent.reduction import Bucket, Reduction
from unsilent.replay import Execution, Replayer, Work, pack, unpack
from unsilent.sharded_reduction import ShardedReduction
from unsilent.world import World

_TAG_READY, _TAG_BUFFERS, _TAG_WORK, TAG_RAN, _TAG_SHARE = 50, 51, 52, 53, 54


@dataclass(frozen=True, kw_only=True)
class PastStep:
    """What running one step again needs.

    Attributes:
        kernels: the mode that its forward and backward had.
        buckets: the layout in which its gradients were reduced, without the memory; empty where nothing is reduced.
        with_gradient: the parameters that its update found a gradient on.
        settings: of each parameter group, as its update used them.
        training: the training flag of each module.
    """

    work: Work
    kernels: Kernels
    buckets: tuple[Bucket, ...]
    with_gradient: tuple[nn.Parameter, ...]
    settings: Settings
    training: tuple[bool, ...]


class Rollback:
    """Keeps the snapshot and the last steps' work of one guard, and goes back to them.

    Args:
        update: unscale, clip, optimizer step, scaler, scheduler, as the guard does it.
        keep: the work of so many steps is kept, at most.
    """

    def __init__(
        self,
        world: World,
        inventory: Inventory,
        reduction: Reduction | ShardedReduction,
        replayer: Replayer,
        *,
        update: Callable[[], None],
        scaler: Any,
        scheduler: Any,
        keep: int,
    ) -> None:
        self._world, self._inventory, self._reduction, self._replayer = world, inventory, reduction, replayer
        self._update, self._scaler, self._scheduler = update, scaler, scheduler
        self._inner: nn.Module = replayer.inner
        self._trouble = ""
        self._past: deque[PastStep] = deque(maxlen=keep)
        #: what there is on this rank; None where there was no memory for it
        self.snapshot: Snapshot | None = None
        #: the step of the last snapshot, alike on all ranks whatever became of the copy on one of them
        self.taken_at: int | None = None
        #: where the last rollback went back to, until the log has it
        self.went_back_to: int | None = None

    def begin_anew(self) -> None:
        """Another state was loaded: what was kept does not lead to it."""
        self._past.clear()
        self.snapshot = self.taken_at = None

    def remember(self, work: Work, kernels: Kernels) -> None:
        """The gradients of a step are there, and its update follows."""
        try:
            self._past.append(self.describe(work, kernels))
        except Exception as error:  # noqa: BLE001 - P4: an odd optimizer does not end a healthy run, it cannot go back
            self._past.clear()
            self._trouble = f"step {work.step} could not be kept: {error}"

    def describe(self, work: Work, kernels: Kernels) -> PastStep:
        """The step that is under way, once its gradients are there."""
        layout = [replace(b, buffer=b.buffer.to("meta"), rows=None) for b in self._reduction.buckets]
        return PastStep(
            work=work,
            kernels=kernels,
            buckets=tuple(layout),
            with_gradient=tuple(p for p in self._inner.parameters() if p.grad is not None),
            settings=settings_of(self._inventory.optimizer),
            training=tuple(m.training for m in self._inner.modules()),
        )

    def take(self, step: int, rows: Mapping[str, torch.Tensor]) -> str:
        """Take a snapshot at the start of ``step``; ``rows`` are the sums that its clean vote has read.

        Returns:
            Why there is none on this rank, "" when there is; a rollback would say so on all ranks.
        """
        try:
            self.snapshot = take(
                step, self._inventory, rows, scaler=self._scaler, scheduler=self._scheduler, reuse=self.snapshot
            )
        except Exception as error:  # noqa: BLE001 - no memory, or an optimizer that cannot be copied: as above
            self.snapshot = None
            return f"no snapshot could be taken at step {step}: {error}"
        return ""

    def problem(self, step: int, *, start: int, substitutes: Mapping[int, int], snapshot: bool) -> str:
        """Why some rank cannot come from the state at the start of ``start`` to that of ``step``; "" when all can.

        Args:
            substitutes: for each rank whose device is known to be bad, the rank that reruns its work.
            snapshot: the state is to be that of the snapshot, which must then be there and sound.
        """
        return self._first_problem(step, self._own_problem(step, start, substitutes, snapshot), _TAG_READY)

    def restore(self) -> None:
        """Make the live state that of the snapshot."""
        assert self.snapshot is not None
        restore(self.snapshot, self._inventory, scaler=self._scaler, scheduler=self._scheduler)

    def come_forward(
        self,
        *,
        start: int,
        current: PastStep | None,
        losses: Sequence[torch.Tensor],
        substitutes: Mapping[int, int],
        observe: Callable[[torch.Tensor], None],
    ) -> str:
        """From the state at the start of ``start``, which is live by now, run all kept steps again; on all ranks.

        Args:
            current: the step that is under way, if one is: its gradients are made anew too, and not yet applied.
            losses: this rank's losses of ``current``; overwritten in place.
            observe: sees each local buffer of ``current`` just before it is reduced.

        Returns:
            Why it could not be done, "" when it was; after a reason the state is good for nothing.
        """
        kept = [past for past in self._past if past.work.step >= start]
        self.went_back_to = start
        gradients = [(p, p.grad) for p in self._inner.parameters()]
        training = [m.training for m in self._inner.modules()]
        try:
            for past in kept:
                problem = self._redo(past, first=past is kept[0], substitutes=substitutes)
                if problem:
                    return problem
                self._update()
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._set_training(training)
        if current is None:
            return ""
        return self._redo_current(current, losses, first=not kept, substitutes=substitutes, observe=observe)

    def _redo(self, past: PastStep, *, first: bool, substitutes: Mapping[int, int]) -> str:
        """The gradients of one step, into ``.grad``, ready for its update; or why some rank could not make them."""
        made, problem = self._run_again(past, first=first, substitutes=substitutes)
        if made is None:
            return problem
        self._reduce(made)
        self._put_gradients(past, made)
        return ""

    def _redo_current(
        self,
        current: PastStep,
        losses: Sequence[torch.Tensor],
        *,
        first: bool,
        substitutes: Mapping[int, int],
        observe: Callable[[torch.Tensor], None],
    ) -> str:
        """The same for the step that is under way: its gradients are written where they are, and its losses too."""
        made, problem = self._run_again(current, first=first, substitutes=substitutes)
        if made is None:
            return problem
        for buffer in made.buffers.values():
            observe(buffer)
        reduction = self._reduction
        assert isinstance(reduction, Reduction)
        for index, buffer in made.buffers.items():
            reduction.put_right(index, buffer)
        self._reduce(made)
        for index, buffer in made.buffers.items():
            reduction.write(index, buffer)
        if not reduction.reduces:
            for parameter in current.with_gradient:
                assert parameter.grad is not None
                parameter.grad.copy_(made.gradients[id(parameter)])
        for loss, value in zip(losses, made.losses, strict=True):
            loss.copy_(value.reshape(loss.shape))
        return ""

    def _own_problem(self, step: int, start: int, substitutes: Mapping[int, int], snapshot: bool) -> str:
        """Why this rank cannot do it, "" when it can."""
        kept = [past for past in self._past if past.work.step >= start]
        if [past.work.step for past in kept] != list(range(start, step)):
            return f"the batches since step {start} are not kept" + (f": {self._trouble}" if self._trouble else "")
        if set(substitutes) & set(substitutes.values()):
            return "the auditor of a device that is known to be bad is known to be bad itself"
        late = [past.work.step for past in kept if any(m.synchronised for m in past.work.micro_batches[1:])]
        if late:
            return f"DDP has synchronised buffers between the micro-batches of step {late[0]}"
        groups = [] if self._inventory.optimizer is None else self._inventory.optimizer.param_groups
        if any(len(past.settings) != len(groups) for past in kept):
            return "the optimizer has other parameter groups than it had then"
        if not snapshot:
            return ""
        if self.snapshot is None or self.snapshot.step != start:
            return f"there is no snapshot of step {start}"
        damaged = self.snapshot.damage()
        return f"the snapshot of step {start} is damaged: {damaged}" if damaged else ""

    def _first_problem(self, step: int, problem: str, tag: int) -> str:
        problems = self._world.gather(problem, step=step, tag=tag)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")

    def _run_again(self, past: PastStep, *, first: bool, substitutes: Mapping[int, int]) -> tuple[_Made | None, str]:
        """One step's local gradients, losses and buffers on this rank, or why some rank could not make them."""
        step, rank = past.work.step, self._world.rank
        self._set_training(past.training)
        work = self._from_here(past.work, first=first)
        others = {auditee: source for auditee, source in substitutes.items() if rank in (auditee, source)}
        works, problem = swap_works(self._world, work, substitutes)
        if rank in substitutes:
            del works[rank]
        made: dict[int, _Made] = {}
        try:
            for auditee, its in works.items():
                run = self._replayer.run(its, kernels=past.kernels, spread=True)
                if run.attribute:
                    problem = f"the forward changes {run.attribute}, which lies outside of buffers"
                made[auditee] = _Made.of(run, past)
        except Exception as error:  # noqa: BLE001 - all ranks must learn of it before anyone acts
            problem = f"step {step} could not be run again: {type(error).__name__}: {error}"
        problem = self._first_problem(step, problem, TAG_RAN)
        if problem:
            return None, problem
        for auditee, source in others.items():
            sends = [(auditee, made[auditee].on_host())] if rank == source else []
            got = self._world.exchange(sends, [source] if rank == auditee else [], step=step, tag=_TAG_SHARE)
            if source in got:
                made[rank] = got[source].to(self._world.device, like=past)
        self._replayer.write_buffers(made[rank].written)
        if self._inventory.optimizer is not None:
            put_settings(self._inventory.optimizer, past.settings)
        return made[rank], ""

    def _from_here(self, work: Work, *, first: bool) -> Work:
        """The work as it would have begun from the state at hand: only the first step's capture is still to be believed."""
        head = work.micro_batches[0]
        if not first:
            live: dict[str, torch.Tensor] = {
                **dict(self._inner.named_parameters()),
                **dict(self._inner.named_buffers()),
            }
            begin = {name: live[name].detach().clone() for name in head.buffers}
            if head.synchronised:
                buffers = {n: b for n, b in begin.items() if n in dict(self._inner.named_buffers())}
                begin |= self._as_on_rank_0(buffers, work.step)
            # In place: whoever holds this work, the next rollback among them, must not begin from the wrong capture.
            head.buffers = begin
        return work

    def _as_on_rank_0(self, buffers: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        """DDP gives rank 0's buffers to all before the forward."""
        mine = {n: b.cpu() for n, b in buffers.items()} if self._world.rank == 0 else None
        theirs: dict[str, torch.Tensor] = self._world.gather(mine, step=step, tag=_TAG_BUFFERS)[0]
        return {name: theirs[name].to(buffer.device) for name, buffer in buffers.items()}

    def _reduce(self, made: _Made) -> None:
        for index in sorted(made.buffers):
            self._world.reduce_in_job(made.buffers[index])

    def _put_gradients(self, past: PastStep, made: _Made) -> None:
        for parameter in self._inner.parameters():
            parameter.grad = None
        found = dict(made.gradients)
        for bucket in past.buckets:
            found |= {id(p): view for p, view in bucket.views(made.buffers[bucket.index])}
        for parameter in past.with_gradient:
            # Memory of its own, as in the live step: some kernels add up in another order where a tensor is not aligned.
            gradient = found[id(parameter)]
            parameter.grad = gradient if self._reduction.grads_are_views else gradient.clone()

    def _set_training(self, flags: Sequence[bool]) -> None:
        for module, flag in zip(self._inner.modules(), flags, strict=True):
            module.training = flag


def swap_works(world: World, work: Work, substitutes: Mapping[int, int]) -> tuple[dict[int, Work], str]:
    """Bring the work of each rank that has a substitute there; on all ranks.

    Returns:
        The works that this rank holds now, its own among them, and why one of them could not be sent or read.
    """
    works, problem = {world.rank: work}, ""
    for auditee, source in substitutes.items():
        if world.rank not in (auditee, source):
            continue
        parcel = b""
        if world.rank == auditee:
            try:
                parcel = pack(work)
            except Exception as error:  # noqa: BLE001 - all ranks must learn of it before anyone acts
                problem = f"its work cannot be sent: {error}"
        sends = [(source, parcel)] if world.rank == auditee else []
        receives = [auditee] if world.rank == source else []
        got = world.exchange(sends, receives, step=work.step, tag=_TAG_WORK)
        try:
            works |= {rank: unpack(data, world.device) for rank, data in got.items() if data}
        except Exception as error:  # noqa: BLE001 - as above
            problem = f"the work of rank {auditee} cannot be read: {error}"
    return works, problem


@dataclass
class _Made:
    """A rank's share of one step.

    ``buffers`` are its local buckets by index, ``written`` what its forward has written. ``gradients`` by
    ``id(parameter)`` serve where nothing is reduced, and never leave the rank.
    """

    buffers: dict[int, torch.Tensor]
    losses: list[torch.Tensor]
    written: dict[str, torch.Tensor]
    gradients: dict[int, torch.Tensor]

    @classmethod
    def of(cls, run: Execution, past: PastStep) -> _Made:
        packed = {bucket.index: bucket.pack(run.gradients) for bucket in past.buckets}
        return cls(packed, run.losses, run.buffers, {} if packed else run.gradients)

    def on_host(self) -> _Made:
        return _Made(
            {i: b.cpu() for i, b in self.buffers.items()},
            [loss.cpu() for loss in self.losses],
            {n: t.cpu() for n, t in self.written.items()},
            {},
        )

    def to(self, device: torch.device, *, like: PastStep) -> _Made:
        return _Made(
            {b.index: self.buffers[b.index].to(b.parameters[0].device) for b in like.buckets},
            [loss.to(device) for loss in self.losses],
            self.written,
            {},
        )
