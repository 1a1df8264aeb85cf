"""P2: what is covered and what is not is printed at start, and nothing that is on stays out in silence."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

import unsilent
from tests.promises.job import Job, batch_of, build, guard_of, loss_of, train
from unsilent.events import read
from unsilent.lab.pool import RankPool
from unsilent.records import Site

ROOT = Path(__file__).parents[2]
#: Looked at by ``guard.save`` and ``guard.load`` themselves, so no row of a step's table.
NOT_IN_A_STEP = {"checkpoint"}


@pytest.mark.parametrize(
    "config",
    [{}, {"audit_every": None}, {"replicas_every": None}, {"audit_every": None, "replicas_every": None}],
    ids=["default", "no audit", "no replicas", "finite only"],
)
def test_the_table_printed_at_start_has_a_row_for_every_site(pool3: RankPool, config: dict[str, None]) -> None:
    result = pool3.results(train, Job(steps=1, config=config))[0]
    sites = {row.site for row in result.coverage}
    assert sites >= {site.value for site in Site} - NOT_IN_A_STEP
    for row in result.coverage:
        assert row.blind, f"{row.site} by {row.check} claims to see everything"
        assert row.site in result.said and row.blind in result.said
        assert ("NOT COVERED" in result.said) and (bool(row.how) == bool(row.when))


def test_what_is_switched_off_is_said_to_be_uncovered(pool3: RankPool) -> None:
    result = pool3.results(train, Job(steps=1, config={"audit_every": None, "replicas_every": None}))[0]
    covered = {row.site for row in result.coverage if row.how}
    assert covered == {"gradient", "reduction", "optimizer"}  # settings and counters are compared all the same
    assert re.search("reduction .*NOT COVERED: replicas_every is None", result.said)
    for site in ("forward", "backward", "weights", "optimizer_state", "optimizer", "batch", "rng"):
        assert re.search(rf"{site} .*NOT COVERED", result.said), site


def _with_a_hook_of_its_own(rank: int, size: int) -> tuple[str, list[str]]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model, _, optimizer = build(Job(), rank)
    model.register_comm_hook(torch.distributed.group.WORLD, allreduce_hook)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = guard_of(Job(), rank, model, optimizer)
        found = [guard.step(batch_of(rank, step)).verdict for step in range(5)]
        counts = guard.counts
        guard.close()
    assert found == [None] * 5 and counts["audit"] >= 2
    return said.getvalue(), [row.blind for row in guard.coverage()]


def test_a_hook_of_the_users_own_is_said(pool3: RankPool) -> None:
    said, blind = pool3.results(_with_a_hook_of_its_own)[0]
    assert "already has a communication hook" in said
    assert any("REPAIR is not possible" in text for text in blind)


def _overdue(rank: int, size: int, check: str) -> str:
    """The schedule loses a check: its turn never comes again."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config={"audit_every": 3, "replicas_every": 3}), rank, model, optimizer)
        try:
            for step in range(12):
                if step == 5:
                    due = guard._schedule.due
                    guard._schedule.due = lambda *a, due=due, **k: due(*a, **k) - {check}  # type: ignore[method-assign]
                guard.step(batch_of(rank, step))
        except (RuntimeError, unsilent.RankFailure) as error:  # all ranks raise, and some hear of it before they do
            return f"{guard.steps}: {error}"
        finally:
            guard.close()
    return "nobody noticed"


@pytest.mark.parametrize("check", ["audit", "replicas"])
def test_a_check_that_is_on_and_does_not_run_is_an_error(pool3: RankPool, check: str) -> None:
    for told in pool3.results(_overdue, check):
        assert f"check {check} last ran at step" in told and int(told.split(":")[0]) <= 12


def test_counts_on_disk_say_how_often_each_check_ran(pool3: RankPool, tmp_path: Path) -> None:
    config = {"directory": str(tmp_path), "audit_every": 4}
    results = pool3.results(train, Job(steps=8, config=config))
    finished = [e for e in read(tmp_path).events if e.kind == "finished"]
    assert len(finished) == 1
    tally = finished[0].fields["tally"]
    assert tally["finite"]["ran"] == 3 * 8 and tally["finite"]["alarms"] == 0
    # Calibration at step 1, then steps 3 and 7: every rank audits one other.
    assert tally["audit"]["ran"] == 3 * 3
    assert results[0].counts["finite"] == 8 and results[0].counts["audit"] == 3
    kinds = [e.kind for e in read(tmp_path).events]
    assert kinds[:2] == ["run_started", "coverage"] and "calibration" in kinds


def test_nothing_is_ever_called_verified_correct() -> None:
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            if re.search(r"verified[ -]correct|proven correct|guaranteed correct", line, re.IGNORECASE):
                assert "never" in line.lower() or "nothing" in line.lower(), f"{path}: {line}"


def test_a_single_process_says_what_it_cannot_see() -> None:
    model, _, optimizer = build(Job(ddp=None), 0)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = unsilent.Guard(model, optimizer, loss_of(False, 0), config=unsilent.GuardConfig(node="here"))
        guard.close()
    assert "no other rank can audit: a device that repeats its error is not seen" in said.getvalue()
