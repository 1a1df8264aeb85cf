"""Figures of the study of sub-modules, from what the ranks read; no torch and no files here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unsilent.lab.rates import poisson_interval
from unsilent.lab.studies.submodule.readings import WEIGHTS, Readings, quantile
from unsilent.lab.units import COUNT, PLACES, Unit

STORED: dict[int, tuple[float, ...]] = {
    1: (1.55e-5, 5.06e-7, 1.56e-4, 2.81e-6),
    2: (0.0, 0.0, 0.0, 0.0),
    3: (0.0, 0.0, 0.0, 0.0),
    10: (4.78e-3, 1.03e-3, 1.92e-3, 7.98e-5),
    11: (2.89e-2, 2.25e-3, 6.71e-3, 1.08e-4),
}
"""Mean mismatch frequencies of the real nodes of these numbers, in the order of ``PLACES``; nothing was seen on 2 and 3."""

FACTOR = 3.0
"""Between stored and measured, within which a fitted unit must lie."""
ENOUGH = 20
"""Burst events on which a frequency may rest without its interval."""
QUANTILES = (0.5, 0.9, 0.99)


def unit_figures(unit: Unit, healthy: Sequence[Readings], sick: Sequence[Readings]) -> dict[str, Any]:
    """All figures of one unit; ``healthy`` and ``sick`` are the readings of the twins, pair by pair."""
    bursts = {burst for rank in sick for burst in rank.bursts}
    return {
        "number": unit.number,
        "fitted": unit.fitted,
        "healthy": unit.healthy,
        "note": unit.note,
        "steps": len(sick[0].loss),
        "places": {place: _place_figures(i, unit, healthy, sick, bursts) for i, place in enumerate(PLACES)},
        "weights": _weight_figures(sick),
        "over_time": _over_time(sick),
    }


def goals(units: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, of those units that were run."""
    rows: list[dict[str, Any]] = []
    for unit in units:
        stored = STORED.get(unit["number"], ())
        if any(stored):
            ratios = [unit["places"][place]["frequency"] / there for place, there in zip(PLACES, stored, strict=True)]
            rows.append({
                "goal": f"unit {unit['number']}: all four frequencies within a factor of {FACTOR:.0f} of the stored ones",
                "measured": "here / stored: " + ", ".join(
                    f"{ratio:.2f} ({unit['places'][place]['events']} bursts)"
                    for place, ratio in zip(PLACES, ratios, strict=True)
                ),
                "met": all(1 / FACTOR <= ratio <= FACTOR for ratio in ratios),
            })  # fmt: skip
        elif unit["healthy"]:
            wrong = sum(place["differing"] for place in unit["places"].values()) + sum(
                kind["differing"] for kind in unit["weights"].values()
            )
            of = sum(place["elements"] for place in unit["places"].values())
            rows.append({
                "goal": f"{name_of(unit)} has the bits of its healthy twin throughout",
                "measured": f"{wrong} of {of:,} elements differ",
                "met": wrong == 0,
            })  # fmt: skip
    other = [unit["weights"]["other"]["differing"] for unit in units]
    rows.append({
        "goal": "gradients outside of attention and FFN never differ: no error passed a tap",
        "measured": f"{sum(other)} elements in {len(units)} runs",
        "met": sum(other) == 0,
    })  # fmt: skip
    return rows


def name_of(unit: dict[str, Any]) -> str:
    """What a unit is called on the page: the healthy ones have no number of a sick node."""
    return f"unit {unit['number']}" if unit["number"] <= COUNT else "a healthy unit"


# ---- one place -------------------------------------------------------------------------------------------------------


def _place_figures(
    i: int, unit: Unit, healthy: Sequence[Readings], sick: Sequence[Readings], bursts: set[tuple[int, str]]
) -> dict[str, Any]:
    elements = sum(int(rank.elements[i]) * rank.differing[..., i].size for rank in sick)
    differing = sum(int(rank.differing[..., i].sum()) for rank in sick)
    frequency = differing / elements
    steps = sorted(step for step, place in bursts if place == PLACES[i])
    events = math.ceil(len(steps) / unit.burst_steps)
    low, high = poisson_interval(events)
    return {
        "elements": elements,
        "differing": differing,
        "frequency": frequency,
        "interval": [frequency * low / events, frequency * high / events] if events else None,
        "events": events,
        "severity": _severity(i, sick),
        "flagged": _flagged(i, steps, healthy, sick),
    }


def _severity(i: int, sick: Sequence[Readings]) -> dict[str, Any]:
    differing, left_out, not_finite = (
        sum(int(getattr(rank, name)[..., i].sum()) for rank in sick) for name in ("differing", "left_out", "not_finite")
    )
    histogram = sum(rank.histogram[i] for rank in sick)
    count = differing - left_out - not_finite
    return {
        "mean": sum(float(rank.severity[..., i].sum()) for rank in sick) / count if count else None,
        "largest": max(float(rank.worst[..., i].max()) for rank in sick) if count else None,
        "quantiles": [quantile(np.asarray(histogram), share) for share in QUANTILES] if count else None,
        "left_out": left_out,
        "not_finite": not_finite,
    }


def _flagged(i: int, steps: Sequence[int], healthy: Sequence[Readings], sick: Sequence[Readings]) -> dict[str, Any]:
    """How many of the bursts were seen by each check, and how many reached the tap at all.

    The threshold of the baseline is the largest residual that the healthy group had at this place in the whole run: the
    lowest one without a false alarm there.
    """
    threshold = max(float(rank.abft[..., i].max()) for rank in healthy)
    differs = np.stack([rank.differing[..., i] > 0 for rank in sick])  # bool[ranks, steps, layers], as are all of these
    prints = np.stack(
        [(a.prints[..., i, :] != b.prints[..., i, :]).any(-1) for a, b in zip(healthy, sick, strict=True)]
    )
    alarms = np.stack([rank.abft[..., i] > threshold for rank in sick])
    burst = np.zeros(differs.shape[1], bool)
    burst[list(steps)] = True

    def during(seen: np.ndarray, which: np.ndarray) -> int:
        return int((seen.any((0, 2)) & which).sum())

    return {
        "bursts": len(steps),
        "reached": during(differs, burst),
        "fingerprints": during(prints, burst),
        "abft": during(alarms, burst),
        "tensors": int(differs.sum()),
        "tensors_abft": int((alarms & differs).sum()),
        "abft_threshold": threshold,
        "alarms_without_burst": {"fingerprints": during(prints, ~burst), "abft": during(alarms, ~burst)},
    }


def _weight_figures(sick: Sequence[Readings]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for i, kind in enumerate(WEIGHTS):
        elements = sum(int(rank.weight_elements[i]) * len(rank.weights) for rank in sick)
        differing = sum(int(rank.weights[:, i].sum()) for rank in sick)
        figures[kind] = {"elements": elements, "differing": differing, "frequency": differing / elements}
    return figures


def _over_time(sick: Sequence[Readings]) -> dict[str, list[list[float]]]:
    """Per place, of each step with a mismatch: [step, frequency, mean severity (NaN where none has one)]."""
    curves: dict[str, list[list[float]]] = {}
    for i, place in enumerate(PLACES):
        elements = sum(int(rank.elements[i]) * rank.differing.shape[1] for rank in sick)
        differing = np.sum([rank.differing[..., i].sum(-1) for rank in sick], 0)
        without = np.sum([(rank.left_out + rank.not_finite)[..., i].sum(-1) for rank in sick], 0)
        severity = np.sum([rank.severity[..., i].sum(-1) for rank in sick], 0)
        curves[place] = [
            [
                int(step),
                float(differing[step] / elements),
                float(severity[step] / max(1, differing[step] - without[step])),
            ]
            for step in np.flatnonzero(differing)
        ]
    return curves
