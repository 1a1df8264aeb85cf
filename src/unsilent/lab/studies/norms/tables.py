"""Does a rank's gradient norm stand out when its device errs? Scores, thresholds and rates. No torch here.

The score of a rank in a step is |norm − median over ranks| / MAD over ranks, MAD the median absolute deviation; the norm is
that of its local gradient, before the reduction. The rule under test: alarm where the highest score of a step exceeds
``MARGIN`` times the highest of the first ``Plan.learning`` steps, all of them free of faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.lab.rates import HARMFUL, rate_of

Array = npt.NDArray[np.float64]

MARGIN = 1.5


def scores(norms: Array) -> Array:
    """fp64[..., ranks] to fp64[..., ranks]. A rank off the median while all others agree exactly has an infinite score; one
    whose norm is not finite, too."""
    middle = np.median(norms, axis=-1, keepdims=True)
    off = np.abs(norms - middle)
    spread = np.median(off, axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = off / spread
    return np.where(np.isfinite(norms), np.where(off == 0, 0.0, score), np.inf)


def with_other(norms: Array, rank: int, norm: float) -> Array:
    """The norms of a step, fp64[ranks], that of one rank replaced."""
    changed = norms.copy()
    changed[rank] = norm
    return changed


def tables(
    norms: Array,
    trials: Sequence[dict[str, Any]],
    *,
    kinds: Sequence[str],
    learning: int,
) -> dict[str, Any]:
    """All figures of the study.

    Args:
        norms: fp64[steps, ranks], without faults.
        kinds: of faults, in the order of the tables.
        trials: each with ``kind``, ``step``, ``rank``, ``norm`` (of the faulty rank, NaN or infinite where its gradient is
            not finite) and ``d1``.
    """
    healthy = scores(norms)
    highest = healthy.max(axis=1)
    threshold = MARGIN * float(highest[:learning].max())
    later = highest[learning:]
    tried: list[dict[str, Any]] = []
    for trial in trials:
        right, rank = norms[trial["step"]], trial["rank"]
        score = float(scores(with_other(right, rank, trial["norm"]))[rank])
        tried.append({**trial, "score": score, "changed": abs(trial["norm"] / float(right[rank]) - 1)})
    finite = [trial for trial in tried if math.isfinite(trial["norm"])]
    harmful = [trial for trial in finite if trial["d1"] > HARMFUL]
    return {
        "healthy": {
            "steps": len(norms), "ranks": norms.shape[1], "largest": float(highest.max()),
            "median_of_highest": float(np.median(highest)), "threshold": threshold,
            "false_alarms": rate_of(int((later > threshold).sum()), len(later)),
        },
        "faults": {kind: _of_kind([t for t in finite if t["kind"] == kind], threshold, highest)
                   for kind in kinds},
        "all": _of_kind(finite, threshold, highest),
        "not_finite": len(tried) - len(finite),
        "below_healthy_median": rate_of(sum(t["score"] < float(np.median(highest)) for t in harmful), len(harmful)),
        "norm_differs_between_ranks": float(np.median(np.abs(norms / np.median(norms, axis=1, keepdims=True) - 1))),
        "curves": {
            "healthy": _curve(highest),
            **{kind: _curve(np.array([t["score"] for t in finite if t["kind"] == kind])) for kind in kinds},
        },
    }  # fmt: skip


def _of_kind(trials: list[dict[str, Any]], threshold: float, highest: Array) -> dict[str, Any]:
    """Finite faults of one kind: how many are found by the rule, and how many of the harmful ones."""
    found = np.array([trial["score"] for trial in trials])
    harmful = [trial for trial in trials if trial["d1"] > HARMFUL]
    return {
        "trials": len(trials),
        "norm_changed": _median([trial["changed"] for trial in trials]),
        "norm_changed_of_found": _median([trial["changed"] for trial in trials if trial["score"] > threshold]),
        "median": _median(found),
        "largest": float(found.max()) if len(found) else 0.0,
        "found": rate_of(int((found > threshold).sum()), len(found)),
        "harmful": len(harmful),
        "harmful_found": rate_of(sum(trial["score"] > threshold for trial in harmful), len(harmful)),
        "above_all_healthy": rate_of(int((found > highest.max()).sum()), len(found)),
    }


def _curve(values: Array) -> list[tuple[float, float]]:
    """Score and share of values that are at least as high, at up to 200 places."""
    ordered = np.sort(values[np.isfinite(values)])
    places = np.unique(np.linspace(0, len(ordered) - 1, 200).round().astype(int)) if len(ordered) else []
    return [(float(f"{ordered[i]:.4g}"), round(1 - i / len(values), 5)) for i in places]


def _median(values: Sequence[float] | Array) -> float:
    """0 of none."""
    return float(np.median(values)) if len(values) else 0.0
