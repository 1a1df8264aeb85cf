"""A training run that nobody corrects: one model, one device, one optimizer, and its weights after every step.

Two runs of the same set-up are equal in every bit; so whatever differs between them is the device's doing. The optimizer is
AdamW, alone or inside one of two methods that are known to seek flat places of the loss surface:

``sam``        sharpness-aware minimisation (Foret et al. 2021): the gradient is taken at w + ρ·g/‖g‖ instead of at w
``lookahead``  weight averaging (Zhang et al. 2019): every few steps the weights fall back to halfway between where they were
               and where AdamW has brought them. The average feeds back into training; an average that is only kept beside
               the run would smooth what is seen of a drift, and change nothing about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from unsilent.errors import UsageError
from unsilent.lab.studies.llama import Llama, Shape, loss_of
from unsilent.training.data import TextData
from unsilent.training.rate import rate

EVERY, BACK = 5, 0.5  # lookahead
CLIP, BETAS, EPS, WEIGHT_DECAY = 1.0, (0.9, 0.999), 1e-8, 0.01
OPTIMIZERS = ("adamw", "sam", "lookahead")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What two runs that are compared have in common. ``radius`` is SAM's ρ; ``data_seed`` orders the samples;
    ``schedule`` is the length of the learning rate's cosine, of which a study of drift runs the flat beginning."""

    shape: Shape
    steps: int
    seed: int = 0
    data_seed: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    radius: float = 0.05
    warm_up: int = 50
    schedule: int = 10_000

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"there is no optimizer {self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")


class Device(Protocol):
    """Where a model's work is done; what is wrong with it takes effect inside its steps."""

    def step(self, step: int) -> AbstractContextManager[Any]: ...


class HealthyDevice:
    """Nothing is wrong with it."""

    def __init__(self, model: Llama) -> None: ...

    def step(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()


class OnceOneElement:
    """The largest element of the first layer's output is one unit in the last place too large, once, in the step ``at``."""

    def __init__(self, model: Llama, *, at: int = 0) -> None:
        self._layer, self._at = model.blocks[0], at

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step != self._at:
            yield
            return

        def once(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            handle.remove()  # a way of training may compute a step twice
            _one_up(module, inputs, output)

        handle = self._layer.register_forward_hook(once)
        try:
            yield
        finally:
            handle.remove()


@dataclass(frozen=True)
class Step:
    """After an update: the loss before it, and the weights (fp32[parameters]; the run goes on in them: copy what is kept)."""

    loss: float
    weights: torch.Tensor


class FreeRun:
    """A run of one set-up on one device; ``device`` is made for the model that it computes.

    Attributes:
        weights: fp32[parameters], all of the model's in one tensor; its parameters are views of it.
    """

    def __init__(self, setup: Setup, text: bytes, device: Callable[[Llama], Device] = HealthyDevice) -> None:
        self.setup = setup
        self.model = Llama(setup.shape, seed=setup.seed)
        self.data = TextData(
            text, sequence_length=setup.shape.length, global_batch=setup.shape.samples, seed=setup.data_seed
        )
        self.device = device(self.model)
        self.weights, self._gradient = flatten(self.model)
        self.optimizer = torch.optim.AdamW(
            [self.weights], lr=setup.learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._slow = self.weights.detach().clone()

    def __iter__(self) -> Iterator[Step]:
        """The steps, one after another; once only."""
        for step in range(self.setup.steps):
            batch = self.data.batch(step)
            with self.device.step(step):
                loss = self._forward_and_backward(batch)
                if self.setup.optimizer == "sam":
                    self._gradient_of_the_worst_neighbour(batch)
            torch.nn.utils.clip_grad_norm_([self.weights], CLIP)
            for group in self.optimizer.param_groups:
                group["lr"] = self.setup.learning_rate * rate(
                    step, warmup=self.setup.warm_up, steps=self.setup.schedule
                )
            self.optimizer.step()
            if self.setup.optimizer == "lookahead" and (step + 1) % EVERY == 0:
                self._look_back()
            yield Step(loss, self.weights.detach())

    @property
    def updates(self) -> int:
        """Updates completed."""
        return int(self.optimizer.state[self.weights].get("step", 0))

    def second_moment(self) -> torch.Tensor:
        """AdamW's mean of squared gradients, its bias corrected, fp32[parameters]."""
        return self.optimizer.state[self.weights]["exp_avg_sq"] / (1 - BETAS[1] ** self.updates)

    @torch.no_grad()
    def evaluate(self, samples: int = 32) -> float:
        """The loss on samples that are never trained on."""
        return float(loss_of(self.model, self.data.evaluation_batch(samples)))

    def _forward_and_backward(self, batch: torch.Tensor) -> float:
        self._gradient.zero_()
        loss = loss_of(self.model, batch)
        loss.backward()
        return float(loss.detach())

    def _gradient_of_the_worst_neighbour(self, batch: torch.Tensor) -> None:
        """Replaces the gradient by the one at w + ρ·g/‖g‖, and puts the weights back as they were."""
        before = self.weights.detach().clone()
        with torch.no_grad():
            self.weights.add_(self._gradient * (self.setup.radius / (self._gradient.norm() + 1e-12)))
        self._forward_and_backward(batch)
        with torch.no_grad():
            self.weights.copy_(before)

    @torch.no_grad()
    def _look_back(self) -> None:
        self._slow.lerp_(self.weights, BACK)
        self.weights.copy_(self._slow)


def flatten(model: nn.Module) -> tuple[nn.Parameter, torch.Tensor]:
    """All of a model's weights and all of its gradients, fp32[parameters] each; its parameters become views of them."""
    parameters = list(model.parameters())
    weights = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    weights.grad = torch.zeros_like(weights)
    sizes = [p.numel() for p in parameters]
    parts = zip(parameters, weights.detach().split(sizes), weights.grad.split(sizes), strict=True)
    for parameter, values, gradient in parts:
        parameter.data, parameter.grad = values.view(parameter.shape), gradient.view(parameter.shape)
    return weights, weights.grad


def _one_up(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    elements = output.data.view(-1)  # below autograd: nothing differentiates the fault
    largest = elements.abs().argmax()
    elements[largest] = torch.nextafter(elements[largest], torch.full((), torch.inf))
