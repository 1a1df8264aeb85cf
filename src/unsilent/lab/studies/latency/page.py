"""The results of ``study latency`` for people: curves of the formula with the guard's runs on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.studies.latency.formula import Setting, expected
from unsilent.lab.studies.latency.study import FULL, QUICK, RANKS, study
from unsilent.lab.studies.parts import write_figures

_RATES = (1.0, 0.3, 0.1, 0.01)
_PERIODS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 128)
_DEFAULT_PERIOD = 100  # of GuardConfig.audit_every, and of the published job


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``latency.json``, ``latency.html`` and ``latency.png``.

    Raises:
        UsageError: OUT cannot be written, or matplotlib is not installed.
    """
    plan = QUICK if quick else FULL
    record = {"study": "latency", "quick": quick, "conditions": conditions(command), "ranks": RANKS, "seed": plan.seed,
              "rows": study(plan, out)}  # fmt: skip
    write_figures(out / "latency.json", record)
    page(record, draw(record, out / "latency.png")).write(out / "latency.html")
    return record


def page(record: dict[str, Any], plot: str) -> Page:
    rows = record["rows"]
    parts = (
        Part(
            title="Formula and runs",
            plot=plot,
            caption="Simulated sick rank. Left: corrupted steps that entered the weights, mean. Right: steps from the onset to "
            "the finding, median. Lines: the formula; solid, only the device's own work goes wrong; dashed, the audits that it "
            "makes for its neighbour do, too. Marks: the real guard on three ranks, with 95 % intervals on the left; filled "
            "for solid, open for dashed.",
        ),
        _formula(),
        _table(rows),
        beside(
            "Beside published figures",
            (
                ("a finite fault in one step, not repeated, that is not audited", "passes",
                 f"passes with probability (K − 1)/K: {1 - 1 / _DEFAULT_PERIOD:.0%} at an audit every {_DEFAULT_PERIOD} steps"),
                (f"steps to the finding of a fault in every step, an audit every {_DEFAULT_PERIOD} steps, median", "50",
                 str(expected(Setting(period=_DEFAULT_PERIOD, rate=1.0)).median_steps) + " (formula)"),
                (f"corrupted steps kept by then, mean, fault in every step / in one of 100 (K = {_DEFAULT_PERIOD})",
                 "not stated", f"{_kept(1.0):.0f} / {_kept(0.01):.0f} (formula, own work only)"),
            ),
        ),
        Part(title="What follows", paragraphs=(
            "The number of corrupted steps that get through hardly depends on how often the device errs: between (K − 1)/2 "
            "for one that errs in every step and K − 1 for one that errs hardly ever. Only K lowers it.",
            "The rolling check that is to come (one block in each step, part 6) is for this: to bring the interval between two "
            "looks at a block down to the number of blocks at about the cost of today's audits.",
        )),
    )  # fmt: skip
    return Page(title="How many corrupted steps does an audit let through?", lead=lead(record), parts=parts,
                conditions=record["conditions"])  # fmt: skip


def agreeing(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Of how many settings the guard's 95 % interval of corrupted steps holds the formula, with a repair and without."""
    inside = [
        row["guard"][name]["interval"][0] - 1e-9 <= row["formula"][name] <= row["guard"][name]["interval"][1] + 1e-9
        for row in rows
        for name in ("repaired", "unrepaired")
    ]
    return sum(inside), len(inside)


def draw(record: dict[str, Any], path: Path) -> str:
    """The plot: written to ``path`` as PNG, and returned as SVG."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.6))
    for rate in _RATES:
        (line,) = left.plot(_PERIODS[1:], [_kept(rate, period) for period in _PERIODS[1:]], label=f"p = {rate:g}")
        color = line.get_color()
        for too, style in ((False, "-"), (True, "--")):
            settings = [Setting(period=period, rate=rate, audits_too=too) for period in _PERIODS]
            if too:
                left.plot(_PERIODS[1:], [expected(one).repaired for one in settings[1:]], style, color=color)
            right.plot(_PERIODS, [expected(one).median_steps for one in settings], style, color=color,
                       label=None if too else f"p = {rate:g}")  # fmt: skip
        for row in record["rows"]:
            if row["rate"] == rate:
                look = {"marker": "o", "color": color, "markerfacecolor": "white" if row["audits_too"] else color}
                mean, (low, high) = row["guard"]["repaired"]["mean"], row["guard"]["repaired"]["interval"]
                # Side by side where both kinds of fault have the same period.
                x = row["period"] * (1.04 if row["audits_too"] else 0.96)
                left.errorbar([x], [mean], [[mean - low], [high - mean]], capsize=3, **look)
                right.plot([x], [row["guard"]["median_steps"]], linestyle="none", **look)
    periods = [1, 2, 4, 8, 16, 32, 64, 128]
    left.set(xscale="log", yscale="log", xlabel="audit every K steps", ylabel="corrupted steps kept (mean)",
             title="Corrupted steps kept before the first finding")  # fmt: skip
    right.set(xscale="log", yscale="log", xlabel="audit every K steps", ylabel="steps to the finding (median)",
              title="Steps from the onset to the finding")  # fmt: skip
    for axes in (left, right):
        axes.set_xticks(periods, [str(one) for one in periods])
        axes.minorticks_off()
    left.set_ylim(0.2, 200)
    left.legend(title="chance of an error in a step")
    for label, style in (
        ("formula: own work only", "-k"),
        ("formula: its audits of others, too", "--k"),
        ("real guard: own work only", "ok"),
        ("real guard: its audits of others, too", "ok"),
    ):
        right.plot([], [], style, label=label, markerfacecolor="white" if "others" in label else "black")
    right.legend(handles=right.get_legend_handles_labels()[0][-4:])
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return svg(figure)


def _kept(rate: float, period: int = _DEFAULT_PERIOD) -> float:
    return expected(Setting(period=period, rate=rate, audits_too=False)).repaired


def lead(record: dict[str, Any]) -> str:
    rows = record["rows"]
    inside, of = agreeing(rows)
    found, runs = (sum(row["guard"][name] for row in rows) for name in ("found", "runs"))
    named = sum(row["guard"]["named_the_sick_rank"] for row in rows)
    text = (
        "An audit every K steps lets about K − 1 corrupted steps of a rarely erring device into the weights, and (K − 1)/2 of "
        f"one that errs in every step, before it finds the device. The real guard on {record['ranks']} ranks found {found} of "
        f"{runs} simulated sick ranks and named the right one {named} times; in {inside} of {of} comparisons the formula lies "
        "in the 95 % interval of what was measured."
    )
    return text + (" Quick run: its figures mean nothing." if record["quick"] else "")


def _formula() -> Part:
    return Part(
        title="The formula",
        paragraphs=(
            "A device turns sick somewhere between two audits, all K places being equally likely; then each of its steps is "
            "corrupted with probability p. All ranks are audited in each audit step (the ring). The audit sees the fault with "
            "probability q: q = p where only the device's own work goes wrong; q = 1 − (1 − p)² where the audit that it makes "
            "for its neighbour goes wrong as often.",
            "Mean steps to the finding: (K + 1)/2 + K·(1 − q)/q. Found within n = a·K + b steps (0 ≤ b < K) with probability "
            "1 − (1 − q)^a·(1 − q·b/K), which gives the median.",
            "Mean corrupted steps kept: p·(K − 1)·(1/q − 1/2) with the audited step repaired, which for q = p is "
            "(K − 1)·(1 − p/2); and p/q more without the repair. One repair thus saves at most one step.",
        ),
    )


def _table(rows: list[dict[str, Any]]) -> Part:
    def both(row: dict[str, Any], name: str) -> str:
        guard = row["guard"][name]
        return f"{row['formula'][name]:.2f} | {row['simulated'][name]['mean']:.2f} | {_with_interval(guard)}"

    return Part(
        title="Formula | simulation | guard",
        paragraphs=(
            f"In each cell: the formula, {rows[0]['simulated']['runs']:,} simulated runs, {rows[0]['guard']['runs']} runs of the "
            "guard with the 95 % interval of the mean. In the last column the corrupted step of the finding is counted as "
            "kept, as it would be without the repair.",
        ),
        columns=("K", "p", "goes wrong", "steps to the finding, mean", "median", "corrupted steps kept",
                 "without the repair", "found, named"),
        rows=[
            (row["period"], f"{row['rate']:g}", "own work and audits" if row["audits_too"] else "own work",
             both(row, "steps"),
             f"{row['formula']['median_steps']} | {row['simulated']['median_steps']:g} | {row['guard']['median_steps']:g}",
             both(row, "repaired"), both(row, "unrepaired"),
             f"{row['guard']['found']} and {row['guard']['named_the_sick_rank']} of {row['guard']['runs']}")
            for row in rows
        ],
    )  # fmt: skip


def _with_interval(mean: dict[str, Any]) -> str:
    low, high = mean["interval"]
    return f"{mean['mean']:.2f} ({low:.2f} to {high:.2f})"
