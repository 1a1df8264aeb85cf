"""What the flips of ``study bits`` amount to: classes, shares and medians. No torch here.

A flip is *masked* if no bit of the step's new weights changes, *not finite* if the loss, the gradient's norm or a new weight
is NaN or infinite, *harmful* if the step goes astray by more than ``HARMFUL`` (d1 = ‖Δw − Δw*‖/‖Δw*‖ against the same step
without the flip), and else *small*.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.lab.rates import HARMFUL, rate_of

BITS = 32
CLASSES = ("masked", "small", "harmful", "not finite")

#: kernels by the endings of their modules' names
KERNELS: dict[str, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "norm": ("norm",),
    "q": ("attention.q",),
    "k": ("attention.k",),
    "v": ("attention.v",),
    "scores": ("attention.logits",),
    "o": ("attention.o",),
    "ffn": ("ffn.gate", "ffn.up", "ffn.down"),
    "head": ("head",),
}
#: the kernels, and the two values that clipping makes for all of them
PLACES = (*KERNELS, "total norm", "coefficient")

MOMENTS = {"exp_avg": "optimizer: exp_avg", "exp_avg_sq": "optimizer: exp_avg_sq"}
UPDATE = "optimizer: update"
STAGES = ("forward", "backward", "clipping", *MOMENTS.values(), UPDATE)

#: what is known of each flip: d1; the largest change of a weight and the share of weights that changed; changes of the step's
#: loss (absolute), gradient norm and largest attention logit (relative), and of loss and logit with the new weights
EFFECTS = ("d1", "weight", "changed", "loss", "norm", "logit", "next_loss", "next_logit")

#: bits of fp32 that behave alike, highest first: name, lowest and highest bit
GROUPS = (
    ("sign", 31, 31),
    ("exponent, top bit", 30, 30),
    ("exponent, other bits", 23, 29),
    ("mantissa, upper half", 12, 22),
    ("mantissa, lower half", 0, 11),
)

Trials = Mapping[str, npt.NDArray[Any]]
Mask = npt.NDArray[np.bool_]


def classes(trials: Trials) -> dict[str, Mask]:
    """For each class which trials are in it; every trial is in one."""
    broken = np.isinf(trials["d1"]) | np.isinf(trials["loss"]) | np.isinf(trials["norm"])
    masked = ~broken & (trials["changed"] == 0)
    harmful = ~broken & (trials["d1"] > HARMFUL)
    return {"masked": masked, "small": ~(broken | masked | harmful), "harmful": harmful, "not finite": broken}


def tables(trials: Trials) -> dict[str, Any]:
    """All figures of the study, as plain JSON values; None stands for what is not finite."""
    found = classes(trials)
    every = np.ones(len(trials["d1"]), dtype=bool)

    def shares(among: Mask) -> dict[str, Any]:
        return {name: rate_of(int((found[name] & among).sum()), int(among.sum())) for name in CLASSES}

    in_group = {name: (trials["bit"] >= low) & (trials["bit"] <= high) for name, low, high in GROUPS}
    stages = {stage: trials["stage"] == stage for stage in STAGES}
    return {
        "trials": len(every),
        "all": shares(every),
        "by_stage": {stage: shares(mask) for stage, mask in stages.items()},
        "by_group": {name: shares(mask) for name, mask in in_group.items()},
        "by_stage_and_group": {
            stage: {name: shares(mask & group) for name, group in in_group.items()} for stage, mask in stages.items()
        },
        "effects": {stage: _effects(trials, mask & ~found["masked"]) for stage, mask in stages.items()},
        "cells": _cells(trials, found),
        "clean": {"norm": _numbers(trials["clean_norm"]), "loss": _numbers(trials["clean_loss"])},
    }


def harmful_from(cells: list[dict[str, Any]], stage: str, kernel: str) -> str:
    """The bits of a cell row at which at least half of the flips are harmful or not finite, as ranges, highest first."""
    row = next((cell for cell in cells if cell["stage"] == stage and cell["kernel"] == kernel), None)
    if row is None:
        return "–"
    bad = [row["harmful"][bit] + row["not finite"][bit] >= row["of"] / 2 for bit in range(BITS)]
    ranges: list[str] = []
    high = BITS - 1
    while high >= 0:
        low = high
        if bad[high]:
            while low > 0 and bad[low - 1]:
                low -= 1
            ranges.append(str(high) if low == high else f"{high}–{low}")
        high = low - 1
    return ", ".join(ranges) or "none"


def _effects(trials: Trials, among: Mask) -> dict[str, Any]:
    """Of flips that are not masked: the median and the largest finite of each effect, and how many were not finite."""
    out: dict[str, Any] = {}
    for name in EFFECTS:
        values = trials[name][among]
        finite = values[np.isfinite(values)]
        out[name] = {
            "median": _number(float(np.median(values))) if len(values) else None,
            "largest_finite": _number(float(finite.max())) if len(finite) else None,
            "not_finite": len(values) - len(finite),
            "of": len(values),
        }
    return out


def _cells(trials: Trials, found: Mapping[str, Mask]) -> list[dict[str, Any]]:
    """For each stage and kernel, by bit: how many flips are in each class, and the median d1."""
    out: list[dict[str, Any]] = []
    for stage in STAGES:
        for kernel in PLACES:
            here = (trials["stage"] == stage) & (trials["kernel"] == kernel)
            if not here.any():
                continue
            by_bit = [here & (trials["bit"] == bit) for bit in range(BITS)]
            counts = {name: [int((found[name] & mask).sum()) for mask in by_bit] for name in CLASSES}
            medians = _numbers(np.array([np.median(trials["d1"][mask]) for mask in by_bit]))
            out.append({"stage": stage, "kernel": kernel, "of": int(by_bit[0].sum()), **counts, "median_d1": medians})
    return out


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [_number(float(value)) for value in values]


def _number(value: float) -> float | None:
    """Four digits; None for what is not finite."""
    return float(f"{value:.4g}") if np.isfinite(value) else None
