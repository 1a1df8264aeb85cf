"""REPAIR and RECOMPUTE of a sharded model: forward, backward and reduction of the step again, on all ranks together.

Where one rank's own rerun gives the right value, or nothing is known to be wrong, one pass is enough, and none where the
inquiry has made one already. Where a rank errs in every execution, a first pass, unless the inquiry's arbiter has made it, brings
the gradients of another rank's rerun of its work, chunk by chunk, to all ranks; in the second they take the place of its own, just
before each reduction. So no gradient of the whole model is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unsilent.attributes import Attributes
from unsilent.determinism import Kernels
from unsilent.recovery.rebuild import put_losses, square
from unsilent.recovery.share import Share
from unsilent.replay import Execution, Reading, Work
from unsilent.ring import Lent, Ring
from unsilent.sharded_reduction import Handover
from unsilent.sharded_replay import ShardedReplayer
from unsilent.sharding import local
from unsilent.world import World

_TAG_RIGHT, _TAG_CHANGE, _TAG_READY = 32, 33, 35


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What every rank runs when a step is made again.

    Attributes:
        works: by rank, the work that this rank holds: its own, and that of those whom it stands in for.
        substitutes: for each rank whose own gradients must not be used, who computes them; whole teams at a time.
        wanted: for each rank that is run again by somebody, the digest that must come out; None, also where it is
            missing, for any.
    """

    works: Mapping[int, Work]
    substitutes: Mapping[int, int]
    wanted: Mapping[int, str | None]
    kernels: Kernels
    start: Attributes | None = None


def make_again(
    world: World,
    replayer: ShardedReplayer,
    again: Pass,
    *,
    digest_of: Callable[[Reading], str],
    observe: Callable[[torch.Tensor], None] | None = None,
    lent: Sequence[Lent] = (),
) -> tuple[Execution | None, str]:
    """Run a step's forward, backward and reduction again, and leave the gradients in ``.grad``; on all ranks together.

    Args:
        lent: gradients that are spread already, some of substitutes among them.

    Returns:
        What this rank's work gives, its losses and buffers those of its substitute where it has one; None and why, where a
        rank could not do its part or a rerun did not give what it had to give.
    """
    mine = world.rank
    handovers: list[Handover] = []
    stood_in: dict[int, Execution] = {}
    problem = ""

    def run(auditee: int, **options: Any) -> Execution:
        nonlocal problem
        work = again.works.get(auditee, again.works[mine])
        made = replayer.run_again(work, kernels=again.kernels, start=again.start, **options)
        wanted = again.wanted.get(auditee)
        if auditee not in again.works:
            problem = problem or f"the work of rank {auditee} did not arrive at rank {mine}"
        elif auditee == mine and mine in again.substitutes:
            return made  # somebody else's takes its place: nothing is expected of it
        elif wanted is not None and digest_of(made.reading) != wanted:
            problem = problem or f"rank {mine}'s rerun of the work of rank {auditee} gave another value again"
        return made

    for lead in sorted({world.teams.lead(rank) for rank in again.substitutes}):
        auditee = world.teams.counterpart(mine, lead)
        source = again.substitutes[auditee]
        spread = [one for one in lent if (one.handover.source, one.handover.auditee) == (source, auditee)]
        if spread:
            handover, made = spread[0].handover, spread[0].run  # what it gave is why it is the source
        else:
            handover = Handover(world, source=source, auditee=auditee)
            made = run(auditee if mine == source else mine, take=(handover,))
            if failed := _first(world.gather(problem, step=again.works[mine].step, tag=_TAG_RIGHT)):
                return None, failed
        if mine == source:
            assert made is not None
            stood_in[auditee] = made
        handovers.append(handover)
    made = run(mine, reduces="in place", give=tuple(handovers), observe=observe)
    if failed := _first(world.gather(problem, step=again.works[mine].step, tag=_TAG_RIGHT)):
        return None, failed
    _swap_results(world, again, stood_in, made)
    return made, ""


def rebuild_sharded(
    world: World,
    replayer: ShardedReplayer,
    ring: Ring,
    shares: Sequence[Share],
    losses: list[torch.Tensor],
    *,
    recorded: str | None,
    measured: bool,
    observe: Callable[[torch.Tensor], None],
) -> float | None:
    """Make this step's gradients again with the shares in place; see :func:`unsilent.recovery.rebuild.rebuild`.

    Args:
        recorded: the digest of this rank's live run, which its rerun must give again unless a share says otherwise; None
            for any.
        measured: measure by how much the gradient has changed; without it, it is taken not to have.
    """
    substitutes = {share.auditee: share.source for share in shares if share.source != share.auditee}
    again = Pass(
        works=ring.works,
        substitutes=substitutes,
        wanted={world.rank: recorded} | {share.auditee: share.digest for share in shares},
        kernels=ring.kernels,
        start=ring.start,
    )
    before = _gradients(replayer) if measured else []  # themselves: the pass leaves others in their place
    ready, lent = ring.ready, () if ring.stale else ring.lent
    ring.forget()
    made = None
    if shares and not substitutes and not ring.stale:
        made = _take(world, replayer, ready, again, digest_of=ring.audit.digest_of, observe=observe)
    if made is None:
        made, _ = make_again(world, replayer, again, digest_of=ring.audit.digest_of, observe=observe, lent=lent)
    if made is None:
        return None
    put_losses(losses, made.losses)
    replayer.adopt(made)
    torch.clear_autocast_cache()
    return _change(world, before, _gradients(replayer), again.works[world.rank].step) if measured else 0.0


def _take(
    world: World,
    replayer: ShardedReplayer,
    ready: Execution | None,
    again: Pass,
    *,
    digest_of: Callable[[Reading], str],
    observe: Callable[[torch.Tensor], None],
) -> Execution | None:
    """The gradients that the last rerun of the inquiry has made, if on all ranks it has given what it had to give."""
    right = ready is not None and again.wanted.get(world.rank) in (None, digest_of(ready.reading))
    if not all(world.gather(right, step=again.works[world.rank].step, tag=_TAG_READY)):
        return None
    assert ready is not None
    for parameter in replayer.inner.parameters():
        parameter.grad = ready.reduced.get(id(parameter))
    for extreme in ready.extremes:
        observe(extreme)
    return ready


def _swap_results(world: World, again: Pass, stood_in: Mapping[int, Execution], made: Execution) -> None:
    """Losses and written buffers of whoever has a substitute come from there."""
    for auditee, source in sorted(again.substitutes.items()):
        if world.rank == source:
            theirs = stood_in[auditee]
            world.send(torch.stack([loss.reshape(()) for loss in theirs.losses]), auditee)
            for name in sorted(theirs.buffers):
                world.send(theirs.buffers[name], auditee)
        elif world.rank == auditee:
            right = torch.stack([loss.reshape(()) for loss in made.losses])
            world.receive(right, source)
            made.losses[:] = list(right)
            made.attributes = None  # its own run's are those of a device that errs
            for name in sorted(made.buffers):
                world.receive(made.buffers[name], source)


def _gradients(replayer: ShardedReplayer) -> list[torch.Tensor]:
    return [local(p.grad) for p in replayer.inner.parameters() if p.grad is not None]


def _change(world: World, before: list[torch.Tensor], after: list[torch.Tensor], step: int) -> float:
    """By how much the gradient has changed, as a share of its norm, over all shards."""
    squares = [square(b - a) for a, b in zip(before, after, strict=True)] if len(before) == len(after) else [math.nan]
    everyone = world.gather((sum(squares), sum(map(square, after))), step=step, tag=_TAG_CHANGE)
    changed, whole = (sum(part) for part in zip(*everyone, strict=True))
    if changed == 0.0:
        return 0.0
    return math.sqrt(changed / whole) if whole else math.inf


def _first(problems: Sequence[str]) -> str:
    return next((text for text in problems if text), "")
