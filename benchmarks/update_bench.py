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
from pathlib import Path
from typing import Any

from benchmarks.finite_bench import on_and_off, summary
from unsilent.lab.pool import RankPool


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    import torch

    from unsilent import UpdateConfig

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
            watched = {"update": UpdateConfig(rule=rule, sensitivity=1e-9)}
            clock, processor = pool.results(on_and_off, "update", preset, 4, length, pairs, watched, timeout=3600)[0]
        rules[rule] = {"clock": summary(clock), "processor": summary(processor)}
        for by, found in rules[rule].items():
            print(json.dumps({"rule": rule, "by": by, **{k: v for k, v in found.items() if k != "seconds"}}))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "update-cost.json").write_text(json.dumps(result) + "\n")
    return result


if __name__ == "__main__":
    main()
