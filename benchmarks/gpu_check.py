"""What must hold on a GPU, in at most ten minutes on one device; says so and leaves with 0 where there is none.

1. The Triton fingerprint gives the integers of the reference, for all types and layouts that the tests use.
2. A clean guarded step brings readings to the host once, and otherwise never waits for the device.
3. Three gloo ranks on one device: a wrong activation is found, named and repaired to the bits of the clean run.
4. Speed: fingerprints against memory bandwidth, and the cost of each check.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from unsilent.lab.pool import RankPool


def kernels(numbers: int) -> dict[str, Any]:
    """The device's sums against the reference's, and the device's speed on so many numbers."""
    from unsilent.fingerprints import reference, sums

    generator = torch.Generator().manual_seed(0)
    compared = 0
    wrong: list[str] = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8,
                  torch.bool, torch.complex64):  # fmt: skip
        for shape in ((), (0,), (1,), (1000,), (257, 129), (3, 5, 7)):
            host = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
            host = host.view(dtype).reshape(shape) if dtype is not torch.bool else host.reshape(shape) > 127
            views = [host] if host.dim() < 2 else [host, host.transpose(0, 1), host[::2]]
            for view in views:
                compared += 1
                if not torch.equal(reference.sums(view), sums(view.cuda()).cpu()):
                    wrong.append(f"{dtype} {tuple(view.shape)}")
    big = torch.randn(numbers, device="cuda")
    sums(big)
    times: list[float] = []
    copies: list[float] = []
    for _ in range(20):
        for seconds, work in ((times, lambda: sums(big)), (copies, lambda: big.clone())):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    size = big.numel() * 4 / 1e9
    return {
        "compared": compared,
        "wrong": wrong,
        "fingerprint_gb_per_s": size / statistics.median(times),
        "copy_gb_per_s": 2 * size / statistics.median(copies),
    }


def waits() -> dict[str, Any]:
    """How often a clean guarded step waits for the device."""
    import unsilent

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = unsilent.GuardConfig(audit_every=None, replicas_every=None)
    guard = unsilent.Guard(model, optimizer, lambda m, b: m(b).square().mean(), config=config)
    batch = torch.randn(32, 256, device="cuda")
    for _ in range(3):
        guard.step(batch)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard.step(batch)
    torch.cuda.set_sync_debug_mode("default")
    guard.close()
    return {"waits": sum("synchroniz" in str(w.message) for w in caught), "allowed": 1}


def ranks_on_one_device(rank: int, size: int, fault: bool, guarded: bool) -> dict[str, Any]:
    """A short run of one rank on the shared device."""
    import hashlib
    import os

    import unsilent
    from unsilent.lab.faults import Fault
    from unsilent.lab.inject import Injector

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(m: Any, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).square().mean()

    config = unsilent.GuardConfig(audit_every=2, replicas_every=1, node=f"node-{rank}")
    guard = unsilent.Guard(ddp, optimizer, loss_fn, config=config) if guarded else None
    injector = None
    if fault:
        wrong = Fault(site="forward", target="1", pattern="scale", factor=1.5, rank=2, step=5)
        injector = Injector(model, optimizer, wrong, rank=rank, world_size=size)
    verdicts: list[Any] = []
    times: list[float] = []
    for step in range(10):
        batch = torch.randn(16, 256, generator=torch.Generator().manual_seed(step * 8 + rank)).cuda()
        if injector is not None:
            injector.begin_step(step)
        begin = time.perf_counter()
        if guard is not None:
            outcome = guard.step(batch)
            if outcome.verdict is not None:
                verdicts.append((step, outcome.action.value, [s.rank for s in outcome.verdict.suspects]))
        else:
            optimizer.zero_grad(set_to_none=True)
            loss_fn(ddp, batch).backward()
            optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    if injector is not None:
        injector.close()
    checks: list[str] = []
    if guard is not None:
        checks = sorted(guard.checks)
        guard.close()
    data = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "verdicts": verdicts,
        "checks": checks,
        "step_s": statistics.median(times),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="write gpu-check.json into this folder")
    parser.add_argument("--quick", action="store_true", help="a small tensor for the speed of fingerprints")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu-check: skipped, there is no CUDA device here; nothing was checked and nothing was written")
        return 0
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "kernels": kernels(1_000_000 if options.quick else 953_000_000 // 4),
        "waits": waits(),
    }
    with RankPool(3) as pool:
        plain = pool.results(ranks_on_one_device, False, False)
        clean = pool.results(ranks_on_one_device, False, True)
        repaired = pool.results(ranks_on_one_device, True, True)
    result["ranks"] = {
        "clean_equals_unguarded": plain[0]["sha256"] == clean[0]["sha256"],
        "repaired_equals_clean": repaired[0]["sha256"] == clean[0]["sha256"],
        "verdicts": repaired[0]["verdicts"],
        "checks_that_stayed_on": repaired[0]["checks"],
        "step_s": {"unguarded": plain[0]["step_s"], "guarded": clean[0]["step_s"]},
    }
    ok = (
        not result["kernels"]["wrong"]
        and result["waits"]["waits"] <= result["waits"]["allowed"]
        and result["ranks"]["clean_equals_unguarded"]
        and result["ranks"]["repaired_equals_clean"]
        and [ranks for _, _, ranks in repaired[0]["verdicts"]] == [[2]]
        and repaired[0]["checks"] == ["audit", "finite", "replicas"]
    )
    result["ok"] = ok
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu-check.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
