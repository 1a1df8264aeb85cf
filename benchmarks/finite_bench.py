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

Pair = tuple[float, float]  # without and with the check


def on_and_off(
    rank: int, size: int, check: str, preset: str, batch: int, length: int, pairs: int, options: dict[str, Any]
) -> tuple[list[Pair], list[Pair]]:
    """Seconds of a step by the clock, and seconds of this rank's processor in it, ``pairs`` times, after three pairs of
    warm-up. On a machine that others use too only the second can be trusted.

    Args:
        check: the one that is taken out in every other step.
        options: of GuardConfig, besides those that keep audits and votes away.
    """
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
    config = unsilent.GuardConfig(
        node=f"node-{rank}", audit_every=10_000, replicas_every=10_000, snapshot_every=None, **options
    )
    clock: list[Pair] = []
    processor: list[Pair] = []
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, make_loss_fn(), clip_norm=1.0, config=config)
        taken_out = guard.checks[check]
        for i in range(pairs + 3):
            both: list[Pair] = []
            # Which of the two comes first alternates, so that a drift of the machine favours neither.
            for on in (bool(i % 2), not i % 2):
                if on:
                    guard.checks[check] = taken_out
                else:
                    guard.checks.pop(check, None)
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
        guard.checks[check] = taken_out
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--out", type=Path, help="write finite.json into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    preset, pairs, length = ("tiny", 3, 32) if options.quick else (options.preset, options.pairs, 128)
    with RankPool(2) as pool:
        clock, _ = pool.results(on_and_off, "finite", preset, 4, length, pairs, {}, timeout=3600)[0]
    result = {"preset": preset, **summary(clock)}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "finite.json").write_text(json.dumps(result) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "seconds"}))
    return result


if __name__ == "__main__":
    main()
