"""How fast weights part from those of a healthy run: two rates, and what was asked of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

SATURATED = 0.1
"""Share of the distance that the healthy weights have moved, from which on a difference grows no longer exponentially."""
FIT = 20
"""Steps that a rate needs to be fitted on."""
FACTOR, SPAN = 3.0, 1_000.0


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a difference of weights does over the steps.

    Attributes:
        onset: the first step whose update leaves other bits than the healthy run's; None if there is none.
        saturated: the first step whose difference is at least ``SATURATED`` of the distance moved.
        growth: exponential growth per step between these two: the slope of a straight line through ln|Δw|.
        slope: |Δw| per step after ``saturated``: the slope of a straight line through |Δw|.
    """

    onset: int | None = None
    saturated: int | None = None
    growth: float | None = None
    slope: float | None = None


def rates(difference: Array, distance: Array) -> Rates:
    """The rates of a run, from |Δw| and from the distance that the healthy weights have moved, both fp64[steps].

    Steps in which |Δw| is not finite (the run is ruined) end what is looked at.
    """
    bad = np.flatnonzero(~np.isfinite(difference))
    end = int(bad[0]) if len(bad) else len(difference)
    apart = np.flatnonzero(difference[:end] > 0)
    if not len(apart):
        return Rates(onset=end if len(bad) else None)
    onset = int(apart[0])
    past = np.flatnonzero(difference[onset:end] >= SATURATED * distance[onset:end])
    saturated = onset + int(past[0]) if len(past) else None
    growing = np.arange(onset, end if saturated is None else saturated)
    growing = growing[difference[growing] > 0]
    return Rates(
        onset=onset,
        saturated=saturated,
        growth=_slope(growing, np.log(difference[growing])),
        slope=None if saturated is None else _slope(np.arange(saturated, end), difference[saturated:end]),
    )


def tables(
    runs: Mapping[str, Mapping[str, Any]],
    *,
    units: Mapping[str, int],
    frequency: Mapping[str, float | None],
    onset_of_13: int,
) -> dict[str, Any]:
    """All figures of the study, as plain JSON values.

    Args:
        runs: by name; each has ``loss``, ``difference`` and ``evaluation``, fp64[steps] and fp64[evaluations];
            ``healthy`` has ``distance``, fp64[steps]. ``again`` and ``reseeded`` are among them.
        units: the number of the unit that a run was made on, by the run's name.
        frequency: the share of wrong elements that a unit shows, where it is known.
        onset_of_13: the step before which unit 13 is healthy.
    """
    healthy = runs["healthy"]
    distance = np.asarray(healthy["distance"])
    rows = {name: _row(run, healthy, distance) for name, run in runs.items() if name != "healthy"}
    for name, number in units.items():
        rows[name] |= {"unit": number, "frequency": frequency.get(name)}
    return {
        "runs": rows,
        "distance": float(distance[-1]),
        "growth": _spread({name: rows[name]["growth"] for name in units}, frequency),
        "slope": _spread({name: rows[name]["slope"] for name in units}, frequency),
        "goals": _goals(rows, units, frequency, onset_of_13, len(distance)),
    }


def _row(run: Mapping[str, Any], healthy: Mapping[str, Any], distance: Array) -> dict[str, Any]:
    difference = np.asarray(run["difference"])
    found = rates(difference, distance)
    return {
        **vars(found),
        "ruined": _first(~np.isfinite(difference)),
        "difference": _number(difference[-1]),
        "share_of_distance": _number(difference[-1] / distance[-1]),
        "loss_apart": _apart(run["loss"], healthy["loss"]),
        "evaluation_apart": _apart(run["evaluation"], healthy["evaluation"]),
    }


def _apart(one: Any, other: Any) -> float | None:
    """The mean of the absolute difference; None where the run has lost its numbers."""
    return _number(np.abs(np.asarray(one) - np.asarray(other)).mean())


def _spread(values: Mapping[str, float | None], frequency: Mapping[str, float | None]) -> dict[str, Any]:
    """The least and the largest of the rates that could be fitted, and how far the frequencies of those units lie apart."""
    known = {name: value for name, value in values.items() if value is not None}
    positive = [value for value in known.values() if value > 0]
    often = [f for name in known if (f := frequency.get(name))]
    return {
        "count": len(known),
        "least": min(known.values(), default=None),
        "largest": max(known.values(), default=None),
        "factor": max(positive) / min(positive) if positive and len(positive) == len(known) else None,
        "frequency_factor": max(often) / min(often) if often else None,
    }


def _goals(
    rows: Mapping[str, dict[str, Any]],
    units: Mapping[str, int],
    frequency: Mapping[str, float | None],
    onset_of_13: int,
    steps: int,
) -> list[dict[str, Any]]:
    drifting = [name for name in units if rows[name]["onset"] is not None]
    goals: list[dict[str, Any]] = []
    for key, what in (("loss_apart", "training loss"), ("evaluation_apart", "loss on the same held-out text")):
        limit = (rows["reseeded"][key] or math.nan) / 2
        values = {name: rows[name][key] for name in drifting}
        over = [name for name, value in values.items() if value is None or not value < limit]
        largest = max((value for value in values.values() if value is not None), default=math.nan)
        goals.append(
            _goal(
                f"mean |Δloss| of every drifting unit below half of the reseeded control's, {what}",
                f"largest {largest:.3g} against {limit:.3g} over {len(drifting)} units"
                + (f"; over it or without numbers: {', '.join(_words(over))}" if over else ""),
                bool(drifting) and not over,
            )
        )
    shrunk = [name for name in drifting if not (rows[name]["ruined"] is not None or rows[name]["difference"])]
    goals.append(
        _goal(
            "|Δw| of every drifting unit is above zero at the end",
            f"{len(drifting) - len(shrunk)} of {len(drifting)} units",
            bool(drifting) and not shrunk,
        )
    )
    saturated = [name for name in units if rows[name]["saturated"] is not None]
    for key, what, among in (
        ("growth", "growth per step, all units that show one", units),
        ("growth", "growth per step, units that saturate", saturated),
        ("slope", "slope of |Δw| after saturation", saturated),
    ):
        spread = _spread({name: rows[name][key] for name in among}, frequency)
        factor, wide = spread["factor"], spread["frequency_factor"]
        measured = f"{spread['count']} units"
        if spread["count"]:
            measured += f", {spread['least']:.3g} to {spread['largest']:.3g}"
        measured += f", a factor of {factor:.2f}" if factor is not None else ", no factor"
        measured += f"; their frequencies span {wide:,.0f}" if wide is not None else "; their frequencies are not known"
        goals.append(
            _goal(
                f"{what}: within a factor of {FACTOR:g} while frequencies span more than {SPAN:,.0f}",
                measured,
                spread["count"] > 1 and factor is not None and factor <= FACTOR and (wide or 0.0) > SPAN,
            )
        )
    for name, number in units.items():
        onset = rows[name]["onset"]
        if number in (2, 3):
            goals.append(
                _goal(f"unit {number} equals the healthy run bit for bit", _since(onset, steps), onset is None)
            )
        if number == 13:
            goals.append(
                _goal(
                    f"unit 13 equals it until step {onset_of_13}, and no longer",
                    _since(onset, steps),
                    onset is not None and onset >= onset_of_13,
                )
            )
    again = rows["again"]["onset"]
    goals.append(_goal("a second healthy run equals the first bit for bit", _since(again, steps), again is None))
    return goals


def _goal(goal: str, measured: str, met: bool) -> dict[str, Any]:
    return {"goal": goal, "measured": measured, "met": met}


def _since(onset: int | None, steps: int) -> str:
    return f"equal over {steps} steps" if onset is None else f"other bits from step {onset} on"


def _words(names: Sequence[str]) -> list[str]:
    return [name.replace("-", " ") for name in names]


def _slope(x: npt.NDArray[Any], y: Array) -> float | None:
    """Of the least-squares line; None where there are too few points."""
    if len(x) < FIT:
        return None
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / (x * x).sum())


def _first(flags: npt.NDArray[Any]) -> int | None:
    where = np.flatnonzero(flags)
    return int(where[0]) if len(where) else None


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
