"""F17: loss spikes in several jobs, and one node was common to all of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.field.harness import EVERY_STEP, Case, Result, run
from unsilent.lab.pool import RankPool
from unsilent.ledger import build, read_database, read_directory, strike_history
from unsilent.ledger.history import host_records, precision
from unsilent.records import Kind
from unsilent.recurrence import COMES_BACK, strikes

JOBS = 4


def job(pool: RankPool, ledger: Path, number: int, **changes: object) -> list[Result]:
    """One of several jobs on the same nodes: rank 2 adds two and two wrongly now and then, each time otherwise."""
    fault = {"site": "forward", "target": "2", "pattern": "random_bits", "rank": 2, "probability": 0.5, "seed": number}
    case = Case(config={**EVERY_STEP, "ledger": str(ledger)}, fault=fault, steps=6)
    return run(pool, case, **changes)


def test_rank_2_and_its_host_are_named_each_time_and_the_ledger_shows_the_host_over_runs(
    pool: RankPool, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    clean = run(pool, Case(guarded=False, steps=6))
    for number in range(JOBS):
        results = job(pool, ledger, number)
        for result, plain in zip(results, clean, strict=True):
            assert result.error is None and result.bits == plain.bits, result.said
            assert result.found, f"job {number}: nothing was found"
            assert {tuple(found.ranks) for found in result.found} == {(2,)}
            assert {suspect.node for found in result.found for suspect in found.verdict.suspects} == {"node2"}
        comes_with = f"node2 cpu:0 (rank 2) comes with {number}."
        assert (comes_with in results[0].said) is (number > 0), results[0].said

    contents = read_directory(ledger)
    assert len(contents.runs) == JOBS and contents.problems == ()
    worst, *others = host_records(contents.runs, time.time())
    assert (worst.node, worst.named_in, worst.runs, worst.worked) == ("node2", JOBS, JOBS, JOBS * 6)
    assert JOBS - 1 < worst.strikes <= JOBS
    assert len(others) == pool.size - 1 and not any(other.named_in or other.strikes for other in others)
    (audit,) = precision(contents.runs)
    assert (audit.check, audit.named, audit.confirmed, audit.refuted) == ("audit", JOBS, JOBS, 0)
    # One device counts once, in however many jobs.
    assert audit.devices == 1 and audit.lower_bound == pytest.approx(0.05)

    build(ledger, tmp_path / "ledger.sqlite")
    assert read_database(tmp_path / "ledger.sqlite") == contents


def test_a_device_with_an_earlier_strike_is_audited_every_step_and_taken_out_at_its_next_verdict(
    pool3: RankPool, tmp_path: Path
) -> None:
    """Without the ledger a second verdict would be needed, and the audit of this configuration never comes."""
    ledger, stuck = tmp_path / "ledger", {"pattern": "stuck_lane", "add": 0.01, "rank": 2, "from_step": 3}
    fault = {"site": "forward", "target": "2", **stuck}
    first = run(pool3, Case(config={**EVERY_STEP, "ledger": str(ledger)}, fault=fault, steps=4))
    assert [(found.step, found.action, found.verdict.kind) for found in first[0].found] == [
        (3, "REPAIR", Kind.PERSISTENT)
    ]
    late = {"quarantine": "auto", "audit_every": 1000, "directory": str(tmp_path / "run")}
    for result in run(pool3, Case(config={**late, "ledger": str(ledger)}, fault=fault, steps=8)):
        assert result.only.step == 3 and result.only.verdict.suspects[0].node == "node2"
        assert getattr(result.error, "exit_code", None) == 11, result.said
    for result in run(pool3, Case(config=late, fault=fault, steps=8)):
        assert result.found == [] and result.error is None


def test_healthy_jobs_leave_nothing_against_anybody(pool3: RankPool, tmp_path: Path) -> None:
    for number in range(2):
        results = job(pool3, tmp_path, number, fault=None)
        assert all(result.found == [] and result.error is None for result in results)
    runs = read_directory(tmp_path).runs
    assert [(one.worked, one.passed, one.exit_code, one.found) for one in runs] == [(6, 6, 0, [])] * 2
    assert strike_history(runs) == {} and precision(runs) == []


def test_a_marginal_device_is_persistent_at_its_third_transient(pool3: RankPool, tmp_path: Path) -> None:
    """One wrong step in each of three jobs: none of them sees more than what looks like a passing cosmic ray."""
    kinds: list[Kind] = []
    for step in (2, 4, 3):
        fault = {"site": "backward", "target": "2", "pattern": "scale", "factor": 2.0, "rank": 1, "step": step}
        case = Case(config={**EVERY_STEP, "ledger": str(tmp_path)}, fault=fault)
        results = run(pool3, case)
        assert all(result.only == results[0].only and result.only.action == "REPAIR" for result in results)
        assert results[0].only.ranks == [1]
        kinds.append(results[0].only.verdict.kind)
    assert kinds == [Kind.TRANSIENT, Kind.TRANSIENT, Kind.PERSISTENT]
    ((device, history),) = strike_history(read_directory(tmp_path).runs).items()
    assert device.node == "node1" and strikes(history, 0, time.time()) > COMES_BACK


def test_a_ledger_that_cannot_be_written_or_read_costs_a_message_and_no_training(
    pool3: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    results = job(pool3, tmp_path / "file" / "ledger", 0, fault=None)
    plain = run(pool3, Case(guarded=False, steps=6))
    assert [result.bits for result in results] == [result.bits for result in plain]
    assert all(result.error is None and result.found == [] for result in results)
    assert results[0].said.count("the ledger") == 2 and "training goes on" in results[0].said
    assert not any("ledger" in result.said for result in results[1:])
