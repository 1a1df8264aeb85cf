"""State that modules keep outside parameters and buffers: plain attributes, own generators, extra state.

A replay puts such state back, so that an audit leaves no trace; and it tells which module changed some, since work
that depends on it cannot be judged by another rank.

A snapshot keeps two things: which object each attribute is, and what is inside each object that can change. Putting it
back restores both, so that an object which is also known elsewhere stays that object. Inside are containers, tensors,
NumPy arrays, generators, and objects made of nothing else; what holds more (a trainer, a lock, a file) is left alone.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

_OWN_MACHINERY = frozenset(nn.Module().__dict__) | {"_is_full_backward_hook", "_compiled_call_impl"}
_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), range, Enum, type, FunctionType, BuiltinFunctionType,
    torch.dtype, torch.device, torch.Size,
)  # fmt: skip
_SEQUENCES = (list, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_GONE = object()
_MOST_OBJECTS = 2000  # inside one object of the user's own; one that holds more is left alone


class Attributes:
    """A snapshot of the plain attributes of all modules under ``root``."""

    def __init__(self, root: nn.Module) -> None:
        #: by id: an object, and what was inside it; holding the object keeps its id its own
        self._inside: dict[int, tuple[Any, Any]] = {}
        self._modules: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._extra: list[tuple[str, nn.Module, Any]] = []
        for name, module in root.named_modules():
            own = {key: value for key, value in vars(module).items() if key not in _OWN_MACHINERY}
            self._modules.append((name or "<root>", module, own))
            for value in own.values():
                self._look_into(value)
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                state = copy.deepcopy(module.get_extra_state())
                self._look_into(state)
                self._extra.append((name or "<root>", module, state))

    def changed(self) -> str:
        """The first attribute that differs now, as ``module.attribute``; "" when none does."""
        for name, module, own in self._modules:
            for key, value in own.items():
                now = vars(module).get(key, _GONE)
                if isinstance(now, torch.Tensor) and now.grad_fn is not None:
                    continue  # this forward computed it from weights, as spectral norm does: a result, no state
                if not self._same(value, now, set()):
                    return f"{name}.{key}"
        for name, module, state in self._extra:
            if not self._same(state, module.get_extra_state(), set()):
                return f"{name}.get_extra_state()"
        return ""

    def restore(self) -> None:
        """Put back what changed since the snapshot; attributes that are new since then go."""
        for value, inside in self._inside.values():
            _put_back(value, inside)
        for _, module, own in self._modules:
            now = vars(module)
            for key in [k for k in now if k not in _OWN_MACHINERY and k not in own]:
                del now[key]
            now.update(own)
        for _, module, state in self._extra:
            if not self._same(state, module.get_extra_state(), set()):
                module.set_extra_state(copy.deepcopy(state))

    def _look_into(self, value: Any) -> None:
        """Note what is inside ``value`` and inside that, each object once."""
        waiting = [value]
        while waiting:
            current = waiting.pop()
            if id(current) in self._inside or isinstance(current, _PLAIN):
                continue
            if isinstance(current, (tuple, frozenset)):
                waiting += current
                continue
            if not _is_known(current) and not _is_simple(current):
                continue
            inside = _inside(current)
            if isinstance(inside, torch.Tensor):
                inside = inside.clone()
            elif _is_array(inside):
                inside = inside.copy()
            self._inside[id(current)] = (current, inside)
            waiting += _children(inside)

    def _same(self, saved: Any, now: Any, compared: set[tuple[int, int]]) -> bool:
        """Whether ``now`` is worth what ``saved`` was worth when the snapshot was taken."""
        if isinstance(saved, weakref.ReferenceType) and isinstance(now, weakref.ReferenceType):
            # RNNs keep references to their weights, and renew them where a replay has put its own in place.
            return saved() is now() or isinstance(saved(), nn.Parameter)
        if id(saved) not in self._inside:
            if isinstance(saved, (tuple, frozenset)) and type(saved) is type(now) and len(saved) == len(now):
                pairs = zip(saved, now, strict=True)
                return (
                    saved == now if isinstance(saved, frozenset) else all(self._same(a, b, compared) for a, b in pairs)
                )
            plain = isinstance(saved, _PLAIN) and type(saved) is type(now)
            return saved is now or (plain and (saved == now or (saved != saved and now != now)))
        if (id(saved), id(now)) in compared:
            return True
        compared.add((id(saved), id(now)))
        if type(saved) is not type(now):
            return False
        inside, others = self._inside[id(saved)][1], _inside(now)
        if isinstance(inside, torch.Tensor):
            return _same_bits(inside, others)
        if _is_array(inside):
            return (
                inside.dtype == others.dtype and inside.shape == others.shape and inside.tobytes() == others.tobytes()
            )
        if isinstance(inside, dict):
            return list(inside) == list(others) and all(self._same(v, others[k], compared) for k, v in inside.items())
        if isinstance(inside, list):
            pairs = zip(inside, others, strict=False)
            return len(inside) == len(others) and all(self._same(a, b, compared) for a, b in pairs)
        return bool(inside == others)


@dataclass(frozen=True)
class _NumpyState:
    """The state of a NumPy generator: as it is given back, and as it is compared."""

    state: Any = field(compare=False)
    bits: Any


def _inside(value: Any) -> Any:
    """What is inside one object, not what is inside that; tensors and arrays are not copied yet."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if _is_array(value):
        return value
    if type(value) in _SEQUENCES:
        return list(value)
    if type(value) in _MAPPINGS:
        return dict(value)
    if type(value) is set:
        return set(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_numpy_generator(value):
        state = value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state(legacy=False)
        return _NumpyState(copy.deepcopy(state), _flat(state))
    return dict(vars(value))


def _put_back(value: Any, inside: Any) -> None:
    """Make one object hold again what it held."""
    if isinstance(value, torch.Tensor):
        if not _same_bits(inside, value.detach()):
            with torch.no_grad():
                value.copy_(inside)
    elif _is_array(value):
        if value.tobytes() != inside.tobytes():
            value[...] = inside
    elif type(value) in _SEQUENCES:
        value.clear()
        value.extend(inside)
    elif type(value) in _MAPPINGS or type(value) is set:
        value.clear()
        value.update(inside)
    elif isinstance(value, torch.Generator):
        value.set_state(inside)
    elif isinstance(value, random.Random):
        value.setstate(inside)
    elif isinstance(inside, _NumpyState):
        if hasattr(value, "bit_generator"):
            value.bit_generator.state = copy.deepcopy(inside.state)
        else:
            value.set_state(copy.deepcopy(inside.state))
    else:
        vars(value).clear()
        vars(value).update(inside)


def _children(inside: Any) -> Collection[Any]:
    if isinstance(inside, dict):
        return inside.values()
    return inside if isinstance(inside, (list, set)) else ()


def _is_known(value: Any) -> bool:
    """Whether this is a kind of object that can be looked into and put back. Weights have checks of their own."""
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter)
    return (
        type(value) in (*_SEQUENCES, *_MAPPINGS, set)
        or isinstance(value, (torch.Generator, random.Random))
        or _is_array(value)
        or _is_numpy_generator(value)
    )


def _is_simple(value: Any) -> bool:
    """Whether an object of the user's own is made of nothing but what can be looked into."""
    waiting, seen = [value], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, _PLAIN):
            continue
        seen.add(id(current))
        if len(seen) > _MOST_OBJECTS:
            return False
        if isinstance(current, (tuple, frozenset)):
            waiting += current
        elif _is_known(current):
            waiting += _children(_inside(current))
        elif isinstance(current, nn.Module) or not hasattr(current, "__dict__") or _root_of(current) == "torch":
            return False
        else:
            waiting += vars(current).values()
    return True


def _root_of(value: Any) -> str:
    return type(value).__module__.split(".", 1)[0]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
        return False
    if a.layout is not torch.strided or a.is_meta:
        return a.is_meta or torch.equal(a.to_dense(), b.to_dense())
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _flat(state: Any) -> Any:
    """A NumPy state in a form that compares by value."""
    if isinstance(state, dict):
        return tuple((key, _flat(value)) for key, value in state.items())
    return state.tobytes() if _is_array(state) else state


def _is_array(value: Any) -> bool:
    return (
        type(value).__module__ == "numpy" and hasattr(value, "flags") and hasattr(value, "tobytes") and value.ndim > 0
    )


def _is_numpy_generator(value: Any) -> bool:
    return type(value).__module__.startswith("numpy.random") and (
        hasattr(value, "bit_generator") or hasattr(value, "get_state")
    )
