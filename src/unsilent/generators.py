"""The random number generators that a step may draw from: torch, CUDA, Python, NumPy."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class GeneratorStates:
    """The state of every global generator; ``cuda`` is empty when CUDA has not started, ``numpy`` None without NumPy."""

    torch: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...] | None

    @property
    def digest(self) -> str:
        """SHA-256 over all states, 64 hex digits."""
        parts = (self.torch.numpy().tobytes(), *(c.numpy().tobytes() for c in self.cuda))
        hashed = hashlib.sha256(b"".join(parts))
        hashed.update(pickle.dumps((self.python, self.numpy)))
        return hashed.hexdigest()


def read_generators() -> GeneratorStates:
    """Copy the state of all generators; starts neither CUDA nor NumPy."""
    cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return GeneratorStates(torch=torch.get_rng_state(), cuda=cuda, python=random.getstate(), numpy=numpy)


def write_generators(states: GeneratorStates) -> None:
    """Put every generator back into the given state."""
    torch.set_rng_state(states.torch)
    if states.cuda and torch.cuda.is_initialized():
        torch.cuda.set_rng_state_all(list(states.cuda))
    random.setstate(states.python)
    if states.numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states.numpy)
