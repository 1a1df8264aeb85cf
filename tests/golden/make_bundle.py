"""The run that made ``bundle-v1``: one rank, one wrong activation. The bundle is frozen; a new version gets a new one.

All numbers are small integers, so that the bits are the same on every machine.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector


class Doubles(nn.Module):
    """The squares of what comes in, counted by how often they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
        self.square = nn.Identity()
        self.register_buffer("made", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return self.square(x * self.weight)


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).sum()


def make() -> tuple[nn.Module, Any]:
    """What ``unsilent replay --entry`` names."""
    return Doubles(), loss_fn


def write(directory: Path) -> Path:
    """Write the bundle under ``directory``, and return it."""
    model = Doubles()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    config = unsilent.GuardConfig(audit_every=1, evidence="full", directory=directory, node="node0")
    fault = Fault(site="forward", pattern="scale", factor=2.0, target="square", rank=0, step=1)
    with contextlib.redirect_stderr(io.StringIO()), unsilent.Guard(model, optimizer, loss_fn, config=config) as guard:
        replaying = lambda: guard.replayer.running  # noqa: E731
        with Injector(model, optimizer, fault, rank=0, world_size=1, replaying=replaying) as injector:
            for step in range(2):
                injector.begin_step(step)
                guard.step(torch.full((3,), float(step + 1)))
    (bundle,) = (directory / "evidence").iterdir()
    return bundle
