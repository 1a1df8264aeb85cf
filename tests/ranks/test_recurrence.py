"""What a step was blamed on before a restart counts after it, on all ranks alike."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.field.harness import EVERY_STEP, Case, Result, Session, run
from unsilent.events import read
from unsilent.lab.pool import RankPool
from unsilent.ledger import read_directory, strike_history
from unsilent.records import Kind

WRONG = {"site": "backward", "target": "2", "pattern": "scale", "factor": 2.0}


def save_or_load(session: Session, step: int, root: str, load: bool) -> None:
    assert session.guard is not None
    if load and step == 0:
        assert session.guard.load(root) == 2
    elif not load and step == 2:
        session.guard.save(root)


def start(pool: RankPool, directory: Path, rank: int, *, load: bool) -> list[Result]:
    """One start of the job: step 4 goes wrong on ``rank``; the first start saves after two updates, others resume there."""
    config = {**EVERY_STEP, "save_every": 2, "directory": str(directory), "ledger": str(directory / "ledger")}
    case = Case(
        before_step=partial(save_or_load, root=str(directory / "checkpoints"), load=load),
        config=config,
        fault={**WRONG, "rank": rank, "step": 2 if load else 4},
        steps=4 if load else 6,
    )
    return run(pool, case)


def test_the_same_step_failing_on_whatever_device_is_software_and_nobody_is_blamed(
    pool: RankPool, tmp_path: Path
) -> None:
    for result in start(pool, tmp_path, 1, load=False):
        assert result.only.verdict.kind is Kind.TRANSIENT and result.only.ranks == [1] and result.error is None
    for result in start(pool, tmp_path, 2, load=True):
        found = result.only.verdict
        assert found.kind is Kind.SOFTWARE and found.step == 4 and found.suspects == (), result.said
        assert "step 4 was blamed on node1 cpu:0 when it ran before, and now on node2 cpu:0" in found.reason
        assert getattr(result.error, "exit_code", None) == 10
        assert result.weights[-1] == result.weights[2], "something was updated"
    runs = read_directory(tmp_path / "ledger").runs
    assert [one.exit_code for one in runs] == [0, 10] and strike_history(runs) == {}
    assert [e.fields["verdict"]["kind"] for e in read(tmp_path).events if e.kind == "verdict"] == [
        "TRANSIENT", "SOFTWARE"
    ]  # fmt: skip


def test_the_same_device_at_the_same_step_stays_blamed(pool3: RankPool, tmp_path: Path) -> None:
    start(pool3, tmp_path, 1, load=False)
    for result in start(pool3, tmp_path, 1, load=True):
        assert result.only.verdict.kind is Kind.TRANSIENT and result.only.ranks == [1] and result.error is None
        assert result.only.action == "REPAIR"
