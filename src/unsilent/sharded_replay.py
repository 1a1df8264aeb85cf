"""Reruns of a sharded model: all ranks together, each with the work of one rank, in the same order of collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from unsilent.attributes import Attributes
from unsilent.determinism import Kernels, running_with
from unsilent.errors import RankFailure
from unsilent.generators import write_generators
from unsilent.replay import Execution, LossFunction, Replayer, Work, assemble, copy_batch, named
from unsilent.sharded_reduction import Handover, Reduces, ShardedReduction
from unsilent.weighing import share_of
from unsilent.world import World


class ShardedReplayer(Replayer):
    """Reruns work on the sharded model itself. Every method that reruns is called by all ranks at once.

    Args:
        model: the root module.
        reduction: of the model; see :class:`Replayer` for the rest.
    """

    together = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        reduction: ShardedReduction,
        world: World,
        *,
        scale_loss: Callable[[torch.Tensor], torch.Tensor],
        written: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(model, loss_fn, scale_loss=scale_loss, scale=1.0, written=written)
        self._reduction = reduction
        self._world = world

    def run(
        self,
        work: Work,
        *,
        kernels: Kernels,
        start: Attributes | None = None,
        spread: bool = False,
        reduced: bool = False,
        take: Sequence[Handover] = (),
    ) -> Execution:
        """A rerun that leaves no trace. ``spread`` has no meaning here."""
        return self.run_again(work, kernels=kernels, start=start, reduces="aside" if reduced else None, take=take)

    def run_again(
        self,
        work: Work,
        *,
        kernels: Kernels,
        start: Attributes | None = None,
        reduces: Reduces | None = None,
        take: Sequence[Handover] = (),
        give: Sequence[Handover] = (),
        observe: Callable[[torch.Tensor], None] | None = None,
    ) -> Execution:
        """Compute loss, gradients and written buffers of ``work``; this rank's own gradients are not kept.

        Args:
            kernels: the mode that the recorded run had.
            start: attributes to begin from, where the live step took a snapshot of them.
            reduces, take, give, observe: see :meth:`ShardedReduction.again`; generators and buffers are put back in any case.

        Raises:
            RankFailure: it could not be run here, or on another rank; the run cannot go on then.
        """
        try:
            return self._run(work, kernels=kernels, start=start, reduces=reduces, take=take, give=give, observe=observe)
        except RankFailure:
            raise
        except Exception as error:
            # The others wait in this pass for a rank that will not come: all must end, with this reason.
            text = f"a rerun of the work of step {work.step} failed: {type(error).__name__}: {error}"
            self._world.watcher.post(text)
            raise RankFailure(self._world.rank, text) from error

    def _run(
        self,
        work: Work,
        *,
        kernels: Kernels,
        start: Attributes | None,
        reduces: Reduces | None,
        take: Sequence[Handover],
        give: Sequence[Handover],
        observe: Callable[[torch.Tensor], None] | None,
    ) -> Execution:
        with self._preserved(), running_with(kernels):
            if start is not None:
                start.restore()
            before = Attributes(self.inner)
            losses: list[torch.Tensor] = []
            with self._reduction.again(reduces=reduces, take=take, give=give, observe=observe) as recording:
                for i, micro_batch in enumerate(work.micro_batches):
                    if i == 0:  # later ones begin with what the ones before have written here
                        self._restore_buffers(micro_batch.buffers)
                    write_generators(micro_batch.generators)
                    torch.clear_autocast_cache()
                    last = i == len(work.micro_batches) - 1
                    with contextlib.nullcontext() if last else self._reduction.accumulating():
                        loss = self.loss_fn(self.inner, copy_batch(micro_batch.batch))
                        losses.append(loss.detach().clone())
                        if loss.requires_grad:  # a pipeline's schedule has run its own backward
                            share = share_of(loss, weight=micro_batch.weight, divide_by=work.divide_by)
                            self.scale_loss(share).backward()
            buffers = {n: t.clone() for n, t in named(self.inner, work.micro_batches[0].buffers).items()}
            attribute = before.changed()
            left = Attributes(self.inner) if start is not None else None
            reading = assemble(losses, self._reduction.labels(), recording.rows, buffers)
        return Execution(
            reading=reading,
            losses=losses,
            gradients={},
            buffers=buffers,
            attribute=attribute,
            attributes=left,
            extremes=recording.extremes,
            reduced=recording.reduced,
        )
