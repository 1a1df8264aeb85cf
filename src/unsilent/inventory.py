"""The one list of a run's state: which tensors there are, what they are called, and who must hold the same bits.

Certificates, votes and healing all read this list, so that no two of them disagree about what the state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unsilent.records import Site
from unsilent.sharding import local


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of the state.

    ``name`` is ``model.<fqn>`` for parameters and buffers, ``optimizer.<fqn>.<key>`` for optimizer state, and
    ``optimizer.group.<i>.<key>`` for tensors in a parameter group. ``replicated`` says that all ranks of the
    data-parallel group must hold the same bits, and ``copies`` which ranks of it: None for all. Of a distributed tensor
    ``tensor`` is this rank's part.
    """

    name: str
    tensor: torch.Tensor
    site: Site
    replicated: bool = True
    copies: tuple[int, ...] | None = None


class Inventory:
    """Walks a model and an optimizer; made once, read every time, since optimizers create state late.

    Args:
        model: the inner module (not a DDP wrapper).
        optimizer: a ``torch.optim.Optimizer`` over its parameters, or None.
        replicated_buffers: names of buffers that must be equal on all ranks; others are allowed to differ (BatchNorm).
        copies: the ranks that hold the same bits as this rank's part of a distributed tensor; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        replicated_buffers: frozenset[str] = frozenset(),
        copies: Callable[[torch.Tensor], tuple[int, ...] | None] = lambda tensor: None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.replicated_buffers = replicated_buffers
        self._copies = copies

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once, by its first name; a tied parameter has one name."""
        yield from self.model.named_parameters()

    def weights(self) -> list[Entry]:
        return [self._entry(f"model.{n}", p, Site.WEIGHTS) for n, p in self.parameters()]

    def buffers(self) -> list[Entry]:
        return [
            Entry(name=f"model.{n}", tensor=b, site=Site.WEIGHTS, replicated=n in self.replicated_buffers)
            for n, b in self.model.named_buffers()
        ]

    def optimizer_state(self) -> list[Entry]:
        if self.optimizer is None:
            return []
        names = {id(p): n for n, p in self.parameters()}
        entries: list[Entry] = []
        for i, group in enumerate(self.optimizer.param_groups):
            entries += [
                self._entry(f"optimizer.group.{i}.{key}", value, Site.OPTIMIZER_STATE)
                for key, value in group.items()
                if isinstance(value, torch.Tensor)
            ]
            for j, p in enumerate(group["params"]):
                name = names.get(id(p), f"group{i}.param{j}")
                state: dict[str, Any] = self.optimizer.state.get(p, {})
                entries += [
                    self._entry(f"optimizer.{name}.{key}", value, Site.OPTIMIZER_STATE)
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

    def _entry(self, name: str, tensor: torch.Tensor, site: Site) -> Entry:
        return Entry(name=name, tensor=local(tensor), site=site, copies=self._copies(tensor))
