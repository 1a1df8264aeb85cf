"""What a rank sends to the other ranks of its team: how a wrong value is traced to the one that made it.

In tensor, context, expert or pipeline parallelism a wrong value is in the gradients of the whole team. But it was local first: what
the rank that erred gave into a collective of the team, or handed to the next stage, differs before anything differs on the others.
So in audited steps the fingerprints of all that a rank sends within its team are kept, 16 bytes each, in order; and of what a
pipeline's stage receives, so that a value that went wrong on its way is not held against who got it.

Cost, in audited steps of runs with teams: a dispatch mode around forward and backward, and one pass over what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unsilent.fingerprints import sums
from unsilent.sharding import local
from unsilent.teams import Crossing

_FORWARD, _BACKWARD = 0, 1
#: of each collective, which argument holds what this rank gives; of a functional one it is the first
_GIVES = {
    "allreduce_": 0, "allreduce_coalesced_": 0, "reduce_": 0, "send": 0,
    "_allgather_base_": 1, "allgather_": 1, "allgather_into_tensor_coalesced_": 1, "allgather_coalesced_": 1, "gather_": 1,
    "_reduce_scatter_base_": 1, "reduce_scatter_": 1, "reduce_scatter_tensor_coalesced_": 1, "scatter_": 1,
    "alltoall_base_": 1, "alltoall_": 1,
}  # fmt: skip

#: call of the model, direction, what it is, whether it arrived from elsewhere, and the fingerprint on the device
_Noted = tuple[int, int, str, bool, torch.Tensor]


class Crossings:
    """Notes something only inside of :meth:`live` and :meth:`rerun`.

    Args:
        model: the module that computes.
        team: the global ranks that compute one batch together.
        stage: of this rank in a pipeline, None without one.
    """

    def __init__(self, model: nn.Module, team: Collection[int], stage: int | None) -> None:
        self._model, self._team, self._stage = model, frozenset(team), stage
        self._noted: list[_Noted] | None = None
        self._call = self._calls = 0
        self._untold = False  # something could not be noted: the list is worth nothing
        self._inside: dict[str, bool] = {}
        self._recorded: list[_Noted] = []
        self._rerun: list[_Noted] = []

    @contextmanager
    def live(self, *, noted: bool) -> Iterator[None]:
        """Bracket a step's own forward and backward; what the step before has shown is forgotten."""
        self._recorded, self._rerun, self._untold = [], [], False
        with self._noting(self._recorded if noted else None):
            yield

    @contextmanager
    def rerun(self) -> Iterator[None]:
        """Bracket a rerun of the work of another rank."""
        self._rerun = []
        with self._noting(self._rerun):
            yield

    def told(self) -> tuple[list[Crossing], list[Crossing]] | None:
        """What crossed in the live step, and in the rerun of another rank's; None where it is not known. Synchronises."""
        if self._untold or not self._recorded or not self._rerun:
            return None
        return self._crossings(self._recorded), self._crossings(self._rerun)

    @contextmanager
    def _noting(self, noted: list[_Noted] | None) -> Iterator[None]:
        # Inside of compiled code nothing is dispatched, or it is compiled anew: then the team is named as a whole.
        if noted is None or any(_is_compiled(module) for module in self._model.modules()):
            yield
            return
        self._noted, self._call, self._calls = noted, 0, 0
        with ExitStack() as hooks:
            if self._stage is not None:
                before = self._model.register_forward_pre_hook(self._enter(hooks), with_kwargs=True)
                after = self._model.register_forward_hook(self._leave(hooks))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            try:
                with _Sends(self):
                    yield
            finally:
                self._noted = None

    def send(self, name: str, values: Any) -> None:
        """A collective of the team is about to be made with these values."""
        self._note(name, values, arrived=False)

    def within(self, arguments: Any) -> bool:
        """Whether a collective with these arguments is one of this team's."""
        try:
            name = next((name for argument in arguments if (name := _name_of_group(argument))), "")
            if name not in self._inside:
                group = _group(name)
                ranks = [] if group is None else dist.get_process_group_ranks(group)
                self._inside[name] = len(ranks) > 1 and self._team.issuperset(ranks)
            return self._inside[name]
        except Exception:  # noqa: BLE001 - P4, as in _note
            self._untold = True
            return False

    def _enter(self, hooks: ExitStack) -> Callable[..., None]:
        """A stage's input: what it was sent, and in backward the gradient that it sends back."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls += 1
            call = self._call = self._calls
            self._note("input of the stage", (args, kwargs), arrived=True)
            self._on_gradients(
                (args, kwargs), hooks, lambda g: self._note("gradient of its input", g, arrived=False, call=call)
            )

        return enter

    def _leave(self, hooks: ExitStack) -> Callable[..., None]:
        """A stage's output: what it sends, and in backward the gradient that it is sent."""

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            call = self._call
            self._note("output of the stage", output, arrived=False)
            self._on_gradients(
                output, hooks, lambda g: self._note("gradient of its output", g, arrived=True, call=call)
            )

        return leave

    def _on_gradients(self, values: Any, hooks: ExitStack, see: Callable[[torch.Tensor], None]) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                hooks.callback(tensor.register_hook(see).remove)

    def _note(self, name: str, values: Any, *, arrived: bool, call: int | None = None) -> None:
        if self._noted is None:
            return
        self._call = self._call if call is None else call
        direction = _BACKWARD if torch._C._current_graph_task_id() != -1 else _FORWARD
        try:
            for tensor in tree_leaves(values):
                if isinstance(tensor, torch.Tensor):
                    self._noted.append((self._call, direction, name, arrived, sums(local(tensor))))
        except Exception:  # noqa: BLE001 - P4: an odd tensor does not end the user's forward; the team is named instead
            self._untold = True

    def _crossings(self, noted: list[_Noted]) -> list[Crossing]:
        digests = torch.stack([row.cpu() for *_, row in noted]).tolist()
        stage = self._stage or 0
        return [
            Crossing(
                order=(call, direction, -stage if direction else stage, number),
                name=f"{name}{', backward' if direction else ''}",
                arrived=arrived,
                digest=(first, second),
            )
            for number, ((call, direction, name, arrived, _), (first, second)) in enumerate(
                zip(noted, digests, strict=True)
            )
        ]


class _Sends(TorchDispatchMode):
    """Sees every collective before it is made."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # of distributed tensors the local parts come by again
        name = func._overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "broadcast", "broadcast_"):
            if self._crossings.within(args):
                self._crossings.send(name, args[0])
        elif func.namespace == "c10d" and name in _GIVES and self._crossings.within(args):
            self._crossings.send(name, args[_GIVES[name]])
        return func(*args, **(kwargs or {}))


def _name_of_group(argument: Any) -> str:
    """The name of a process group, if that is what an argument of a collective stands for."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).group_name  # type: ignore[attr-defined]
        except (RuntimeError, TypeError):
            return ""  # a reduction
    return argument if isinstance(argument, str) and _group(argument) is not None else ""


def _group(name: Any) -> Any:
    try:
        return dist.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):
        return None  # "sum", say


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
