"""Every rung of the ladder fails in turn, by injection: right bits in the end or a bounded stop; no hang, no endless loop.

What is asked of each case: all ranks come to the same end, with the right exit code, within the timeout; how much was
tried is bounded; no healthy device is blamed alone; and where the run goes on, it ends with the bits of a clean one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import unsilent
from tests.promises.job import Job, build, guard_of, parts_of, sha, state_parts, train
from unsilent.errors import EXIT_INTEGRITY_LOST, EXIT_INTERNAL, EXIT_QUARANTINE, RankFailure
from unsilent.events import read
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

TIMEOUT_S = 20.0
CLEAN = "clean bits"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: faults in real tensors, and what else goes wrong on ``rank``.

    ``saves`` are the updates completed after which the run saves. ``mishap`` names one of the functions below.
    """

    config: dict[str, Any]
    faults: tuple[dict[str, Any], ...] = ()
    mishap: str = ""
    rank: int = 0
    steps: int = 10
    saves: tuple[int, ...] = ()
    directory: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # of the job
    saves_after: bool = False  # tries to save what a failed rollback has left

    @property
    def job(self) -> Job:
        config = {"timeout_s": TIMEOUT_S, "directory": self.directory, **self.config}
        return Job(steps=self.steps, config=config, **self.options)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How it ended on one rank. ``found`` is (step, action, kind, suspects) of each step in which something was found."""

    parts: dict[str, str]
    clean: dict[str, str]
    error: str = ""
    code: int = 0
    failed_rank: int | None = None
    time: float = 0.0
    said: str = ""
    fired: int = 0
    found: list[tuple[int, str, str, tuple[int | None, ...]]] = field(default_factory=list)


def run(rank: int, size: int, case: Case) -> Ended:
    model, inner, optimizer = build(case.job, rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if case.job.scaler else None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) if case.job.scheduler else None
    clip = 0.5 if case.job.clip else None
    more: dict[str, Any] = {}
    found: list[Any] = []
    error, said = None, io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = guard_of(case.job, rank, model, optimizer, scaler=scaler, scheduler=scheduler, clip_norm=clip)
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        injectors = [
            Injector(inner, optimizer, Fault(**fault), rank=rank, world_size=size,
                     replaying=lambda: guard.replayer.running)
            for fault in case.faults
        ]  # fmt: skip
        if case.mishap and rank == case.rank:
            MISHAPS[case.mishap](guard, inner, case)
        try:
            for step in range(case.steps):
                for injector in injectors:
                    injector.begin_step(step)
                outcome = guard.step(micro_batches=parts_of(case.job, rank, step))
                if outcome.verdict is not None:
                    suspects = tuple(s.rank for s in outcome.verdict.suspects)
                    found.append((step, outcome.action.value, outcome.verdict.kind.value, suspects))
                for injector in injectors:
                    injector.after_update(step)
                if step + 1 in case.saves:
                    guard.save(Path(case.directory) / "checkpoints")
        except unsilent.CorruptionError as caught:
            error = caught
            saved_after = guard.save(Path(case.directory) / "saved after the end") if case.saves_after else None
            assert saved_after is None, "a state that is that of no step was saved"
            more = {"error": type(caught).__name__ + ": " + str(caught), "code": caught.exit_code}
        except RankFailure as caught:
            error = caught
            more = {"error": str(caught), "code": caught.exit_code, "failed_rank": caught.rank}
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        more |= {"time": time.time(), "fired": sum(i.fired for i in injectors), "parts": state_parts(model, optimizer)}
        more["parts"]["counters"] = sha([None if one is None else one.state_dict() for one in (scaler, scheduler)])
        for injector in injectors:
            injector.close()
        guard.close()
    clean = train(rank, size, case.job.unguarded()).parts if error is None else {}
    return Ended(found=found, said=said.getvalue(), clean=clean, **more)


# ---- what else goes wrong --------------------------------------------------------------------------------------------


def _when_replaying(guard: unsilent.Guard, inner: Any, wrong: Callable[[], bool], *, steady: bool = False) -> None:
    """This device errs in replays of which ``wrong`` says so, each time otherwise unless ``steady``; never in live work."""
    noise = torch.Generator().manual_seed(7)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not guard.replayer.running or not wrong():
            return None
        if steady:
            noise.manual_seed(7)
        return output + 1e-3 * torch.randn(output.shape, generator=noise)

    inner.layers[3].register_forward_hook(hook)


def bad_auditor(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """All its replays of the steps from 5 on are wrong."""
    _when_replaying(guard, inner, lambda: guard.steps >= 5)


def bad_auditor_steadily(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    _when_replaying(guard, inner, lambda: guard.steps >= 5, steady=True)


def bad_while_repairing(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """Its replays that compare are right; the one that repairs step 5 is not, the first time."""
    made: list[int] = []

    def third() -> bool:
        if guard.steps != 5:
            return False
        made.append(1)
        return len(made) == 3  # one for the ring, one more to settle it, one to repair

    _when_replaying(guard, inner, third)


def dies_in_heal(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """It is the majority's replica that is to be copied, and it is killed when it should send."""
    _note_and_kill_in(guard.world, "send", case)


def dies_being_healed(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    _note_and_kill_in(guard.world, "receive", case)


def dies_coming_forward(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """It is killed while past steps are run again, before its second one is reduced."""
    rerun, past = guard.replayer.run, list[int]()

    def run_and_die(work: Any, **kwargs: Any) -> Any:
        if work.step < guard.steps:
            past.append(work.step)
            if len(past) == 2:
                _kill(case)
        return rerun(work, **kwargs)

    guard.replayer.run = run_and_die  # type: ignore[method-assign]


def raises_coming_forward(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """The user's code raises on this rank when a past step is run again: it must not be told from a step of today."""
    rerun = guard.replayer.run

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        raise KeyError("the user's own mistake")

    def run_and_raise(work: Any, **kwargs: Any) -> Any:
        past = work.step == guard.steps - 1
        own, guard.replayer.loss_fn = guard.replayer.loss_fn, loss_fn if past else guard.replayer.loss_fn
        try:
            return rerun(work, **kwargs)
        finally:
            guard.replayer.loss_fn = own

    guard.replayer.run = run_and_raise  # type: ignore[method-assign]


def bad_snapshot(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """One bit of the copy in this host's memory flips as soon as there is one of step 3 or later."""
    take = guard.rollback.take

    def take_and_flip(step: int, rows: Any) -> None:
        take(step, rows)
        assert guard.rollback.snapshot is not None
        tensors = guard.rollback.snapshot.tensors
        tensors[next(name for name in tensors if "layers.1.weight" in name)].view(torch.int32)[3, 3] ^= 1 << 20

    guard.rollback.take = take_and_flip  # type: ignore[method-assign]


def bad_snapshot_and_checkpoint(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """Besides, a byte of the checkpoint changes on the disk."""
    bad_snapshot(guard, inner, case)
    save = guard.save

    def save_and_damage(root: Any) -> Any:
        path = save(root)
        assert path is not None
        file = next(iter(sorted(path.glob("*.distcp"))))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)
        return path

    guard.save = save_and_damage  # type: ignore[method-assign]


def disk_is_full(guard: unsilent.Guard, inner: Any, case: Case) -> None:
    """From step 4 on this process can write no byte to any file."""
    inner.register_forward_pre_hook(
        lambda *_: None if guard.steps < 4 else resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    )


MISHAPS: dict[str, Callable[[unsilent.Guard, Any, Case], None]] = {
    f.__name__: f
    for f in (bad_auditor, bad_auditor_steadily, bad_while_repairing, dies_in_heal, dies_being_healed, dies_coming_forward,
              raises_coming_forward, bad_snapshot, bad_snapshot_and_checkpoint, disk_is_full)
}  # fmt: skip


def _note_and_kill_in(world: Any, method: str, case: Case) -> None:
    setattr(world, method, lambda *_: _kill(case))


def _kill(case: Case) -> None:
    Path(case.directory, "died-at").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


# ---- what is asked of every case -------------------------------------------------------------------------------------


def end_together(answers: list[Ended]) -> Ended:
    first = answers[0]
    for answer in answers:
        assert (answer.error, answer.code, answer.found) == (first.error, first.code, first.found), answers
    return first


def clean_in_the_end(answers: list[Ended]) -> Ended:
    first = end_together(answers)
    assert first.error == ""
    for answer in answers:
        assert [part for part in answer.clean if answer.parts[part] != answer.clean[part]] == [], answer.found
    assert sum(answer.fired for answer in answers) > 0
    return first


def actions(directory: Path) -> list[tuple[int, str]]:
    return [(e.step, e.fields["action"]) for e in read(directory).events if e.kind == "action"]


def stopped_with(directory: Path, answers: list[Ended], code: int) -> Ended:
    ended = end_together(answers)
    assert ended.code == code, ended
    record = json.loads((directory / "exit.json").read_text())
    assert record["exit_code"] == code and record["message"] in ended.error
    return ended


def blamed(answers: list[Ended]) -> set[int | None]:
    return {rank for _, _, kind, ranks in answers[0].found if kind in ("TRANSIENT", "PERSISTENT") for rank in ranks}


def named_after_death(directory: Path, answers: list[Any], victim: int) -> None:
    died_at = float((directory / "died-at").read_text())
    for rank, answer in enumerate(answers):
        if rank == victim:
            assert answer is None
            continue
        assert isinstance(answer, Ended), answer
        assert answer.failed_rank == victim and answer.code == EXIT_INTERNAL, answer
        assert answer.time - died_at < TIMEOUT_S
    record = json.loads((directory / "exit.json").read_text())
    assert record["exit_code"] == EXIT_INTERNAL and record["rank_failure"]["rank"] == victim


# ---- REPAIR ----------------------------------------------------------------------------------------------------------

ONCE = {"site": "backward", "target": "layers.3", "pattern": "scale", "factor": 1.5, "step": 5}


@pytest.mark.parametrize("mishap", ["bad_auditor", "bad_auditor_steadily", "bad_while_repairing"])
def test_repair_with_an_auditor_that_errs_too(pool: RankPool, tmp_path: Path, mishap: str) -> None:
    auditor = 3 if pool.size == 4 else 0
    case = Case(
        config={"audit_every": 2, "replicas_every": 2, "snapshot_every": 2},
        faults=({**ONCE, "rank": 2},),
        mishap=mishap,
        rank=auditor,
        directory=str(tmp_path),
    )
    answers = pool.results(run, case)
    clean_in_the_end(answers)
    assert blamed(answers) <= {2, auditor}
    by_step = Counter(step for step, _ in actions(tmp_path))
    assert by_step and max(by_step.values()) <= 4  # one more than ``recomputes``


def test_repair_where_nobody_can_tell_the_right_value(pool3: RankPool, tmp_path: Path) -> None:
    """Two of three devices err at once: more than the fault budget. It ends all the same, and nobody else is blamed."""
    stuck = {"site": "forward", "target": "layers.2", "pattern": "random_bits", "from_step": 5}
    faults = tuple({**stuck, "rank": rank, "seed": rank} for rank in (1, 2))
    case = Case(config={"audit_every": 2}, faults=faults, directory=str(tmp_path))
    answers = pool3.results(run, case)
    ended = end_together(answers)
    assert 0 not in {rank for _, _, kind, ranks in ended.found if kind == "PERSISTENT" for rank in ranks} or ended.code
    assert len(actions(tmp_path)) <= 4 * case.steps


# ---- RECOMPUTE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [0, 1, 3])
@pytest.mark.parametrize(
    "fault",
    [
        {"site": "reduction", "pattern": "nan", "from_step": 5},
        {"site": "reduction", "pattern": "random_bits", "delivery": True, "rank": 1, "from_step": 5},
    ],
    ids=["NaN in every sum", "one rank's copy of it"],
)
def test_recompute_that_never_gives_a_clean_step(
    pool: RankPool, tmp_path: Path, fault: dict[str, Any], recomputes: int
) -> None:
    config = {"audit_every": None, "replicas_every": 1, "recomputes": recomputes}
    answers = pool.results(run, Case(config=config, faults=(fault,), directory=str(tmp_path)))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert actions(tmp_path) == [(5, "RECOMPUTE")] * recomputes
    assert "recomput" in ended.error or "not finite" in ended.error


# ---- HEAL ------------------------------------------------------------------------------------------------------------

FLIP = {"site": "weight", "target": "layers.2.weight", "pattern": "bit_flip", "bit": 21}


@pytest.mark.parametrize(("wrong", "source"), [(1, 0), (0, 1)])
def test_the_majority_s_replica_dies_in_the_middle_of_heal(
    pool3: RankPool, tmp_path: Path, wrong: int, source: int
) -> None:
    case = Case(
        config={"replicas_every": 1}, faults=({**FLIP, "rank": wrong, "step": 4},), mishap="dies_in_heal", rank=source,
        directory=str(tmp_path),
    )  # fmt: skip
    named_after_death(tmp_path, pool3.run_until_death(run, case), source)


def test_the_replica_that_is_healed_dies(pool4: RankPool, tmp_path: Path) -> None:
    case = Case(
        config={"replicas_every": 1}, faults=({**FLIP, "rank": 2, "step": 4},), mishap="dies_being_healed", rank=2,
        directory=str(tmp_path),
    )  # fmt: skip
    named_after_death(tmp_path, pool4.run_until_death(run, case), 2)


# ---- ROLLBACK --------------------------------------------------------------------------------------------------------

#: a vote at steps 0, 3, 5, 7 (announced for saving), 8 and 11; the flip is found when two steps have used it
ROLLS_BACK: dict[str, Any] = {"replicas_every": 3, "audit_every": 4, "snapshot_every": 2, "save_every": 4}
USED = {**FLIP, "rank": 2, "step": 5}


def _case(tmp_path: Path, **more: Any) -> Case:
    return Case(**{"config": ROLLS_BACK, "faults": (USED,), "steps": 11, "directory": str(tmp_path), **more})


@pytest.mark.parametrize(
    "options", [{}, {"micro_batches": 2, "scaler": True, "clip": True, "scheduler": True}], ids=["plain", "all at once"]
)
def test_a_damaged_snapshot_leaves_the_certified_checkpoint(
    pool: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    answers = pool.results(run, _case(tmp_path, mishap="bad_snapshot", rank=1, saves=(4,), options=options))
    ended = clean_in_the_end(answers)
    assert actions(tmp_path) == [(7, "ROLLBACK")]
    assert "rank 1: the snapshot of step 5 is damaged: " in ended.said and "layers.1.weight" in ended.said
    assert "going back to " in ended.said and "step-00000004" in ended.said


def test_a_damaged_snapshot_and_no_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.results(run, _case(tmp_path, mishap="bad_snapshot", rank=1))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert "rank 1: the snapshot of step 5 is damaged" in ended.error
    assert "no certified checkpoint to resume from" in ended.error


def test_a_damaged_snapshot_and_a_checkpoint_that_the_kept_batches_do_not_reach(
    pool3: RankPool, tmp_path: Path
) -> None:
    config = {**ROLLS_BACK, "keep_batches": 2}
    answers = pool3.results(run, _case(tmp_path, mishap="bad_snapshot", rank=1, saves=(4,), config=config))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert "is damaged" in ended.error and "no certified checkpoint is in reach" in ended.error
    assert "resume from" in ended.error and "step-00000004" in ended.error


def test_a_damaged_snapshot_and_a_damaged_checkpoint(pool3: RankPool, tmp_path: Path) -> None:
    answers = pool3.results(run, _case(tmp_path, mishap="bad_snapshot_and_checkpoint", rank=1, saves=(4,)))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert "the snapshot of step 5 is damaged" in ended.said and "step-00000004 cannot be gone back to" in ended.error


def test_the_user_s_code_raises_when_a_past_step_is_run_again(pool: RankPool, tmp_path: Path) -> None:
    answers = pool.results(run, _case(tmp_path, mishap="raises_coming_forward", rank=1, saves_after=True))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert "rank 1: step 6 could not be run again: KeyError" in ended.error and "own mistake" in ended.error
    assert "no checkpoint of step 7 was written: the rollback at step 7 has not come to its end" in ended.said
    assert not (tmp_path / "saved after the end").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_while_past_steps_are_run_again(pool3: RankPool, tmp_path: Path, victim: int) -> None:
    case = _case(tmp_path, mishap="dies_coming_forward", rank=victim)
    named_after_death(tmp_path, pool3.run_until_death(run, case), victim)


def test_too_few_batches_are_kept(pool3: RankPool, tmp_path: Path) -> None:
    config = {**ROLLS_BACK, "keep_batches": 1}
    answers = pool3.results(run, _case(tmp_path, config=config, saves=(4,)))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert actions(tmp_path) == []
    assert "there is no way back: no snapshot was taken between" in ended.error
    assert "resume from" in ended.error and "step-00000004" in ended.error


def test_the_auditor_of_a_bad_device_is_bad_itself(pool4: RankPool, tmp_path: Path) -> None:
    """More than the fault budget again. The trusted state is that of step 0: all later snapshots are younger than it."""
    stuck = {"site": "forward", "target": "layers.2", "pattern": "stuck_lane", "from_step": 5}
    faults = tuple({**stuck, "rank": rank, "add": 0.01 * rank} for rank in (1, 2))
    config = {**ROLLS_BACK, "snapshot_every": 10}
    answers = pool4.results(run, _case(tmp_path, faults=faults, config=config, saves=(4,)))
    ended = stopped_with(tmp_path, answers, EXIT_INTEGRITY_LOST)
    assert "no healthy device could do again what the bad one did" in ended.error
    assert blamed(answers) <= {1, 2}


# ---- QUARANTINE ------------------------------------------------------------------------------------------------------


def test_quarantine_on_a_full_disk(pool: RankPool, tmp_path: Path) -> None:
    stuck = {"site": "forward", "target": "layers.2", "pattern": "stuck_lane", "add": 0.01, "rank": 2, "from_step": 2}
    case = Case(
        config={"quarantine": "auto", "audit_every": 2}, faults=(stuck,), mishap="disk_is_full", rank=0,
        directory=str(tmp_path),
    )  # fmt: skip
    answers = pool.results(run, case)
    ended = end_together(answers)
    assert ended.code == EXIT_QUARANTINE and "restart without n2" in ended.error
    assert f"{tmp_path}/exclude.json could not be written: leave them out by hand" in ended.error
    assert "exit.json could not be written" in ended.said and not (tmp_path / "exclude.json").exists()
