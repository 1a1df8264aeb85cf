"""The long studies run with ``--quick``, write what they say they write, and a second start takes what is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from unsilent.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["drift", "surface", "finetune"])
def test_a_quick_study_writes_figures_and_a_page_and_goes_on(name: str, tmp_path: Path) -> None:
    command = ["study", name, "--quick", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1])["study"] == record["study"] == name and record["quick"]
    page = (tmp_path / f"{name}.html").read_text()
    assert "its figures mean nothing" in page and "<svg" in page and "<th>here</th>" in page and "simulated" in page
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()}
    assert CliRunner().invoke(app, command).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").iterdir()} == made
    assert json.loads((tmp_path / f"{name}.json").read_text()) == record
