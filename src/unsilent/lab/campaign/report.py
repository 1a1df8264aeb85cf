"""A campaign from its specification to its files: ``campaign.json``, ``campaign.html``, ``coverage.png``, ``trials.csv``."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsilent.errors import UsageError
from unsilent.lab.campaign.outcome import MISSED, named, steps_to_detection, why_missed
from unsilent.lab.campaign.page import draw_coverage, page
from unsilent.lab.campaign.runner import Runner
from unsilent.lab.campaign.spec import Spec, read_spec
from unsilent.lab.campaign.tables import Result, tables
from unsilent.lab.campaign.trial import CLIP_NORM, LEARNING_RATE, model_of
from unsilent.lab.campaign.trials import trials_of
from unsilent.lab.page import conditions
from unsilent.lab.pool import RankPool

SCHEMA_VERSION = 1
_COLUMNS = ("trial", "parallelism", "checks", "site", "fault", "seed", "what", "class", "named", "faulty", "fired",
            "verdicts", "steps_to_detection", "ended", "deviation", "loss", "loss_limit", "why_missed", "seconds")  # fmt: skip


def run(
    *,
    spec: Path,
    out: Path,
    only: int | None = None,
    minutes: float | None = None,
    pools: Mapping[int, RankPool] | None = None,
) -> dict[str, Any]:
    """Run what is left of the campaign in ``out``, or a part of it, and write its files; the content of campaign.json.

    Args:
        only: at most so many trials.
        minutes: after which no trial is begun.
        pools: warm pools by their number of ranks, to be used and left open.

    Raises:
        UsageError: the specification is wrong, or ``out`` cannot be written or belongs to another one.
    """
    wanted = read_spec(spec)
    runner = Runner(wanted, trials_of(wanted, model_of(wanted.job)), out, pools=pools)
    runner.run(only=only, minutes=minutes)
    record = record_of(wanted, runner, command=f"unsilent campaign {_shown(spec)} --out {_shown(out)}")
    try:
        (out / "campaign.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        _write_csv(out / "trials.csv", runner.results)
        draw_coverage(record, out / "coverage.png")
    except OSError as error:
        raise UsageError(f"cannot write the results into {out}: {error.strerror or error}") from error
    page(record).write(out / "campaign.html")
    return record


def record_of(spec: Spec, runner: Runner, *, command: str) -> dict[str, Any]:
    """All numbers of a campaign, as its schema says."""
    results = runner.results
    seconds = sum(r.observed.seconds for r in results)
    job = spec.job
    return {
        "schema": SCHEMA_VERSION,
        "campaign": spec.name,
        "spec": spec.digest,
        "conditions": {
            **conditions(command), "threads": 1, "model": f"{job.model}, {sum(p.numel() for p in model_of(job).parameters()):,} parameters",
            "tokens per rank and step": job.samples * job.length, "steps": job.steps, "learning rate": LEARNING_RATE,
            "clipped to": CLIP_NORM, "dtype": "fp32", "backend": "gloo",
        },
        "checks": {name: _told(config) for name, config in spec.checks.items()},
        "sites": list(dict.fromkeys([*spec.sites, *(t.site for t in runner.trials if t.fault)])),
        "faults": list(dict.fromkeys([*spec.faults, *(f"unit {number}" for number in spec.units)])),
        "planned": len(runner.trials),
        "trials": len(results),
        "seconds": round(seconds, 1),
        "per_minute": round(60 * len(results) / seconds, 1) if seconds else None,
        "pools_replaced": runner.pools_replaced,
        **tables(results),
    }  # fmt: skip


def _shown(path: Path) -> str:
    """A path as it was given, but nothing of this machine's directories."""
    return path.name if path.is_absolute() else path.as_posix()


def _told(config: Any) -> dict[str, Any]:
    """What of a guard's configuration says which checks run."""
    told = {name: getattr(config, name) for name in ("mode", "audit_every", "replicas_every", "snapshot_every")}
    return {**told, "update": None if config.update is None else config.update.rule}


def _write_csv(path: Path, results: Sequence[Result]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for r in results:
            seen = r.observed
            why = why_missed(seen) if r.counted_as in MISSED else ""
            verdicts = "; ".join(f"step {v.step} {v.check} {v.kind} {v.action} {list(v.ranks)}" for v in seen.said)
            writer.writerow([r.name, r.parallelism, r.checks, r.site, r.kind, r.seed, r.fault, r.counted_as.value,
                             named(seen).value, list(seen.faulty), list(seen.fired), verdicts, steps_to_detection(seen),
                             seen.ended, seen.felt, seen.loss, seen.loss_limit, why, seen.seconds])  # fmt: skip
