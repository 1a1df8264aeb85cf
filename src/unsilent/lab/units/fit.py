"""Fits the simulated units to stored figures: ``python -m unsilent.lab.units.fit --out FILE``.

The share of each place of units 1, 10 and 11 is changed until the lock-step study measures the stored mean mismatch
frequency, on one shape and seed; what the units do on others is for ``study submodule`` to see. A mean frequency is the chance of
a burst times the frequency within one, and the latter is nearly proportional to the share: so it is measured with a burst in
every step, and a few proportional corrections are enough. Then the bulk of the law of magnitudes is scaled on unit 11 alone, without its rare large
errors, until the worst noise-to-signal of its steps is the stored one.

The log says what was measured before and after each correction; the fitted values are then written into ``units.toml`` by hand.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unsilent.lab.page import conditions
from unsilent.lab.pool import RankPool
from unsilent.lab.progress import progress
from unsilent.lab.studies.llama import shape_of
from unsilent.lab.studies.step.study import noise_to_signal
from unsilent.lab.studies.step.tables import STORED as STORED_NOISE
from unsilent.lab.studies.submodule.lockstep import GROUP, RANKS, Run
from unsilent.lab.studies.submodule.study import run_unit
from unsilent.lab.studies.submodule.tables import STORED, unit_figures
from unsilent.lab.units import PLACES, Unit, unit

UNITS, BULK_UNIT = (1, 10, 11), 11
SHAPE, SEED = "small", 0
CORRECTIONS = 2
STEPS, BULK_STEPS = 50, 150
FIRST_BULK = 0.01
"""Where the fit begins, whatever stands in ``units.toml`` by now."""


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="Fit the simulated units 1, 10 and 11 to the stored figures.")
    parser.add_argument("--out", type=Path, required=True, help="the log, JSON")
    out = parser.parse_args().out
    rounds: list[dict[str, Any]] = []
    fitted: dict[int, Unit] = {}
    with RankPool(RANKS) as pool, progress("fit", len(UNITS) * (CORRECTIONS + 1)) as advance:
        for number in UNITS:
            one = start(unit(number))
            rounds.append(log_row(one, frequencies(pool, one)))
            advance()
            for _ in range(CORRECTIONS):
                one = corrected(one, rounds[-1])
                rounds.append(log_row(one, frequencies(pool, one)))
                advance()
            fitted[number] = one
    record = {
        "conditions": conditions(f"python -m unsilent.lab.units.fit --out {out.name}"),
        "shape": asdict(shape_of(SHAPE)), "seed": SEED, "steps": STEPS, "rounds": rounds,
        "bulk_steps": BULK_STEPS, "bulk_rounds": fit_bulk(fitted[BULK_UNIT]),
        "fitted": {number: {place: asdict(one.rate(place)) for place in PLACES} for number, one in fitted.items()},
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


def start(one: Unit) -> Unit:
    """The unit as if every wrong element reached the tap as one: the stored frequency over the chance of a burst."""
    rates = {
        place: replace(one.rate(place), share=_rounded(stored / one.rate(place).chance))
        for place, stored in zip(PLACES, STORED[one.number], strict=True)
    }
    return replace(one, **rates)


def frequencies(pool: RankPool, one: Unit) -> dict[str, float]:
    """The mean mismatch frequencies that a unit would show in a run without end: measured with a burst in every step,
    times the chance of one."""
    always = replace(one, from_step=0, **{place: replace(one.rate(place), chance=1.0) for place in PLACES})
    readings = run_unit(pool, Run(unit=always, shape=shape_of(SHAPE), seed=SEED, steps=STEPS))
    places = unit_figures(always, readings[:GROUP], readings[GROUP:])["places"]
    return {place: places[place]["frequency"] * one.rate(place).chance for place in PLACES}


def corrected(one: Unit, row: dict[str, Any]) -> Unit:
    """The unit with every share scaled by stored over measured, to three digits; a place that showed nothing stays."""
    rates = {}
    for place, seen in row["places"].items():
        factor = seen["stored"] / seen["measured"] if seen["measured"] else 1.0
        rates[place] = replace(one.rate(place), share=min(1.0, _rounded(seen["share"] * factor)))
    return replace(one, **rates)


def log_row(one: Unit, measured: dict[str, float]) -> dict[str, Any]:
    """What a unit's shares were in this round, and what came of them."""
    places = {
        place: {
            "chance": one.rate(place).chance,
            "share": one.rate(place).share,
            "measured": measured[place],
            "stored": stored,
        }
        for place, stored in zip(PLACES, STORED[one.number], strict=True)
    }
    return {"unit": one.number, "places": places}


def fit_bulk(one: Unit) -> list[dict[str, float]]:
    """Rounds of the bulk's fit: its median, and the worst noise-to-signal that a unit without explosions shows with it.
    The last one is the fitted one."""
    plain = replace(one, **{place: replace(one.rate(place), explosions=0.0) for place in PLACES})
    stored, bulk = STORED_NOISE[one.number], FIRST_BULK
    rounds: list[dict[str, float]] = []
    for _ in range(CORRECTIONS + 1):
        noise, _ = noise_to_signal([plain], shape_of(SHAPE), seed=SEED, steps=BULK_STEPS, bulk=bulk)
        worst = float(noise.max())
        rounds.append({"bulk": bulk, "worst": worst, "stored": stored})
        bulk = _rounded(bulk * stored / worst)
    return rounds


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


if __name__ == "__main__":
    main()
