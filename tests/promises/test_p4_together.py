"""P4: decisions are agreed, all ranks fail together, and a fault in the guard itself kills no healthy job."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unsilent
from tests.promises.job import Job, batch_of, build, guard_of, parts_of, plain_step, state_parts
from unsilent.errors import RankFailure
from unsilent.events import read
from unsilent.lab.pool import RankPool

TIMEOUT_S = 20.0


# ---- its own group, from one thread ----------------------------------------------------------------------------------


def _calls(rank: int, size: int) -> dict[str, Any]:
    """Who calls which collective on which group, over six steps with audits, votes, a repair and a save."""
    from unsilent.lab.faults import Fault
    from unsilent.lab.inject import Injector

    model, inner, optimizer = build(Job(), rank)
    seen: list[tuple[str, bool, bool]] = []
    names = ("all_reduce", "all_gather", "isend", "irecv", "barrier", "broadcast", "gather", "send", "recv")
    originals = {name: getattr(dist, name) for name in names}
    world = dist.group.WORLD

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            main = threading.current_thread() is threading.main_thread()
            seen.append((name, group is None or group is world, main))
            return originals[name](*args, **kwargs)

        return call

    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        fault = Fault(site="forward", target="layers.1", pattern="scale", factor=2.0, rank=1, step=3)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: guard.replayer.running)  # fmt: skip
        try:
            for name in names:
                setattr(dist, name, spy(name))
            for step in range(6):
                injector.begin_step(step)
                guard.step(batch_of(rank, step))
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        injector.close()
        guard.close()
    buckets = len(guard.reduction.buckets)
    return {
        "job": [(name, main) for name, of_job, main in seen if of_job],
        "own off the main thread": [name for name, of_job, main in seen if not of_job and not main],
        "own": len([1 for _, of_job, _ in seen if not of_job]),
        "fired": injector.fired,
        "buckets": buckets,
    }


def test_all_traffic_of_the_guard_is_on_its_own_group_and_from_one_thread(pool3: RankPool) -> None:
    for told in pool3.results(_calls):
        # On the job's group: one all-reduce per bucket and step, and one more round for the repair.
        assert {name for name, _ in told["job"]} == {"all_reduce"}
        assert 7 * told["buckets"] - 1 <= len(told["job"]) <= 7 * told["buckets"] + 1
        assert told["own off the main thread"] == []
        assert told["own"] > 6


# ---- a fault in the guard itself -------------------------------------------------------------------------------------


METHODS = {
    "finite": ("begin", "before_reduction", "before_update", "fill", "after_update"),
    "replicas": ("begin", "before_update", "fill", "after_update"),
    "audit": ("begin", "before_reduction", "record", "compare", "fill", "after_update"),
}


def _sabotaged(rank: int, size: int, check: str, method: str, policy: str) -> dict[str, Any]:
    """One method of one check raises on rank 1 from step 3 (an audit step) on."""
    model, _, optimizer = build(Job(), rank)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        guard = guard_of(Job(config={"on_guard_error": policy}), rank, model, optimizer)
        error, steps = "", 0
        victim = guard.checks[check]
        original = getattr(victim, method)

        def broken(*args: Any, **kwargs: Any) -> Any:
            if guard.steps >= 3:
                raise ValueError("a bug of the guard")
            return original(*args, **kwargs)

        if rank == 1:
            setattr(victim, method, broken)
        try:
            for step in range(8):
                guard.step(batch_of(rank, step))
                steps += 1
        except RankFailure as raised:
            error = str(raised)
        parts = state_parts(model, optimizer)
        guard.close()
    twin, _, other = build(Job(), rank)
    if not error:
        for step in range(8):
            plain_step(Job(), rank, step, twin, other, scaler=None, scheduler=None, clip_norm=None)
    return {
        "left": sorted(guard.checks),
        "steps": steps,
        "error": error,
        "same": not error and parts == state_parts(twin, other),
        "said": said.getvalue(),
    }


@pytest.mark.parametrize(("check", "method"), [(c, m) for c, methods in METHODS.items() for m in methods])
def test_a_check_that_fails_on_one_rank_goes_off_on_all_and_training_goes_on(
    pool3: RankPool, check: str, method: str
) -> None:
    results = pool3.results(_sabotaged, check, method, "disable")
    for told in results:
        assert told["error"] == "" and told["steps"] == 8
        assert told["left"] == sorted({"audit", "finite", "replicas"} - {check})
        assert told["same"]
    assert f"check {check} is off" in results[0]["said"] and "on rank 1" in results[0]["said"]


def test_or_all_ranks_raise_together_where_that_is_asked_for(pool3: RankPool) -> None:
    for told in pool3.results(_sabotaged, "replicas", "fill", "raise"):
        assert told["error"].startswith("rank 1 failed: check replicas: ValueError")
        assert told["steps"] == 3


def _broken_details(rank: int, size: int) -> tuple[int, list[str], str]:
    """The closer look itself fails on rank 1, while rank 2 has a NaN."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(config={"audit_every": 4}), rank, model, optimizer)
        if rank == 1:

            def broken() -> None:
                raise ValueError("a bug of the guard")

            guard.checks["replicas"].details = broken  # type: ignore[method-assign]
        for step in range(6):
            if step == 3 and rank == 2:
                next(model.parameters()).data[0, 0] += 1.0
            guard.step(batch_of(rank, step))
        left = sorted(guard.checks)
        with contextlib.suppress(unsilent.CorruptionError):
            guard.close()
    return guard.steps, left, ""


def test_a_closer_look_that_fails_on_one_rank_switches_its_check_off_too(pool3: RankPool) -> None:
    assert pool3.results(_broken_details) == [(6, ["audit", "finite"], "")] * 3


# ---- user code that raises, and ranks that are killed ----------------------------------------------------------------


def _until_failure(rank: int, size: int, directory: str, victim: int, where: str, how: str) -> dict[str, Any]:
    """Train, save a certified checkpoint of step 4, then fail on one rank at one place of step 5."""
    job = Job(config={"directory": directory, "timeout_s": TIMEOUT_S})
    model, inner, optimizer = build(job, rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(job, rank, model, optimizer)
        root = Path(directory) / "checkpoints"
        for step in range(4):
            guard.step(batch_of(rank, step))
        guard.save(root)
        Path(directory, f"saved-{rank}.json").write_text(json.dumps(state_parts(model, optimizer)))
        guard.step(batch_of(rank, 4))

        def fail(*_: Any, **__: Any) -> None:
            Path(directory, "failed-at").write_text(repr(time.time()))
            if how == "raise":
                raise KeyError("the user's own mistake")
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim:
            _arm(guard, inner, where, fail)
        try:
            guard.step(batch_of(rank, 5))
            guard.save(root)
        except RankFailure as error:
            return {"rank": error.rank, "error": error.error, "time": time.time()}
        except KeyError as error:
            return {"own": str(error), "time": time.time()}
    return {"ended": "well"}


def _arm(guard: unsilent.Guard, inner: Any, where: str, fail: Callable[..., None]) -> None:
    from unsilent.checkpoint import dcp

    if where == "forward":
        inner.layers[2].register_forward_hook(lambda *_: None if guard.replayer.running else fail())
    elif where == "backward":
        inner.layers[1].register_forward_hook(
            lambda module, args, output: None if guard.replayer.running else output.register_hook(fail) and None
        )
    elif where == "agreed vector":
        guard.world.reduce_max = fail  # type: ignore[assignment]
    elif where == "audit":
        guard.replayer.run = fail  # type: ignore[assignment]
    else:
        write = dcp.write

        def write_and_fail(*args: Any, **kwargs: Any) -> None:
            write(*args, **kwargs)
            fail()

        dcp.write = write_and_fail


def _load(rank: int, size: int, directory: str) -> tuple[int, bool]:
    """A fresh run loads the newest checkpoint: (updates completed, whether the bits are the saved ones)."""
    job = Job()
    model, _, optimizer = build(job, rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(job, rank, model, optimizer)
        steps = guard.load(Path(directory) / "checkpoints")
        saved = json.loads(Path(directory, f"saved-{rank}.json").read_text())
        now = state_parts(model, optimizer)
        same = all(saved[part] == now[part] for part in ("weights", "moments", "buffers", "generators"))
        guard.step(batch_of(rank, steps))
        guard.close()
    return steps, same


def _must_name(directory: Path, victim: int) -> dict[str, Any]:
    """A survivor's own record on disk."""
    record = json.loads((directory / "exit.json").read_text())
    assert record["exit_code"] == 70 and record["rank_failure"]["rank"] == victim
    events = [e for e in read(directory).events if e.kind == "rank_failure"]
    assert [e.fields["failed_rank"] for e in events] == [victim]
    assert events[0].fields["rank"] != victim
    return record


@pytest.mark.parametrize(
    ("victim", "where"),
    [(0, "forward"), (2, "forward"), (2, "backward"), (0, "agreed vector"), (2, "audit"), (0, "save")],
)
def test_a_killed_rank_ends_all_others_in_time_and_is_named_on_disk(
    pool3: RankPool, tmp_path: Path, victim: int, where: str
) -> None:
    answers = pool3.run_until_death(_until_failure, str(tmp_path), victim, where, "kill")
    failed_at = float((tmp_path / "failed-at").read_text())
    assert answers[victim] is None
    for rank, answer in enumerate(answers):
        if rank != victim:
            assert isinstance(answer, dict), answer
            assert answer["rank"] == victim, answer
            assert answer["time"] - failed_at < TIMEOUT_S
    _must_name(tmp_path, victim)
    assert (tmp_path / "exit.json").stat().st_mtime - failed_at < TIMEOUT_S
    assert pool3.results(_load, str(tmp_path)) == [(4, True)] * 3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_user_code_that_raises_on_one_rank_is_told_to_all(pool3: RankPool, tmp_path: Path, where: str) -> None:
    answers = pool3.run_until_death(_until_failure, str(tmp_path), 1, where, "raise")
    failed_at = float((tmp_path / "failed-at").read_text())
    assert "the user's own mistake" in answers[1]["own"]
    for rank in (0, 2):
        assert answers[rank]["rank"] == 1 and "KeyError" in answers[rank]["error"]
        assert "the user's own mistake" in answers[rank]["error"]
        assert answers[rank]["time"] - failed_at < 5.0
    assert "the user's own mistake" in _must_name(tmp_path, 1)["rank_failure"]["error"]


def _one_rank_leaves(rank: int, size: int) -> str:
    """A rank that closes its guard and leaves in order is no failure for one that is a little slower."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        guard.step(parts_of(Job(), rank, 0)[0])
        if rank == size - 1:
            time.sleep(1.0)
        guard.close()
    time.sleep(0.3)
    return "" if guard.world.watcher.failure is None else str(guard.world.watcher.failure)


def test_leaving_in_order_is_no_failure(pool3: RankPool) -> None:
    assert pool3.results(_one_rank_leaves) == ["", "", ""]
    assert torch.distributed.is_initialized() is False  # the tests' own process never joined
