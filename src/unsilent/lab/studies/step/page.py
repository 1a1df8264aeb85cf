"""The page of the study of single steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unsilent.lab.page import Page, Part, beside, pyplot, svg
from unsilent.lab.studies.step.tables import CONSISTENT_FACTOR, LAW_FACTOR, STORED, name_of, standing


def page(record: dict[str, Any]) -> Page:
    """The whole page, from what ``step.json`` holds."""
    units = record["units"]
    noisy = [unit for unit in units if unit["noise"]]
    parts = [_beside(units), _law(record)]
    if noisy:
        parts.append(_over_time(noisy))
    return Page(
        title="How far does a sick device lead one step astray?",
        lead=_lead(record, noisy),
        parts=[*parts, _table(units), _how(record)],
        conditions=record["conditions"],
    )


def _lead(record: dict[str, Any], noisy: Sequence[dict[str, Any]]) -> str:
    short = "This was a quick run: its figures mean nothing. " if record["quick"] else ""
    laws = [goal for goal in record["goals"] if "1/√tokens" in goal["goal"]]
    probes = [goal for goal in laws if goal["goal"].startswith("the probe")]
    worst = max((unit["all"]["worst"] or 0.0 for unit in noisy if name_of(unit) != "the probe"), default=0.0)
    return (
        f"{short}In {record['steps']} steps each, at two batch sizes, the gradient of a simulated sick unit was at most "
        f"{worst:.1%} of its norm away from the healthy one's (the paper's worst: {max(STORED.values()):.1%}). The worst of a forward "
        f"burst lies within a factor of {LAW_FACTOR:.0f} of 1/√tokens in {_met(probes)} cases for a probe that spoils one "
        f"activation at a time ({'; '.join(goal['measured'] for goal in probes)}), and in "
        f"{_met([goal for goal in laws if goal not in probes])} for the units, which may spoil several or none."
    )


def _met(goals: Sequence[dict[str, Any]]) -> str:
    return f"{sum(goal['met'] for goal in goals)} of {len(goals)}"


def _beside(units: Sequence[dict[str, Any]]) -> Part:
    rows = []
    for unit in units:
        if unit["number"] in STORED:
            worst = unit["all"]["worst"] or 0.0
            what = f"unit {unit['number']}, {unit['tokens']:,} tokens per step"
            rows.append((what, f"{STORED[unit['number']]:.3f}", f"{_short(worst)}: {standing(unit)}"))
    return beside(
        "Worst noise-to-signal of a run (simulated units)",
        rows,
        paragraphs=[
            "‖g − g*‖/‖g*‖, L2 over all gradients of a step, the largest of the run. Within a factor of "
            f"{CONSISTENT_FACTOR:.0f} a figure is called consistent with the stored one, not predicted: it depends on the tokens per "
            "step, and those of the paper are not known."
        ],
    )


def _law(record: dict[str, Any]) -> Part:
    figure, axes = pyplot().subplots(figsize=(6.2, 4.4))
    with_forward = [unit for unit in record["units"] if unit["forward"]["worst"]]
    counts = sorted({unit["tokens"] for unit in record["units"]})
    tokens = [counts[0] / 2, *counts, counts[-1] * 2]
    law = [1 / math.sqrt(n) for n in tokens]
    axes.plot(tokens, law, color="grey", label="1/√tokens, and a factor of 2")
    axes.fill_between(tokens, [y / LAW_FACTOR for y in law], [y * LAW_FACTOR for y in law], color="grey", alpha=0.15)
    for name in dict.fromkeys(name_of(unit) for unit in with_forward):
        points = [(unit["tokens"], unit["forward"]["worst"]) for unit in with_forward if name_of(unit) == name]
        axes.plot(*zip(*points, strict=True), "o:", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens per step", ylabel="worst ‖g − g*‖/‖g*‖ of a forward burst")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return Part(
        title="The worst of a forward burst, and 1/√tokens",
        paragraphs=[
            "An activation wrong by powers of ten is brought back to the usual size by the next norm: that token's gradient is then "
            "one that has nothing to do with the right one, and of n unrelated gradients of like size one makes 1/√n of the "
            "sum's norm. That is so of a burst that spoils one token: the probe spoils about one activation per burst and nothing "
            "else. A unit that spoils several tokens at once, or all of them a little, is not bound by it, and one whose bursts "
            "had no such activation stays below. Steps in which something erred in the backward too are left out."
        ],
        plot=svg(figure),
        caption="Simulated sick units: largest noise-to-signal among steps with a burst in the forward only, at two numbers of tokens "
        "per step.",
        columns=("", "measured", ""),
        rows=[(goal["goal"], goal["measured"], "met" if goal["met"] else "NOT MET") for goal in record["goals"]],
    )


def _over_time(noisy: Sequence[dict[str, Any]]) -> Part:
    counts = sorted({unit["tokens"] for unit in noisy})
    figure, grid = pyplot().subplots(1, len(counts), figsize=(5.5 * len(counts), 4), sharey=True, squeeze=False)
    for axes, tokens in zip(grid[0], counts, strict=True):
        for unit in noisy:
            if unit["tokens"] == tokens:
                points = [(step, value) for step, value in unit["noise"] if math.isfinite(value)]
                axes.plot(*zip(*points, strict=True), ".", markersize=4, label=name_of(unit))
        axes.axhline(1 / math.sqrt(tokens), color="grey", linewidth=1, label="1/√tokens")
        axes.set(yscale="log", xlabel="step", title=f"{tokens:,} tokens per step")
        axes.legend(fontsize=8)
    grid[0][0].set_ylabel("‖g − g*‖/‖g*‖")
    figure.tight_layout()
    return Part(
        title="Every step",
        plot=svg(figure),
        caption="Simulated sick units: noise-to-signal of each step in which the gradient had other bits than the healthy one's.",
    )


def _table(units: Sequence[dict[str, Any]]) -> Part:
    return Part(
        title="All units",
        columns=("simulated", "tokens", "steps with a burst", "median there", "worst, forward only", "worst, backward only",
                 "not finite"),
        rows=[
            (name_of(unit), f"{unit['tokens']:,}", f"{unit['bursts']['steps']} of {unit['steps']}",
             _short(unit["bursts"]["median"]), _short(unit["forward"]["worst"]), _short(unit["backward"]["worst"]), unit["not_finite"])
            for unit in units
        ],
    )  # fmt: skip


def _how(record: dict[str, Any]) -> Part:
    shape = record["shape"]
    return Part(
        title="How it was done",
        paragraphs=[
            f"Shape {shape['name']}: {shape['layers']} layers, hidden {shape['hidden']}, FFN {shape['ffn']}, fp32, trained on Python's "
            f"own sources with {shape['samples']} samples of {shape['length']} tokens per step, and with four times as many. "
            "The paper ran 32 layers of LLaMA-3-8B's widths under XLA; deterministic kernels on a CPU stand in for that.",
            "Weights are synchronised from the healthy device after each step, and nothing is overwritten within one. A sick "
            "device's gradient then depends on the step's weights and batch alone, so both devices are played in turn in one "
            "process, without tensor parallelism, and all units share one healthy run.",
            "The units are simulated; only the mismatch frequencies of units 1, 10 and 11, and the scale of unit 11's small errors, "
            "were fitted.",
        ],
    )


def _short(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}"
