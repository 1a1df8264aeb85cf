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
    """The state of every global generator; ``cuda`` is None when CUDA has not started, ``numpy`` None without NumPy.

    ``cuda`` is the generator of the device in use: another rank puts it into *its* device, whatever its index.
    """

    torch: torch.Tensor
    cuda: torch.Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any] | tuple[Any, ...] | None

    @property
    def digest(self) -> str:
        """SHA-256 over all states, 64 hex digits."""
        cuda = b"" if self.cuda is None else self.cuda.numpy().tobytes()
        hashed = hashlib.sha256(self.torch.numpy().tobytes() + cuda)
        hashed.update(pickle.dumps((self.python, self.numpy)))
        return hashed.hexdigest()


def read_generators() -> GeneratorStates:
    """Copy the state of all generators; starts neither CUDA nor NumPy."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    return GeneratorStates(torch=torch.get_rng_state(), cuda=cuda, python=random.getstate(), numpy=numpy)


def write_generators(states: GeneratorStates) -> None:
    """Put every generator back into the given state."""
    torch.set_rng_state(states.torch)
    if states.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states.cuda)
    random.setstate(states.python)
    if states.numpy is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states.numpy)
