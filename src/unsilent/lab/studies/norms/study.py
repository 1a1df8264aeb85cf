"""``unsilent study norms``: do outliers among the ranks' gradient norms show a device that errs?

A job of several ranks is trained inside one process without a fault (``job.py``); the norm of every local gradient is kept.
At random steps one rank's forward and backward run once more with a fault in real tensors, and the norm that comes out is
set among the others' norms of that step. The faulty gradient is also handed to the update, to see how far that step goes
astray; then it is taken back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.progress import progress
from unsilent.lab.studies.draws import Target, draw, targets
from unsilent.lab.studies.job import Job, Shape, State
from unsilent.lab.studies.norms.tables import Array
from unsilent.lab.studies.parts import Parts
from unsilent.training.presets import TINY, Preset


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``learning`` steps set the threshold; after them faults are tried, ``trials_per_step`` on average."""

    preset: Preset = TINY
    ranks: int = 8
    samples: int = 2
    length: int = 64
    learning: int = 800
    steps: int = 3000
    trials_per_step: float = 1.0
    seed: int = 0


QUICK = Plan(
    preset=Preset(name="quick", hidden_size=32, layers=2, heads=2, ffn_size=64, vocabulary=256), samples=1, length=32,
    learning=20, steps=60,
)  # fmt: skip

_Draw = Callable[[np.random.Generator, list[Target], int, int], Fault]


def _scaled(site: str, factor: float) -> _Draw:
    """One element of a matrix product's output, or of the gradient that reaches it, times a factor."""

    def made(random: np.random.Generator, among: list[Target], step: int, rank: int) -> Fault:
        return Fault(site=site, target=among[int(random.integers(len(among)))].module, pattern="scale", factor=factor,
                     rank=rank, step=step, seed=int(random.integers(1 << 31)))  # fmt: skip

    return made


ACTIVATION, BACKWARD = "one activation × 10,000", "one element of a backward gradient × 10,000"
KINDS: dict[str, _Draw] = {
    ACTIVATION: _scaled("forward", 1e4),
    BACKWARD: _scaled("backward", 1e4),
    "every 32nd column off by 1 %": lambda random, among, step, rank: Fault(
        site="forward", target=among[int(random.integers(len(among)))].module, pattern="stuck_lane", relative=0.01,
        rank=rank, step=step, seed=int(random.integers(1 << 31)),
    ),
    "the mix of gate-level studies": lambda random, among, step, rank: draw(random, among, step=step, rank=rank),
}  # fmt: skip


def study(plan: Plan, out: Path) -> tuple[Array, list[dict[str, Any]]]:
    """The norms without faults, fp64[steps, ranks], and the trials; kept in OUT and taken from there by a later start with
    the same plan."""
    parts = Parts(out / "parts", plan)
    done = parts.get("norms")
    if done is None:
        norms, trials = measure(plan)
        done = parts.keep("norms", {"norms": norms, "trials": json.dumps(trials)})
    return done["norms"], json.loads(str(done["trials"]))


def measure(plan: Plan) -> tuple[Array, list[dict[str, Any]]]:
    """The run and its trials."""
    shape = Shape(preset=plan.preset, ranks=plan.ranks, samples=plan.samples, length=plan.length, steps=plan.steps,
                  raw=False)  # fmt: skip
    job = Job(shape, seed=plan.seed)
    among = targets(job.model, plan.samples * plan.length)
    random = np.random.default_rng(plan.seed)
    gradient = torch.empty(job.weights.numel())
    norms: list[list[float]] = []
    trials: list[dict[str, Any]] = []
    with progress("norms", plan.steps) as advance:
        for step in range(plan.steps):
            job.compute(step)
            norms.append([float(local.double().norm()) for local in job.local])
            count = int(random.poisson(plan.trials_per_step)) if step >= plan.learning else 0
            before = job.state() if count else None
            job.apply(step)
            if before is not None:
                after = job.state()
                for _ in range(count):
                    kind = list(KINDS)[int(random.integers(len(KINDS)))]
                    fault = KINDS[kind](random, among, step, int(random.integers(plan.ranks)))
                    trials.append({"kind": kind, **_try(job, fault, step, gradient, before, after)})
                job.restore(after)
            advance()
    return np.array(norms), trials


def _try(job: Job, fault: Fault, step: int, gradient: torch.Tensor, before: State, after: State) -> dict[str, Any]:
    """One fault at one step, from the state ``before``; ``after`` is where the step without it ends."""
    rank = fault.rank or 0
    job.restore(before)
    with Injector(job.model, None, fault, rank=rank, world_size=job.shape.ranks) as injector:
        injector.begin_step(step)
        job.compute_rank(step, rank, gradient)
    norm, d1 = float(gradient.double().norm()), math.inf
    if math.isfinite(norm):
        local = job.local.clone()
        local[rank] = gradient
        job.apply(step, local)
        d1 = float((job.weights.detach() - after.weights).norm() / (after.weights - before.weights).norm())
    return {"step": step, "rank": rank, "norm": norm, "d1": d1}
