"""A campaign's tables. Pure: trials with what they were counted as, to counts, rates with their intervals, and medians."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from unsilent.lab.campaign.outcome import (
    CAUGHT,
    MISSED,
    Class,
    Observed,
    classify,
    named,
    steps_to_detection,
    too_early,
    why_missed,
)
from unsilent.lab.rates import wilson

ALL = "all"
"""Stands for all sets of checks, or all faults, together."""
_UNEXPECTED = (
    Class.WRONG_DEVICE,
    Class.NEEDLESS,
    Class.UNNAMED,
    Class.INEXACT,
    Class.FALSE_ALARM,
    Class.HANG,
    Class.ERROR,
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A trial by the names of its axes, and what came of it; ``fault`` says in words what was put in."""

    name: str
    parallelism: str
    checks: str
    site: str
    kind: str
    seed: int
    fault: str
    observed: Observed

    @property
    def counted_as(self) -> Class:
        return classify(self.observed)


def rate(count: int, of: int) -> dict[str, Any]:
    """A rate with its count and interval; None where nothing was tried."""
    low, high = wilson(count, of)
    return {"count": count, "of": of, "rate": count / of if of else None, "low": low, "high": high}


def tables(results: Sequence[Result]) -> dict[str, Any]:
    """Everything that a campaign's page and JSON show of its trials."""
    checks = sorted({r.checks for r in results})
    return {
        "classes": _classes(results, [ALL, *checks]),
        "coverage": [row for name in [ALL, *checks] for row in _coverage(_of(results, name), name)],
        "single_steps": _single_steps(results),
        "confusion": _confusion(results),
        "false_alarms": _false_alarms(results),
        "missed": _missed(results),
        "unexpected": [_told(r) for r in results if r.counted_as in _UNEXPECTED],
        "switched_off": [{"trial": r.name, "fault": r.fault, "checks": r.observed.off}
                         for r in results if r.observed.off],
    }  # fmt: skip


def _of(results: Iterable[Result], checks: str) -> list[Result]:
    return [r for r in results if checks in (ALL, r.checks)]


def _classes(results: Sequence[Result], checks: Sequence[str]) -> list[dict[str, Any]]:
    """How many trials of each class, for each set of checks and all together."""
    rows: list[dict[str, Any]] = []
    for name in checks:
        counts = Counter(r.counted_as for r in _of(results, name))
        rows += [{"checks": name, "class": one.value, **rate(counts[one], counts.total())} for one in Class]
    return rows


def _coverage(results: Sequence[Result], checks: str) -> list[dict[str, Any]]:
    """For each site and fault: of the trials in which the fault fired and changed the weights or was found, how many were
    caught. What was masked, and what ended otherwise, is counted beside it."""
    cells: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        if r.observed.fault:
            for kind in (r.kind, ALL):
                cells.setdefault((r.site, kind), []).append(r)
    return [{"checks": checks, "site": site, "fault": kind, **_cell(found)} for (site, kind), found in cells.items()]


def _cell(results: Sequence[Result]) -> dict[str, Any]:
    counts = Counter(r.counted_as for r in results)
    caught, missed = sum(counts[one] for one in CAUGHT), sum(counts[one] for one in MISSED)
    delays = [d for r in results if r.counted_as in CAUGHT and (d := steps_to_detection(r.observed)) is not None]
    return {
        "trials": len(results),
        "masked": counts[Class.MASKED],
        "missed_harmful": counts[Class.MISSED_HARMFUL],
        "other": len(results) - caught - missed - counts[Class.MASKED],
        "caught": rate(caught, caught + missed),
        "median_steps": median(delays) if delays else None,
    }


def _single_steps(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Of faults of one step in a rank's own computation, before its update: what is caught when that step is audited, and when
    not. Deliveries, which votes find, and faults of auditors, which fire in audits only, are not among them."""
    counts: dict[str, dict[bool, list[int]]] = {}
    for r in results:
        seen = r.observed
        if r.counted_as in (*CAUGHT, *MISSED) and seen.computed and not (seen.lasting or seen.after_update):
            pair = counts.setdefault(r.site, {True: [0, 0], False: [0, 0]})[seen.fired[0] in seen.ran["audit"]]
            pair[0] += r.counted_as in CAUGHT
            pair[1] += 1
    return [
        {"site": site, "audited": rate(*both[True]), "not_audited": rate(*both[False])}
        for site, both in sorted(counts.items())
    ]


def _confusion(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Who is faulty against whom the verdicts of a trial name, once there was a fault. A trial counts once for everybody that
    it names: a fault that lasts is judged step after step."""
    counts: Counter[tuple[str, str]] = Counter()
    for r in results:
        told = {_ranks(verdict.ranks) for verdict in r.observed.said if not too_early(r.observed, verdict)}
        counts.update((_ranks(r.observed.faulty), who) for who in told)
    return [{"faulty": faulty, "named": who, "trials": n} for (faulty, who), n in sorted(counts.items())]


def _ranks(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in sorted(ranks)) or "nobody"


def _false_alarms(results: Iterable[Result]) -> dict[str, Any]:
    """Per guarded step in which nothing was wrong yet, with the one-sided 95 % bound for none in so many."""
    steps = alarms = 0
    for r in results:
        seen = r.observed
        if seen.ended in ("hang", "error"):  # counted as that; when its fault fired is not known
            continue
        steps += min(seen.steps, seen.fired[0] + seen.after_update) if seen.fired else seen.steps
        alarms += sum(too_early(seen, verdict) for verdict in seen.said)
    return {"clean_steps": steps, "alarms": alarms, "bound": -math.log(0.05) / steps if steps and not alarms else None}


def _missed(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Why what was missed was missed, by site."""
    counts: dict[tuple[str, str, str], Counter[Class]] = {}
    for r in results:
        if r.counted_as in MISSED:
            counts.setdefault((r.checks, r.site, why_missed(r.observed)), Counter())[r.counted_as] += 1
    return [
        {"checks": checks, "site": site, "reason": reason, "harmful": n[Class.MISSED_HARMFUL],
         "small": n[Class.MISSED_SMALL]} for (checks, site, reason), n in sorted(counts.items(), key=_first)
    ]  # fmt: skip


def _first(item: tuple[tuple[str, str, str], Any]) -> tuple[str, str, str]:
    return item[0]


def _told(r: Result) -> dict[str, Any]:
    """One trial that needs an explanation, with what the guard said."""
    return {
        "trial": r.name,
        "class": r.counted_as.value,
        "fault": r.fault,
        "named": named(r.observed).value,
        "said": [f"step {v.step}: {v.kind} {v.action}: {v.reason}" for v in r.observed.said],
        "end": r.observed.end,
        "deviation": r.observed.felt,
    }
