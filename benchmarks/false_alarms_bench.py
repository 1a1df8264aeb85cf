"""Counts clean checks and false alarms; see ``unsilent.lab.false_alarms``. About 20 minutes on 2 cores."""

from __future__ import annotations

import argparse
from pathlib import Path

from unsilent.lab.false_alarms import page, study


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=20_000, help="clean checks of each kind")
    parser.add_argument("--out", type=Path, default=Path("out/false-alarms"))
    parser.add_argument("--quick", action="store_true", help="a few runs only")
    options = parser.parse_args(arguments)
    checks = 100 if options.quick else options.checks
    result = study(options.out, checks=checks, quick=options.quick)
    command = f"python benchmarks/false_alarms_bench.py --checks {checks}"
    (options.out / "false-alarms.md").write_text(page(result, command))
    print((options.out / "false-alarms.md").read_text())
    return 0 if not result["alarms"] and not result["missed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
