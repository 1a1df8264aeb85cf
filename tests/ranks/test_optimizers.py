"""Several optimizers in one guard: a clean run is that of the loop by hand, and each finding is met as with a single one.

One optimizer has the matrices, the other the rest; each has a scheduler of its own. With a scaler, step ``OVERFLOWS`` overflows in
the gradient of one bias alone, so that the loop by hand leaves out the second optimizer and not the first.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from tests.ranks import loops
from tests.ranks.loops import batch, heard, injector_of, same
from unsilent import Guard, GuardConfig, UsageError
from unsilent.lab.pool import RankPool
from unsilent.sharding import local

STEPS = 8
SAVED = 4
OVERFLOWS = 4

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
MUON = partial(torch.optim.Muon, lr=1e-2)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)

FORWARD = {"step": 3, "target": "blocks.1.up"}
STUCK = {"pattern": "stuck_lane", "relative": None, "add": 0.01, "every": 4, "step": None, "from_step": 4,
         "target": "blocks.1.up"}  # fmt: skip
WEIGHT = {"site": "weight", "pattern": "bit_flip", "relative": None, "bit": 21, "target": "blocks.1.up.weight"}
MOMENT = {
    "site": "optimizer_state",
    "pattern": "bit_flip",
    "relative": None,
    "bit": 22,
    "key": "exp_avg",
    "target": "last.bias",
}


class Model(loops.Model):
    def __init__(self) -> None:
        super().__init__(spare=False)

    def forward(self, x: torch.Tensor, factor: float = 0.0) -> torch.Tensor:
        """The factor is in the gradient of one bias and in no value."""
        added = factor * self.last.bias.sum()
        return super().forward(x) + (added - added.detach())


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], batch["factor"]), batch["nested"][0])


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run goes.

    Attributes:
        first: what updates the matrices; ``ADAMW`` has the rest.
        scaled: with a loss scaler; its scale is no power of two, so that another order of work gives other bits.
        watched: the loop owns its step.
        save: a directory to save to, once ``SAVED`` steps are done.
        load: one to load from, before the first step.
        resumes: a loop by hand makes all parts anew after ``SAVED`` steps: DDP's buckets, and with them the order of sums, are
            those of a first step again.
    """

    first: Callable[[Any], torch.optim.Optimizer] = SGD
    sharded: bool = False
    scaled: bool = False
    clip: float | None = None
    guarded: bool = True
    watched: bool = False
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    fault: dict[str, Any] = field(default_factory=dict[str, Any])
    save: str = ""
    load: str = ""
    resumes: bool = False


@dataclass(kw_only=True)
class Run:
    """The parts of a loop on one rank."""

    model: Any
    inner: Model
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    scaler: torch.amp.GradScaler | None
    guard: Guard | None = None

    def parts(self) -> list[Any]:
        return [self.inner, *self.optimizers, *self.schedulers, *([] if self.scaler is None else [self.scaler])]


def build(way: Way, rank: int, size: int, seed: int) -> Run:
    torch.manual_seed(seed)
    inner = Model()
    model: Any = inner
    if way.sharded:
        mesh = init_device_mesh("cpu", (size,))
        for block in inner.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(inner, mesh=mesh)
    else:
        model = DistributedDataParallel(inner)
    matrices, rest = ([p for p in inner.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    both = [way.first(matrices), ADAMW(rest)]
    run = Run(
        model=model,
        inner=inner,
        optimizers=both,
        schedulers=[StepLR(both[0], 2, gamma=0.5), ExponentialLR(both[1], 0.9)],
        scaler=torch.amp.GradScaler("cpu", init_scale=96.0, growth_interval=3) if way.scaled else None,
    )
    if way.guarded:
        options = {"audit_every": 2, "replicas_every": 2, "timeout_s": 20.0, **way.config}
        run.guard = Guard(
            model, both, loss_of, scaler=run.scaler, scheduler=run.schedulers, clip_norm=None if way.watched else way.clip,
            config=GuardConfig(node=f"node-{rank}", **options),
        )  # fmt: skip
    return run


def train(rank: int, size: int, way: Way) -> dict[str, Any]:
    with contextlib.redirect_stderr(io.StringIO()):
        return _train(rank, size, way)


def _train(rank: int, size: int, way: Way) -> dict[str, Any]:
    run = build(way, rank, size, seed=7 if way.load else 0)
    guard, injector, begin, fired = run.guard, None, 0, 0
    torch.manual_seed(3 + rank)
    if guard is not None and way.load:
        begin = guard.load(way.load, certified=True)
    said: list[Any] = []
    for step in range(begin, STEPS):
        if way.resumes and step == SAVED:
            generator, old = torch.get_rng_state(), run
            run = build(way, rank, size, seed=7)
            for new, before in zip(run.parts(), old.parts(), strict=True):
                new.load_state_dict(before.state_dict())
            torch.set_rng_state(generator)
        if way.fault and guard is not None and step == 1:  # moments are there by now
            injector = injector_of(guard, rank, size, **way.fault)
        if injector is not None:
            injector.begin_step(step)
        part = {**batch(rank, step), "factor": 1e38 if way.scaled and step == OVERFLOWS else 0.0}
        if guard is not None and not way.watched:
            said += heard(guard.step(part, saving=bool(way.save) and step + 1 == SAVED))
        else:
            said += step_by_hand(way, run, part)
        if injector is not None:
            injector.after_update(step)
            fired = injector.fired
        if guard is not None and way.save and step + 1 == SAVED:
            assert guard.save(way.save) is not None
    if injector is not None:
        injector.close()
    if guard is not None:
        guard.close()
    groups = [(part, group) for part in run.optimizers for group in part.param_groups]
    state = [v for part, group in groups for p in group["params"] for _, v in sorted(part.state[p].items())]
    counts = [group["lr"] for _, group in groups], [scheduler.last_epoch for scheduler in run.schedulers]
    return {
        "weights": [local(t).detach().clone() for t in (*run.inner.parameters(), *state)],
        "buffers": [],
        "counts": (*counts, {} if run.scaler is None else run.scaler.state_dict()),
        "steps": [int(of_one["step"]) for of_one in run.optimizers[1].state.values()],
        "generator": torch.get_rng_state(),
        "said": said,
        "fired": fired,
        "begin": begin,
    }


def step_by_hand(way: Way, run: Run, part: Any) -> list[Any]:
    """The step as a loop writes it."""
    scaler = run.scaler
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    with contextlib.nullcontext() if run.guard is None else run.guard.watch(part) as watched:
        loss = loss_of(run.model, part)
        (loss if scaler is None else scaler.scale(loss)).backward()
    if way.clip is not None:
        nn.utils.clip_grad_norm_(run.model.parameters(), way.clip)
    for optimizer in run.optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for scheduler in run.schedulers:
        scheduler.step()
    return [] if run.guard is None else heard(watched)


def held(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return same(one, other) and one["counts"] == other["counts"] and torch.equal(one["generator"], other["generator"])


WAYS = {
    "DDP, SGD and AdamW": Way(),
    "DDP, Muon and AdamW": Way(first=MUON),
    "FSDP2, SGD and AdamW": Way(sharded=True),
    "DDP, Muon and AdamW, scaler": Way(first=MUON, scaled=True),
    "DDP, SGD and AdamW, clipped": Way(clip=0.1),
    "FSDP2, Muon and AdamW, scaler": Way(first=MUON, sharded=True, scaled=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_clean_run_is_quiet_and_one_wrong_value_is_repaired(pool3: RankPool, way: Way) -> None:
    plain = pool3.results(train, _with(way, guarded=False))
    clean = pool3.results(train, way)
    hit = pool3.results(train, _with(way, fault=FORWARD))
    assert [one["fired"] for one in hit] == [0, 1, 0]
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == [] and held(one, two)
        assert three["said"] == [(3, "TRANSIENT", "REPAIR", [1])] and held(one, three)
        if way.scaled:  # the loop by hand has left out the one and not the other
            assert set(one["steps"]) == {STEPS - 1}


def _with(way: Way, **changes: Any) -> Way:
    return Way(**{**vars(way), **changes})


EVERY = {"replicas_every": 1}
DDP, SHARDED = Way(first=MUON, scaled=True), Way(sharded=True)
CASES: dict[str, tuple[Way, list[Any]]] = {
    "HEAL, a weight of the first": (_with(DDP, config=EVERY, fault={**WEIGHT, "step": 3}), [(4, "HEAL", [1])]),
    "HEAL, a moment of the second": (_with(DDP, config=EVERY, fault={**MOMENT, "step": 3}), [(4, "HEAL", [1])]),
    # The scaler leaves the second out in one of the steps that are run again.
    "ROLLBACK, a weight of the first": (
        _with(DDP, config={"replicas_every": 4, "audit_every": None}, fault={**WEIGHT, "step": 3}), [(7, "ROLLBACK", [1])],
    ),
    "ROLLBACK, a moment of the second": (
        _with(DDP, config={"replicas_every": 4, "audit_every": None}, fault={**MOMENT, "step": 3}), [(7, "ROLLBACK", [1])],
    ),
    "ROLLBACK, to before they had state": (
        _with(DDP, config={"replicas_every": 4, "audit_every": None}, fault={**WEIGHT, "step": 1}), [(3, "ROLLBACK", [1])],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("way", "done"), CASES.values(), ids=CASES.keys())
def test_wrong_state_is_found_by_vote_and_after_it_the_run_has_the_bits_of_a_clean_one(
    pool3: RankPool, way: Way, done: list[Any]
) -> None:
    plain = pool3.results(train, _with(way, guarded=False, fault={}))
    for one, two in zip(plain, pool3.results(train, way), strict=True):
        assert [(step, action, ranks) for step, _, action, ranks in two["said"]] == done
        assert held(one, two)


@pytest.mark.parametrize("way", [Way(first=MUON), SHARDED], ids=["DDP", "FSDP2"])
def test_what_a_bad_device_did_is_rolled_back(pool3: RankPool, way: Way) -> None:
    config = {"audit_every": 4, "replicas_every": 4}
    plain = pool3.results(train, _with(way, guarded=False))
    for one, two in zip(plain, pool3.results(train, _with(way, config=config, fault=STUCK)), strict=True):
        assert next((step, action, ranks) for step, _, action, ranks in two["said"]) == (7, "ROLLBACK", [1])
        assert held(one, two)


@pytest.mark.parametrize("way", [DDP, SHARDED], ids=["DDP", "FSDP2"])
def test_a_certified_checkpoint_leads_on_with_the_same_bits(pool3: RankPool, tmp_path: Path, way: Way) -> None:
    plain = pool3.results(train, _with(way, guarded=False))
    resumed = pool3.results(train, _with(way, guarded=False, resumes=True))
    saved = pool3.results(train, _with(way, save=str(tmp_path)))
    loaded = pool3.results(train, _with(way, load=str(tmp_path)))
    for one, again, two, three in zip(plain, resumed, saved, loaded, strict=True):
        assert two["said"] == three["said"] == [] and three["begin"] == SAVED
        assert held(one, two) and held(again, three)


@pytest.mark.parametrize(
    "way", [Way(watched=True), Way(watched=True, first=MUON, scaled=True)], ids=["plain", "scaler"]
)
def test_a_loop_that_owns_its_step_steps_each_of_them(pool3: RankPool, way: Way) -> None:
    plain = pool3.results(train, _with(way, guarded=False))
    clean = pool3.results(train, way)
    hit = pool3.results(train, _with(way, fault=FORWARD))
    for one, two, three in zip(plain, clean, hit, strict=True):
        assert two["said"] == [] and held(one, two)
        assert three["said"] == [(3, "TRANSIENT", "REPAIR", [1])] and held(one, three)


def test_in_such_a_loop_each_steps_once_after_the_block(pool3: RankPool) -> None:
    for told, steps in pool3.results(_out_of_order):
        assert len(told) == 3 and all("no block of guard.watch has looked at" in text for text in told)
        assert steps == 2


def _out_of_order(rank: int, size: int) -> tuple[list[str], int]:
    """Twice in one update; after the guard was asked for its state; before any block."""
    torch.manual_seed(0)
    inner = Model()
    one, other = SGD(inner.first.parameters()), ADAMW(inner.last.parameters())
    for block in inner.blocks:
        block.requires_grad_(False)
    model = DistributedDataParallel(inner)
    told: list[str] = []

    def refused(optimizer: torch.optim.Optimizer) -> None:
        with pytest.raises(UsageError) as error:
            optimizer.step()
        told.append(str(error.value))

    with contextlib.redirect_stderr(io.StringIO()):
        guard = Guard(model, [one, other], loss_of, config=GuardConfig(node=f"node-{rank}", timeout_s=20.0))
        for step in range(2):
            one.zero_grad()
            other.zero_grad()
            part = {**batch(rank, step), "factor": 0.0}
            with guard.watch(part):
                loss_of(model, part).backward()
            one.step()
            if step == 0:
                refused(one)
                other.step()
            else:
                guard.state_dict()  # the update is over: what was left out is not made late
                refused(other)
        refused(one)
        steps = guard.steps
        guard.close()
    return told, steps
