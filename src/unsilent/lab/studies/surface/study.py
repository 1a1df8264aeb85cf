"""``unsilent study surface``: is it the fault that sets how fast weights drift, or the loss surface under them?

The same faults, in the same steps, are put into runs that train in different ways: AdamW at several learning rates,
sharpness-aware minimisation, and weight averaging. For each way and fault the drift's rates are taken as in ``study drift``;
for each way the sharpness of the surface along its healthy run. If the fault set the rate, a row of faults would repeat
itself under every way; if the surface does, all faults of one way drift alike, and the ways are ordered by their sharpness.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unsilent.lab.progress import progress
from unsilent.lab.studies.drift.study import Case, healthy_run, name_of, run_beside
from unsilent.lab.studies.free_run import FreeRun, Setup
from unsilent.lab.studies.llama import shape_of
from unsilent.lab.studies.parts import Parts, Piece
from unsilent.lab.studies.surface.sharpness import Surface
from unsilent.lab.units import Unit, unit
from unsilent.training.data import standard_library_text

SAMPLES = 16
"""Held-out samples that sharpness is measured on, the same ones always."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every fault under every way of training, which are ``setups`` by name; sharpness is taken every ``every`` steps."""

    setups: dict[str, Setup]
    units: tuple[Unit, ...]
    every: int = 50


def plan(*, quick: bool) -> Plan:
    """The study; ``quick`` takes a minute, and its figures mean nothing."""
    base = Setup(shape=shape_of("small"), steps=400)
    setups = {f"AdamW, {rate:g}": replace(base, learning_rate=rate) for rate in (5e-4, 1e-3, 2e-3, 3e-3)}
    for rate, radius in ((1e-3, 0.05), (2e-3, 0.05), (2e-3, 0.1)):
        setups[f"SAM {radius:g}, {rate:g}"] = replace(base, optimizer="sam", learning_rate=rate, radius=radius)
    for rate in (2e-3, 3e-3):
        setups[f"averaging, {rate:g}"] = replace(base, optimizer="lookahead", learning_rate=rate)
    full = Plan(setups=setups, units=(unit(8), unit(1), unit(11)))
    if not quick:
        return full
    few = {name: replace(setups[name], steps=30) for name in ("AdamW, 0.002", "SAM 0.05, 0.002", "averaging, 0.002")}
    return Plan(setups=few, units=(unit(11),), every=30)


def survey(plan: Plan, out: Path) -> dict[str, Piece]:
    """By way of training: ``distance`` and, for each fault, ``difference-FAULT``, fp64[steps]; ``loss``, the healthy run's;
    ``sharpness`` and ``scaled``, fp64[steps // every]."""
    cases = {name: _cases(setup, plan.units) for name, setup in plan.setups.items()}
    parts = {
        name: Parts(out / "parts", ([case.made_with for case in its.values()], plan.every))
        for name, its in cases.items()
    }
    done = {name: part for name in cases if (part := parts[name].get(_file(name))) is not None}
    missing = {name: its for name, its in cases.items() if name not in done}
    text = standard_library_text()
    with progress("surface", sum(plan.setups[name].steps * (1 + len(its)) for name, its in missing.items())) as advance:
        for name, its in missing.items():
            piece = _way(plan.setups[name], plan.every, its, text, advance)
            done[name] = parts[name].keep(_file(name), piece)
    return {name: done[name] for name in cases}


def _cases(setup: Setup, units: tuple[Unit, ...]) -> dict[str, Case]:
    """The runs on devices that err, by the name of the fault."""
    return {
        "once": Case(setup=setup, fault=0),
        **{name_of(one): Case(setup=setup, fault=one) for one in units},
    }


def _way(setup: Setup, every: int, cases: dict[str, Case], text: bytes, advance: Callable[[], None]) -> Piece:
    """All runs of one way of training."""
    run = FreeRun(setup, text)
    surface = Surface(setup.shape, run.data.evaluation_batch(SAMPLES))
    sharpness: list[float] = []
    scaled: list[float] = []

    def after_step() -> None:
        if run.updates % every == 0:
            weights = run.weights.detach()
            sharpness.append(surface.sharpness(weights))
            scaled.append(surface.scaled_sharpness(weights, run.second_moment()))
        advance()

    healthy, weights = healthy_run(run, after_step)
    piece: Piece = {
        "loss": healthy["loss"],
        "distance": healthy["distance"],
        "sharpness": np.array(sharpness),
        "scaled": np.array(scaled),
    }
    for name, case in cases.items():
        piece[f"difference-{name}"] = run_beside(weights, FreeRun(setup, text, case.device), advance)["difference"]
    return piece


def _file(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")
