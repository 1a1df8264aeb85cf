"""F15: one rank raises, the others wait in a collective for half an hour."""

import json
from functools import partial

import pytest

from tests.field.harness import EVERY_STEP, Case, Session, run, square, train
from unsilent.errors import RankFailure

STEP = 2
SECONDS = 20.0  # far below any collective's timeout, and enough for a machine under load

PARTS = [
    ("finite", "begin"),
    ("finite", "before_reduction"),
    ("finite", "before_update"),
    ("finite", "fill"),
    ("finite", "after_update"),
    ("replicas", "before_update"),
    ("replicas", "fill"),
    ("audit", "before_reduction"),
    ("audit", "record"),
    ("audit", "compare"),
    ("audit", "fill"),
]


def explode(*arguments: object, **more: object) -> None:
    raise ValueError("a bug in the check")


def sabotage(session: Session, step: int, check: str, method: str) -> None:
    if session.guard is not None and session.rank == 1 and step == STEP:
        setattr(getattr(session.guard, check), method, explode)


@pytest.mark.parametrize(("check", "method"), PARTS)
def test_all_ranks_raise_together_and_each_message_names_rank_1_and_its_reason(pool3, check, method):
    broken = partial(sabotage, check=check, method=method)
    results = run(pool3, Case(config={**EVERY_STEP, "on_guard_error": "raise"}, before_step=broken))
    for result in results:
        assert isinstance(result.error, RankFailure) and result.error.rank == 1, repr(result.error)
        assert str(result.error) == f"rank 1 failed: check {check}: ValueError: a bug in the check"
        assert result.steps == STEP + (method == "after_update") and result.last_step_s < SECONDS
        assert result.weights[-1] == result.weights[result.steps], "something was updated"


@pytest.mark.parametrize(("check", "method"), PARTS)
def test_or_the_check_goes_off_on_all_ranks_together_and_training_goes_on(pool3, check, method):
    broken = partial(sabotage, check=check, method=method)
    case = Case(config=EVERY_STEP, before_step=broken)
    for rank, (result, plain) in enumerate(zip(run(pool3, case), run(pool3, case, guarded=False), strict=True)):
        assert result.error is None and result.found == [] and result.bits == plain.bits
        if rank == 0:
            assert f"check {check} is off from step {STEP + (method == 'after_update')} on: on rank 1" in result.said
            assert "a bug in the check" in result.said


def test_the_record_on_disk_names_rank_1(pool3, tmp_path):
    broken = partial(sabotage, check="finite", method="fill")
    config = {**EVERY_STEP, "on_guard_error": "raise", "directory": str(tmp_path)}
    run(pool3, Case(config=config, before_step=broken))
    record = json.loads((tmp_path / "exit.json").read_text())
    assert record["exit_code"] == 70 and record["rank_failure"]["rank"] == 1
    assert "a bug in the check" in record["rank_failure"]["error"]


def square_but_not_on_rank_1(model, batch):
    import torch.distributed as dist

    loss = square(model, batch)
    if dist.get_rank() == 1 and square_but_not_on_rank_1.calls >= STEP:
        raise KeyError("a bad sample")
    square_but_not_on_rank_1.calls += 1
    return loss


square_but_not_on_rank_1.calls = 0


def test_an_error_of_the_users_own_code_wakes_the_others_out_of_the_jobs_collective(pool3):
    results = pool3.run_until_death(train, Case(loss=square_but_not_on_rank_1, config={"audit_every": None}))
    for rank, result in enumerate(results):
        assert result.steps == STEP and result.last_step_s < SECONDS
        if rank == 1:
            assert isinstance(result.error, KeyError)
        else:
            assert isinstance(result.error, RankFailure) and result.error.rank == 1
            assert "KeyError: 'a bad sample'" in str(result.error)
