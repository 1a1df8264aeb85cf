"""The results of ``study alpha`` for people: a page of tables and a plot, beside the table that they are compared with."""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.lab.rates import HARMFUL
from unsilent.lab.studies.alpha.study import LASTING, PLANS, Study, quick
from unsilent.lab.studies.alpha.tables import SEED_TABLE, TARGETS, tables

CLAIM = (0.037, 0.82)  # (false alarms, detection) that the text retelling the published rule claims at α = 0.05


def run(*, out: Path, preset: str, shorter: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``update.json``, ``update.md`` and, where matplotlib is installed, ``update.png``.

    Raises:
        UsageError: there is no plan for the preset, or OUT cannot be written.
    """
    if preset not in PLANS:
        raise UsageError(f"study alpha has no plan for preset {preset!r}: one of {', '.join(PLANS)}")
    plan = quick(PLANS[preset]) if shorter else PLANS[preset]
    study = Study(plan, out)
    results = study.run()
    record = {
        "study": "alpha", "command": command, "quick": shorter, "plan": vars(plan), "machine": machine(),
        "seconds": {name: round(stage["about"]["seconds"], 1) for name, stage in results.items()},
        **tables(plan, results),
    }  # fmt: skip
    try:
        (out / "update.json").write_text(json.dumps(record, indent=1) + "\n")
        drawn = draw(record, out / "update.png")
        (out / "update.md").write_text(page(record, plot="update.png" if drawn else ""))
    except OSError as error:
        raise UsageError(f"cannot write the results into {out}: {error.strerror or error}") from error
    return record


def machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names this machine."""
    import torch
    import transformers

    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": f"{platform.machine()}, {capability}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def page(record: dict[str, Any], *, plot: str) -> str:
    """The page, in Markdown."""
    parts = [
        _head(record),
        _goals(record),
        _beside_the_seed(record),
        _at_targets(record),
        _bins(record),
        _sites(record),
    ]
    if plot:
        parts.append(f"![detection against false alarms, and by deviation]({plot})")
    if "sustained" in record:
        parts.append(_lasting(record))
    parts.append(_recovery(record))
    if "paired" in record:
        parts.append(_paired(record))
    parts.append(_how(record))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def draw(record: dict[str, Any], path: Path) -> bool:
    """The plot; False, and nothing is written, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for rule, found in record["rules"].items():
        curve = sorted(found["curve"])
        (line,) = left.plot([x for x, _, _ in curve], [y for _, y, _ in curve], label=rule)
        left.plot([x for x, _, _ in curve], [z for _, _, z in curve], ":", color=line.get_color())
        bins = found["targets"][str(TARGETS[0])]["by_deviation"]
        right.plot(range(len(bins)), [one["share"] for one in bins], "o-", color=line.get_color(), label=rule)
    left.plot([CLAIM[0]], [CLAIM[1]], "k*", markersize=11, label="claimed at α = 0.05")
    left.set(xscale="log", xlabel="false alarms per job-step", ylabel="harmful faults detected", ylim=(0, 1.02),
             title="dotted: without gross faults")  # fmt: skip
    left.legend(loc="lower right", fontsize=8)
    bins = record["rules"]["robust"]["targets"][str(TARGETS[0])]["by_deviation"]
    right.set_xticks(range(len(bins)), [_bin(one) for one in bins], rotation=30, fontsize=8)
    right.set(xlabel="deviation of the step, ‖Δw − Δw*‖/‖Δw*‖", ylim=(0, 1.02), title="at 3.7 % false alarms")
    figure.tight_layout()
    # Without the date and the version in the file the same figures give the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return True


# ---- parts of the page -----------------------------------------------------------------------------------------------


def _head(record: dict[str, Any]) -> str:
    plan, on = record["plan"], record["machine"]
    minutes = sum(record["seconds"].values()) / 60
    note = "\n\n**A quick run: its figures mean nothing.**" if record["quick"] else ""
    return f"""# Which sensitivity of the update check catches what, measured

Command: `{record["command"]}`. {on["date"]}, Python {on["python"]}, torch {on["torch"]}, transformers
{on["transformers"]}, {on["cpu"]}, {on["cores"]} cores, {on["threads"]} thread; {minutes:.0f} minutes of wall time.
Preset `{plan["preset"]}`, {plan["ranks"]} ranks simulated in one process, each with {plan["samples"]} samples of
{plan["length"]} tokens per step; thresholds set on one seed, everything else measured on another.{note}"""


def _goals(record: dict[str, Any]) -> str:
    rows = [f"| {g['goal']} | {g['measured']} | {'yes' if g['met'] else '**no**'} |" for g in record["goals"]]
    return "## Goals\n\n| goal | measured | met |\n|---|---|---|\n" + "\n".join(rows)


def _beside_the_seed(record: dict[str, Any]) -> str:
    """The table of the source by ranges of α, and what each rule does at the ends of its ranges."""
    lines = [
        "## Beside the table that this started from",
        "",
        "Detection of harmful faults / false alarms per job-step, at the two ends of each range (one end of the last).",
        "",
        "| sensitivity | claimed: detects | claimed: false alarms | " + " | ".join(record["rules"]) + " |",
        "|---|---|---|" + "---|" * len(record["rules"]),
    ]
    for name, low, high, detects, false in SEED_TABLE:
        cells: list[str] = []
        for found in record["rules"].values():
            ends = [row for row in found["sweep"] if row["sensitivity"] in (low, high)]
            if high == math.inf:
                ends = [row for row in found["sweep"] if row["sensitivity"] == 0.3]
            cells.append(" … ".join(f"{_percent(e['detected'])} / {_percent(e['false_alarms'])}" for e in ends))
        lines.append(f"| {name} | {detects} | {false} | " + " | ".join(cells) + " |")
    lines += ["", "All settings of the sweep:", "", "| sensitivity | " + " | ".join(record["rules"]) + " |"]
    lines += ["|---|" + "---|" * len(record["rules"])]
    for i, row in enumerate(record["rules"]["robust"]["sweep"]):
        cells = [f"{_percent(f['sweep'][i]['detected'])} / {_percent(f['sweep'][i]['false_alarms'])}"
                 for f in record["rules"].values()]  # fmt: skip
        lines.append(f"| {row['sensitivity']:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _at_targets(record: dict[str, Any]) -> str:
    lines = [
        "## At equal false alarms",
        "",
        "The threshold of each rule is the highest that keeps the false alarms of the *first* seed within the target; "
        "the other columns are the second seed's, with 95 % intervals.",
    ]
    for target in TARGETS:
        lines += [
            "",
            f"Target {target:.1%} of clean job-steps:",
            "",
            "| rule | sensitivity | false alarms | harmful, detected | without gross faults | gross faults |",
            "|---|---|---|---|---|---|",
        ]
        for rule, found in record["rules"].items():
            row = found["targets"][str(target)]
            cells = [_full(row[name]) for name in ("false_alarms", "detected", "detected_not_gross", "detected_gross")]
            lines.append(f"| `{rule}` | {row['sensitivity']:.3g} | " + " | ".join(cells) + " |")
    counts = record["trials"]
    lines += [
        "",
        f"{counts['all']} faults were tried at random steps; {counts['harmful']} were harmful (finite, deviation above "
        f"{HARMFUL:g}), {counts['harmful_not_gross']} of them not gross. {counts['gradient_not_finite']} gave NaN or Inf in "
        f"the local gradient and are left out here: the finite check sees all of them "
        f"({counts['of_them_put_in_finite']} began as finite values). {counts['nan_or_inf_put_in_and_vanished']} times a NaN "
        "or Inf that was put in left no trace in the gradient.",
    ]
    return "\n".join(lines)


def _bins(record: dict[str, Any]) -> str:
    lines = ["## By how far the step went astray", ""]
    for target in TARGETS:
        bins = record["rules"]["robust"]["targets"][str(target)]["by_deviation"]
        lines += [
            f"Detected at a target of {target:.1%}; in brackets without gross faults:",
            "",
            "| deviation | faults (not gross) | " + " | ".join(record["rules"]) + " |",
            "|---|---|" + "---|" * len(record["rules"]),
        ]
        for i, one in enumerate(bins):
            cells: list[str] = []
            for found in record["rules"].values():
                here = found["targets"][str(target)]["by_deviation"][i]
                cells.append(f"{_percent(here)} ({_percent(here['not_gross'])})")
            lines.append(f"| {_bin(one)} | {one['of']} ({one['not_gross']['of']}) | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _sites(record: dict[str, Any]) -> str:
    lines = ["## By where the fault was", "", f"Harmful faults detected at a target of {TARGETS[0]:.1%}:", ""]
    sites = list(record["rules"]["robust"]["targets"][str(TARGETS[0])]["by_site"])
    lines += ["| rule | " + " | ".join(sites) + " |", "|---|" + "---|" * len(sites)]
    for rule, found in record["rules"].items():
        row = found["targets"][str(TARGETS[0])]["by_site"]
        lines.append(f"| `{rule}` | " + " | ".join(_full(row[site]) for site in sites) + " |")
    return "\n".join(lines)


def _lasting(record: dict[str, Any]) -> str:
    facts = record["sustained"]
    lines = [
        f"## Faults that last {LASTING} steps",
        "",
        f"{facts['runs']} faults of {LASTING} steps; {facts['not_finite']} ended in NaN or Inf and are left out; "
        f"{facts['harmful']} ended with an evaluation loss above the clean one by more than two standard deviations of "
        "reseeded runs ("
        + "; ".join(
            f"from step {p['step']}: {p['clean']:.4f}, σ {p['sigma_of_reseeded']:.4f} of {p['reseeded']}"
            for p in facts["from"]
        )
        + "). Of those, with the history frozen where the fault begins:",
        "",
        f"| rule | target | in the first step | within {LASTING} steps |",
        "|---|---|---|---|",
    ]
    for rule, found in record["rules"].items():
        for target in TARGETS:
            row = found["targets"][str(target)]["lasting"]
            first, within = row["first_step"], row[f"within_{LASTING}_steps"]
            lines.append(f"| `{rule}` | {target:.1%} | {_full(first)} | {_full(within)} |")
    lines += [
        "",
        f"Within {LASTING} steps even a clean run alarms often (at 3.7 % a step in most runs), so the last column says "
        "little for a target of 3.7 %.",
    ]
    return "\n".join(lines)


def _recovery(record: dict[str, Any]) -> str:
    facts = record["recovery"]
    return f"""## After a catch

After every finite trial the faulty rank's work was computed again, without the fault, and the step taken with it: in
{facts["identical"]} of {facts["tried"]} trials gradient, weights and moments were those of the clean step, bit for bit.
A rank's recomputation took {1000 * facts["recompute_s"]:.1f} ms, {facts["share_of_a_step"]:.0%} of its step of
{1000 * facts["step_of_one_rank_s"]:.1f} ms (forward, backward and update; claimed: 100 % in theory, 15 to 25 % in practice).
At one alarm in a hundred steps that is 1 % of training time, whoever raised it."""


def _paired(record: dict[str, Any]) -> str:
    facts = record["paired"]

    def of(name: str) -> str:
        one = facts[name]
        return f"{one['mean']:+.4f} ({one['interval'][0]:+.4f} … {one['interval'][1]:+.4f})"

    return f"""## Evaluation loss over whole runs

{facts["seeds"]} seeds, {facts["steps"]} steps, each run three times: without faults, with faults and no check, with the same
faults and `robust` at 3.7 %. {facts["faults"]} finite faults in the watched runs ({facts["left_out_not_finite"]} that gave
NaN or Inf were undone), {facts["caught"]} caught, harmful or not; {facts["caught_identical"]} of these steps ended with the
clean gradient, bit for bit. False alarms: {_full(facts["false_alarms"])}.

| evaluation loss beyond the clean run's ({facts["loss_clean"]:.4f}) | mean of {facts["seeds"]} pairs (95 %) | claimed |
|---|---|---|
| faults, no check | {of("without_check")} | +0.037 |
| faults, check and recomputation | {of("with_check")} | +0.002 |"""


def _how(record: dict[str, Any]) -> str:
    plan = record["plan"]
    return f"""## How it was measured

Faults are put into real tensors by the injector: outputs of matrix products in the forward, their gradients in the
backward, and weight gradients, of every Linear layer, on one of the ranks; half of the values zeroed, half scaled,
flipped, randomised or in stuck lanes, one in a hundred NaN or Inf; one element to three quarters of a tensor. *Gross* is a
value that grew a thousandfold or more, or whose top exponent bit was touched. A fault counts as detected only if the
faulty rank itself alarms in that step. The first {plan["skip"]} steps are neither counted nor hit. A clean step of the job is
a false alarm if any of its {plan["ranks"]} ranks alarms. A deviation is that of the whole job's step, after averaging over
the ranks: on more ranks a fault of one of them must be larger to do the same harm.

Not run: presets `350m` and `1b` (`unsilent study alpha --preset 350m --out DIR`, scripted, needs a GPU's time)."""


# ---- small things ----------------------------------------------------------------------------------------------------


def _percent(one: dict[str, Any]) -> str:
    return f"{100 * one['share']:.3g} %" if one["of"] else "-"


def _full(one: dict[str, Any]) -> str:
    if not one["of"]:
        return "none"
    low, high = one["interval"]
    return f"{100 * one['share']:.1f} % ({one['count']}/{one['of']}, {100 * low:.1f} … {100 * high:.1f})"


def _bin(one: dict[str, Any]) -> str:
    return f"{one['from']:g} … {one['to']:g}" if one["to"] is not None else f"> {one['from']:g}"
