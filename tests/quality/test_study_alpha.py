"""``unsilent study alpha --quick`` runs, writes what it says it writes, and goes on with what it has done already."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from typer.testing import CliRunner

from unsilent.checks.update_rules import RULES
from unsilent.cli import app


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study")
    done = CliRunner().invoke(app, ["study", "alpha", "--quick", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["quick"] is True
    return out


@pytest.fixture
def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "update.json").read_text())


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_it_writes_figures_a_page_and_a_plot(out: Path, record: dict[str, Any]) -> None:
    assert set(record["rules"]) == set(RULES) and len(record["goals"]) in (4, 5, 6)
    page = (out / "update.md").read_text()
    assert "its figures mean nothing" in page and "| 0.01-0.05 | 75-85 % | < 5 % |" in page
    assert (out / "update.png").read_bytes().startswith(b"\x89PNG")


def test_every_recomputed_step_is_the_clean_one(record: dict[str, Any]) -> None:
    recovery = record["recovery"]
    assert recovery["tried"] > 20 and recovery["identical"] == recovery["tried"]
    assert record["paired"]["caught_identical"] == record["paired"]["caught"]


def test_rates_are_counts_and_larger_sensitivities_catch_no_less(record: dict[str, Any]) -> None:
    for found in record["rules"].values():
        for name in ("false_alarms", "detected"):
            shares = [row[name]["share"] for row in found["sweep"]]
            assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)
        for row in found["targets"].values():
            assert row["on_the_seed_of_thresholds"]["share"] <= 0.037
    assert math.isfinite(record["paired"]["without_check"]["mean"])


def test_a_second_start_takes_the_parts_that_are_there(out: Path, record: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["study", "alpha", "--quick", "--out", str(out)])
    assert done.exit_code == 0, done.output
    again = json.loads((out / "update.json").read_text())
    assert again["rules"] == record["rules"] and again["seconds"] == record["seconds"]


def test_an_unknown_preset_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["study", "alpha", "--preset", "huge", "--out", str(tmp_path / "o")])
    assert done.exit_code == 2 and "no plan for preset" in done.output
