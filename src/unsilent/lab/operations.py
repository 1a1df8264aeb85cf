"""What runs below autograd while a model computes: every operation with the module and the phase that it belongs to, and
its result, which may be changed in place.

Below autograd a changed value is simply a wrong result: what a backward saves of it is wrong too, and nothing is
differentiated that should not be, as on real hardware. The price is a Python call for each operation (a third to
three quarters of a small model's step), so the mode is entered only for steps in which something is to be done.
Compiled kernels are out of its reach: they run as one piece.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# A DTensor comes back with its local tensor; a FakeTensor, which DTensor's first use of an operation computes with, has none.
_WITHOUT_VALUES = frozenset({"DTensor", "FakeTensor"})
# Their schemas do not say that they return their input in another shape.
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "lift_fresh"})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call.

    Attributes:
        name: of the ATen operation without its overload, such as ``mm``.
        phase: ``forward``; ``recompute`` (a forward that activation checkpointing repeats during the backward);
            ``backward``; ``optimizer``.
        module: the innermost module that it belongs to, as in ``named_modules``; a backward operation belongs to the
            module in whose forward its autograd node was made. Empty for the optimizer.
    """

    name: str
    phase: str
    module: str


class Operations:
    """Follows ``model`` permanently, and while :meth:`seen` is open shows each operation of its forward, recomputation
    and backward, and of ``optimizer``'s step.

    What belongs to none of them (the loss, a guard's own work) is not shown. Only floating-point results are, and no views.
    The autograd nodes of a recomputation carry the numbers of the thread that ran it; on a GPU that is another thread than
    the forward's, so there the backward of checkpointed regions may be taken for another module's.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._stack: list[str] = []
        # Where in the sequence of autograd nodes which module began or ended: two lists of the same length.
        self._starts: list[int] = []
        self._modules: list[str] = []
        self._open = 0
        self._updating = False
        self._lock = threading.Lock()
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(name)))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._update(True)))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._update(False)))

    @contextmanager
    def seen(self, result: Callable[[Operation, torch.Tensor], None]) -> Iterator[None]:
        """While open, ``result(operation, tensor)`` is called for each; it may write into the tensor, below autograd."""
        self._open += 1
        try:
            with _Mode(self._about, result):
                yield
        finally:
            self._open -= 1
            if not self._open:
                self._starts.clear()
                self._modules.clear()

    def close(self) -> None:
        """Follow the model no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(name)
            self._mark(name)

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:  # a module that raised in another's pre-hook was never entered
            self._stack.pop()
        self._mark(self._stack[-1] if self._stack else None)

    def _mark(self, module: str | None) -> None:
        if self._open:
            with self._lock:
                self._starts.append(torch.autograd._get_sequence_nr())
                self._modules.append("\0" if module is None else module)

    def _update(self, now: bool) -> None:
        self._updating = now

    def _about(self) -> tuple[str, str] | None:
        """(phase, module) of what runs now, None if it is not the model's."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._stack:
            return ("recompute" if in_backward else "forward"), self._stack[-1]
        if in_backward:
            node = torch._C._current_autograd_node()
            return None if node is None else self._made_by(node._sequence_nr())
        return ("optimizer", "") if self._updating else None

    def _made_by(self, number: int) -> tuple[str, str] | None:
        with self._lock:
            i = bisect_right(self._starts, number) - 1
            # Nodes that accumulate gradients have the largest number there is: they belong to no forward.
            if i < 0 or number >= 1 << 62 or self._modules[i] == "\0":
                return None
            return "backward", self._modules[i]


class _Mode(TorchDispatchMode):
    def __init__(
        self, about: Callable[[], tuple[str, str] | None], result: Callable[[Operation, torch.Tensor], None]
    ) -> None:
        super().__init__()
        self._about, self._result = about, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ in _WITHOUT_VALUES for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if _makes_values(func):
            place = self._about()
            if place is not None:
                tensor = _first_floating(out)
                if tensor is not None:
                    name = func.overloadpacket.__name__
                    self._result(Operation(name=name, phase=place[0], module=place[1]), tensor)
        return out


def _makes_values(func: Any) -> bool:
    """Whether its results are values of its own, not another view of what it was given."""
    if func.overloadpacket.__name__ in _UNDECLARED_VIEWS:
        return False
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is None or r.alias_info.is_write for r in returns)


def _first_floating(out: Any) -> torch.Tensor | None:
    candidates = out if isinstance(out, tuple | list) else (out,)
    return next((t for t in candidates if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
