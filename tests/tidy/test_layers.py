"""Imports go downwards only, and what needs no torch imports none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "unsilent"
WITHOUT_TORCH = [
    "errors.py",
    "records.py",
    "judge.py",
    "localize.py",
    "policy.py",
    "events.py",
    "evidence.py",
    "checkpoint/certificate.py",
    "ledger/database.py",
    "ledger/writing.py",
    "lines.py",
    "recurrence.py",
    "report/ledger.py",
    "report/text.py",
    "launch.py",
    "schedulers.py",
    "lab/faults.py",
]


def test_the_import_contracts_hold() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed here")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", WITHOUT_TORCH)
def test_importing_it_does_not_import_torch(file: str) -> None:
    assert (SOURCE / file).is_file()
    module = "unsilent." + file.removesuffix(".py").replace("/", ".")
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, unsilent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
