"""What guarding costs: guarded and unguarded steps in alternation, in one run, on the same ranks.

Every guarded step is paired with the unguarded step before it. A check's cost is the median of (guarded - unguarded)
over its pairs, as a share of the median unguarded step; what a profile costs is the sum over its checks divided by
their periods. A second, long alternation under the default profile cross-checks that sum.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from unsilent.lab.pool import RankPool

#: audit when (step + 1) % 4 == 0, the vote one step later, two plain steps: each kind of step once per cycle
CYCLE = 4


def alternate(rank: int, size: int, preset: str, batch: int, length: int, steps: int, default: bool) -> dict[str, Any]:
    """Run ``steps`` guarded steps, each after an unguarded one, on one rank; per-step seconds and what was due."""
    import contextlib
    import io

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import unsilent
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset as preset_of

    loss_fn = make_loss_fn()
    plain = DistributedDataParallel(build_model(preset_of(preset), seed=0))
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    model = DistributedDataParallel(build_model(preset_of(preset), seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=100 if default else CYCLE,
                                  replicas_every=10 if default else CYCLE)  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_fn, clip_norm=1.0, config=config)

    def tokens(step: int) -> torch.Tensor:
        return torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(step * 64 + rank))

    def unguarded(step: int) -> None:
        plain_optimizer.zero_grad(set_to_none=True)
        loss_fn(plain, tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optimizer.step()

    pairs: list[tuple[str, float, float]] = []
    alarms = 0
    for step in range(CYCLE + steps):
        dist.barrier()
        begin = time.perf_counter()
        unguarded(step)
        dist.barrier()
        middle = time.perf_counter()
        with contextlib.redirect_stderr(io.StringIO()):
            outcome = guard.step(tokens(step))
        dist.barrier()
        end = time.perf_counter()
        alarms += outcome.verdict is not None
        due = guard.last_due
        kind = "audit" if "audit" in due else "replicas" if "replicas" in due else "finite"
        if step >= CYCLE:  # the first cycle warms up and holds the calibration
            pairs.append((kind, middle - begin, end - middle))
    with contextlib.redirect_stderr(io.StringIO()):
        guard.close()
    same = all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    return {"pairs": pairs, "alarms": alarms, "same_bits": same}


def peak(rank: int, size: int, preset: str, batch: int, length: int, guarded: bool) -> float:
    """Peak resident memory in MiB of one fresh process that runs a few steps, an audit among them."""
    import contextlib
    import io

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import unsilent
    from unsilent.training.model import build_model, make_loss_fn
    from unsilent.training.presets import preset as preset_of

    loss_fn = make_loss_fn()
    model = DistributedDataParallel(build_model(preset_of(preset), seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if guarded:
        with contextlib.redirect_stderr(io.StringIO()):
            config = unsilent.GuardConfig(node=f"node-{rank}", audit_every=2, replicas_every=2)
            guard = unsilent.Guard(model, optimizer, loss_fn, config=config)
    for step in range(4):
        tokens = torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(step * 64 + rank))
        if guarded:
            with contextlib.redirect_stderr(io.StringIO()):
                guard.step(tokens)
        else:
            optimizer.zero_grad(set_to_none=True)
            loss_fn(model, tokens).backward()
            optimizer.step()
    if guarded:
        with contextlib.redirect_stderr(io.StringIO()):
            guard.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def summary(pairs: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Median, 95th percentile and cost of each kind of step; the interval is a bootstrap over pairs."""
    base = statistics.median(plain for _, plain, _ in pairs)
    result: dict[str, Any] = {"unguarded_step_s": _spread([plain for _, plain, _ in pairs])}
    generator = random.Random(0)
    for kind in ("finite", "replicas", "audit"):
        chosen = [(plain, guarded) for k, plain, guarded in pairs if k == kind]
        if not chosen:
            continue
        extra = [guarded - plain for plain, guarded in chosen]
        means = sorted(statistics.median(generator.choices(extra, k=len(extra))) / base for _ in range(1000))
        result[kind] = {
            "pairs": len(chosen),
            "step_s": _spread([guarded for _, guarded in chosen]),
            "extra_share_of_step": statistics.median(extra) / base,
            "extra_interval_95": [means[25], means[975]],
            "ratio_to_unguarded": statistics.median(guarded for _, guarded in chosen) / base,
        }
    return result


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="25m")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine, one thread each")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of one sample")
    parser.add_argument("--cycles", type=int, default=100, help="audit steps, votes; and twice as many plain steps")
    parser.add_argument("--default-steps", type=int, default=100, help="pairs under the default profile")
    parser.add_argument("--out", type=Path, help="write overhead.json into this folder")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if options.quick:
        options.preset, options.cycles, options.default_steps, options.length = "tiny", 2, 4, 32
    shape = (options.preset, options.batch, options.length)
    with RankPool(options.ranks) as pool:
        by_kind = pool.results(alternate, *shape, CYCLE * options.cycles, False, timeout=7200)
        default = pool.results(alternate, *shape, options.default_steps, True, timeout=7200)
    memory: dict[str, float] = {}
    for guarded in (False, True):
        with RankPool(options.ranks) as pool:
            memory["guarded" if guarded else "unguarded"] = max(pool.results(peak, *shape, guarded, timeout=3600))
    import torch

    result = {
        "command": " ".join(["python", "benchmarks/overhead_bench.py", *(sys.argv[1:] if arguments is None else [])]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {options.ranks} gloo ranks of "
        "one thread on one machine",
        "preset": options.preset,
        "tokens_per_rank": options.batch * options.length,
        "by_kind": summary(by_kind[0]["pairs"]),
        "default_profile": summary(default[0]["pairs"]),
        "peak_memory_mib": memory,
        "alarms": sum(r["alarms"] for r in (*by_kind, *default)),
        "same_bits": all(r["same_bits"] for r in (*by_kind, *default)),
        "per_step": {"by_kind": by_kind[0]["pairs"], "default": default[0]["pairs"]},
    }
    kinds = result["by_kind"]
    result["steady_overhead"] = (
        kinds["finite"]["extra_share_of_step"]
        + (kinds["replicas"]["extra_share_of_step"] - kinds["finite"]["extra_share_of_step"]) / 10
        + (kinds["audit"]["extra_share_of_step"] - kinds["finite"]["extra_share_of_step"]) / 100
    )
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "overhead.json").write_text(json.dumps(result) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "per_step"}))
    return result


if __name__ == "__main__":
    main()
