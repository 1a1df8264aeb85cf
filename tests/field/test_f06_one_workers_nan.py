"""F6: one worker's NaN kills all: the mean spreads it, the step writes it everywhere, good checkpoints rotate away."""

from functools import partial

import pytest
import torch

from tests.field.harness import Case, Session, assert_stopped_before_update, mlp, noise, run
from unsilent.checkpoint import CheckpointStore, Status, checkpoints_in, verify
from unsilent.inventory import Inventory
from unsilent.records import Kind

BAD_STEP = 4


def spoiled(value: float, step: int, rank: int) -> torch.Tensor:
    batch = noise(step, rank)
    if step == BAD_STEP and rank == 1:
        batch[3, 5] = value
    return batch


def save_every_other(session: Session, step: int, root: str) -> None:
    if session.guard is not None and step and step % 2 == 0:
        session.guard.save(root)


@pytest.mark.parametrize("config", [{}, {"audit_every": 1, "replicas_every": 1}, {"audit_every": None}],
                         ids=["unplanned audit", "planned audit", "no planned audits at all"])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rank_1_is_named_before_the_reduction_and_nothing_is_updated(pool3, value, config):
    found = assert_stopped_before_update(run(pool3, Case(batch=partial(spoiled, value), config=config)), BAD_STEP)
    assert found.ranks == [1] and found.verdict.suspects[0].path == "batch" and found.devices == []
    assert found.verdict.kind is Kind.SOFTWARE and "NaN or Inf in the local gradient" in found.verdict.reason
    assert "rank 1" in found.verdict.reason


def test_no_checkpoint_is_written_and_the_last_good_one_is_kept(pool3, tmp_path):
    root = tmp_path / "checkpoints"
    case = Case(
        batch=partial(spoiled, float("nan")), before_step=partial(save_every_other, root=str(root)),
        config={"save_every": 2, "keep_checkpoints": 1, "directory": str(tmp_path / "run")},
    )  # fmt: skip
    results = run(pool3, case)
    assert_stopped_before_update(results, BAD_STEP)
    (kept,) = checkpoints_in(root)
    assert kept.steps == BAD_STEP and kept.status is Status.CERTIFIED and verify(kept.path) == []
    assert results[0].error.resume_from == str(kept.path)
    inventory = Inventory(mlp(), None)
    inventory.optimizer = torch.optim.AdamW(inventory.model.parameters())
    CheckpointStore(root).load(inventory)
    assert all(bool(torch.isfinite(p).all()) for p in inventory.model.parameters())


def test_a_device_that_made_the_nan_is_named_instead_and_the_step_is_repaired(pool3):
    fault = {"site": "backward", "target": "2", "pattern": "nan", "rank": 1, "step": BAD_STEP}
    reference = run(pool3, Case(guarded=False))
    for result, clean in zip(run(pool3, Case(fault=fault)), reference, strict=True):
        assert result.error is None and result.bits == clean.bits
        assert result.only.verdict.kind is Kind.TRANSIENT and result.only.ranks == [1]
        assert result.only.devices and result.only.action == "REPAIR" and result.only.step == BAD_STEP


def test_observing_names_rank_1_too_and_changes_nothing(pool3):
    case = Case(batch=partial(spoiled, float("nan")), config={"mode": "observe"}, steps=BAD_STEP + 1)
    for result, plain in zip(run(pool3, case), run(pool3, case, guarded=False), strict=True):
        assert result.error is None and result.bits == plain.bits
        assert result.only.ranks == [1] and result.only.action == "CONTINUE"
