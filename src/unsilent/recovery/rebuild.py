"""REPAIR and RECOMPUTE: put right local gradients behind this step's reduction and reduce again, in the same layout.

REPAIR: the other ranks' local gradients are still at hand; only the faulty rank's share is computed anew, by a rank
that is known to give the right value. RECOMPUTE: nothing was kept, so every rank computes its own share anew first.
Both end in the same all-reduce of the same buckets, so the bits are those of a step without the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from unsilent.fingerprints import elements
from unsilent.recovery.share import Share
from unsilent.reduction import Reduction
from unsilent.replay import Execution as Run
from unsilent.ring import Ring
from unsilent.world import World

_TAG_OK, _TAG_SPARSE, _TAG_CHANGED = 31, 34, 36


def rebuild(
    world: World,
    reduction: Reduction,
    ring: Ring,
    shares: tuple[Share, ...],
    losses: list[torch.Tensor],
    *,
    observe: Callable[[torch.Tensor], None],
    only: frozenset[int] | None = None,
) -> float | None:
    """Replace the shares, reduce again and write ``.grad``; the same call on all ranks.

    Args:
        losses: this rank's losses of the step; overwritten in place when its share is replaced. Empty on all ranks where
            a loop keeps its losses to itself.
        observe: sees each local buffer just before it is reduced again.
        only: the indices of the buckets to reduce again, where no share is replaced and the others are right; None for
            all.

    Returns:
        By how much the gradient has changed, as a share of the norm of this rank's part of it (NaN where one of them was not
        finite), without a reduction on the rank where it has changed most; None when a rank could not do its part, or a rerun
        did not give the value it had to give.
    """
    mine = next((share for share in shares if share.auditee == world.rank), None)
    runs: dict[int, Run] = {}
    problems: list[str] = []

    def rerun(auditee: int, digest: str | None) -> None:
        try:
            runs[auditee] = ring.rerun(auditee, spread=True)
        except Exception as error:  # noqa: BLE001 - all ranks must learn of it before anyone acts
            problems.append(f"rank {world.rank} could not rerun the work of rank {auditee}: {error}")
            return
        if digest is not None and ring.audit.digest_of(runs[auditee].reading) != digest:
            problems.append(f"rank {world.rank}'s rerun of the work of rank {auditee} gave another value again")

    for share in shares:
        if share.source == world.rank:
            rerun(share.auditee, share.digest)
    kept = reduction.kept or (reduction.ddp is None and bool(shares))
    if not kept and world.rank not in runs and (mine is None or mine.source == world.rank):
        rerun(world.rank, None)
    if any(problems for problems in world.gather(problems, step=ring_step(ring), tag=_TAG_OK)):
        return None

    buffers = _local_buffers(reduction, runs.get(world.rank), kept)
    received: dict[int, torch.Tensor] = {}
    for share in shares:
        if share.source != share.auditee:
            received |= _hand_over(world, reduction, ring, share, runs.get(share.auditee), buffers, losses)
    if world.rank in runs:
        _adopt(ring, runs[world.rank], losses)

    change = _Change()
    if reduction.ddp is None:
        own = runs.get(world.rank)
        _write_directly(reduction, received or ({} if own is None else own.gradients), change)
    recorded = {bucket.index: bucket.buffer for bucket in reduction.buckets}
    for index in sorted(buffers if only is None else only & buffers.keys()):
        observe(buffers[index])
        reduction.put_right(index, buffers[index])
        change.part(buffers[index])
        world.reduce_in_job(buffers[index])
        change.whole(recorded[index], buffers[index])
        reduction.write(index, buffers[index])
    torch.clear_autocast_cache()
    if reduction.ddp is not None:
        return change.share
    everywhere: list[float] = world.gather(change.share, step=ring_step(ring), tag=_TAG_CHANGED)
    return max(everywhere, key=lambda share: math.inf if math.isnan(share) else share)


class _Change:
    """How far the new gradient lies from the recorded one.

    The ranks' parts add up to the gradient, so what one part has changed by is what the gradient has changed by: it is
    seen on every rank, without a message, and measured by the norm of the rank's own part.
    """

    def __init__(self) -> None:
        self._own = self._changed = 0.0

    def part(self, local: torch.Tensor) -> None:
        """This rank's part, before it is added up."""
        self._own += square(local)

    def whole(self, recorded: torch.Tensor, recomputed: torch.Tensor) -> None:
        """The gradient, as it was recorded and as it is now."""
        self._changed += square(recomputed - recorded)

    @property
    def share(self) -> float:
        if self._changed == 0.0:
            return 0.0
        return math.sqrt(self._changed / self._own) if self._own else math.inf


def square(tensor: torch.Tensor) -> float:
    """The squared norm, in double precision."""
    tensor = elements(tensor)
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def ring_step(ring: Ring) -> int:
    """The step whose work the ring holds."""
    return next(iter(ring.works.values())).step if ring.works else 0


def _local_buffers(reduction: Reduction, own: Run | None, kept: bool) -> dict[int, torch.Tensor]:
    """This rank's local buckets: from its rerun where there is one, else the kept ones (zeros if it waits for one)."""
    if reduction.ddp is None:
        return {}
    if own is not None:
        return {b.index: reduction.local(b.index, own.gradients) for b in reduction.buckets}
    if kept:
        return {b.index: reduction.local(b.index) for b in reduction.buckets}
    return {b.index: reduction.local(b.index, {}) for b in reduction.buckets}


def _hand_over(
    world: World,
    reduction: Reduction,
    ring: Ring,
    share: Share,
    run: Run | None,
    buffers: Mapping[int, torch.Tensor],
    losses: list[torch.Tensor],
) -> dict[int, torch.Tensor]:
    """The source sends local buckets, losses and written module buffers; the faulty rank puts them in its place.

    Returns:
        On the faulty rank of a model whose gradients nobody reduces: its gradients, by ``id(parameter)``; else nothing.
    """
    received: dict[int, torch.Tensor] = {}
    alone = [p for p in reduction.inner.parameters() if p.requires_grad] if reduction.ddp is None else []
    if world.rank == share.source:
        assert run is not None
        parts = [reduction.local(bucket.index, run.gradients) for bucket in reduction.buckets]
        for part in [*parts, *(run.gradients.get(id(p), torch.zeros_like(p)) for p in alone)]:
            if part.is_sparse:  # nobody else knows how many indices it has
                world.exchange([(share.auditee, part.cpu())], [], step=ring_step(ring), tag=_TAG_SPARSE)
            else:
                world.send(part.contiguous(), share.auditee)
        if losses:
            world.send(torch.stack([loss.reshape(()) for loss in run.losses]), share.auditee)
        for name in sorted(run.buffers):
            world.send(run.buffers[name], share.auditee)
    elif world.rank == share.auditee:
        for p in alone:
            like = p if p.grad is None else p.grad
            received[id(p)] = (
                torch.empty_like(like) if like.is_sparse else torch.empty(p.shape, dtype=p.dtype, device=p.device)
            )
        for buffer in [*(buffers[bucket.index] for bucket in reduction.buckets), *received.values()]:
            if buffer.is_sparse:
                got = world.exchange([], [share.source], step=ring_step(ring), tag=_TAG_SPARSE)
                buffer.copy_(got[share.source])
            else:
                world.receive(buffer, share.source)
        if losses:
            right = torch.stack([loss.detach().reshape(()) for loss in losses])
            world.receive(right, share.source)
            put_losses(losses, list(right))
        # The names travelled with the work, so both sides send and receive the same ones.
        written = {n: t.clone() for n, t in ring.works[world.rank].micro_batches[0].buffers.items()}
        for name in sorted(written):
            world.receive(written[name], share.source)
        ring.replayer.write_buffers(written)
    return received


def _adopt(ring: Ring, run: Run, losses: list[torch.Tensor]) -> None:
    """This rank's own rerun takes the place of its live run."""
    put_losses(losses, run.losses)
    ring.replayer.adopt(run)


def put_losses(losses: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Overwrite the step's losses in place; there are none where a loop keeps them to itself."""
    for loss, value in zip(losses, values if losses else (), strict=True):
        loss.copy_(value.reshape(loss.shape))


def _write_directly(reduction: Reduction, gradients: Mapping[int, torch.Tensor], change: _Change) -> None:
    """Without a reduction the local gradient is the gradient."""
    for parameter in reduction.inner.parameters():
        if id(parameter) in gradients and parameter.grad is not None:
            change.part(gradients[id(parameter)])
            change.whole(parameter.grad, gradients[id(parameter)])
            parameter.grad.copy_(gradients[id(parameter)])
