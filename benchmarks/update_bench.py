"""The share of a step that the check ``update`` costs by itself: one guard, the check taken out in every other step.

A false alarm would cost an audit of that step, and is not counted here: the sensitivity is set so low that none comes,
while everything that leads to one is computed. How many come at which sensitivity is in ``docs/results/update.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
from pathlib import Path
from typing import Any

from unsilent.lab.pool import RankPool

Pair = tuple[float, float]  # without and with the check


def pairs_of(
    rank: int, size: int, rule: str, preset: str, batch: int, length: int, pairs: int
) -> tuple[list[Pair], list[Pair]]:
    """Seconds of a step by the clock, and seconds of this rank's processor in it, ``pairs`` times, after three pairs of
    warm-up. On a machine that others use too only the second can be trusted."""
    import contextlib
    import io
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import unsilent
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset as preset_of

    model = DistributedDataParallel(build_model(preset_of(preset), seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    update = unsilent.UpdateConfig(rule=rule, sensitivity=1e-9)
    config = unsilent.GuardConfig(
        node=f"node-{rank}", audit_every=10_000, replicas_every=10_000, snapshot_every=None, update=update
    )
    clock: list[Pair] = []
    processor: list[Pair] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, make_loss_fn(), clip_norm=1.0, config=config)
        check = guard.checks["update"]
        for i in range(pairs + 3):
            both: list[Pair] = []
            # Which of the two comes first alternates, so that a drift of the machine favours neither.
            for on in (bool(i % 2), not i % 2):
                if on:
                    guard.checks["update"] = check
                else:
                    guard.checks.pop("update", None)
                generator = torch.Generator().manual_seed(i * 64 + rank)
                tokens = torch.randint(0, 256, (batch, length + 1), generator=generator)
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                outcome = guard.step(tokens)
                dist.barrier()
                both.append((time.perf_counter() - begin, time.process_time() - used))
                assert outcome.verdict is None
            if i >= 3:
                without, with_it = (both[1], both[0]) if i % 2 else both
                clock.append((without[0], with_it[0]))
                processor.append((without[1], with_it[1]))
        guard.checks["update"] = check
        guard.close()
    return clock, processor


def summary(seconds: list[Pair]) -> dict[str, Any]:
    """The median of the paired differences as a share of a step without the check, with its 95 % interval."""
    base = statistics.median(without for without, _ in seconds)
    extra = [with_it - without for without, with_it in seconds]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(extra, k=len(extra))) / base for _ in range(1000))
    return {
        "pairs": len(extra),
        "step_s": base,
        "extra_share_of_step": statistics.median(extra) / base,
        "extra_interval_95": [medians[25], medians[975]],
        "seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--rules", nargs="+", default=["robust", "harmful"])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write update-cost.json into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    preset, pairs, length = ("tiny", 3, 32) if options.quick else (options.preset, options.pairs, 128)
    rules: dict[str, Any] = {}
    result = {
        "preset": preset, "ranks": 2, "tokens_per_rank": 4 * length, "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}", "cores": os.cpu_count(),
        "rules": rules,
    }  # fmt: skip
    for rule in options.rules:
        with RankPool(2) as pool:
            clock, processor = pool.results(pairs_of, rule, preset, 4, length, pairs, timeout=3600)[0]
        rules[rule] = {"clock": summary(clock), "processor": summary(processor)}
        for by, found in rules[rule].items():
            print(json.dumps({"rule": rule, "by": by, **{k: v for k, v in found.items() if k != "seconds"}}))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "update-cost.json").write_text(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    main()
