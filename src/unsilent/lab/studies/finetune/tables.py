"""What tuned models answer, and how their losses went. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.lab.rates import rate

Array = npt.NDArray[np.float64]

CHANCE = 0.25
ERRORS = 4.0
"""Standard errors by which a tuned model must beat chance."""
FEWEST = 2_000
WINDOW, SPIKE = 25, 6.0
"""A spike is a loss that is not finite, or above the median of the ``WINDOW`` steps before by more than ``SPIKE`` of their
robust standard deviations (1.4826 × the median distance from the median)."""


def tables(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """All figures of the study, as plain JSON values, from what ``finetune.tune_all`` gives."""
    record = {name: _of_task(runs) for name, runs in tasks.items()}
    return {"tasks": record, "goals": _goals(record)}


def chosen(scores: Array) -> npt.NDArray[np.int64]:
    """The option of the largest score, int64[questions]; −1, which is never right, where a score is not finite."""
    finite = np.isfinite(scores).all(axis=1)
    return np.where(finite, np.where(np.isfinite(scores), scores, -np.inf).argmax(axis=1), -1)


def spikes(loss: Array) -> list[dict[str, Any]]:
    """The spikes of a run: the ``step``, the ``highest`` loss of the steps that follow each other (None: not finite), and
    whether the median of the ``WINDOW`` steps after it is back below the limit (None: fewer steps are left)."""
    found: list[dict[str, Any]] = []
    step = WINDOW
    while step < len(loss):
        before = loss[step - WINDOW : step]
        middle = float(np.median(before))
        limit = middle + SPIKE * 1.4826 * float(np.median(np.abs(before - middle)))
        end = step
        while end < len(loss) and not loss[end] <= limit:
            end += 1
        if end > step:
            highest, after = float(np.max(loss[step:end])), loss[end : end + WINDOW]
            over = end == len(loss) or not math.isfinite(highest)
            recovered = False if over else None if len(after) < WINDOW else bool(np.median(after) <= limit)
            found.append({"step": step, "highest": _number(highest), "recovered": recovered})
        step = end + 1
    return found


def _of_task(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    answers, guesses = (np.asarray(runs["test"][key]) for key in ("answers", "guesses"))
    healthy = chosen(np.asarray(runs["healthy"]["scores"]))
    rows: dict[str, Any] = {}
    for name, run in runs.items():
        if name == "test":
            continue
        choice = chosen(np.asarray(run["scores"]))
        rows[name] = {
            "accuracy": rate(choice == answers),
            "not_finite": int((choice < 0).sum()),
            "disagreement": rate((choice != healthy) | (choice < 0)),
        }
        if "loss" in run:
            loss = np.asarray(run["loss"])
            rows[name] |= {"spikes": spikes(loss), "last_loss": _number(np.mean(loss[-WINDOW:]))}
    return {"questions": len(answers), "letters": rate(guesses == answers), "runs": rows}


def _goals(tasks: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    goals: list[dict[str, Any]] = []
    for name, task in tasks.items():
        count, accuracy = task["questions"], task["runs"]["healthy"]["accuracy"]
        errors = (accuracy["share"] - CHANCE) / math.sqrt(CHANCE * (1 - CHANCE) / count)
        goals.append(
            {
                "goal": f"{name}: the healthy model beats chance by at least {ERRORS:g} standard errors on {FEWEST:,} questions",
                "measured": f"{words(accuracy)}, {errors:.1f} standard errors above {CHANCE:.0%}",
                "met": count >= FEWEST and errors >= ERRORS,
            }
        )
    unit_6 = {name: task["runs"]["unit-6"]["accuracy"] for name, task in tasks.items() if "unit-6" in task["runs"]}
    if unit_6:
        goals.append(
            {
                "goal": "unit 6 ends one fine-tuning at chance or below",
                "measured": "; ".join(f"{name}: {words(accuracy)}" for name, accuracy in unit_6.items()),
                "met": any(accuracy["share"] <= CHANCE for accuracy in unit_6.values()),
            }
        )
    return goals


def words(one: Mapping[str, Any]) -> str:
    """A rate with its count and its 95 % interval."""
    low, high = one["interval"]
    return f"{one['share']:.1%} ({one['count']} of {one['of']}; {low:.1%} to {high:.1%})"


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
