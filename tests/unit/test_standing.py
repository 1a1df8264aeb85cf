"""What the run remembers of trust: which checkpoints an audit certifies, which ones a strike takes, what a load clears."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from unsilent.checkpoint import Certificate, CheckpointStore, Status, certify, checkpoints_in, files, may_publish
from unsilent.inventory import Inventory
from unsilent.records import Kind, Site, Suspect, Verdict
from unsilent.standing import Standing


class Journal:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, step: int, **fields: Any) -> None:
        self.events.append((kind, fields))

    def say(self, text: str) -> None:
        return

    def audit_passed(self) -> None:
        return

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [fields for one, fields in self.events if one == kind]


class Run:
    """One process alone: a standing, and a model of one layer to save."""

    def __init__(self, root: Path, *, observe: bool = False) -> None:
        model = nn.Linear(2, 2)
        self.inventory = Inventory(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.root, self.journal = root, Journal()
        world: Any = SimpleNamespace(group=None, rank=0, size=1)
        self.standing = Standing(world, self.journal, directory=None, keep=9, observe=observe)  # type: ignore[arg-type]

    def save(self, steps: int, where: str = "a") -> None:
        store = self.standing.store(self.root / where)
        status = self.standing.status_of_next(steps)
        path = store.save(self.inventory, steps=steps, status=status)
        self.standing.saved(store, steps, path, store.status_of(path), alike=True)

    def load(self, where: str = "a") -> int:
        store = self.standing.store(self.root / where)
        loaded = store.load(self.inventory)
        self.standing.begin_anew(loaded.steps, store=store, path=loaded.path, status=loaded.status)
        return loaded.steps

    def status(self, where: str = "a") -> dict[int, str]:
        return {s.steps: s.status.value for s in checkpoints_in(self.root / where) if s.status is not None}


def persistent(step: int, rank: int = 0) -> Verdict:
    return Verdict(
        kind=Kind.PERSISTENT, site=Site.FORWARD, step=step, check="audit", reason="it comes back",
        suspects=(Suspect(rank=rank, node="n0"),),
    )  # fmt: skip


def certificate(steps: int) -> Certificate:
    return certify({}, steps=steps)


def test_a_strike_soon_after_a_restart_leaves_what_earlier_audits_vouch_for(tmp_path):
    first = Run(tmp_path)
    for step in (1, 3):
        first.standing.audited(step)
        first.save(step + 1)
    again = Run(tmp_path)
    assert again.load() == 4
    again.standing.strike(persistent(5), 5)
    assert again.status() == {2: "certified", 4: "certified"}
    assert again.standing.resume_from() == str(tmp_path / "a" / "step-00000004")


def test_after_a_candidate_was_loaded_the_certified_ones_before_it_stay(tmp_path):
    first = Run(tmp_path)
    first.standing.audited(3)
    first.save(4)
    first.save(6)
    again = Run(tmp_path)
    assert again.load() == 6
    again.standing.strike(persistent(7), 7)
    assert again.status() == {4: "certified", 6: "distrusted"}


def test_an_audit_certifies_the_candidates_that_it_covers_and_no_others(tmp_path):
    old = Run(tmp_path)
    old.save(4, "b")  # left by another run
    run = Run(tmp_path)
    run.standing.store(tmp_path / "b")
    run.save(4, "a")
    run.save(9, "a")
    run.standing.audited(5)
    assert run.status("a") == {4: "certified", 9: "candidate"} and run.status("b") == {4: "candidate"}
    assert [e["path"] for e in run.journal.of("checkpoint")] == [str(tmp_path / "a" / "step-00000004")]


def test_going_back_forgets_what_was_found_out_about_the_state_before(tmp_path):
    run = Run(tmp_path)
    run.standing.audited(1)
    run.save(2)
    run.save(4)
    run.standing.voted(4, alike=True)
    run.standing.strike(persistent(5), 5)
    assert run.standing.certifies_nothing and run.status() == {2: "certified", 4: "distrusted"}
    assert run.load() == 2 and not run.standing.certifies_nothing
    assert run.standing.trust().clean_replicas == frozenset() and run.standing.trust().doubted_after is None
    run.save(3)
    run.standing.begin_anew(2)  # once more, by the user's own means: the candidate is of another past
    run.standing.audited(3)
    assert run.status()[3] == "candidate"


def test_yes_is_said_of_no_state_that_nobody_voted_on(tmp_path):
    standing = Run(tmp_path).standing
    standing.voted(3, alike=True)  # before the update of step 3: it is over the state after 3 updates
    standing.audited(3)
    assert [may_publish(certificate(n), standing.trust()) for n in (2, 3, 4)] == ["wait", "yes", "wait"]
    standing.voted(4, alike=True)
    assert may_publish(certificate(4), standing.trust()) == "yes"
    standing.voted(2, alike=False)
    standing.voted(2, alike=True)
    assert may_publish(certificate(2), standing.trust()) == "wait"
    for steps in range(5, 10_000):
        standing.voted(steps, alike=True)
    assert len(standing.trust().clean_replicas) < 5000


def test_what_a_strike_took_is_not_given_back_by_later_audits(tmp_path):
    standing = Run(tmp_path).standing
    for steps in (4, 6):
        standing.voted(steps, alike=True)
    standing.audited(3)
    standing.strike(persistent(7), 7)
    standing.audited(8)
    assert [may_publish(certificate(n), standing.trust()) for n in (4, 6, 9)] == ["yes", "no", "no"]


def test_observe_mode_marks_nothing_and_says_what_it_would_have_marked(tmp_path):
    run = Run(tmp_path, observe=True)
    run.standing.audited(3)
    for steps in (4, 6):
        run.save(steps)
    run.standing.strike(persistent(7), 7)
    run.standing.strike(persistent(8), 8)
    assert not run.standing.watches_a_device
    run.save(9)
    run.standing.audited(9)
    assert run.status() == {4: "certified", 6: "candidate", 9: "candidate"}
    assert not run.journal.of("trust_withdrawn")
    (told,) = [e["text"] for e in run.journal.of("notice")]
    assert "act mode would withdraw its trust from checkpoints [6]" in told
    assert run.load() == 9 and run.standing.certifies_nothing  # a doubted state stays one


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(5, "Input/output error")])
def test_a_disk_that_fails_ends_no_step(tmp_path, error):
    run = Run(tmp_path)
    for steps in (2, 4):
        run.save(steps)
    with mock.patch.object(files, "write_certificate", side_effect=error):
        run.standing.audited(2)
        assert run.status() == {2: "candidate", 4: "candidate"}
        assert "could not be called certified" in run.journal.of("notice")[-1]["text"]
    run.standing.audited(2)  # tried again
    assert run.status() == {2: "certified", 4: "candidate"}
    with mock.patch.object(files, "write_certificate", side_effect=error):
        run.standing.strike(persistent(5), 5)
    assert "could not be marked as distrusted" in run.journal.of("notice")[-1]["text"]
    run.standing.certifies_nothing = ""
    run.standing.audited(6)
    assert run.status()[4] == "candidate"  # what lost its trust is never promoted
    with mock.patch.object(CheckpointStore, "candidates", side_effect=error):
        run.standing.strike(persistent(7), 7)
        assert run.standing.resume_from() is None
    assert Status.CERTIFIED.value in run.status().values()


# ---- after a rollback ------------------------------------------------------------------------------------------------


def struck(run: Run, step: int) -> None:
    """Rank 0's device has come back, as a verdict at ``step`` says."""
    verdict = Verdict(
        kind=Kind.PERSISTENT, site=Site.FORWARD, step=step, check="audit", reason="", suspects=(Suspect(rank=0, device="d"),)
    )  # fmt: skip
    run.standing.suspicion.begin_step(step)
    run.standing.strike(verdict, step)


def test_steps_run_again_are_not_audited_whatever_was_before(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.standing.audited(9)
    assert run.standing.status_of_next(10) is Status.CERTIFIED
    run.standing.rolled_back(6, 10, by_others=())
    assert run.standing.status_of_next(10) is Status.CANDIDATE
    assert run.standing.trust().clean_audits == (5,) and run.standing.vouched == 5


def test_what_others_have_run_again_vouches_and_takes_the_doubt_away(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.standing.audited(3)
    struck(run, 7)
    assert run.standing.certifies_nothing
    run.standing.rolled_back(4, 7, by_others={0})
    assert run.standing.vouched == 6 and not run.standing.certifies_nothing
    run.standing.mended(7)
    assert run.standing.vouched == 7


@pytest.mark.parametrize(("start", "by_others"), [(6, {0}), (4, set())], ids=["not far enough", "not by others"])
def test_else_it_vouches_for_nothing(tmp_path: Path, start: int, by_others: set[int]) -> None:
    run = Run(tmp_path)
    run.standing.audited(3)
    struck(run, 7)
    run.standing.rolled_back(start, 7, by_others=by_others)
    assert run.standing.vouched == 3 and run.standing.certifies_nothing
    run.standing.mended(7)
    assert run.standing.vouched == 3
