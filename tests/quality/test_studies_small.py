"""The studies of sensitivity run with ``--quick`` and write what they say they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from unsilent.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["bits", "norms", "latency"])
def test_a_quick_study_writes_figures_a_page_and_a_plot(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["study", name, "--quick", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1])["study"] == record["study"] == name
    page = (tmp_path / f"{name}.html").read_text()
    assert "its figures mean nothing" in page and "<svg" in page and "<th>here</th>" in page
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    if name == "latency":
        assert all(row["guard"]["found"] == row["guard"]["runs"] for row in record["rows"])
        assert all(row["guard"]["audits_on_schedule"] for row in record["rows"])
