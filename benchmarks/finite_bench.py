"""The share of a step that the check ``finite`` costs by itself: one guard, the check taken out in every other step.

What it does not count: the pass over the local gradients that it shares with the fingerprint, and the norm that it
shares with clipping; both are there without it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from unsilent.lab.pool import RankPool


def pairs_of(rank: int, size: int, preset: str, batch: int, length: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step without and with the check, ``pairs`` times, after three pairs of warm-up."""
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
    config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=10_000, replicas_every=10_000)
    seconds: list[tuple[float, float]] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, make_loss_fn(), clip_norm=1.0, config=config)
        finite = guard.checks["finite"]
        for i in range(pairs + 3):
            both: list[float] = []
            # Which of the two comes first alternates, so that a drift of the machine favours neither.
            for on in (bool(i % 2), not i % 2):
                if on:
                    guard.checks["finite"] = finite
                else:
                    guard.checks.pop("finite", None)
                generator = torch.Generator().manual_seed(i * 64 + rank)
                tokens = torch.randint(0, 256, (batch, length + 1), generator=generator)
                dist.barrier()
                begin = time.perf_counter()
                guard.step(tokens)
                dist.barrier()
                both.append(time.perf_counter() - begin)
            if i >= 3:
                seconds.append((both[1], both[0]) if i % 2 else (both[0], both[1]))
        guard.checks["finite"] = finite
        guard.close()
    return seconds


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write finite.json into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    preset, pairs, length = ("tiny", 3, 32) if options.quick else (options.preset, options.pairs, 128)
    with RankPool(2) as pool:
        seconds = pool.results(pairs_of, preset, 4, length, pairs, timeout=3600)[0]
    base = statistics.median(without for without, _ in seconds)
    extra = [with_it - without for without, with_it in seconds]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(extra, k=len(extra))) / base for _ in range(1000))
    result = {
        "preset": preset,
        "pairs": len(extra),
        "step_s": base,
        "extra_share_of_step": statistics.median(extra) / base,
        "extra_interval_95": [medians[25], medians[975]],
        "seconds": seconds,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "finite.json").write_text(json.dumps(result) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "seconds"}))
    return result


if __name__ == "__main__":
    main()
