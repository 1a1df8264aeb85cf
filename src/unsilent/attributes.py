"""State that modules keep outside parameters and buffers: plain attributes, own generators, extra state.

A replay puts such state back, so that an audit leaves no trace; and it tells which module changed some, since work
that depends on it cannot be judged by another rank.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import nn

_OWN_MACHINERY = frozenset(nn.Module().__dict__) | {"_is_full_backward_hook", "_compiled_call_impl"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_EXTRA = "get_extra_state()"


class Attributes:
    """A snapshot of the plain attributes of all modules under ``root``."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._saved: list[tuple[str, nn.Module, str, Any]] = []
        for name, module in root.named_modules():
            for key, value in vars(module).items():
                if key not in _OWN_MACHINERY:
                    self._saved.append((name, module, key, _save(value)))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._saved.append((name, module, _EXTRA, _save(module.get_extra_state())))

    def changed(self) -> str:
        """The first attribute that differs now, as ``module.attribute``; "" when none does."""
        for name, module, key, saved in self._saved:
            if not _same(saved, _now(module, key)):
                return f"{name or '<root>'}.{key}"
        return ""

    def restore(self) -> None:
        """Put back what changed since the snapshot. Attributes that are new since then stay."""
        for _, module, key, saved in self._saved:
            now = _now(module, key)
            if _same(saved, now):
                continue
            if key == _EXTRA:
                module.set_extra_state(copy.deepcopy(saved))
            elif isinstance(now, torch.Generator):
                now.set_state(saved)
            elif isinstance(now, random.Random):
                now.setstate(saved)
            elif _is_numpy_generator(now):
                now.bit_generator.state = copy.deepcopy(saved)
            elif isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor) and now.shape == saved.shape:
                with torch.no_grad():
                    now.copy_(saved)
            else:
                setattr(module, key, _save(saved))


def _now(module: nn.Module, key: str) -> Any:
    return module.get_extra_state() if key == _EXTRA else vars(module).get(key)


def _save(value: Any) -> Any:
    """A copy that later changes cannot reach; objects that cannot be looked into stand for themselves."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if _is_numpy_generator(value):
        return copy.deepcopy(value.bit_generator.state)
    if type(value) in (list, tuple, set):
        return type(value)(_save(v) for v in value)
    if type(value) is dict:
        return {k: _save(v) for k, v in value.items()}
    return value


def _same(saved: Any, now: Any) -> bool:
    if isinstance(now, torch.Generator):
        now = now.get_state()
    elif isinstance(now, random.Random):
        now = now.getstate()
    elif _is_numpy_generator(now):
        now = now.bit_generator.state
    if isinstance(saved, torch.Tensor):
        if not isinstance(now, torch.Tensor) or saved.shape != now.shape or saved.dtype != now.dtype:
            return False
        # Equal numbers or the same NaN; a sign of zero that changed alone cannot change a later comparison's blame.
        return bool(torch.equal(saved, now.detach())) or _same_bits(saved, now.detach())
    if type(saved) in (list, tuple):
        return type(saved) is type(now) and len(saved) == len(now) and all(map(_same, saved, now))
    if type(saved) is dict:
        return type(now) is dict and saved.keys() == now.keys() and all(_same(v, now[k]) for k, v in saved.items())
    if isinstance(saved, _PLAIN) or type(saved) is set:
        return type(saved) is type(now) and (saved == now or (saved != saved and now != now))
    return saved is now or _equal_arrays(saved, now)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _equal_arrays(saved: Any, now: Any) -> bool:
    """NumPy arrays inside a generator's state compare by value."""
    return type(saved).__module__ == "numpy" and type(saved) is type(now) and bool((saved == now).all())


def _is_numpy_generator(value: Any) -> bool:
    return hasattr(value, "bit_generator") and type(value).__module__.startswith("numpy")
