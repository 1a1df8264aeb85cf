"""``unsilent study step``: how far does a sick device lead one optimizer step astray?

Before every step the sick device has the healthy one's weights; nothing is compared or overwritten within the step. Its
noise-to-signal is ‖g − g*‖/‖g*‖, L2 over all gradients of the step. Both devices are played in one process, one model after the
other on the same weights and batch: since the weights are synchronised after every step, a sick device's gradient depends
on these alone, and it is the same thing as two machines side by side, without tensor parallelism. For the same reason all
units share one healthy run.

The law looked at: the worst of a forward burst is about 1/√tokens. An activation that is wrong by powers of ten is brought
back to the usual size by the next norm, so that one token's gradient is replaced by one that has nothing to do with it,
and of n unrelated gradients of like size one makes 1/√n of the sum's norm. A probe that spoils about one activation per burst
and nothing else is run beside the units, some of which spoil many.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unsilent.determinism import Kernels, running_with
from unsilent.errors import UsageError
from unsilent.lab.page import conditions
from unsilent.lab.progress import progress
from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.lab.studies.step.page import page
from unsilent.lab.studies.step.tables import PROBE_NUMBER, goals, unit_figures
from unsilent.lab.units import Rate, Unit
from unsilent.lab.units.device import SickDevice
from unsilent.training.data import TextData, standard_library_text

SAMPLES_FACTOR = 4
"""Between the two batch sizes at which the law is looked at."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01
PROBE = Unit(
    number=PROBE_NUMBER,
    forward_attention=Rate(chance=0.3, explosions=0.05),
    forward_ffn=Rate(chance=0.3, explosions=0.05),
)
"""No unit: an exploded activation per burst, now and then two."""


def run(
    *, out: Path, units: Sequence[Unit], shape: Shape, seed: int, steps: int, quick: bool, command: str
) -> dict[str, Any]:
    """The study of the probe and these units at the shape's batch and at one four times as large; writes its page and figures.

    Raises:
        UsageError: the shape is one for GPUs, ``steps`` is not positive, or ``out`` cannot be written.
    """
    if steps < 1:
        raise UsageError(f"study step needs at least 1 step, not {steps}")
    if shape.name.startswith("paper"):
        raise UsageError(
            f"study step runs on this machine's CPU, where shape {shape.name!r} does not fit: take small or small-wide"
        )
    figures: list[dict[str, Any]] = []
    everyone = (PROBE, *units)
    shapes = (shape, replace(shape, samples=SAMPLES_FACTOR * shape.samples))
    with progress("step", len(shapes) * steps) as advance:
        for one in shapes:
            noise, bursts = noise_to_signal(everyone, one, seed=seed, steps=steps, advance=advance)
            figures += [
                unit_figures(unit, one.tokens, noise[i], bursts[i]) for i, unit in enumerate(everyone)
            ]  # fmt: skip
    record = {
        "study": "step", "quick": quick, "shape": asdict(shape), "seed": seed, "steps": steps,
        "conditions": conditions(command), "goals": goals(figures), "units": figures,
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step.json").write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the results into {out}: {error.strerror or error}") from error
    page(record).write(out / "step.html")
    return record


def noise_to_signal(
    units: Sequence[Unit],
    shape: Shape,
    *,
    seed: int,
    steps: int,
    bulk: float | None = None,
    advance: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, list[list[tuple[int, str]]]]:
    """Noise-to-signal, fp64[units, steps], and each unit's bursts (step, place).

    Args:
        bulk: another median of the relative errors than the law's, to see what it does.
        advance: called after each step.
    """
    healthy = Llama(shape, seed=seed)
    optimizer = torch.optim.AdamW(healthy.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    data = TextData(standard_library_text(), sequence_length=shape.length, global_batch=shape.samples, seed=seed)
    models = [_on_the_same_weights(healthy, shape) for _ in units]
    devices = [SickDevice(unit, model, seed=seed) for unit, model in zip(units, models, strict=True)]
    if bulk is not None:
        for device in devices:
            device.law = replace(device.law, bulk=bulk)
    noise = np.zeros((len(units), steps))
    with running_with(Kernels.DETERMINISTIC):
        for step in range(steps):
            batch = data.batch(step)
            right = _gradient(healthy, batch)
            for i, (model, device) in enumerate(zip(models, devices, strict=True)):
                with device.step(step):
                    gradient = _gradient(model, batch)
                noise[i, step] = float((gradient - right).norm() / right.norm())
            optimizer.step()
            advance()
    return noise, [device.bursts for device in devices]


def _on_the_same_weights(healthy: Llama, shape: Shape) -> Llama:
    """Another model whose parameters lie where the healthy one's lie: it always has the weights of the latest update."""
    model = Llama(shape, seed=0)
    for own, shared in zip(model.parameters(), healthy.parameters(), strict=True):
        own.data = shared.data
    return model


def _gradient(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """All gradients of one step in a row, fp64[parameters]."""
    model.zero_grad(set_to_none=True)
    loss_of(model, batch).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
