"""Every benchmark runs, small, and writes what it says it writes. What the numbers are is not looked at here."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
#: the file that each writes; None for one that writes nothing where there is no GPU
WRITES = {
    "overhead_bench": "overhead.json",
    "finite_bench": "finite.json",
    "recovery_bench": "recovery.json",
    "sharded_bench": "sharded.json",
    "update_bench": "update-cost.json",
    "fingerprint_bench": "fingerprint.json",
    "false_alarms_bench": "false-alarms.json",
    "launch_repeat": "launch.json",
    "gpu_check": "gpu-check.json" if torch.cuda.is_available() else None,
}


def test_each_is_known_here() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == set(WRITES)


#: what another test runs whole already
TESTED_ELSEWHERE = {"launch_repeat": "tests/ranks/test_launch.py runs the same launches, once each"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_it_runs_small(name: str, tmp_path: Path) -> None:
    if name in TESTED_ELSEWHERE:
        pytest.skip(TESTED_ELSEWHERE[name])
    if name in ("overhead_bench", "false_alarms_bench", "recovery_bench", "sharded_bench"):
        pytest.importorskip("transformers")
    # Imported by name and not by path, since the ranks that it starts import it too.
    result: Any = importlib.import_module(f"benchmarks.{name}").main(["--quick", "--out", str(tmp_path)])
    assert not isinstance(result, int) or result == 0
    written = WRITES[name]
    if written is None:
        assert list(tmp_path.iterdir()) == []
        return
    record = json.loads((tmp_path / written).read_text())
    assert record
    if name == "overhead_bench":
        assert record["alarms"] == 0 and record["same_bits"]
