"""Sparse gradients, as embeddings with ``sparse=True`` make them: what is looked at is their coalesced form.

In a sparse gradient an index may come several times, and what counts is the sum: two finite values may add up to infinity.
Coalesced, each index comes once and in order, so that equal gradients have equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unsilent.fingerprints.compute import sums, sums_many
from unsilent.fingerprints.weights import mix


def elements(gradient: Tensor) -> Tensor:
    """All numbers that a gradient holds: a dense one itself, of a sparse one the value of each index, empty where it has none."""
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient


def sums_of_gradients(gradients: Sequence[Tensor]) -> Tensor:
    """``sums_many``, of sparse ones over values and indices; one without any index counts as zeros do."""
    if not any(gradient.is_sparse for gradient in gradients):
        return sums_many(gradients)
    whole = [gradient.detach().coalesce() if gradient.is_sparse else gradient for gradient in gradients]
    rows = sums_many([gradient.values() if gradient.is_sparse else gradient for gradient in whole])
    for row, gradient in zip(rows, whole, strict=True):
        if gradient.is_sparse:
            row += mix(sums(gradient.indices()))  # mixed, so that a change there cannot undo one of the values
    return rows
