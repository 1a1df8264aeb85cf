"""``unsilent study finetune``: its figures and its page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.studies.finetune.study import plan, tune_all
from unsilent.lab.studies.finetune.tables import CHANCE, SPIKE, WINDOW, spikes, tables, words
from unsilent.lab.studies.parts import Piece, write_figures

# Accuracy and disagreement with the healthy run, in percent, as the study of real devices states them.
STORED = {
    "CosmosQA": {"healthy": (90.79, None), "reseeded": (89.50, 6.70), "unit-1": (90.53, 5.15), "unit-6": (0.00, 100.0)},
    "MathQA": {
        "healthy": (37.22, None),
        "reseeded": (38.83, 56.75),
        "unit-1": (36.78, 42.24),
        "unit-6": (36.92, 36.82),
    },
}
WHAT = {
    "next-line": "Which of four lines follows six lines of code?",
    "ending": "Which of four endings completes a line of code?",
}


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``finetune.json`` (with the loss of every run) and ``finetune.html``."""
    planned = plan(quick=quick)
    tasks = tune_all(planned, out)
    record = {
        "study": "finetune",
        "quick": quick,
        "plan": {**asdict(planned), "units": [one.number for one in planned.units]},
        **tables(tasks),
        "conditions": conditions(command),
    }
    losses = {name: {run: _finite(piece["loss"]) for run, piece in runs.items() if "loss" in piece}
              for name, runs in tasks.items()}  # fmt: skip
    write_figures(out / "finetune.json", {**record, "losses": losses})
    page(record, tasks).write(out / "finetune.html")
    return record


def page(record: Mapping[str, Any], tasks: Mapping[str, Mapping[str, Piece]]) -> Page:
    """The page of a finished study; ``record`` is what ``finetune.json`` has."""
    return Page(
        title="Fine-tuning on simulated sick devices",
        lead=_lead(record),
        parts=[
            Part(
                title="Goals",
                columns=("", "goal", "measured"),
                rows=[
                    ("met" if goal["met"] else "NOT met", goal["goal"], goal["measured"]) for goal in record["goals"]
                ],
            ),
            Part(
                title="Accuracy",
                plot=_accuracy_plot(record),
                caption="Share of right answers to held-out questions after tuning, with 95 % intervals; simulated sick devices. The "
                "dashed line is chance, the dotted one a comparison of letters without any model.",
            ),
            *(_task(name, task) for name, task in record["tasks"].items()),
            Part(
                title="Loss while tuning",
                plot=_loss_plot(tasks),
                caption=f"Median of {WINDOW} steps (lines) and every spike's highest loss (crosses; a triangle at the upper edge: not "
                "finite); simulated sick devices.",
            ),
            _beside(record),
            _how(record),
        ],
        conditions=record["conditions"],
    )


def _lead(record: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for name, task in record["tasks"].items():
        rows = task["runs"]
        units = {run: row for run, row in rows.items() if run.startswith("unit")}
        accuracies = ", ".join(f"{called(run)} {row['accuracy']['share']:.1%}" for run, row in units.items())
        parts.append(
            f"{name}: tuned on a healthy device the model answers {rows['healthy']['accuracy']['share']:.1%} of "
            f"{task['questions']:,} questions, with the questions in another order {rows['reseeded']['accuracy']['share']:.1%}, on "
            f"simulated sick devices {accuracies}."
        )
    return ("A quick run: its figures mean nothing. " if record["quick"] else "") + " ".join(parts)


def _task(name: str, task: Mapping[str, Any]) -> Part:
    rows: list[tuple[Any, ...]] = []
    for run, row in task["runs"].items():
        rows.append(
            (
                called(run),
                words(row["accuracy"]),
                "–" if run == "healthy" else words(row["disagreement"]),
                row["not_finite"],
                "–" if "spikes" not in row else _spikes(row["spikes"]),
                "–" if "last_loss" not in row else _loss(row["last_loss"]),
            )
        )
    rows.append(("no model: comparison of letters", words(task["letters"]), "–", "–", "–", "–"))
    return Part(
        title=f"{name}: {WHAT[name]}",
        columns=("run", "right", "other answers than the healthy run", "questions without finite scores", "loss spikes",
                 f"loss, mean of the last {WINDOW} steps"),
        rows=rows,
    )  # fmt: skip


def _spikes(spikes: list[dict[str, Any]]) -> str:
    if not spikes:
        return "none"
    lasting = sum(spike["recovered"] is False for spike in spikes)
    highest = [spike["highest"] for spike in spikes]
    top = "not finite" if None in highest else f"up to {max(highest):.3g}"
    return f"{len(spikes)} ({top}; {lasting} without recovery)"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _beside(record: Mapping[str, Any]) -> Part:
    rows: list[tuple[str, str, str]] = []
    runs = dict.fromkeys(run for task in record["tasks"].values() for run in task["runs"])
    for run in runs:
        stored = "; ".join(
            f"{task} {accuracy:.2f} %" + ("" if other is None else f" (disagreement {other:.2f} %)")
            for task, figures in STORED.items()
            if run in figures
            for accuracy, other in [figures[run]]
        )
        here = "; ".join(
            f"{name} {row['accuracy']['share']:.2%}"
            + ("" if run == "healthy" else f" (disagreement {row['disagreement']['share']:.2%})")
            for name, task in record["tasks"].items()
            if (row := task["runs"].get(run)) is not None
        )
        rows.append((called(run), stored or "not stated", here))
    return beside("Beside the study of real devices", rows, paragraphs=["Other tasks, another model, simulated devices: what can "
                  "be compared is the order of the runs, not the figures."])  # fmt: skip


def _how(record: Mapping[str, Any]) -> Part:
    pretraining = record["plan"]["pretraining"]
    shape = pretraining["shape"]
    tasks = "; ".join(
        f"{task['name']}: {task['questions']:,} questions, {task['batch']} a step" for task in record["plan"]["tasks"]
    )
    return Part(
        title="How it was done",
        paragraphs=[
            f"A LLaMA with {shape['layers']} layers of width {shape['hidden']} is pre-trained for {pretraining['steps']:,} steps of "
            f"{shape['samples']} × {shape['length']} bytes on files of Python's standard library, then tuned on questions from the "
            f"same files ({tasks}). Questions of the test come from files that neither has seen.",
            "Another second task, which of four docstrings belongs to a signature, was tried first and given up before any sick unit "
            "was run on it: tuned on a healthy device this model answered 27.1% of 2,000, 2.2 standard errors above chance.",
            "Wrong options are right answers of questions from three other files of the same part; all four have the right one's "
            "indentation; no right answer comes twice, and none of the test is one of the tuning.",
            "A model's answer is the option with the highest mean log-likelihood of its bytes; where one of the four is not finite "
            "the question counts as wrong and as another answer than the healthy run's. The test runs on a healthy device: the weights "
            "answer, not the device.",
            f"A loss spike is a loss that is not finite, or above the median of the {WINDOW} steps before by more than {SPIKE:g} of "
            "their robust standard deviations; it has recovered if the median of as many steps after it is back below that.",
        ],
    )


def _accuracy_plot(record: Mapping[str, Any]) -> str:
    plots = pyplot()
    figure, axes = plots.subplots(1, len(record["tasks"]), figsize=(11, 4), sharey=True, squeeze=False)
    for axis, (name, task) in zip(axes[0], record["tasks"].items(), strict=True):
        for i, (run, row) in enumerate(task["runs"].items()):
            rate = row["accuracy"]
            low, high = (abs(rate["share"] - end) for end in rate["interval"])
            axis.errorbar(i, rate["share"], yerr=[[low], [high]], fmt="o", capsize=4, color=_colour(run))
        axis.axhline(CHANCE, color="grey", linestyle="--", label="chance")
        axis.axhline(task["letters"]["share"], color="grey", linestyle=":", label="comparison of letters")
        axis.set_xticks(range(len(task["runs"])), [called(run) for run in task["runs"]], rotation=30, ha="right")
        axis.set(title=name, ylim=(-0.03, 1))
    axes[0][0].set_ylabel("share of right answers")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return svg(figure)


def _loss_plot(tasks: Mapping[str, Mapping[str, Piece]]) -> str:
    plots = pyplot()
    figure, axes = plots.subplots(1, len(tasks), figsize=(11, 4), squeeze=False)
    for axis, (name, runs) in zip(axes[0], tasks.items(), strict=True):
        for run, piece in runs.items():
            if "loss" not in piece:
                continue
            loss, colour = piece["loss"], _colour(run)
            steps = np.arange(WINDOW, len(loss) + 1)
            axis.plot(
                steps - WINDOW / 2,
                [np.median(loss[end - WINDOW : end]) for end in steps],
                color=colour,
                label=called(run),
            )
            for spike in spikes(loss):
                if spike["highest"] is None:
                    axis.plot(spike["step"], 0.97, "^", color=colour, transform=axis.get_xaxis_transform())
                else:
                    axis.plot(spike["step"], spike["highest"], "x", color=colour)
        axis.set(title=name, xlabel="step", ylabel="loss (nats per question)", yscale="log")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    return svg(figure)


def called(run: str) -> str:
    """What a run is called on the page."""
    return {"untuned": "before tuning", "healthy": "healthy", "reseeded": "reseeded"}.get(run, run.replace("-", " "))


def _colour(run: str) -> str:
    fixed = {
        "untuned": "silver",
        "healthy": "black",
        "reseeded": "grey",
        "unit-1": "C0",
        "unit-6": "C3",
        "unit-11": "C1",
    }
    return fixed.get(run, "C2")


def _finite(column: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in column]
