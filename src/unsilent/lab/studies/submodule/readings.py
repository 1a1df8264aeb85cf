"""What a rank of the lock-step study reads at its taps, as arrays; no torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from unsilent.lab.units import PLACES

WEIGHTS = ("attention", "ffn", "other")
"""Whose weight gradients are counted together; what is in neither sub-module must never differ."""

_DECADES, _BINS_PER_DECADE = (-8, 13), 20


def bin_edges() -> np.ndarray:
    """Edges of the histograms of severities, evenly spaced in their logarithm."""
    first, last = _DECADES
    return np.logspace(first, last, (last - first) * _BINS_PER_DECADE + 1)


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What one rank read; arrays are [steps, layers, places] where nothing else is said. A rank of the healthy group
    compares nothing, so only ``abft``, ``prints``, ``order`` and ``loss`` say something there.

    Attributes:
        differing: elements whose bits differ from the twin's, int64.
        left_out: those among them whose y* is 0, int64: they have no severity; y* is the twin's value.
        not_finite: those among them whose severity |y − y*|/|y*| is not finite, int64.
        severity, worst: sum and maximum of all other severities, fp64.
        histogram: how many of these fall in each bin, int64[places, bins]; the outer bins hold what lies beyond them.
        abft: the largest residual of :mod:`unsilent.lab.studies.submodule.abft`, fp64.
        prints: fingerprints, int64[steps, layers, places, 2].
        weights: elements of weight gradients that differ, int64[steps, WEIGHTS].
        elements: of the tensor at each place, int64[places]; ``weight_elements``, int64[WEIGHTS], of the gradients.
        loss: fp64[steps].
        order: in which the taps were reached in the last step: each one's number layer·places + place.
        bursts: (step, place) of the faults that the device says it had; no check is told of them.
    """

    differing: np.ndarray
    left_out: np.ndarray
    not_finite: np.ndarray
    severity: np.ndarray
    worst: np.ndarray
    histogram: np.ndarray
    abft: np.ndarray
    prints: np.ndarray
    weights: np.ndarray
    elements: np.ndarray
    weight_elements: np.ndarray
    loss: np.ndarray
    order: list[int] = field(default_factory=list[int])
    bursts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    @classmethod
    def empty(cls, *, steps: int, layers: int) -> Readings:
        """Nothing read yet."""
        at, places = (steps, layers, len(PLACES)), len(PLACES)
        return cls(
            differing=np.zeros(at, np.int64), left_out=np.zeros(at, np.int64), not_finite=np.zeros(at, np.int64),
            severity=np.zeros(at), worst=np.zeros(at), histogram=np.zeros((places, len(bin_edges()) - 1), np.int64),
            abft=np.zeros(at), prints=np.zeros((*at, 2), np.int64), weights=np.zeros((steps, len(WEIGHTS)), np.int64),
            elements=np.zeros(places, np.int64), weight_elements=np.zeros(len(WEIGHTS), np.int64), loss=np.zeros(steps),
        )  # fmt: skip

    def add(self, at: tuple[int, int, int], wrong: np.ndarray, star: np.ndarray) -> None:
        """Count the elements that differ at one (step, layer, place): what they are, and what they should be, fp64[n]."""
        has_severity = star != 0
        with np.errstate(all="ignore"):
            severity = np.abs(wrong[has_severity] - star[has_severity]) / np.abs(star[has_severity])
        finite = severity[np.isfinite(severity)]
        self.differing[at] = len(wrong)
        self.left_out[at] = len(star) - len(severity)
        self.not_finite[at] = len(severity) - len(finite)
        self.severity[at] = finite.sum()
        self.worst[at] = finite.max(initial=0.0)
        edges = bin_edges()
        self.histogram[at[2]] += np.histogram(np.clip(finite, edges[0], edges[-1]), edges)[0]


def quantile(histogram: np.ndarray, share: float) -> float:
    """The severity below which ``share`` of a histogram lies: the geometric middle of its bin; NaN for an empty one."""
    total = int(histogram.sum())
    if total == 0:
        return math.nan
    edges, i = bin_edges(), int(np.searchsorted(np.cumsum(histogram), share * total))
    return float(math.sqrt(edges[i] * edges[i + 1]))
