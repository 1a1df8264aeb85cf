"""``unsilent study drift``: how far do weights stray from a healthy run's when nobody corrects a sick device's errors?

The same training run is made on a healthy device, once more on a healthy device, on every simulated sick unit, and on two
devices that make one error in their lives, one early and one late: one element off by one unit in the last place. All read
the same samples from the same weights; so before the first error all are equal in every bit. One more run takes the samples in another order: the
control that tells how far apart two runs are that nobody would call corrupted.

After every step two things are kept: the training loss, and |Δw| = ‖w − w*‖, where w* are the healthy run's weights after
the same step. Every run is kept in a file of its own, and an interrupted study goes on with the runs that are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from unsilent.lab.progress import progress
from unsilent.lab.studies.free_run import Device, FreeRun, HealthyDevice, OnceOneElement, Setup
from unsilent.lab.studies.llama import Llama, shape_of
from unsilent.lab.studies.parts import Parts, Piece
from unsilent.lab.units import PLACES, Unit, law, unit, units
from unsilent.lab.units.device import SickDevice
from unsilent.training.data import standard_library_text

SEED_OF_FAULTS = 11
RESEEDED = 1
"""The data seed of the control."""
EVALUATE_EVERY = 25


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run: ``setup`` on healthy devices, on each of ``units``, and on devices that make one error in their life, in
    step 0 and in step ``late``."""

    setup: Setup
    units: tuple[Unit, ...]
    late: int


def plan(*, quick: bool) -> Plan:
    """The study; ``quick`` takes a minute, and its figures mean nothing."""
    full = Plan(
        setup=Setup(shape=shape_of("small"), steps=800, learning_rate=2e-3), units=units(), late=unit(13).from_step
    )
    if not quick:
        return full
    return Plan(setup=replace(full.setup, steps=50), units=(unit(2), unit(11)), late=25)


def frequency(unit: Unit) -> float:
    """The share of wrong elements that a unit shows in the long run, the mean of its four places."""
    rates = [unit.rate(place) for place in PLACES]
    return sum(rate.chance * unit.burst_steps * rate.share for rate in rates) / len(PLACES)


def name_of(unit: Unit) -> str:
    """What the run on this unit is called."""
    return f"unit-{unit.number}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: a set-up, and what is wrong with the device: a unit, the step of its one error, or nothing."""

    setup: Setup
    fault: Unit | int | None = None

    def device(self, model: Llama) -> Device:
        """The device for the model that is trained on it."""
        if isinstance(self.fault, Unit):
            return SickDevice(self.fault, model, seed=SEED_OF_FAULTS)
        return HealthyDevice(model) if self.fault is None else OnceOneElement(model, at=self.fault)

    @property
    def made_with(self) -> object:
        """Everything that its figures depend on."""
        return self, law(), SEED_OF_FAULTS


def follow(plan: Plan, out: Path) -> dict[str, Piece]:
    """All runs by name: ``loss`` and ``difference``, fp64[steps], and ``evaluation``, fp64[steps // EVALUATE_EVERY]; the
    healthy one also has ``distance``, fp64[steps]: how far its weights have moved."""
    healthy = Case(setup=plan.setup)
    cases = {
        "again": healthy,
        "once": replace(healthy, fault=0),
        "once-late": replace(healthy, fault=plan.late),
        "reseeded": Case(setup=replace(plan.setup, data_seed=RESEEDED)),
        **{name_of(one): replace(healthy, fault=one) for one in plan.units},
    }
    parts = {name: Parts(out / "parts", case.made_with) for name, case in cases.items()}
    done = {name: part for name in cases if (part := parts[name].get(name)) is not None}
    of_healthy = Parts(out / "parts", healthy.made_with)
    its_figures = of_healthy.get("healthy")
    missing = [name for name in cases if name not in done]
    if its_figures is None or missing:
        text = standard_library_text()
        with progress("drift", plan.setup.steps * (1 + len(missing))) as advance:
            # Its weights after every step stay in memory: the file of it has the figures only.
            its_figures, weights = healthy_run(FreeRun(plan.setup, text), advance)
            of_healthy.keep("healthy", its_figures)
            for name in missing:
                run = FreeRun(cases[name].setup, text, cases[name].device)
                done[name] = parts[name].keep(name, run_beside(weights, run, advance))
    return {"healthy": its_figures, **{name: done[name] for name in cases}}


def healthy_run(run: FreeRun, after_step: Callable[[], None]) -> tuple[Piece, torch.Tensor]:
    """Its figures, and its weights after every step, fp32[steps, parameters]."""
    start = run.weights.detach().clone()
    weights = torch.empty(run.setup.steps, len(start))
    loss, evaluation, distance = [], [], []
    for number, step in enumerate(run):
        weights[number] = step.weights
        loss.append(step.loss)
        distance.append(apart(step.weights, start))
        if (number + 1) % EVALUATE_EVERY == 0:
            evaluation.append(run.evaluate())
        after_step()
    return _piece(loss=loss, evaluation=evaluation, distance=distance, difference=[0.0] * len(loss)), weights


def run_beside(healthy: torch.Tensor, run: FreeRun, advance: Callable[[], None]) -> Piece:
    """The figures of a run beside a healthy one, of which ``healthy`` are the weights after every step."""
    loss, evaluation, difference = [], [], []
    for number, (step, right) in enumerate(zip(run, healthy, strict=True)):
        loss.append(step.loss)
        difference.append(apart(step.weights, right))
        if (number + 1) % EVALUATE_EVERY == 0:
            evaluation.append(run.evaluate())
        advance()
    return _piece(loss=loss, evaluation=evaluation, difference=difference)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """‖one − other‖; zero only if all bits are equal (0.0 and −0.0 count as 1e-45 apart)."""
    norm = float(torch.linalg.vector_norm(one - other, dtype=torch.float64))
    if norm == 0.0 and not torch.equal(one.view(torch.int32), other.view(torch.int32)):
        return 1e-45
    return norm


def _piece(**columns: list[float]) -> Piece:
    return {name: torch.tensor(values, dtype=torch.float64).numpy() for name, values in columns.items()}
