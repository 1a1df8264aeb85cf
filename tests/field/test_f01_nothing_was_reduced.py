"""F1: a layer is unused in forward and DDP was not told: no bucket completes, and the optimizer steps on local gradients."""

import pytest
import torch.distributed as dist
from torch import nn

from tests.field.harness import Case, assert_quiet, assert_stopped_before_update, run, train
from unsilent.errors import RankFailure
from unsilent.records import Kind


class TwoHeads(nn.Module):
    """Only ``used`` takes part; ``idle`` comes first or last, so that it lies in the last or in the first bucket."""

    def __init__(self, idle_first: bool) -> None:
        super().__init__()
        if idle_first:
            self.idle = nn.Linear(16, 4)
        self.used = nn.Linear(16, 4)
        if not idle_first:
            self.idle = nn.Linear(16, 4)

    def forward(self, x):
        return self.used(x)


def idle_first() -> nn.Module:
    return TwoHeads(True)


def idle_last() -> nn.Module:
    return TwoHeads(False)


@pytest.mark.parametrize("model", [idle_first, idle_last])
@pytest.mark.parametrize("ddp", [{}, {"bucket_cap_mb": 1e-5}], ids=["one bucket", "several buckets"])
def test_it_is_found_in_that_very_step_and_no_rank_is_blamed(pool3, model, ddp):
    results = run(pool3, Case(model=model, ddp=ddp, steps=1))
    found = assert_stopped_before_update(results, step=0)
    assert found.verdict.kind is Kind.SOFTWARE and found.verdict.suspects == ()
    assert "gradients were not reduced" in found.verdict.reason
    assert set(found.verdict.tensors) == {"used.weight", "used.bias"}


class OtherOnRank1(TwoHeads):
    """What is used depends on the rank: the others wait in their backward for what rank 1 never reduces."""

    def __init__(self) -> None:
        super().__init__(idle_first=False)

    def forward(self, x):
        return self.used(x) if dist.get_rank() == 1 else self.used(x) + self.idle(x)


def test_where_one_rank_alone_leaves_a_layer_out_nobody_waits_for_ever(pool3):
    """Without a guard this hangs until the collective's timeout, half an hour."""
    results = pool3.run_until_death(train, Case(model=OtherOnRank1, steps=1, config={"timeout_s": 6.0}))
    for rank, result in enumerate(results):
        assert result.steps == 0 and result.weights[-1] == result.weights[0] and result.last_step_s < 20.0
        assert isinstance(result.error, RankFailure) == (rank != 1), repr(result.error)
        assert "gradients were not reduced on this rank (used.weight, used.bias)" in str(result.error)
        assert "rank 1 failed" in str(result.error) or rank == 1


def test_with_find_unused_parameters_the_same_model_is_quiet(pool3):
    assert_quiet(pool3, Case(model=idle_last, ddp={"find_unused_parameters": True}, config={"audit_every": 2}))
