"""Speed of the fingerprint on the CPU beside torch's own reductions.

    python benchmarks/fingerprint_bench.py --mib 256 --out out/bench

All candidates take turns in every round, so that a busy machine slows them alike; the median over rounds is reported
in GB/s of the tensor read. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from torch import Tensor

from unsilent.fingerprints import cpu, reference, sums, sums_many
from unsilent.fingerprints.lanes import jobs

SMALL_TENSORS = 300


def sums_by_reference(tensor: Tensor) -> Tensor:
    out = torch.zeros(1, 2, dtype=torch.int64)
    reference.add(out, jobs(tensor, tensor.shape, [0] * tensor.ndim, 0, 0))
    return out


def candidates(tensor: Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name to (threads, call); every call reads the whole tensor once."""
    copy = torch.empty_like(tensor)
    calls: dict[str, Callable[[], object]] = {
        "reference": lambda: sums_by_reference(tensor),
        "hash_tensor": lambda: torch.hash_tensor(tensor),
        "sum": lambda: tensor.sum(),
        "copy": lambda: copy.copy_(tensor),
    }
    if cpu.available():
        calls = {"sums": lambda: sums(tensor), **calls}
    return {f"{name}, {n} thread{'s' * (n > 1)}": (n, call) for name, call in calls.items() for n in (1, 2)}


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(mib: int, repeats: int) -> dict[str, object]:
    tensor = torch.linspace(-1, 1, mib * (1 << 18))
    small = [torch.linspace(-1, 1, 64) for _ in range(SMALL_TENSORS)]
    todo = candidates(tensor)
    times: dict[str, list[float]] = {name: [] for name in todo}
    threads = torch.get_num_threads()
    try:
        for turn in range(repeats + 1):
            for name, (count, call) in todo.items():
                torch.set_num_threads(count)
                elapsed = seconds(call)
                if turn:  # the first turn compiles and touches memory
                    times[name].append(elapsed)
    finally:
        torch.set_num_threads(threads)
    sums_many(small)
    many = statistics.median(seconds(lambda: sums_many(small)) for _ in range(max(3, repeats)))
    size = tensor.numel() * tensor.element_size()
    return {
        "gb_per_s": {name: round(size / statistics.median(taken) / 1e9, 2) for name, taken in times.items()},
        f"sums_many_of_{SMALL_TENSORS}_small_ms": round(many * 1e3, 2),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of the fingerprint on the CPU, in GB/s.")
    parser.add_argument("--mib", type=int, default=256, help="size of the fp32 tensor in MiB (3636 is 953 M values)")
    parser.add_argument("--repeats", type=int, default=11, help="rounds")
    parser.add_argument("--quick", action="store_true", help="4 MiB and 2 rounds, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write fingerprint.json into this folder")
    options = parser.parse_args(arguments)
    mib, repeats = (4, 2) if options.quick else (options.mib, options.repeats)
    result = {
        "benchmark": "fingerprint",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)},
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "numba", "numpy")}},
        "mib": mib,
        "repeats": repeats,
        **measure(mib, repeats),
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "fingerprint.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
