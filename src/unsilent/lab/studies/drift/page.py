"""``unsilent study drift``: its figures and its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.studies.drift.study import EVALUATE_EVERY, follow, frequency, name_of, plan
from unsilent.lab.studies.drift.tables import FIT, SATURATED, tables
from unsilent.lab.studies.parts import Piece, write_figures
from unsilent.lab.units import unit

OTHERS = {
    "healthy": "healthy",
    "again": "healthy, a second time",
    "once": "one element once",
    "once-late": "one element once, late",
    "reseeded": "reseeded",
}
"""What the runs that are no unit's are called on the page."""


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``drift.json`` (with the curves of every run) and ``drift.html``."""
    planned = plan(quick=quick)
    runs = follow(planned, out)
    record = {
        "study": "drift",
        "quick": quick,
        "plan": {"setup": asdict(planned.setup), "late": planned.late, "units": [one.number for one in planned.units]},
        **tables(
            runs,
            units={name_of(one): one.number for one in planned.units},
            frequency={name_of(one): frequency(one) for one in planned.units},
            onset_of_13=unit(13).from_step,
        ),
        "conditions": conditions(command),
    }
    curves = {name: {key: _finite(column) for key, column in piece.items()} for name, piece in runs.items()}
    write_figures(out / "drift.json", {**record, "curves": curves})
    page(record, runs).write(out / "drift.html")
    return record


def page(record: Mapping[str, Any], runs: Mapping[str, Piece]) -> Page:
    """The page of a finished study; ``record`` is what ``drift.json`` has."""
    return Page(
        title="Drift of weights on simulated sick devices",
        lead=_lead(record),
        parts=[
            _goals(record),
            Part(
                title="How far the weights stray",
                plot=_drift_plot(runs),
                caption="Difference of the weights from the healthy run's after the same step, as a share of the distance that "
                f"the healthy weights have moved; simulated sick devices. The dotted line at {SATURATED:g} separates exponential "
                "growth from what comes after. Runs that never differ have no curve.",
            ),
            Part(
                title="What the loss shows of it",
                plot=_loss_plot(runs),
                caption=f"Left: loss on the same held-out text, every {EVALUATE_EVERY} steps; all runs, simulated sick devices. "
                "Right: how far each stands from the healthy run's.",
            ),
            _table(record),
            _early_and_late(record),
            _beside(record),
            _how(record),
        ],
        conditions=record["conditions"],
    )


def _lead(record: Mapping[str, Any]) -> str:
    rows = record["runs"]
    apart = [row["share_of_distance"] for row in rows.values() if "unit" in row and row["onset"] is not None]
    known = [share for share in apart if share is not None]
    met = sum(goal["met"] for goal in record["goals"])
    words = (
        f"After {record['plan']['setup']['steps']} steps {len(apart)} of {len(record['plan']['units'])} simulated sick units have "
        "other weights than the healthy run"
    )
    if known:
        words += f", {min(known):.0%} to {max(known):.0%} of the distance that training has moved them away from it"
    once = rows["once"]["share_of_distance"]
    if once is not None:
        words += f"; one element off by one unit in the last place, once, ends {once:.0%} away"
    slope = record["slope"]
    if slope["factor"] is not None and slope["frequency_factor"] is not None:
        words += (
            f". Once saturated, the difference grows by {slope['least']:.3f} to {slope['largest']:.3f} per step on "
            f"{slope['count']} units, whose shares of wrong elements span a factor of {slope['frequency_factor']:,.0f}"
        )
    words += f". {met} of {len(record['goals'])} goals are met."
    return ("A quick run: its figures mean nothing. " if record["quick"] else "") + words


def _goals(record: Mapping[str, Any]) -> Part:
    rows = [("met" if goal["met"] else "NOT met", goal["goal"], goal["measured"]) for goal in record["goals"]]
    return Part(title="Goals", columns=("", "goal", "measured"), rows=rows)


def _table(record: Mapping[str, Any]) -> Part:
    columns = ("run", "wrong elements, long-run share", "first other bits, step", "saturated, step", "growth per step",
               "slope after, per step", "|Δw| / distance at the end", "mean |Δloss|, training", "mean |Δloss|, held out")  # fmt: skip
    rows = [
        (
            _called(name),
            _number(row.get("frequency"), ".1e"),
            _number(row["onset"], "d"),
            _number(row["saturated"], "d"),
            _number(row["growth"], ".3f"),
            _number(row["slope"], ".3g"),
            "ruined" if row["ruined"] is not None else _number(row["share_of_distance"], ".3g"),
            _number(row["loss_apart"], ".2g"),
            _number(row["evaluation_apart"], ".2g"),
        )
        for name, row in record["runs"].items()
    ]
    return Part(
        title="All runs",
        columns=columns,
        rows=rows,
        paragraphs=[
            f"Growth is the slope of ln|Δw| between the first other bits and saturation (|Δw| at {SATURATED:g} of the distance "
            f"moved), the slope after that of |Δw| itself; each is fitted on at least {FIT} steps. The reseeded control reads "
            "other samples, so its training loss differs by their difficulty too; the loss on held-out text has not that excuse.",
        ],
    )


def _early_and_late(record: Mapping[str, Any]) -> Part:
    found = [(row["onset"], row["growth"], row["saturated"], _called(name)) for name, row in record["runs"].items()]
    growing = sorted((row for row in found if row[0] is not None and row[1] is not None), key=lambda row: row[0])
    return Part(
        title="Does the growth depend on the fault, or on when it strikes?",
        paragraphs=[
            "The runs by the step of their first other bits. The same least of all errors, one element off by one unit in the last "
            f"place, is made once in step 0 and once in step {record['plan']['late']}: what differs between these two is the time alone."
        ],
        columns=("first other bits, step", "growth per step", "saturated, step", "run"),
        rows=[(onset, f"{growth:.3f}", _number(saturated, "d"), name) for onset, growth, saturated, name in growing],
    )


def _beside(record: Mapping[str, Any]) -> Part:
    growth, slope = record["growth"], record["slope"]
    rows = record["runs"]

    def factor(spread: Mapping[str, Any]) -> str:
        if spread["factor"] is None:
            return f"cannot be said ({spread['count']} units)"
        wide = spread["frequency_factor"]
        return f"factor {spread['factor']:.2f} over {spread['count']} units" + (
            f", whose frequencies span {wide:,.0f}" if wide else ""
        )

    def onset(name: str) -> str:
        if name not in rows:
            return "not run"
        step = rows[name]["onset"]
        return "no other bits" if step is None else f"other bits from step {step} on"

    return beside(
        "Beside the study of real devices",
        [
            ("loss curves", "indistinguishable", "; ".join(goal["measured"] for goal in record["goals"][:2])),
            ("rate of drift over units", "similar on all nodes", f"growth: {factor(growth)}; slope: {factor(slope)}"),
            ("units 2 and 3", "nothing was seen", f"{onset('unit-2')}; {onset('unit-3')}"),
            ("unit 13", "nothing until step 450, then drift", onset("unit-13")),
        ],
        paragraphs=[
            "There: real sick nodes and a LLaMA of 8 B widths. Here: simulated ones and a small model on a CPU."
        ],
    )


def _how(record: Mapping[str, Any]) -> Part:
    setup = record["plan"]["setup"]
    return Part(
        title="How it was done",
        paragraphs=[
            f"A LLaMA with {setup['shape']['layers']} layers of width {setup['shape']['hidden']} reads "
            f"{setup['shape']['samples']} × {setup['shape']['length']} bytes of Python's standard library per step; AdamW, learning rate {setup['learning_rate']:g} after {setup['warm_up']} "
            "steps of warm-up, clipped at 1. The rate was chosen so that the regimes are reached within the run: with half of "
            "it, one element off by one unit in the last place stays below a thousandth of the distance moved for 700 steps.",
            "Faults are put into real tensors inside the attention and feed-forward sub-modules, forward and backward; nothing "
            "is compared, corrected or synchronised during a run.",
        ],
    )


def _drift_plot(runs: Mapping[str, Piece]) -> str:
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(9, 5))
    distance = runs["healthy"]["distance"]
    for name, style in _styles(runs).items():
        share = runs[name]["difference"] / distance
        if name not in ("healthy", "again") and np.nanmax(share) > 0:
            axis.plot(np.where(share > 0, share, np.nan), label=_called(name), **style)
    axis.axhline(SATURATED, color="black", linestyle=":", linewidth=1)
    axis.set(yscale="log", xlabel="step", ylabel="|Δw| / distance moved")
    axis.legend(fontsize=8, ncols=2)
    return svg(figure)


def _loss_plot(runs: Mapping[str, Piece]) -> str:
    plots = pyplot()
    figure, (left, right) = plots.subplots(1, 2, figsize=(11, 4.5))
    healthy = runs["healthy"]["evaluation"]
    steps = EVALUATE_EVERY * np.arange(1, len(healthy) + 1)
    for name, style in _styles(runs).items():
        evaluation = runs[name]["evaluation"]
        left.plot(steps, evaluation, label=_called(name), **style)
        if name not in ("healthy", "again"):
            difference = np.abs(evaluation - healthy)
            right.plot(steps, np.where(difference > 0, difference, np.nan), **style)
    left.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    right.set(yscale="log", xlabel="step", ylabel="|Δloss| against the healthy run (nats per byte)")
    left.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    return svg(figure)


def _styles(runs: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    colours = pyplot().get_cmap("tab20")
    units = [name for name in runs if name not in OTHERS]
    styles = {name: {"color": colours(i), "linewidth": 1.2} for i, name in enumerate(units)}
    styles["reseeded"] = {"color": "black", "linewidth": 2, "linestyle": "--"}
    styles["once"] = {"color": "grey", "linewidth": 2.5}
    styles["once-late"] = {"color": "grey", "linewidth": 2.5, "linestyle": ":"}
    styles["healthy"] = {"color": "black", "linewidth": 2}
    return styles


def _called(name: str) -> str:
    return OTHERS.get(name, name.replace("-", " "))


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _finite(column: npt.NDArray[Any]) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in column]
