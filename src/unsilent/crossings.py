"""What a rank computes just before it may reach the other ranks of its team: how a wrong value is traced to the one that made it.

In tensor, context or pipeline parallelism a wrong value is in the gradients of the whole team. But it was local first: the
output of each innermost module, before any collective that follows it, and the gradient that comes back to it, differ on the
rank that erred before they differ anywhere else. Of audited steps their fingerprints are kept, 16 bytes each, in order.

Cost, in audited steps of runs with teams: one pass over the outputs of the innermost modules and over their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unsilent.fingerprints import sums
from unsilent.sharding import local
from unsilent.teams import Crossing

_FORWARD, _BACKWARD = 0, 1


#: the call of the model, the direction, the module, and the fingerprint on the device
_Noted = tuple[int, int, str, torch.Tensor]


class Crossings:
    """Hooks on the innermost modules, installed once, that note something only inside of :meth:`live` and :meth:`rerun`.

    Args:
        model: the module that computes.
        stage: of this rank in a pipeline.
    """

    def __init__(self, model: nn.Module, stage: int) -> None:
        self._stage = stage
        self._noted: list[_Noted] | None = None
        self._calls = 0
        self._recorded: list[_Noted] = []
        self._rerun: list[_Noted] = []
        compiled = {id(part) for module in model.modules() if _is_compiled(module) for part in module.modules()}
        innermost = [(n, m) for n, m in model.named_modules() if not list(m.children()) and id(m) not in compiled]
        # In front of the other hooks: those of tensor parallelism communicate.
        self._handles: list[Any] = [m.register_forward_hook(self._see(n), prepend=True) for n, m in innermost]
        self._handles.append(model.register_forward_pre_hook(self._count))

    @contextmanager
    def live(self, *, noted: bool) -> Iterator[None]:
        """Bracket a step's own forward and backward; what the step before has shown is forgotten."""
        self._recorded, self._rerun = [], []
        with self._noting(self._recorded if noted else None):
            yield

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Bracket a rerun of the work of another rank."""
        self._rerun = []
        with self._noting(self._rerun):
            yield

    def told(self) -> tuple[list[Crossing], list[Crossing]]:
        """What crossed in the live step, and in the rerun of another rank's; synchronises."""
        return self._crossings(self._recorded), self._crossings(self._rerun)

    @contextmanager
    def _noting(self, noted: list[_Noted] | None) -> Iterator[None]:
        self._noted, self._calls = noted, 0
        try:
            yield
        finally:
            self._noted = None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, module: nn.Module, args: Any) -> None:
        self._calls += 1

    def _see(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def see(module: nn.Module, args: Any, output: Any) -> None:
            noted = self._noted
            if noted is None:
                return
            call = self._calls
            for tensor in tree_leaves(output):
                if not isinstance(tensor, torch.Tensor):
                    continue
                noted.append((call, _FORWARD, name, sums(local(tensor))))
                if tensor.requires_grad:
                    tensor.register_hook(lambda g: noted.append((call, _BACKWARD, name, sums(local(g)))))

        return see

    def _crossings(self, noted: list[_Noted]) -> list[Crossing]:
        if not noted:
            return []
        digests = torch.stack([row for *_, row in noted]).tolist()
        return [
            Crossing(
                order=(call, direction, -self._stage if direction else self._stage, number),
                name=f"{name} ({'backward' if direction else 'forward'})",
                digest=(first, second),
            )
            for number, ((call, direction, name, _), (first, second)) in enumerate(zip(noted, digests, strict=True))
        ]


def _is_compiled(module: nn.Module) -> bool:
    """Hooks inside of compiled code are not run, or break it into pieces."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
