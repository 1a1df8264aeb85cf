"""``unsilent study latency``: how many corrupted steps enter the weights before an audit every K steps finds the device?

The formula stands in ``formula.py``. Here the real guard meets it: three ranks with a very small model, one of them
turns sick at a random place between two audits, and from then on each of its steps is corrupted with probability p. A run
ends with the guard's first verdict.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.lab.progress import progress
from unsilent.lab.studies.latency.formula import Setting, expected, simulated
from unsilent.lab.studies.parts import Parts

RANKS, WARM_UP = 3, 4  # by then the guard has calibrated itself, which takes an audit of its own
AT_MOST = 3000  # steps of a run, above what any of the settings needs


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``runs`` of the guard and ``simulations`` for each setting."""

    settings: tuple[Setting, ...]
    runs: int = 40
    simulations: int = 20_000
    seed: int = 0


_RATES = ((1.0, True), (0.3, True), (0.3, False), (0.1, True), (0.1, False))
FULL = Plan(
    settings=tuple(Setting(period=period, rate=rate, audits_too=too) for period in (4, 8, 16) for rate, too in _RATES)
)
QUICK = replace(FULL, settings=FULL.settings[:3], runs=3, simulations=2000)


@dataclass(frozen=True, kw_only=True)
class Found:
    """One run of the guard: the step after which the device was sick, the step of the first verdict (None: none came), what
    was done, whom it named, which steps were corrupted, and which were audited since the onset."""

    onset: int
    sick: int
    step: int | None
    action: str
    named: tuple[int, ...]
    corrupted: tuple[int, ...]
    audited: tuple[int, ...]

    @property
    def steps(self) -> int:
        """From the onset to the finding, that step counted."""
        assert self.step is not None
        return self.step - self.onset + 1

    @property
    def kept(self) -> int:
        """Corrupted steps that entered the weights."""
        repaired = self.action in ("REPAIR", "RECOMPUTE")
        return sum(step != self.step or not repaired for step in self.corrupted)


def guarded_run(rank: int, size: int, setting: Setting, seed: int) -> Found:
    """On every rank of a pool: train until the guard says something."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from unsilent.config import GuardConfig
    from unsilent.guard import Guard

    random = np.random.default_rng([seed, setting.period, round(1e6 * setting.rate), setting.audits_too])
    sick = int(random.integers(size))
    first = setting.period * -(-WARM_UP // setting.period)
    onset = first + int(random.integers(setting.period))
    fault = Fault(
        site="forward", target="2", pattern="scale", factor=2.0, count=4, rank=sick, from_step=onset,
        probability=setting.rate, during_replay="keep" if setting.audits_too else "off", seed=int(random.integers(1 << 31)),
    )  # fmt: skip
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    config = GuardConfig(
        audit_every=setting.period, replicas_every=None, snapshot_every=None, node=f"node-{rank}", quarantine="ask"
    )
    audited: list[int] = []
    outcome = None
    with contextlib.redirect_stderr(io.StringIO()):
        guard = Guard(ddp, optimizer, lambda net, batch: net(batch).square().mean(), config=config)
        with Injector(
            model, None, fault, rank=rank, world_size=size, replaying=lambda: guard.replayer.running
        ) as injector:
            for step in range(AT_MOST):
                injector.begin_step(step)
                batch = torch.randn(
                    8, 16, generator=torch.Generator().manual_seed((seed * AT_MOST + step) * size + rank)
                )
                outcome = guard.step(batch)
                if step >= onset and "audit" in guard.last_due:
                    audited.append(step)
                if outcome.verdict is not None:
                    break
        guard.close()
    verdict = outcome.verdict if outcome is not None else None
    return Found(
        onset=onset,
        sick=sick,
        step=None if outcome is None or verdict is None else outcome.step,
        action="" if outcome is None else outcome.action.value,
        named=() if verdict is None else tuple(s.rank for s in verdict.suspects if s.rank is not None),
        corrupted=tuple(sorted({one.step for one in injector.record if not one.replay and one.changed})),
        audited=tuple(audited),
    )


def study(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """For each setting: the formula, the simulation, and what the guard did. Settings that are done are kept in OUT and taken
    from there by a later start with the same plan."""
    parts = Parts(out / "parts", plan)
    rows: list[dict[str, Any]] = []
    with RankPool(RANKS) as pool, progress("latency", len(plan.settings)) as advance:
        for i, setting in enumerate(plan.settings):
            done = parts.get(f"setting-{i}")
            if done is None:
                found: list[Found] = []
                for run in range(plan.runs):
                    answers = pool.results(guarded_run, setting, plan.seed + run)
                    found.append(answers[answers[0].sick])
                done = parts.keep(f"setting-{i}", {"guard": json.dumps(measured(setting, found))})
            steps, repaired, unrepaired = simulated(setting, runs=plan.simulations, seed=plan.seed)
            rows.append({
                **asdict(setting),
                "formula": asdict(expected(setting)),
                "simulated": {
                    "runs": plan.simulations, "steps": mean_of(steps), "median_steps": float(np.median(steps)),
                    "repaired": mean_of(repaired), "unrepaired": mean_of(unrepaired),
                },
                "guard": json.loads(str(done["guard"])),
            })  # fmt: skip
            advance()
    return rows


def measured(setting: Setting, found: Sequence[Found]) -> dict[str, Any]:
    """What the runs of one setting came to. ``unrepaired`` counts the corrupted step of the finding as kept, as without the
    repair it would be."""
    caught = [one for one in found if one.step is not None]
    steps = [one.steps for one in caught]
    scheduled = all((step + 1) % setting.period == 0 for one in found for step in one.audited)
    return {
        "runs": len(found),
        "found": len(caught),
        "named_the_sick_rank": sum(one.named == (one.sick,) for one in caught),
        "audits_on_schedule": scheduled,
        "actions": dict(Counter(one.action for one in caught)),
        "steps": mean_of(steps),
        "median_steps": float(np.median(steps)),
        "repaired": mean_of([one.kept for one in caught]),
        "unrepaired": mean_of([len(one.corrupted) for one in caught]),
    }


def mean_of(values: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """A mean with its 95 % interval (normal)."""
    array = np.asarray(values, dtype=np.float64)
    half = 1.96 * float(array.std(ddof=1)) / len(array) ** 0.5
    mean = float(array.mean())
    return {"mean": round(mean, 3), "interval": [round(mean - half, 3), round(mean + half, 3)]}
