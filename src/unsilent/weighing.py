"""How much each micro-batch counts in a step's gradient.

By default a rank's micro-batches count alike, and so do the ranks. Where a global batch does not divide over the ranks,
each micro-batch counts by its samples: DDP takes the mean over W ranks, so a loss that is the mean over n samples is
multiplied by n · W / N, N the samples of all ranks, and what comes out is the mean over all N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unsilent.errors import UsageError
from unsilent.world import World

_TAG_SAMPLES = 16


def share_of(loss: torch.Tensor, *, weight: float | None, divide_by: int) -> torch.Tensor:
    """What of a micro-batch's loss goes into the step's gradient; the live run and every replay ask here."""
    if weight is not None:
        return loss * weight
    return loss / divide_by if divide_by > 1 else loss


def mean_loss(losses: Sequence[torch.Tensor], weights: Sequence[float | None]) -> torch.Tensor:
    """The mean of one rank's losses, each counted by its weight, or all alike where they have none."""
    if len(losses) == 1:
        return losses[0]
    stacked = torch.stack(list(losses))
    if weights[0] is None:
        return stacked.mean()
    shares = torch.tensor(weights, dtype=stacked.dtype, device=stacked.device)
    return (stacked * shares).sum() / shares.sum()


class Weighing:
    """The weights of each step, agreed on by all ranks.

    Whether samples are given is settled by the first step: a rank that gave none would not come to the agreement.

    Args:
        averages: whether gradients are averaged over the ranks; without, each rank's step is its own.
    """

    def __init__(self, world: World, *, averages: bool) -> None:
        self._world, self._averages = world, averages
        self._given: bool | None = None

    def begin_anew(self) -> None:
        """The next step is a first one again."""
        self._given = None

    def must_be_as_before(self, samples: Sequence[int] | None) -> None:
        """Raise where this rank gives samples in some steps only: the others would wait for it, or it for them."""
        if self._given is not None and self._given != (samples is not None):
            now, before = ("not given", "given") if self._given else ("given", "not given")
            raise UsageError(f"samples is {now} in this step and was {before} before: give it in every step or in none")

    def weights(self, micro_batches: int, samples: Sequence[int] | None, *, step: int) -> list[float | None]:
        """What each loss of this rank is multiplied by; all ranks call it.

        Raises:
            UsageError: on all ranks together: what is given does not fit on some rank.
        """
        if samples is None and self._given is False:
            return [None] * micro_batches
        mine = 0 if samples is None else sum(samples)
        said = (samples is not None, mine, _problem(micro_batches, samples, self._world.rank))
        everyone = self._world.gather(said, step=step, tag=_TAG_SAMPLES)
        if any(problem for _, _, problem in everyone):
            raise UsageError(next(problem for _, _, problem in everyone if problem))
        without = [rank for rank, (given, _, _) in enumerate(everyone) if not given]
        if without and len(without) < len(everyone):
            raise UsageError(f"samples is not given on ranks {without}, but on the others: give it on every rank")
        self._given = not without
        if samples is None:
            return [None] * micro_batches
        ranks, total = (len(everyone), sum(n for _, n, _ in everyone)) if self._averages else (1, mine)
        return [n * ranks / total for n in samples]


def _problem(micro_batches: int, samples: Sequence[int] | None, rank: int) -> str:
    """Why this rank's step cannot be run as it is given; empty when it can."""
    if micro_batches == 0:
        return (
            f"rank {rank} has no micro-batch in this step: every rank needs one, so the global batch must have at "
            "least as many samples as there are ranks"
        )
    if samples is None:
        return ""
    if len(samples) != micro_batches:
        return f"rank {rank} gives {len(samples)} numbers of samples for {micro_batches} micro-batches"
    if any(n < 1 for n in samples):
        return f"rank {rank} gives {list(samples)} as numbers of samples: each must be at least 1"
    return ""
