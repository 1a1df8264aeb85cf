"""How often does a check alarm on a healthy machine? Many short guarded runs, each ending with a fault that must be caught.

What counts as one check: one full bitwise comparison for one auditee (``audit``), one rank's share of one vote over
all its weights, optimizer state and reduced gradients (``replicas``), one rank's gradients of one step, local and
reduced (``finite``). The fault at the end of every run proves that no check had degraded itself into silence.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsilent.lab.faults import Fault
from unsilent.lab.pool import PoolDied, RankPool

STEPS = 24
#: An audit every 100 steps of 10 s, a vote every 10 of them, ``finite`` in each, on one job for a year.
PER_JOB_YEAR = {"audit": 31_536, "replicas": 315_360, "finite": 3_153_600}
GPUS = 2_000


@dataclass(frozen=True)
class Setting:
    """One cell of the grid."""

    ranks: int
    model: str
    dtype: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.model}, {self.dtype}, {self.ranks} ranks"


def settings(sizes: Sequence[int]) -> Iterator[list[Setting]]:
    """The grid, over and over with new seeds; each time the cells that differ only by the number of ranks."""
    for seed in itertools.count():
        for model, dtype in itertools.product(("llama", "convolution"), ("fp32", "bf16")):
            yield [Setting(ranks=size, model=model, dtype=dtype, seed=seed) for size in sizes]


def run_once(rank: int, size: int, model: str, dtype: str, seed: int, steps: int = STEPS) -> dict[str, Any]:
    """One guarded run on one rank of a pool: ``steps`` clean steps, then one with a fault."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import unsilent
    from unsilent.lab.inject import Injector

    torch.manual_seed(seed)
    inner, loss_fn, batch_of = _model(model, dtype, seed)
    ddp = DistributedDataParallel(inner, bucket_cap_mb=0.2)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    config = unsilent.GuardConfig(audit_every=1, replicas_every=1, node=f"node-{rank}", quarantine="auto")
    fault = _fault(inner, seed, steps, size)
    alarms: list[tuple[str, str]] = []
    caught: list[Any] = []
    clean: dict[str, int] = {}
    working = False
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(ddp, optimizer, loss_fn, clip_norm=1.0, config=config)
        injector = Injector(
            inner, optimizer, fault, rank=rank, world_size=size, replaying=lambda: guard.replayer.running
        )
        torch.manual_seed(1000 * seed + rank)
        try:
            for step in range(steps + 2):
                if step == steps:
                    clean = guard.counts
                injector.begin_step(step)
                outcome = guard.step(batch_of(step, rank))
                injector.after_update(step)
                if outcome.verdict is not None:
                    found = (step, outcome.verdict.kind.value, [s.rank for s in outcome.verdict.suspects])
                    caught.append(found)
                    if step < steps:
                        alarms.append((outcome.verdict.check, f"step {step}: {outcome.verdict.reason}"))
            working = set(guard.checks) == set(PER_JOB_YEAR) and guard.audit.strength.value == "bitwise"
        finally:
            injector.close()
            guard.close()
    return {"alarms": alarms, "caught": caught, "working": working, "fired": injector.fired, "fault": fault.describe(),
            "true_rank": fault.rank, "clean": clean}  # fmt: skip


def study(out: Path, *, checks: int, quick: bool = False) -> dict[str, Any]:
    """Run until every kind of check has been made ``checks`` times; write ``false-alarms.json`` and return it."""
    out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    alarms: list[dict[str, Any]] = []
    missed: list[dict[str, Any]] = []
    died = 0
    begin = time.monotonic()
    pools = {3: RankPool(3), 4: RankPool(4)}
    try:
        for cells in settings(sorted(pools)):
            for cell in cells:
                size = cell.ranks
                try:
                    answers = pools[size].results(run_once, cell.model, cell.dtype, cell.seed, 4 if quick else STEPS)
                except PoolDied:
                    died += 1
                    continue
                first = answers[0]
                for kind, ran in first["clean"].items():
                    counts[kind] += size * ran
                    counts[f"{kind}: {cell.name}"] += size * ran
                runs[cell.name] += 1
                if any(a["alarms"] for a in answers):
                    alarms.append({"setting": cell.name, "seed": cell.seed, "alarms": first["alarms"]})
                named = [ranks for _, _, ranks in first["caught"]]
                fired = sum(a["fired"] for a in answers)
                if not first["working"] or not fired or [first["true_rank"]] not in named:
                    missed.append({"setting": cell.name, "seed": cell.seed, **first, "fired": fired})
            if min(counts[k] for k in ("audit", "replicas", "finite")) >= checks:
                break
            print(f"{counts['audit']:,} of {checks:,} checks of each kind, {len(alarms)} alarms, {len(missed)} missed, "
                  f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    finally:
        for pool in pools.values():
            pool.close()
    result = _result(counts, runs, alarms, missed, died, time.monotonic() - begin)
    (out / "false-alarms.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def page(result: dict[str, Any], command: str) -> str:
    """The result as a page for ``docs/results``."""
    lines = [
        "# False alarms on healthy machines",
        "",
        f"Command: `{command}`. {result['date']}, torch {result['torch']}, {result['machine']}, "
        f"{result['seconds']:.0f} s.",
        "",
        "Many short guarded runs (other seeds, 3 and 4 ranks, fp32 and bf16 autocast, two models), every check in every "
        "step. One check is: for `audit`, one full bitwise comparison of loss, all gradients and buffers for one "
        "auditee; for `replicas`, one rank's share of one vote over all weights, optimizer state and reduced "
        "gradients; for `finite`, one rank's gradients of one step, local and reduced. Every run ends with one seeded "
        "fault that must be caught with the right rank named, with all three checks on and the audit bitwise; the counts "
        "are the guard's own.",
        "",
        "| check | clean checks | false alarms | 95 % bound per check | bound per year, one job | bound per year, "
        f"{GPUS:,} GPUs counted one by one |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("audit", "replicas", "finite"):
        row = result["kinds"][kind]
        lines.append(
            f"| {kind} | {row['checks']:,} | {row['alarms']} | {row['bound']:.2e} | {row['per_job_year']:.1f} | "
            f"{row['per_gpu_year']:,.0f} |"
        )
    lines += [
        "",
        "The bound is the one-sided 95 % bound −ln(0.05)/n for no alarm in n checks: what these counts can exclude, not "
        "what is expected. *One job* takes a check as one decision of the whole job (an audit every 100 steps of 10 s "
        f"is {PER_JOB_YEAR['audit']:,} a year; a vote every 10 steps, `finite` every step). *Counted one by one* takes "
        "every GPU's comparison as a chance of its own, which is the more careful reading; healthy bits either repeat "
        "or calibration finds out, so the truth is likely far below both.",
        "",
        f"Faults at the ends of the {result['runs']} runs: {result['runs'] - len(result['missed'])} caught with the "
        f"right rank named, {len(result['missed'])} not. Pools that died: {result['died']}.",
        "",
        "| setting | runs | checks of each kind |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {row['runs']} | {row['checks']:,} |" for name, row in sorted(result["settings"].items())]
    if result["alarms"] or result["missed"]:
        lines += ["", "```json", json.dumps({k: result[k] for k in ("alarms", "missed")}, indent=1)[:4000], "```"]
    return "\n".join([*lines, ""])


def _result(
    counts: Counter[str],
    runs: Counter[str],
    alarms: list[dict[str, Any]],
    missed: list[dict[str, Any]],
    died: int,
    seconds: float,
) -> dict[str, Any]:
    import torch

    kinds: dict[str, Any] = {}
    for kind, per_year in PER_JOB_YEAR.items():
        bound = -math.log(0.05) / counts[kind] if counts[kind] else math.inf
        kinds[kind] = {
            "checks": counts[kind],
            "alarms": sum(check == kind for a in alarms for check, _ in a["alarms"]),
            "bound": bound,
            "per_job_year": bound * per_year,
            "per_gpu_year": bound * per_year * GPUS,
        }
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, gloo",
        "seconds": seconds,
        "kinds": kinds,
        "runs": sum(runs.values()),
        "settings": {name: {"runs": n, "checks": counts[f"audit: {name}"]} for name, n in runs.items()},
        "alarms": alarms,
        "missed": missed,
        "died": died,
    }


def _fault(model: Any, seed: int, step: int, size: int) -> Fault:
    """The fault at the end of a run: another site, place and rank for every seed."""
    modules = [n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv2d")]
    target = modules[seed % len(modules)]
    rank = seed % size
    kinds: tuple[dict[str, Any], ...] = (
        {"site": "forward", "target": target, "pattern": "relative", "relative": 0.01, "count": 4},
        {"site": "backward", "target": target, "pattern": "bit_flip", "bit": 30},
        {"site": "gradient", "target": f"{target}.weight", "pattern": "bit_flip", "bit": 22},
        {"site": "weight", "target": f"{target}.weight", "pattern": "bit_flip", "bit": 21},
        {"site": "gradient", "target": f"{target}.weight", "pattern": "nan"},
    )
    chosen = kinds[seed % len(kinds)]
    if chosen["pattern"] == "bit_flip" and chosen["site"] == "backward":
        chosen = {**chosen, "pattern": "scale", "factor": 3.0}
        del chosen["bit"]
    return Fault(rank=rank, step=step, seed=seed, **chosen)


def _model(name: str, dtype: str, seed: int) -> tuple[Any, Any, Any]:
    """(module, loss_fn, batch of a step and rank)."""
    import torch
    from torch import nn

    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import Preset

    bf16 = dtype == "bf16"
    if name == "llama":
        preset = Preset(
            name="micro", hidden_size=64, layers=2, heads=4, ffn_size=172, vocabulary=256, sequence_length=32,
            samples_per_rank=2,
        )  # fmt: skip

        def tokens(step: int, rank: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 101 + rank)
            return torch.randint(0, 256, (2, 33), generator=generator)

        return build_model(preset, seed=seed), make_loss_fn(bf16=bf16), tokens
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(16 * 8 * 8, 10),
    )  # fmt: skip

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            out = model(batch)
        return nn.functional.cross_entropy(out.float(), torch.arange(len(batch)) % 10)

    def images(step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 101 + rank)
        return torch.randn(8, 3, 12, 12, generator=generator)

    return module, loss_fn, images
