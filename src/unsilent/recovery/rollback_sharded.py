"""ROLLBACK of a sharded model: the kept steps again, each as forward, backward and reduction on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from unsilent.recovery.rebuild_sharded import Pass, make_again
from unsilent.recovery.rollback import TAG_RAN, PastStep, Rollback, swap_works
from unsilent.recovery.snapshot import put_settings
from unsilent.replay import Execution
from unsilent.sharded_replay import ShardedReplayer


class ShardedRollback(Rollback):
    """See :class:`Rollback`; its ``replayer`` is a :class:`ShardedReplayer`."""

    def _redo(self, past: PastStep, *, first: bool, substitutes: Mapping[int, int]) -> str:
        return self._again(past, first=first, substitutes=substitutes, observe=None)[1]

    def _redo_current(
        self,
        current: PastStep,
        losses: Sequence[torch.Tensor],
        *,
        first: bool,
        substitutes: Mapping[int, int],
        observe: Callable[[torch.Tensor], None],
    ) -> str:
        made, problem = self._again(current, first=first, substitutes=substitutes, observe=observe)
        if made is None:
            return problem
        for loss, value in zip(losses, made.losses, strict=True):
            loss.copy_(value.reshape(loss.shape))
        return ""

    def _again(
        self,
        past: PastStep,
        *,
        first: bool,
        substitutes: Mapping[int, int],
        observe: Callable[[torch.Tensor], None] | None,
    ) -> tuple[Execution | None, str]:
        replayer = self._replayer
        assert isinstance(replayer, ShardedReplayer)
        self._set_training(past.training)
        work = self._from_here(past.work, first=first)
        works, problem = swap_works(self._world, work, substitutes)
        if problem := self._first_problem(work.step, problem, TAG_RAN):
            return None, problem
        again = Pass(works=works, substitutes=substitutes, wanted={}, kernels=past.kernels)
        made, problem = make_again(self._world, replayer, again, digest_of=lambda reading: "", observe=observe)
        if made is None:
            return None, problem
        stateful = f"the forward changes {made.attribute}, which lies outside of buffers" if made.attribute else ""
        if problem := self._first_problem(work.step, stateful, TAG_RAN):
            return None, problem
        replayer.write_buffers(made.buffers)
        if self._inventory.optimizer is not None:
            put_settings(self._inventory.optimizer, past.settings)
        return made, ""
