"""How a step's samples are shared out over ranks, and what is kept of that when a run goes on with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from unsilent.errors import UsageError
from unsilent.training.data import TextData
from unsilent.training.loop import Options
from unsilent.weighing import mean_loss, share_of

TEXT = bytes(torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(0)).tolist())


def options(**more: Any) -> Options:
    return Options(out=Path("o"), **more)


def numbers(made: Options) -> tuple[int | None, int | None]:
    return made.global_batch, made.micro_batch


def test_the_global_batch_and_the_micro_batch_become_numbers() -> None:
    assert numbers(options(batch=2).shared_out(4, None)) == (8, 2)
    assert numbers(options(batch=4, accumulate=2).shared_out(3, None)) == (12, 2)
    assert numbers(options(global_batch=8).shared_out(3, None)) == (8, 3)
    assert numbers(options(global_batch=8, accumulate=2).shared_out(3, None)) == (8, 2)
    assert numbers(options(global_batch=8, micro_batch=1).shared_out(3, None)) == (8, 1)


def test_a_run_that_goes_on_keeps_both_unless_they_are_said_anew() -> None:
    earlier = {"global_batch": 8, "micro_batch": 2}
    assert numbers(options(batch=2).shared_out(3, earlier)) == (8, 2)
    assert numbers(options(batch=4, accumulate=4).shared_out(3, earlier)) == (8, 2)
    assert numbers(options(global_batch=12).shared_out(3, earlier)) == (12, 2)
    assert numbers(options(micro_batch=1).shared_out(3, earlier)) == (8, 1)
    assert numbers(options(batch=2).shared_out(3, {"batch": 5})) == (6, 2)  # of a version that did not note them


def test_what_is_asked_for_and_not_done_is_said() -> None:
    def told(ranks: int, **more: Any) -> str:
        asked = options(**more)
        return asked.overruled_by(asked.shared_out(ranks, {"global_batch": 8, "micro_batch": 2}), ranks)

    assert told(4, batch=2) == told(3) == told(3, global_batch=12) == told(2, accumulate=2) == ""
    assert "8 samples per step (--batch 2 on 3 ranks would be 6)" in told(3, batch=2)
    assert "micro-batches of 2 (--accumulate 4 would make them 1)" in told(2, batch=4, accumulate=4)
    fresh = options(batch=4, accumulate=2)
    assert fresh.overruled_by(fresh.shared_out(3, None), 3) == ""


def test_what_was_shared_out_is_the_same_on_the_same_ranks() -> None:
    once = options(batch=4, accumulate=2).shared_out(3, None)
    assert once.shared_out(3, None) == once


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"batch": 2, "global_batch": 8}, "--batch (samples per rank) and --global-batch (over all ranks) exclude"),
        ({"micro_batch": 2, "accumulate": 2}, "--micro-batch and --accumulate exclude one another"),
        ({"global_batch": 0}, "--global-batch is 0"),
        ({"micro_batch": 0}, "--micro-batch is 0"),
    ],
)
def test_what_contradicts_itself_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as refused:
        options(**given)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("total", "ranks", "micro_batch", "even"),
    [(8, 4, 2, True), (8, 4, 1, True), (8, 4, 9, True), (8, 3, 2, False), (12, 4, 2, False), (12, 3, 2, True), (5, 5, 1, True)],
)  # fmt: skip
def test_weights_are_needed_only_where_something_is_left_over(
    total: int, ranks: int, micro_batch: int, even: bool
) -> None:
    data = TextData(TEXT, sequence_length=16, global_batch=total, world_size=ranks)
    assert data.divides_into(micro_batch) is even
    shapes = {tuple(len(part) for part in data.batch(3, rank).split(micro_batch)) for rank in range(ranks)}
    assert (len(shapes) == 1 and len(set(next(iter(shapes)))) == 1) is even
    assert [data.count(rank) for rank in range(ranks)] == [len(data.batch(3, rank)) for rank in range(ranks)]


def test_a_loss_counts_by_its_weight_or_by_the_number_of_micro_batches() -> None:
    loss = torch.tensor(3.0)
    assert share_of(loss, weight=0.25, divide_by=2).item() == 0.75
    assert share_of(loss, weight=None, divide_by=2).item() == 1.5
    assert share_of(loss, weight=None, divide_by=1) is loss
    two = [torch.tensor(1.0), torch.tensor(4.0)]
    assert mean_loss(two, [None, None]).item() == 2.5
    assert mean_loss(two, [0.5, 0.25]).item() == pytest.approx(2.0)
    assert mean_loss(two[:1], [0.5]) is two[0]
