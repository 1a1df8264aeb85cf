"""The one list of a run's state: which tensors there are, what they are called, and who must hold the same bits.

Certificates, votes and healing all read this list, so that no two of them disagree about what the state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unsilent.records import Site
from unsilent.sharding import local


def is_partitioned(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether each rank keeps the state of its own part of the parameters only (``ZeroRedundancyOptimizer``)."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def state_of(optimizer: Any) -> dict[Any, dict[str, Any]]:
    """What an optimizer keeps of each parameter on this rank."""
    return optimizer.optim.state if is_partitioned(optimizer) else optimizer.state


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the state.

    ``name`` is ``model.<fqn>`` for parameters and buffers, ``optimizer.<fqn>.<key>`` for optimizer state, and
    ``optimizer.group.<i>.<key>`` for tensors in a parameter group. ``replicated`` says that all ranks of the
    data-parallel group must hold the same bits, and ``copies`` which ranks of it: None for all. Of a distributed tensor
    ``tensor`` is this rank's part. ``called`` is the name under which ranks compare it, where they have other names for it.
    """

    name: str
    tensor: torch.Tensor
    site: Site
    replicated: bool = True
    copies: tuple[int, ...] | None = None
    called: str = ""


class Inventory:
    """Walks a model and an optimizer; made once, read every time, since optimizers create state late.

    Args:
        model: the inner module (not a DDP wrapper).
        optimizer: a ``torch.optim.Optimizer`` over its parameters, or None.
        replicated_buffers: names of buffers that must be equal on all ranks; others are allowed to differ (BatchNorm).
        copies: the ranks that must hold the same bits as this rank's (part of a) tensor; None for all. It is given the name of
            a parameter, "" for other tensors.
        called: the name under which ranks compare a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        replicated_buffers: frozenset[str] = frozenset(),
        copies: Callable[[torch.Tensor, str], tuple[int, ...] | None] = lambda tensor, name: None,
        called: Callable[[str], str] = lambda name: name,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.replicated_buffers = replicated_buffers
        self._copies, self._called = copies, called

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, by its first name; a tied parameter has one name."""
        yield from self.model.named_parameters()

    def weights(self) -> list[Entry]:
        return [
            Entry(
                name=f"model.{n}", tensor=local(p), site=Site.WEIGHTS, copies=self._copies(p, n),
                called=f"model.{self._called(n)}",
            )
            for n, p in self.parameters()
        ]  # fmt: skip

    def buffers(self) -> list[Entry]:
        return [
            Entry(
                name=f"model.{n}", tensor=local(b), site=Site.WEIGHTS, replicated=n in self.replicated_buffers,
                copies=self._copies(b, ""),
            )
            for n, b in self.model.named_buffers()
        ]  # fmt: skip

    def optimizer_state(self) -> list[Entry]:
        if self.optimizer is None:
            return []
        names = {id(p): n for n, p in self.parameters()}
        alone = is_partitioned(self.optimizer)
        entries: list[Entry] = []
        for i, group in enumerate(self.optimizer.param_groups):
            entries += [
                self._entry(f"optimizer.group.{i}.{key}", value, Site.OPTIMIZER_STATE)
                for key, value in group.items()
                if isinstance(value, torch.Tensor)
            ]
            for j, p in enumerate(group["params"]):
                name = names.get(id(p), f"group{i}.param{j}")
                state: dict[str, Any] = state_of(self.optimizer).get(p, {})
                entries += [
                    self._entry(f"optimizer.{name}.{key}", value, Site.OPTIMIZER_STATE, alone=alone)
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor)
                ]
        return entries

    def gradients(self) -> list[Entry]:
        """The gradients as they stand in ``.grad``; parameters without one are left out."""
        return [self._entry(f"gradient.{n}", p.grad, Site.GRADIENT) for n, p in self.parameters() if p.grad is not None]

    def entries(self) -> list[Entry]:
        """All state that a checkpoint keeps, in a fixed order."""
        return [*self.weights(), *self.buffers(), *self.optimizer_state()]

    def _entry(self, name: str, tensor: torch.Tensor, site: Site, *, alone: bool = False) -> Entry:
        return Entry(
            name=name, tensor=local(tensor), site=site, copies=(dist.get_rank(),) if alone else self._copies(tensor, "")
        )
