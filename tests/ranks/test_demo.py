"""The demo in its quick variant: all rows right gives 0 and the promised JSON; a row that is wrong gives 1."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from unsilent.errors import UsageError
from unsilent.lab.demo import Clean, judge_row, play
from unsilent.lab.pool import RankPool
from unsilent.lab.scenarios import Plan, full_plan, quick_plan
from unsilent.records import Action, Event
from unsilent.report.text import render_text

KEYS = {
    "name", "fault_step", "caught_step", "verdict", "named_rank", "named_node", "true_rank", "action",
    "weights_sha256", "bit_exact",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def _play(plan: Plan, out: Path, pool: RankPool) -> tuple[int, str]:
    screen = io.StringIO()
    code = play(plan, out, Console(file=screen, width=120), pool)
    return code, screen.getvalue()


@pytest.mark.slow
def test_all_rows_are_right(pool: RankPool, tmp_path: Path) -> None:
    code, screen = _play(quick_plan(), tmp_path, pool)
    assert code == 0, screen
    assert "All 5 rows are right" in screen
    assert "unsilent: " not in screen  # what the guard announces goes to the logs

    record = json.loads((tmp_path / "demo.json").read_text())
    assert set(record) == {"clean", "scenarios", "seconds", "versions"}
    assert set(record["clean"]) == {"unguarded", "guarded"}
    assert record["clean"]["unguarded"] == record["clean"]["guarded"]
    rows = {row["name"]: row for row in record["scenarios"]}
    assert list(rows) == [scenario.name for scenario in quick_plan().scenarios]
    for row in rows.values():
        assert set(row) == KEYS
        assert row["bit_exact"] is True
        assert row["named_rank"] == row["true_rank"]
        assert re.fullmatch("[0-9a-f]{64}", row["weights_sha256"])
        assert render_text(tmp_path / row["name"])
        if row["action"] != "QUARANTINE":
            assert row["weights_sha256"] == record["clean"]["unguarded"]
    assert {row["action"] for row in rows.values()} == {"REPAIR", "RECOMPUTE", "HEAL", "QUARANTINE"}
    assert rows["nan-in-reduction"]["true_rank"] is None and rows["nan-in-reduction"]["named_node"] is None

    lane = rows["stuck-lane"]
    assert (lane["fault_step"], lane["caught_step"], lane["verdict"]) == (9, 11, "PERSISTENT")
    assert json.loads((tmp_path / "stuck-lane" / "exclude.json").read_text())["nodes"] == [lane["named_node"]]
    saved = tmp_path / "weight-bit-at-checkpoint" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == ["step-00000008"]
    assert "step 0" not in screen and "unsilent: " in (tmp_path / "stuck-lane/logs/rank-0.log").read_text()


def test_a_fault_that_is_not_caught_gives_exit_1(pool: RankPool, tmp_path: Path) -> None:
    plan = quick_plan()
    first = plan.scenarios[0]
    # A wrong value that is finite, in a step without an audit: it spoils the run and nothing sees it.
    fault = replace(first.fault, site="forward", pattern="scale", factor=3.0)
    plan = replace(plan, setup=replace(plan.setup, steps=8), scenarios=(replace(first, fault=fault),))
    code, screen = _play(plan, tmp_path, pool)
    assert code == 1
    assert "nan-in-backward: it was not caught" in screen and "rows are right" not in screen
    (row,) = json.loads((tmp_path / "demo.json").read_text())["scenarios"]
    assert row["caught_step"] is None and row["bit_exact"] is False
    assert row["weights_sha256"] != json.loads((tmp_path / "demo.json").read_text())["clean"]["guarded"]


def test_every_doubt_makes_a_row_wrong() -> None:
    plan = full_plan()
    scenario = plan.scenarios[0]
    assert (scenario.action, scenario.fault.rank, scenario.caught_step) == (Action.REPAIR, 1, 5)
    clean = Clean(unguarded="w", guarded="w", after_update=["w"], losses=[1.0])

    def problems(
        *,
        steps: Sequence[int] = (5,),
        rank: int = 1,
        node: str = "node-1",
        kind: str = "TRANSIENT",
        action: str = "REPAIR",
        **answer: Any,
    ) -> list[str]:
        fields = {"suspects": [{"rank": rank, "node": node}], "verdict": {"kind": kind}, "action": action}
        verdicts = [Event(kind="verdict", step=step, time=0.0, fields=fields) for step in steps]
        good = {"weights": ["w"], "saved": [8, 16, 24], "fired": 1, "changed": 1, "exit_code": 0, "resume_from": None}
        return judge_row(plan, scenario, [good, {**good, **answer}], verdicts, clean).problems

    assert problems() == []
    wrong: dict[str, Any]
    for wrong in (
        {"steps": ()},
        {"steps": (6,)},
        {"steps": (5, 7)},
        {"rank": 2},
        {"node": "node-2"},
        {"kind": "PERSISTENT"},
        {"action": "RECOMPUTE"},
        {"weights": ["v"]},
        {"saved": [8, 16]},
        {"exit_code": 10},
    ):
        assert problems(**wrong), wrong
    silent = {"weights": ["w"], "saved": [8, 16, 24], "fired": 0, "changed": 0, "exit_code": 0, "resume_from": None}
    assert "the fault changed no bit" in judge_row(plan, scenario, [silent], [], clean).problems


def test_what_is_not_ours_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "stuck-lane").mkdir()
    (tmp_path / "stuck-lane" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="not from an earlier demo"):
        play(quick_plan(), tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "stuck-lane" / "thesis.txt").read_text() == "mine"
