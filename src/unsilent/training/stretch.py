"""A stretch of a run of ``unsilent train``, run again from a checkpoint so that its values can be compared.

It runs what the run has run: the same samples, the same learning rates, the same kernels in the same steps, gradients
reduced in the same bucket layout. Nothing of the run's own directory is changed.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from unsilent.config import GuardConfig
from unsilent.determinism import Kernels, running_with
from unsilent.errors import UsageError
from unsilent.generators import read_generators, write_generators
from unsilent.guard import Guard
from unsilent.training.loop import Options, Trainer
from unsilent.training.model import LossFn
from unsilent.training.ranks import Ranks, join


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What to run again.

    Attributes:
        options: of the run.
        data_sha256: of the text that it trained on.
        checkpoint: where to begin.
        until: the last step.
        fresh_layout: the run's own process began at this checkpoint, so that its first step reduced in the bucket layout
            of a fresh DDP object.
        kernels: the steps that did not run with the default ones.
    """

    options: Options
    data_sha256: str
    checkpoint: Path
    until: int
    fresh_layout: bool
    kernels: Mapping[int, Kernels]


def run_again(stretch: Stretch, ranks: Ranks, out: Path) -> None:
    """Run it on these ranks; the log in ``out`` then holds the fingerprints of every step. All ranks call it.

    Raises:
        UsageError: the text is not the run's, or the checkpoint is of another model.
        CheckpointError: the checkpoint does not verify, or is distrusted.
    """
    join(ranks)
    _Again(stretch, ranks, out).run_stretch()


class _Again(Trainer):
    def __init__(self, stretch: Stretch, ranks: Ranks, out: Path) -> None:
        super().__init__(replace(stretch.options, out=out), ranks, None)
        self.stretch = stretch

    def run_stretch(self) -> None:
        stretch = self.stretch
        self._build()
        if isinstance(self.model, DistributedDataParallel) and not stretch.fresh_layout:
            warm_up(self.model, self.loss_fn, self.data.batch(0, self.ranks.rank).to(self.ranks.device))
        config = GuardConfig(
            mode="observe",
            audit_every=None,  # and no update check, which asks for audits: an audit may switch kernels
            update=None,
            replicas_every=1,
            directory=self.options.out,
        )
        with contextlib.redirect_stderr(io.StringIO()):  # what this guard covers is nobody's question here
            guard = self._guard = Guard(
                self.model,
                self.optimizer,
                self.loss_fn,
                scheduler=self.scheduler,
                clip_norm=self.options.clip,
                config=config,
            )
        with guard:
            if self.data.digest != stretch.data_sha256:
                raise UsageError("the training text here is not the run's: nothing can be compared")
            guard.load(stretch.checkpoint)
            while guard.steps <= stretch.until:
                with running_with(stretch.kernels.get(guard.steps, Kernels.DEFAULT)):
                    self._step(guard.steps)


def warm_up(ddp: DistributedDataParallel, loss_fn: LossFn, batch: torch.Tensor) -> None:
    """One forward and backward whose results are thrown away, after which DDP reduces in the layout of a running job.

    After its first backward DDP lays its buckets out anew, in the order in which gradients came, and sums in another
    order change bits at three ranks and more. Weights, buffers, generators and ``.grad`` are afterwards as before.
    """
    generators = read_generators()
    buffers = [(buffer, buffer.detach().clone()) for buffer in ddp.module.buffers()]
    loss_fn(ddp, batch).backward()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter in ddp.parameters():
            parameter.grad = None
    write_generators(generators)
