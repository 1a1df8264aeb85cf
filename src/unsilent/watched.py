"""Loops that own their step: the order that such a loop must keep, so that no gradient is used that nobody has looked at.

``guard.step`` clears gradients, runs the work and updates. Under ``guard.watch`` all of that is the loop's own code: gradients
are cleared, then comes a block for each micro-batch, then one update. Whatever else it does is refused here, in words.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsilent.checks.protocol import Coverage, Moment
from unsilent.determinism import Kernels
from unsilent.errors import UsageError
from unsilent.records import Action, Verdict
from unsilent.reduction import Bucket


@dataclass
class Watched:
    """What a block of ``guard.watch`` gave; it is known once the block has been left.

    Attributes:
        step: the number of updates completed before this step.
        action: what was done; ``CONTINUE`` in a clean step, in observe mode, and in a block that only accumulates.
        verdict: what was found, None when nothing was.
    """

    step: int
    action: Action = Action.CONTINUE
    verdict: Verdict | None = None


class Loop:
    """Holds one loop to its order.

    Args:
        model: what is trained, with its wrapper.
        optimizers: each steps once in an update, in any order; one that the loop leaves out in a step waits for the next.
        reduces: whether gradients are reduced over ranks at all.
        updated: called when a step is over, with its moment and whether no update was made.

    Attributes:
        begun: what the step under way began with, None between two steps.
        divide_by: what each micro-batch of this step divides its loss by.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        reduces: bool,
        updated: Callable[[Moment, bool], None],
    ) -> None:
        self._model, self._reduces, self._updated = model, reduces, updated
        self.begun: tuple[Moment, Kernels] | None = None
        self.divide_by = 1
        self._inside = False
        self._reduced = False  # a gradient was reduced in this block
        self._checked: Moment | None = None  # the step that was looked at, and whose update is to come
        self._optimizers = len(optimizers)
        self._stepped: set[int] = set()  # the optimizers that have made their part of this update
        self._hooks = ExitStack()
        for optimizer in optimizers:
            self._hooks.callback(optimizer.register_step_pre_hook(weakly(self._before_update)).remove)
            self._hooks.callback(optimizer.register_step_post_hook(weakly(self._after_update)).remove)

    def close(self) -> None:
        """Give the optimizers' hooks back."""
        self._hooks.close()

    def before_reduction(self, bucket: Bucket) -> None:
        """As an observer of the reduction: in which block it happens tells whether micro-batches accumulate as said."""
        self._reduced = True

    @contextmanager
    def block(self, *, accumulating: bool, divide_by: int) -> Iterator[None]:
        """Bracket one block; ``begun`` is to be set in the first one of a step.

        Raises:
            UsageError: the loop is out of order.
        """
        self._may_enter(divide_by)
        self._inside, self._reduced = True, False
        try:
            yield
            self._may_leave(accumulating)
        except BaseException:
            self.begin_anew()
            raise
        finally:
            self._inside = False

    def checked(self) -> None:
        """The step was looked at: its update may come."""
        assert self.begun is not None
        self._checked, self.begun = self.begun[0], None

    def settle(self, before: str) -> None:
        """A step that was looked at and not updated since is over: its update was left out.

        Raises:
            UsageError: a block is open; ``before`` says what was called there.
        """
        if self._inside:
            raise UsageError(
                f"{before} was called inside a block of guard.watch: it belongs after the update that follows"
            )
        if self._checked is not None:
            self._over(skipped=not self._stepped)

    def begin_anew(self) -> None:
        """Nothing that was under way goes on."""
        self.begun = self._checked = None
        self._stepped.clear()

    def coverage(self) -> tuple[Coverage, ...]:
        """What is not looked at since the loop owns its step."""
        loss = "guard.watch: the value of the loss, which the loop keeps to itself; gradients and buffers are compared"
        update = (
            "guard.watch: what the loop does to a gradient between the block and the update is not seen, and no past update "
            "can be made again, so that there is no ROLLBACK"
        )
        return tuple(
            Coverage(site=s, check="-", how="", when="", blind=b) for s, b in (("forward", loss), ("optimizer", update))
        )

    # ---- the order ---------------------------------------------------------------------------------------------------

    def _may_enter(self, divide_by: int) -> None:
        if self._inside:
            raise UsageError("a block of guard.watch was entered inside another: leave the one before first")
        if divide_by < 1:
            raise UsageError(
                f"divide_by is {divide_by}: it is the number that the block divides its loss by, 1 or more"
            )
        if self.begun is not None:
            if divide_by != self.divide_by:
                raise UsageError(
                    f"divide_by is {divide_by} in this block of guard.watch and was {self.divide_by} in the step's first one: "
                    "give the same in all blocks of a step"
                )
            return
        self.settle("guard.watch")
        self.divide_by = divide_by
        left = [name for name, p in self._model.named_parameters() if p.grad is not None]
        if left:
            raise UsageError(
                f"gradients are there already when guard.watch begins a step ({left[0]}): call zero_grad() before it, which "
                "sets them to None, and give accumulating=True to all blocks of a step but the last"
            )

    def _may_leave(self, accumulating: bool) -> None:
        if accumulating and self._reduced:
            raise UsageError(
                "gradients were reduced in a block of guard.watch that accumulates: run forward and backward of all "
                "micro-batches but the last under no_sync() (FSDP2: set_requires_gradient_sync(False))"
            )
        there = self._reduced or (not self._reduces and any(p.grad is not None for p in self._model.parameters()))
        if not accumulating and not there:
            what = "reduced" if self._reduces else "made"
            raise UsageError(
                f"no gradient was {what} in the block of guard.watch: forward, through the model that the guard was given, and "
                "backward belong inside it, and the last micro-batch of a step outside of no_sync()"
            )

    def _before_update(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        again = id(optimizer) in self._stepped
        if self._inside or again or (self._checked is None and closure is None):  # a closure may hold the block
            raise _unseen("is about to be made" if not self._inside else "was asked for inside the block")

    def _after_update(self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._checked is None:
            raise _unseen("was made")
        self._stepped.add(id(optimizer))
        if len(self._stepped) == self._optimizers:
            self._over(skipped=False)

    def _over(self, *, skipped: bool) -> None:
        moment, self._checked = self._checked, None
        self._stepped.clear()
        assert moment is not None
        self._updated(moment, skipped)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, for somebody who must not keep its object alive; it does nothing once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        return None if found is None else found(*args)

    return call


def _unseen(how: str) -> UsageError:
    return UsageError(
        f"an update {how} whose gradients no block of guard.watch has looked at: one update follows the last block of each "
        "step, and guard.save, guard.certify and guard.state_dict come after it"
    )
