"""A data-parallel training job of several ranks inside one process, whose every step can be looked at and taken back.

Each rank's local gradient of the step is computed in turn from the same weights; they are averaged, clipped and handed to
one AdamW, as DDP would do it. Weights, moments and gradients lie in flat tensors, so that a step can be tried with another
gradient and undone: that is what makes thousands of paired trials cheap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from unsilent.training.data import TextData, standard_library_text
from unsilent.training.model import build_model, make_loss_fn
from unsilent.training.presets import Preset
from unsilent.training.rate import rate

Array = npt.NDArray[np.float64]

_PIECE = 1 << 17  # elements that several passes go over while they lie in the cache

LEARNING_RATE, WEIGHT_DECAY, CLIP, BETAS, EPS = 1e-3, 0.01, 1.0, (0.9, 0.999), 1e-8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a job: ``samples`` of ``length`` tokens per rank and step; ``steps`` end the learning rate's cosine.
    ``raw`` also makes the update without clipping, to be logged."""

    preset: Preset
    ranks: int = 4
    samples: int = 4
    length: int = 64
    steps: int = 2000
    warm_up: int = 100
    raw: bool = True


@dataclass(frozen=True)
class Seen:
    """What a rank can know of its own step: per tensor the RMS of its local gradient and of the update estimated from
    it (clipped by the local norm, and not, where that is asked for), fp64[tensors]; and the local gradient's norm."""

    gradient: Array
    update: Array
    update_unclipped: Array
    norm: float


@dataclass(frozen=True)
class State:
    """Weights and moments, as they were."""

    weights: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor] | None
    count: float


class Job:
    """See the module's text.

    Args:
        seed: of the weights and of the order of samples.

    Attributes:
        names: of the tensors, in order.
        local: fp32[ranks, parameters], the local gradients of the last step.
    """

    def __init__(self, shape: Shape, *, seed: int, text: bytes | None = None) -> None:
        self.shape = shape
        self.model = build_model(shape.preset, seed=seed)
        self._loss_fn = make_loss_fn()
        self._text = standard_library_text() if text is None else text
        self.reseed(seed)
        self.parameters: list[nn.Parameter] = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.sizes = [p.numel() for p in self.parameters]
        self._roots = torch.tensor(self.sizes, dtype=torch.float64).sqrt()
        self.weights = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        for parameter, part in zip(self.parameters, self.weights.detach().split(self.sizes), strict=True):
            parameter.data = part.view(parameter.shape)
        self.optimizer = torch.optim.AdamW(
            [self.weights], lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.local = torch.zeros(shape.ranks, self.weights.numel())
        self._mean = torch.empty(self.weights.numel())
        self._up, self._down = torch.empty(_PIECE), torch.empty(_PIECE)

    def reseed(self, seed: int) -> None:
        """Take the samples in another order from now on."""
        shape = self.shape
        self._data = TextData(
            self._text,
            sequence_length=shape.length,
            global_batch=shape.samples * shape.ranks,
            world_size=shape.ranks,
            seed=seed,
        )

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        return LEARNING_RATE * rate(step, warmup=self.shape.warm_up, steps=self.shape.steps)

    def compute(self, step: int) -> None:
        """The local gradients of all ranks."""
        for rank in range(self.shape.ranks):
            self.compute_rank(step, rank, self.local[rank])

    def compute_rank(self, step: int, rank: int, out: torch.Tensor) -> float:
        """One rank's forward and backward of the step; its gradient goes into ``out``, fp32[parameters]."""
        out.zero_()
        for parameter, part in zip(self.parameters, out.split(self.sizes), strict=True):
            parameter.grad = part.view(parameter.shape)
        loss = self._loss_fn(self.model, self._data.batch(step, rank))
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def see(self, step: int, gradient: torch.Tensor) -> Seen:
        """What the rank that computed this local gradient can know of it before it is reduced."""
        parts = torch.stack(torch._foreach_norm(gradient.split(self.sizes))).double()
        norm = float(parts.norm())
        coefficient = min(1.0, CLIP / (norm + 1e-6)) if math.isfinite(norm) else 1.0
        update = self._update_of(step, gradient, coefficient)
        unclipped = update if coefficient == 1.0 or not self.shape.raw else self._update_of(step, gradient, 1.0)
        return Seen((parts / self._roots).numpy(), update, unclipped, norm)

    def apply(self, step: int, local: torch.Tensor | None = None) -> None:
        """Average the local gradients (by default the ones just computed), clip, and update."""
        local = self.local if local is None else local
        torch.mean(local, dim=0, out=self._mean)
        self.weights.grad = self._mean
        torch.nn.utils.clip_grad_norm_([self.weights], CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        self.optimizer.step()

    def state(self) -> State:
        """A copy of weights and moments."""
        kept = self.optimizer.state.get(self.weights)
        if not kept:
            return State(self.weights.detach().clone(), None, 0.0)
        moments = (kept["exp_avg"].clone(), kept["exp_avg_sq"].clone())
        return State(self.weights.detach().clone(), moments, float(kept["step"]))

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Go back to a copy made by :meth:`state`."""
        self.weights.copy_(state.weights)
        if state.moments is None:
            self.optimizer.state.clear()
            return
        kept = self.optimizer.state[self.weights]
        if not kept:
            kept.update(exp_avg=torch.empty_like(state.weights), exp_avg_sq=torch.empty_like(state.weights),
                        step=torch.tensor(0.0))  # fmt: skip
        kept["exp_avg"].copy_(state.moments[0])
        kept["exp_avg_sq"].copy_(state.moments[1])
        kept["step"].fill_(state.count)

    @torch.no_grad()
    def evaluate(self, samples: int = 64) -> float:
        """The loss on samples that are never trained on."""
        return float(self._loss_fn(self.model, self._data.evaluation_batch(samples)))

    def _update_of(self, step: int, gradient: torch.Tensor, coefficient: float) -> Array:
        """RMS per tensor of lr·m/(√v + ε) with m and v as AdamW would set them, without bias correction."""
        kept = self.optimizer.state.get(self.weights)
        nothing = torch.zeros(()).expand(gradient.shape)
        moments = (kept["exp_avg"], kept["exp_avg_sq"]) if kept else (nothing, nothing)
        norms: list[float] = []
        for parts in zip(*(tensor.split(self.sizes) for tensor in (gradient, *moments)), strict=True):
            pieces: list[torch.Tensor] = []
            for now, first, second in zip(*(part.split(_PIECE) for part in parts), strict=True):
                down = torch.mul(second, BETAS[1], out=self._down[: len(now)])
                down.addcmul_(now, now, value=(1 - BETAS[1]) * coefficient**2).sqrt_().add_(EPS)
                up = torch.mul(first, BETAS[0], out=self._up[: len(now)])
                pieces.append(up.add_(now, alpha=(1 - BETAS[0]) * coefficient).div_(down).norm())
            norms.append(float(torch.stack(pieces).norm()))
        return self.rate(step) * np.array(norms) / self._roots.numpy()
