"""How a guard begins and ends: what it takes it gives back, and a rank that leaves early is known by its own name."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unsilent
from tests.promises.job import Job, batch_of, build, guard_of, loss_of, plain_step, state_parts
from unsilent.errors import RankFailure, UsageError
from unsilent.lab.faults import Fault
from unsilent.lab.inject import Injector
from unsilent.lab.pool import RankPool

PLAIN: dict[str, Any] = {"scaler": None, "scheduler": None, "clip_norm": None}


def _threads() -> int:
    """Our threads that are left, once those that were told to end have had the time."""
    for _ in range(20):
        time.sleep(0.05)
        left = sum(thread.name.startswith("unsilent") for thread in threading.enumerate())
        if not left:
            break
    return left


# ---- DDP's one hook slot ---------------------------------------------------------------------------------------------


def _after_close(rank: int, size: int) -> dict[str, Any]:
    """Three guarded steps, three plain ones, then a second guard on the same wrapper that has something to repair."""
    model, inner, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        first = guard_of(Job(), rank, model, optimizer)
        for step in range(3):
            first.step(batch_of(rank, step))
        reduction = first.reduction
        first.close()
        seen: list[Any] = []
        first._observers.append(type("Spy", (), {"before_reduction": lambda self, bucket: seen.append(bucket)})())
        for step in range(3, 6):
            plain_step(Job(), rank, step, model, optimizer, **PLAIN)
        kept = len(reduction._pending) + len(reduction._kept)
        second = guard_of(Job(), rank, model, optimizer)
        fault = Fault(site="forward", target="layers.1", pattern="scale", factor=2.0, rank=1, step=9)
        injector = Injector(inner, optimizer, fault, rank=rank, world_size=size,
                            replaying=lambda: second.replayer.running)  # fmt: skip
        actions = []
        for step in range(6, 10):
            injector.begin_step(step)
            actions.append(second.step(batch_of(rank, step)).action.value)
        injector.close()
        parts = state_parts(model, optimizer)
        hooked, notice = second.reduction.hooked, second.reduction.notice
        second.close()
    twin, _, other = build(Job(), rank)
    for step in range(10):
        plain_step(Job(), rank, step, twin, other, **PLAIN)
    return {"kept": kept, "seen": len(seen), "hooked": hooked, "notice": notice, "actions": actions,
            "same": parts == state_parts(twin, other), "threads": _threads()}  # fmt: skip


def test_after_close_the_hook_reduces_for_nobody_and_a_second_guard_takes_it_over(pool3: RankPool) -> None:
    for told in pool3.results(_after_close):
        assert told["kept"] == told["seen"] == 0
        assert told["hooked"] and told["notice"] == ""
        assert told["actions"] == ["CONTINUE"] * 3 + ["REPAIR"]
        assert told["same"] and told["threads"] == 0


def _plain_passes_in_between(rank: int, size: int) -> int:
    """A backward of the user's own, while the guard is open, leaves no futures behind."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = guard_of(Job(), rank, model, optimizer)
        for step in range(3):
            plain_step(Job(), rank, step, model, optimizer, **PLAIN)
        pending = len(guard.reduction._pending)
        guard.close()
    return pending


def test_nothing_piles_up_outside_a_guarded_step(pool3: RankPool) -> None:
    assert pool3.results(_plain_passes_in_between) == [0, 0, 0]


# ---- a guard that cannot begin ---------------------------------------------------------------------------------------


def _cannot_begin(rank: int, size: int, how: str) -> dict[str, Any]:
    model, _, optimizer = build(Job(), rank)
    before = _threads()
    config: dict[str, Any] = {"require_localization": True, "node": "the only one"} if how == "nodes" else {}
    if how == "buffer":
        config = {"replicated_buffers": ("no such buffer",)}
    if how == "parameter":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    error = ""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            guard_of(Job(config=config), rank, model, optimizer)
        except UsageError as raised:
            error = str(raised)
        slots = len(model._comm_hooks)
        hooks = sum(len(m._forward_pre_hooks) for m in model.module.modules())
        threads = _threads() - before
        if how == "parameter":
            del optimizer.param_groups[1]
        guard = guard_of(Job(), rank, model, optimizer)
        hooked = guard.reduction.hooked
        guard.step(batch_of(rank, 0))
        guard.close()
    return {"error": error, "slots": slots, "hooks": hooks, "threads": threads, "hooked": hooked}


@pytest.mark.parametrize(
    ("how", "words"),
    [("nodes", "at least 3 nodes"), ("buffer", "no such buffer"), ("parameter", "the model does not hold")],
)
def test_a_guard_that_cannot_begin_leaves_nothing_behind(pool3: RankPool, how: str, words: str) -> None:
    for told in pool3.results(_cannot_begin, how):
        assert words in told["error"]
        assert told["slots"] == told["hooks"] == told["threads"] == 0
        assert told["hooked"]


def _begins_on_two_ranks(rank: int, size: int) -> str:
    """The announcement fails on rank 1, after hook and world were made: the others must not wait for it."""
    model, _, optimizer = build(Job(), rank)
    if rank == 1:
        unsilent.Guard._announce = lambda self: (_ for _ in ()).throw(OSError("no space"))  # type: ignore[method-assign]
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            guard_of(Job(), rank, model, optimizer).step(batch_of(rank, 0))
        except RankFailure as error:
            return str(error)
        except OSError as error:
            return f"own: {error}, {model._comm_hooks[0][1].current}, {_threads()}"
    return "nobody noticed"


def test_a_guard_that_cannot_begin_on_one_rank_is_told_to_the_others(pool3: RankPool) -> None:
    answers = pool3.run_until_death(_begins_on_two_ranks)
    assert answers[1] == "own: no space, None, 0"
    assert answers[0] == answers[2] == "rank 1 failed: OSError: no space"


# ---- leaving early ---------------------------------------------------------------------------------------------------


def _leaves(rank: int, size: int, how: str, directory: str) -> Any:
    """Rank 1 leaves after two steps, outside of ``guard.step``; the others go on.

    Without the broadcast of buffers, which waits in the forward where nobody can wake it: see the next test.
    """
    job = Job(config={"directory": directory, "timeout_s": 5.0}, ddp={"broadcast_buffers": how == "in forward"})
    model, _, optimizer = build(job, rank)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            if how == "atexit":
                guard = guard_of(job, rank, model, optimizer)
                for step in range(4):
                    if rank == 1 and step == 2:
                        atexit._run_exitfuncs()  # what sys.exit(1) comes to, as Python tells nobody why it ends
                        os._exit(1)
                    guard.step(batch_of(rank, step))
            elif how == "close":
                guard = guard_of(job, rank, model, optimizer)
                try:
                    _train(guard, rank)
                finally:
                    guard.close()
            elif how == "sys.exit":
                with guard_of(job, rank, model, optimizer) as guard:
                    _train(guard, rank, SystemExit(1))
            else:
                with guard_of(job, rank, model, optimizer) as guard:
                    _train(guard, rank)
        except RankFailure as error:
            return (error.rank, error.error)
        except (LookupError, SystemExit) as error:
            return ("own", repr(error))
    return "nobody noticed"


def _train(guard: unsilent.Guard, rank: int, error: BaseException | None = None) -> None:
    for step in range(4):
        if rank == 1 and step == 2:
            raise error or LookupError("the data loader's own mistake")
        guard.step(batch_of(rank, step))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("with", "LookupError: the data loader's own mistake"),
        ("close", "LookupError: the data loader's own mistake"),
        ("sys.exit", "SystemExit: 1"),
        ("atexit", "it ended without closing its guard"),
    ],
)
def test_a_rank_that_leaves_outside_a_step_is_known_to_the_others(
    pool3: RankPool, tmp_path: Path, how: str, words: str
) -> None:
    answers = pool3.run_until_death(_leaves, how, str(tmp_path))
    assert answers[1] is None if how == "atexit" else answers[1][0] == "own"
    for rank in (0, 2):
        assert answers[rank][0] == 1 and words in answers[rank][1], answers
    assert words in (tmp_path / "exit.json").read_text()


def test_others_that_wait_in_the_forward_leave_in_time_and_name_it_on_disk(pool3: RankPool, tmp_path: Path) -> None:
    """DDP's broadcast of buffers blocks without a future of ours: the watcher ends the process after ``timeout_s``."""
    answers = pool3.run_until_death(_leaves, "in forward", str(tmp_path), timeout=40.0)
    assert answers[1][0] == "own" and all(answer is None or answer[0] == 1 for answer in (answers[0], answers[2]))
    assert "LookupError: the data loader's own mistake" in (tmp_path / "exit.json").read_text()


def _all_raise(rank: int, size: int) -> str:
    """What all ranks raise together is no rank's failure, however far it goes."""
    model, _, optimizer = build(Job(), rank)
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            with guard_of(Job(), rank, model, optimizer) as guard:
                guard.load("/nowhere/at/all")
        except unsilent.CheckpointError:
            return f"{guard.world.watcher.posted} {guard.world.watcher.failure}"
    return "loaded"


def test_what_all_ranks_raise_together_blames_nobody(pool3: RankPool) -> None:
    assert pool3.results(_all_raise) == ["False None"] * 3


def _made_while_another_error_is_handled(rank: int, size: int) -> str:
    """A run that is started again from within a handler ends in order all the same."""
    try:
        raise ConnectionError("an earlier run's")
    except ConnectionError:
        model, _, optimizer = build(Job(), rank)
        with contextlib.redirect_stderr(io.StringIO()):
            guard = guard_of(Job(), rank, model, optimizer)
            guard.step(batch_of(rank, 0))
            guard.close()
    return f"{guard.world.watcher.posted} {guard.world.group}"


def test_a_guard_made_in_a_handler_closes_in_order(pool3: RankPool) -> None:
    assert pool3.results(_made_while_another_error_is_handled) == ["False None"] * 3


def test_an_update_that_raises_leaves_no_hook_on_the_optimizer() -> None:
    model, _, optimizer = build(Job(ddp=None), 0)
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(model, optimizer, loss_of(False, 0), config=unsilent.GuardConfig(node="here"))

        def broken(*_: Any, **__: Any) -> None:
            raise MemoryError("no room for the moments")

        step, optimizer.step = optimizer.step, broken  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            guard.step(batch_of(0, 0))
        assert not optimizer._optimizer_step_post_hooks
        optimizer.step = step  # type: ignore[method-assign]
        guard.close()
    gc.collect()
