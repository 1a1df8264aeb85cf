"""FSDP2 in loops as people write them: a clean run is quiet and changes no bit, one wrong value is repaired bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from tests.ranks.loops import (
    HIT,
    STEPS,
    Model,
    batch,
    heard,
    injector_of,
    loss_under_autocast,
    loss_with_evaluation,
    plain_loss,
    same,
)
from unsilent import Guard, GuardConfig
from unsilent.lab.pool import Failed, RankPool
from unsilent.sharding import local


class UsersReduceScatter(DefaultReduceScatter):
    """Stands for a collective of the user's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def _freeze(model: Model) -> None:
    model.first.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)


def _frozen_row(model: Model) -> None:
    """Rank 0 owns all of it, the others nothing."""
    model.row = nn.Parameter(torch.zeros(1, 7), requires_grad=False)


def _named_model(model: Model) -> None:
    """A sharded part that is called as the whole is elsewhere."""
    model.model = nn.Linear(7, 7)
    model.last = nn.Sequential(model.model, model.last)


def _wrap(model: Model) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def _own_collective(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(UsersReduceScatter())


ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One way of writing it: what is done to the model before and after ``fully_shard``, and the other parts."""

    model: dict[str, Any] | None = None
    before: Callable[[Model], None] = lambda model: None
    after: Callable[[Any], None] = lambda model: None
    shard: dict[str, Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW
    loss: Callable[[Any, Any], torch.Tensor] = plain_loss
    scale: float = 0.0
    evaluates: bool = False
    schedule: bool = False
    target: str = "blocks.1.up"


LOOPS = {
    "checkpointed": Loop(model={"checkpointing": "not reentrant"}),
    "checkpointed, reentrant": Loop(model={"checkpointing": "reentrant"}),
    "checkpoint wrapper": Loop(before=_wrap, target="blocks.1._checkpoint_wrapped_module.up"),
    "BatchNorm": Loop(model={"norm": True}),
    "frozen": Loop(before=_freeze),
    "offloaded": Loop(shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "autocast": Loop(loss=loss_under_autocast),
    "scaler": Loop(scale=2.0**7),
    "fp16, the scale searched": Loop(
        shard={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}, scale=2.0**18
    ),
    "evaluation between steps": Loop(evaluates=True),
    "a frozen row": Loop(before=_frozen_row),
    "a part called model": Loop(before=_named_model),
    "evaluation in the loss": Loop(loss=loss_with_evaluation),
    "fused": Loop(optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "foreach SGD": Loop(optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9, foreach=True), schedule=True),
    "own collective": Loop(after=_own_collective),
}


def train(
    rank: int, size: int, name: str, directory: str | None, *, fault: bool = False, raises: bool = False
) -> dict[str, Any]:
    loop = LOOPS[name]
    torch.manual_seed(0)
    model: Any = Model(**(loop.model or {}))
    loop.before(model)
    options = {"mesh": init_device_mesh("cpu", (size,)), **(loop.shard or {})}
    for block in (*model.blocks, *([model.model] if hasattr(model, "model") else [])):
        fully_shard(block, **options)
    fully_shard(model, **options)
    loop.after(model)
    optimizer = loop.optimizer([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if loop.schedule else None
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale) if loop.scale else None
    torch.manual_seed(3 + rank)
    said: list[Any] = []
    if directory is None:
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss = loop.loss(model, batch(rank, step))
            (loss if scaler is None else scaler.scale(loss)).backward()
            for module in (*model.blocks, model):  # what an evaluation leaves behind would go into the next forward
                module.reshard()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            _evaluate(loop, model, rank)
    else:
        config = GuardConfig(directory=directory, node=f"node-{rank}", audit_every=2, replicas_every=2, timeout_s=10.0)
        guard = Guard(model, optimizer, loop.loss, scaler=scaler, scheduler=scheduler, config=config)
        injector = injector_of(guard, rank, size, target=loop.target)
        try:
            for step in range(STEPS):
                if fault:
                    injector.begin_step(step)
                if raises and step == HIT and rank == 1:
                    model.last.register_forward_pre_hook(_fail)
                said += heard(guard.step(batch(rank, step)))
                _evaluate(loop, model, rank)
        finally:
            injector.close()
            guard.close()
    model.reshard()  # an evaluation at the end has gathered the root's weights
    weights = [local(p).clone() for p in model.parameters()]
    return {"weights": weights, "buffers": [b.clone() for b in model.buffers()], "said": said}


def _evaluate(loop: Loop, model: nn.Module, rank: int) -> None:
    if loop.evaluates:
        with torch.no_grad():
            loop.loss(model, batch(rank, 99))


def _fail(module: nn.Module, args: Any) -> None:
    raise ValueError("the user's own mistake")


@pytest.mark.parametrize("name", LOOPS)
def test_a_clean_run_is_quiet_and_one_wrong_value_is_repaired(pool3: RankPool, tmp_path: Path, name: str) -> None:
    plain = pool3.results(train, name, None)
    clean = pool3.results(train, name, str(tmp_path / "clean"))
    hit = pool3.results(partial(train, fault=True), name, str(tmp_path / "hit"))
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == []
        assert same(one, two)
        assert three["said"] == [(HIT, "TRANSIENT", "REPAIR", [1])]
        assert same(one, three)


def test_a_rank_that_raises_is_named_on_all_others_within_seconds(pool: RankPool, tmp_path: Path) -> None:  # F15, P4
    begin = time.monotonic()
    answers = pool.run(partial(train, raises=True), "fused", str(tmp_path))
    took = time.monotonic() - begin
    pool.restart()
    assert all(isinstance(answer, Failed) for answer in answers)
    assert answers[1].kind == "ValueError"
    for rank, answer in enumerate(answers):
        if rank != 1:
            assert answer.kind == "RankFailure" and "rank 1" in answer.text and "own mistake" in answer.text
    assert took < 60  # most of it is the three steps before, on a busy machine
