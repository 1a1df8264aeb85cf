"""Figures of the study of single steps; no torch and no files here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from unsilent.lab.units import Unit

STORED = {1: 0.037, 4: 0.019, 11: 0.051}
"""Worst noise-to-signal of the real nodes of these numbers."""
PROBE_NUMBER = 0
LAW_FACTOR, CONSISTENT_FACTOR = 2.0, 3.0


def unit_figures(unit: Unit, tokens: int, noise: np.ndarray, bursts: Sequence[tuple[int, str]]) -> dict[str, Any]:
    """One unit at one number of tokens per step; ``noise`` is fp64[steps].

    A step counts as one of a forward burst if nothing erred in its backward, and the other way round.
    """
    forward, backward = (
        {step for step, place in bursts if place.startswith(phase)} for phase in ("forward", "backward")
    )
    return {
        "number": unit.number,
        "note": unit.note,
        "tokens": tokens,
        "steps": len(noise),
        "not_finite": int((~np.isfinite(noise)).sum()),
        "all": _of_steps(noise, range(len(noise))),
        "bursts": _of_steps(noise, forward | backward),
        "forward": _of_steps(noise, forward - backward),
        "backward": _of_steps(noise, backward - forward),
        "outside_bursts": int((noise[sorted(set(range(len(noise))) - forward - backward)] != 0).sum()),
        "noise": [[int(step), float(noise[step])] for step in np.flatnonzero(noise)],
    }


def goals(units: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, of those units that were run; and which stored figures the measured ones are consistent with."""
    rows: list[dict[str, Any]] = []
    for unit in units:
        worst = unit["forward"]["worst"]
        if worst is not None:
            ratio, median = (unit["forward"][name] * math.sqrt(unit["tokens"]) for name in ("worst", "median"))
            rows.append({
                "goal": f"{name_of(unit)}, {unit['tokens']} tokens: the worst of a forward burst within a factor of "
                        f"{LAW_FACTOR:.0f} of 1/√tokens = {1 / math.sqrt(unit['tokens']):.3f}",
                "measured": f"{worst:.3g}, {ratio:.2f} times that; the median of {unit['forward']['steps']} such bursts {median:.2f} times",
                "met": 1 / LAW_FACTOR <= ratio <= LAW_FACTOR,
            })  # fmt: skip
        if unit["bursts"]["steps"] == 0:
            rows.append({
                "goal": f"{name_of(unit)}, {unit['tokens']} tokens: no burst, no noise",
                "measured": f"{len(unit['noise'])} of {unit['steps']} steps differ",
                "met": not unit["noise"],
            })  # fmt: skip
    return rows


def name_of(unit: dict[str, Any]) -> str:
    """What it is called on the page."""
    return "the probe" if unit["number"] == PROBE_NUMBER else f"unit {unit['number']}"


def standing(unit: dict[str, Any]) -> str:
    """What is said of a measured worst beside the stored one."""
    stored, worst = STORED.get(unit["number"]), unit["all"]["worst"]
    if stored is None or not worst:
        return "—"
    consistent = 1 / CONSISTENT_FACTOR <= worst / stored <= CONSISTENT_FACTOR
    return f"{'consistent' if consistent else 'not consistent'} ({worst / stored:.2f} times)"


def _of_steps(noise: np.ndarray, steps: Iterable[int]) -> dict[str, Any]:
    """How many steps these are, and the largest and the median of their finite values; None where there is none."""
    values = noise[sorted(steps)]
    finite = values[np.isfinite(values)]
    worst, median = (float(finite.max()), float(np.median(finite))) if len(finite) else (None, None)
    return {"steps": len(values), "worst": worst, "median": median}
