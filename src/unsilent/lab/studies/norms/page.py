"""The results of ``study norms`` for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.rates import HARMFUL
from unsilent.lab.studies.norms.study import ACTIVATION, BACKWARD, KINDS, QUICK, Plan, study
from unsilent.lab.studies.norms.tables import MARGIN, tables
from unsilent.lab.studies.parts import write_figures


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``norms.json``, ``norms.html`` and ``norms.png``.

    Raises:
        UsageError: OUT cannot be written, or matplotlib is not installed.
    """
    plan = QUICK if quick else Plan()
    norms, trials = study(plan, out)
    record = {
        "study": "norms", "quick": quick, "conditions": conditions(command),
        "plan": {**vars(plan), "preset": plan.preset.name},
        **tables(norms, trials, kinds=tuple(KINDS), learning=plan.learning),
    }  # fmt: skip
    write_figures(out / "norms.json", record)
    page(record, draw(record, out / "norms.png")).write(out / "norms.html")
    return record


def page(record: dict[str, Any], plot: str) -> Page:
    plan, healthy, all_faults = record["plan"], record["healthy"], record["all"]
    alarms = healthy["false_alarms"]
    activation = record["faults"][ACTIVATION]
    parts = (
        Part(
            title="Scores of healthy steps and of faulty ranks",
            plot=plot,
            caption="Simulated faults, finite gradients. Share of healthy steps whose highest score, and of faulty ranks whose score, is at "
            "least so high; scores above 10⁶ are cut off. Dashed: the threshold. A rule that works has all coloured curves to the right of it and the black "
            "one to the left.",
        ),
        Part(
            title="What the rule finds",
            paragraphs=(
                "The score of a rank is |norm − median over ranks| / MAD over ranks. Harmful: the step goes astray by more "
                f"than d1 = {HARMFUL}. Only finite gradients are counted; {record['not_finite']} trials gave NaN or infinity, "
                "which a check for such values sees.",
            ),
            columns=("fault", "trials", "norm changed by, median", "median score", "largest score", "above the threshold", "of the harmful ones",
                     "above every healthy step"),
            rows=[_row(kind, found) for kind, found in [*record["faults"].items(), ("all", all_faults)]],
        ),
        beside(
            "Beside the published run",
            (
                ("job", "32 GPUs, 953 M parameters", f"{plan['ranks']} ranks, {plan['preset']}, in one process"),
                ("healthy steps", "22,800", f"{healthy['steps']:,}"),
                ("largest healthy score", "1,240 MAD", f"{healthy['largest']:,.0f} MAD"),
                (f"threshold, {MARGIN} × the highest of the first steps", "336 MAD of 800 steps",
                 f"{healthy['threshold']:,.0f} MAD of {plan['learning']} steps"),
                ("false alarms", "11 in 22,000 steps", f"{alarms['count']} in {alarms['of']:,} steps (at most {alarms['interval'][1]:.2%} at 95 %)"),
                ("largest score of a rank with one activation × 10,000", "6.9 (never above)",
                 f"{_score(activation['largest'])}; {_count(activation['found'])} above the threshold"),
                ("faults found, finite", "none", _count(all_faults["found"])),
                ("harmful faults found", "not stated", _count(all_faults["harmful_found"])),
            ),
            paragraphs=_why(record),
        ),
        Part(title="How it was done", paragraphs=(
            f"A LLaMA ({plan['preset']}) in fp32, {plan['ranks']} ranks of {plan['samples']} samples of {plan['length']} "
            f"bytes of the standard library's text, {plan['steps']:,} steps. After step {plan['learning']} about "
            f"{plan['trials_per_step']:g} fault is tried for each step: the faulty rank's forward and backward run again from "
            "the same weights with the fault in real tensors, and the step is taken back.",
        )),
    )  # fmt: skip
    return Page(title="Do gradient norms that stand out show a device that errs?", lead=lead(record), parts=parts,
                conditions=record["conditions"])  # fmt: skip


def draw(record: dict[str, Any], path: Path) -> str:
    """The plot: written to ``path`` as PNG, and returned as SVG."""
    figure, axes = pyplot().subplots(figsize=(9, 4.8))
    for name, curve in record["curves"].items():
        healthy = name == "healthy"
        label = "healthy: highest score of the step" if healthy else f"faulty rank: {name}"
        axes.step([x for x, _ in curve], [y for _, y in curve], where="post", label=label,
                  color="black" if healthy else None, linewidth=2.2 if healthy else 1.4)  # fmt: skip
    axes.axvline(record["healthy"]["threshold"], color="black", linestyle="--", linewidth=1)
    axes.set(xscale="log", yscale="log", xlim=(0.05, 1e6), xlabel="score: |norm − median over ranks| / MAD over ranks",
             ylabel="share with at least this score")  # fmt: skip
    axes.legend(loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return svg(figure)


def lead(record: dict[str, Any]) -> str:
    healthy, harmful = record["healthy"], record["all"]["harmful_found"]
    text = (
        f"In {healthy['steps']:,} healthy steps a rank's gradient norm stood out by up to {healthy['largest']:,.0f} MAD. With the "
        f"published rule, whose threshold is {healthy['threshold']:,.0f} MAD here, {_count(record['faults'][ACTIVATION]['found'])} "
        f"activations × 10,000 are found, and {_count(harmful)} of all finite faults that are harmful; {1 - harmful['share']:.0%} "
        "of these pass."
    )
    return text + (" Quick run: its figures mean nothing." if record["quick"] else "")


def _why(record: dict[str, Any]) -> tuple[str, ...]:
    ranks, activation = record["plan"]["ranks"], record["faults"][ACTIVATION]["norm_changed"]
    return (
        f"The norms of healthy ranks lie {record['norm_differs_between_ranks']:.0%} off the middle of their step in the median, "
        f"since each rank reads other text; an activation × 10,000 changes the norm of its rank by {activation:.2%}. Of all "
        f"harmful faults {_count(record['below_healthy_median'])} score below the highest score of the median healthy step.",
        f"The faults that are found change the norm by a factor of {1 + record['all']['norm_changed_of_found']:,.0f} in the median; "
        f"{record['faults'][BACKWARD]['found']['count']} of the {record['all']['found']['count']} hit one element of a backward "
        "gradient, which the published trials, as far as they are told, did not.",
        f"The size of healthy scores differs. {ranks} ranks should give larger ones than 32, since few ranks agree by chance more "
        f"often, which makes MAD small; but here all ranks read text of one kind in samples of one length. What the published "
        "job read is not stated, so the difference stays open. What can be compared is healthy with faulty scores.",
    )


def _row(kind: str, found: dict[str, Any]) -> tuple[Any, ...]:
    return (
        kind, found["trials"], f"{found['norm_changed']:.2%}", f"{found['median']:.2f}", _score(found["largest"]), _with_interval(found["found"]),
        _with_interval(found["harmful_found"]), _with_interval(found["above_all_healthy"]),
    )  # fmt: skip


def _score(score: float) -> str:
    return f"{score:,.1f}" if score < 1e6 else f"{score:.0e}"


def _count(rate: dict[str, Any]) -> str:
    return f"{rate['count']} of {rate['of']}"


def _with_interval(rate: dict[str, Any]) -> str:
    low, high = rate["interval"]
    return f"{rate['count']} of {rate['of']} ({low:.1%} to {high:.1%})"
