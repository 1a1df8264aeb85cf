"""A small deterministic job with one fault, whose evidence is kept in full; and its entry point for ``unsilent replay``."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector

WIDTH = 16
ONCE: dict[str, Any] = {"site": "forward", "pattern": "relative", "target": "first", "rank": 2, "step": 2}
STUCK: dict[str, Any] = {"site": "forward", "pattern": "stuck_lane", "target": "first", "rank": 2, "from_step": 2}


class Model(nn.Module):
    """Dropout and a running mean, so that generators and buffers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.2))


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def make() -> tuple[nn.Module, Any]:
    """What ``--entry`` names; the weights come from the bundle."""
    return Model(), loss_fn


def make_another() -> tuple[nn.Module, Any]:
    return nn.Linear(WIDTH, 1), loss_fn


def make_sick() -> tuple[nn.Module, Any]:
    """The model on a machine that always makes the error of :data:`STUCK`."""
    model = Model()
    injector = Injector(model, None, Fault(**STUCK | {"rank": 0, "from_step": 0}), rank=0, world_size=1)
    injector.begin_step(0)
    return model, loss_fn


def batch(rank: int, step: int, part: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    return {"x": torch.randn(8, WIDTH, generator=generator), "y": torch.randn(8, 1, generator=generator)}


def train(rank: int, size: int, out: Path, fault: dict[str, Any], steps: int = 3) -> tuple[list[str], int]:
    """(what was found, how often the fault fired)."""
    torch.manual_seed(0)
    inner = Model()
    model: nn.Module = DistributedDataParallel(inner) if size > 1 else inner
    optimizer = torch.optim.AdamW(inner.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    config = unsilent.GuardConfig(audit_every=1, replicas_every=1, evidence="full", directory=out, node=f"n{rank}")
    found: list[str] = []
    with contextlib.redirect_stderr(io.StringIO()):
        with unsilent.Guard(model, optimizer, loss_fn, scaler=scaler, config=config) as guard:
            with Injector(
                inner, optimizer, Fault(**fault), rank=rank, world_size=size,
                replaying=lambda: guard.replayer.running,
            ) as injector:  # fmt: skip
                torch.manual_seed(rank)
                for step in range(steps):
                    injector.begin_step(step)
                    outcome = guard.step(micro_batches=[batch(rank, step, part) for part in range(2)])
                    if outcome.verdict is not None:
                        found.append(f"{step} {outcome.verdict.kind.value} {outcome.action.value}")
                fired = injector.fired
    return found, fired
