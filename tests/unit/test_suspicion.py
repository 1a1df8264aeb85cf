"""What a run holds against its devices: from the ledger, from its own verdicts, and from what its steps were blamed on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unsilent.events import EventLog
from unsilent.ledger import RunLedger
from unsilent.records import Kind, Place, Site, Suspect, Verdict
from unsilent.recurrence import COMES_BACK, HALF_LIFE_STEPS, REMEMBERED
from unsilent.suspicion import Suspicion

T, P, S, I = Kind.TRANSIENT, Kind.PERSISTENT, Kind.SOFTWARE, Kind.INCONCLUSIVE  # noqa: E741
PLACES = tuple(Place(rank=rank, node=f"n{rank}", device="gpu-x") for rank in range(3))


class Journal:
    run_id = "now"

    def __init__(self) -> None:
        self.said: list[str] = []

    def write(self, kind: str, step: int, **fields: Any) -> None:
        assert kind == "notice"

    def say(self, text: str) -> None:
        self.said.append(text)


def verdict(kind: Kind, rank: int, step: int, site: Site = Site.GRADIENT) -> Verdict:
    suspects = (Suspect(rank=rank, node=f"n{rank}", device="gpu-x"),)
    return Verdict(kind=kind, site=site, step=step, reason="bits differ", check="audit", suspects=suspects)


class Run:
    """A suspicion as the guard uses it, of a world that is this process."""

    def __init__(self, *, directory: Path | None = None, ledger: Path | None = None) -> None:
        world: Any = SimpleNamespace(rank=0, places=PLACES, gather=lambda value, *, step, tag: [value])
        self.journal = Journal()
        journal: Any = self.journal
        self.suspicion = Suspicion(world, journal, directory=directory, ledger=ledger)
        self.suspicion.recall()

    def step(self, step: int, *found: Verdict, acted_on: bool = True) -> list[Kind]:
        """Run one step; the kinds of what was found, as they look in hindsight."""
        self.suspicion.begin_step(step)
        judged = [self.suspicion.in_hindsight(one) for one in found]
        for one in judged:
            self.suspicion.strike(one, step, acted_on=acted_on)
        return [one.kind for one in judged]

    def held(self, rank: int, before: int) -> float:
        return self.suspicion.strikes(verdict(P, rank, before), before=before)


def earlier_run(ledger: Path, *found: Verdict, steps: int = 10, name: str = "before") -> None:
    log = EventLog(None, rank=0, run_id=name)
    kept = RunLedger(ledger, run_id=name, say=print)
    kept.note(log.write("run_started", 0, places=[vars(place) for place in PLACES], mode="act"))
    for one in found:
        kept.worked = one.step + 1
        kept.note(log.write("verdict", one.step, verdict=one, action="REPAIR", would="REPAIR"))
    kept.worked = steps
    kept.note(log.write("finished", steps, exit_code=0, tally={}))
    kept.close(steps)


# ---- within a run ----------------------------------------------------------------------------------------------------


def test_a_persistent_verdict_counts_from_the_next_step_on_and_the_device_is_watched() -> None:
    run = Run()
    assert run.step(3, verdict(P, 1, 3)) == [P]
    assert run.held(1, 3) == 0.0 and run.suspicion.struck == {1}
    run.step(4)
    assert run.held(1, 4) > 0.99 and run.held(2, 4) == 0.0


def test_the_third_transient_on_one_device_comes_back() -> None:
    run = Run()
    kinds = [run.step(step, verdict(T, 1, step))[0] for step in (3, 40, 77)]
    assert kinds == [T, T, P] and run.suspicion.struck == {1}
    spread = Run()
    assert [spread.step(step, verdict(T, step % 3, step))[0] for step in (3, 4, 5)] == [T, T, T]
    assert not spread.suspicion.struck


def test_transients_far_apart_do_not_add_up_and_a_watch_ends() -> None:
    run = Run()
    for step in (0, 9_000, 18_000):
        run.suspicion._step = step - 1  # as if all steps between had been run
        assert run.step(step, verdict(T, 1, step)) == [T]
    watched = Run()
    watched.step(0, verdict(P, 1, 0))
    watched.suspicion._step = HALF_LIFE_STEPS - 1
    assert watched.held(1, HALF_LIFE_STEPS - 1) >= COMES_BACK and watched.suspicion.struck
    watched.step(HALF_LIFE_STEPS)
    assert not watched.suspicion.struck


def test_two_verdicts_on_one_device_in_one_step_are_one_strike() -> None:
    run = Run()
    run.step(3, verdict(T, 1, 3, Site.WEIGHTS), verdict(T, 1, 3, Site.OPTIMIZER_STATE))
    assert run.step(4, verdict(T, 1, 4)) == [T]


def test_a_replica_that_nobody_put_right_is_one_strike_however_many_votes_see_it() -> None:
    run = Run()
    for step in range(5):
        assert run.step(step, verdict(T, 1, step, Site.WEIGHTS), acted_on=False) == [T]
    assert not run.suspicion.struck


def test_verdicts_that_blame_no_device_are_no_strikes() -> None:
    run = Run()
    run.step(3, verdict(I, 1, 3), verdict(S, 1, 3))
    batch = Verdict(kind=S, site=Site.GRADIENT, step=4, reason="", check="audit", suspects=(Suspect(rank=1, path="b"),))
    run.step(4, batch)
    assert not run.suspicion.struck and run.held(1, 9) == 0.0


# ---- going back ------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_on_another_device_after_going_back_is_software() -> None:
    run = Run()
    run.step(7, verdict(P, 1, 7))
    run.step(5)  # a checkpoint was loaded
    run.step(6)
    assert run.step(7, verdict(P, 2, 7)) == [S]
    assert run.held(1, 8) == 0.0 and not run.suspicion.struck  # nor was it the first one


def test_a_rollback_within_the_step_counts_as_going_back() -> None:
    run = Run()
    run.step(7, verdict(P, 1, 7))
    assert run.suspicion.in_hindsight(verdict(T, 2, 7)).kind is T  # the same look
    run.suspicion.ran_again()
    assert run.suspicion.in_hindsight(verdict(P, 1, 7)).kind is P
    assert run.held(1, 7) == 0.0  # it is the same verdict still
    assert run.suspicion.in_hindsight(verdict(T, 2, 7)).kind is S


def test_the_same_device_at_the_same_step_after_going_back_has_come_back() -> None:
    run = Run()
    run.step(7, verdict(T, 1, 7))
    run.step(6)
    assert run.step(7, verdict(T, 1, 7)) == [T] and run.held(1, 8) > 0.6
    run.step(2)
    assert run.held(1, 2) > 0.6  # what it did at steps that are still to come is not forgotten


def test_other_steps_on_other_devices_are_no_common_cause() -> None:
    run = Run()
    run.step(7, verdict(P, 1, 7))
    run.step(5)
    assert run.step(6, verdict(P, 2, 6)) == [P]


# ---- from before the run ---------------------------------------------------------------------------------------------


def test_a_strike_of_an_earlier_run_counts_and_is_said(tmp_path: Path) -> None:
    earlier_run(tmp_path, verdict(P, 2, 4))
    run = Run(ledger=tmp_path)
    assert run.suspicion.struck == {2} and run.held(2, 0) > 0.99 and run.held(1, 0) == 0.0
    assert run.journal.said == ["n2 gpu-x (rank 2) comes with 1.00 strikes, enough to be watched"]
    assert run.step(0, verdict(T, 2, 0)) == [P]


def test_one_transient_of_an_earlier_run_is_said_and_nobody_is_watched(tmp_path: Path) -> None:
    earlier_run(tmp_path, verdict(T, 2, 4))
    run = Run(ledger=tmp_path)
    assert not run.suspicion.struck and run.journal.said == ["n2 gpu-x (rank 2) comes with 0.33 strikes"]


def test_strikes_of_earlier_runs_survive_a_resume_far_into_the_run(tmp_path: Path) -> None:
    earlier_run(tmp_path, verdict(P, 2, 4))
    run = Run(ledger=tmp_path)
    run.step(1_000_000)
    assert run.held(2, 1_000_000) > 0.99 and run.suspicion.struck == {2}


def test_the_runs_own_file_and_other_devices_do_not_count(tmp_path: Path) -> None:
    earlier_run(tmp_path, verdict(P, 2, 4), name="now")
    stranger = Verdict(kind=P, site=Site.GRADIENT, step=3, reason="", check="audit",
                       suspects=(Suspect(rank=2, node="n2", device="gpu-y"),))  # fmt: skip
    earlier_run(tmp_path, stranger, name="other")
    run = Run(ledger=tmp_path)
    assert not run.suspicion.struck and run.journal.said == []


def test_a_ledger_that_is_damaged_or_no_directory_costs_a_message_and_no_training(tmp_path: Path) -> None:
    earlier_run(tmp_path / "ledger", verdict(P, 2, 4))
    (tmp_path / "ledger" / "run-bad.jsonl").write_bytes(b"\xff\xfe\n" * 9)
    run = Run(ledger=tmp_path / "ledger")
    assert run.suspicion.struck == {2}
    assert run.journal.said[0] == "ledger: run-bad.jsonl, line 1: left out, it is not text"
    assert "6 more lines were left out" in run.journal.said[3] and len(run.journal.said) == 5
    (tmp_path / "file").write_text("")
    none = Run(ledger=tmp_path / "file" / "ledger")
    assert not none.suspicion.struck
    assert len(none.journal.said) == 1 and "nothing is known of earlier runs" in none.journal.said[0]


def test_very_old_files_are_forgotten(tmp_path: Path) -> None:
    earlier_run(tmp_path, verdict(P, 2, 4))
    os.utime(tmp_path / "run-before.jsonl", (1_000, 1_000))
    assert not Run(ledger=tmp_path).suspicion.struck


def test_after_a_restart_the_runs_log_tells_what_a_step_was_blamed_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0, run_id="first")
    log.write("verdict", 7, verdict=verdict(P, 1, 7))
    log.write("verdict", 8, verdict=verdict(I, 1, 8))
    log.close()
    fresh = Run(directory=tmp_path)  # nothing was loaded: another run in the same directory
    assert fresh.step(7, verdict(P, 2, 7)) == [P]
    run = Run(directory=tmp_path)
    run.suspicion.resumed()
    run.suspicion.begin_step(5)
    assert run.step(7, verdict(P, 2, 7)) == [S]
    assert run.step(8, verdict(T, 2, 8)) == [T]
    missing = Run(directory=tmp_path / "none")
    missing.suspicion.resumed()
    assert "is not known" in missing.journal.said[0]


def test_a_device_that_is_wrong_in_every_step_costs_neither_memory_nor_time() -> None:
    run = Run()
    for step in range(6_000):
        run.step(step, verdict(P, 1, step))
    assert len(run.suspicion._own[1]) == REMEMBERED and len(run.suspicion._blamed) <= 4096
    assert run.held(1, 6_000) == 1.0
