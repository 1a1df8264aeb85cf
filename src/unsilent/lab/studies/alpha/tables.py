"""What the stages of ``study alpha`` amount to: rates with their counts and intervals, for each rule.

*Harmful* is a finite fault whose one step goes astray by more than ``HARMFUL`` (‖Δw − Δw*‖/‖Δw*‖ against the paired clean
step), or a lasting one after which the evaluation loss lies above the clean one by more than two standard deviations of
reseeded runs. What gave NaN or Inf is the business of the finite check and is counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unsilent.checks.update_rules import PRESETS, RULES
from unsilent.lab.rates import HARMFUL, rate, rate_of
from unsilent.lab.studies.alpha.study import LASTING, Plan, needed, sustained_needed, threshold_for

TARGETS = (0.037, 0.005)
BINS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5, math.inf)
SENSITIVITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.3, 0.5, 1.0)
SEED_TABLE = (
    ("0.001-0.01", 0.001, 0.01, "< 60 %", "about 0"),
    ("0.01-0.05", 0.01, 0.05, "75-85 %", "< 5 %"),
    ("0.05-0.1", 0.05, 0.1, "> 90 %", "10-15 %"),
    ("> 0.1", 0.1, math.inf, "about 100 %", "> 30 %"),
)
# Of Student's t, two-sided 95 %, by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def tables(plan: Plan, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All figures of the study, as plain JSON values."""
    clean, faults = results["clean"], results["faults"]
    trials = faults["about"]["trials"]
    facts = _Trials(trials)
    rules = {rule: _of_rule(rule, plan, clean, faults, facts, results.get("sustained")) for rule in RULES}
    out: dict[str, Any] = {
        "rules": rules,
        "trials": facts.counts(),
        "recovery": _recovery(trials, faults["about"]["update_s"], plan.ranks),
    }
    if "sustained" in results:
        out["sustained"] = _sustained_facts(results["sustained"]["about"]["runs"])
    if "paired" in results:
        out["paired"] = _paired(results["paired"]["about"])
    out["goals"] = _goals(rules)
    return out


class _Trials:
    """The properties of the trials, as arrays."""

    def __init__(self, trials: list[dict[str, Any]]) -> None:
        self.deviation = np.array([t["deviation"] if t["finite"] else math.nan for t in trials])
        self.finite = np.array([t["finite"] for t in trials], dtype=bool)
        self.put_in_finite = np.array([t["put_in_finite"] for t in trials], dtype=bool)
        self.gross = np.array([t["gross"] for t in trials], dtype=bool)
        self.site = np.array([t["fault"]["site"] for t in trials])
        self.harmful = self.finite & (self.deviation > HARMFUL)

    def counts(self) -> dict[str, int]:
        return {
            "all": len(self.finite),
            "gradient_not_finite": int((~self.finite).sum()),
            "of_them_put_in_finite": int((~self.finite & self.put_in_finite).sum()),
            "nan_or_inf_put_in_and_vanished": int((self.finite & ~self.put_in_finite).sum()),
            "harmful": int(self.harmful.sum()),
            "harmful_not_gross": int((self.harmful & ~self.gross).sum()),
        }


def _of_rule(
    rule: str,
    plan: Plan,
    clean: dict[str, Any],
    faults: dict[str, Any],
    facts: _Trials,
    sustained: dict[str, Any] | None,
) -> dict[str, Any]:
    job = needed(rule, clean)[0][plan.skip :].min(axis=1)
    steps, hit = needed(rule, faults)
    counted = steps[plan.skip :].min(axis=1)
    out: dict[str, Any] = {
        "sweep": [_at(s, counted, hit, facts) for s in SENSITIVITIES],
        "presets": {name: _at(s, counted, hit, facts) for name, s in PRESETS.items()},
        "targets": {},
        "curve": _curve(counted, hit, facts),
    }
    lasting = None if sustained is None else sustained_needed(rule, faults, sustained)
    for target in TARGETS:
        threshold = threshold_for(rule, clean, target, skip=plan.skip)
        found = hit <= threshold
        row = {**_at(threshold, counted, hit, facts), "on_the_seed_of_thresholds": rate(job <= threshold)}
        row["by_deviation"] = [
            {"from": low, "to": high if high < math.inf else None, **rate(found[inside]),
             "not_gross": rate(found[inside & ~facts.gross])}
            for low, high in pairwise(BINS)
            for inside in [facts.finite & (facts.deviation >= low) & (facts.deviation < high)]
        ]  # fmt: skip
        row["by_site"] = {site: rate(found[facts.harmful & (facts.site == site)]) for site in sorted(set(facts.site))}
        if lasting is not None and sustained is not None:
            runs = sustained["about"]["runs"]
            bad = np.flatnonzero([_is_harmful(run) for run in runs])
            row["lasting"] = {
                "first_step": rate(lasting[bad, 0] <= threshold),
                f"within_{LASTING}_steps": rate((lasting[bad] <= threshold).any(axis=1)),
            }
        out["targets"][str(target)] = row
    return out


def _at(sensitivity: float, counted: np.ndarray, hit: np.ndarray, facts: _Trials) -> dict[str, Any]:
    """What one setting does: false alarms of clean steps of the job, and detection of harmful faults."""
    found = hit <= sensitivity
    return {
        "sensitivity": sensitivity,
        "false_alarms": rate(counted <= sensitivity),
        "detected": rate(found[facts.harmful]),
        "detected_not_gross": rate(found[facts.harmful & ~facts.gross]),
        "detected_gross": rate(found[facts.harmful & facts.gross]),
    }


def _curve(counted: np.ndarray, hit: np.ndarray, facts: _Trials) -> list[tuple[float, float, float]]:
    """(false alarms per job-step, detected, detected without gross ones) along all sensitivities, thinned out."""
    points = np.unique(np.concatenate([np.quantile(counted, np.linspace(0.0005, 0.6, 120), method="lower"), [0.0]]))
    mild = facts.harmful & ~facts.gross
    return [
        (float((counted <= s).mean()), _mean(hit[facts.harmful] <= s), _mean(hit[mild] <= s))
        for s in points[np.isfinite(points)]
    ]


def _recovery(trials: list[dict[str, Any]], update_s: float, ranks: int) -> dict[str, Any]:
    finite = [t for t in trials if t["finite"]]
    recompute = float(np.median([t["recompute_s"] for t in trials])) if trials else math.nan
    step = recompute + update_s
    return {
        "tried": len(finite),
        "identical": sum(t["recomputed_identical"] for t in finite),
        "recompute_s": recompute,
        "step_of_one_rank_s": step,
        "share_of_a_step": recompute / step,
    }


def _is_harmful(run: dict[str, Any]) -> bool:
    return math.isfinite(run["loss"]) and run["loss"] > run["clean"] + 2 * float(np.std(run["reseeded"], ddof=1))


def _sustained_facts(runs: list[dict[str, Any]]) -> dict[str, Any]:
    places = {run["step"]: run for run in runs}
    return {
        "runs": len(runs),
        "not_finite": sum(not math.isfinite(run["loss"]) for run in runs),
        "harmful": sum(_is_harmful(run) for run in runs),
        "steps": LASTING,
        "from": [
            {"step": step, "clean": run["clean"], "sigma_of_reseeded": float(np.std(run["reseeded"], ddof=1)),
             "reseeded": len(run["reseeded"])}
            for step, run in places.items()
        ],
    }  # fmt: skip


def _paired(about: dict[str, Any]) -> dict[str, Any]:
    rows = about["rows"]
    loss = {kind: np.array([row[kind]["loss"] for row in rows]) for kind in ("clean", "unwatched", "watched")}
    watched = [row["watched"] for row in rows]

    def total(name: str) -> int:
        return sum(int(row[name]) for row in watched)

    ready = [row["recompute_s"] / row["rank_s"] for row in watched if row["recompute_s"]]
    return {
        "seeds": len(rows),
        "steps": watched[0]["steps"],
        "faults": total("faults"),
        "left_out_not_finite": total("not_finite"),
        "caught": total("caught"),
        "caught_identical": total("identical"),
        "false_alarms": rate_of(total("false_alarms"), total("clean_steps")),
        "loss_clean": float(loss["clean"].mean()),
        "with_check": difference(loss["watched"] - loss["clean"]),
        "without_check": difference(loss["unwatched"] - loss["clean"]),
        "recompute_share_of_forward_and_backward": float(np.median(ready)) if ready else None,
    }


def _goals(rules: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals that were set before, and whether they were met; each as it was measured."""
    robust, others = rules["robust"], [rule for rule in rules if rule != "robust"]
    goals: list[dict[str, Any]] = []
    for target, goal in ((0.037, 0.82), (0.005, 0.75)):
        row = robust["targets"][str(target)]
        within = [one for one in robust["sweep"] if one["false_alarms"]["share"] <= target]
        fixed = max(within, key=lambda one: one["sensitivity"], default=None)
        for one, how in (
            (row, "sensitivity set to give the target on the first seed"),
            (
                fixed,
                "the highest setting of the sweep that keeps to it on this very seed (the settings were fixed before, the choice among them was not)",
            ),
        ):
            if one is None:
                continue
            found, false = one["detected"], one["false_alarms"]
            goals.append({
                "goal": f"robust detects >= {goal:.0%} of harmful faults at <= {target:.1%} false alarms per job-step",
                "measured": f"{_words(found)} at {_words(false)}; {how} ({one['sensitivity']:.3g})",
                "met": bool(found["of"]) and found["share"] >= goal and false["share"] <= target,
            })  # fmt: skip
        worse: list[str] = []
        for i, one in enumerate(row["by_deviation"]):
            if one["from"] < HARMFUL or not one["of"]:
                continue
            best = max(rules[rule]["targets"][str(target)]["by_deviation"][i]["share"] for rule in others)
            if not one["share"] > best:
                worse.append(f"from {one['from']:g}: {one['share']:.1%} against {best:.1%}")
        goals.append({
            "goal": f"robust is better than the others in every bin above {HARMFUL:g}, at {target:.1%}",
            "measured": "; ".join(worse) or "in every one",
            "met": not worse,
        })  # fmt: skip
    return goals


def difference(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The mean of paired differences with its 95 % interval (Student's)."""
    array = np.asarray(values, dtype=np.float64)
    if len(array) < 2:
        return {"mean": _mean(array), "interval": [math.nan, math.nan], "pairs": len(array)}
    t = _T[len(array) - 2] if len(array) - 2 < len(_T) else 2.05
    half = t * float(array.std(ddof=1)) / math.sqrt(len(array))
    mean = float(array.mean())
    return {"mean": mean, "interval": [mean - half, mean + half], "pairs": len(array)}


def _mean(values: Iterable[Any]) -> float:
    array = np.asarray(list(values), dtype=np.float64)
    return float(array.mean()) if len(array) else 0.0


def _words(one: dict[str, Any]) -> str:
    return f"{one['share']:.1%} ({one['count']} of {one['of']})"
