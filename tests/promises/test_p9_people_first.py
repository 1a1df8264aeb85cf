"""P9: observe changes nothing; act repairs; a node is taken out when a person has said so, or where ``auto`` is chosen."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unsilent
from tests.promises.job import Job, batch_of, build, guard_of, plain_step, state_parts, with_and_without_guard
from unsilent.checkpoint import Status, checkpoints_in, verify
from unsilent.events import approve, excluded_nodes, read
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool
from unsilent.ledger import note_approval, read_directory
from unsilent.ledger.history import precision

STUCK = {"pattern": "stuck_lane", "add": 0.01, "every": 16}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "forward": (
        {"site": "forward", "target": "layers.2", "pattern": "scale", "factor": 2.0, "rank": 1, "step": 3}, "REPAIR",
    ),
    "persistent": ({"site": "forward", "target": "layers.2", **STUCK, "rank": 1, "from_step": 3}, "ROLLBACK"),
    "weight": (
        {"site": "weight", "target": "layers.2.weight", "pattern": "bit_flip", "bit": 20, "rank": 1, "step": 3}, "HEAL",
    ),
    "NaN": ({"site": "reduction", "pattern": "nan", "step": 3}, "RECOMPUTE"),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "would"), FAULTS.values(), ids=FAULTS.keys())
def test_observe_records_what_it_would_do_and_changes_no_bit(
    pool3: RankPool, tmp_path: Path, fault: dict[str, Any], would: str
) -> None:
    """The twin is an unguarded run with the same fault. A NaN of the reduction needs the hook, so it has no twin."""
    config = {"mode": "observe", "directory": str(tmp_path), "replicas_every": 1}
    for observed, plain in pool3.results(with_and_without_guard, Job(fault=fault, config=config)):
        assert observed.found and {action for _, action, _, _ in observed.found} == {"CONTINUE"}
        assert observed.error == ""
        if fault["site"] != "reduction":
            assert observed.parts == plain.parts and observed.losses == plain.losses
    verdicts = [e for e in read(tmp_path).events if e.kind == "verdict"]
    assert verdicts[0].fields["would"] == would and verdicts[0].fields["action"] == "CONTINUE"
    assert excluded_nodes(tmp_path) == {} and not [e for e in read(tmp_path).events if e.kind == "action"]
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 0


def _stuck(rank: int, size: int, directory: str, quarantine: str, approve_at: int) -> dict[str, Any]:
    """A lane of rank 2 is stuck from step 3, an audit step, on; what it did in step 2 nobody has looked at."""
    model, inner, optimizer = build(Job(), rank)
    config = {"directory": directory, "quarantine": quarantine, "ledger": f"{directory}/ledger"}
    actions: list[tuple[int, str]] = []
    error: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config=config), rank, model, optimizer)
        fault = Fault(site="forward", target="layers.2", **STUCK, rank=2, from_step=3)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        try:
            for step in range(12):
                if step == approve_at and rank == 0:
                    approve(directory, "n2")
                    assert note_approval(directory, "n2") == ""
                injector.begin_step(step)
                outcome = guard.step(batch_of(rank, step))
                if outcome.verdict is not None:
                    actions.append((step, outcome.action.value))
                    assert outcome.verdict.kind is unsilent.Kind.PERSISTENT
        except unsilent.Quarantine as raised:
            error = {"code": raised.exit_code, "node": raised.verdict.suspects[0].node, "step": raised.verdict.step}
        reached, parts = guard.steps, state_parts(model, optimizer)
        injector.close()
        guard.close()
        twin, _, other = build(Job(), rank)
        for step in range(reached):
            plain_step(Job(), rank, step, twin, other, scaler=None, scheduler=None, clip_norm=None)
        clean = state_parts(twin, other)
    same = [part for part in ("weights", "moments") if parts[part] == clean[part]]
    return {"actions": actions, "error": error, "steps": reached, "same": same}


def test_ask_repairs_every_step_until_somebody_approves(pool3: RankPool, tmp_path: Path) -> None:
    for told in pool3.results(_stuck, str(tmp_path), "ask", 8):
        assert told["actions"] == [(3, "ROLLBACK")] + [(step, "REPAIR") for step in range(4, 8)]
        assert told["error"] == {"code": 11, "node": "n2", "step": 8}
        assert told["steps"] == 8 and told["same"] == ["weights", "moments"]
    assert set(excluded_nodes(tmp_path)) == {"n2"}
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["exit_code"] == 11 and record["verdict"]["suspects"][0]["node"] == "n2"
    kinds = [e.kind for e in read(tmp_path).events]
    assert kinds.count("ask") == 1 and kinds.count("quarantine") == 1
    (so_far,) = precision(read_directory(tmp_path / "ledger").runs)  # with its count, and a bound that this supports
    assert (so_far.check, so_far.named, so_far.by) == ("audit", 1, {"person": 1})
    assert so_far.lower_bound == pytest.approx(0.05)


def test_ask_without_an_answer_goes_on_for_ever(pool3: RankPool, tmp_path: Path) -> None:
    for told in pool3.results(_stuck, str(tmp_path), "ask", 99):
        assert told["actions"] == [(3, "ROLLBACK")] + [(step, "REPAIR") for step in range(4, 12)]
        assert told["error"] == {} and told["steps"] == 12 and told["same"] == ["weights", "moments"]
    assert excluded_nodes(tmp_path) == {}


def test_auto_takes_the_node_out_at_the_second_verdict(pool3: RankPool, tmp_path: Path) -> None:
    for told in pool3.results(_stuck, str(tmp_path), "auto", 99):
        assert told["actions"] == [(3, "ROLLBACK")]
        assert told["error"] == {"code": 11, "node": "n2", "step": 4}
        assert told["same"] == ["weights", "moments"]
    assert set(excluded_nodes(tmp_path)) == {"n2"}


def _observed_with_saving(rank: int, size: int, directory: str) -> dict[str, Any]:
    """A lane of rank 2 is stuck from step 5 on; checkpoints at 4, 6 and 9; audits are due at steps 3, 7 and 11."""
    model, inner, optimizer = build(Job(), rank)
    config = {"mode": "observe", "audit_every": 4, "directory": directory, "keep_checkpoints": 9}
    fault = Fault(site="forward", target="layers.2", **STUCK, rank=2, from_step=5)
    audits: list[int] = []
    kinds: set[str] = set()
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config=config), rank, model, optimizer)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        for step in range(12):
            injector.begin_step(step)
            outcome = guard.step(batch_of(rank, step))
            audits += [step] if "audit" in guard.last_due else []
            kinds |= {outcome.verdict.kind.value} if outcome.verdict is not None else set()
            if step in (3, 5, 8):
                before = state_parts(model, optimizer)
                assert guard.save(Path(directory) / "checkpoints") is not None
                assert state_parts(model, optimizer) == before
        injector.close()
        guard.close()
    return {"audits": audits, "kinds": kinds}


def test_observe_withdraws_no_trust_on_disk_and_audits_no_step_that_was_not_due(
    pool3: RankPool, tmp_path: Path
) -> None:
    for told in pool3.results(_observed_with_saving, str(tmp_path)):
        assert told == {"audits": [1, 3, 7, 11], "kinds": {"PERSISTENT"}}  # step 1 calibrates
    saved = checkpoints_in(tmp_path / "checkpoints")
    assert {s.steps: s.status for s in saved} == {
        4: Status.CERTIFIED, 6: Status.CANDIDATE, 9: Status.CANDIDATE,
    }  # fmt: skip
    assert [p for s in saved for p in verify(s.path)] == []
    events = read(tmp_path).events
    assert not [e for e in events if e.kind in ("trust_withdrawn", "checkpoint_refused")]
    would = [e.fields["text"] for e in events if e.kind == "notice" and "act mode would withdraw" in e.fields["text"]]
    assert len(would) == 1 and "checkpoints [6]" in would[0]


def _observed_flip_before_a_save(rank: int, size: int, directory: str) -> dict[str, Any]:
    """One bit of a weight of rank 1 flips right before the checkpoint of step 4; a clean audit may follow at step 5."""
    model, inner, optimizer = build(Job(), rank)
    config = {"mode": "observe", "directory": directory, "save_every": 4}
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config=config), rank, model, optimizer)
        for step in range(4):
            guard.step(batch_of(rank, step))
        right = state_parts(model, optimizer)
        if rank == 1:
            with torch.no_grad():
                inner.layers[2].weight.view(torch.int32)[0, 0] ^= 1 << 20
        before = state_parts(model, optimizer)
        path = guard.save(Path(directory) / "checkpoints")
        certificate = guard.certify({"model": model.state_dict()})
        unchanged = state_parts(model, optimizer) == before
        for step in range(4, 8):
            guard.step(batch_of(rank, step))
        published = guard.may_publish(certificate)
        loaded = guard.load(Path(directory) / "checkpoints")
        same = state_parts(model, optimizer)["weights"] == right["weights"]
        guard.close()
    return {"path": path is not None, "unchanged": unchanged, "publish": published, "loaded": loaded, "same": same}


def test_observe_saves_what_a_vote_finds_wrong_and_never_certifies_it(pool3: RankPool, tmp_path: Path) -> None:
    for told in pool3.results(_observed_flip_before_a_save, str(tmp_path)):
        assert told.pop("publish") in ("wait", "no")
        assert told == {"path": True, "unchanged": True, "loaded": 4, "same": True}  # rank 0's, on all ranks
    (saved,) = checkpoints_in(tmp_path / "checkpoints")
    assert saved.status is Status.CANDIDATE and verify(saved.path) == []
