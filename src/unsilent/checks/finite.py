"""Check ``finite``: no gradient is NaN or infinite, locally before the reduction and reduced after it, in every step.

``aminmax`` is exact, carries NaN, and costs a tenth of ``isfinite().all()``. Where the step clips, the norm that clipping
needs anyway serves instead: it is finite only if all elements are. It overflows on large finite values, so when it is
not finite the elements decide.

Sparse gradients are looked at coalesced: values of one index may be finite and their sum not.

Cost. Time: a pass over the gradients before the reduction and one after it (on a CPU the first is shared with the
fingerprint, with clipping the second is the norm's own), and one copy of two flags to the host. Memory: two numbers per bucket and per parameter. Traffic: none beyond
the agreed vector, in which two flags ride; on an alarm, up to eight names from every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsilent.agreement import Agreed, Declaration
from unsilent.checks.protocol import Coverage, Moment
from unsilent.fingerprints import elements
from unsilent.inventory import Inventory
from unsilent.records import FiniteEvidence, Site
from unsilent.reduction import Bucket


@dataclass(frozen=True, kw_only=True)
class FiniteConfig:
    """With a loss scaler: how many steps in a row it may back off, and how often in a row one rank may overflow alone."""

    streak_limit: int = 50
    lone_limit: int = 5


class Finite:
    """See the module's text.

    Args:
        inventory: of the inner module.
        reduces: whether gradients are reduced at all; without, the local gradients are read after the backward.
        scaler: whether a loss scaler is in use, so that an overflow may be its normal search.
        averages: whether gradients are divided by the number of ranks before they are summed.
        clips: whether the step clips by the norm of the gradients, without a scaler; that norm is then computed here.
        replicated: whether every rank holds the whole reduced gradient.
    """

    name = "finite"
    sites: tuple[Site, ...] = (Site.GRADIENT, Site.REDUCTION)
    period = 1

    def __init__(
        self,
        inventory: Inventory,
        config: FiniteConfig,
        *,
        reduces: bool,
        scaler: bool,
        averages: bool = False,
        clips: bool = False,
        replicated: bool = True,
    ) -> None:
        self.replicated = replicated
        self._inventory, self._config, self._reduces, self._scaler = inventory, config, reduces, scaler
        self._averages, self._clips = averages, clips
        #: the norm of all gradients, where the step clips by it: computed once, for the check and for clipping
        self.total_norm: torch.Tensor | None = None
        self._seen_bad = False
        self._local: list[torch.Tensor] = []
        self._reduced: list[torch.Tensor] = []
        self._streak = 0
        self._lone = 0
        self._lone_rank = -1
        self._counted = -1
        self._bad_local = self._bad_reduced = False

    def coverage(self) -> tuple[Coverage, ...]:
        return (
            Coverage(
                site="gradient", check=self.name, how="exact: min and max of every gradient, before the reduction",
                when="every step", blind="wrong values that are finite",
            ),
            Coverage(
                site="reduction", check=self.name, how="exact: min and max of every reduced gradient",
                when="every step", blind="finite errors inside the reduction",
            ),
        )  # fmt: skip

    def declares(self) -> Declaration:
        return Declaration(flags=("local", "reduced"))

    def wants(self, step: int, micro_batch: int) -> frozenset[str]:
        return frozenset()

    def begin(self, moment: Moment) -> None:
        self._local, self._reduced, self.total_norm = [], [], None
        self._seen_bad = False
        self._bad_local = self._bad_reduced = False

    def before_reduction(self, bucket: Bucket) -> None:
        if bucket.finite is not None:
            self._seen_bad |= not bucket.finite
        else:
            self._local += extremes([bucket.buffer])

    def before_update(self, moment: Moment) -> None:
        self._look_at_reduced()

    def fill(self) -> tuple[dict[str, bool], dict[str, int]]:
        local, reduced = (self._local, self._reduced) if self._reduces else (self._reduced, [])
        self._bad_local, self._bad_reduced = _not_finite(local, reduced)
        if self.total_norm is not None and (self._bad_local or self._bad_reduced):
            # A norm overflows on values that are finite: only the elements can tell.
            exact = extremes(entry.tensor for entry in self._inventory.gradients())
            local, reduced = (self._local, exact) if self._reduces else (exact, [])
            self._bad_local, self._bad_reduced = _not_finite(local, reduced)
        self._bad_local |= self._seen_bad
        return {"local": self._bad_local, "reduced": self._bad_reduced}, {}

    def alarm(self, agreed: Agreed) -> bool:
        found = agreed.raised(self.name, "local") or agreed.raised(self.name, "reduced")
        if not found:
            self._streak = self._lone = 0
        return found

    def details(self) -> tuple[bool, bool, tuple[str, ...]]:
        """(local, reduced, names of the first parameters whose gradient is not finite)."""
        names = [e.name for e in self._inventory.gradients() if not bool(torch.isfinite(elements(e.tensor)).all())]
        return self._bad_local, self._bad_reduced, tuple(names[:8])

    def evidence(self, step: int, details: Sequence[Any]) -> tuple[FiniteEvidence, ...]:
        local = tuple(rank for rank, (bad, _, _) in enumerate(details) if bad)
        reduced = tuple(rank for rank, (_, bad, _) in enumerate(details) if bad)
        if step != self._counted:  # a step that is looked at again after a repair counts once
            self._counted = step
            self._streak += 1
            alone = local[0] if len(local) == 1 and len(details) > 1 else -1
            self._lone = self._lone * (alone == self._lone_rank) + (alone >= 0)
            self._lone_rank = alone
        return (
            FiniteEvidence(
                step=step,
                world_size=len(details),
                local=local,
                reduced=reduced,
                scaler=self._scaler,
                streak=self._streak,
                lone_streak=self._lone,
                averaged=self._averages,
                tensors=next((names for _, _, names in details if names), ()),
            ),
        )

    @property
    def limits(self) -> FiniteConfig:
        return self._config

    def recheck(self, local: list[torch.Tensor]) -> None:
        """Gradients were reduced anew; ``local`` are the extremes of the local buckets that went into it."""
        self._local = local
        self._seen_bad = False
        self._look_at_reduced()

    def _look_at_reduced(self) -> None:
        gradients = [entry.tensor for entry in self._inventory.gradients()]
        if self._clips and gradients and not any(gradient.is_sparse for gradient in gradients):
            self.total_norm = nn.utils.get_total_norm(gradients)
            self._reduced = [self.total_norm]
        else:
            self._reduced = extremes(gradients)

    def after_update(self, moment: Moment, *, skipped: bool) -> None:
        return


def extremes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The minimum and the maximum of every tensor that has any element, on the device; NaN comes through."""
    return [extreme for t in map(elements, tensors) if t.numel() for extreme in t.aminmax()]


def _not_finite(*groups: list[torch.Tensor]) -> tuple[bool, ...]:
    """Whether each group of scalars holds a NaN or Inf; one copy to the host for all groups."""
    devices = {t.device for group in groups for t in group}
    if not devices:
        return tuple(False for _ in groups)
    device = devices.pop()
    bad = [
        (~torch.isfinite(torch.stack([t.float() if t.dtype != torch.float64 else t for t in group]))).any()
        if group
        else torch.zeros((), dtype=torch.bool, device=device)
        for group in groups
    ]
    return tuple(bool(b) for b in torch.stack(bad).tolist())
