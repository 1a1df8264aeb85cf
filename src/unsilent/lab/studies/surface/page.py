"""``unsilent study surface``: its figures and its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.studies.free_run import BACK, EVERY
from unsilent.lab.studies.parts import write_figures
from unsilent.lab.studies.surface.study import SAMPLES, plan, survey
from unsilent.lab.studies.surface.tables import tables

MARKS = "osD^v<>"
CALLED = {"growth": "growth per step before saturation", "slope": "slope of |Δw| after saturation",
          "share": "|Δw| / distance at the end"}  # fmt: skip


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``surface.json`` and ``surface.html``."""
    planned = plan(quick=quick)
    ways = survey(planned, out)
    record = {
        "study": "surface",
        "quick": quick,
        "plan": asdict(planned),
        **tables(ways, {name: setup.learning_rate for name, setup in planned.setups.items()}),
        "conditions": conditions(command),
    }
    write_figures(out / "surface.json", record)
    page(record).write(out / "surface.html")
    return record


def page(record: Mapping[str, Any]) -> Page:
    """The page of a finished study; ``record`` is what ``surface.json`` has."""
    return Page(
        title="Does the loss surface set the drift, or the fault?",
        lead=("A quick run: its figures mean nothing. " if record["quick"] else "") + record["answer"],
        parts=[
            Part(
                title="Growth of the drift against sharpness",
                plot=_plot(record),
                caption="Exponential growth of |Δw| per step before saturation, one point for each way of training (colour) and "
                "each fault (mark); simulated sick devices. Left: against the largest eigenvalue of the Hessian. Right: against "
                "learning rate × the largest eigenvalue of the Hessian as AdamW scales it.",
            ),
            _ways(record),
            _measures(record),
            _beside(record),
            _how(record),
        ],
        conditions=record["conditions"],
    )


def _plot(record: Mapping[str, Any]) -> str:
    plots = pyplot()
    figure, (left, right) = plots.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    colours = plots.get_cmap("tab10")
    for i, (way, row) in enumerate(record["ways"].items()):
        for mark, rates in zip(MARKS, row["faults"].values(), strict=False):
            if rates["growth"] is not None:
                for axis, key in ((left, "sharpness"), (right, "scaled")):
                    axis.plot(row[key], rates["growth"], mark, color=colours(i))
        left.plot([], [], "o", color=colours(i), label=way)
    for mark, fault in zip(MARKS, next(iter(record["ways"].values()))["faults"], strict=False):
        right.plot([], [], mark, color="grey", label=_fault(fault))
    left.set(xscale="log", xlabel="largest eigenvalue of the Hessian", ylabel="growth of |Δw| per step")
    right.set(xscale="log", xlabel="learning rate × largest eigenvalue, scaled")
    left.legend(fontsize=8, title="way of training, learning rate")
    right.legend(fontsize=8, title="fault")
    figure.tight_layout()
    return svg(figure)


def _ways(record: Mapping[str, Any]) -> Part:
    faults = list(next(iter(record["ways"].values()))["faults"])
    return Part(
        title="All ways of training",
        columns=("way, learning rate", "sharpness", "learning rate × scaled sharpness", "training loss at the end",
                 *(f"growth, {_fault(fault)}" for fault in faults),
                 *(f"share at the end, {_fault(fault)}" for fault in faults)),
        rows=[
            (
                way,
                f"{row['sharpness']:.3g}",
                f"{row['scaled']:.3g}",
                f"{row['loss']:.3f}",
                *(_number(row["faults"][fault]["growth"]) for fault in faults),
                *(_number(row["faults"][fault]["share"]) for fault in faults),
            )
            for way, row in record["ways"].items()
        ],
    )  # fmt: skip


def _measures(record: Mapping[str, Any]) -> Part:
    rows: list[tuple[Any, ...]] = []
    for name, measure in record["measures"].items():
        faults = ", ".join(_fault(fault) for fault in measure["faults"])
        if not measure["faults"]:
            rows.append((CALLED[name], "none", "–", "–", "–", "–"))
            continue
        shares = (measure["of_way"], measure["of_fault"])
        correlations = (measure["sharpness"], measure["scaled"])
        rows.append(
            (
                CALLED[name],
                faults,
                *("–" if share is None else f"{share:.0%}" for share in shares),
                *(f"{one['correlation']:+.2f} (p = {one['p']:.2g}, {one['count']} ways)" for one in correlations),
            )
        )
    return Part(
        title="What explains the rates",
        columns=("rate", "faults that show it under every way", "variance explained by the way", "by the fault",
                 "rank correlation with sharpness", "with learning rate × scaled sharpness"),
        rows=rows,
        paragraphs=[
            "The learning rate moves the growth and the sharpness alike, so a correlation over all ways is no proof of a cause. "
            "Shares of variance grow with the number of ways and of faults by chance alone; the answer above compares them for each "
            "way and each fault beyond the first."
        ],
    )  # fmt: skip


def _beside(record: Mapping[str, Any]) -> Part:
    growth = record["measures"]["growth"]
    lowest = min(record["ways"].items(), key=lambda item: item[1]["sharpness"])
    return beside(
        "Beside the study of real devices",
        [
            ("what drives the drift", "the sharpness of the loss surface; the fault only triggers it", record["answer"]),
            ("smoothing the surface", "may make training robust (outlook, not measured)",
             f"the flattest here is {lowest[0]} (sharpness {lowest[1]['sharpness']:.3g}); growth under it "
             + ", ".join(f"{_fault(name)}: {_number(lowest[1]['faults'][name]['growth'])}" for name in growth["faults"])),
        ],
    )  # fmt: skip


def _how(record: Mapping[str, Any]) -> Part:
    return Part(
        title="How it was done",
        paragraphs=[
            f"Sharpness is the eigenvalue of largest absolute value of the Hessian on {SAMPLES} held-out samples, by power "
            f"iteration with Hessian-vector products, every {record['plan']['every']} steps of the healthy run; the median over "
            "the run. Scaled: of P^-1/2 H P^-1/2, where P is AdamW's √v + ε.",
            "SAM takes the gradient at w + ρ·g/‖g‖, ρ as its name says; its two passes are both made on the sick device, which so errs in twice as many operations. "
            f"Averaging is lookahead: every {EVERY} steps the weights fall back by {BACK:.0%} to where they were, so the average "
            "feeds back into training. An average that is only kept beside the run cannot change how fast it drifts.",
        ],
    )


def _fault(name: str) -> str:
    return "one element once" if name == "once" else name.replace("-", " ")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
