"""DDP in loops as people write them: a clean run is quiet and changes no bit, one wrong value is repaired bit for bit.

All of them have dropout, and batches of dictionaries, lists, tuples, text, numbers and None.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset

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
from unsilent import AuditConfig, Guard, GuardConfig
from unsilent.lab.pool import RankPool

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
CLIP = 1e-3
"""Small enough that most gradients are clipped by it."""


@dataclass(kw_only=True)
class Run:
    """The parts of one loop on one rank."""

    rank: int
    model: Any
    inner: Any
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    scaler: torch.amp.GradScaler | None
    guard: Guard | None = None
    ema: Any = None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One way of writing it.

    Attributes:
        before: what is done to the model before it is wrapped.
        hook: what is done once all parts stand, also in the loop without a guard.
        by_hand: what the loop without a guard does between backward and step; ``guarded`` is how a guarded loop says it.
        late: what is done once the guard stands too, if there is one.
        after: what follows each step.
        parts: micro-batches in a step.
    """

    model: dict[str, Any] = field(default_factory=dict[str, Any])
    before: Callable[[Any], None] = lambda model: None
    ddp: dict[str, Any] = field(default_factory=dict[str, Any])
    optimizer: Callable[[Any], torch.optim.Optimizer] = ADAMW
    scheduler: Callable[[Any], LRScheduler] | None = None
    loss: Callable[[Any, Any], torch.Tensor] = plain_loss
    batches: Callable[[int], Iterator[Any]] | None = None
    hook: Callable[[Run], None] = lambda run: None
    by_hand: Callable[[Run], None] = lambda run: None
    guarded: Callable[[Run], None] = lambda run: None
    late: Callable[[Run], None] = lambda run: None
    after: Callable[[Run], None] = lambda run: None
    scale: float = 0.0
    clip: float | None = None
    parts: int = 1
    resumes: bool = False
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    target: str = "blocks.1.up"


# ---- what the loops are made of --------------------------------------------------------------------------------------


def freeze(model: Any) -> None:
    model.first.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)


def only_matrices(model: Any) -> None:
    """Muon is for two dimensions; what has one stays as it is."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)


def count_in_a_buffer(model: Any) -> None:
    model.last.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def count(module: Any, args: Any, output: Any) -> None:
        module.calls += 1

    model.last.register_forward_hook(count)


def count_in_an_attribute(model: Any) -> None:
    """Attributes belong to the rank: another one that reruns the work begins with its own."""
    model.last.calls, model.last.norms, model.last.peak = 0, [], 0.0

    def count(module: Any, args: Any, output: Any) -> None:
        module.calls += 1
        module.norms.append(float(output.detach().norm()))
        module.peak = max(module.peak, float(output.detach().abs().max()))

    model.last.register_forward_hook(count)


def clamp_each_gradient(model: Any) -> None:
    """A hook on a parameter sees the gradient of one micro-batch on one rank, before it is added to the others."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-CLIP, CLIP))


def clip_values(run: Run) -> None:
    nn.utils.clip_grad_value_(run.inner.parameters(), CLIP)


def clip_values_before_the_step(run: Run) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(run.inner.parameters(), CLIP))


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        plain_loss(run.model, batch(run.rank, 99))
    run.model.train()


def evaluate_before_the_step(run: Run) -> None:
    run.optimizer.register_step_pre_hook(lambda *_: evaluate(run))


def keep_an_average(run: Run) -> None:
    """It copies the model, which a guard has put its hooks on by then."""
    run.ema = AveragedModel(run.inner, multi_avg_fn=get_ema_multi_avg_fn(0.8))


def follow(run: Run) -> None:
    run.ema.update_parameters(run.inner)


def in_place_loss(model: Any, batch: Any) -> torch.Tensor:
    batch["x"].mul_(2)
    batch["nested"].append("used")
    return plain_loss(model, batch)


def warm_up(optimizer: Any) -> LRScheduler:
    up, down = LambdaLR(optimizer, lambda step: 0.1 + 0.3 * step), StepLR(optimizer, 1, gamma=0.7)
    return SequentialLR(optimizer, [up, down], milestones=[3])


class Endless(IterableDataset[dict[str, Any]]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(6 * STEPS):
            sample = batch(self.rank, i)
            yield {"x": sample["x"][0], "nested": [sample["nested"][0][0], "text"], "index": i}


def stream(rank: int) -> Iterator[Any]:
    return iter(DataLoader(Endless(rank), batch_size=6))


LOOPS = {
    "plain": Loop(),
    "accumulation": Loop(parts=3),
    # Its turn comes to the first micro-batch in steps 1 and 3, and a fault of one execution hits the first one.
    "accumulation, audited by turns": Loop(
        parts=2, config={"audit": AuditConfig(micro_batch="rotating"), "audit_every": 4}
    ),
    "scaler": Loop(scale=2.0**7),
    "scaler, clipped by norm": Loop(scale=2.0**7, clip=0.1, parts=2),
    "autocast": Loop(loss=loss_under_autocast),
    "autocast and scaler": Loop(loss=loss_under_autocast, scale=2.0**7),
    "checkpointed": Loop(model={"checkpointing": "not reentrant"}),
    "checkpointed, reentrant": Loop(model={"checkpointing": "reentrant"}),
    "checkpointed, selective": Loop(model={"checkpointing": "selective"}),
    "checkpointed, static graph": Loop(model={"checkpointing": "reentrant"}, ddp={"static_graph": True}),
    "unused": Loop(model={"spare": True}, ddp={"find_unused_parameters": True}),
    "frozen": Loop(before=freeze),
    "BatchNorm": Loop(model={"norm": True}),
    "BatchNorm, accumulation": Loop(model={"norm": True}, parts=2),
    "tied": Loop(model={"tied": True}),
    "average of the weights": Loop(late=keep_an_average, after=follow),
    "hook that counts in a buffer": Loop(before=count_in_a_buffer),
    "fused": Loop(optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "fused, scaler": Loop(optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True), scale=2.0**7),
    "foreach": Loop(optimizer=partial(torch.optim.AdamW, lr=1e-2, foreach=True)),
    "momentum": Loop(optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)),
    "Muon": Loop(before=only_matrices, optimizer=partial(torch.optim.Muon, lr=1e-2)),
    "clipped by norm": Loop(clip=0.1),
    "clipped by value": Loop(by_hand=clip_values, guarded=clip_values_before_the_step),
    "clipped by value, scaler": Loop(guarded=clip_values_before_the_step, by_hand=clip_values, scale=2.0**7),
    "each gradient clamped": Loop(before=clamp_each_gradient),
    "schedule": Loop(scheduler=partial(StepLR, step_size=2, gamma=0.5)),
    "schedules one after another": Loop(scheduler=warm_up),
    "IterableDataset": Loop(batches=stream),
    "batch written in place": Loop(loss=in_place_loss),
    "evaluation between steps": Loop(model={"norm": True}, after=evaluate),
    "evaluation in the loss": Loop(loss=loss_with_evaluation),
    "evaluation before the update": Loop(hook=evaluate_before_the_step),
    "resumed": Loop(resumes=True, scheduler=partial(StepLR, step_size=2, gamma=0.5), scale=2.0**7),
    "gradients are views": Loop(ddp={"gradient_as_bucket_view": True}, parts=2),
}
COUNTS = Loop(before=count_in_an_attribute)


# ---- one run ---------------------------------------------------------------------------------------------------------


def build(loop: Loop, rank: int) -> Run:
    torch.manual_seed(0)
    inner = Model(**{"spare": False, **loop.model})
    loop.before(inner)
    model = DistributedDataParallel(inner, **loop.ddp)
    optimizer = loop.optimizer([p for p in inner.parameters() if p.requires_grad])
    run = Run(
        rank=rank,
        model=model,
        inner=inner,
        optimizer=optimizer,
        scheduler=loop.scheduler(optimizer) if loop.scheduler is not None else None,
        scaler=torch.amp.GradScaler("cpu", init_scale=loop.scale) if loop.scale else None,
    )
    loop.hook(run)
    return run


def guard_of(loop: Loop, run: Run) -> Guard:
    options = {"audit_every": 2, "replicas_every": 2, "timeout_s": 10.0, **loop.config}
    config = GuardConfig(node=f"node-{run.rank}", **options)
    loop.guarded(run)
    return Guard(
        run.model, run.optimizer, loop.loss, scaler=run.scaler, scheduler=run.scheduler, clip_norm=loop.clip,
        config=config,
    )  # fmt: skip


def resumed(loop: Loop, old: Run) -> Run:
    """All parts anew, from what a checkpoint would hold."""
    new = build(loop, old.rank)
    for one, other in zip(parts_of(new), parts_of(old), strict=True):
        one.load_state_dict(other.state_dict())
    if old.guard is not None:
        old.guard.close()
        new.guard = guard_of(loop, new)
        new.guard.load_state_dict(old.guard.state_dict())
    return new


def parts_of(run: Run) -> list[Any]:
    return [part for part in (run.inner, run.optimizer, run.scheduler, run.scaler) if part is not None]


def step_by_hand(loop: Loop, run: Run, batches: list[Any]) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    for i, part in enumerate(batches):
        with contextlib.nullcontext() if i == len(batches) - 1 else run.model.no_sync():
            loss = loop.loss(run.model, part)
            loss = loss / len(batches) if len(batches) > 1 else loss
            (loss if run.scaler is None else run.scaler.scale(loss)).backward()
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    loop.by_hand(run)
    if loop.clip is not None:
        nn.utils.clip_grad_norm_(run.inner.parameters(), loop.clip)
    if run.scaler is None:
        run.optimizer.step()
    else:
        run.scaler.step(run.optimizer)
        run.scaler.update()
    if run.scheduler is not None:
        run.scheduler.step()


def train(rank: int, size: int, name: str, guarded: bool, fault: bool = False) -> dict[str, Any]:
    loop = LOOPS.get(name, COUNTS)
    run = build(loop, rank)
    torch.manual_seed(3 + rank)
    batches = loop.batches(rank) if loop.batches is not None else None
    said: list[Any] = []
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        if guarded:
            run.guard = guard_of(loop, run)
        loop.late(run)
        injector = injector_of(run.guard, rank, size, target=loop.target) if fault else None
        for step in range(STEPS):
            if loop.resumes and step == 2:
                generators = torch.get_rng_state()
                run = resumed(loop, run)
                torch.set_rng_state(generators)
                injector = injector_of(run.guard, rank, size, target=loop.target) if fault else None
            if injector is not None:
                injector.begin_step(step)
            parts = [next(batches) if batches is not None else batch(rank, step, part) for part in range(loop.parts)]
            if run.guard is None:
                step_by_hand(loop, run, parts)
            else:
                said += heard(run.guard.step(micro_batches=parts) if loop.parts > 1 else run.guard.step(parts[0]))
            loop.after(run)
        fired = injector.fired if injector is not None else 0
        if injector is not None:
            injector.close()
        if run.guard is not None:
            run.guard.close()
    modules = [run.inner, *([run.ema] if run.ema is not None else [])]
    state = [v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    last = run.inner.last
    counted = torch.tensor([getattr(last, "calls", 0), *getattr(last, "norms", []), getattr(last, "peak", 0.0)])
    return {
        "weights": [t.detach().clone() for t in (*(p for m in modules for p in m.parameters()), *state)],
        "buffers": [*(b.clone() for m in modules for b in m.buffers()), counted],
        "said": said,
        "told": told.getvalue(),
        "fired": fired,
        "generator": torch.get_rng_state(),
    }


@pytest.mark.parametrize("name", LOOPS)
def test_a_clean_run_is_quiet_and_one_wrong_value_is_repaired(pool3: RankPool, name: str) -> None:
    plain = pool3.results(train, name, False)
    clean = pool3.results(train, name, True)
    hit = pool3.results(train, name, True, True)
    assert [one["fired"] for one in hit] == [0, 1, 0]
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == []
        assert same(one, two) and torch.equal(one["generator"], two["generator"])
        assert three["said"] == [(HIT, "TRANSIENT", "REPAIR", [1])]
        assert same(one, three) and torch.equal(one["generator"], three["generator"])


def test_a_hook_that_counts_in_an_attribute_counts_right_also_in_a_step_that_is_repaired(pool3: RankPool) -> None:
    plain = pool3.results(train, "counts", False)
    clean = pool3.results(train, "counts", True)
    hit = pool3.results(train, "counts", True, True)
    assert "last.calls is changed by the forward and lies outside of buffers" in clean[0]["told"]
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == [] and same(one, two)
        assert three["said"] == [(HIT, "TRANSIENT", "REPAIR", [1])] and same(one, three)
        assert int(one["buffers"][-1][0]) == STEPS


def test_a_guarded_model_can_be_copied_and_the_copy_is_guarded_anew(pool3: RankPool) -> None:
    for said, finds, bits in pool3.results(_copied):
        assert said == [] and finds == [(HIT, "TRANSIENT", "REPAIR", [1])] and bits


def _copied(rank: int, size: int) -> tuple[list[Any], list[Any], bool]:
    loop = LOOPS["BatchNorm"]
    run = build(loop, rank)
    said: list[Any] = []
    with contextlib.redirect_stderr(io.StringIO()):
        run.guard = guard_of(loop, run)
        said += heard(run.guard.step(batch(rank, 0)))
        torch.save(run.inner, io.BytesIO())
        copied = copy.deepcopy(run.model)
        for step in range(1, STEPS):
            said += heard(run.guard.step(batch(rank, step)))
        run.guard.close()
        optimizer = loop.optimizer(copied.parameters())
        other = replace(run, model=copied, inner=copied.module, optimizer=optimizer)
        other.guard = guard_of(loop, other)
        injector = injector_of(other.guard, rank, size, target=loop.target)
        finds: list[Any] = []
        for step in range(STEPS):
            injector.begin_step(step)
            finds += heard(other.guard.step(batch(rank, step)))
        injector.close()
        other.guard.close()
    alike = [torch.empty_like(p) for p in copied.parameters()]
    for mine, first in zip(copied.parameters(), alike, strict=True):
        dist.broadcast(first.copy_(mine.detach()), 0)
    return said, finds, all(torch.equal(a, b) for a, b in zip(copied.parameters(), alike, strict=True))
