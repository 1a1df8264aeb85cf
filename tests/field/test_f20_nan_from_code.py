"""F20: a deterministic NaN from code, on any rank that gets that batch."""

from functools import partial

import pytest
import torch

from tests.field.harness import Case, assert_stopped_before_update, noise, run
from unsilent.records import Kind

BAD_STEP = 3


def marked(ranks: tuple[int, ...], step: int, rank: int) -> torch.Tensor:
    """The batch that the code cannot bear goes to these ranks."""
    batch = noise(step, rank)
    if step == BAD_STEP and rank in ranks:
        batch[0, 0] = 50.0
    return batch


def root(model, batch):
    """A bug: for an unusual input, the square root of a negative number."""
    loss = model(batch).square().mean()
    return loss + (loss + 40.0 - batch[0, 0]).sqrt()


@pytest.mark.parametrize("config", [{}, {"audit_every": 1}], ids=["unplanned audit", "planned audit"])
@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1), (0, 1, 2)])
def test_the_neighbour_reproduces_it_and_no_device_is_blamed(pool3, ranks, config):
    found = assert_stopped_before_update(
        run(pool3, Case(batch=partial(marked, ranks), loss=root, config=config)), BAD_STEP
    )
    assert found.verdict.kind is Kind.SOFTWARE and found.devices == []
    assert sorted(found.ranks) == list(ranks) and {s.path for s in found.verdict.suspects} == {"batch"}
    assert "got the same bits from the same batch" in found.verdict.reason
    assert "no device is blamed" in found.verdict.reason
