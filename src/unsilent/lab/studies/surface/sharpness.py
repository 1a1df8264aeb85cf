"""How sharp the loss surface is where the weights stand: the largest eigenvalue of the Hessian, by power iteration."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unsilent.lab.studies.free_run import flatten
from unsilent.lab.studies.llama import Llama, Shape, loss_of

Product = Callable[[torch.Tensor], torch.Tensor]

ITERATIONS, TOLERANCE = 40, 0.01


class Surface:
    """The loss surface of a model on one batch.

    Args:
        batch: int64[samples, length + 1].
    """

    def __init__(self, shape: Shape, batch: torch.Tensor) -> None:
        # The fused attention cannot be differentiated twice.
        self._model = Llama(shape, seed=0, scores=True)
        self._weights, _ = flatten(self._model)
        self._batch = batch

    def sharpness(self, weights: torch.Tensor, *, seed: int = 0) -> float:
        """The Hessian's eigenvalue of largest absolute value at ``weights``, fp32[parameters]."""
        return largest_eigenvalue(self._hessian_at(weights), len(weights), seed=seed)

    def scaled_sharpness(self, weights: torch.Tensor, second_moment: torch.Tensor, *, seed: int = 0) -> float:
        """The same of the Hessian as AdamW sees it, P^-1/2 H P^-1/2 with P = √v + ε (Cohen et al. 2022).

        Args:
            second_moment: v with its bias corrected, fp32[parameters].
        """
        root = (second_moment.sqrt() + 1e-8).rsqrt()
        hessian = self._hessian_at(weights)
        return largest_eigenvalue(lambda v: root * hessian(root * v), len(weights), seed=seed)

    def _hessian_at(self, weights: torch.Tensor) -> Product:
        """v → H·v: the gradient of ⟨gradient, v⟩."""
        with torch.no_grad():
            self._weights.copy_(weights)
        parameters = list(self._model.parameters())
        gradient = torch.autograd.grad(loss_of(self._model, self._batch), parameters, create_graph=True)
        flat = torch.cat([part.flatten() for part in gradient])

        def product(v: torch.Tensor) -> torch.Tensor:
            parts = torch.autograd.grad(flat @ v, parameters, retain_graph=True)
            return torch.cat([part.flatten() for part in parts])

        return product


def largest_eigenvalue(product: Product, size: int, *, seed: int = 0) -> float:
    """Of a symmetric operator, the eigenvalue of largest absolute value, to about ``TOLERANCE``: power iteration from a seeded
    vector, until the Rayleigh quotient stands still or ``ITERATIONS`` are over."""
    v = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    v /= v.norm()
    value = 0.0
    for _ in range(ITERATIONS):
        image = product(v)
        before, value = value, float(v @ image)
        norm = image.norm()
        if norm == 0 or abs(value - before) <= TOLERANCE * abs(value):
            return value
        v = image / norm
    return value
