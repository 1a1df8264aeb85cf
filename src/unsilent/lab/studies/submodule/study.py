"""``unsilent study submodule``: how often, and by how much, does a sick device's sub-module give other values than a healthy
one's, and which check would have seen it?

Each unit is run as a sick tensor-parallel group beside a healthy one (``lockstep.py``), on another seed and another width
than those its shares were fitted on. Results: ``submodule.json`` and ``submodule.html``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.lab.page import conditions
from unsilent.lab.pool import PoolDied, RankPool
from unsilent.lab.progress import progress
from unsilent.lab.studies.llama import Shape
from unsilent.lab.studies.submodule.lockstep import GROUP, RANKS, Run, run_rank
from unsilent.lab.studies.submodule.page import page
from unsilent.lab.studies.submodule.readings import Readings
from unsilent.lab.studies.submodule.tables import goals, unit_figures
from unsilent.lab.units import HEALTHY, Unit

SECONDS_PER_STEP = 5.0  # after which a run is taken to hang: twenty times what a step needs


def run(
    *, out: Path, units: Sequence[Unit], shape: Shape, seed: int, steps: int, quick: bool, command: str
) -> dict[str, Any]:
    """The study of these units and of one healthy one; writes its page and figures into ``out``.

    Raises:
        UsageError: the shape is one for GPUs, ``steps`` is not positive, or ``out`` cannot be written.
    """
    if steps < 1:
        raise UsageError(f"study submodule needs at least 1 step, not {steps}")
    if shape.name.startswith("paper"):
        raise UsageError(
            f"study submodule runs its four ranks on this machine's CPU, where shape {shape.name!r} does not fit: take small "
            f"or small-wide"
        )
    figures: list[dict[str, Any]] = []
    replaced = 0
    everyone = (*units, HEALTHY[0])
    with RankPool(RANKS) as pool, progress("submodule", len(everyone)) as advance:
        for unit in everyone:
            wanted = Run(unit=unit, shape=shape, seed=seed, steps=steps)
            try:
                readings = run_unit(pool, wanted)
            except PoolDied:  # it has been started again; the same run gives the same bits
                replaced += 1
                readings = run_unit(pool, wanted)
            figures.append(unit_figures(unit, readings[:GROUP], readings[GROUP:]))
            advance()
    record = {
        "study": "submodule", "quick": quick, "pools_replaced": replaced, "shape": asdict(shape), "seed": seed, "steps": steps,
        "conditions": conditions(command), "goals": goals(figures), "units": figures,
    }  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "submodule.json").write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the results into {out}: {error.strerror or error}") from error
    page(record).write(out / "submodule.html")
    return record


def run_unit(pool: RankPool, run: Run) -> list[Readings]:
    """What the ranks of a pool of four read: first the healthy group's, then the sick one's."""
    return pool.results(run_rank, run, timeout=120.0 + SECONDS_PER_STEP * run.steps)
