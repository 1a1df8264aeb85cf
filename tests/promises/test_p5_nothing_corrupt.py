"""P5: a gradient that failed a check never reaches the optimizer, and a state that failed one never reaches the disk."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unsilent
from tests.promises.job import Job, batch_of, both, build, guard_of, state_parts
from unsilent.checkpoint import Status, checkpoints_in, verify
from unsilent.checkpoint import certify as certificate_of
from unsilent.events import read
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

NAN: dict[str, Any] = {"pattern": "nan", "rank": 1, "step": 4}
BAD_GRADIENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "NaN in the forward": ({"site": "forward", "target": "layers.2", **NAN}, {}),
    "NaN in the backward": ({"site": "backward", "target": "layers.2", **NAN}, {}),
    "NaN in a gradient": ({"site": "gradient", "target": "layers.2.weight", **NAN}, {}),
    "Inf in a gradient": ({"site": "gradient", "target": "layers.2.weight", **NAN, "pattern": "inf"}, {}),
    "NaN made by the reduction": ({"site": "reduction", "pattern": "nan", "step": 4}, {}),
    "finite, audited": (
        {"site": "backward", "target": "layers.2", "pattern": "relative", "relative": 1e-4, "rank": 1, "step": 5}, {},
    ),
    "finite, one rank's copy of the sum": (
        {"site": "reduction", "delivery": True, "pattern": "scale", "factor": 2.0, "rank": 1, "step": 4},
        {"replicas_every": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "config"), BAD_GRADIENTS.values(), ids=BAD_GRADIENTS.keys())
def test_a_bad_gradient_never_reaches_the_optimizer(
    pool3: RankPool, fault: dict[str, Any], config: dict[str, Any]
) -> None:
    job = Job(fault=fault, config={"audit_every": 6, "replicas_every": 3} | config)
    results = pool3.results(both, job)
    assert sum(result.fired for result, _ in results) >= 1
    for repaired, clean in results:
        assert len(repaired.found) == 1 and repaired.found[0][1] in ("REPAIR", "RECOMPUTE"), repaired.reasons
        assert repaired.parts == clean.parts


def _bad_batch(rank: int, size: int) -> dict[str, Any]:
    """A batch with a NaN on rank 1: everybody computes the same NaN from it, so it is nobody's hardware."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        for step in range(3):
            guard.step(batch_of(rank, step))
        before = state_parts(model, optimizer)
        batch = batch_of(rank, 3)
        if rank == 1:
            batch["x"][0, 0] = float("nan")
        try:
            guard.step(batch)
        except unsilent.IntegrityLost as error:
            after = state_parts(model, optimizer)
            told = (error.exit_code, error.verdict.kind.value, [s.rank for s in error.verdict.suspects])
            guard.close()
            return {"same": [k for k in ("weights", "moments") if before[k] == after[k]], "told": told}
    return {}


def test_a_bad_batch_stops_the_run_before_the_update_and_blames_no_device(pool3: RankPool) -> None:
    for told in pool3.results(_bad_batch):
        assert told == {"same": ["weights", "moments"], "told": (10, "SOFTWARE", [1])}


def test_a_weight_that_flips_right_before_a_checkpoint_leaves_no_file(pool3: RankPool, tmp_path: Path) -> None:
    fault = {"site": "weight", "target": "layers.2.weight", "pattern": "bit_flip", "bit": 20, "rank": 2, "step": 3}
    root = tmp_path / "checkpoints"
    job = Job(fault=fault, save_to=str(root), save_at=4, config={"directory": str(tmp_path), "save_every": 4})
    for result, clean in pool3.results(both, job):
        assert (3, "saved", "False", ()) in result.found
        assert result.parts == clean.parts  # healed on the spot: it had reached nobody
    assert checkpoints_in(root) == [] and (not root.exists() or not list(root.iterdir()))
    assert [e.fields["reason"] for e in read(tmp_path).events if e.kind == "checkpoint_refused"]


def _saves(rank: int, size: int, directory: str, how: str) -> dict[str, Any]:
    """A save of step 2 that works, one of step 4 that fails on rank 1, and training goes on."""
    from unsilent.checkpoint import dcp

    model, _, optimizer = build(Job(), rank)
    error = ""
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        for step in range(6):
            guard.step(batch_of(rank, step))
            if step == 1:
                guard.save(directory)
            if step == 3:
                write = dcp.write

                def fails(*args: Any, write: Any = write, **kwargs: Any) -> None:
                    write(*args, **kwargs)
                    raise OSError(28, "No space left on device") if how == "disk" else KeyError("the user's own")

                dcp.write = fails if rank == 1 else write
                try:
                    guard.save(directory)
                except Exception as raised:  # noqa: BLE001 - the test looks at what it was
                    error = f"{type(raised).__name__}: {raised}"
                finally:
                    dcp.write = write
        steps = guard.steps
        guard.close()
    return {"error": error, "steps": steps}


@pytest.mark.parametrize(("how", "error"), [("disk", "OSError"), ("code", "CheckpointError")])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_names_no_checkpoint(
    pool3: RankPool, tmp_path: Path, how: str, error: str
) -> None:
    for told in pool3.results(_saves, str(tmp_path), how):
        assert told["error"].startswith(f"{error}: ") and "rank 1 could not write" in told["error"]
        assert told["steps"] == 6
    assert [(s.steps, s.status) for s in checkpoints_in(tmp_path)] == [(2, Status.CERTIFIED)]
    assert verify(checkpoints_in(tmp_path)[0].path) == []


def _stuck(rank: int, size: int, directory: str, config: dict[str, Any]) -> dict[str, Any]:
    """Checkpoints at 4 and 6; a lane of rank 2 is stuck from step 5 on; audits at steps 3 and 7."""
    model, inner, optimizer = build(Job(), rank)
    options = {"audit_every": 4, "directory": directory, "keep_checkpoints": 9} | config
    fault = Fault(site="forward", target="layers.2", pattern="stuck_lane", add=0.01, every=16, rank=2, from_step=5)
    loaded, same, saved, error = -1, False, {}, ""
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config=options), rank, model, optimizer)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        root = Path(directory) / "checkpoints"
        try:
            for step in range(12):
                injector.begin_step(step)
                guard.step(batch_of(rank, step))
                if step in (3, 5, 8):
                    guard.save(root)
                    saved[step + 1] = state_parts(model, optimizer)
        except unsilent.Quarantine as raised:
            error = f"{raised.exit_code} {raised.resume_from}"
        injector.close()
        guard.close()
        fresh, _, other = build(Job(), rank)
        guard = guard_of(Job(), rank, fresh, other)
        loaded = guard.load(root)
        now = state_parts(fresh, other)
        same = all(saved[loaded][part] == now[part] for part in ("weights", "moments", "buffers", "generators"))
        guard.close()
    return {"loaded": loaded, "same": same, "error": error}


@pytest.mark.parametrize("quarantine", ["auto", "ask"])
def test_a_persistent_verdict_takes_trust_from_all_since_the_last_clean_audit(
    pool3: RankPool, tmp_path: Path, quarantine: str
) -> None:
    answers = pool3.results(_stuck, str(tmp_path), {"quarantine": quarantine})
    assert [(a["loaded"], a["same"]) for a in answers] == [(4, True)] * 3
    status = {s.steps: s.status for s in checkpoints_in(tmp_path / "checkpoints")}
    if quarantine == "auto":
        assert status == {4: Status.CERTIFIED, 6: Status.DISTRUSTED}
        for answer in answers:
            assert answer["error"].startswith("11 ") and answer["error"].endswith("step-00000004")
    else:  # repaired every step, and nothing is certified until someone decides
        assert status == {4: Status.CERTIFIED, 6: Status.DISTRUSTED, 9: Status.DISTRUSTED}
    withdrawn = [e for e in read(tmp_path).events if e.kind == "trust_withdrawn"]
    assert withdrawn and withdrawn[0].fields["steps"] == [6]


@pytest.mark.parametrize(("replicas_every", "ending"), [(100, ""), (None, "IntegrityLost")])
def test_an_audit_of_unlike_weights_is_not_a_clean_one_and_calls_a_vote(
    pool3: RankPool, replicas_every: int | None, ending: str
) -> None:
    """The next vote would come at step 99 or never; the audit of step 3 does not wait for it.

    Without votes there is no snapshot to go back to.
    """
    fault = {"site": "weight", "target": "layers.2.weight", "pattern": "bit_flip", "bit": 22, "rank": 2, "step": 2}
    for result, clean in pool3.results(both, Job(fault=fault, config={"replicas_every": replicas_every})):
        assert result.found[0][0] == 3 and result.found[0][3] == (2,), result.reasons
        assert result.error.split(":")[0] == ending
        assert (result.parts == clean.parts) is (ending == "")


def _own_writer(rank: int, size: int, flip: bool) -> dict[str, Any]:
    """Another writer asks for its certificates of steps 2, 3 and 4; audits at steps 1, 3 and 5, votes when forced.

    ``flip``: a weight of rank 1 flips right before step 4's, after the vote of the update before.
    """
    model, inner, optimizer = build(Job(), rank)
    told: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config={"replicas_every": 50}), rank, model, optimizer)
        for step in range(6):
            guard.step(batch_of(rank, step), saving=step == 3)
            if step == 2:
                unasked = certificate_of({}, steps=3)
                asked = guard.certify({"model": inner.state_dict()})
                told["before the audit"] = guard.may_publish(asked)
            if step == 3:
                told["after it"] = guard.may_publish(asked)
                told["nobody voted"] = guard.may_publish(replace(unasked, steps=2))
                if flip and rank == 1:
                    with torch.no_grad():
                        inner.layers[2].weight.view(torch.int32)[0, 0] ^= 1 << 20
                told["now"] = guard.may_publish(guard.certify({"model": inner.state_dict()}))
                told["again"] = guard.may_publish(guard.certify({"model": inner.state_dict()}))
        guard.close()
    return told


@pytest.mark.parametrize("flip", [False, True])
def test_another_writer_is_told_yes_only_of_a_state_that_was_voted_on(pool3: RankPool, flip: bool) -> None:
    for told in pool3.results(_own_writer, flip):
        assert told == {
            "before the audit": "wait", "after it": "yes", "nobody voted": "wait",
            "now": "no" if flip else "yes", "again": "yes",  # healed by then
        }  # fmt: skip


def _no_majority(rank: int, size: int, directory: str, on_inconclusive: str) -> tuple[str, int, bool]:
    """Before a save two of the four replicas hold one value of a weight, and two another."""
    model, inner, optimizer = build(Job(), rank)
    config = {"on_inconclusive": on_inconclusive, "directory": directory}
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config=config), rank, model, optimizer)
        for step in range(2):
            guard.step(batch_of(rank, step))
        with torch.no_grad():
            inner.layers[2].weight.view(torch.int32)[0, 0] ^= (rank // 2) << 18
        try:
            saved = guard.save(Path(directory) / "checkpoints")
        except unsilent.CorruptionError as error:
            return type(error).__name__, error.exit_code, False
        finally:
            guard.detach(together=False)
    return "", 0, saved is not None


@pytest.mark.parametrize(
    ("on_inconclusive", "told"), [("stop", ("Inconclusive", 12, False)), ("continue", ("", 0, False))]
)
def test_a_vote_without_a_majority_at_a_save_is_inconclusive(
    pool4: RankPool, tmp_path: Path, on_inconclusive: str, told: tuple[str, int, bool]
) -> None:
    assert pool4.results(_no_majority, str(tmp_path), on_inconclusive) == [told] * 4
    if on_inconclusive == "stop":
        assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 12


def _strike_after_a_load(rank: int, size: int, directory: str) -> dict[str, Any]:
    """Certified checkpoints at 2 and 4; the run loads 4, and in its first audit, at step 5, rank 2 is stuck."""
    model, inner, optimizer = build(Job(), rank)
    root = Path(directory) / "checkpoints"
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        for step in range(4):
            guard.step(batch_of(rank, step))
            if step in (1, 3):
                guard.save(root)
        loaded = guard.load(root)
        fault = Fault(site="forward", target="layers.2", pattern="stuck_lane", add=0.01, every=16, rank=2, from_step=5)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        for step in range(4, 6):
            injector.begin_step(step)
            outcome = guard.step(batch_of(rank, step))
        injector.close()
        guard.close()
    return {"loaded": loaded, "kind": outcome.verdict.kind.value if outcome.verdict is not None else ""}


def test_a_strike_soon_after_a_restart_leaves_the_certified_checkpoints(pool3: RankPool, tmp_path: Path) -> None:
    assert pool3.results(_strike_after_a_load, str(tmp_path)) == [{"loaded": 4, "kind": "PERSISTENT"}] * 3
    status = {s.steps: s.status for s in checkpoints_in(tmp_path / "checkpoints")}
    assert status == {2: Status.CERTIFIED, 4: Status.CERTIFIED}


def test_a_guard_whose_state_another_writer_restored_goes_on_from_there() -> None:
    """All that was due is counted from the step at which it goes on: nothing is overdue."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), lambda m, x: m(x).square().mean())
        with guard:
            guard.load_state_dict({"version": 1, "steps": 1000})
            for _ in range(3):
                guard.step(torch.randn(2, 4))
    assert guard.steps == 1003


def test_at_least_one_checkpoint_is_kept() -> None:
    with pytest.raises(unsilent.UsageError, match="keep_checkpoints is 0"):
        unsilent.GuardConfig(keep_checkpoints=0)
