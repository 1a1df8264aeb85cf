"""What the demo runs: a small LLaMA on real text, with one fault each, and what must come of it.

The functions below the plans run on every rank of a pool. The guard is never told of a fault: the injector changes
real tensors, and what the guard said is read from the run's own log afterwards.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unsilent.config import GuardConfig
from unsilent.errors import Quarantine
from unsilent.guard import Guard
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.records import Action, Kind
from unsilent.training.data import TextData, standard_library_text
from unsilent.training.model import build_model, make_loss_fn, weights_sha256
from unsilent.training.presets import TINY, Preset

CHECKPOINTS = "checkpoints"
RESUMED = "resumed"
LOGS = "logs"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all runs of one demo share, guarded or not."""

    preset: Preset = TINY
    steps: int = 24
    audit_every: int = 4
    save_every: int = 8
    sequence_length: int = 64
    global_batch: int = 12  # shared evenly by 4 ranks, and by the 3 that are left after a quarantine
    learning_rate: float = 2e-3
    clip_norm: float = 1.0
    text_bytes: int = 1_000_000
    seed: int = 0

    @property
    def saves(self) -> tuple[int, ...]:
        """The numbers of completed updates at which the run saves."""
        return tuple(range(self.save_every, self.steps + 1, self.save_every))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One fault and what must come of it.

    Attributes:
        title: the fault in plain words.
        caught_step: the first step in which a check can see it.
        action: what must be done in the end; REPAIR, say, or QUARANTINE.
        refuses: the checkpoint that must not be written, if any.
        resumes_from: the checkpoint that a quarantine must name.
    """

    name: str
    title: str
    fault: Fault
    caught_step: int
    kind: Kind
    action: Action
    refuses: int | None = None
    resumes_from: int | None = None

    @property
    def verdict_steps(self) -> tuple[int, ...]:
        """Where verdicts must stand: a quarantine needs a second one, in the audit of the step after."""
        if self.action is Action.QUARANTINE:
            return (self.caught_step, self.caught_step + 1)
        return (self.caught_step,)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of one demo."""

    setup: Setup = field(default_factory=Setup)
    scenarios: tuple[Scenario, ...] = ()
    ranks: int = 4


def full_plan() -> Plan:
    """Audits run in steps 3, 7, 11, … and checkpoints are written after 8, 16 and 24 updates."""
    block = "model.layers"
    return Plan(
        scenarios=(
            Scenario(
                name="nan-in-backward",
                title="NaN in rank 1's backward",
                fault=Fault(site="backward", target=f"{block}.1.mlp", pattern="nan", rank=1, step=5),
                caught_step=5, kind=Kind.TRANSIENT, action=Action.REPAIR,
            ),
            Scenario(
                name="nan-in-reduction",
                title="NaN made by the reduction, all inputs fine",
                fault=Fault(site="reduction", pattern="nan", step=9),
                caught_step=9, kind=Kind.TRANSIENT, action=Action.RECOMPUTE,
            ),
            Scenario(
                name="wrong-activation",
                title="one value in rank 2's forward off by 0.0025 %",
                fault=Fault(site="forward", target=f"{block}.2.self_attn.o_proj", pattern="relative", rank=2, step=11),
                caught_step=11, kind=Kind.TRANSIENT, action=Action.REPAIR,
            ),
            Scenario(
                name="stuck-lane",
                title="rank 2's device is stuck in one lane for good",
                fault=Fault(site="forward", target=f"{block}.0.mlp", pattern="stuck_lane", rank=2, from_step=9),
                caught_step=11, kind=Kind.PERSISTENT, action=Action.QUARANTINE, resumes_from=8,
            ),
            Scenario(
                name="never-repeats",
                title="rank 2's device errs, never twice alike, for good",
                fault=Fault(site="backward", target=f"{block}.3.self_attn", pattern="random_bits", rank=2, from_step=13),
                # Caught in the audit before a save: that checkpoint is written, distrusted, and must not be named.
                caught_step=15, kind=Kind.PERSISTENT, action=Action.QUARANTINE, resumes_from=8,
            ),
            Scenario(
                name="weight-bit",
                title="one weight bit flips on rank 3 after an update",
                fault=Fault(site="weight", target=f"{block}.1.mlp.up_proj.weight", pattern="bit_flip", bit=0, rank=3,
                            step=13),
                caught_step=14, kind=Kind.TRANSIENT, action=Action.HEAL,
            ),
            Scenario(
                name="weight-bit-at-checkpoint",
                title="one weight bit flips on rank 3 before a save",
                fault=Fault(site="weight", target="lm_head.weight", pattern="bit_flip", bit=11, rank=3, step=15),
                caught_step=16, kind=Kind.TRANSIENT, action=Action.HEAL, refuses=16,
            ),
        )
    )  # fmt: skip


def quick_plan() -> Plan:
    """One fault of each action, in a very small model, and no more steps than the faults need."""
    small = Preset(name="quick", hidden_size=32, layers=4, heads=2, ffn_size=64, vocabulary=256)
    setup = Setup(preset=small, steps=17, sequence_length=32, text_bytes=200_000)
    names = ("nan-in-backward", "nan-in-reduction", "stuck-lane", "weight-bit-at-checkpoint")
    plan = full_plan()
    return replace(plan, setup=setup, scenarios=tuple(s for s in plan.scenarios if s.name in names))


# ---- on every rank of a pool -----------------------------------------------------------------------------------------


def train_unguarded(rank: int, size: int, setup: Setup, directory: Path) -> dict[str, Any]:
    """Plain DDP, no guard, no fault."""
    _screen_to_log(directory, rank)
    job = _Job(rank, size, setup)
    losses: list[float] = []
    for step in range(setup.steps):
        job.optimizer.zero_grad(set_to_none=True)
        loss = job.loss_fn(job.ddp, job.batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(job.inner.parameters(), setup.clip_norm)
        job.optimizer.step()
        losses.append(float(loss.detach()))
    return {"weights": weights_sha256(job.inner), "losses": losses}


def train_guarded(rank: int, size: int, setup: Setup, fault: Fault | None, directory: Path) -> dict[str, Any]:
    """A guarded run, with ``fault`` if there is one; what the guard says of it stands in its log in ``directory``."""
    _screen_to_log(directory, rank)
    job = _Job(rank, size, setup)
    weights: list[str] = []  # after each update
    saved: list[int] = []
    stopped: Quarantine | None = None
    injector: Injector | None = None
    with _guard(job, directory, node=f"node-{rank}") as guard:
        if fault is not None:
            injector = Injector(
                job.inner, job.optimizer, fault, rank=rank, world_size=size, replaying=lambda: guard.replayer.running
            )
        try:
            for step in range(setup.steps):
                if injector is not None:
                    injector.begin_step(step)
                guard.step(job.batch(step))
                if injector is not None:
                    injector.after_update(step)
                if guard.steps in setup.saves and guard.save(directory / CHECKPOINTS) is not None:
                    saved.append(guard.steps)
                weights.append(weights_sha256(job.inner))
        except Quarantine as error:
            stopped = error
        finally:
            if injector is not None:
                injector.close()
    return {
        "weights": weights,
        "saved": saved,
        "fired": 0 if injector is None else injector.fired,
        "changed": 0 if injector is None else sum(injection.changed for injection in injector.record),
        "exit_code": 0 if stopped is None else stopped.exit_code,
        "resume_from": None if stopped is None else stopped.resume_from,
    }


def resume(
    rank: int, size: int, setup: Setup, checkpoint: Path, nodes: tuple[str, ...], directory: Path
) -> dict[str, Any]:
    """Load ``checkpoint`` on the nodes that are left and train on to the end."""
    _screen_to_log(directory, rank)
    job = _Job(rank, size, setup)
    alarms: list[str] = []
    losses: list[float] = []
    with _guard(job, directory, node=nodes[rank]) as guard:
        steps = guard.load(checkpoint)
        loaded = weights_sha256(job.inner)
        for step in range(steps, setup.steps):
            outcome = guard.step(job.batch(step))
            losses.append(float(outcome.loss))
            if outcome.verdict is not None:
                alarms.append(outcome.verdict.reason)
    return {"steps": steps, "loaded": loaded, "weights": weights_sha256(job.inner), "losses": losses, "alarms": alarms}


class _Job:
    """Model, data and optimizer of one run, the same bits every time."""

    def __init__(self, rank: int, size: int, setup: Setup) -> None:
        torch.manual_seed(setup.seed)
        self.rank, self.setup = rank, setup
        self.inner: nn.Module = build_model(setup.preset, seed=setup.seed)
        self.ddp = DistributedDataParallel(self.inner)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=setup.learning_rate)
        self.loss_fn: Callable[[Any, Any], torch.Tensor] = make_loss_fn()
        self.data = TextData(
            _text(setup.text_bytes),
            sequence_length=setup.sequence_length,
            global_batch=setup.global_batch,
            world_size=size,
            seed=setup.seed,
        )

    def batch(self, step: int) -> torch.Tensor:
        return self.data.batch(step, self.rank)


def _guard(job: _Job, directory: Path, *, node: str) -> Guard:
    setup = job.setup
    config = GuardConfig(
        mode="act",
        quarantine="auto",
        audit_every=setup.audit_every,
        replicas_every=1,
        save_every=setup.save_every,
        total_steps=setup.steps,
        directory=directory,
        node=node,
    )
    return Guard(job.ddp, job.optimizer, job.loss_fn, clip_norm=setup.clip_norm, config=config)


@functools.cache
def _text(size: int) -> bytes:
    """Read once per process, not once per run."""
    return standard_library_text(size)


def _screen_to_log(directory: Path, rank: int) -> None:
    """What this worker and its libraries print goes to a file, so that the demo's screen stays readable."""
    logs = directory / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    log = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
