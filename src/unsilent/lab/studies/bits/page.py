"""The results of ``study bits`` for people: heat maps bit × kernel for each stage, shares by bit, and tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.lab.page import Page, Part, beside, conditions, pyplot, svg
from unsilent.lab.rates import HARMFUL
from unsilent.lab.studies.bits.study import QUICK, Plan, study
from unsilent.lab.studies.bits.tables import (
    BITS,
    CLASSES,
    GROUPS,
    KERNELS,
    PLACES,
    STAGES,
    harmful_from,
    tables,
)
from unsilent.lab.studies.parts import write_figures

_COLORS = {"masked": "#d9d9d9", "small": "#9ecae1", "harmful": "#e6550d", "not finite": "#1c1c1c"}
_SMALLEST, _LARGEST = 1e-8, 1e2


def run(*, out: Path, quick: bool, command: str) -> dict[str, Any]:
    """The whole study; writes ``bits.json``, ``bits.html`` and ``bits.png``.

    Raises:
        UsageError: OUT cannot be written, matplotlib is not installed, or a step does not repeat here.
    """
    plan = QUICK if quick else Plan()
    record = {
        "study": "bits", "quick": quick, "conditions": conditions(command), "plan": asdict(plan),
        **tables(study(plan, out)),
    }  # fmt: skip
    write_figures(out / "bits.json", record)
    page(record, out / "bits.png").write(out / "bits.html")
    return record


def page(record: dict[str, Any], png: Path) -> Page:
    """The page; its first plot is also written to ``png``."""
    plan, cells = record["plan"], record["cells"]
    parts = (
        Part(
            title="How far one flipped bit leads the step astray",
            plot=_heat_maps(cells, png),
            caption=f"Median of d1 = ‖Δw − Δw*‖/‖Δw*‖ over {plan['elements']} random elements in each cell, the bit counted "
            "from the lowest of the mantissa (0) to the sign (31). Grey: masked, the median flip changes no bit of the "
            "update; black: not finite; white: no such place. The black line marks d1 = 0.1 on the scale.",
        ),
        _from_which_bit(cells),
        Part(
            title="Masked, small, harmful, not finite",
            plot=_shares(record),
            caption="Share of the flips of each bit over all kernels.",
            paragraphs=(
                f"Masked: no bit of the new weights changes. Small: d1 ≤ {HARMFUL}. Harmful: d1 > {HARMFUL}. Not finite: the "
                "loss, the gradient's norm or a weight is NaN or infinite, which a check for such values sees.",
            ),
            columns=("stage", "flips", *CLASSES),
            rows=[(stage, *_row(record["by_stage"][stage])) for stage in STAGES] + [("all", *_row(record["all"]))],
        ),
        Part(
            title="By the kind of bit",
            columns=("bits", "flips", *CLASSES),
            rows=[(f"{name} ({low}–{high})" if low != high else f"{name} ({low})", *_row(record["by_group"][name]))
                  for name, low, high in GROUPS],
        ),
        _effects(record),
        beside(
            "Beside published figures",
            (
                ("under 40 % of bit-flip events are single-bit", "stated",
                 "not measured: all flips here are of a single bit; other patterns are the campaigns'"),
                ("corrupted values that are NaN or infinite", "1.01 % (gate-level mix of all patterns)",
                 f"{_percent(record['all']['not finite'])} of single flips lead to one by the end of the step"),
                ("which bits matter where", "not stated by the seeds", "the table above"),
            ),
        ),
        _how(record),
    )  # fmt: skip
    return Page(title="Which flipped bits matter, where in a step?", lead=lead(record), parts=parts,
                conditions=record["conditions"])  # fmt: skip


def lead(record: dict[str, Any]) -> str:
    every, top = record["all"], record["by_group"]["exponent, top bit"]
    low = record["by_group"]["mantissa, lower half"]
    seen = {stage: found["harmful"]["share"] for stage, found in record["by_stage"].items()}
    worst = max(seen, key=lambda stage: seen[stage])
    least = min(seen, key=lambda stage: seen[stage])
    text = (
        f"Of {record['trials']:,} single-bit flips in fp32 (every bit, kernel and stage equally often), {_percent(every['masked'])} change no bit of the step's update, "
        f"{_percent(every['small'])} lead it astray by at most a tenth, {_percent(every['harmful'])} by more, and "
        f"{_percent(every['not finite'])} end in NaN or infinity. Of flips of the exponent's top bit "
        f"{_percent(top['harmful'])} are harmful and {_percent(top['not finite'])} not finite; of flips in the lower half of "
        f"the mantissa {_percent(low['harmful'])} are harmful. Harm is most frequent in the stage “{worst}” "
        f"({seen[worst]:.1%}) and least in “{least}” ({seen[least]:.1%})."
    )
    return text + (" Quick run: its figures mean nothing." if record["quick"] else "")


def _percent(rate: dict[str, Any]) -> str:
    return f"{rate['share']:.1%}"


def _row(shares: dict[str, Any]) -> list[str]:
    """The number of flips, and for each class the share with its count and interval."""
    cells = [str(shares["masked"]["of"])]
    for name in CLASSES:
        one = shares[name]
        low, high = one["interval"]
        cells.append(f"{one['share']:.1%} ({one['count']}; {low:.1%} to {high:.1%})")
    return cells


def _from_which_bit(cells: list[dict[str, Any]]) -> Part:
    return Part(
        title="Which bits matter where",
        paragraphs=("Bits at which at least half of the flips are harmful or not finite. 31 is the sign, 30–23 the exponent, "
                    "22–0 the mantissa; – means that there is no such place.",),
        columns=("", *STAGES),
        rows=[(kernel, *(harmful_from(cells, stage, kernel) for stage in STAGES)) for kernel in PLACES],
    )  # fmt: skip


def _effects(record: dict[str, Any]) -> Part:
    names = {
        "d1": "d1", "weight": "largest change of a weight", "changed": "share of weights changed",
        "loss": "|Δ loss| of the step", "norm": "gradient norm, relative", "logit": "largest attention logit, relative",
        "next_loss": "|Δ loss| with the new weights", "next_logit": "largest logit with the new weights, relative",
    }  # fmt: skip

    def cell(one: dict[str, Any]) -> str:
        median = "not finite" if one["median"] is None else f"{one['median']:.1e}"
        largest = "none finite" if one["largest_finite"] is None else f"{one['largest_finite']:.1e}"
        return f"{median} / {largest} / {one['not_finite']}"

    return Part(
        title="Effect on loss, gradient norm, attention logits and parameters",
        paragraphs=("Of the flips that are not masked: median / largest finite / how many not finite. A flip behind the "
                    "backward cannot change the loss and logits of its own step.",),
        columns=("stage", "flips", *names.values()),
        rows=[(stage, record["effects"][stage]["d1"]["of"], *(cell(record["effects"][stage][name]) for name in names))
              for stage in STAGES],
    )  # fmt: skip


def _how(record: dict[str, Any]) -> Part:
    plan, norms = record["plan"], record["clean"]["norm"]
    return Part(
        title="How it was done",
        paragraphs=(
            f"The model is the studies' LLaMA of shape “{plan['shape']['name']}” ({plan['shape']['layers']} layers of width "
            f"{plan['shape']['hidden']}), trained for {plan['trained']} steps on the standard "
            f"library's text with AdamW and clipping at norm 1; every trial begins from that one state, on one of "
            f"{plan['batches']} batches in turn, with one rank. The gradient norms of these steps are "
            f"{', '.join(f'{norm:.2f}' for norm in norms)}, before clipping. All values are fp32; bf16 was not tried.",
            "Forward: one element of the kernel's output. Backward: one element of the gradient that arrives there. Clipping: "
            "the norm of one of the kernel's weight gradients, the total norm, the coefficient. Optimizer: one element of a "
            "moment before the update, or of the update itself. A kernel stands for all its modules (ffn: gate, up and down), "
            "drawn at random with the element.",
            "Scores are hit before the future is masked: about half of them are thrown away by the kernel itself. A flipped "
            "moment stays wrong after this step; only the one step's deviation is counted here.",
            "With W data-parallel ranks a flip of a local gradient is divided by W before the update; here W is 1.",
        ),
    )  # fmt: skip


def _heat_maps(cells: list[dict[str, Any]], png: Path) -> str:
    from matplotlib.colors import LogNorm

    plots = pyplot()
    figure, grid = plots.subplots(2, 3, figsize=(12, 12), layout="constrained")
    colors = plots.get_cmap("turbo").with_extremes(under=_COLORS["masked"], over=_COLORS["not finite"], bad="white")
    image = None
    for axes, stage in zip(grid.flat, STAGES, strict=True):
        rows = {cell["kernel"]: cell for cell in cells if cell["stage"] == stage}
        columns = list(PLACES if stage == "clipping" else KERNELS)
        shown = np.array([_shown(rows.get(kernel)) for kernel in columns]).T
        image = axes.imshow(shown, aspect="auto", origin="lower", cmap=colors, norm=LogNorm(_SMALLEST, _LARGEST),
                            interpolation="nearest")  # fmt: skip
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
        axes.set_yticks([0, 5, 11, 17, 22, 26, 30, 31], ["0", "5", "11", "17", "22", "26", "30", "31"])
        axes.set(title=stage, ylabel="bit (0–22 mantissa, 23–30 exponent, 31 sign)" if axes in grid[:, 0] else "")
        axes.grid(visible=False)
        for border in (22.5, 30.5):
            axes.axhline(border, color="white", linewidth=1.5)
    bar = figure.colorbar(image, ax=grid, extend="both", shrink=0.5)
    bar.set_label("median d1 of the step (grey: no bit of the update changes; black: not finite)")
    bar.ax.axhline(HARMFUL, color="black", linewidth=2)
    figure.savefig(png, dpi=110, metadata={"Software": None})
    return svg(figure)


def _shown(cell: dict[str, Any] | None) -> list[float]:
    """A column of the heat map: below the scale what is masked, above it what is not finite, nothing where no place is."""
    if cell is None:
        return [np.nan] * BITS
    medians = [np.inf if one is None else one for one in cell["median_d1"]]
    return [
        _SMALLEST / 10 if one == 0 else 10 * _LARGEST if np.isinf(one) else float(np.clip(one, _SMALLEST, _LARGEST))
        for one in medians
    ]


def _shares(record: dict[str, Any]) -> str:
    figure, grid = pyplot().subplots(2, 3, figsize=(12, 6), sharex=True, sharey=True)
    for axes, stage in zip(grid.flat, STAGES, strict=True):
        cells = [cell for cell in record["cells"] if cell["stage"] == stage]
        of = sum(cell["of"] for cell in cells)
        bottom = np.zeros(BITS)
        for name in CLASSES:
            share = np.sum([cell[name] for cell in cells], axis=0) / of
            axes.bar(range(BITS), share, bottom=bottom, width=1.0, color=_COLORS[name], label=name)
            bottom += share
        axes.set(title=f"{stage} ({of} flips of each bit)", xlim=(-0.5, BITS - 0.5), ylim=(0, 1))
        for border in (22.5, 30.5):
            axes.axvline(border, color="white", linewidth=1.5)
    for axes in grid[1]:
        axes.set_xlabel("bit (0–22 mantissa, 23–30 exponent, 31 sign)")
    for axes in grid[:, 0]:
        axes.set_ylabel("share of flips")
    grid[0, 0].legend(loc="upper left", fontsize=8)
    figure.tight_layout()
    return svg(figure)
