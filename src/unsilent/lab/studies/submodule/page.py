"""The page of the study of sub-modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unsilent.lab.page import Page, Part, beside, pyplot, svg
from unsilent.lab.studies.submodule.tables import ENOUGH, FACTOR, QUANTILES, STORED, name_of
from unsilent.lab.units import PLACES

_COLOURS = dict(zip(PLACES, ("tab:blue", "tab:green", "tab:red", "tab:orange"), strict=True))


def page(record: dict[str, Any]) -> Page:
    """The whole page, from what ``submodule.json`` holds."""
    units = record["units"]
    sick = [unit for unit in units if any(place["differing"] for place in unit["places"].values())]
    parts = [_frequencies(units), _goals(record)]
    if sick:
        parts += [_over_time(sick), _severity(sick), _checks(sick)]
    return Page(
        title="How often, and by how much, is a sick device's sub-module wrong?",
        lead=_lead(record, sick),
        parts=[*parts, _weights(units), _how(record)],
        conditions={**record["conditions"], "pools of ranks that died and were replaced": record["pools_replaced"]},
    )


def _lead(record: dict[str, Any], sick: Sequence[dict[str, Any]]) -> str:
    short = "This was a quick run: its figures mean nothing. " if record["quick"] else ""
    met = [goal for goal in record["goals"] if goal["met"]]
    total = _totals(sick)
    silent = [name_of(unit) for unit in record["units"] if unit not in sick]
    return (
        f"{short}{len(sick)} simulated sick units were run in lock step with healthy twins for {record['steps']} steps each, on "
        f"shape {record['shape']['name']} and seed {record['seed']}; {', '.join(silent) or 'no unit'} showed no wrong bit. "
        f"{len(met)} of {len(record['goals'])} goals are met. Of {total['bursts']} bursts {total['reached']} changed what "
        f"a sub-module hands on; fingerprints, compared between the twins, flagged {total['fingerprints']} of these, the ABFT "
        f"baseline {total['abft']}."
    )


def _frequencies(units: Sequence[dict[str, Any]]) -> Part:
    rows = []
    for unit in units:
        stored = STORED.get(unit["number"])
        for i, (place, figures) in enumerate(unit["places"].items()):
            if stored is not None or figures["differing"]:
                there = "—" if stored is None else f"{stored[i]:.2e}" if stored[i] else "none seen"
                rows.append((f"{name_of(unit)}, {_words(place)}", there, _frequency(figures)))
    table = beside(
        "Mean mismatch frequency",
        rows,
        paragraphs=[
            "The share of elements of a sub-module's output (forward) or of its input's gradient (backward) whose bits differ "
            "from the healthy twin's, over all steps, layers and ranks. "
            f"Where it rests on fewer than {ENOUGH} bursts, its 95 % Poisson interval is given."
        ],
    )
    return Part(
        title=table.title,
        paragraphs=table.paragraphs,
        columns=table.columns,
        rows=table.rows,
        plot=_stored_against_here(units),
        caption="Simulated units: mean mismatch frequency that the paper states for the node of the same number, against the one "
        f"measured here. The line is equality; the band is a factor of {FACTOR:.0f}. Bars: 95 % Poisson intervals of the number "
        "of bursts.",
    )


def _stored_against_here(units: Sequence[dict[str, Any]]) -> str:
    figure, axes = pyplot().subplots(figsize=(6.2, 5))
    line = [1e-7, 1e-1]
    axes.plot(line, line, color="grey", linewidth=1)
    axes.fill_between(line, [x / FACTOR for x in line], [x * FACTOR for x in line], color="grey", alpha=0.15)
    for marker, number in zip("os^", (1, 10, 11), strict=True):
        for unit in units:
            if unit["number"] != number:
                continue
            for place, stored in zip(PLACES, STORED[number], strict=True):
                here = unit["places"][place]
                low, high = here["interval"] or (here["frequency"], here["frequency"])
                bars = [[here["frequency"] - low], [high - here["frequency"]]]
                axes.errorbar([stored], [here["frequency"]], yerr=bars, fmt=marker, color=_COLOURS[place], capsize=2)
    for place, colour in _COLOURS.items():
        axes.plot([], [], "s", color=colour, label=_words(place))
    for marker, number in zip("os^", (1, 10, 11), strict=True):
        axes.plot([], [], marker, color="black", fillstyle="none", label=f"unit {number}")
    axes.set(xscale="log", yscale="log", xlabel="stored: share of elements that differ", ylabel="here (simulated)")
    axes.legend(fontsize=8)
    return svg(figure)


def _goals(record: dict[str, Any]) -> Part:
    return Part(
        title="What must hold",
        columns=("", "measured", ""),
        rows=[(goal["goal"], goal["measured"], "met" if goal["met"] else "NOT MET") for goal in record["goals"]],
    )


def _over_time(sick: Sequence[dict[str, Any]]) -> Part:
    figure, grid = pyplot().subplots(len(sick), 2, figsize=(11, 2.3 * len(sick) + 0.6), sharex=True, squeeze=False)
    for (left, right), unit in zip(grid, sick, strict=True):
        for place, curve in unit["over_time"].items():
            steps = [step for step, _, _ in curve]
            left.plot(steps, [frequency for _, frequency, _ in curve], ".", color=_COLOURS[place], label=_words(place))
            right.plot(steps, [severity for _, _, severity in curve], ".", color=_COLOURS[place])
        left.set(yscale="log", ylabel=f"{name_of(unit)}\nshare of elements")
        right.set(yscale="log", ylabel="mean |y − y*|/|y*|", xlim=(0, unit["steps"]))
    grid[0][0].set_title("mismatch frequency of a step")
    grid[0][1].set_title("mismatch severity of a step")
    for axes in grid[-1]:
        axes.set_xlabel("step")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="upper center", ncol=4, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / (2.3 * len(sick) + 0.6)))
    return Part(
        title="Over time",
        paragraphs=[
            "Errors come in bursts, as on the real nodes: most steps have none, and no point is drawn for them."
        ],
        plot=svg(figure),
        caption="Simulated sick units: frequency (left) and mean severity (right) of mismatches in each step that had any, by "
        "sub-module and direction. Means far above 1 are the work of single exploded elements.",
    )


def _severity(sick: Sequence[dict[str, Any]]) -> Part:
    rows = []
    for unit in sick:
        for place, figures in unit["places"].items():
            severity = figures["severity"]
            if severity["mean"] is not None:
                rows.append((
                    f"{name_of(unit)}, {_words(place)}", f"{figures['differing']:,}", _short(severity["mean"]),
                    *(_short(value) for value in severity["quantiles"]), _short(severity["largest"]),
                    severity["left_out"], severity["not_finite"],
                ))  # fmt: skip
    return Part(
        title="Mismatch severity",
        paragraphs=[
            "|y − y*|/|y*| of the elements that differ. Elements whose right value is 0 have none; they are counted beside it. "
            "Quantiles are exact to 12 % (20 bins per decade). The paper speaks of differences of a hundred and a thousand "
            "times, and of single elements of up to about 10¹². In the backward an input's gradient is the sum of two or three "
            "products: where it nearly cancels, an error of one of them is many times as large as the sum."
        ],
        columns=(
            "simulated",
            "elements",
            "mean",
            *(f"{share:.0%}" for share in QUANTILES),
            "largest",
            "y* = 0",
            "not finite",
        ),
        rows=rows,
    )


def _checks(sick: Sequence[dict[str, Any]]) -> Part:
    rows = []
    for unit in sick:
        for place, figures in unit["places"].items():
            seen = figures["flagged"]
            if seen["bursts"]:
                rows.append((
                    f"{name_of(unit)}, {_words(place)}", seen["bursts"], seen["reached"], seen["fingerprints"], seen["abft"],
                    f"{seen['tensors_abft']} of {seen['tensors']}", f"{seen['abft_threshold']:.2f}",
                ))  # fmt: skip
    total = _totals(sick)
    rows.append(("together", *(total[name] for name in ("bursts", "reached", "fingerprints", "abft")),
                 f"{total['tensors_abft']} of {total['tensors']}", ""))  # fmt: skip
    return Part(
        title="Which check would have seen it?",
        paragraphs=[
            "A burst reached the tap if any element there differed; those of the backward that did not, spoiled gradients of "
            "weights only. Fingerprints are unsilent's own, of each tapped tensor, compared between the twins. ABFT compares the row "
            "sums of the products whose output is tapped, taken from outputs rounded to bfloat16, with those of its operands; "
            "its threshold, in units of the rounding bound, is the lowest that gave no alarm on the healthy group in the same "
            "run. The last but one column counts single wrong tensors rather than bursts.",
            "The paper's ABFT flagged almost nothing on most nodes; these figures are no evidence for or against that. Here faults "
            "sit in the very products that it checks, and its rows are as narrow as the model, so that one wrong "
            f"element weighs more in a sum: its sensitivity falls with the width (the paper's is 4,096). In {total['quiet']:,} steps and "
            f"places without a burst fingerprints raised {total['false_fingerprints']} alarms; ABFT's threshold is the highest "
            "residual of the healthy twins in the same run, so that it raises none there by construction.",
        ],
        columns=(
            "simulated",
            "bursts",
            "reached the tap",
            "fingerprints",
            "ABFT",
            "tensors flagged by ABFT",
            "threshold",
        ),
        rows=rows,
    )


def _weights(units: Sequence[dict[str, Any]]) -> Part:
    return Part(
        title="Gradients of weights",
        paragraphs=[
            "They pass no tap, so they are a reading of their own: the share of their elements that differ before the update. "
            "Weights and moments are taken over from the healthy twin after each step."
        ],
        columns=("simulated", "attention", "FFN", "all others"),
        rows=[
            (
                name_of(unit),
                *(f"{kind['frequency']:.2e}" if kind["differing"] else "0" for kind in unit["weights"].values()),
            )
            for unit in units
        ],
    )


def _how(record: dict[str, Any]) -> Part:
    shape = record["shape"]
    return Part(
        title="How it was done",
        paragraphs=[
            f"Shape {shape['name']}: {shape['layers']} layers, hidden {shape['hidden']}, FFN {shape['ffn']}, {shape['heads']} "
            f"heads, {shape['samples']} × {shape['length']} tokens per step, fp32, trained on Python's own sources. The paper "
            "ran 16 layers of LLaMA-3-8B's widths on accelerators under XLA; deterministic kernels on a CPU stand in for that.",
            "Four ranks: two tensor-parallel groups of two with sequence parallelism, one sick (the same unit as both of its "
            "devices, bursts together, hits apart) and one healthy. After each attention and FFN sub-module's own "
            "computation and before its reduce-scatter, forward and backward, the sick rank's value is compared with its twin's "
            "and overwritten with it.",
            "The units are simulated. Shares of units 1, 10 and 11 were fitted to the stored figures on shape small and seed 0; "
            "this page shows them elsewhere. All other units but 2, 3 and the healthy ones are interpolated.",
        ],
    )


def _totals(sick: Sequence[dict[str, Any]]) -> dict[str, int]:
    places = [place["flagged"] for unit in sick for place in unit["places"].values()]
    names = ("bursts", "reached", "fingerprints", "abft", "tensors", "tensors_abft")
    quiet = sum(unit["steps"] - place["flagged"]["bursts"] for unit in sick for place in unit["places"].values())
    false = {
        f"false_{check}": sum(place["alarms_without_burst"][check] for place in places)
        for check in ("fingerprints", "abft")
    }
    return {name: sum(place[name] for place in places) for name in names} | false | {"quiet": quiet}


def _frequency(figures: dict[str, Any]) -> str:
    if not figures["differing"]:
        return f"0 of {figures['elements']:,}"
    text = f"{figures['frequency']:.2e} ({figures['events']} bursts)"
    if figures["events"] < ENOUGH and figures["interval"]:
        low, high = figures["interval"]
        text += f", {low:.1e} … {high:.1e}"
    return text


def _words(place: str) -> str:
    return place.replace("_", " ").replace("ffn", "FFN")


def _short(value: float) -> str:
    return f"{value:.2g}" if value == 0 or abs(math.log10(abs(value))) < 4 else f"{value:.1e}"
