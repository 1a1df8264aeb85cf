"""Does the surface or the fault set the rate of a drift? Two shares of variance, two rank correlations, one answer. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.lab.studies.drift.tables import rates

Array = npt.NDArray[np.float64]

PERMUTATIONS, SIGNIFICANT, FEWEST = 20_000, 0.05, 5
MEASURES = ("growth", "slope", "share")


def tables(ways: Mapping[str, Mapping[str, Any]], learning_rates: Mapping[str, float]) -> dict[str, Any]:
    """All figures of the study, as plain JSON values.

    Args:
        ways: what ``surface.survey`` gives, by way of training.
        learning_rates: of each way.
    """
    rows = {name: _row(piece, learning_rates[name]) for name, piece in ways.items()}
    measures = {measure: _measure(rows, measure) for measure in MEASURES}
    return {"ways": rows, "measures": measures, "answer": answer(measures["growth"])}


def _row(piece: Mapping[str, Any], learning_rate: float) -> dict[str, Any]:
    distance = np.asarray(piece["distance"])
    faults: dict[str, Any] = {}
    for key in piece:
        if key.startswith("difference-"):
            difference = np.asarray(piece[key])
            share = float(difference[-1] / distance[-1])
            faults[key.removeprefix("difference-")] = {
                **vars(rates(difference, distance)),
                "share": share if math.isfinite(share) else None,
            }
    return {
        "learning_rate": learning_rate,
        "loss": float(np.mean(piece["loss"][-50:])),
        "sharpness": _middle(piece["sharpness"]),
        "scaled": learning_rate * _middle(piece["scaled"]),
        "faults": faults,
    }


def _middle(values: Any) -> float:
    """Of the sharpness along a run: it ranges over powers of ten, and may be negative early on."""
    return float(np.median(values))


def _measure(rows: Mapping[str, dict[str, Any]], measure: str) -> dict[str, Any]:
    """One rate of drift, over all ways and those faults that show it under every way."""
    names = list(next(iter(rows.values()))["faults"])
    whole = [name for name in names if all(row["faults"][name][measure] is not None for row in rows.values())]
    out: dict[str, Any] = {"ways": len(rows), "faults": whole}
    if not whole:
        return out
    values = np.array([[row["faults"][name][measure] for name in whole] for row in rows.values()])
    out["of_way"], out["of_fault"] = variance(values) if len(whole) > 1 else (None, None)
    for surface in ("sharpness", "scaled"):
        correlation, chance = rank_correlation([row[surface] for row in rows.values()], values.mean(axis=1))
        out[surface] = {"correlation": correlation, "p": chance, "count": len(rows)}
    return out


def variance(values: Array) -> tuple[float, float]:
    """The share of the variance of ``values``, fp64[ways, faults], that the mean of the way explains, and that of the fault;
    the rest is neither's alone. Pure noise gives either a share that is its degrees of freedom over all: to compare the two,
    divide each by its own (levels − 1)."""
    total = float(((values - values.mean()) ** 2).sum())
    if total == 0.0:
        return 0.0, 0.0
    of_way = float(((values.mean(axis=1) - values.mean()) ** 2).sum()) * values.shape[1]
    of_fault = float(((values.mean(axis=0) - values.mean()) ** 2).sum()) * values.shape[0]
    return of_way / total, of_fault / total


def rank_correlation(x: Sequence[float] | Array, y: Sequence[float] | Array) -> tuple[float, float]:
    """Spearman's correlation, and how often a shuffled order has at least its absolute value (seeded permutations)."""
    a, b = _standard(_ranks(x)), _standard(_ranks(y))
    found = float(a @ b)
    shuffled = np.random.default_rng(0).permuted(np.tile(b, (PERMUTATIONS, 1)), axis=1) @ a
    as_large = int((np.abs(shuffled) >= abs(found) - 1e-9).sum())
    return found, (as_large + 1) / (PERMUTATIONS + 1)


def answer(measure: Mapping[str, Any]) -> str:
    """In words, from the growth before saturation."""
    if measure["ways"] < FEWEST or len(measure["faults"]) < 2:
        return (
            f"It cannot be decided: {measure['ways']} ways of training and {len(measure['faults'])} faults that show a growth "
            f"under all of them are too few (at least {FEWEST} and 2)."
        )
    way, fault, sharp = measure["of_way"], measure["of_fault"], measure["sharpness"]
    shares = f"the way of training explains {way:.0%} of the variance of the growth, the fault {fault:.0%}"
    order = (
        f"rank correlation with sharpness {sharp['correlation']:+.2f} over {sharp['count']} ways (p = {sharp['p']:.2g})"
    )
    if way / (measure["ways"] - 1) <= fault / (len(measure["faults"]) - 1):
        return f"Here the drift's growth goes with the fault at least as much as with the way of training: {shares}; {order}."
    if sharp["p"] < SIGNIFICANT and sharp["correlation"] > 0:
        return (
            f"Here the drift's growth goes with the way of training and the sharpness of its surface, more than with the fault: "
            f"{shares}; {order}. The learning rate moves both, so this is no proof that the sharpness is the cause."
        )
    return (
        f"The drift's growth goes with the way of training more than with the fault: {shares}. Whether that is the sharpness of "
        f"the surface cannot be decided: {order}."
    )


def _ranks(values: Sequence[float] | Array) -> Array:
    """From 0; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    return ((array[:, None] > array).sum(axis=1) + ((array[:, None] == array).sum(axis=1) - 1) / 2).astype(np.float64)


def _standard(values: Array) -> Array:
    """With mean 0 and length 1; all zero where all are equal."""
    values = values - values.mean()
    norm = float(np.linalg.norm(values))
    return values / norm if norm else values
