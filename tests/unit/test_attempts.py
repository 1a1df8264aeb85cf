"""What is held against a checkpoint after failures soon after its load, and how fast a poisoned row of them is given up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unsilent.checkpoint import CheckpointStore, Status, attempts, certify, checkpoints_in
from unsilent.checkpoint.files import write_certificate
from unsilent.checkpoint.store import Failure
from unsilent.errors import CheckpointError
from unsilent.inventory import Inventory

SAVED = 10  # a checkpoint after every so many steps


def _checkpoints(root: Path, count: int) -> CheckpointStore:
    """Directories that look like certified checkpoints, without any data."""
    for steps in range(SAVED, SAVED * count + 1, SAVED):
        path = root / f"step-{steps:08d}"
        path.mkdir(parents=True)
        write_certificate(path, replace(certify({}, steps=steps), status=Status.CERTIFIED))
    return CheckpointStore(root)


def _trusted(root: Path) -> list[int]:
    return [s.steps for s in checkpoints_in(root) if s.status is Status.CERTIFIED]


def _fail(store: CheckpointStore, steps: int, at: int) -> Failure:
    failure = None
    for count in range(1, attempts.LIMIT + 1):
        failure = store.failed_after_load(store.root / f"step-{steps:08d}", at, loaded=steps)
        assert failure is not None and failure.count == count
        assert bool(failure.distrusted) == (count == attempts.LIMIT)
    assert failure is not None
    return failure


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20, 100])
def test_many_poisoned_checkpoints_are_given_up_in_a_few_rounds(tmp_path: Path, count: int) -> None:
    store, bad_step = _checkpoints(tmp_path, count), SAVED * count + 3
    lost: list[int] = []
    while trusted := _trusted(tmp_path):
        failure = _fail(store, trusted[-1], bad_step)
        assert failure.distrusted[0] == trusted[-1]
        lost.append(len(failure.distrusted))
        assert f"step {bad_step}" in failure.reason
    assert sum(lost) == count and len(checkpoints_in(tmp_path)) == count  # none is deleted
    assert lost[:-1] == [2**n for n in range(len(lost) - 1)]
    assert len(lost) == math.ceil(math.log2(count + 1))
    with pytest.raises(CheckpointError, match="no checkpoint can be loaded") as error:
        store.load(Inventory(torch.nn.Linear(1, 1), None))
    assert len(str(error.value)) < 4000 and error.value.exit_code == 13
    assert count <= 8 or f"and {count - 8} more" in str(error.value)


def test_the_first_is_distrusted_alone(tmp_path: Path) -> None:
    store = _checkpoints(tmp_path, 4)
    assert _fail(store, 40, 43).distrusted == (40,)
    assert _trusted(tmp_path) == [10, 20, 30]


def test_a_run_that_has_got_past_it_begins_with_one_again(tmp_path: Path) -> None:
    store = _checkpoints(tmp_path, 9)
    for steps in (90, 80):
        _fail(store, steps, 93)
    assert _trusted(tmp_path) == list(range(10, 70, 10))
    for steps in (100, 110, 120):
        path = tmp_path / f"step-{steps:08d}"
        path.mkdir()
        write_certificate(path, replace(certify({}, steps=steps), status=Status.CERTIFIED))
    assert _fail(store, 120, 125).distrusted == (120,)


def test_the_same_step_counts_at_any_distance_once_a_newer_one_has_failed_there(tmp_path: Path) -> None:
    """Else a run that saves rarely would be started again from the older one for ever."""
    store = _checkpoints(tmp_path, 5)
    path = tmp_path / "step-00000030"
    assert store.failed_after_load(path, 52, loaded=30) is None and attempts.read(path) == {}
    _fail(store, 50, 52)
    assert store.failed_after_load(path, 51, loaded=30) is None
    _fail(store, 30, 52)


def test_one_without_a_certificate_and_one_whose_certificate_is_damaged(tmp_path: Path) -> None:
    store = _checkpoints(tmp_path, 4)
    damaged = next(s for s in checkpoints_in(tmp_path) if s.steps == 30)
    certificate = next(damaged.path.iterdir())
    certificate.write_text(certificate.read_text().replace("certified", "certifiee"))
    assert _fail(store, 40, 43).distrusted == (40,)
    assert _fail(store, 20, 43).distrusted == (20, 10)  # the damaged one is passed over anyway


def test_one_that_replaces_a_condemned_one_is_condemned_too(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir(), new.mkdir()
    attempts.condemn(old, "a newer one was poisoned")
    assert attempts.exhausted(old) == "" and attempts.distrusted(old) == "a newer one was poisoned"
    assert attempts.inherit(old, new) == "a newer one was poisoned"
    attempts.condemn(new, "another reason")
    assert attempts.distrusted(new) == "a newer one was poisoned"  # the first reason stays
    assert attempts.add(new, 3) == 1 and attempts.distrusted(new) == "a newer one was poisoned"
