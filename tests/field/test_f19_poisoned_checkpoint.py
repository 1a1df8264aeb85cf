"""F19: a bad checkpoint gives NaN some steps after each load; the tool must not blame devices and restart for ever."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unsilent
from unsilent.checkpoint import Status, attempts, checkpoints_in
from unsilent.errors import CheckpointError
from unsilent.records import Kind

ROWS, POISONED_ROW, BAD_STEP, END = 20, 7, 9, 12


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, 8), nn.Linear(8, 1)

    def forward(self, rows):
        return self.head(self.table(rows))


def square(model, rows):
    return model(rows).square().mean()


def rows_of(step: int, rank: int, bad_step: int) -> torch.Tensor:
    """The poisoned row is asked for in one step only, by everybody."""
    rows = torch.randint(POISONED_ROW, (6,), generator=torch.Generator().manual_seed(step * 10 + rank))
    if step == bad_step:
        rows[0] = POISONED_ROW
    return rows


@dataclass(frozen=True)
class Ended:
    loaded: int
    steps: int
    error: BaseException | None
    said: str
    weights: float


def restart(rank: int, size: int, root: str, poison_at: tuple[int, ...], bad_step: int = BAD_STEP) -> Ended:
    """One start of the job: load what there is, train, save after steps 4 and 8. A saving at one of the steps
    ``poison_at`` has a value in it that is finite, and far too large."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Table())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    said, error, loaded = io.StringIO(), None, 0
    config = unsilent.GuardConfig(node=f"node{rank}", save_every=4, replicas_every=4)
    with contextlib.redirect_stderr(said):
        guard = unsilent.Guard(model, optimizer, square, config=config)
        try:
            with guard:
                if Path(root).exists():
                    loaded = guard.load(root)
                for step in range(loaded, END):
                    guard.step(rows_of(step, rank, bad_step))
                    if guard.steps in (4, 8) and guard.steps != loaded:
                        if guard.steps in poison_at:
                            with torch.no_grad():
                                model.module.table.weight[POISONED_ROW] = 1e30
                        guard.save(root)
        except (unsilent.CorruptionError, CheckpointError) as caught:
            error = caught
    total = float(model.module.table.weight[:POISONED_ROW].double().sum())
    return Ended(loaded, guard.steps, error, said.getvalue(), total)


def assert_attempt(results: list[Ended], loaded: int, number: int, root: Path) -> None:
    for result in results:
        assert result.loaded == loaded and result.steps == BAD_STEP, result.said
        assert isinstance(result.error, unsilent.IntegrityLost)
        assert result.error.verdict.kind is Kind.SOFTWARE
        assert [s for s in result.error.verdict.suspects if s.device or s.node] == [], "a device is blamed"
        assert f"attempt {number} of 3 at this step" in str(result.error) and f"step-{loaded:08d}" in str(result.error)
    assert attempts.read(root / f"step-{loaded:08d}") == {BAD_STEP: number}


def test_attempts_are_bounded_and_one_checkpoint_further_back_is_taken(pool3, tmp_path):
    """Checkpoint 8 is poisoned, 4 is not."""
    root = tmp_path / "checkpoints"
    first = pool3.results(restart, str(root), (8,))
    assert all(type(r.error).__name__ == "IntegrityLost" and r.steps == BAD_STEP for r in first)
    for number in (1, 2, 3):
        results = pool3.results(restart, str(root), ())
        assert_attempt(results, loaded=8, number=number, root=root)
        trusted = "step-00000008" if number < 3 else "step-00000004"
        assert results[0].error.resume_from.endswith(trusted)
    assert "it is not loaded any more" in str(results[0].error)
    assert {s.steps: s.status for s in checkpoints_in(root)} == {4: Status.CERTIFIED, 8: Status.DISTRUSTED}
    results = pool3.results(restart, str(root), ())
    for result in results:
        assert (result.loaded, result.steps, result.error) == (4, END, None), result.said
        assert result.weights == results[0].weights
    assert "distrusted: after each of 3 loads the gradient was not finite at step 9" in results[0].said


def test_when_none_is_left_it_stops_with_a_clear_error(pool3, tmp_path):
    root = tmp_path / "checkpoints"
    pool3.results(restart, str(root), (4, 8))
    for loaded in (8, 4):
        for number in (1, 2, 3):
            assert_attempt(pool3.results(restart, str(root), ()), loaded=loaded, number=number, root=root)
    for result in pool3.results(restart, str(root), ()):
        assert isinstance(result.error, CheckpointError) and result.steps == 0
        assert "no checkpoint can be loaded" in str(result.error)
        for step in (4, 8):
            assert f"step-{step:08d}" in str(result.error)
        assert "after each of 3 loads the gradient was not finite at step 9" in str(result.error)


def start_again(rank: int, size: int, root: str, poison: bool) -> Ended:
    """One start of a job that saves after every step. The first start has the bad value in all that it saves."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Table())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    said, error, loaded = io.StringIO(), None, 0
    config = unsilent.GuardConfig(
        node=f"node{rank}", save_every=1, replicas_every=4, keep_checkpoints=50, snapshot_every=None
    )
    with contextlib.redirect_stderr(said):
        guard = unsilent.Guard(model, optimizer, square, config=config)
        if poison:
            with torch.no_grad():
                model.module.table.weight[POISONED_ROW] = 1e30
        try:
            with guard:
                if not poison:
                    loaded = guard.load(root)
                for step in range(loaded, END):
                    guard.step(rows_of(step, rank, BAD_STEP))
                    guard.save(root)
        except (unsilent.CorruptionError, CheckpointError) as caught:
            error = caught
    return Ended(loaded, guard.steps, error, said.getvalue(), 0.0)


def test_a_long_row_of_poisoned_checkpoints_is_given_up_fast_and_the_run_stops(pool3, tmp_path):
    """Nine of them: one is distrusted, then two at once, four, and what is left; the runs in between save them anew."""
    root, tried = tmp_path / "checkpoints", []
    pool3.results(start_again, str(root), True)
    assert [s.steps for s in checkpoints_in(root)] == list(range(1, BAD_STEP + 1))
    while len(tried) < 30:
        results = pool3.results(start_again, str(root), False)
        assert {type(r.error) for r in results} in ({unsilent.IntegrityLost}, {CheckpointError})
        if isinstance(results[0].error, CheckpointError):
            break
        assert results[0].error.verdict.suspects[0].device is None, "a device is blamed"
        tried.append(results[0].loaded)
    assert tried == [9] * 3 + [8] * 3 + [6] * 3 + [2] * 3
    assert [s.steps for s in checkpoints_in(root)] == list(range(1, BAD_STEP + 1))  # none is deleted
    assert {s.status for s in checkpoints_in(root)} == {Status.DISTRUSTED}
    for result in results:
        assert result.error.exit_code == 13 and "no checkpoint can be loaded" in str(result.error)


def test_a_checkpoint_without_a_certificate_is_bounded_too(tmp_path):
    for _ in range(attempts.LIMIT):
        assert attempts.exhausted(tmp_path) == ""
        attempts.add(tmp_path, 23)
    assert "step 23" in attempts.exhausted(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"failures": 3}', '{"failures": {"x": 1}}'])
def test_a_damaged_record_of_attempts_counts_as_none(tmp_path, text):
    (tmp_path / attempts.FILE).write_text(text)
    assert attempts.read(tmp_path) == {} and attempts.add(tmp_path, 3) == 1


def test_failures_at_other_steps_are_not_added_up(tmp_path):
    for step in range(5):
        attempts.add(tmp_path, step)
    assert attempts.exhausted(tmp_path) == ""


def test_long_after_the_load_the_checkpoint_is_not_held_to_be_the_cause(pool3, tmp_path):
    """A NaN from code eleven steps after the load says nothing against the checkpoint."""
    root = tmp_path / "checkpoints"
    pool3.results(stop_long_after_a_load, str(root))
    (kept,) = checkpoints_in(root)
    assert kept.status is not Status.DISTRUSTED and attempts.read(kept.path) == {}


def stop_long_after_a_load(rank: int, size: int, root: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Table())
    with contextlib.redirect_stderr(io.StringIO()):
        guard = unsilent.Guard(
            model, torch.optim.AdamW(model.parameters()), square, config=unsilent.GuardConfig(node=f"node{rank}")
        )
        with guard, contextlib.suppress(unsilent.IntegrityLost):
            guard.step(rows_of(0, rank, -1))
            guard.save(root)
            guard.load(root)
            for step in range(1, 20):
                if step == 11:
                    with torch.no_grad():
                        model.module.table.weight.fill_(float("nan"))
                guard.step(rows_of(step, rank, -1))
        guard.detach(together=False)
    assert guard.steps == 11
