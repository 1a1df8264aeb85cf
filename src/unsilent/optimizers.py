"""Several optimizers as one: Muon for the matrices and AdamW for the rest, each with a scheduler of its own.

Whatever reads or writes the state of a run (votes, certificates, snapshots, healing) knows one optimizer: parameter groups, a
mapping from parameters to what is kept of them, a step. Here these are the groups, the mappings and the steps of all parts, in the
order in which they were given. Nothing is copied: the parts stay the owners, and a loop may go on using them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from unsilent.errors import UsageError
from unsilent.inventory import is_partitioned

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class JointOptimizer:
    """Stands for several optimizers; ``joined`` makes one.

    With a loss scaler :meth:`step_scaled` does what ``scaler.step`` of each part does: only parts whose own gradients overflow
    are left out. ``scaler.unscale_`` and ``scaler.step`` of the joint one take all gradients as one set: an overflow anywhere
    leaves all parts out. The guard takes the second where it clips by norm, since a norm that is not finite makes all
    gradients so, and the parts that did not overflow would take them in; it takes the first elsewhere.

    Hooks that are registered here run once in a step of all parts, and not at all where every part was left out. Hooks of
    the parts run with their part.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self._before: OrderedDict[int, Hook] = OrderedDict()
        self._after: OrderedDict[int, Hook] = OrderedDict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, the very dictionaries."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> JointState:
        """What the parts keep of each parameter."""
        return JointState(self.parts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        self._call(self._before)
        for part in self.parts:
            part.step()
        self._call(self._after)

    def step_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """``scaler.step`` of each part; ``scaler.update`` is to follow."""
        ran: list[object] = []

        def begin(part: object, *_: Any) -> None:
            if not ran:
                self._call(self._before)
            ran.append(part)

        with ExitStack() as taken:
            for part in self.parts:
                taken.callback(part.register_step_pre_hook(begin).remove)
            for part in self.parts:
                scaler.step(part)
        if ran:
            self._call(self._after)

    def register_step_pre_hook(self, hook: Hook) -> RemovableHandle:
        return _registered(self._before, hook)

    def register_step_post_hook(self, hook: Hook) -> RemovableHandle:
        return _registered(self._after, hook)

    def state_dict(self) -> dict[str, Any]:
        """As one optimizer with all groups has it: parameters are numbered over all of them."""
        states: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        more: dict[str, Any] = {}  # what a part keeps besides, which a checkpoint refuses
        first = 0
        for part in self.parts:
            packed = part.state_dict()
            states |= {_moved(number, first): state for number, state in packed["state"].items()}
            groups += [{**g, "params": [first + n for n in g["params"]]} for g in packed["param_groups"]]
            more |= {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
            first += _count(part)
        return {"state": states, "param_groups": groups, **more}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            ValueError: it has unequally many groups.
        """
        groups, states = list(state_dict["param_groups"]), dict(state_dict["state"])
        if len(groups) != len(self.param_groups):
            raise ValueError(f"the optimizers have {len(self.param_groups)} parameter groups, the state {len(groups)}")
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = [number for group in own for number in group["params"]]
            # Under the numbers of the joint state: a part takes parameters by their order, whatever they are called.
            part.load_state_dict({"state": {n: states[n] for n in numbers if n in states}, "param_groups": own})

    def _call(self, hooks: Mapping[int, Hook]) -> None:
        for hook in list(hooks.values()):
            hook(self, (), {})


class JointState(MutableMapping[Any, Any]):
    """One mapping over those of several optimizers: each parameter is looked up in the part that holds it.

    As in an optimizer, looking up a parameter of which nothing is kept yet begins an empty entry.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def __getitem__(self, key: Any) -> Any:
        return self._home(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    # These three by hand, since the inherited ones look a key up to see whether it is there.

    def __contains__(self, key: object) -> bool:
        return self._with(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        state = self._with(key)
        return default if state is None else state[key]

    def pop(self, key: Any, *default: Any) -> Any:
        state = self._with(key)
        if state is None and default:
            return default[0]
        return (state or {}).pop(key)

    def _with(self, key: Any) -> MutableMapping[Any, Any] | None:
        """The mapping that has an entry for it."""
        return next((part.state for part in self._parts if key in part.state), None)

    def _home(self, key: Any) -> MutableMapping[Any, Any]:
        """The mapping that has an entry for it, or is to have one."""
        state = self._with(key)
        if state is not None:
            return state
        for part in self._parts:
            if any(p is key for group in part.param_groups for p in group["params"]):
                return part.state
        raise KeyError("none of the optimizers holds this parameter")


class JointScheduler:
    """Stands for several learning rate schedulers; ``joined_schedulers`` makes one."""

    def __init__(self, parts: Sequence[LRScheduler]) -> None:
        self.parts = tuple(parts)

    @property
    def last_epoch(self) -> tuple[int, ...]:
        return tuple(part.last_epoch for part in self.parts)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"schedulers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            ValueError: it is of one scheduler, or of unequally many.
        """
        states = state_dict.get("schedulers")
        if states is None or len(states) != len(self.parts):
            there = "one" if states is None else len(states)
            raise ValueError(f"there are {len(self.parts)} schedulers, and the state is of {there}")
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def joined(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One that stands for all of them; a single one is passed through untouched.

    Raises:
        UsageError: they cannot be guarded together.
    """
    if isinstance(optimizer, Mapping):
        raise UsageError("optimizers were given by name: give them as a list, which says in which order they step")
    if not isinstance(optimizer, Sequence):
        return optimizer
    if not optimizer:
        raise UsageError("the list of optimizers is empty: there is nothing that trains")
    if len(optimizer) == 1:
        return optimizer[0]
    holders: dict[int, int] = {}
    for i, part in enumerate(optimizer):
        kind = type(part).__name__
        if not isinstance(part, torch.optim.Optimizer):
            raise UsageError(f"a {kind} stands among the optimizers, and is none")
        if isinstance(part, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS stands among the optimizers, and runs the model several times inside of its step, where no check could stop "
                "a wrong value: use one that takes its gradients as they are"
            )
        if is_partitioned(part):
            raise UsageError(
                f"a {kind} stands among several optimizers, and is guarded only where it is the single one: give it all parameters, "
                "or take ordinary optimizers"
            )
        for j, p in enumerate(p for group in part.param_groups for p in group["params"]):
            if holders.setdefault(id(p), i) != i:
                raise UsageError(
                    f"parameter {j} of optimizer {i} ({kind}, shape {list(p.shape)}) is in optimizer {holders[id(p)]} too, and each "
                    "would update it: give it to one of them"
                )
    return cast(torch.optim.Optimizer, JointOptimizer(optimizer))


def joined_schedulers(
    scheduler: LRScheduler | Sequence[LRScheduler] | None,
) -> LRScheduler | JointScheduler | None:
    """One that stands for all of them; a single one is passed through untouched."""
    if not isinstance(scheduler, Sequence):
        return scheduler
    return JointScheduler(scheduler) if len(scheduler) > 1 else next(iter(scheduler), None)


def parts_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that it stands for, or itself."""
    return optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)


def step_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """What a loop writes: ``scaler.step`` of each optimizer."""
    if isinstance(optimizer, JointOptimizer):
        optimizer.step_scaled(scaler)
    else:
        scaler.step(optimizer)


def _registered(hooks: OrderedDict[int, Hook], hook: Hook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _count(part: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in part.param_groups)


def _moved(key: Any, by: int) -> Any:
    """The number of a parameter, counted from another first one; other keys of a state are words."""
    return key + by if isinstance(key, int) else key
