"""What the training loops of test_ddp_loops.py and test_fsdp2_loops.py have in common: a small model, batches, losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector

STEPS = 5
HIT = 3
"""The step that a fault hits; steps 1, 3 and 4 are audited."""


class Block(nn.Module):
    """``checkpointing``: None, ``"reentrant"``, ``"not reentrant"`` or ``"selective"`` (matmuls are kept, the rest is not)."""

    def __init__(self, width: int, *, checkpointing: str | None = None, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing is None:
            return x + self._inner(x)
        if self.checkpointing == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _keep_matmuls)
            return x + checkpoint(self._inner, x, use_reentrant=False, context_fn=contexts)
        return x + checkpoint(self._inner, x, use_reentrant=self.checkpointing == "reentrant")

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def _keep_matmuls(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Model(nn.Module):
    """``spare``: it has a layer that no forward uses; ``tied``: two blocks share a weight."""

    def __init__(self, *, spare: bool = True, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7, **options) for _ in range(2))
        self.last = nn.Linear(7, 3)
        if spare:
            self.spare = nn.Linear(7, 3)
        if tied:
            self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["nested"][0])


def loss_with_evaluation(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = plain_loss(model, batch)
    with torch.no_grad():
        plain_loss(model, batch)  # under FSDP2 it leaves the root's weights gathered
    return loss


def loss_under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain_loss(model, batch)


def batch(rank: int, step: int, part: int = 0) -> dict[str, Any]:
    """A batch as nested as any: other values on every rank and in every step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * part + 100 * step + rank)
    return {
        "x": torch.randn(6, 5, generator=generator),
        "nested": [torch.randn(6, 3, generator=generator), "text", (step, 0.5)],
        "more": None,
    }


def injector_of(guard: Any, rank: int, size: int, **fault: Any) -> Injector:
    """One wrong value, by default in a forward of rank 1 in step ``HIT``."""
    wrong = {"site": "forward", "pattern": "relative", "relative": 0.5, "rank": 1, "step": HIT, **fault}
    return Injector(
        guard.inner, guard.optimizer, Fault(**wrong), rank=rank, world_size=size, node=f"node-{rank}",
        replaying=lambda: guard.replayer.running,
    )  # fmt: skip


def heard(outcome: Any) -> list[tuple[int, str, str, list[int | None]]]:
    """What a step has found: nothing, or (step, kind, action, ranks)."""
    if outcome.verdict is None:
        return []
    suspects = [s.rank for s in outcome.verdict.suspects]
    return [(outcome.step, outcome.verdict.kind.value, outcome.action.value, suspects)]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(a, b) for part in ("weights", "buffers") for a, b in zip(one[part], other[part], strict=True)
    )
