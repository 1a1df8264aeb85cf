"""One trial on the ranks of a warm pool: a short guarded run with one fault, and what came of it.

The functions here run on every rank. The guard is told nothing of the fault; what it said is read from the run's own log.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from unsilent.config import GuardConfig
from unsilent.errors import CorruptionError
from unsilent.guard import Guard
from unsilent.lab.campaign.spec import Job
from unsilent.lab.campaign.trials import Sick, Trial
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.studies.llama import Llama, Shape, loss_of, shape_of
from unsilent.lab.units import unit
from unsilent.lab.units.device import SickDevice
from unsilent.training.data import TextData, standard_library_text

LEARNING_RATE = 2e-3
CLIP_NORM = 1.0
TEXT_BYTES = 200_000
EVALUATED = 16
"""Held-out samples of which the evaluation loss is the mean."""
TIMEOUT_S = 5.0
"""Within which the guard ends a rank that waits for one that failed."""
NOT_FINITE = 1e308
"""Stands for what is not finite, so that it can be compared and written as JSON."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one rank saw of a trial.

    Attributes:
        fired: (step, whether in a replay) of every execution in which a bit was changed, each pair once, in order.
        ended: ``finished``, or ``stopped`` by a verdict.
        end: in the guard's words, why it was stopped.
        identical: whether the weights were the twin's after every step, bit for bit.
        identical_at_end: whether they were in the end.
        deviations: of each update that was completed, ‖Δw − Δw*‖ / ‖Δw*‖.
        loss: evaluation loss in the end; the twin's where the weights are; None of a run that was stopped.
        steps: updates completed.
        ran: steps in which an audit, and in which a vote, was due.
    """

    fired: tuple[tuple[int, bool], ...]
    ended: str
    end: str
    identical: bool
    identical_at_end: bool
    deviations: tuple[float, ...]
    loss: float | None
    steps: int
    ran: dict[str, tuple[int, ...]]


def model_of(job: Job, seed: int = 0) -> Llama:
    """The model of a campaign's jobs."""
    return Llama(_shape(job), seed=seed)


def run_twin(rank: int, size: int, job: Job, seed: int, path: Path | None) -> float:
    """The same job without guard and fault, in plain DDP; its evaluation loss. Rank 0 writes its weights to ``path``.

    The weights are float32[steps + 1, parameters]: before the first and after every step.
    """
    run = _Run(rank, size, job, seed)
    weights = [run.weights()]
    for step in range(job.steps):
        run.optimizer.zero_grad(set_to_none=True)
        loss_of(run.ddp, run.data.batch(step, rank)).backward()
        nn.utils.clip_grad_norm_(run.inner.parameters(), CLIP_NORM)
        run.optimizer.step()
        weights.append(run.weights())
    loss = run.evaluate()
    if path is not None and rank == 0:
        draft = path.with_suffix(".draft")
        torch.save({"weights": torch.stack(weights), "loss": loss}, draft)
        draft.rename(path)
    return loss


def run_trial(rank: int, size: int, job: Job, config: GuardConfig, trial: Trial, twin: Path, directory: Path) -> Seen:
    """One trial; rank 0 leaves the guard's log in ``directory``."""
    _forget_the_trial_before()
    run = _Run(rank, size, job, trial.seed)
    right: torch.Tensor = _twin(twin)["weights"]
    config = replace(config, directory=directory, node=trial.parallelism.node(rank), timeout_s=TIMEOUT_S)
    stopped: CorruptionError | None = None
    deviations: list[float] = []
    ran: dict[str, list[int]] = {"audit": [], "replicas": []}
    identical = True
    with _quiet():
        guard = Guard(run.ddp, run.optimizer, loss_of, clip_norm=CLIP_NORM, config=config)
        injector: Injector | SickDevice | None = None
        try:
            injector = _put_in(trial, run, rank, size, lambda: guard.replayer.running)
            before = run.weights()
            for step in range(job.steps):
                if injector is not None:
                    injector.begin_step(step)
                try:
                    guard.step(run.data.batch(step, rank))
                finally:  # also of the step in which the run is stopped
                    for check in ran.keys() & guard.last_due:
                        ran[check].append(step)
                if injector is not None:
                    injector.after_update(step)
                after = run.weights()
                identical = identical and _same(after, right[step + 1])
                deviations.append(_deviation(after - before, right[step + 1] - right[step]))
                before = after
            guard.close()  # with a last vote, which may find something too
        except CorruptionError as error:
            stopped = error
        finally:
            if injector is not None:
                injector.close()
            guard.close()
    same = stopped is None and _same(run.weights(), right[-1])
    loss: float | None = None
    if stopped is None:
        loss = float(_twin(twin)["loss"]) if same else run.evaluate()
    return Seen(
        fired=_fired(injector),
        ended="finished" if stopped is None else "stopped",
        end="" if stopped is None else str(stopped),
        identical=identical,
        identical_at_end=same,
        deviations=tuple(deviations),
        loss=loss,
        steps=guard.steps,
        ran={check: tuple(steps) for check, steps in ran.items()},
    )


class _Run:
    """Model, data and optimizer of one job, the same bits every time."""

    def __init__(self, rank: int, size: int, job: Job, seed: int) -> None:
        torch.manual_seed(seed)
        self.inner = model_of(job, seed)
        self.ddp = DistributedDataParallel(self.inner, bucket_cap_mb=0.2)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=LEARNING_RATE)
        self.data = _data(job, size, seed)

    def weights(self) -> torch.Tensor:
        """A copy of all parameters, float32[parameters]."""
        with torch.no_grad():
            return parameters_to_vector(self.inner.parameters())

    @torch.no_grad()
    def evaluate(self) -> float:
        return _bounded(float(loss_of(self.inner, self.data.evaluation_batch(EVALUATED))))


def _put_in(
    trial: Trial, run: _Run, rank: int, size: int, replaying: Callable[[], bool]
) -> Injector | SickDevice | None:
    match trial.fault:
        case Fault():
            return Injector(run.inner, run.optimizer, trial.fault, rank=rank, world_size=size,
                            node=trial.parallelism.node(rank), replaying=replaying)  # fmt: skip
        case Sick(unit=number) if trial.fault.rank == rank:
            return SickDevice(unit(number), run.inner, seed=trial.fault.seed)
        case _:
            return None


def _fired(injector: Injector | SickDevice | None) -> tuple[tuple[int, bool], ...]:
    match injector:
        case Injector():
            return tuple(sorted({(one.step, one.replay) for one in injector.record if one.changed}))
        case SickDevice():  # it does not tell a replay from a live run, which comes first
            return tuple(sorted({(step, False) for step, _ in injector.bursts}))
        case _:
            return ()


def _shape(job: Job) -> Shape:
    return replace(shape_of(job.model), samples=job.samples, length=job.length)


def _forget_the_trial_before() -> None:
    """A DDP wrapper and its guard hang together in cycles, and hold hooks and buckets until these are looked for."""
    _leave_modules_alone()
    gc.collect()


@lru_cache(maxsize=1)
def _leave_modules_alone() -> None:
    """What is there when a worker's first trial begins stays; to look through all of torch costs half a second a time."""
    gc.collect()
    gc.freeze()


@lru_cache(maxsize=4)
def _data(job: Job, size: int, seed: int) -> TextData:
    text = standard_library_text(TEXT_BYTES)
    return TextData(text, sequence_length=job.length, global_batch=job.samples * size, world_size=size, seed=seed)


@lru_cache(maxsize=2)
def _twin(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _deviation(update: torch.Tensor, right: torch.Tensor) -> float:
    """‖Δw − Δw*‖ / ‖Δw*‖ in double precision."""
    return _bounded(float((update.double() - right.double()).norm() / right.double().norm()))


def _bounded(value: float) -> float:
    return value if math.isfinite(value) else NOT_FINITE


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the guard says on the screen is in its log too."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
