"""A campaign for people: one page, and the picture of its coverage."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unsilent.lab.campaign.outcome import CAUGHT, Class
from unsilent.lab.campaign.tables import ALL
from unsilent.lab.page import Page, Part, beside, pyplot, svg
from unsilent.lab.rates import HARMFUL

_COLOURS = {
    Class.REPAIRED: "#1b7837", Class.STOPPED: "#5aae61", Class.NEEDLESS: "#e7d4e8",
    Class.UNNAMED: "#c2a5cf", Class.INEXACT: "#9970ab",
    Class.WRONG_DEVICE: "#762a83", Class.MASKED: "#d9d9d9", Class.CLEAN: "#bdbdbd", Class.NEVER_FIRED: "#f0f0f0",
    Class.MISSED_SMALL: "#fdae61", Class.MISSED_HARMFUL: "#d73027", Class.FALSE_ALARM: "#000000",
    Class.HANG: "#4575b4", Class.ERROR: "#74add1",
}  # fmt: skip


def page(record: dict[str, Any]) -> Page:
    """The whole page; ``record`` is the content of campaign.json."""
    checks = list(record["checks"])
    parts = [
        Part(title="What became of the trials", columns=("class", *checks, "all, with 95 % interval"),
             rows=_classes(record, checks), plot=_bars(record, checks),
             caption="Trials by what they are counted as, for each set of checks. The words are explained at the end."),
        Part(title="Which sets of checks", columns=("checks", "mode", "an audit every", "a vote every", "a snapshot every",
             "update statistic"), rows=[(name, *(_or_none(v) for v in told.values()))
                                         for name, told in record["checks"].items()]),
        Part(title="Coverage by site", plot=svg(_by_site(record)) if record["coverage"] else "",
             caption="Of the simulated faults that changed the weights or were found, over all kinds of faults, the share that "
             "was caught, with 95 % intervals, for each set of checks; in brackets how many faults."),
        *(_coverage(record, name) for name in _covered(record)),
        Part(title="A fault of one step: was its step audited?", columns=("site", "caught, step audited", "caught, not audited"),
             rows=[(r["site"], _rate(r["audited"]), _rate(r["not_audited"])) for r in record["single_steps"]],
             paragraphs=["Only faults of a single step, on one rank, before its update; masked ones are left out."]),
        _confusion(record),
        Part(title="Why what was missed was missed", columns=("checks", "site", "why", "harmful", "small"),
             rows=[tuple(r[k] for k in ("checks", "site", "reason", "harmful", "small")) for r in record["missed"]]),
        Part(title="Every trial that needs an explanation", columns=("class", "fault", "trial", "what the guard said"),
             rows=[(r["class"], r["fault"], r["trial"], " | ".join([*r["said"], r["end"]])) for r in record["unexpected"]],
             paragraphs=[] if record["unexpected"] else
             ["None: no healthy device was named, nothing hung, nobody was alarmed without a cause."]),
        _published(record),
        _words(record),
    ]  # fmt: skip
    return Page(title=f"Campaign {record['campaign']}: which faults are caught", lead=lead(record),
                parts=parts, conditions=record["conditions"])  # fmt: skip


def lead(record: dict[str, Any]) -> str:
    """The result in one paragraph."""
    counts = {row["class"]: row["count"] for row in record["classes"] if row["checks"] == ALL}
    caught = sum(counts[one.value] for one in CAUGHT)
    missed = counts[Class.MISSED_SMALL.value] + counts[Class.MISSED_HARMFUL.value]
    alarms = record["false_alarms"]
    done = record["trials"]
    whole = f"{done:,} trials" if done == record["planned"] else f"{done:,} of {record['planned']:,} trials so far"
    return (
        f"{whole}, each a short guarded run with one simulated fault or none. Of {caught + missed:,} faults that changed "
        f"the weights or were found, {caught:,} were caught; {counts[Class.REPAIRED.value]:,} of these runs ended bit for "
        f"bit as without the fault, {counts[Class.STOPPED.value]:,} were stopped rightly. Missed: {missed:,}, of them "
        f"{counts[Class.MISSED_HARMFUL.value]:,} harmful. Healthy devices blamed: {counts[Class.WRONG_DEVICE.value]:,}. "
        f"False alarms: {alarms['alarms']:,} in {alarms['clean_steps']:,} healthy guarded steps."
    )


def draw_coverage(record: dict[str, Any], path: Path) -> None:
    """The coverage picture as PNG; none before the first trial with a fault."""
    if not record["coverage"]:
        return
    figure = _by_site(record)
    # Without date and version in the file the same figures give the same bytes.
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    pyplot().close(figure)


def _covered(record: dict[str, Any]) -> list[str]:
    """The sets of checks that have met a fault so far."""
    met = {row["checks"] for row in record["coverage"]}
    return [name for name in record["checks"] if name in met]


# ---- parts -----------------------------------------------------------------------------------------------------------


def _classes(record: dict[str, Any], checks: Sequence[str]) -> list[tuple[Any, ...]]:
    found = {(row["checks"], row["class"]): row for row in record["classes"]}
    return [(one.value, *(found[name, one.value]["count"] for name in checks), _rate(found[ALL, one.value]))
            for one in Class]  # fmt: skip


def _coverage(record: dict[str, Any], checks: str) -> Part:
    rows = [r for r in record["coverage"] if r["checks"] == checks]
    order = [*record["faults"], ALL]
    rows.sort(key=lambda r: (record["sites"].index(r["site"]), order.index(r["fault"])))
    return Part(
        title=f"Coverage with the checks “{checks}”",
        columns=("site", "fault", "trials", "masked", "caught of the rest", "missed harmful",
                 "never fired, hang or alarm", "median steps to detection"),
        rows=[(r["site"], r["fault"], r["trials"], r["masked"], _rate(r["caught"]),
               r["missed_harmful"], r["other"], "-" if r["median_steps"] is None else f"{r['median_steps']:g}") for r in rows],
        plot=svg(_heat(record, checks)),
        caption=f"Caught faults of all that changed the weights or were found, by site and fault, with the checks “{checks}”. "
        "Grey: nothing to count there.",
    )  # fmt: skip


def _confusion(record: dict[str, Any]) -> Part:
    cells = {(row["faulty"], row["named"]): row["trials"] for row in record["confusion"]}
    named = sorted({who for _, who in cells}, key=lambda who: ("and" in who, who))
    return Part(
        title="Who is faulty, and who was named",
        columns=("faulty", *(f"named: {who}" for who in named)),
        rows=[(faulty, *(cells.get((faulty, who), 0) for who in named)) for faulty in sorted({w for w, _ in cells})],
        paragraphs=["Trials, once there was something to find; one in which several verdicts name different ranks counts for "
                    "each. A reduction whose sum is wrong for all ranks alike is nobody's in particular."],
    )  # fmt: skip


def _published(record: dict[str, Any]) -> Part:
    alarms, single = record["false_alarms"], record["single_steps"]
    counts = {row["class"]: row for row in record["classes"] if row["checks"] == ALL}
    audited = [r for r in single if r["audited"]["of"]]
    caught, of = (sum(r["audited"][k] for r in audited) for k in ("count", "of"))
    other, unaudited = (sum(r["not_audited"][k] for r in single) for k in ("count", "of"))
    return beside(
        "Beside what others state",
        [
            ("false alarms of three checks under DDP", "0 in 15,320 audit steps and 3,080 weight checks",
             f"{alarms['alarms']:,} in {alarms['clean_steps']:,} guarded steps"),
            ("a fault of one step, on one rank, that is not audited", "passes, if it is finite",
             f"{other:,} of {unaudited:,} caught (of faults in a rank's own computation)"),
            ("a fault of one step that is audited", "caught", f"{caught:,} of {of:,} caught"),
            ("an error inside the all-reduce, the same on all ranks", "passes, if it is finite", _sums(record)),
            ("healthy devices named", "none is stated", _rate(counts[Class.WRONG_DEVICE.value])),
            ("recall of forward faults by recomputing attention (TrainSDC)", "63–71 %",
             "see the coverage tables; of single steps it is the share of audited steps"),
        ],
        paragraphs=["The first five are statements about the three checks on 32 GPUs that this project started from. Here: "
                    "simulated faults on CPUs, in a model of 0.2 million parameters."],
    )  # fmt: skip


def _sums(record: dict[str, Any]) -> str:
    """Of faults of a sum that is wrong on all ranks alike, whatever sets of checks."""
    rows = [r for r in record["coverage"] if r["checks"] == ALL and r["fault"] == ALL and r["site"] == "sum"]
    caught, of = (sum(r["caught"][k] for r in rows) for k in ("count", "of"))
    return f"{caught:,} of {of:,} caught" if rows else "not tried"


def _words(record: dict[str, Any]) -> Part:
    return Part(
        title="How it was counted",
        paragraphs=[
            "Faults are put into real tensors of a DDP job; the guard is told nothing of them. Every trial is compared with "
            "its pristine twin, the same job without guard and fault. Clean trials, one for each job and set of checks, show "
            "that the guard itself changes no bit.",
            f"Harmful: of the updates in which the fault fired, the one that deviated most did so by more than {HARMFUL:g} of "
            "the right update's norm; or, of a fault that lasts, the evaluation loss ended above the twin's by more than two standard deviations "
            "of five jobs with other seeds. Masked: the weights were the "
            "twin's after every step. Of every rate the interval is Wilson's, 95 %.",
            "“No device named” and “not bit-exact” are catches that fell short. A verdict that names several devices, the "
            "faulty one among them, does not count as a wrong device unless a healthy one is taken out.",
            f"Ranks had to be started anew {record['pools_replaced']} times. {len(record['switched_off'])} trials in which a "
            f"check switched itself off or compared less. {record['per_minute']} trials a minute.",
        ],
    )


# ---- pictures --------------------------------------------------------------------------------------------------------


def _by_site(record: dict[str, Any]) -> Any:
    """For each site and set of checks the share that was caught, over all faults, with its interval."""
    checks = _covered(record)
    found = {(r["checks"], r["site"]): r["caught"] for r in record["coverage"] if r["fault"] == ALL}
    sites = [site for site in record["sites"] if any((name, site) in found for name in checks)]
    figure, panel = pyplot().subplots(figsize=(8, 0.5 * len(sites) + 1.5))
    for i, name in enumerate(checks):
        shown = [(y, cell) for y, site in enumerate(sites) if (cell := found.get((name, site))) and cell["of"]]
        height = [y + 0.22 * (i - (len(checks) - 1) / 2) for y, _ in shown]
        share = [cell["rate"] for _, cell in shown]
        around = [[cell["rate"] - cell["low"] for _, cell in shown], [cell["high"] - cell["rate"] for _, cell in shown]]
        panel.errorbar(share, height, xerr=around, fmt="os^Dv"[i % 5], markersize=5, capsize=2, label=f"checks: {name}")
    counts = {site: sum(found[name, site]["of"] for name in checks if (name, site) in found) for site in sites}
    panel.set_yticks(range(len(sites)), [f"{site} ({counts[site]})" for site in sites])
    panel.invert_yaxis()
    panel.set(xlim=(-0.02, 1.02), xlabel="share of the faults that were caught, with 95 % interval",
              ylabel="site of the simulated fault (faults counted)")  # fmt: skip
    panel.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.0 + 0.6 / len(sites)), ncols=len(checks))
    return figure


def _heat(record: dict[str, Any], checks: str) -> Any:
    """Site × fault: the colour is the share that was caught, the text how many of how many."""
    rows = [r for r in record["coverage"] if r["checks"] == checks]
    found = {(r["site"], r["fault"]): r["caught"] for r in rows}
    sites = [site for site in record["sites"] if any(site == one for one, _ in found)]
    faults = [fault for fault in record["faults"] if any(fault == one for _, one in found)]
    figure, panel = pyplot().subplots(figsize=(0.55 * len(faults) + 3, 0.42 * len(sites) + 2))
    panel.set_facecolor("#eeeeee")
    grid = [[_share(found.get((site, fault))) for fault in faults] for site in sites]
    image = panel.imshow(grid, vmin=0, vmax=1, cmap="YlGnBu", aspect="auto")
    for y, site in enumerate(sites):
        for x, fault in enumerate(faults):
            cell = found.get((site, fault))
            if cell is not None and cell["of"]:
                colour = "white" if cell["rate"] > 0.6 else "black"
                text = f"{cell['count']}/{cell['of']}"
                panel.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(len(faults)), faults, rotation=50, ha="right", fontsize=9)
    panel.set_yticks(range(len(sites)), sites, fontsize=9)
    panel.grid(False)
    panel.set(xlabel="simulated fault", ylabel="site")
    figure.colorbar(image, label="share caught", fraction=0.04, pad=0.02)
    return figure


def _bars(record: dict[str, Any], checks: Sequence[str]) -> str:
    plots = pyplot()
    figure, panel = plots.subplots(figsize=(9, 0.6 * len(checks) + 2.2))
    found = {(row["checks"], row["class"]): row["count"] for row in record["classes"]}
    start = [0] * len(checks)
    for one in Class:
        counts = [found[name, one.value] for name in checks]
        if any(counts):
            label = textwrap.fill(one.value, 28)
            panel.barh(range(len(checks)), counts, left=start, color=_COLOURS[one], edgecolor="white", label=label)
            start = [a + b for a, b in zip(start, counts, strict=True)]
    panel.set_yticks(range(len(checks)), checks)
    panel.invert_yaxis()
    panel.set(xlabel="trials", ylabel="checks")
    panel.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.25 if len(checks) > 1 else -0.5))
    return svg(figure)


# ---- small things ----------------------------------------------------------------------------------------------------


def _share(cell: dict[str, Any] | None) -> float:
    return float("nan") if cell is None or not cell["of"] else cell["rate"]


def _rate(one: dict[str, Any]) -> str:
    if not one["of"]:
        return "-"
    return f"{100 * one['rate']:.1f} % ({one['count']}/{one['of']}, {100 * one['low']:.1f} … {100 * one['high']:.1f})"


def _or_none(value: Any) -> Any:
    return "-" if value is None else value
